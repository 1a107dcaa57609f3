"""Changed models and hostile masks against torch: values, gradients, calls seen, errors, and arguments left alone.

Where ours differs on purpose, torch's model is run with the rule in it: a softmax over nothing is 0 (`_attention`,
`_softmax`), and a stack of ours sets the rows that its key padding mask hides to 0 (`blanked`). A hint that says what
its mask does not is answered with either. What once failed stays below, as a case by itself.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastformer
from tests.fuzz import fuzz
from tests.fuzz.fuzz_masks import Given, given
from tests.fuzz.fuzz_models import Plan, build, layers, plan, watched
from tests.support.closeness import gradients
from tests.support.noise import DEVIATIONS, noise
from tests.support.torch_recorders import Calls

pytestmark = pytest.mark.usefixtures("slow_path")
CLEAR = (ValueError, TypeError, RuntimeError, AssertionError)
STACKS = (fastformer.TransformerEncoder, fastformer.TransformerDecoder)


@dataclass
class Outcome:
    """What a run gave: outputs, then gradients; or an error."""

    calls: Calls
    outputs: list[Tensor]
    gradients: list[Tensor] | None = None
    error: Exception | None = None


def _softmax(x: Tensor, dim: int = -1, *more: Any, **others: Any) -> Tensor:
    """A softmax over nothing is 0, and so are its gradients."""
    dead = (x == -torch.inf).all(dim, keepdim=True)
    return x.masked_fill(dead, 0.0).softmax(dim).masked_fill(dead, 0.0)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """SDPA by its formula."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return F.dropout(_softmax(scores), dropout_p) @ v


@contextmanager
def by_formula() -> Iterator[None]:
    with (
        mock.patch.object(F, "softmax", _softmax),
        mock.patch.object(F, "scaled_dot_product_attention", _attention),
    ):
        yield


def blanked(model: nn.Module, ours: nn.Module, made: Given) -> None:
    """Have torch's stacks return 0 in padding where ours do: a rule of stacks that know the order of dimensions."""
    names = {name for name, part in ours.named_modules() if isinstance(part, STACKS) and part.padding_free}
    for name, stack in model.named_modules():
        orders = {
            part.batch_first for layer in layers(stack) for part in layer.children() if hasattr(part, "batch_first")
        }
        if name not in names or len(orders) != 1 or "forward" in stack.__dict__:
            continue
        if name == "encoder":  # within a Transformer: the decoder may look at padding
            own, memory = made.masks["src_key_padding_mask"], made.masks["memory_key_padding_mask"]
            if own is not memory and not (own is not None and memory is not None and _same(own, memory)):
                continue

        def blank(module: nn.Module, args: Any, kwargs: Any, out: Tensor, first: bool = next(iter(orders))) -> Tensor:
            used = [key for key in ("src_key_padding_mask", "tgt_key_padding_mask") if kwargs.get(key) is not None]
            if not used:
                return out
            padding: Any = made.masks[used[0]]  # as it was given
            hidden = padding if padding.dtype == torch.bool else padding == -torch.inf
            hidden = hidden if first or hidden.dim() == 1 else hidden.mT
            # Layers of somebody's own may not have looked at a mask that does not fit.
            return out.masked_fill(hidden[..., None], 0.0) if hidden.shape == out.shape[:-1] else out

        stack.register_forward_hook(blank, with_kwargs=True, prepend=True)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def wide(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask in fp64, with the values that it has in the dtype that is computed in."""
    if mask is None or not mask.is_floating_point():
        return mask
    fits = torch.promote_types(mask.dtype, dtype) == dtype
    return (mask if fits else mask.to(dtype)).double()


@dataclass
class Run:
    """How a model is run."""

    mode: str  # "grad", "no_grad" or "inference"
    learns: bool  # whether additive masks want a gradient
    meddles: str  # what is changed between forward and backward


def run(
    model: nn.Module, made: Given, plan: Plan, how: Run, dtype: torch.dtype | None = None, backward: bool = True
) -> Outcome:
    """Run a model; in fp64 where a dtype is given, which is what masks are rounded to first."""
    leaves: dict[int, Tensor] = {}
    for x in made.inputs:
        leaves[id(x)] = (x if dtype is None else x.double()).detach().clone().requires_grad_()
    given_inputs = {key: x * 1.0 if how.meddles == "input" else x for key, x in leaves.items()}
    inputs = [given_inputs[id(x)] for x in made.inputs]
    masks: dict[str, Tensor | None] = {}
    for name, mask in made.masks.items():
        same = next((key for key in masks if made.masks[key] is mask), None)  # one mask under two names stays one
        masks[name] = masks[same] if same is not None else mask if dtype is None else wide(mask, dtype)
        if how.learns and mask is not None and mask.is_floating_point() and same is None:
            masks[name] = masks[name].detach().requires_grad_()  # type: ignore[union-attr]
    calls = Calls({plan.d_model, plan.width, *plan.attention.values()} | _keys(made, plan))
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[how.mode]
    try:
        with watched(model, plan, calls):
            with mode():
                out = model(*inputs, **masks, **made.hints)
            outputs = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
            found = Outcome(calls, outputs)
            parameters = dict.fromkeys(model.parameters())
            wanted = [*leaves.values(), *(x for x in masks.values() if x is not None and x.requires_grad)]
            wanted = [x for x in dict.fromkeys([*wanted, *parameters]) if x.requires_grad]
            differentiable = [x for x in outputs if x.requires_grad]
            if backward and how.mode == "grad" and differentiable:
                if dtype is None:
                    meddle(how.meddles, inputs, list(masks.values()), list(parameters))
                found.gradients = gradients(differentiable, wanted)
    except Exception as error:
        return Outcome(calls, [], error=error)
    return found


def _keys(made: Given, plan: Plan) -> set[int]:
    """The last dimension of returned weights, which are activations, too."""
    if plan.kind != "MultiheadAttention":
        return set()
    keys = made.inputs[1].shape[-2 if plan.batch_first else 0]
    return {keys, keys + 1, keys + 2}  # with those of add_bias_kv and add_zero_attn


def meddle(what: str, inputs: list[Tensor], masks: list[Tensor | None], parameters: list[Tensor]) -> None:
    """Change in place what autograd may have kept."""
    chosen: list[Any] = {"masks": masks, "input": inputs, "parameters": parameters[:3]}.get(what, [])
    with torch.no_grad():
        for x in chosen:
            if x is not None and not (x.requires_grad and what == "masks") and not torch._debug_has_internal_overlap(x):
                x.logical_not_() if x.dtype == torch.bool else x.copy_(torch.linspace(-1, 2, x.numel()).view(x.shape))


class Exact:
    """The results of torch's model in fp64 with the rules in it, made before anything is changed in place."""

    def __init__(self, plan: Plan, ours: nn.Module, made: Given) -> None:
        self.plan, self.made = plan, copied(made)
        self.model, self.torchs = build(plan, nn).double(), build(plan, nn)
        for model in (self.model, self.torchs):
            blanked(model, ours, made)
        # convert leaves subclasses, whose rows without keys stay torch's.
        parts = [part for part in ours.modules() if isinstance(part, nn.MultiheadAttention)]
        self.formula = all(isinstance(part, fastformer.MultiheadAttention) for part in parts)

    def run(self, how: Run) -> None:
        """Make the numbers; errors are torch's."""
        self.how = replace(how, meddles="")
        self.numbers = [x.detach() for x in self._wide()]

    def _wide(self, made: Given | None = None) -> list[Tensor]:
        with by_formula() if self.formula else nullcontext():
            return results(run(self.model, made or self.made, self.plan, self.how, self.plan.dtype))

    def noises(self) -> list[float]:
        """How far results may be away: twice the error of torch's, which takes masks of the model's dtype only.

        Where a row sees numbers like -1e30 alone, its noise is no number: a softmax of the largest plus a rounding of
        it. Such a mask is looked at as if it were -6e4, which loses the scores' last bits as well.
        """
        made = with_masks(self.made, lambda x: x.to(self.plan.dtype))
        found = run(self.torchs, self.made, self.plan, self.how)
        if found.error is not None:
            found = run(self.torchs, made, self.plan, self.how)
        errors = [
            float((x.double() - e).abs().nan_to_num(0.0).amax()) if x.numel() else 0.0
            for x, e in zip(results(found), self.numbers, strict=True)
        ]
        made = with_masks(made, lambda x: torch.where(x.isinf(), x, x.clamp(min=-6e4)))
        moved = noise(lambda: self._wide(made), [x.detach() for x in self._wide(made)], self.plan.dtype)
        return [2 * error + DEVIATIONS * (n if n == n else 0.0) for error, n in zip(errors, moved, strict=True)]


def results(found: Outcome) -> list[Tensor]:
    """Outputs and gradients."""
    if found.error is not None:
        raise found.error
    return [*found.outputs, *(found.gradients or [])]


def with_masks(made: Given, change: Callable[[Tensor], Tensor]) -> Given:
    """The same arguments with additive masks changed; what is one mask stays one."""
    new = {id(x): change(x) if x.is_floating_point() else x for x in made.masks.values() if x is not None}
    return replace(made, masks={k: None if x is None else new[id(x)] for k, x in made.masks.items()})


def copied(made: Given) -> Given:
    """The same arguments, with masks in memory of their own."""
    new = {id(x): x.clone() for x in made.masks.values() if x is not None}
    return replace(made, masks={k: None if x is None else new[id(x)] for k, x in made.masks.items()})


def close(found: list[Tensor], exact: Exact, dtype: torch.dtype) -> None:
    """Hold results to the rule of all ops: twice the error of torch's, and the noise of the formula.

    It is looked at where a few roundings are not enough.
    """
    assert len(found) == len(exact.numbers)
    moved: list[float] | None = None
    for index, (x, e) in enumerate(zip(found, exact.numbers, strict=True)):
        assert x.shape == e.shape, f"result {index}: {list(x.shape)}, not {list(e.shape)}"
        known = e.isfinite()
        if not known.any():
            continue
        error = float((x.double() - e)[known].abs().max())
        # The gradient of a mask is of the mask's dtype.
        largest, eps = max(1.0, float(e[known].abs().max())), max(torch.finfo(y).eps for y in (dtype, x.dtype))
        allowed = (100 if eps < 1e-6 else 1) * eps * largest
        if not error <= allowed:
            moved = exact.noises() if moved is None else moved
            allowed = moved[index] + eps * largest
        assert error <= allowed, f"result {index} of {len(found)}: error {error:.3g}, allowed {allowed:.3g}"


def same_error(ours: Exception, torchs: Exception) -> bool:
    """Whether one is of the other's kind, or ours says clearly what is wrong."""
    related = isinstance(ours, type(torchs)) or isinstance(torchs, type(ours))
    related |= "tensor of 0 elements" in str(
        torchs
    )  # a view that we do not need; what follows would raise in torch too
    return related or (isinstance(ours, CLEAR) and _raised_by_us(ours) and len(str(ours).splitlines()) == 1)


def _raised_by_us(error: Exception) -> bool:
    """Whether a check of ours raised it, or one of torch's that ours calls."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(file.startswith(fastformer.__path__[0]) for file in files[-2:])


def check(number: int) -> str:
    """Compare ours with torch's for one input; return what came of it."""
    random = Random(number)
    drawn = plan(random, number)
    made = given(random, drawn)
    how = Run(
        random.choice(("grad",) * 5 + ("no_grad", "inference")),
        random.random() < 0.2,
        random.choice(("",) * 6 + ("masks", "masks", "input", "parameters")),
    )
    checkpointed = random.random() < 0.2
    if checkpointed and how.meddles == "parameters":  # torch's checkpoint computes with what parameters are by then
        how.meddles = "masks"
    torchs = build(drawn, nn)
    ours = build(drawn, fastformer if drawn.direct else nn)
    if not drawn.direct:
        fastformer.convert(ours)
    for part in ours.modules():
        if isinstance(part, STACKS):
            part.checkpoint_activations = checkpointed
    kept = [(x, x.clone(), x._version) for x in (*made.inputs, *made.masks.values()) if x is not None]
    wanted = run(torchs, made, drawn, replace(how, meddles=""), backward=False)
    exact: Exact | None = Exact(drawn, ours, made)
    try:
        exact.run(how)
    except Exception:
        exact = None
    found = run(ours, made, drawn, how)
    if not (how.meddles and how.mode == "grad"):
        assert all(torch.equal(x, y) and x._version == version for x, y, version in kept), "an argument was changed"
    # Of no elements, torch looks at less.
    empty = any(isinstance(x, nn.ModuleList) and not len(x) for x in ours.modules())
    empty |= any(x.numel() == 0 for x, *_ in kept)
    if how.meddles and re.search("modified (by an )?inplace", str(found.error)):
        return "noticed"
    if wanted.error is not None:
        if found.error is not None:
            assert same_error(found.error, wanted.error), f"torch: {wanted.error!r}, ours: {found.error!r}"
            return "refused"
        # It has no attention with an additive mask of another dtype, and its views and stacks want a first element.
        assert exact is not None or empty, f"torch refuses: {wanted.error!r}"
    # torch does not look at a mask of which it is told, or found for another order of dimensions, that it is causal.
    stated = "order" in drawn.changes or any(value for name, value in made.hints.items() if "causal" in name)
    if stated and wanted.error is None and "attn_mask must be of shape" in str(found.error):
        return "contradicted"
    if empty and isinstance(found.error, CLEAR) and _raised_by_us(found.error):
        return "refused"
    numbers = results(found)
    if wanted.error is None:
        if not checkpointed:  # which calls layers again
            assert found.calls == wanted.calls, "calls differ"
        assert [x.dtype for x in found.outputs] == [x.dtype for x in wanted.outputs]
    if exact is None:
        assert all(x.isfinite().all() for x in numbers)
        return "more"
    if made.contradicted:
        return "contradicted"
    close(numbers, exact, drawn.dtype)
    return "equal"


def test_models(numbers: range) -> None:
    fuzz.each(numbers, check, {"equal": 1 / 3, "refused": 1 / 20}, lambda number: plan(Random(number), number))
