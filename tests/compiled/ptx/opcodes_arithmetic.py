"""Translation of arithmetic: integers, floats of 16, 32 and 64 bits, and pairs of 16."""

from functools import partialmethod
from typing import Any

from tests.compiled.ptx.emitter import Emitter
from tests.compiled.ptx.text import WIDTHS, Imm, Ins, PtxError, Reg

_NUMPY = {"u": "u", "b": "u", "s": "i"}


class Arithmetic(Emitter):
    """`op_X` writes what the opcode X does."""

    def binary(self, i: Ins, d: Reg, a: Any, b: Any, *, sign: str, function: str) -> None:
        kind = i.op[-1]
        if kind == "f32" or kind == "f64":
            x, y = self.value(a, kind), self.value(b, kind)
            if "ftz" in i.op:
                x, y = f"flush({x})", f"flush({y})"
            text = f"{x} {sign} {y}"
            if "ftz" in i.op:
                text = f"flush({text})"
            if "sat" in i.op:
                text = f"np.clip({text}, {kind}(0), {kind}(1))"
            self.write(d, self.back(text, kind))
        elif kind in ("f16x2", "bf16x2"):
            self.write(d, f"halves(np.{function}, {kind[:-2]!r}, {self.bits(a, 32)}, {self.bits(b, 32)})")
        elif kind in ("f16", "bf16"):
            self.write(d, f"single16(np.{function}, {kind!r}, {self.bits(a, 16)}, {self.bits(b, 16)})")
        else:
            if "sat" in i.op:
                raise PtxError("saturation")
            width = WIDTHS[kind]
            self.write(d, f"{self.bits(a, width)} {sign} {self.bits(b, width)}")

    def product(self, i: Ins, a: Any, b: Any) -> tuple[str, int]:
        kind = i.op[-1]
        width = WIDTHS[kind]
        if "wide" in i.op:
            wide = f"{_NUMPY[kind[0]]}{2 * width}"
            x, y = self.value(a, kind), self.value(b, kind)
            return f"({x}.astype({wide}) * {y}.astype({wide})).view(u{2 * width})", 2 * width
        if "hi" in i.op:
            return f"mulhi({self.value(a, kind)}, {self.value(b, kind)}, {width}).view(u{width})", width
        return f"{self.bits(a, width)} * {self.bits(b, width)}", width

    def op_mul(self, i: Ins, d: Reg, a: Any, b: Any) -> None:
        if "f" in i.op[-1]:
            self.binary(i, d, a, b, sign="*", function="multiply")
        else:
            self.write(d, self.product(i, a, b)[0])

    def op_mad(self, i: Ins, d: Reg, a: Any, b: Any, c: Any) -> None:
        if "f" in i.op[-1]:
            return self.op_fma(i, d, a, b, c)
        text, width = self.product(i, a, b)
        self.write(d, f"{text} + {self.bits(c, width)}")

    def op_fma(self, i: Ins, d: Reg, a: Any, b: Any, c: Any) -> None:
        kind = i.op[-1]
        values = [self.value(x, kind) for x in (a, b, c)]
        if kind == "f32":
            if "ftz" in i.op:
                values = [f"flush({x})" for x in values]
            text = f"fma32({', '.join(values)})"
            self.write(d, self.back(f"flush({text})" if "ftz" in i.op else text, kind))
        elif kind == "f64":
            self.write(d, self.back(f"{values[0]} * {values[1]} + {values[2]}", kind))
        else:
            function = "lambda x, y, z: x * y + z" if "relu" not in i.op else "lambda x, y, z: np.maximum(x * y + z, 0)"
            helper = "halves" if kind.endswith("x2") else "single16"
            self.write(d, f"{helper}({function}, {kind.removesuffix('x2')!r}, {', '.join(values)})")

    def op_div(self, i: Ins, d: Reg, a: Any, b: Any) -> None:
        kind = i.op[-1]
        if "f" in kind:
            text = f"{self.value(a, kind)} / {self.value(b, kind)}"
            self.write(d, self.back(f"flush({text})" if "ftz" in i.op else text, kind))
        else:
            self.write(d, self.back(f"divide({self.value(a, kind)}, {self.value(b, kind)})", kind))

    def op_rem(self, i: Ins, d: Reg, a: Any, b: Any) -> None:
        self.write(d, self.back(f"remainder({self.value(a, i.op[-1])}, {self.value(b, i.op[-1])})", i.op[-1]))

    def logic(self, i: Ins, d: Reg, a: Any, b: Any, *, sign: str) -> None:
        width = WIDTHS[i.op[-1]]
        self.write(d, f"{self.bits(a, width)} {sign} {self.bits(b, width)}")

    def op_not(self, i: Ins, d: Reg, a: Any) -> None:
        self.write(d, f"~{self.bits(a, WIDTHS[i.op[-1]])}")

    def shift(self, i: Ins, d: Reg, a: Any, n: Any, *, name: str, sign: str) -> None:
        kind = i.op[-1]
        width = WIDTHS[kind]
        x = self.value(a, kind)
        if isinstance(n, Imm) and 0 <= n.bits < width:
            amount = self.constant(n.bits, width)
            text = f"{x} {sign} {amount}" + (f".view(i{width})" if kind[0] == "s" else "")
        else:
            text = f"{name}({x}, {self.bits(n, 32)}, {width})"
        self.write(d, self.back(text, kind))

    def op_shf(self, i: Ins, d: Reg, a: Any, b: Any, n: Any) -> None:
        args = ", ".join(self.bits(x, 32) for x in (a, b, n))
        self.write(d, f"shf({args}, {i.op[1] == 'l'}, {'wrap' in i.op})")

    def op_bfe(self, i: Ins, d: Reg, a: Any, pos: Any, length: Any) -> None:
        kind = i.op[-1]
        width = WIDTHS[kind]
        signed = kind[0] == "s"
        if isinstance(pos, Imm) and isinstance(length, Imm) and length.bits > 0 and pos.bits + length.bits <= width:
            up, down = width - pos.bits - length.bits, width - length.bits
            text = f"({self.bits(a, width)} << {self.constant(up, width)})"
            if signed:
                text = f"({text}.view(i{width}) >> {self.constant(down, width)}.view(i{width})).view(u{width})"
            else:
                text = f"{text} >> {self.constant(down, width)}"
            return self.write(d, text)
        args = f"{self.bits(a, width)}, {self.bits(pos, 32)}, {self.bits(length, 32)}"
        return self.write(d, f"bfe({args}, {width}, {signed})")

    def op_bfi(self, i: Ins, d: Reg, a: Any, b: Any, pos: Any, length: Any) -> None:
        width = WIDTHS[i.op[-1]]
        args = ", ".join((self.bits(a, width), self.bits(b, width), self.bits(pos, 32), self.bits(length, 32)))
        self.write(d, f"bfi({args}, {width})")

    def op_prmt(self, i: Ins, d: Reg, a: Any, b: Any, c: Any) -> None:
        if i.op[-1] != "b32":
            raise PtxError("prmt modes")
        self.write(d, f"prmt({self.bits(a, 32)}, {self.bits(b, 32)}, {self.bits(c, 32)})")

    def op_lop3(self, i: Ins, d: Reg, a: Any, b: Any, c: Any, table: Imm) -> None:
        self.write(d, f"lop3({self.bits(a, 32)}, {self.bits(b, 32)}, {self.bits(c, 32)}, {table.bits})")

    def op_clz(self, i: Ins, d: Reg, a: Any) -> None:
        self.write(d, f"clz({self.bits(a, WIDTHS[i.op[-1]])}, {WIDTHS[i.op[-1]]})")

    def op_popc(self, i: Ins, d: Reg, a: Any) -> None:
        self.write(d, f"popc({self.bits(a, WIDTHS[i.op[-1]])})")

    def op_brev(self, i: Ins, d: Reg, a: Any) -> None:
        self.write(d, f"brev({self.bits(a, WIDTHS[i.op[-1]])}, {WIDTHS[i.op[-1]]})")

    def unary(self, i: Ins, d: Reg, a: Any, *, function: str) -> None:
        kind = i.op[-1]
        x = self.value(a, kind)
        if kind in ("f16x2", "bf16x2"):
            return self.write(d, f"halves({function}, {kind[:-2]!r}, {x})")
        if kind in ("f16", "bf16"):
            return self.write(d, f"single16({function}, {kind!r}, {x})")
        text = f"{function}(flush({x}))" if "ftz" in i.op else f"{function}({x})"
        return self.write(d, self.back(f"flush({text})" if "ftz" in i.op else text, kind))

    def op_copysign(self, i: Ins, d: Reg, a: Any, b: Any) -> None:
        self.write(d, self.back(f"np.copysign({self.value(b, i.op[-1])}, {self.value(a, i.op[-1])})", i.op[-1]))

    def extreme(self, i: Ins, d: Reg, *args: Any, name: str) -> None:
        kind = i.op[-1]
        values = [self.value(x, kind) for x in args]
        if "f" in kind:
            function = f"np.{name}imum" if "NaN" in i.op else f"np.f{name}"
            if kind in ("f16x2", "bf16x2"):
                return self.write(d, f"halves({function}, {kind[:-2]!r}, {', '.join(values)})")
            if kind in ("f16", "bf16"):
                return self.write(d, f"single16({function}, {kind!r}, {', '.join(values)})")
            if "ftz" in i.op:
                values = [f"flush({x})" for x in values]
        else:
            function = f"np.{name}imum"
        text = f"{function}({values[0]}, {values[1]})"
        if len(values) == 3:
            text = f"{function}({text}, {values[2]})"
        if "relu" in i.op:
            text = f"np.maximum({text}, {self.value(Imm(0, 0), kind)})"
        return self.write(d, self.back(text, kind))

    op_add = partialmethod(binary, sign="+", function="add")
    op_sub = partialmethod(binary, sign="-", function="subtract")
    op_and = partialmethod(logic, sign="&")
    op_or = partialmethod(logic, sign="|")
    op_xor = partialmethod(logic, sign="^")
    op_shl = partialmethod(shift, name="shl", sign="<<")
    op_shr = partialmethod(shift, name="shr", sign=">>")
    op_min = partialmethod(extreme, name="min")
    op_max = partialmethod(extreme, name="max")


_UNARY = {"neg": "np.negative", "abs": "np.abs", "ex2": "np.exp2", "lg2": "np.log2", "sin": "np.sin", "cos": "np.cos"}
_UNARY |= {"tanh": "np.tanh", "sqrt": "np.sqrt", "rsqrt": "rsqrt", "rcp": "np.reciprocal"}
for _name, _function in _UNARY.items():
    setattr(Arithmetic, f"op_{_name}", partialmethod(Arithmetic.unary, function=_function))
