"""Translation of arithmetic, comparisons, choices, moves and conversions."""

from functools import partialmethod
from typing import Any

from tests.compiled.ptx.emitter import Emitter, items
from tests.compiled.ptx.text import WIDTHS, Imm, Ins, PtxError, Reg, Vec

_MODIFIERS = {"rn", "full", "approx", "ftz", "lo", "hi", "wide", "relu"}  # whatever else stands there raises
_COMPARE = {"eq": "{} == {}", "ne": "{} != {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}"}
# NaN makes the first false, and those with "u" true.
_COMPARE_FLOATS = _COMPARE | {"ne": "({0} < {1}) | ({0} > {1})", "equ": "~(({0} < {1}) | ({0} > {1}))"}
_COMPARE_FLOATS |= {"ltu": "~({} >= {})", "leu": "~({} > {})", "gtu": "~({} <= {})", "geu": "~({} < {})"}
_COMPARE_FLOATS |= {"neu": "{} != {}", "num": "({0} == {0}) & ({1} == {1})"}


class Arithmetic(Emitter):
    """`op_X` writes what the opcode X does."""

    def compute(self, i: Ins, d: Reg, *args: Any, form: str, function: str = "") -> None:
        """Write a result of the instruction's type.

        Args:
            form: the expression, with a pair of braces for each operand.
            function: what it is for floats of 16 bits, of arrays in fp64.
        """
        if unknown := {*i.op[1:-1]} - _MODIFIERS:
            raise PtxError(f"modifier {', '.join(unknown)}")
        kind = i.op[-1]
        values = [self.value(x, kind) for x in args]
        if kind.startswith(("f16", "bf16")):
            if not function or "ftz" in i.op or "relu" in i.op:
                raise PtxError("floats of 16 bits")
            helper = "halves" if kind.endswith("x2") else "single16"
            return self.write(d, f"{helper}({function}, {kind.removesuffix('x2')!r}, {', '.join(values)})")
        flushed = "flush({})" if "ftz" in i.op else "{}"
        text = flushed.format(form.format(*(flushed.format(x) for x in values)))
        if "relu" in i.op:
            text = f"np.maximum({text}, {self.value(Imm(0), kind)})"
        return self.write(d, self.back(text, kind))

    def product(self, i: Ins, a: Any, b: Any) -> tuple[str, int]:
        kind = i.op[-1]
        width = WIDTHS[kind]
        if "wide" in i.op:
            wide = f"{'i' if kind[0] == 's' else 'u'}{2 * width}"
            x, y = self.value(a, kind), self.value(b, kind)
            return f"({x}.astype({wide}) * {y}.astype({wide})).view(u{2 * width})", 2 * width
        if "hi" in i.op:
            if kind != "u32":
                raise PtxError("the high half of a product")
            return f"mulhi({self.bits(a, width)}, {self.bits(b, width)})", width
        return f"{self.bits(a, width)} * {self.bits(b, width)}", width

    def op_mul(self, i: Ins, d: Reg, a: Any, b: Any) -> None:
        if "f" in i.op[-1]:
            self.compute(i, d, a, b, form="{} * {}", function="np.multiply")
        else:
            self.write(d, self.product(i, a, b)[0])

    def op_mad(self, i: Ins, d: Reg, a: Any, b: Any, c: Any) -> None:
        text, width = self.product(i, a, b)
        self.write(d, f"{text} + {self.bits(c, width)}")

    def op_fma(self, i: Ins, d: Reg, *args: Any) -> None:
        if i.op[-1] == "f64":
            raise PtxError("fma of fp64")
        self.compute(i, d, *args, form="fma32({}, {}, {})", function="lambda x, y, z: x * y + z")

    def op_div(self, i: Ins, d: Reg, a: Any, b: Any) -> None:
        if i.op[-1][0] == "u":
            raise PtxError("unsigned division")
        self.compute(i, d, a, b, form="{} / {}" if "f" in i.op[-1] else "divide({}, {})")

    def op_rem(self, i: Ins, d: Reg, a: Any, b: Any) -> None:
        if i.op[-1][0] != "s":
            raise PtxError("a remainder that is not signed")
        self.compute(i, d, a, b, form="{0} - divide({0}, {1}) * {1}")

    def shift(self, i: Ins, d: Reg, a: Any, n: Any, *, name: str, sign: str) -> None:
        width = WIDTHS[i.op[-1]]
        if isinstance(n, Imm) and 0 <= n.bits < width:
            self.compute(i, d, a, n, form=f"{{}} {sign} {{}}")
        else:
            self.compute(i, d, a, form=f"{name}({{}}, {self.bits(n, 32)})")

    def extreme(self, i: Ins, d: Reg, a: Any, b: Any, *, name: str) -> None:
        function = f"np.f{name}" if "f" in i.op[-1] else f"np.{name}imum"
        self.compute(i, d, a, b, form=f"{function}({{}}, {{}})", function=function)

    op_add = partialmethod(compute, form="{} + {}", function="np.add")
    op_sub = partialmethod(compute, form="{} - {}", function="np.subtract")
    op_and = partialmethod(compute, form="{} & {}")
    op_or = partialmethod(compute, form="{} | {}")
    op_xor = partialmethod(compute, form="{} ^ {}")
    op_not = partialmethod(compute, form="~{}")
    op_neg = partialmethod(compute, form="np.negative({})", function="np.negative")
    op_abs = partialmethod(compute, form="np.abs({})", function="np.abs")
    op_ex2 = partialmethod(compute, form="np.exp2({})", function="np.exp2")
    op_rsqrt = partialmethod(compute, form="rsqrt({})")
    op_shl = partialmethod(shift, name="shl", sign="<<")
    op_shr = partialmethod(shift, name="shr", sign=">>")
    op_min = partialmethod(extreme, name="min")
    op_max = partialmethod(extreme, name="max")
    op_bfe = partialmethod(compute, form="bfe({}, {}, {})")
    op_prmt = partialmethod(compute, form="prmt({}, {}, {})")

    # ---- comparisons, choices, moves

    def op_setp(self, i: Ins, d: Any, a: Any, b: Any) -> None:
        if len(i.op) != 3:
            raise PtxError("a comparison with a modifier")
        kind = i.op[-1]
        form = (_COMPARE_FLOATS if "f" in kind else _COMPARE)[i.op[1]]
        if kind in ("f16x2", "bf16x2"):
            for target, take in zip(items(d), ("low16", "high16"), strict=True):
                self.write(target, form.format(*(f"widen({take}({self.bits(v, 32)}), {kind[:-2]!r})" for v in (a, b))))
            return
        x, y = self.value(a, kind), self.value(b, kind)
        if kind in ("f16", "bf16"):
            x, y = f"widen({x}, {kind!r})", f"widen({y}, {kind!r})"
        self.write(d, form.format(x, y))

    def op_selp(self, i: Ins, d: Reg, a: Any, b: Any, p: Any) -> None:
        width = WIDTHS[i.op[-1]]
        self.write(d, f"np.where({self.bits(p, 1)}, {self.bits(a, width)}, {self.bits(b, width)})")

    def op_mov(self, i: Ins, d: Any, a: Any) -> None:
        width = WIDTHS[i.op[-1]]
        if isinstance(d, Vec):
            part = width // len(d.items)
            self.emit(f"t = {self.bits(a, width)}")
            for n, item in enumerate(d.items):
                if item is not None:
                    self.write(item, f"(t >> {self.constant(n * part, width)}).astype(u{item.width})")
        elif isinstance(a, Vec):
            part = width // len(a.items)
            pieces = []
            for n, item in enumerate(a.items):
                text = f"{self.bits(item, part)}.astype(u{width})"
                pieces.append(f"({text} << {self.constant(n * part, width)})" if n else text)
            self.write(d, " | ".join(pieces))
        else:
            self.write(d, self.bits(a, width))

    # ---- conversions

    def op_cvt(self, i: Ins, d: Reg, *args: Any) -> None:
        *modes, to, of = i.op[1:]
        values = [self.value(x, of) for x in args]
        if (modes, to, of) == (["rna"], "tf32", "f32"):
            self.write(d, f"f32_to_tf32({values[0]})")
            return
        if modes not in ([], ["rn"]):
            raise PtxError(f"conversion {modes}")
        if to in ("f16x2", "bf16x2") and of == "f32":
            self.write(d, "pack16({0}({1}), {0}({2}))".format(f"f32_to_{to[:-2]}", *values))
        elif to in ("f16", "bf16") and of == "f32":
            self.write(d, f"f32_to_{to}({values[0]})")
        elif to == "f32":
            text = f"widen({values[0]}, {of!r})" if of in ("f16", "bf16") else f"{values[0]}.astype(f32)"
            self.write(d, self.back(text, to))
        elif "f" in to + of:
            raise PtxError("conversion")
        else:
            x, width = values[0], WIDTHS[to]
            if of[0] == "s":
                wide = max(width, WIDTHS[of])
                x = f"{x}.astype(i{wide}).view(u{wide})"
            self.result(d, f"{x}.astype(u{width})", width, to[0] == "s")
