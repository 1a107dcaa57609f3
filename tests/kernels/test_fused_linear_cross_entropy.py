"""The fused output loss: kernels, op, autograd, against the reference and fp64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastformer
from fastformer.functional import linear_cross_entropy
from fastformer.host import autograd_function
from tests.functional.test_linear_cross_entropy import confident_rows
from tests.support.closeness import assert_close, gradients
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference, needs_kernels, poisoned

pytestmark = needs_kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
IGNORED = -100


@pytest.fixture
def kernels():
    return pytest.importorskip("fastformer_kernels.linear_cross_entropy.kernels")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("fp16_sums", [False, True])
def test_products_are_summed_in_fp32_also_if_torch_may_sum_in_fp16(dtype, fp16_sums, kernels, monkeypatch):
    """torch has no product of fp16 with a result in fp32 then, and raises."""
    calls = []
    monkeypatch.setattr(torch, "addmm", lambda *_, **options: calls.append(options["out_dtype"]))
    settings = torch.backends.cuda.matmul
    settings.allow_fp16_accumulation = fp16_sums
    try:
        with FakeTensorMode(), torch.device("cuda"):
            total = torch.empty(4, 4)
            kernels._add_product(total, *(torch.empty(4, 4, dtype=dtype) for _ in range(2)), beta=1.0, alpha=1.0)
    finally:
        settings.allow_fp16_accumulation = False
    assert calls == ([] if fp16_sums and dtype == torch.float16 else [torch.float32])


@pytest.fixture
def small_chunks(kernels, monkeypatch):
    """Four rows a chunk, the last one shorter."""
    monkeypatch.setattr(kernels, "CHUNK_ROWS", 4)


def values(M: int, D: int, V: int, bias: bool = True) -> list[Tensor | None]:
    x, weight, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((M, D), (V, D), (V,)))
    return [x, weight, b if bias else None]


def leaves(M: int, D: int, V: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.to(DEVICE, dtype).requires_grad_() for x in values(M, D, V) if x is not None]


def targets(M: int, V: int) -> Tensor:
    """Random classes, the last class among them where there is room, and one row that is ignored."""
    target = torch.randint(V, (M,))
    target[-1] = V - 1
    if M > 2:
        target[M // 2] = IGNORED
    return target.to(DEVICE)


def assert_accurate(M, D, V, dtype, target=None, bias=True, **settings):
    target = targets(M, V) if target is None else target

    def op(x, weight, b=None):
        return linear_cross_entropy(x, weight, target, b, **settings)

    assert_as_accurate_as_reference(op, values(M, D, V, bias), dtype)


REDUCTIONS, SMOOTHING = ("mean", "sum", "none"), (0.0, 0.1, 1.0)
PAIRS = [(r, s) for r in range(3) for s in range(3)]  # with dtypes a Latin square, with biases a chessboard


@pytest.mark.parametrize(
    ("bias", "smoothing", "reduction", "dtype"),
    [
        *((r % 2 == s % 2, SMOOTHING[s], REDUCTIONS[r], DTYPES[(r + s + 2) % 3]) for r, s in PAIRS),
        (True, 0.1, "mean", torch.float32),
        (False, 1.0, "none", torch.bfloat16),
    ],
    ids=str,
)
def test_options(bias, smoothing, reduction, dtype, small_chunks):
    # Odd sizes, less than a block of columns, several chunks with a rest.
    assert_accurate(7, 5, 37, dtype, bias=bias, label_smoothing=smoothing, reduction=reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("M", "D", "V"),
    [
        (1, 1, 1),  # the smallest
        (3, 4, 16),  # rows without padding
        (2, 3, 32),  # a whole block
        (2, 3, 9001),  # several blocks, the last one ragged
        (2, 2, 8192),  # several whole blocks
    ],
)
def test_shapes(M, D, V, dtype):
    reduction = "none" if dtype == torch.float16 else "mean"
    assert_accurate(M, D, V, dtype, label_smoothing=0.1, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [IGNORED, 2, 10**12])
def test_ignored_rows(reduction, ignored, small_chunks, triton_backend):
    """Whether or not the ignored index is a class, and whatever those rows hold."""
    inputs = leaves(6, 3, 20)
    target = torch.tensor([1, 2, ignored, 2, ignored, 19], device=DEVICE)
    counts = target != ignored
    settings = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": 0.1}
    with poisoned():
        loss = linear_cross_entropy(inputs[0], inputs[1], target, inputs[2], **settings)
    alone = linear_cross_entropy(inputs[0][counts], inputs[1], target[counts], inputs[2], **settings)
    if reduction == "none":
        assert not loss[~counts].any()
        loss = loss[counts]
    assert_close(loss, alone)
    actual = gradients(loss, inputs)
    assert not actual[0][~counts].any()
    assert_close(actual, gradients(alone, inputs))
    wild = inputs[0].detach().masked_fill(~counts[:, None], math.nan)
    assert_close(linear_cross_entropy(wild, inputs[1], target, inputs[2], **settings).nan_to_num().sum(), loss.sum())


@pytest.mark.parametrize("smoothing", [0.0, 1e-4, 0.5])
@pytest.mark.parametrize("trained", [True, False])
def test_small_losses_of_large_logits(smoothing, trained, triton_backend):
    """The error is some roundings of each loss, not of its logits."""
    x, weight, target, exact = (t.to(DEVICE) for t in confident_rows(smoothing))
    loss = linear_cross_entropy(x.requires_grad_(trained), weight, target, label_smoothing=smoothing, reduction="none")
    # exp is 2^(x log2(e)), whose exponent has two roundings: at most 100, the largest difference, times what it is.
    assert ((loss.detach() - exact).abs() <= (2 * 100 + 8) * torch.finfo(torch.float32).eps * exact).all()
    totals = [linear_cross_entropy(x[[i]], weight, target[[i]], label_smoothing=smoothing) for i in range(len(x) - 1)]
    assert_close(torch.stack(totals).detach() / exact[:-1].float(), torch.ones(len(totals), device=DEVICE), 2 * 100 + 8)


def test_a_loss_without_targets(triton_backend):
    x, weight, _ = leaves(2, 3, 4)
    target = torch.full((2,), IGNORED, device=DEVICE)
    assert linear_cross_entropy(x, weight, target).isnan()
    loss = linear_cross_entropy(x, weight, target, reduction="sum")
    assert loss == 0
    assert not any(g.any() for g in gradients(loss, [x, weight]))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_no_rows(reduction, triton_backend):
    inputs = leaves(0, 3, 4)
    target = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    with poisoned():
        loss = linear_cross_entropy(inputs[0], inputs[1], target, inputs[2], reduction=reduction)
        assert loss.shape == ((0,) if reduction == "none" else ())
        actual = gradients(loss, inputs)
    assert [g.shape for g in actual] == [x.shape for x in inputs]
    assert not any(g.any() for g in actual)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_gradients_that_are_wanted(wanted, reduction, triton_backend, kernels, monkeypatch):
    inputs = [x.detach() for x in leaves(5, 3, 7)]
    target = targets(5, 7)
    for i in wanted:
        inputs[i].requires_grad_()
    asked = []
    forward = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *a: asked.append(list(a[6])) or forward(*a))
    autograd_function._launcher.cache_clear()
    loss = linear_cross_entropy(inputs[0], inputs[1], target, inputs[2], reduction=reduction)
    actual = gradients(loss, [inputs[i] for i in wanted])
    autograd_function._launcher.cache_clear()
    assert asked[-1] == [i in wanted for i in range(3)]
    with fastformer.backend("reference"):
        expected = linear_cross_entropy(inputs[0], inputs[1], target, inputs[2], reduction=reduction)
    assert_close(actual, gradients(expected, [inputs[i] for i in wanted]))


def test_without_gradients_the_losses_come_alone(triton_backend, kernels, monkeypatch):
    monkeypatch.setattr(kernels, "cross_entropy_gradients_kernel", None)
    inputs = leaves(5, 3, 7)
    with torch.no_grad():
        loss = linear_cross_entropy(inputs[0], inputs[1], targets(5, 7), inputs[2], label_smoothing=0.1)
    assert loss.isfinite()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_gives_the_same(reduction, triton_backend):
    inputs = leaves(5, 3, 7)
    loss = linear_cross_entropy(inputs[0], inputs[1], targets(5, 7), inputs[2], reduction=reduction)
    direction = torch.randn(loss.shape, device=DEVICE)
    first = torch.autograd.grad(loss, inputs, direction, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, inputs, direction), strict=True):
        assert torch.equal(a, b)


def test_second_derivative_of_the_losses_of_rows():
    """That of their mean is in test_fused_contract.py."""
    target, both = targets(5, 7), []
    for backend in ("reference", "triton"):
        torch.manual_seed(1)
        inputs = leaves(5, 3, 7)
        with fastformer.backend(backend):
            loss = linear_cross_entropy(inputs[0], inputs[1], target, inputs[2], reduction="none").square().sum()
            first = torch.autograd.grad(loss, inputs, create_graph=True)
            both.append([*first, *gradients(first, inputs)])
    assert_close(*both)


@pytest.mark.parametrize("layout", ["transposed", "broadcast", "batched", "sliced"])
def test_inputs_in_any_layout(layout, small_chunks, triton_backend):
    x, weight, bias = (y.detach() for y in leaves(6, 3, 7))
    target = targets(12, 7)[::2]  # not contiguous
    if layout == "transposed":
        x, weight = x.t().contiguous().t(), weight.t().contiguous().t()
    elif layout == "broadcast":
        x, bias = x[:1].expand(6, 3), bias[:1].expand(7)
    elif layout == "batched":
        x, target = x.view(2, 3, 3).transpose(0, 1), target.view(2, 3).t()
    else:
        x, weight, bias = x.repeat(1, 2)[:, 3:], weight.repeat(2, 1)[::2], bias.repeat(2)[::2]
    inputs = [y.requires_grad_() for y in (x, weight, bias)]
    for reduction in ("mean", "none"):
        results = []
        for backend in ("triton", "reference"):
            with fastformer.backend(backend), poisoned():
                loss = linear_cross_entropy(x, weight, target, bias, reduction=reduction)
                results.append([loss, *gradients(loss, inputs)])
        assert_close(*results)


def test_autocast(triton_backend):
    x, weight, bias = inputs = leaves(6, 8, 9)
    target = targets(6, 9)
    for reduction in ("mean", "none"):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = linear_cross_entropy(x, weight, target, bias, reduction=reduction)
            with fastformer.backend("reference"):
                expected = linear_cross_entropy(x, weight, target, bias, reduction=reduction)
        assert loss.dtype == torch.float32
        # The reference rounds the logits once more, after adding the bias, to 8 bits.
        assert_close(loss, expected, roundings=2.0**16)
        assert_close(gradients(loss, inputs), gradients(expected, inputs), roundings=2.0**17)
    # One dtype for all the products: fp16 within bf16 is cast too.
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = linear_cross_entropy(x.half(), weight, target, bias)
    assert all(g.dtype == torch.float32 for g in gradients(loss, inputs))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, in the interpreter: -inf is what is meant
def test_large_and_missing_logits(triton_backend):
    """Without overflow; a logit of -inf, or of the lowest finite number, is a class that cannot be."""
    x = torch.full((1, 1), 1e3, device=DEVICE)
    weight, label = torch.tensor([[1.0], [-1.0]], device=DEVICE), torch.tensor([1], device=DEVICE)
    assert linear_cross_entropy(x, weight, label) == 2e3
    for lowest in (-math.inf, torch.finfo(torch.float32).min):
        x, weight, bias = leaves(3, 2, 40)
        with torch.no_grad():
            bias[1:33] = lowest  # the whole first block of loads of some threads
        target = torch.tensor([0, 39, 33], device=DEVICE)
        loss = linear_cross_entropy(x, weight, target, bias)
        expected = F.cross_entropy(F.linear(x, weight, bias), target)
        assert_close(loss, expected)
        assert_close(gradients(loss, [x, weight, bias]), gradients(expected, [x, weight, bias]))
    everywhere = torch.full((40,), torch.finfo(torch.float32).min, device=DEVICE)
    assert_close(
        linear_cross_entropy(torch.zeros_like(x), weight, target, everywhere), torch.tensor(math.log(40), device=DEVICE)
    )


def test_labels_that_are_no_class_are_not_read(triton_backend, kernels):
    """On the CPU the public function raises; on a GPU, where nobody looks, such a row becomes NaN."""
    x, weight, bias = (y.detach() for y in leaves(3, 2, 5))
    target = torch.tensor([0, 5, -(2**62)], device=DEVICE)
    loss, dx, dweight, _ = kernels.forward(x, weight, bias, target, IGNORED, 0.0, [True] * 3)
    assert loss.isnan().tolist() == dx.isnan().any(1).tolist() == [False, True, True]
    assert dweight.isnan().all()


# ---- what it rounds where memory is saved, and that the logits are never all there


def test_fp16_keeps_gradients_that_fp16_cannot_hold(triton_backend):
    """Probabilities of 1e-8 are zero in fp16; what they add to the weight's gradient is not."""
    V = 64
    x, weight = torch.ones(1, 1, dtype=torch.half, device=DEVICE), torch.zeros(V, 1, dtype=torch.half, device=DEVICE)
    weight[0] = 18.0  # the others have probability 1.5e-8
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, torch.zeros(1, dtype=torch.int64, device=DEVICE), reduction="sum")
    actual = torch.autograd.grad(loss, weight, torch.tensor(2.0**12, device=DEVICE))[0]  # as GradScaler does
    assert_close(actual[1:].float(), torch.full((V - 1, 1), 2.0**12 * math.exp(-18.0), device=DEVICE), roundings=5e3)
    # Of single losses too; and factors beyond what fp16 holds do not overflow.
    factors = torch.tensor([2.0**17], device=DEVICE)
    loss = linear_cross_entropy(x, weight, torch.zeros(1, dtype=torch.int64, device=DEVICE), reduction="none")
    actual = torch.autograd.grad(loss, weight, factors)[0]
    assert_close(actual[1:].float(), torch.full((V - 1, 1), 2.0**17 * math.exp(-18.0), device=DEVICE), roundings=5e3)


class Results(TorchDispatchMode):
    """Notes each tensor that an op returns: its bytes, and its dtype if it is a matrix product with a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.scaled = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        actual = func(*args, **(kwargs or {}))
        for x in actual if isinstance(actual, tuple | list) else (actual,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel() * x.itemsize)
        if "addmm" in func.name() and (kwargs or {}).get("alpha", 1) != 1:
            self.scaled.append(actual.dtype)
        return actual


def test_fp16_scales_back_in_fp32(kernels):
    """A product that a library splits is rounded before its factor is applied: 2^15 times a weight of 4 is no fp16."""
    x, weight, bias = (y.detach() for y in leaves(5, 3, 7, torch.float16))
    weight *= 4
    with Results() as seen:
        _, dx, _, _ = kernels.forward(x, weight, bias, targets(5, 7), IGNORED, 0.0, [True] * 3)
    assert seen.scaled == [torch.float32] * 2  # dx and dW
    assert dx.dtype == torch.float16
    assert dx.isfinite().all()


def test_half_precision_accumulates_in_fp32(kernels, monkeypatch, triton_backend):
    """1 + 48 / 256 in chunks of a row: bf16 would round each sum back to 1."""
    monkeypatch.setattr(kernels, "CHUNK_ROWS", 1)
    M, V = 49, 256
    x = torch.full((M, 1), 2.0**-8, dtype=torch.bfloat16, device=DEVICE)
    x[0] = 1.0
    weight = torch.zeros(V, 1, dtype=torch.bfloat16, device=DEVICE)
    target = torch.zeros(M, dtype=torch.int64, device=DEVICE)
    _, _, dweight, dbias = kernels.forward(x, weight, None, target, IGNORED, 0.0, [False, True, True])
    assert_close(dweight[1:] * V, torch.full((V - 1, 1), 1 + 48 / 256, device=DEVICE))
    assert_close(dbias[1:] * V, torch.full((V - 1,), float(M), device=DEVICE))


@pytest.mark.parametrize("limit", ["CHUNK_ROWS", "CHUNK_BYTES"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_never_all_there(dtype, limit, kernels, monkeypatch):
    M, D, V = 20, 3, 64
    monkeypatch.setattr(kernels, limit, 4 if limit == "CHUNK_ROWS" else 4 * V * dtype.itemsize)
    chunk = 4 * V * 4  # the CPU's products of half precision cast to fp32
    x, weight, bias = (y.detach() for y in leaves(M, D, V, dtype))
    target = targets(M, V)
    for expected in ([True] * 3, [False] * 3):
        with Results() as seen:
            kernels.forward(x, weight, bias, target, IGNORED, 0.1, expected)
        assert seen.largest <= chunk
    with Results() as seen:
        kernels.backward(torch.randn(M, device=DEVICE), x, weight, bias, target, IGNORED, 0.1, [True] * 3)
    assert seen.largest <= chunk


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_of_the_size_of_the_logits_is_saved(reduction, triton_backend):
    M, D, V = 40, 3, 64
    inputs = leaves(M, D, V)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        linear_cross_entropy(inputs[0], inputs[1], targets(M, V), inputs[2], reduction=reduction)
    assert max(saved) <= max(M, V) * D
