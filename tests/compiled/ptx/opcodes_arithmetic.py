"""Translation of arithmetic, comparisons, choices, moves and conversions."""

from functools import partialmethod
from typing import Any

from tests.compiled.ptx.emitter import Emitter, items
from tests.compiled.ptx.text import WIDTHS, Imm, Ins, PtxError, Reg, Vec

_COMPARE = {"eq": "{} == {}", "ne": "{} != {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}"}
_COMPARE |= {"lo": "{} < {}", "ls": "{} <= {}", "hi": "{} > {}", "hs": "{} >= {}"}
# NaN makes the first false, and those with "u" true.
_COMPARE_FLOATS = _COMPARE | {"ne": "({0} < {1}) | ({0} > {1})", "equ": "~(({0} < {1}) | ({0} > {1}))"}
_COMPARE_FLOATS |= {"ltu": "~({} >= {})", "leu": "~({} > {})", "gtu": "~({} <= {})", "geu": "~({} < {})"}
_COMPARE_FLOATS |= {"neu": "{} != {}", "nan": "np.isnan({}) | np.isnan({})", "num": "~(np.isnan({}) | np.isnan({}))"}
_ROUNDINGS = {"rzi": "trunc", "rni": "rint", "rmi": "floor", "rpi": "ceil"}


class Arithmetic(Emitter):
    """`op_X` writes what the opcode X does."""

    def compute(self, i: Ins, d: Reg, *args: Any, form: str, function: str = "") -> None:
        """Write a result of the instruction's type.

        Args:
            form: the expression, with a pair of braces for each operand.
            function: what it is for floats of 16 bits, of arrays in fp64.
        """
        kind = i.op[-1]
        values = [self.value(x, kind) for x in args]
        if kind.startswith(("f16", "bf16")):
            if "relu" in i.op:
                function = f"lambda *x: np.maximum(({function})(*x), 0)"
            helper = "halves" if kind.endswith("x2") else "single16"
            return self.write(d, f"{helper}({function}, {kind.removesuffix('x2')!r}, {', '.join(values)})")
        flushed = "flush({})" if "ftz" in i.op else "{}"
        text = flushed.format(form.format(*(flushed.format(x) for x in values)))
        if "relu" in i.op:
            text = f"np.maximum({text}, {self.value(Imm(0, 0), kind)})"
        if "sat" in i.op:
            if "f" not in kind:
                raise PtxError("saturation")
            text = f"np.clip({text}, {kind}(0), {kind}(1))"
        return self.write(d, self.back(text, kind))

    def product(self, i: Ins, a: Any, b: Any) -> tuple[str, int]:
        kind = i.op[-1]
        width = WIDTHS[kind]
        if "wide" in i.op:
            wide = f"{'i' if kind[0] == 's' else 'u'}{2 * width}"
            x, y = self.value(a, kind), self.value(b, kind)
            return f"({x}.astype({wide}) * {y}.astype({wide})).view(u{2 * width})", 2 * width
        if "hi" in i.op:
            return f"mulhi({self.value(a, kind)}, {self.value(b, kind)}).view(u{width})", width
        return f"{self.bits(a, width)} * {self.bits(b, width)}", width

    def op_mul(self, i: Ins, d: Reg, a: Any, b: Any) -> None:
        if "f" in i.op[-1]:
            self.compute(i, d, a, b, form="{} * {}", function="np.multiply")
        else:
            self.write(d, self.product(i, a, b)[0])

    def op_mad(self, i: Ins, d: Reg, a: Any, b: Any, c: Any) -> None:
        if "f" in i.op[-1]:
            return self.op_fma(i, d, a, b, c)
        text, width = self.product(i, a, b)
        return self.write(d, f"{text} + {self.bits(c, width)}")

    def op_fma(self, i: Ins, d: Reg, *args: Any) -> None:
        form = "fma32({}, {}, {})" if i.op[-1] == "f32" else "{} * {} + {}"
        self.compute(i, d, *args, form=form, function="lambda x, y, z: x * y + z")

    def op_div(self, i: Ins, d: Reg, a: Any, b: Any) -> None:
        self.compute(i, d, a, b, form="{} / {}" if "f" in i.op[-1] else "divide({}, {})")

    def shift(self, i: Ins, d: Reg, a: Any, n: Any, *, name: str, sign: str) -> None:
        width = WIDTHS[i.op[-1]]
        if isinstance(n, Imm) and 0 <= n.bits < width:
            self.compute(i, d, a, n, form=f"{{}} {sign} {{}}")
        else:
            self.compute(i, d, a, form=f"{name}({{}}, {self.bits(n, 32)})")

    def op_shf(self, i: Ins, d: Reg, *args: Any) -> None:
        self.compute(i, d, *args, form=f"shf({{}}, {{}}, {{}}, {i.op[1] == 'l'}, {'wrap' in i.op})")

    def op_lop3(self, i: Ins, d: Reg, a: Any, b: Any, c: Any, table: Imm) -> None:
        self.compute(i, d, a, b, c, form=f"lop3({{}}, {{}}, {{}}, {table.bits})")

    def extreme(self, i: Ins, d: Reg, *args: Any, name: str) -> None:
        function = f"np.f{name}" if "f" in i.op[-1] and "NaN" not in i.op else f"np.{name}imum"
        form = f"{function}({{}}, {{}})" if len(args) == 2 else f"{function}({function}({{}}, {{}}), {{}})"
        self.compute(i, d, *args, form=form, function=function)

    op_add = partialmethod(compute, form="{} + {}", function="np.add")
    op_sub = partialmethod(compute, form="{} - {}", function="np.subtract")
    op_rem = partialmethod(compute, form="remainder({}, {})")
    op_and = partialmethod(compute, form="{} & {}")
    op_or = partialmethod(compute, form="{} | {}")
    op_xor = partialmethod(compute, form="{} ^ {}")
    op_not = partialmethod(compute, form="~{}")
    op_copysign = partialmethod(compute, form="np.copysign({1}, {0})")
    op_shl = partialmethod(shift, name="shl", sign="<<")
    op_shr = partialmethod(shift, name="shr", sign=">>")
    op_min = partialmethod(extreme, name="min")
    op_max = partialmethod(extreme, name="max")
    op_bfe = partialmethod(compute, form="bfe({}, {}, {})")
    op_bfi = partialmethod(compute, form="bfi({}, {}, {}, {})")
    op_prmt = partialmethod(compute, form="prmt({}, {}, {})")

    # ---- comparisons, choices, moves

    def op_setp(self, i: Ins, d: Any, a: Any, b: Any, c: Any = None) -> None:
        kind = i.op[-1]
        form = (_COMPARE_FLOATS if "f" in kind else _COMPARE)[i.op[1]]
        targets = items(d)
        if kind in ("f16x2", "bf16x2"):
            for target, take in zip(targets, ("low16", "high16"), strict=False):
                self.write(target, form.format(*(f"widen({take}({self.bits(v, 32)}), {kind[:-2]!r})" for v in (a, b))))
            return
        x, y = self.value(a, kind), self.value(b, kind)
        if kind in ("f16", "bf16"):
            x, y = f"widen({x}, {kind!r})", f"widen({y}, {kind!r})"
        if "ftz" in i.op:
            x, y = f"flush({x})", f"flush({y})"
        sign = {"and": "&", "or": "|", "xor": "^"}.get(i.op[2])
        self.emit(f"t = {form.format(x, y)}")
        extra = f" {sign} {self.bits(c, 1)}" if sign else ""
        self.write(targets[0], f"t{extra}")
        if len(targets) > 1:
            self.write(targets[1], f"~t{extra}")

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

    def op_cvta(self, i: Ins, d: Reg, a: Any) -> None:
        if "shared" in i.op:
            raise PtxError("generic addresses of shared memory")
        self.write(d, self.bits(a, WIDTHS[i.op[-1]]))

    # ---- conversions

    def op_cvt(self, i: Ins, d: Reg, *args: Any) -> None:
        to, of = i.op[-2], i.op[-1]
        modes = set(i.op[1:-2])
        if to in ("f16x2", "bf16x2"):
            self.convert_pair(d, to[:-2], modes, args)
        elif to == "tf32":
            self.write(d, f"to_tf32({self.value(args[0], 'f32')})")
        elif of in ("f16", "bf16"):
            self.convert_float(d, f"widen({self.value(args[0], of)}, {of!r})", "f32", to, modes)
        elif of in ("f32", "f64"):
            self.convert_float(d, self.value(args[0], of), of, to, modes)
        else:
            self.convert_integer(d, self.value(args[0], of), of, to, modes)

    def convert_pair(self, d: Reg, kind: str, modes: set[str], args: tuple[Any, ...]) -> None:
        if "satfinite" in modes:
            raise PtxError("satfinite")
        name = f"f32_to_{kind}" + ("_rz" if "rz" in modes else "")
        x, y = (self.value(v, "f32") for v in args)
        if "relu" in modes:
            x, y = f"np.maximum({x}, f32(0))", f"np.maximum({y}, f32(0))"
        self.write(d, f"pack16({name}({x}), {name}({y}))")

    def convert_float(self, d: Reg, x: str, of: str, to: str, modes: set[str]) -> None:
        rounding = next((mode for mode in modes if mode in _ROUNDINGS), None)
        if to in ("f16", "bf16"):
            narrow = f"narrow64({x}, {to!r})"
            self.write(d, narrow if of == "f64" else f"f32_to_{to}{'_rz' if 'rz' in modes else ''}({x})")
        elif to in ("f32", "f64"):
            text = f"np.{_ROUNDINGS[rounding]}({x})" if rounding else f"{x}.astype({to})"
            if "sat" in modes:
                text = f"np.clip({text}, {to}(0), {to}(1))"
            self.write(d, self.back(f"flush({text})" if "ftz" in modes and to == "f32" else text, to))
        else:
            width = WIDTHS[to]
            text = f"to_integer(np.{_ROUNDINGS[rounding]}({x}.astype(f64)), {width}, {to[0] == 's'})"
            self.result(d, text, width, to[0] == "s")

    def convert_integer(self, d: Reg, x: str, of: str, to: str, modes: set[str]) -> None:
        width, wide = WIDTHS[to], max(WIDTHS[to], WIDTHS[of])
        if to in ("f32", "f64"):
            self.write(d, self.back(f"{x}.astype({to})", to))
        elif to in ("f16", "bf16"):
            self.write(d, f"narrow64({x}.astype(f64), {to!r})")
        elif "sat" in modes:
            kind = f"np.iinfo({'i' if to[0] == 's' else 'u'}{width})"
            self.result(d, f"np.clip({x}, {kind}.min, {kind}.max).astype(u{width})", width, to[0] == "s")
        else:
            if of[0] == "s":
                x = f"{x}.astype(i{wide}).view(u{wide})"
            self.result(d, f"{x}.astype(u{width})", width, to[0] == "s")


_UNARY = {"neg": "np.negative", "abs": "np.abs", "ex2": "np.exp2", "lg2": "np.log2", "sin": "np.sin", "cos": "np.cos"}
_UNARY |= {"tanh": "np.tanh", "sqrt": "np.sqrt", "rsqrt": "rsqrt", "rcp": "np.reciprocal"}
_UNARY |= {"clz": "clz", "popc": "popc", "brev": "brev"}
for _name, _function in _UNARY.items():
    setattr(Arithmetic, f"op_{_name}", partialmethod(Arithmetic.compute, form=f"{_function}({{}})", function=_function))
