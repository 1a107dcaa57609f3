"""Attention against every way that PyTorch has, on a GPU: dense, causal, padded, packed, with dropout, in fp32.

On a CPU one shape, padded and packed, in fp32.

Work counts real positions and allowed pairs alone: 4 D operations a pair forward, 10 D backward (2 D + 2 V and
6 D + 4 V with values of head size V); bytes of q, k, v and the output, and backward those again with four gradients.
fastformer gets lengths and causality and makes no mask.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import fastformer
from benchmarks.competitors.attention import ALONE, KEY_MASK, MASK, packed, rival
from benchmarks.competitors.known import require
from benchmarks.harness.attention_case import AttentionCase, AttentionShape, attention_case, case_name
from benchmarks.harness.race import DIRECTIONS, Direction, Op, Race
from fastformer import functional
from fastformer.packing import pack, unpack

pytestmark = pytest.mark.gpu

# A wrong formula is off by more than 1e-1. bf16 rounds inputs of the second product to 4e-3, tf32 to 5e-4.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
DROPOUT = 0.1
Rivals = Sequence[tuple[str, str | None]]  # competitors, and how they are told of padding


CAUSAL = [
    AttentionShape(128, 8, 40),
    AttentionShape(128, 12, 128),
    AttentionShape(32, 12, 512),
    AttentionShape(16, 12, 1024),
    AttentionShape(8, 12, 2048),
    AttentionShape(4, 12, 4096),
    AttentionShape(1, 16, 16384),
    AttentionShape(16, 12, 1024, 128),
    AttentionShape(8, 12, 2048, 128),
    AttentionShape(1, 16, 16384, 128),
]
DENSE = [AttentionShape(16, 12, 1024, causal=False), AttentionShape(8, 12, 2048, 128, causal=False)]
QUICK = AttentionShape(16, 12, 1024)
LATENT = AttentionShape(8, 12, 2048, 192, value_size=128)  # multi-head latent attention (DeepSeek-V2, 2024)
PADDED = [replace(shape, kind="uniform") for shape in CAUSAL[2:6]]
WIDE = replace(CAUSAL[8], kind="uniform")
ON_CPU = [AttentionShape(8, 4, 256, kind="uniform")]
MULTI30K = AttentionShape(128, 8, 36, kind="multi30k", share=0.55)
FEW = replace(PADDED[1], causal=False, share=0.69)
SHARES = [replace(CAUSAL[4], kind="uniform", share=share) for share in (0.0, 0.2, 0.7)]

BACKENDS: Rivals = [(name, None) for name in ("sdpa-cudnn", "sdpa-flash", "sdpa-efficient")]
MAIN: Rivals = [
    ("sdpa-efficient", MASK),
    ("sdpa-cudnn", MASK),
    ("sdpa-efficient", KEY_MASK),
    ("sdpa-flash", ALONE),
    ("varlen", None),
]
FURTHER: Rivals = [*(("sdpa-cudnn", way) for way in (KEY_MASK, ALONE)), ("sdpa-math", MASK)]
FURTHER = [*FURTHER, ("flash-attn", None), ("xformers", None)]
FLEX: Rivals = [("flex", None), ("flex-per-batch", None)]
NOT_CAUSAL: Rivals = [("sdpa-efficient", KEY_MASK), ("sdpa-cudnn", KEY_MASK), ("varlen", None)]
PACKED: Rivals = [*(each for each in MAIN if each[1] != KEY_MASK), ("flash-attn", None)]
MASKED = ("sdpa-efficient", "sdpa-cudnn", "sdpa-math")
ON_CPU_RIVALS: Rivals = [("sdpa-flash", MASK)]
CAUSAL_GOALS = {
    MASK: (3.0, 2.5),
    KEY_MASK: (1.7, 1.5),
    "flex": (1.1, 1.1),
    "flex-per-batch": (2.0, 1.5),
    "varlen": (1.2, 1.2),
}


def _cases(*combinations: tuple[str, Sequence[AttentionShape], Rivals]) -> pytest.MarkDecorator:
    """Shapes against rivals, each as (kind, shape, competitor, way); the kind ends in "quick", "full" or "cpu"."""
    parameters = []
    for kind, shapes, rivals in combinations:
        for shape, (name, way) in product(shapes, rivals):
            parts = kind, shape.name, name, *(() if way is None else (way.partition(" (")[0].replace(" ", "_"),))
            marks = [pytest.mark.cpu] if kind.endswith("cpu") else []
            parameters.append(pytest.param(kind, shape, name, way, id="-".join(parts), marks=marks))
    return pytest.mark.parametrize(("kind", "shape", "competitor", "way"), parameters)


def _require(race: Race, competitor: str) -> None:
    if not (race.tiny and competitor.startswith("flex")):  # not compiled, it shows there that its mask can be made
        require(competitor, race.device)


def _rival(p: AttentionCase, competitor: str, way: str | None, inputs: Sequence[Tensor]) -> Op:
    label = competitor if way is None else f"{competitor}, {way}"
    return Op(label, lambda: rival(p, competitor, way)(*inputs), inputs, p.compared)


def _attention(race: Race, p: AttentionCase, inputs: Sequence[Tensor]) -> Tensor:
    ends, bias = p.lengths_on_device if p.padded else None, p.distance_bias if p.alibi else None
    with fastformer.backend(race.backend):
        return functional.attention(
            *inputs, causal=p.causal, query_lengths=ends, key_lengths=ends, dropout_p=p.dropout, distance_bias=bias
        )


def _compare(
    race: Race, name: str, p: AttentionCase, sides: tuple[Op, Op], upstream: Tensor, direction: Direction, **fields: Any
) -> None:
    """Compare two ops with `p.expected`, and time one direction."""
    race.op(
        name,
        *sides,
        upstream=upstream,
        tolerance=TOLERANCE[torch.bfloat16 if p.tf32 else p.dtype],
        direction=direction,
        work=p.work(direction),
        **fields,
    )


def _check_dropout(
    race: Race, p: AttentionCase, inputs: list[Tensor], dropping: tuple[Op, Op], exact: tuple[Op, Op]
) -> None:
    """Require that dropout, whose masks differ, changes the output by its mean square, summed over all elements."""
    tolerance = 0.9 if race.tiny else 0.1  # hundreds of weights against millions
    real = p.compared(p.real[:, None, :, None].expand(-1, p.heads, -1, p.head_size))
    expected = torch.where(real, p.dropped(inputs), 0).sum()

    @torch.no_grad()
    def added(side: int) -> Tensor:
        outputs = (p.compared(op.run()).double() for op in (dropping[side], exact[side]))
        return torch.where(real, next(outputs) - next(outputs), 0).square().sum()

    race.gate("dropout", added(0), expected, tolerance)
    with race.competitor():
        race.gate_theirs("square of dropout", added(1), expected, tolerance)


def _goals(kind: str, shape: AttentionShape, competitor: str, way: str | None) -> tuple[float, float] | None:
    """Return the goals of attention: forward, and with backward."""
    match kind:
        case "dropout" | "fp32":
            return 5.0, 4.0
        case "tutorial":
            return (15.0, 8.0) if shape.causal else (5.0, 3.5)
        case "padding" if not shape.causal:
            return (1.2, 1.2) if competitor == "varlen" else (1.8, 1.6)
        case "padding" if shape.length >= 1024 and shape.share == 0.45:
            return CAUSAL_GOALS.get(way or competitor)
        case "dense" if shape.causal and shape.head_size == 64 and shape.length <= 8192:
            return (1.1, 1.0) if shape.length <= 512 else (1.0, 0.9)
        case "dense" if shape.causal and shape.head_size == 128 and shape.length >= 2048:
            return 0.85, 0.75
    return None


@pytest.fixture
def fp32_products(kind: str) -> Iterator[None]:
    """Let products of fp32 be rounded to tf32 in cases of that kind."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind.startswith("tf32") else before)
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("fp32_products")
@pytest.mark.parametrize("direction", DIRECTIONS)
@_cases(
    ("dense-quick", [QUICK], [*BACKENDS, ("sdpa-math", None)]),
    ("dense-full", [shape for shape in CAUSAL if shape != QUICK] + DENSE, BACKENDS),
    ("dense-full", CAUSAL[:1], [("sdpa-math", None)]),
    ("dense-full", [LATENT], [(name, None) for name in ("sdpa-cudnn", "sdpa-efficient", "sdpa-math")]),
    ("tutorial-full", [replace(CAUSAL[4], causal=causal) for causal in (True, False)], [("tutorial", None)]),
    ("padding-quick", PADDED[1:2], MAIN),
    ("padding-full", [MULTI30K, PADDED[0], *PADDED[2:], WIDE], MAIN),
    ("padding-full", PADDED[1:2], FURTHER),
    ("padding-full", SHARES, [("sdpa-efficient", MASK), ("sdpa-flash", ALONE)]),
    ("padding-full", [PADDED[1], WIDE], FLEX),
    ("padding-full", [replace(shape, causal=False) for shape in (PADDED[0], PADDED[2])], NOT_CAUSAL),
    ("padding-quick-cpu", ON_CPU, ON_CPU_RIVALS),
    # One sequence has length 0, whose rows are NaN under a mask unless a competitor prevents it.
    ("empty-full", [replace(PADDED[0], kind="empty")], [*((name, MASK) for name in MASKED), ("sdpa-flash", ALONE)]),
    ("dropout-full", [FEW], [(name, KEY_MASK) for name in MASKED]),
    ("fp32-full", [FEW], [(name, KEY_MASK) for name in MASKED]),
    ("tf32-full", [FEW], [("sdpa-efficient", KEY_MASK)]),
    # A bias by distance that is not trained, against SDPA's additive mask, made beforehand, and flex_attention.
    ("alibi-full", CAUSAL[3:5], [("sdpa-efficient", MASK)]),
    ("alibi-full", CAUSAL[3:4], [("flex", None)]),
)
def bench_attention(
    race: Race, kind: str, shape: AttentionShape, competitor: str, way: str | None, direction: Direction
) -> None:
    """Compare attention of padded tensors."""
    _require(race, competitor)
    kind = kind.partition("-")[0]
    dtype = torch.float32 if kind in ("fp32", "tf32") else torch.bfloat16
    p = attention_case(race, shape, dtype, DROPOUT if kind == "dropout" else 0.0)
    if kind == "alibi":
        p = replace(p, alibi=True)
    if kind == "tf32":
        p = replace(p, tf32=True)
    inputs, upstream = p.leaves(), p.random()

    def sides(case: AttentionCase) -> tuple[Op, Op]:
        op = Op("fastformer", lambda: _attention(race, case, inputs), inputs, p.compared)
        return op, _rival(case, competitor, way, inputs)

    exact, timed = p, None
    if p.dropout:
        exact, timed = replace(p, dropout=0.0), (*sides(p), upstream)
        _check_dropout(race, p, inputs, sides(p), sides(exact))
    name = case_name("attention, ALiBi" if p.alibi else "attention", shape, p)
    goals = _goals(kind, shape, competitor, way)
    goal = None if goals is None else {"forward": goals[0], "both": goals[1]}.get(direction)
    expected = exact.expected(inputs, upstream)
    _compare(race, name, p, sides(exact), upstream, direction, expected=expected, goal=goal, timed=timed)


@pytest.mark.parametrize("direction", DIRECTIONS)
@_cases(("full", PADDED[1:2], [("own-lengths", None)]))
def bench_key_mask(
    race: Race, kind: str, shape: AttentionShape, competitor: str, way: None, direction: Direction
) -> None:
    """Compare fastformer with a key mask, which each tile of values has to wait for, and with lengths."""
    _require(race, competitor)
    p = attention_case(race, shape)
    inputs, upstream = p.leaves(), p.random()

    def by_mask() -> Tensor:
        with fastformer.backend(race.backend):
            ends = p.lengths_on_device
            return functional.attention(*inputs, causal=p.causal, query_lengths=ends, key_mask=p.real)

    lengths = Op("fastformer, lengths", lambda: _attention(race, p, inputs), inputs, p.compared)
    sides = Op("fastformer", by_mask, inputs, p.compared), lengths
    name = case_name("attention, key mask", shape, p)
    _compare(race, name, p, sides, upstream, direction, expected=p.expected(inputs, upstream))


@pytest.mark.parametrize("direction", DIRECTIONS)
@_cases(
    ("full", PADDED[1:2], [(name, MASK) for name in ("sdpa-efficient", "sdpa-cudnn")]),
    ("quick-cpu", ON_CPU, ON_CPU_RIVALS),
)
def bench_sdpa(race: Race, kind: str, shape: AttentionShape, competitor: str, way: str, direction: Direction) -> None:
    """Compare `fastformer.sdpa` and SDPA, which get the same mask."""
    _require(race, competitor)
    p = attention_case(race, shape)
    inputs, upstream = p.leaves(), p.random()
    q, k, v = inputs
    mask = p.allowed().expand(p.batch, -1, p.length, -1)

    def masked() -> Tensor:
        with fastformer.backend(race.backend):
            return fastformer.sdpa(q, k, v, mask)

    sides = Op("fastformer.sdpa", masked, inputs, p.compared), _rival(p, competitor, way, inputs)
    name = case_name("sdpa, mask", shape, p)
    _compare(race, name, p, sides, upstream, direction, expected=p.expected(inputs, upstream))


@pytest.mark.parametrize("direction", DIRECTIONS)
@_cases(("quick", PADDED[1:2], PACKED), ("full", [MULTI30K], PACKED), ("quick-cpu", ON_CPU, ON_CPU_RIVALS))
def bench_packed_attention(
    race: Race, kind: str, shape: AttentionShape, competitor: str, way: str | None, direction: Direction
) -> None:
    """Compare packed attention with a competitor's on packed tensors if it takes them, else on padded ones."""
    _require(race, competitor)
    p = attention_case(race, shape)
    inputs, upstream = p.leaves(), p.random()

    def compared(x: Tensor) -> Tensor:
        return p.compared(unpack(x, p.layout).transpose(1, 2))

    tokens = q, k, v = [pack(x.detach().transpose(1, 2), p.layout).requires_grad_() for x in inputs]
    dout = pack(upstream.transpose(1, 2), p.layout)

    def packed_attention() -> Tensor:
        with fastformer.backend(race.backend):
            return functional.packed_attention(q, k, v, p.layout, causal=p.causal)

    if way is None:
        other = Op(competitor, lambda: packed(p, competitor)(*tokens), tokens, compared, dout)
    else:
        other = _rival(p, competitor, way, inputs)
    sides = Op("fastformer", packed_attention, tokens, compared, dout), other
    name = case_name("packed attention", shape, p)
    _compare(race, name, p, sides, upstream, direction, expected=p.expected(inputs, upstream))
