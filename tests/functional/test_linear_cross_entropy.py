"""functional.linear_cross_entropy and the LinearCrossEntropy module."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import fastformer
from fastformer.functional import linear_cross_entropy
from fastformer.functional.linear_cross_entropy import reference as chunked_cross_entropy
from tests.support.all_pairs import all_pairs
from tests.support.closeness import assert_close, assert_derivatives, assert_formula, gradients, random

# One class; odd sizes; a batch of padded rows.
SHAPES = [((1,), 1, 1), ((7,), 3, 5), ((3, 5), 4, 11)]


CHUNKS = ["one chunk", "a row a chunk", "ragged chunks"]


@pytest.fixture(params=CHUNKS)
def chunks(request, monkeypatch):
    """The rows are worked off in chunks: all at once, one by one, and four at a time with a rest; softmax by three."""
    if request.param != "one chunk":
        size = 1 if request.param == "a row a chunk" else 4 * 4 * 11
        monkeypatch.setattr(chunked_cross_entropy, "CPU_CHUNK_BYTES", size)
        monkeypatch.setattr(chunked_cross_entropy, "CPU_CHUNK_ROWS", 1)
        monkeypatch.setattr(chunked_cross_entropy, "CPU_BLOCK_BYTES", 3 * 4 * 11)


def naive(x, weight, bias, target, ignore_index, smoothing, reduction):
    """The definition: -sum_c q_c log p_c with q = (1 - eps) onehot + eps / V, over the targets that count."""
    logits = x @ weight.mT + (0 if bias is None else bias)
    logp = logits - logits.exp().sum(-1, keepdim=True).log()
    V = weight.shape[0]
    counts = target != ignore_index
    q = F.one_hot(target.where(counts, 0), V).to(x.dtype) * (1 - smoothing) + smoothing / V
    loss = -(q * logp).sum(-1) * counts
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / counts.sum()}[reduction]


@pytest.mark.parametrize(
    ("shape", "smoothing", "reduction", "chunks", "bias"),
    all_pairs(SHAPES, [0.0, 0.1, 1.0], ["mean", "sum", "none"], CHUNKS, [True, False]),
    indirect=["chunks"],
    ids=str,
)
@pytest.mark.usefixtures("chunks")
def test_values_and_gradients_are_those_of_the_formula(shape, smoothing, reduction, bias):
    rows, D, V = shape
    target = torch.randint(V, rows)
    ignore = -100 if math.prod(rows) == 1 else 2  # an index within the vocabulary, as that of padding
    settings = {"ignore_index": ignore, "label_smoothing": smoothing, "reduction": reduction}

    def formula(x, weight, bias):
        return naive(x, weight, bias, target, ignore, smoothing, reduction)

    inputs = [random(*rows, D), random(V, D), random(V) if bias else None]
    assert_formula(formula, inputs, lambda x, weight, bias: linear_cross_entropy(x, weight, target, bias, **settings))
    x, weight, b = inputs
    torchs = F.cross_entropy(F.linear(x, weight, b).flatten(0, -2), target.flatten(), **settings)
    assert_close(
        linear_cross_entropy(x, weight, target, b, **settings), torchs.view(rows if reduction == "none" else ())
    )


@pytest.mark.parametrize(
    ("reduction", "chunks", "smoothing"),
    all_pairs(["mean", "sum", "none"], CHUNKS, [0.0, 0.2]),
    indirect=["chunks"],
)
@pytest.mark.usefixtures("chunks")
def test_first_and_second_derivative(reduction, smoothing):
    target = torch.tensor([0, 2, -100])
    inputs = (random(3, 2), random(3, 2), random(3))

    def call(x, weight, bias):
        return linear_cross_entropy(x, weight, target, bias, label_smoothing=smoothing, reduction=reduction)

    assert_derivatives(call, inputs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_forward_mode_is_torchs(reduction):
    target, inputs, tangents = torch.tensor([0, 2, -100]), *((random(3, 2, grad=False), random(4, 2)) for _ in range(2))
    tangents_out = []
    for loss in (
        lambda x, weight: linear_cross_entropy(x, weight, target, reduction=reduction),
        lambda x, weight: F.cross_entropy(F.linear(x, weight), target, reduction=reduction),
    ):
        with forward_ad.dual_level():
            tangents_out.append(forward_ad.unpack_dual(loss(*map(forward_ad.make_dual, inputs, tangents))).tangent)
    assert_close(*tangents_out)


def test_a_loss_without_targets_is_torchs_with_gradient_zero():
    """As torch: a mean over no target is not a number, a sum is zero; gradients of both are zero."""
    x, weight = random(2, 3), random(4, 3)
    target = torch.full((2,), -100)
    mean = linear_cross_entropy(x, weight, target)
    assert mean.isnan()
    loss = linear_cross_entropy(x, weight, target, reduction="sum")
    assert loss == 0
    for nothing in (mean, loss, linear_cross_entropy(x[:0], weight, target[:0])):
        assert not any(g.any() for g in gradients(nothing, [x, weight]))  # NaN is true
    assert linear_cross_entropy(x[:0], weight, target[:0], reduction="sum") == 0
    assert linear_cross_entropy(x[:0], weight, target[:0], reduction="none").shape == (0,)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_computed_without_gradients(mode, reduction, monkeypatch):
    """In a validation, whose parameters require gradients as in training."""
    x, weight, target = random(7, 3), random(5, 3), torch.randint(5, (7,))
    chunk, wanted = chunked_cross_entropy._chunk_, []

    def recorded(*arguments, **options):
        wanted.append(options.get("wants_gradient", arguments[-1]))
        return chunk(*arguments, **options)

    monkeypatch.setattr(chunked_cross_entropy, "_chunk_", recorded)
    with mode():
        assert x.requires_grad
        loss = linear_cross_entropy(x, weight, target, reduction=reduction)
    assert_close(loss, F.cross_entropy(F.linear(x, weight), target, reduction=reduction))
    assert wanted == [False]


def confident_rows(smoothing: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs with losses from 12 down to 2e-35, and these losses in fp64.

    x `[M, 2]` and weight `[3, 2]` are in fp32; of the targets `[M]` the last is ignored.
    The logits are multiples of 1/32: products and differences are exact in fp32, so that what is lost is the loss's.
    """
    peaks, margins = (
        torch.tensor([100.0, 1000.0, -50.0, 0.125]),
        torch.tensor([-11.0, 0.0, 0.125, 1.0, 11.0, 15.0, 80.0]),
    )
    x, weight = torch.cartesian_prod(peaks, margins), torch.tensor([[1.0, 0.0], [1.0, -1.0], [1.0, -1.25]])
    differences = (x.double() @ weight.double().mT)[:, 1:] - x[:, :1].double()
    losses = differences.exp().sum(1).log1p() - smoothing * differences.sum(1) / 3
    target = torch.tensor([0] * len(x) + [-100])
    return torch.cat([x, x[:1]]), weight, target, torch.cat([losses, losses.new_zeros(1)])


@pytest.mark.parametrize(
    ("smoothing", "reduction", "chunks", "trained"),
    all_pairs([0.0, 1e-4, 0.5], ["mean", "sum", "none"], CHUNKS, [True, False]),
    indirect=["chunks"],
)
@pytest.mark.usefixtures("chunks")
def test_small_losses_of_large_logits(reduction, smoothing, trained):
    """The error is at most two roundings of each loss: that of its logarithm, and that of its exponentials."""
    x, weight, target, losses = confident_rows(smoothing)
    exact = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / (len(x) - 1)}[reduction]
    x.requires_grad_(trained)
    loss = linear_cross_entropy(x, weight, target, label_smoothing=smoothing, reduction=reduction).detach()
    assert ((loss - exact).abs() <= 2 * torch.finfo(torch.float32).eps * exact).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_its_inputs(dtype, chunks):
    x, weight = random(15, 8, dtype=dtype), random(11, 8, dtype=dtype)
    target = torch.randint(11, (15,))
    loss = linear_cross_entropy(x, weight, target, label_smoothing=0.1)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = F.cross_entropy(wide[0] @ wide[1].mT, target, label_smoothing=0.1)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) < 4 * torch.finfo(dtype).eps * expected.item()
    assert_close(gradients(loss, [x, weight]), [g.to(dtype) for g in gradients(expected, wide)], roundings=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_autocast_computes_the_logits_of_fp32_in_the_low_precision_and_leaves_fp64_alone(dtype, reduction):
    x, weight, bias = inputs = [random(*shape, dtype=dtype) for shape in ((6, 8), (9, 8), (9,))]
    target = torch.randint(9, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, target, bias, reduction=reduction)
        expected = F.cross_entropy(F.linear(x, weight, bias), target, reduction=reduction)
    assert_close(loss, expected)
    two_of_bf16 = 2 / 2**7 / torch.finfo(torch.float32).eps
    allowed = two_of_bf16 if dtype == torch.float32 else 100.0
    assert_close(gradients(loss, inputs), gradients(expected, inputs), allowed)


def test_the_module_starts_as_torchs_linear():
    torch.manual_seed(1)
    module = fastformer.LinearCrossEntropy(5, 7, label_smoothing=0.1, ignore_index=0)
    torch.manual_seed(1)
    linear = nn.Linear(5, 7)
    assert torch.equal(module.weight, linear.weight)
    assert torch.equal(module.bias, linear.bias)
    linear.load_state_dict(module.state_dict())
    x, target = random(2, 3, 5, dtype=torch.float32), torch.randint(7, (2, 3))
    expected = F.cross_entropy(linear(x).flatten(0, 1), target.flatten(), label_smoothing=0.1, ignore_index=0)
    assert_close(module(x, target), expected)
    assert_close(module.logits(x), linear(x))
    assert repr(module) == (
        "LinearCrossEntropy(in_features=5, num_classes=7, bias=True, ignore_index=0, label_smoothing=0.1, "
        "reduction='mean')"
    )
    assert fastformer.LinearCrossEntropy(5, 7, bias=False).bias is None
