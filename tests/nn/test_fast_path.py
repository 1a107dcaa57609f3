"""Inference takes the fast path through unmodified layers: one token a row on a CPU, and packed tokens in kernels.

Every other call takes `compose`; both compute the same.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import fastformer
from fastformer.nn import fast_path, layer_stack
from fastformer.nn.cache import KVCache
from fastformer.nn.rotary import Rotary
from fastformer.packing import Layout
from tests.nn.cache_cases import HEADS, LAYERS, D, Uncached, assert_reads, drawn, stacks
from tests.nn.layer_cases import build, randomise
from tests.support.fused_op import DEVICE, needs_kernels

both_kinds = pytest.mark.parametrize("kind", ["encoder", "decoder"])


@pytest.fixture
def fast_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every call that takes the fast path."""
    steps: list[int] = []
    run = fast_path._run
    monkeypatch.setattr(fast_path, "_run", lambda *arguments: steps.append(1) or run(*arguments))
    return steps


def new_cache(stack: Any, kind: str) -> KVCache:
    """Return the cache of two empty rows; for a decoder, with memories of two lengths."""
    if kind == "encoder":
        return stack.new_cache(2)  # type: ignore[no-any-return]
    hidden = torch.tensor([[False] * 3, [False, False, True]])
    memory = torch.stack(drawn(3, 3, seed=9)).to(next(stack.parameters()).dtype)
    return stack.new_cache(memory, hidden)  # type: ignore[no-any-return]


def outputs(stack: Any, cache: KVCache) -> Tensor:
    """Read three tokens at once, one in one row, and one a row twice, by which time lengths differ."""
    dtype = next(stack.parameters()).dtype
    chunk, one, *tokens = (torch.stack(drawn(n, n, seed=n)).to(dtype) for n in (3, 1, 1, 1))
    stack.step(chunk, cache)
    first = stack.step(tokens[0], cache)
    stack.step(one, cache, torch.tensor([1, 0]))
    return torch.cat([first, *(stack.step(x, cache) for x in tokens)], 1)


def outputs_of_compose(stack: Any, cache: KVCache) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_stack, "takes_one_token", lambda *_: False)
        return outputs(stack, cache)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class Shifted(fastformer.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


def hook(module: nn.Module) -> object:
    return module.register_forward_hook(lambda module, inputs, out: 2.0 * out)


def drop(module: Any, name: str) -> None:
    setattr(module, name, 1.0)
    module.train()


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook on a linear layer": lambda layer: hook(layer.linear1),
    "a hook on the last projection": lambda layer: hook(layer.self_attn.out_proj),
    "a subclass of a linear layer": lambda layer: setattr(layer.linear1, "__class__", Doubled),
    "a subclass of a norm": lambda layer: setattr(layer.norm2, "__class__", Shifted),
    "a forward in the instance": lambda layer: setattr(layer.norm2, "forward", torch.neg),
    "a parametrised weight": lambda layer: parametrizations.weight_norm(layer.linear1),
    "dropout": lambda layer: drop(layer.dropout1, "p"),
    "dropout of weights": lambda layer: drop(layer.self_attn, "dropout"),
    "the order of norms": lambda layer: setattr(layer, "norm_first", True),
    "the activation": lambda layer: setattr(layer, "activation", torch.tanh),
}


@pytest.mark.parametrize("change", CHANGES)
@both_kinds
def test_a_layer_that_is_modified_between_two_steps(
    kind: str, change: str, fast_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastformer.nn.inspection.mixing_reason", lambda *_: None)  # these changes mix no tokens
    _, stack = stacks(kind)
    unmodified = outputs(stack, new_cache(stack, kind))
    assert fast_steps
    cache, other_cache = new_cache(stack, kind), new_cache(stack, kind)
    CHANGES[change](stack.layers[0])
    modified = outputs(stack, cache)
    torch.testing.assert_close(modified, outputs_of_compose(stack, other_cache), atol=1e-12, rtol=0)
    assert change == "a parametrised weight" or not torch.allclose(modified, unmodified)


def test_hooks_of_all_modules_and_autocast_leave_the_fast_path(fast_steps: list[int]) -> None:
    stack, hooked_modules = stacks("decoder")[1].float(), []
    handle = register_module_forward_hook(lambda module, inputs, out: hooked_modules.append(module))
    try:
        outputs(stack, new_cache(stack, "decoder"))
    finally:
        handle.remove()
    assert hooked_modules
    with torch.autocast("cpu", torch.bfloat16):
        results = [run(stack, new_cache(stack, "decoder")) for run in (outputs, outputs_of_compose)]
    torch.testing.assert_close(*results, atol=0, rtol=0)
    assert not fast_steps


@pytest.mark.parametrize("name", ["linear1", "linear2", "norm2", "self_attn.out_proj"])
def test_changed_weights_count_in_the_next_step(name: str, fast_steps: list[int]) -> None:
    """Weights are changed in place, by other data, and by other parameters."""
    reference, stack = stacks("encoder")
    cache, uncached = stack.new_cache(1), Uncached(reference, None, 1)
    for change in (
        lambda weight, module: weight.data.neg_(),
        lambda weight, module: setattr(weight, "data", weight.data.flip(0)),
        lambda weight, module: setattr(module, "weight", nn.Parameter(weight.data.roll(1, 0))),
    ):
        for each in (reference, stack):
            module = each.layers[1].get_submodule(name)
            change(module.weight, module)
        cache.crop(0)  # the tokens before were read with other weights
        uncached.rows = [uncached.rows[0][:0]]
        assert_reads(stack, cache, uncached, drawn(1), "equal")
    assert len(fast_steps) == 3


def test_nan_in_cropped_tokens_reaches_no_output(fast_steps: list[int]) -> None:
    """Two rows of different lengths read tokens of NaN, which are then cropped."""
    reference, stack = stacks("encoder")
    cache, uncached = stack.new_cache(2), Uncached(reference, None, 2)
    assert_reads(stack, cache, uncached, drawn(4, 2), "padded")
    stack.step(torch.full((2, 3, D), torch.nan, dtype=torch.float64), cache)
    cache.crop(torch.tensor([4, 2]))
    assert_reads(stack, cache, uncached, drawn(1, 1, seed=1), "equal")
    assert len(fast_steps) == 1


# Packed tokens, in kernels


KINDS_OF_LAYERS: dict[str, dict[str, Any]] = LAYERS | {
    "RMS norm, gated": {"norm": "rms", "activation": "swiglu", "norm_first": True},
    "rotary, fewer heads of keys": {"rotary": Rotary(), "kv_heads": 1},
}


def run_packed(stack: Any, causal: bool = False) -> Tensor:
    """Run sequences of three lengths, of a decoder with memories of other lengths, in kernels."""
    layouts = Layout.from_lengths([3, 1, 4], DEVICE), Layout.from_lengths([2, 5, 1], DEVICE)
    dtype = next(stack.parameters()).dtype
    x, memory = (torch.cat(drawn(8, seed=seed)).to(DEVICE, dtype) for seed in (1, 2))
    more = (memory, layouts[1]) if isinstance(stack, fastformer.TransformerDecoder) else ()
    with fastformer.backend("triton"):
        return stack.packed(x, layouts[0], *more, causal=causal)  # type: ignore[no-any-return]


def run_composed(stack: Any, causal: bool = False) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_stack, "takes_packed", lambda *_: False)
        return run_packed(stack, causal)


def packed_stack(kind: str, **options: Any) -> Any:
    stack = build(fastformer, f"Transformer{kind.capitalize()}", torch.float32, d_model=D, nhead=HEADS, **options)
    randomise(stack)
    return stack.to(DEVICE).eval()


@needs_kernels
@torch.no_grad()
@pytest.mark.parametrize("layer", KINDS_OF_LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@both_kinds
def test_packed_tokens_take_the_fast_path_with_the_same_bits(
    kind: str, dtype: torch.dtype, layer: str, fast_steps: list[int]
) -> None:
    stack = packed_stack(kind, **KINDS_OF_LAYERS[layer]).to(dtype)
    for causal in (False, True):
        out = run_packed(stack, causal)
        assert len(fast_steps) == 1 + causal
        torch.testing.assert_close(out, run_composed(stack, causal), atol=0, rtol=0)
    padding = torch.tensor([[False] * 3, [False, True, True]], device=DEVICE)
    x = torch.stack(drawn(3, 3)).to(DEVICE, dtype)
    if kind == "encoder" and stack.layers[0].self_attn.batch_first:
        with fastformer.backend("triton"):
            stack(x, src_key_padding_mask=padding)
        assert len(fast_steps) == 3


@needs_kernels
@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_layer_computes_packed_tokens_as_its_modules_do(
    change: str, fast_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastformer.nn.inspection.mixing_reason", lambda *_: None)  # these changes mix no tokens
    stack = packed_stack("encoder")
    unmodified = run_packed(stack)
    CHANGES[change](stack.layers[0])
    modified = run_packed(stack)
    assert len(fast_steps) == (2 if change in ("the order of norms", "the activation") else 1)
    assert change == "a parametrised weight" or not torch.allclose(modified, unmodified)
    if not change.startswith("dropout"):
        torch.testing.assert_close(modified, run_composed(stack), atol=0, rtol=0)


@needs_kernels
def test_gradients_masks_modes_and_other_dtypes_leave_the_fast_path(fast_steps: list[int]) -> None:
    stack = packed_stack("encoder")
    run_packed(stack).sum().backward()
    assert all(parameter.grad is not None for parameter in stack.parameters())
    with torch.no_grad():
        with torch.autocast(DEVICE, torch.float16):
            run_packed(stack)
        with fastformer.backend("triton"):
            layout, x = Layout.from_lengths([3, 1], DEVICE), drawn(4)[0].to(DEVICE, torch.float32)
            stack.packed(x, layout, mask=torch.zeros(3, 3, device=DEVICE))
            with FlopCounterMode(display=False):
                stack.packed(x, layout)
            with pytest.raises((RuntimeError, AssertionError)):
                stack.packed(x[:, 1:], layout)
        norm = stack.layers[0].norm1
        for weight in (
            norm.weight.half(),
            norm.weight.repeat_interleave(2)[::2],
        ):  # kernels read one number after another
            norm.weight = nn.Parameter(weight)
            torch.testing.assert_close(run_packed(stack), run_composed(stack), atol=0, rtol=0)
    assert not fast_steps
    gap = Layout.from_mask(torch.tensor([[False, True, False], [False, False, True]], device=DEVICE))
    with torch.no_grad(), fastformer.backend("triton"), pytest.raises(ValueError, match="no padding between"):
        packed_stack("encoder", rotary=Rotary()).packed(x, gap)


def other_width(stack: Any, width: int) -> None:
    stack.layers[1].linear2 = nn.Linear(stack.layers[1].linear1.out_features, width).to(DEVICE)


def other_dtype(stack: Any) -> None:
    stack.layers[0].linear2.half()
    stack.layers[0].activation = lambda hidden: hidden.relu().half()


def set_weight(stack: Any, *shape: int) -> None:
    stack.layers[0].norm1.weight = nn.Parameter(torch.randn(shape, device=DEVICE))


UNFIT: dict[str, tuple[str, Callable[[Any], object], list[int], list[int] | None]] = {
    "fewer memories": ("decoder", lambda stack: None, [3, 1, 4], [2, 5]),
    "no memory": ("decoder", lambda stack: None, [3, 1, 4], None),
    "a decoder's layer": ("encoder", lambda stack: stack.layers.append(packed_stack("decoder").layers[0]), [3], None),
    "an encoder's layer": ("decoder", lambda stack: stack.layers.append(packed_stack("encoder").layers[0]), [3], [2]),
    "no layers": ("encoder", lambda stack: setattr(stack, "layers", nn.ModuleList()), [3, 1], None),
    "a width of 1": ("encoder", lambda stack: other_width(stack, 1), [3, 1], None),
    "a larger width": ("encoder", lambda stack: other_width(stack, D + 2), [3, 1], None),
    "another dtype": ("encoder", other_dtype, [3, 1], None),
    "a shorter weight": ("encoder", lambda stack: set_weight(stack, 4), [3, 1], None),
    "a weight of two dimensions": ("encoder", lambda stack: set_weight(stack, 4, 4), [3, 1], None),
}


@needs_kernels
@torch.no_grad()
@pytest.mark.parametrize("case", UNFIT)
def test_what_the_kernels_cannot_read_gives_what_compose_gives(case: str) -> None:
    """The same result, or the same error."""
    kind, change, lengths, memory_lengths = UNFIT[case]
    stack = packed_stack(kind)
    change(stack)

    def outcome() -> Any:
        arguments: list[Any] = [
            torch.cat(drawn(*lengths)).to(DEVICE, torch.float32),
            Layout.from_lengths(lengths, DEVICE),
        ]
        if kind == "decoder":
            memory = drawn(sum(memory_lengths or [1]), seed=1)[0].to(DEVICE, torch.float32)
            arguments += memory, memory_lengths and Layout.from_lengths(memory_lengths, DEVICE)
        with fastformer.backend("triton"):
            try:
                return stack.packed(*arguments)
            except (RuntimeError, TypeError, ValueError) as error:
                return type(error), str(error)

    result = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_stack, "takes_packed", lambda *_: False)
        expected = outcome()
    assert isinstance(result, tuple) == isinstance(expected, tuple)
    if isinstance(expected, tuple):
        assert result == expected
    else:
        torch.testing.assert_close(result, expected, atol=0, rtol=0)


@torch.no_grad()
def test_a_layout_of_another_type_is_named() -> None:
    with pytest.raises(TypeError, match="layout must be a Layout, not list"):
        packed_stack("encoder").packed(torch.randn(4, D, device=DEVICE), [3, 1])


@torch.no_grad()
def test_one_token_through_norms_of_a_narrower_dtype_and_a_layer_without_memory(fast_steps: list[int]) -> None:
    stack = stacks("encoder")[1].float()
    stack.layers.append(stacks("decoder")[1].float().layers[0])
    for norm in (stack.norm, stack.layers[0].norm1):
        norm.half()
    out = outputs(stack, stack.new_cache(2))
    assert fast_steps
    torch.testing.assert_close(out, outputs_of_compose(stack, stack.new_cache(2)))


@torch.no_grad()
@pytest.mark.parametrize(
    ("lengths", "plain_cores", "takes"), [([3, 1], False, True), ([3, 3], False, False), ([3, 1], True, False)]
)
def test_auto_leaves_to_sdpa_what_it_may_take(
    lengths: list[int], plain_cores: bool, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where kernels run: sequences of one length, and exact fp32 without tensor cores, go to SDPA."""
    monkeypatch.setattr(fast_path, "runs_fused", lambda *_: True)
    monkeypatch.setattr(fast_path, "on_plain_cores", lambda *_: plain_cores)
    stack, layout = packed_stack("encoder").cpu(), Layout.from_lengths(lengths)
    with fastformer.backend("auto"):
        assert fast_path.takes_packed(stack, torch.randn(sum(lengths), D), layout, False, None) == takes
