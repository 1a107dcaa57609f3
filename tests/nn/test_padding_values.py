"""What padding holds does not matter: NaN and infinity there leave all else bitwise unchanged, forward and backward."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer import MultiheadAttention
from fastformer.functional import attention, attention_with_weights
from tests.support.all_pairs import all_pairs, name
from tests.support.closeness import gradients
from tests.support.fused_op import DEVICE, needs_kernels

# NumPy's, in the interpreter.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{kind} encountered") for kind in ("invalid value", "overflow")]
B, H, T, S, K = 3, 1, 6, 7, 16
KEYS, QUERIES = torch.tensor([4, 0, 7]), torch.tensor([5, 6, 3])
WITHIN = torch.arange(S) < KEYS[:, None]  # [B, S]
HOLES = torch.arange(S) % 3 != torch.arange(B)[:, None]  # at the start, inside and at the end
# The arguments of a call, and which keys are real.
CASES: dict[str, tuple[dict[str, Any], Tensor]] = {
    "key lengths": ({"key_lengths": KEYS}, WITHIN),
    "causal": ({"key_lengths": KEYS, "causal": True}, WITHIN),
    "both lengths": (
        {"key_lengths": KEYS, "query_lengths": QUERIES, "window": (2, 1), "alignment": "bottom_right"},
        WITHIN,
    ),
    "key mask": ({"key_mask": HOLES}, HOLES),
    "lengths and mask": ({"key_mask": HOLES, "key_lengths": KEYS}, HOLES & WITHIN),
    "mask of keys": ({"mask": HOLES[:, None, None, :]}, HOLES),
    "softcap": ({"key_mask": HOLES, "softcap": 3.0}, HOLES),
    "dropout": ({"key_mask": HOLES, "dropout_p": 0.2}, HOLES),
    "distances": ({"key_lengths": KEYS, "distance_bias": torch.linspace(-1, 1, 2 * S - 1)[None]}, WITHIN),
    "sinks": ({"key_lengths": KEYS, "query_lengths": QUERIES, "sinks": torch.ones(H)}, WITHIN),
    "additive mask": ({"key_mask": HOLES, "mask": torch.linspace(-1, 1, T * S).view(1, 1, T, S)}, HOLES),
}


@pytest.fixture(params=["reference", pytest.param("triton", marks=needs_kernels)])
def fillings(request: pytest.FixtureRequest) -> Iterator[tuple[float, ...]]:
    """Return what padding holds, on a backend; products of the second value overflow."""
    with fastformer.backend(request.param):
        yield (0.0, 3e38, math.nan, math.inf) if request.param == "reference" or DEVICE == "cuda" else (0.0, math.nan)


def agree(results: list[list[Tensor]]) -> None:
    """Check that results with finite padding are finite, and that the others are the same bit by bit."""
    for clean, *dirty in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert all(torch.equal(clean, actual) for actual in dirty)


# The interpreter is slow, and gets matrix products of bf16 wrong.
CALLS = [
    *(
        ("reference", *call)
        for call in all_pairs([torch.float32, torch.bfloat16], [attention, attention_with_weights], CASES)
    ),
    *(pytest.param("triton", torch.float32, attention, case, marks=needs_kernels) for case in CASES),
    *(
        pytest.param("triton", torch.float32, attention_with_weights, case, marks=needs_kernels)
        for case in ("key mask", "both lengths")
    ),
]


@pytest.mark.parametrize(("fillings", "dtype", "op", "case"), CALLS, indirect=["fillings"], ids=name)
def test_attention_reads_no_padding(
    fillings: tuple[float, ...], dtype: torch.dtype, op: Callable[..., Any], case: str
) -> None:
    arguments, real = CASES[case]
    arguments = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    if case == "additive mask":
        arguments["mask"] = arguments["mask"].requires_grad_()
    within = torch.arange(T) < QUERIES[:, None] if "query_lengths" in arguments else torch.ones(B, T, dtype=torch.bool)
    plain = [torch.randn(B, H, n, K) for n in (T, S, S)]
    results = []
    for filling in fillings:
        hidden = [~x[:, None, :, None] for x in (within, real, real)]
        q, k, v = (
            x.masked_fill(gone, filling).to(DEVICE, dtype).requires_grad_()
            for x, gone in zip(plain, hidden, strict=True)
        )
        torch.manual_seed(1)
        out = op(q, k, v, **arguments)
        out = list(out) if isinstance(out, tuple) else [out]
        mask = [arguments["mask"]] if case == "additive mask" else []
        results.append([*out, *gradients(out, [q, k, v, *mask])])
    agree(results)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("arguments", [{"key_lengths": KEYS}, {"key_mask": HOLES}], ids=["lengths", "mask"])
def test_padding_changes_no_bit_of_a_step_of_decoding(
    arguments: dict[str, Tensor], queries: int, fillings: tuple[float, ...]
) -> None:
    """Without a gradient, few queries on many keys: a kernel of its own."""
    real = WITHIN if "key_lengths" in arguments else HOLES
    q, k, v = (torch.randn(B, H, n, K) for n in (queries, S, S))
    results = []
    for filling in fillings:
        keys, values = (x.masked_fill(~real[:, None, :, None], filling).to(DEVICE) for x in (k, v))
        results.append([attention(q.to(DEVICE), keys, values, **{name: x.to(DEVICE) for name, x in arguments.items()})])
    agree(results)


def test_padding_changes_no_bit_of_cross_attention(fillings: tuple[float, ...]) -> None:
    """Outputs, weights and the gradients of the queries and of real memory; a module's own weights meet all memory."""
    module = MultiheadAttention(K, H, batch_first=True).to(DEVICE)
    query = torch.randn(B, T, K, device=DEVICE, requires_grad=True)
    memory = torch.randn(B, S, K)
    for need_weights in (False, True)[: len(fillings) - 1]:
        results = []
        for filling in fillings:
            arguments = memory.masked_fill(~HOLES[..., None], filling).to(DEVICE).requires_grad_()
            out = module(query, arguments, arguments, key_padding_mask=~HOLES.to(DEVICE), need_weights=need_weights)
            out = [x for x in out if x is not None]
            dq, dmemory = gradients(out, [query, arguments])
            results.append([*out, dq, dmemory])
        agree(results)


def _with_options(stack: Any, **options: Any) -> None:
    for layer in stack.layers:
        layer.self_attn = MultiheadAttention(K, 2, batch_first=True, **options)


# What has a stack run padded: a change of it, and arguments of its call.
PADDED: dict[str, tuple[Callable[[Any], object], dict[str, Any]]] = {
    "a hook": (lambda stack: stack.layers[1].register_forward_hook(lambda *_: None), {}),
    "a window over gaps": (lambda stack: _with_options(stack, window=(2, 2)), {}),
    "a learnt key": (lambda stack: _with_options(stack, add_bias_kv=True), {}),
    "weights": (lambda stack: None, {"need_weights": True}),
}


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("way", PADDED)
def test_padding_changes_no_bit_of_a_stack_that_runs_padded(way: str, kind: str, additive: bool) -> None:
    """Outputs, weights, and gradients of parameters and of real inputs; torch's are NaN."""
    cls = f"Transformer{kind.capitalize()}"
    layer = getattr(fastformer, f"{cls}Layer")(K, 2, 24, batch_first=True, dropout=0.0)
    stack = getattr(fastformer, cls)(layer, 2)
    change, arguments = PADDED[way]
    change(stack)
    padding = torch.zeros(B, S).masked_fill(~HOLES, -math.inf) if additive else ~HOLES
    plain = torch.randn(2, B, S, K)
    if kind == "encoder":
        arguments = {**arguments, "src_key_padding_mask": padding}
    else:
        arguments = {**arguments, "tgt_key_padding_mask": padding, "memory_key_padding_mask": padding}
    results = []
    for filling in (0.0, math.nan, math.inf):
        inputs = [x.masked_fill(~HOLES[..., None], filling).requires_grad_() for x in plain[: 1 + (kind == "decoder")]]
        out = stack(*inputs, **arguments)
        out = list(out) if isinstance(out, tuple) else [out]
        actual = gradients(out, [*inputs, *stack.parameters()])
        # The weights of padded queries are a part of the output: these queries have a gradient.
        results.append([*out, *(x[HOLES] for x in actual[: len(inputs)]), *actual[len(inputs) :]])
    agree(results)


def test_padding_of_a_memory_changes_no_bit_of_cached_steps(fillings: tuple[float, ...]) -> None:
    """Outputs of steps and chunks, of a decoder whose cache was made of a padded memory."""
    layer = fastformer.TransformerDecoderLayer(K, 2, 24, batch_first=True, dropout=0.0)
    stack = fastformer.TransformerDecoder(layer, 1).to(DEVICE).eval()
    memory, tokens = torch.randn(B, S, K), torch.randn(B, 3, K, device=DEVICE)
    results = []
    for filling in fillings:
        arguments = memory.masked_fill(~HOLES[..., None], filling).to(DEVICE)
        cache = stack.new_cache(arguments, ~HOLES.to(DEVICE))
        results.append([stack.step(x, cache) for x in tokens.split([2, 1], 1)])
    agree(results)
