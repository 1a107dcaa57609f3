"""Drawn modules, masks and arguments against torch and against formulas: equal numbers, or a clear error.

Where fastformer differs from torch on purpose, torch's model is run with the rule in it: a softmax over nothing is 0.
Rows of a stack's output that its key padding mask hides are not compared.
"""

import math
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

import fastformer
from fastformer import functional
from tests.functional.attention_forms import naive
from tests.fuzz.harness import Explore, chance
from tests.nn import layer_cases
from tests.nn.layer_cases import D, H, Twice, randomise
from tests.support.closeness import assert_close, gradients

pytestmark = pytest.mark.usefixtures("slow_path")
CLEAR = (ValueError, TypeError, IndexError, RuntimeError, OverflowError, AssertionError)
WRONG = (torch.int8, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
KINDS = (*layer_cases.LAYERS, *layer_cases.STACKS, "Transformer", "MultiheadAttention")
Arguments = dict[str, Any]


def numbers(random: Random, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, with strides of every kind."""
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    match random.randrange(5):
        case 1 if x.dim() > 1:
            return x.mT.contiguous().mT
        case 1:
            return torch.stack([x, x + 1], -1)[..., 0]
        case 2 if x.dim() and x.shape[0]:
            return x[:1].expand_as(x)
        case _:
            return x


def spoilt(random: Random, arguments: Arguments) -> None:
    """Make one argument wrong: of another type, dtype, shape or device."""
    name = random.choice(list(arguments))
    x = arguments[name]
    if not isinstance(x, Tensor):
        arguments[name] = random.choice((None, -1, 1.5, math.nan, "x", True, (1, 2), (-1, 0), [1], 10**18))
    else:
        wrong = [None, 3, "x", x.tolist(), x[None], x.flatten(), x.to("meta"), x.to(random.choice(WRONG))]
        arguments[name] = random.choice([*wrong, *([torch.cat([x, x]), x[..., :0]] if x.dim() else [])])


def attention(random: Random) -> tuple[Any, Any, Arguments]:
    B, T, S, heads, group = (random.choice(x) for x in ((2, 0, 1), (3, 0, 1), (4, 0, 1), (1, 2), (1, 2)))
    given = {
        "q": numbers(random, B, heads * group, T, 4),
        "k": numbers(random, B, heads, S, 4),
        "v": numbers(random, B, heads, S, random.choice((4, 3))),
    }
    hidden = torch.rand(random.choice(((T, S), (B, 1, T, S), (B, heads * group, T, S), (B, 1, 1, S)))) < 0.5
    options: dict[str, Callable[[], Any]] = {
        "mask": lambda: random.choice((~hidden, torch.zeros(hidden.shape).double().masked_fill(hidden, -math.inf))),
        "key_mask": lambda: torch.rand(B, S) < 0.6,
        "key_lengths": lambda: torch.randint(0, S + 1, (B,)).to(random.choice((torch.int64, torch.int32, torch.uint8))),
        "query_lengths": lambda: torch.randint(0, T + 1, (B,)),
        "causal": lambda: True,
        "alignment": lambda: "bottom_right",
        "window": lambda: (random.choice((None, 0, 1, 9)), random.choice((None, 0, 2))),
        "softcap": lambda: 0.5,
        "scale": lambda: random.choice((0.1, 0.0)),
        "sinks": lambda: numbers(random, heads * group),
    }
    given |= {name: make() for name, make in options.items() if chance(random, 25)}
    op = random.choice((functional.attention, functional.attention_with_weights))
    return op, naive if op is functional.attention_with_weights else lambda **x: naive(**x)[0], given


def loss(random: Random) -> tuple[Any, Any, Arguments]:
    shape = random.choice(((4,), (2, 3), (0,)))
    target = torch.randint(0, 7, shape)
    if chance(random, 40) and target.numel():
        target.view(-1)[0] = random.choice((-100, 7, -1))
    given: Arguments = {"x": numbers(random, *shape, 3), "weight": numbers(random, 7, 3), "target": target}
    given |= {"label_smoothing": random.choice((0.0, 0.1)), "reduction": random.choice(("mean", "sum"))}

    def formula(x, weight, target, **options):
        return F.cross_entropy(F.linear(x, weight).flatten(0, -2), target.flatten(), **options)

    return functional.linear_cross_entropy, formula, given


def outputs_and_gradients(op: Any, arguments: Arguments) -> list[Tensor]:
    leaves = {
        k: x.detach().requires_grad_() for k, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point()
    }
    out = op(**(arguments | leaves))
    found = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    return [*found, *gradients([x for x in found if x.requires_grad], leaves.values())]


def check_close(found: list[Tensor], exact: list[Tensor], roundings: float = 100.0) -> None:
    """Compare what the formula has a number for."""
    for x, e in zip(found, exact, strict=True):
        assert x.shape == e.shape
        known = e.isfinite()
        assert_close(x[known], e.detach()[known], roundings)


def test_drawn_calls_of_ops_equal_their_formula_or_are_refused(explore: Explore) -> None:
    def check(random: Random) -> str:
        torch.manual_seed(random.randrange(1000))
        op, formula, arguments = random.choice((attention, attention, loss))(random)
        if wrong := chance(random, 35):
            spoilt(random, arguments)
        before = {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}
        try:
            exact = outputs_and_gradients(formula, arguments)
        except Exception:  # what the formula does not take, an op may refuse
            exact = None
        try:
            found, error = outputs_and_gradients(op, arguments), None
        except CLEAR as caught:
            error = caught
        if error is not None:
            assert wrong or exact is None, repr(error)
            assert str(error).strip()
            return "refused"
        assert all(x.is_meta or torch.equal(x, before[k]) for k, x in arguments.items() if k in before), "changed"
        if any(x.is_meta for x in found) or (wrong and any(x.isnan().any() for x in found)):
            return "undefined"
        if exact is None:  # an op may not look at what no element needs
            assert any(x.numel() == 0 for x in before.values()), "taken, though the formula is not defined"
            return "empty"
        check_close(found, exact)
        return "equal"

    explore(check, {"equal": 0.3, "refused": 0.1})


class OwnForward:
    """A subclass with a forward around torch's."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * 1.5


class Halved(nn.Module):
    """A parametrisation."""

    def forward(self, x):
        return 0.5 * x


def scaled(x: Any, by: float) -> Any:
    return tuple(scaled(y, by) for y in x) if isinstance(x, tuple) else None if x is None else x * by


def change(model: nn.Module, random: Random) -> None:
    """Change a model in a way that the package knows nothing of."""
    holders = [x for x in model.modules() if hasattr(x, "linear1")] or [model]
    passed_by = nn.ModuleList, NonDynamicallyQuantizableLinear  # torch reads out_proj's weights, and calls it not
    part = random.choice([x for x in model.modules() if not isinstance(x, passed_by)])
    holder = random.choice(holders)
    linear = getattr(holder, "linear1", None)
    match random.randrange(7):
        case 0:
            part.register_forward_hook(lambda module, args, out: scaled(out, 0.5))
        case 2:
            holder.register_full_backward_hook(lambda module, grads, of_output: scaled(grads, 2.0))
        case 3:
            forward = type(part).forward
            part.forward = types.MethodType(
                lambda self, *args, **kwargs: scaled(forward(self, *args, **kwargs), 3.0), part
            )
        case 3 if linear is not None and not isinstance(holder, OwnForward):
            holder.__class__ = type("Own", (OwnForward, type(holder)), {})
        case 4 if linear is not None:
            norm = random.choice((nn.Identity(), nn.Tanh(), nn.RMSNorm(D, dtype=next(model.parameters()).dtype)))
            setattr(holder, random.choice(("norm1", "norm2")), norm)
        case 5 if isinstance(linear, nn.Linear) and not parametrize.is_parametrized(linear):
            parametrize.register_parametrization(linear, "weight", Halved())
        case _:
            for parameter in model.parameters():
                parameter.requires_grad_(chance(random, 30))


def drawn_mask(random: Random, dtype: torch.dtype, *shape: int) -> Tensor | None:
    """A mask of any kind; a row may see nothing."""
    if chance(random, 40):
        return None
    hidden = torch.rand(shape) < random.choice((0.3, 0.9, 1.0))
    if shape[-1] and chance(random, 70):
        hidden[..., 0] = False
    low = random.choice((-math.inf, -math.inf, -1e4))
    mask = torch.zeros(shape, dtype=dtype).masked_fill(hidden, low) if chance(random, 60) else hidden
    if chance(random, 8):
        mask = random.choice((mask.to(torch.int64), torch.cat([mask, mask], -1), mask[None], mask.flatten()))
    return mask


@contextmanager
def by_formula() -> Iterator[None]:
    """Have a softmax over nothing, and its gradients, be 0."""
    softmax = torch.softmax

    def dead(x: Tensor, dim: int = -1, *more: Any, **others: Any) -> Tensor:
        hidden = (x == -math.inf).all(dim, keepdim=True)
        return softmax(x.masked_fill(hidden, 0.0), dim).masked_fill(hidden, 0.0)

    def sdpa(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False
    ):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if is_causal else mask
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return dead(scores) @ v

    with mock.patch.object(F, "softmax", dead), mock.patch.object(F, "scaled_dot_product_attention", sdpa):
        yield


def test_drawn_modules_equal_torchs_or_are_refused(explore: Explore) -> None:
    """Modules of torch and of fastformer, changed in the same way, with masks of any kind."""

    def check(random: Random) -> str:
        kind, dtype, seed = random.choice(KINDS), torch.float64, random.randrange(10**6)
        settings: dict[str, Any] = {} if kind == "MultiheadAttention" else {"norm_first": chance(random, 50)}
        settings |= {"bias": chance(random, 80)}
        activation = random.choice((F.relu, F.gelu, F.silu, Twice()))
        changes = random.randrange(3)

        def model(library: Any) -> nn.Module:
            torch.manual_seed(seed)
            more = {"batch_first": True} if kind == "MultiheadAttention" else {}
            made = layer_cases.build(library, kind, dtype, **settings, **more)
            randomise(made)
            for layer in (x for x in made.modules() if hasattr(x, "linear1")):
                layer.activation = activation  # torch's copies of a decoder layer lose it
            for number in range(changes):
                change(made, Random(seed + number))
            return made

        direct = chance(random, 30)
        torchs, ours = model(nn), model(fastformer if direct else nn)
        if not direct:
            fastformer.convert(ours)
        B, T, S = random.choice((2, 1, 0)), random.choice((5, 1, 2)), random.choice((4, 1, 2))
        encodes = "Encoder" in kind
        lengths = (T,) if encodes else (S, T) if kind == "Transformer" else (T, S)
        x = [torch.randn(B, length, D, dtype=dtype) for length in lengths]
        inputs = [*x, x[1]] if kind == "MultiheadAttention" else x
        names = {"src_mask" if kind != "TransformerEncoder" else "mask": (T, T), "src_key_padding_mask": (B, T)}
        if kind == "MultiheadAttention":
            names = {"attn_mask": random.choice(((T, S), (B * H, T, S))), "key_padding_mask": (B, S)}
        elif not encodes:
            names = {"tgt_mask": (T, T), "memory_mask": (T, S), "tgt_key_padding_mask": (B, T)}
            names |= {"memory_key_padding_mask": (B, S)}
        masks = {name: drawn_mask(random, dtype, *shape) for name, shape in names.items()}
        if kind == "Transformer":  # whose encoder runs padded where these differ
            masks["src_key_padding_mask"] = masks["memory_key_padding_mask"]
        kept = [None if x is None else x.clone() for x in masks.values()]
        hypothesis.note(f"{kind} {dtype} {settings} {changes=} {seed=} {direct=} {masks}")

        def run(module: nn.Module) -> list[Tensor]:
            leaves = [y.clone().requires_grad_() for y in x]
            out = module(*leaves, *leaves[1 : len(inputs) - len(x) + 1], **masks)
            found = [y for y in (out if isinstance(out, tuple) else (out,)) if y is not None]
            padding = masks.get("src_key_padding_mask" if encodes else "tgt_key_padding_mask")
            if padding is not None and padding.shape == found[0].shape[:-1]:
                hidden = padding if padding.dtype == torch.bool else padding < 0
                found[0] = found[0].masked_fill(hidden[..., None], 0.0)
            learning = [p for p in [*leaves, *dict.fromkeys(module.parameters())] if p.requires_grad]
            return [*found, *gradients([y for y in found if y.requires_grad], learning)]

        try:
            torchs(*inputs, **masks)
            refused = None
        except Exception as error:
            refused = error
        try:
            # convert leaves parts with a forward of their own, whose rows without keys stay torch's.
            attentions = [part for part in ours.modules() if isinstance(part, nn.MultiheadAttention)]
            formula = all(isinstance(part, fastformer.MultiheadAttention) for part in attentions)
            with by_formula() if formula else nullcontext():
                exact = run(torchs)
        except Exception:
            exact = None
        try:
            found, error = run(ours), None
        except CLEAR as caught:
            error = caught
        if error is not None:
            assert refused is not None or B == 0, f"refused, and not by torch: {error!r}"
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)[-2:]]
            clear = isinstance(error, type(refused)) or any(x.startswith(fastformer.__path__[0]) for x in files)
            assert clear, f"torch: {refused!r}, ours: {error!r}"
            return "refused"
        assert all(x is None or torch.equal(x, y) for x, y in zip(masks.values(), kept, strict=True)), "changed"
        if exact is None:
            assert B == 0, f"torch refuses: {refused!r}"
            return "empty"
        check_close(found, exact, 1e6)  # 2e-10: above what norms of small rows make of roundings, below any wrong rule
        return "equal"

    explore(check, {"equal": 0.3, "refused": 0.02})
