"""The fused feed-forward layer: values, gradients, dropout, what is kept, and torch's machinery."""

import math

import pytest
import torch
import torch.nn.functional as F

import fastformer
from fastformer.functional import feed_forward
from fastformer.functional.feed_forward import op as fused
from tests.support.closeness import assert_close, gradients
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference, needs_kernels, poisoned

pytestmark = [needs_kernels, pytest.mark.usefixtures("triton_backend")]

ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "geglu", "swiglu", "reglu"]


def wide(activation, width):
    return 2 * width if activation.endswith("glu") else width


def inputs_of(shape, width, out, activation, bias=True, dtype=torch.float64):
    """x, weight1, bias1, weight2, bias2; the weights as small as an initialisation's."""
    D, H = shape[-1], wide(activation, width)
    tensors = [
        torch.randn(*shape, dtype=torch.float64),
        torch.randn(H, D, dtype=torch.float64) / math.sqrt(D),
        torch.randn(H, dtype=torch.float64) if bias else None,
        torch.randn(out, width, dtype=torch.float64) / math.sqrt(width),
        torch.randn(out, dtype=torch.float64) if bias else None,
    ]
    return [None if x is None else x.to(DEVICE, dtype) for x in tensors]


def leaves(tensors):
    return [None if x is None else x.detach().clone().requires_grad_() for x in tensors]


# One number; ragged in every dimension; more rows and columns than a tile has, no multiple of it; no rows; a vector.
SHAPES = [((1, 1), 1, 1), ((3, 7, 5), 11, 3), ((19, 4), 261, 2), ((0, 4), 3, 2), ((5,), 8, 4)]


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("shape", "width", "out", "activation", "dtype"),
    [
        pytest.param(*sizes, activation, dtype := DTYPES[(i + j + 2) % 3], id=f"shape{i}-{activation}-{dtype}")
        for i, sizes in enumerate(SHAPES)
        for j, activation in enumerate(ACTIVATIONS)
    ],
)
def test_values_and_gradients(shape, width, out, activation, dtype):
    def op(*tensors):
        return feed_forward(*tensors, activation=activation)

    assert_as_accurate_as_reference(op, inputs_of(shape, width, out, activation), dtype)


@pytest.mark.parametrize(("activation", "dtype"), [*zip(ACTIVATIONS, DTYPES[1::-1] * 3, strict=True)], ids=str)
def test_recompute_without_biases(activation, dtype):
    def op(*tensors):
        return feed_forward(*tensors, activation=activation, recompute=True)

    bias = dtype == torch.float16
    assert_as_accurate_as_reference(op, inputs_of((3, 7, 5), 11, 3, activation, bias), dtype)


def test_many_rows_a_program(monkeypatch):
    """On a small GPU a program takes several tiles of rows: the sum of the bias's gradient goes on over all of them."""
    launch = pytest.importorskip("fastformer_kernels.feed_forward.kernels")
    monkeypatch.setattr(launch, "_row_programs", lambda *_: 2)
    for activation in ("relu", "geglu"):
        tensors = inputs_of((77, 3), 256, 2, activation)
        assert_as_accurate_as_reference(lambda *x, a=activation: feed_forward(*x, activation=a), tensors, torch.float32)


def test_many_partial_sums():
    """More programs than the second kernel takes at a time, which is 64."""
    launch = pytest.importorskip("fastformer_kernels.feed_forward.kernels")
    partials = torch.randn(130, 37, device=DEVICE)
    with poisoned():
        total = launch._add_partials(partials, partials)
    assert_close(total, partials.sum(0))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, of the interpreter: exp(88) and beyond
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_activation_everywhere(activation, dtype):
    """From far below to far above zero, where an approximation could differ; bias 0, weights 1."""
    kernels = pytest.importorskip("fastformer_kernels.feed_forward.kernels")
    x = torch.linspace(-12, 12, 4096).to(DEVICE, dtype)
    h = torch.stack([x, x.flip(0)], 1) if activation.endswith("glu") else x[:, None]
    exact = h.double().requires_grad_()
    expected = fused.activate(exact, activation)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    a = kernels.activate(h, None, activation, 0.0)
    again = torch.ones_like(a)
    dh, _ = kernels.activate_backward(again, h, None, activation, 0.0, True, False)
    # fp16: one rounding. fp32: the slope of gelu_tanh, 2.0e-6 (torch's own 1.0e-6), is the worst; the next is 7.1e-7.
    limit = 3e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for actual, exact in ((a, expected), (dh, slope)):
        assert ((actual.double() - exact).abs() / exact.abs().clamp(min=1)).max() < limit
    assert torch.equal(a, again)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinity_and_not_a_number(activation):
    """What the formula makes of them: x f(x) of -inf, -inf * 0, is NaN, as in torch; max(x, 0) is 0.

    Not what torch makes of them here: its gelu(inf) is NaN where oneDNN runs its AVX-512 code, and inf elsewhere.
    """
    kernels = pytest.importorskip("fastformer_kernels.feed_forward.kernels")
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0], device=DEVICE)
    h = torch.cat([x[:, None], torch.ones(4, 1, device=DEVICE)], 1) if activation.endswith("glu") else x[:, None]
    actual = kernels.activate(h, None, activation, 0.0)
    below = 0.0 if activation in ("relu", "reglu") else math.nan
    expected = torch.tensor([math.nan, math.inf, below, 0.0], device=DEVICE)[:, None]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    if activation == "relu":
        dh = torch.ones_like(h)
        kernels.relu_backward(dh, actual, 0.0, False)
        assert dh.flatten().tolist() == [1, 1, 0, 0]


# ---------------------------------------------------------------------------------------------------------------------
# Dropout


def dropped_hidden(activation, p, rows=20, width=300, recompute=False):
    """The hidden activations of equal rows after dropout, seen through an identity as the second weight."""
    x = torch.ones(rows, 1, device=DEVICE)
    weight1 = torch.ones(wide(activation, width), 1, device=DEVICE).requires_grad_()
    eye = torch.eye(width, device=DEVICE)
    x.requires_grad_()
    return (
        x,
        weight1,
        feed_forward(x, weight1, None, eye, None, activation=activation, dropout_p=p, recompute=recompute),
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dropout_forward_and_backward_agree(activation, recompute):
    """Each row's gradient is that of exactly the elements which were kept, scaled as they were."""
    p = 0.25
    x, weight1, out = dropped_hidden(activation, p, recompute=recompute)
    kept = out != 0
    n = out.numel()
    assert abs(int(kept.sum()) - n * (1 - p)) < 5 * math.sqrt(n * p * (1 - p))
    h = torch.ones(1, wide(activation, 1), dtype=torch.float64, device=DEVICE).requires_grad_()
    value = fused.activate(h, activation).sum()
    (slope,) = torch.autograd.grad(value, h)
    assert_close(out.detach(), kept * (value / (1 - p)).float())
    # Another direction for each element, so that a mask of the right rate in the wrong places shows.
    direction = torch.randn_like(out)
    dx, dweight1 = torch.autograd.grad(out, (x, weight1), direction)
    g = direction * kept / (1 - p)
    assert_close(dx, (g.double().sum(1, keepdim=True) * slope.sum()).float())
    columns = g.double().sum(0)
    assert_close(dweight1[:, 0], torch.cat([columns * s for s in slope[0]]).float())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "geglu"])
def test_dropout_in_the_gradients_of_weights_and_biases(activation, recompute):
    """With the mask recovered from the output, the layer is a plain formula: all its gradients are that formula's."""
    p = 0.5
    tensors = inputs_of((23, 4), 267, 267, activation, dtype=torch.float32)
    tensors[3] = torch.eye(267, device=DEVICE)
    tensors[2] += 5.0  # of ReLU too every element is on
    ours = leaves(tensors)
    out = feed_forward(*ours, activation=activation, dropout_p=p, recompute=recompute)
    mask = (out - ours[4]).abs() > 1e-5
    x, w1, b1, w2, b2 = plain = leaves([t.double() for t in tensors])
    hidden = fused.activate(F.linear(x, w1, b1), activation) * mask / (1 - p)
    for a, b in zip(gradients(out, ours), gradients(F.linear(hidden, w2, b2), plain), strict=True):
        assert_close(a, b.float())


def test_dropout_of_everything():
    x, weight1, out = dropped_hidden("gelu", 1.0)
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (x, weight1)))


def test_rows_and_columns_share_no_dropout_decisions():
    kept = dropped_hidden("gelu", 0.5)[2] != 0
    assert len(kept.unique(dim=0)) == len(kept)
    assert len(kept.unique(dim=1).T) == kept.shape[1]


# ---------------------------------------------------------------------------------------------------------------------
# What is kept


def kept_bytes(op, parameters):
    """The bytes kept for backward beside the parameters, each storage once."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    actual = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            actual[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = op()
    assert out.requires_grad
    return sum(actual.values())


def test_kept_bytes():
    """F = 4 D, dropout, 16 bits: 10/22 = 0.455 of what torch's own ops keep, 2/22 = 0.091 with recompute.

    A token's bytes in plain PyTorch on a GPU: x 2 D, h 8 D, dropout's mask of one byte 4 D, a 8 D; here x 2 D and 8 D
    of h or, for ReLU, of a. Gated, h is twice as wide, and eager keeps the gate's activation too: 18/38.
    """
    M, D = 64, 16

    def eager(x, w1, b1, w2, b2, activation):
        # The op behind F.dropout on a GPU, with its mask of bytes.
        a = fused.activate(F.linear(x, w1, b1), activation)
        return F.linear(torch.native_dropout(a, 0.1, True)[0], w2, b2)

    for activation, plain, default in [("relu", 22, 10), ("gelu", 22, 10), ("gelu_tanh", 22, 10), ("swiglu", 38, 18)]:
        tensors = leaves(inputs_of((M, D), 4 * D, D, activation, dtype=torch.float16))
        parameters = tensors[1:]

        def ours(recompute, tensors=tensors, activation=activation):
            return feed_forward(*tensors, activation=activation, dropout_p=0.1, recompute=recompute)

        unit, seed = M * D, 8
        assert kept_bytes(lambda t=tensors, a=activation: eager(*t, a), parameters) == plain * unit
        assert kept_bytes(lambda f=ours: f(False), parameters) == default * unit + seed
        assert kept_bytes(lambda f=ours: f(True), parameters) == 2 * unit + seed
    with torch.no_grad():
        assert not ours(False).requires_grad


@pytest.mark.parametrize(("activation", "wide"), [("relu", 0), ("gelu", 1), ("swiglu", 2)])
def test_backward_makes_no_tensor_for_what_replaces_another(activation, wide, monkeypatch):
    """Of M x F numbers: nothing for ReLU, whose dh replaces da, and dh alone for others, whose a replaces da."""
    M, F = 128, 24
    kernels = pytest.importorskip("fastformer_kernels.feed_forward.kernels")
    tensors = leaves(inputs_of((M, 4), F, 3, activation, dtype=torch.float32))
    out = feed_forward(*tensors, activation=activation)
    sizes = []
    monkeypatch.setattr(kernels, "recorded", lambda x: sizes.append(x.numel()) or x)
    out.sum().backward()
    assert sum(size for size in sizes if size >= M * F) == wide * M * F


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("recompute", [False, True])
def test_only_wanted_gradients(activation, recompute):
    """Each input alone: the same gradient as with all, in the right place, and no work for the others."""
    tensors = leaves(inputs_of((5, 4), 6, 3, activation, dtype=torch.float32))
    everything = gradients(feed_forward(*tensors, activation=activation, recompute=recompute), tensors)
    for index in range(5):
        alone = [x.detach() for x in tensors]
        alone[index].requires_grad_()
        out = feed_forward(*alone, activation=activation, recompute=recompute)
        (actual,) = gradients(out, [alone[index]])
        assert_close(actual, everything[index])


def test_no_kernel_for_unwanted_gradients(monkeypatch):
    tensors = [x.detach() for x in inputs_of((5, 4), 6, 3, "gelu", dtype=torch.float32)]
    tensors[4].requires_grad_()
    out = feed_forward(*tensors, activation="gelu")
    for name in ("_activate", "_activate_backward", "_relu_backward"):
        monkeypatch.setattr(fused, name, None)
    out.sum().backward()
    assert_close(tensors[4].grad, torch.full((3,), 5.0, device=DEVICE))


# ---------------------------------------------------------------------------------------------------------------------
# Layouts and torch's machinery


@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_strided_and_broadcast_inputs(activation):
    x, w1, b1, w2, b2 = inputs_of((6, 5), 8, 4, activation)
    given = [
        x.expand(3, 6, 5).transpose(0, 1),
        w1.T.contiguous().T,
        torch.stack([b1, b1], 1)[:, 0],
        torch.cat([w2, w2], 1)[:, :8],
        b2[:1].expand(4),
    ]

    def op(*tensors):
        # The helper makes copies; the layouts are made again here.
        x, w1, b1, w2, b2 = tensors
        x = x[:, 0].expand(3, 6, 5).transpose(0, 1)
        wider = torch.stack([b1, b1], 1)[:, 0]
        out = feed_forward(x, w1.T.contiguous().T, wider, torch.cat([w2, w2], 1)[:, :8], b2, activation=activation)
        return out.transpose(0, 2)

    assert_as_accurate_as_reference(op, given, torch.float32)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_autocast_is_that_of_linear(activation):
    tensors = leaves(inputs_of((6, 4), 7, 3, activation, dtype=torch.float32))

    def run():
        with torch.autocast(DEVICE, torch.bfloat16):
            out = feed_forward(*tensors, activation=activation)
        return out, gradients(out, tensors)

    out, actual = run()
    with fastformer.backend("reference"):
        expected, wanted = run()
    assert out.dtype == expected.dtype == torch.bfloat16
    assert_close(out, expected, roundings=4)
    for a, b in zip(actual, wanted, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert (a - b).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * b.abs().max()


@pytest.mark.parametrize(("recompute", "kept"), [(False, 5), (True, 1)])
def test_compiled_keeps_as_little(recompute, kept):
    """x and four times its width, or x alone: a compiler may take what is recomputed for what it has already."""
    tensors = leaves(inputs_of((32, 16), 64, 16, "gelu", dtype=torch.float32))

    def layer(*x):
        return feed_forward(*x, activation="gelu", dropout_p=0.5, recompute=recompute)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for run in (compiled, layer):
        torch.manual_seed(1)
        out = run(*tensors)
        results.append([out, *gradients(out, tensors)])
    assert_close(*results)
    actual = kept_bytes(lambda: compiled(*tensors), tensors[1:])
    assert 0 <= actual - kept * tensors[0].numel() * 4 <= 8  # and the seed
    with torch.no_grad():
        assert compiled(*tensors).shape == (32, 16)
