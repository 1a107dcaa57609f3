"""Drawn modules, changes and masks against torch: equal numbers, or a clear error.

Where fastformer differs from torch on purpose, torch's model is run with the rule in it: a softmax over nothing is 0.
Rows of a stack's output that its key padding mask hides are not compared.
"""

import math
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
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
from tests.fuzz.conftest import Explore, chance
from tests.nn import layer_cases
from tests.nn.layer_cases import D, H, Twice, randomise
from tests.support.closeness import assert_close, gradients

pytestmark = pytest.mark.usefixtures("slow_path")
CLEAR = (ValueError, TypeError, IndexError, RuntimeError, OverflowError, AssertionError)
KINDS = (*layer_cases.LAYERS, *layer_cases.STACKS, "Transformer", "MultiheadAttention")


def check_close(actual: list[Tensor], exact: list[Tensor]) -> None:
    """Compare what the formula has a number for, within 2e-10.

    That is above what norms of small rows make of roundings, and below any wrong rule.
    """
    for x, e in zip(actual, exact, strict=True):
        assert x.shape == e.shape
        known = e.isfinite()
        assert_close(x[known], e.detach()[known], roundings=1e6)


class Halved(nn.Module):
    """A parametrisation."""

    def forward(self, x):
        return 0.5 * x


def scaled(x: Any, by: float) -> Any:
    return tuple(scaled(y, by) for y in x) if isinstance(x, tuple) else None if x is None else x * by


def change(model: nn.Module, random: Random) -> None:
    """Change a model as users do: hooks, other modules, parametrisations, frozen parameters."""
    layer = random.choice([x for x in model.modules() if hasattr(x, "linear1")] or [model])
    never_called = nn.ModuleList, NonDynamicallyQuantizableLinear  # torch reads out_proj's weights without a call
    module = random.choice([x for x in model.modules() if not isinstance(x, never_called)])
    linear = getattr(layer, "linear1", None)
    match random.randrange(6):
        case 0:
            module.register_forward_hook(lambda module, args, out: scaled(out, 0.5))
        case 1:
            layer.register_full_backward_hook(lambda module, grads, of_output: scaled(grads, 2.0))
        case 2:
            forward = type(module).forward
            module.forward = types.MethodType(
                lambda self, *args, **kwargs: scaled(forward(self, *args, **kwargs), 3.0), module
            )
        case 3 if linear is not None:
            norm = random.choice((nn.Identity(), nn.Tanh(), nn.RMSNorm(D, dtype=next(model.parameters()).dtype)))
            setattr(layer, random.choice(("norm1", "norm2")), norm)
        case 4 if isinstance(linear, nn.Linear) and not parametrize.is_parametrized(linear):
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


def drawn_model(library: Any, kind: str, seed: int) -> nn.Module:
    """Return a model of fastformer or of torch.nn, with the same drawn settings, parameters and changes for a seed."""
    random = Random(seed)
    torch.manual_seed(seed)
    settings = {"batch_first": True} if kind == "MultiheadAttention" else {"norm_first": chance(random, 50)}
    model = layer_cases.build(library, kind, bias=chance(random, 80), **settings)
    randomise(model)
    activation = random.choice((F.relu, F.gelu, F.silu, Twice()))
    for layer in (x for x in model.modules() if hasattr(x, "linear1")):
        layer.activation = activation  # torch's copies of a decoder layer lose it
    for _ in range(random.randrange(3)):
        change(model, random)
    return model


def drawn_inputs(random: Random, kind: str) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Return the inputs of a call, and masks of any kind."""
    B, T, S = random.choice((2, 1, 0)), random.choice((5, 1, 2)), random.choice((4, 1, 2))
    if "Encoder" in kind:
        x, names = [T], {"src_mask" if kind != "TransformerEncoder" else "mask": (T, T), "src_key_padding_mask": (B, T)}
    elif kind == "MultiheadAttention":
        x, names = [T, S], {"attn_mask": random.choice(((T, S), (B * H, T, S))), "key_padding_mask": (B, S)}
    else:
        x = [S, T] if kind == "Transformer" else [T, S]
        names = {"tgt_mask": (T, T), "memory_mask": (T, S), "tgt_key_padding_mask": (B, T)}
        names |= {"memory_key_padding_mask": (B, S)}
    masks = {name: drawn_mask(random, torch.float64, *shape) for name, shape in names.items()}
    if kind == "Transformer":  # whose encoder runs padded where these differ
        masks["src_key_padding_mask"] = masks["memory_key_padding_mask"]
    return [torch.randn(B, length, D, dtype=torch.float64) for length in x], masks


def results(module: nn.Module, inputs: list[Tensor], masks: dict[str, Tensor | None]) -> list[Tensor]:
    """Return outputs, with zeros at padding, and gradients of inputs and parameters that learn."""
    leaves = [y.clone().requires_grad_() for y in inputs]
    out = module(*leaves, *(leaves[1:] if isinstance(module, nn.MultiheadAttention) else ()), **masks)
    outputs = [y for y in (out if isinstance(out, tuple) else (out,)) if y is not None]
    padding = masks.get("src_key_padding_mask" if len(inputs) == 1 else "tgt_key_padding_mask")
    if padding is not None and padding.shape == outputs[0].shape[:-1]:
        hidden = padding if padding.dtype == torch.bool else padding < 0
        outputs[0] = outputs[0].masked_fill(hidden[..., None], 0.0)
    learning = [p for p in [*leaves, *dict.fromkeys(module.parameters())] if p.requires_grad]
    return [*outputs, *gradients([y for y in outputs if y.requires_grad], learning)]


@pytest.mark.slow
def test_drawn_modules_equal_torchs_or_are_refused(explore: Explore) -> None:
    """Modules of torch and of fastformer, changed in the same way, with masks of any kind."""

    def check(random: Random) -> str:
        kind, seed, converts = random.choice(KINDS), random.randrange(10**6), chance(random, 70)
        torchs, model = drawn_model(nn, kind, seed), drawn_model(nn if converts else fastformer, kind, seed)
        if converts:
            fastformer.convert(model)
        inputs, masks = drawn_inputs(random, kind)
        before = {name: None if x is None else x.clone() for name, x in masks.items()}
        hypothesis.note(f"{kind} {seed=} {converts=} {masks}")
        # convert leaves modules with a forward of their own, whose rows without keys stay torch's.
        attentions = [x for x in model.modules() if isinstance(x, nn.MultiheadAttention)]
        by_rule = all(isinstance(x, fastformer.MultiheadAttention) for x in attentions)
        refusal = exact = error = None
        try:
            results(torchs, inputs, masks)
        except Exception as caught:
            refusal = caught
        with suppress(Exception), by_formula() if by_rule else nullcontext():
            exact = results(torchs, inputs, masks)
        try:
            actual = results(model, inputs, masks)
        except CLEAR as caught:
            error = caught
        B = len(inputs[0])
        if error is not None:
            assert refusal is not None or B == 0, f"refused, and not by torch: {error!r}"
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)[-2:]]
            checks = fastformer.__path__[0], F.__file__  # torch.nn.functional checks masks, too
            clear = B == 0 or isinstance(error, type(refusal)) or any(x.startswith(checks) for x in files)
            assert clear, f"torch: {refusal!r}, fastformer: {error!r}"
            return "refused"
        assert all(x is None or torch.equal(x, before[name]) for name, x in masks.items()), "changed"
        if exact is None:
            assert B == 0, f"torch refuses: {refusal!r}"
            return "empty"
        check_close(actual, exact)
        return "equal"

    explore(check, {"equal": 0.3, "refused": 0.02})
