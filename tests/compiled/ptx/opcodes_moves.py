"""Translation of comparisons, choices, moves and conversions."""

from typing import Any

from tests.compiled.ptx.emitter import Emitter
from tests.compiled.ptx.text import WIDTHS, Ins, PtxError, Reg, Vec

_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPARE |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_ROUNDINGS = {"rzi": "trunc", "rni": "rint", "rmi": "floor", "rpi": "ceil"}


class Moves(Emitter):
    """`op_X` writes what the opcode X does."""

    @staticmethod
    def comparison(name: str, x: str, y: str, is_float: bool) -> str:
        if name == "num":
            return f"~(np.isnan({x}) | np.isnan({y}))"
        if name == "nan":
            return f"np.isnan({x}) | np.isnan({y})"
        if is_float and name == "ne":
            return f"({x} < {y}) | ({x} > {y})"
        if is_float and name in ("equ", "ltu", "leu", "gtu", "geu"):
            opposite = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
            if name == "equ":
                return f"~(({x} < {y}) | ({x} > {y}))"
            return f"~({x} {opposite[name]} {y})"
        if is_float and name == "neu":
            return f"{x} != {y}"
        return f"{x} {_COMPARE[name]} {y}"

    def op_setp(self, i: Ins, d: Any, a: Any, b: Any, c: Any = None) -> None:
        kind, name = i.op[-1], i.op[1]
        is_float = "f" in kind
        targets = d.items if isinstance(d, Vec) else (d,)
        if kind in ("f16x2", "bf16x2"):
            for target, take in zip(targets, ("low16", "high16"), strict=False):
                x, y = (f"widen({take}({self.bits(v, 32)}), {kind[:-2]!r})" for v in (a, b))
                self.write(target, self.comparison(name, x, y, True))
            return
        x, y = self.value(a, kind), self.value(b, kind)
        if kind in ("f16", "bf16"):
            x, y = f"widen({x}, {kind!r})", f"widen({y}, {kind!r})"
        if "ftz" in i.op:
            x, y = f"flush({x})", f"flush({y})"
        text = self.comparison(name, x, y, is_float)
        sign = {"and": "&", "or": "|", "xor": "^"}.get(i.op[2])
        self.emit(f"t = {text}")
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

    def op_cvt(self, i: Ins, d: Reg, *args: Any) -> None:
        to, of = i.op[-2], i.op[-1]
        modes = set(i.op[1:-2])
        if to in ("f16x2", "bf16x2"):
            self.convert_pair(d, to[:-2], modes, args)
        elif to == "tf32":
            self.write(d, f"to_tf32({self.value(args[0], 'f32')})")
        elif of in ("f16", "bf16"):
            x = f"widen({self.value(args[0], of)}, {of!r})"
            self.convert_float(d, x, "f32", to, modes)
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
        if to in ("f16", "bf16") and of == "f64":
            self.write(d, f"narrow64({x}, {to!r})")
        elif to in ("f16", "bf16"):
            self.write(d, f"f32_to_{to}{'_rz' if 'rz' in modes else ''}({x})")
        elif to in ("f32", "f64"):
            text = f"np.{_ROUNDINGS[rounding]}({x})" if rounding else f"{x}.astype({to})"
            if "sat" in modes:
                text = f"np.clip({text}, {to}(0), {to}(1))"
            self.write(d, self.back(f"flush({text})" if "ftz" in modes and to == "f32" else text, to))
        else:
            width = WIDTHS[to]
            self.result(d, f"to_integer({x}, {width}, {to[0] == 's'}, {rounding!r})", width, to[0] == "s")

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
