"""The backward pass of the fused attention kernels: which kernels run, in what order sums are made, what they hide."""

import itertools

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.functional import attention, attention_with_weights
from fastformer.functional.attention import fused as fused_attention
from fastformer_kernels.attention.arguments import Arguments
from fastformer_kernels.host import launch
from fastformer_kernels.host.architecture import architecture_of
from tests.kernels.attention_cases import (
    DTYPES,
    by_distance,
    check,
    check_second_derivative,
    fused,
    heads,
    moved,
    on_device,
    plain,
)
from tests.support.closeness import gradients
from tests.support.fused_op import DEVICE, needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2), (3,), (4,), (0, 4), (1, 3)])
def test_only_the_gradients_that_are_wanted(wanted, monkeypatch):
    """Of q, k and v, and of a bias and sinks, which are 3 and 4."""
    asked, backward = [], fused_attention._backward
    monkeypatch.setattr(fused_attention, "_backward", lambda *x: asked.append(x[8:10]) or backward(*x))
    x = on_device(*heads(1, 2, 20, 30, 16), *([by_distance(2, 30), torch.randn(2)] if max(wanted) > 2 else []))
    x = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(x)]
    leaves, own = [x[i] for i in wanted], dict(zip(("distance_bias", "sinks"), x[3:], strict=False))
    actual, expected = (gradients(run(attention, *x[:3], **own), leaves) for run in (fused, plain))
    torch.testing.assert_close(actual, expected)
    assert asked == [(0 in wanted, 1 in wanted or 2 in wanted)]


OWN = {
    "mask": lambda: {"mask": torch.randn(40, 70)},
    "bias and sinks": lambda: {"distance_bias": by_distance(2, 70), "sinks": torch.randn(2)},
    "nothing": lambda: {},
}


@pytest.mark.parametrize(
    ("own", "V", "rules"),
    [
        pytest.param("mask", 16, {}, id="mask"),
        pytest.param("mask", 16, {"causal": True}, id="mask, causal"),
        pytest.param("mask", 16, {"key_lengths": torch.tensor([70, 66])}, id="mask, lengths"),
        pytest.param("mask", 16, {"softcap": 1.0}, id="mask, softcap"),
        pytest.param("bias and sinks", 16, {"causal": True, "window": (30, None)}, id="bias, causal, window"),
        pytest.param("bias and sinks", 16, {}, id="bias"),
        pytest.param("nothing", 40, {}, id="wider values"),
        pytest.param("nothing", 8, {}, id="narrower values"),
        pytest.param("nothing", 200, {}, id="much wider values"),
    ],
)
def test_gradients_use_the_mask_of_the_forward_pass(own, V, rules):
    """The mask is read off the weights; the gradients must be those of plain attention with that mask."""
    options = OWN[own]()
    # Two query heads of one key head have masks of their own.
    x = on_device(*heads(2, 2, 40, 70, 16, 1, V), *options.values())
    settings = dict(zip(options, x[3:], strict=True)) | moved(rules)
    out, dropped = fused(attention_with_weights, *x[:3], dropout_p=0.4, **settings)
    _, weights = plain(attention_with_weights, *x[:3], **settings)
    expected = gradients(torch.matmul(weights * (dropped != 0) / 0.6, x[2]), x)
    torch.testing.assert_close(gradients(out, x), expected, rtol=1e-3, atol=1e-4)


# numpy, under the interpreter, reports what is hidden or dropped later.
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_padding_does_not_outweigh_scores_far_below_zero():
    """A padded key scores 0: its weight, beside real scores of 2^-144, is infinite until it is hidden.

    Not in fp32, whose masks come before the exponential, and whose log-sum-exp of -144 rounds by 2^-17.
    """
    q, k, v = heads(3, 2, 70, 139, 16)  # rows of more than one tile
    q, k = 0.1 * q + 5, 0.1 * k - 5
    at = torch.arange(139)
    for dtype in set(DTYPES) - {torch.float32}:
        check((q, k, v), dtype, key_mask=torch.stack([at >= 70, at < 100, at % 50 != 7]))
        check((q, k, v), dtype, key_lengths=torch.tensor([139, 70, 100]))


def test_delta_has_a_kernel_only_where_dq_has_none(monkeypatch):
    from fastformer_kernels.attention import backward as attention_backward
    from fastformer_kernels.attention import delta as attention_delta

    launched = []
    for module in (attention_backward, attention_delta):
        launch = module.launch
        monkeypatch.setattr(
            module, "launch", lambda kernel, *x, launch=launch, **y: launched.append(kernel) or launch(kernel, *x, **y)
        )
    settings = Arguments(5, 7, 0.25, shift=2, right=0)
    q, k, v = (
        torch.randn(2, 2, n, 16, device=DEVICE).half() for n in (5, 7, 7)
    )  # fp32 has no registers for it in the kernel of dQ
    dout, added = torch.randn_like(q), torch.randn(q.shape[:3], device=DEVICE)
    out, lse = torch.ops.fastformer.attention_forward(q, k, v, *settings)
    for dweights in (None, torch.zeros(*q.shape[:3], 7, dtype=q.dtype, device=DEVICE)):
        deltas = []
        given = (dout, q, k, v, out, lse, None if dweights is None else added, dweights)
        for wants_q, wants_keys in itertools.product((False, True), repeat=2):
            launched.clear()
            deltas.append(torch.ops.fastformer.attention_backward(*given, wants_q, wants_keys, *settings)[-1])
            assert launched.count(attention_backward._attention_queries) == wants_q
            assert launched.count(attention_delta._attention_delta) == (not wants_q)
        assert all(torch.equal(delta, deltas[0]) for delta in deltas)
        torch.testing.assert_close(deltas[0], (out.float() * dout.float()).sum(-1) + (0 if dweights is None else added))


def test_the_second_derivative_goes_through_the_formula():
    x = [*on_device(*heads(1, 2, 5, 7, 16)), torch.randn(5, 7, device=DEVICE, requires_grad=True)]
    check_second_derivative(x, lambda run: run(attention, *x, causal=True))


def masks(kind: torch.dtype) -> dict[str, Tensor | float]:
    """A mask of 70 queries and 90 keys, a key mask with gaps, and a cap."""
    given = torch.rand(70, 90) < 0.7 if kind == torch.bool else torch.randn(70, 90)
    return {"mask": given, "key_mask": torch.arange(90)[None] % 50 != 7, "softcap": 9.0}


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_masks_of_wide_heads(dtype, kind):
    """A branch spreads their products over the warps (`scores.score_gradient`)."""
    check(heads(1, 1, 70, 90, 136), dtype, **masks(kind))


@pytest.mark.parametrize("capability", [86, 120])
@pytest.mark.parametrize("masked", [False, True])
def test_wide_heads_in_fp32_with_the_tiles_of_desktop_gpus(masked, capability, monkeypatch):
    """Which fit into their 99 KiB of shared memory (`python -m benchmarks.codegen --arch 86 120 --only "K 256"`)."""
    monkeypatch.setattr(launch, "assumed", launch.Device(f"sm_{capability}", 82, 99 << 10))
    check(heads(1, 1, 70, 90, 136), torch.float32, **(masks(torch.bool) if masked else {"causal": True}))


def test_gpus_are_classified_by_their_matrix_units_and_shared_memory():
    classes = {
        "sm_80": ["sm_80", "sm_87"],
        "sm_86": ["sm_86", "sm_89", "sm_120", "sm_121"],
        "sm_90": ["sm_90"],
        "sm_100": ["sm_100", "sm_103", "sm_110"],
        "gfx9": ["gfx90a", "gfx942", "gfx950"],
        "gfx12": ["gfx1100", "gfx1201"],
        None: ["sm_75", "gfx1030", "gfx906"],
    }
    assert {name: {architecture_of(target) for target in targets} for name, targets in classes.items()} == {
        name: {name} for name in classes
    }


@pytest.mark.parametrize(("K", "kind"), [(13, None), (96, torch.bool), (96, torch.float32), (96, None)], ids=str)
def test_tf32(K, kind, monkeypatch):
    """With masks; and without, over many tiles, each of whose scores are computed before the softmax of the last."""
    T, S = (300, 300) if kind is None else (70, 90)
    q, k, v = (x.to(DEVICE, torch.float32).requires_grad_() for x in heads(1, 1, T, S, K))
    given = {"causal": True} if kind is None else masks(kind)
    rules = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in given.items()}
    monkeypatch.setattr("fastformer_kernels.attention.problem.precision", lambda x: "tf32")
    with fastformer.backend("triton"):
        actual = torch.autograd.grad(attention(q, k, v, **rules).square().sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with fastformer.backend("reference"):
        expected = torch.autograd.grad(attention(*exact, **rules).square().sum(), exact)
    for ours, theirs in zip(actual, expected, strict=True):
        # Five products in a chain, each of operands rounded to 2^-11: q k, p v, dout v, ds k or ds q, and dout itself.
        assert (ours.double() - theirs).abs().max() <= 5 * 2**-10 * theirs.abs().max()
