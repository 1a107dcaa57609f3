"""What holds for every fused op: backends, checkpointing, compilation, registered ops.

The calls are in fused_calls.py, one line an op.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastformer
from fastformer import functional
from fastformer.backend import BackendError
from fastformer.functional import choice
from fastformer.host import autograd_function
from fastformer.packing import Layout
from tests.support.closeness import assert_close, gradients
from tests.support.fused_calls import CALLS, leaves, tensors
from tests.support.fused_op import DEVICE, needs_kernels

N = 5
OPS = pytest.mark.parametrize("op", CALLS)
DROPOUT_OPS = pytest.mark.parametrize("op", [op for op in CALLS if CALLS[op].dropout])


@pytest.fixture
def no_launch(monkeypatch):
    """No kernel runs."""

    def launch(*names):
        raise AssertionError(f"launched {'.'.join(names)}")

    monkeypatch.setattr(autograd_function, "_launcher", launch)


@pytest.fixture
def run(op):
    """Call the op on its floating-point inputs, with dropout if it has it, and on what else it takes."""
    call = CALLS[op]
    extra = {device: call.extra(N, device) for device in {"cpu", DEVICE}}

    def run_op(inputs: Sequence[Tensor], p: float = 0.0) -> list[Tensor]:
        return tensors(call.call(extra[inputs[0].device.type], p if call.dropout else 0.0, *inputs))

    return run_op


def test_every_op_has_a_call():
    assert set(CALLS) == set(functional.OPS)


@OPS
def test_auto_runs_the_reference_on_a_cpu_and_says_why(op, run, no_launch):
    inputs = leaves(op, N, "cpu")
    with fastformer.backend("reference"):
        expected = run(inputs)
    for a, b in zip(run(inputs), expected, strict=True):
        assert torch.equal(a, b)
    (line,) = (line for line in fastformer.explain(inputs[0]).splitlines() if line.startswith(f"{op}:"))
    assert line.startswith(f"{op}: reference ({op} ")
    assert any(reason in line for reason in ("on the CPU", "not installed"))


@needs_kernels
@OPS
def test_triton_runs_kernels(op, run, monkeypatch):
    """The tests below would pass as well if nothing were fused."""
    launched = []
    launcher = autograd_function._launcher
    monkeypatch.setattr(autograd_function, "_launcher", lambda *names: launched.append(names) or launcher(*names))
    with fastformer.backend("triton"):
        assert f"{op}: triton" in fastformer.explain(torch.empty(1, device=DEVICE)).splitlines()
        outputs = run(inputs := leaves(op, N, DEVICE), 0.5)
        assert launched
        forward = len(launched)
        gradients(outputs, inputs)
        if op != "linear_cross_entropy":  # its gradients are computed with its loss
            assert len(launched) > forward


@needs_kernels
@OPS
def test_kernels_keep_to_their_tensors(op, run, monkeypatch):
    """Before and behind each tensor lies NaN: what a kernel takes from there, or leaves there, shows."""
    margin = 1 << 14  # more than a tile
    allocated, new_empty = [], Tensor.new_empty

    def fenced(like: Tensor, *size: int | Sequence[int], **settings: object) -> Tensor:
        shape = torch.Size(size if isinstance(size[0], int) else size[0])
        whole = new_empty(like, shape.numel() + 2 * margin, **settings)
        whole.fill_(torch.nan if whole.is_floating_point() else 77)
        allocated.append(whole)
        return whole[margin : whole.numel() - margin].view(shape)

    inputs = leaves(op, N, DEVICE)
    given = [fenced(x, x.shape).copy_(x.detach()).requires_grad_() for x in inputs]
    before = len(allocated)
    with fastformer.backend("triton"):
        with monkeypatch.context() as patched:
            patched.setattr(Tensor, "new_empty", fenced)
            outputs = run(given)
            found = [*outputs, *gradients(outputs, given)]
        assert len(allocated) > before
        for whole in allocated:
            margins = torch.cat([whole[:margin], whole[-margin:]])
            assert (margins.isnan() if margins.is_floating_point() else margins == 77).all()
        outputs = run(inputs)
        for a, b in zip(found, [*outputs, *gradients(outputs, inputs)], strict=True):
            assert torch.equal(a, b)


@needs_kernels
@OPS
def test_triton_raises_for_fp64(op, run, no_launch):
    inputs = leaves(op, N, DEVICE, torch.float64)
    with fastformer.backend("triton"), pytest.raises(BackendError, match=f"{op} takes float32, .*, not float64"):
        run(inputs)
    with fastformer.backend("auto"):
        run(inputs)


@OPS
def test_triton_raises_where_it_is_not_installed(op, run, monkeypatch, no_launch):
    monkeypatch.setattr(choice, "_TRITON", False)
    inputs = leaves(op, N, DEVICE)
    with fastformer.backend("triton"), pytest.raises(BackendError, match=f"{op} needs Triton, which is not installed"):
        run(inputs)
    with fastformer.backend("auto"):
        run(inputs)


@needs_kernels
@OPS
def test_triton_raises_under_vmap(op, run, no_launch):
    """Over all inputs, and over each alone: weights, say, as for an ensemble."""
    inputs = [x.detach() for x in leaves(op, N, DEVICE)]
    for batched in (range(len(inputs)), *([i] for i in range(len(inputs)))):
        given = [torch.stack([x] * 2) if i in batched else x for i, x in enumerate(inputs)]
        in_dims = tuple(0 if i in batched else None for i in range(len(inputs)))
        mapped = torch.func.vmap(lambda *inputs: tuple(run(inputs)), in_dims)
        with fastformer.backend("triton"), pytest.raises(BackendError, match=f"{op} has no rule for torch.func.vmap"):
            mapped(*given)


@needs_kernels
@OPS
def test_triton_raises_under_forward_mode(op, run, no_launch):
    inputs = tuple(x.detach() for x in leaves(op, N, DEVICE))
    with fastformer.backend("triton"), pytest.raises(BackendError, match=f"{op} has no forward-mode derivative"):
        torch.func.jvp(lambda *inputs: tuple(run(inputs)), inputs, inputs)


@needs_kernels
@OPS
def test_checkpointing_draws_the_same_dropout(op, run):
    """The forward pass that backward repeats is the one that was run."""
    inputs = leaves(op, N, DEVICE)
    with fastformer.backend("triton"):
        torch.manual_seed(1)
        outputs = run(inputs, 0.5)
        torch.manual_seed(1)
        again = checkpoint(lambda *inputs: run(inputs, 0.5), *inputs, use_reentrant=False)
        torch.randn(3, device=DEVICE)
        for a, b in zip([*again, *gradients(again, inputs)], [*outputs, *gradients(outputs, inputs)], strict=True):
            assert torch.equal(a, b)


@needs_kernels
@DROPOUT_OPS
def test_dropout_draws_anew_each_time(op, run):
    inputs = leaves(op, N, DEVICE)
    with fastformer.backend("triton"):
        assert not all(torch.equal(a, b) for a, b in zip(run(inputs, 0.5), run(inputs, 0.5), strict=True))


def shared(op: str, n: int, device: str) -> list[Tensor]:
    """Return inputs of which those of one shape are one tensor, as in self-attention."""
    by_shape: dict[torch.Size, Tensor] = {}
    return [by_shape.setdefault(x.shape, x) for x in leaves(op, n, device)]


@needs_kernels
@pytest.mark.parametrize(
    ("op", "of"),
    [(op, leaves) for op in CALLS] + [(op, shared) for op in ("attention", "dropout_add_layer_norm", "embedding")],
)
def test_compiled_as_eager(op, of, run):
    """With dropout; also with one tensor in several places."""
    torch._dynamo.reset()
    inputs = of(op, N, DEVICE)
    distinct = list(dict.fromkeys(inputs))
    compiled = torch.compile(lambda: run(inputs, 0.5), fullgraph=True, backend="aot_eager")
    with fastformer.backend("triton"):
        results = []
        for call in (compiled, lambda: run(inputs, 0.5)):
            torch.manual_seed(1)
            outputs = call()
            results.append([*outputs, *gradients(outputs, distinct)])
    for a, b in zip(*results, strict=True):
        assert_close(a, b)
        assert b.any()


@needs_kernels
@OPS
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("inputs", ["one tensor in several places", "one made of the other"])
def test_gradients_that_are_differentiable_are_the_same_gradients(op, run, backend, inputs):
    if inputs == "one tensor in several places":
        given = list(dict.fromkeys(places := shared(op, N, DEVICE)))
    else:
        given = leaves(op, N, DEVICE)
        places = [given[0], *(x + given[0].sum() / 4 for x in given[1:])]
    with fastformer.backend(backend):
        outputs = run(places)
        directions = [torch.randn_like(x) for x in outputs]
        once = torch.autograd.grad(outputs, given, directions, retain_graph=True)
        twice = torch.autograd.grad(outputs, given, directions, create_graph=True)
    for a, b in zip(twice, once, strict=True):
        assert_close(a, b)


@needs_kernels
@OPS
@pytest.mark.parametrize("way", ["torch.func", "second derivative"])
def test_gradients_by_other_ways_are_the_references(op, run, way):
    inputs = leaves(op, N, DEVICE)

    def loss(*inputs: Tensor) -> Tensor:
        return sum(x.pow(3).sum() for x in run(inputs))

    def found() -> Sequence[Tensor]:
        if way == "torch.func":
            return torch.func.grad(loss, tuple(range(len(inputs))))(*inputs)
        return gradients(torch.autograd.grad(loss(*inputs), inputs, create_graph=True), inputs)

    # The reference of attention is SDPA, of which this form alone has a second derivative.
    with fastformer.backend("reference"), sdpa_kernel(SDPBackend.MATH):
        expected = found()
    with fastformer.backend("triton"):
        for a, b in zip(found(), expected, strict=True):
            assert_close(a, b)


@needs_kernels
@DROPOUT_OPS
def test_dropout_has_no_second_derivative(op, run):
    inputs = leaves(op, N, DEVICE)
    with fastformer.backend("triton"):
        outputs = run(inputs, 0.5)
        with pytest.raises(RuntimeError, match=r"second derivative of \w+ with dropout needs backend 'reference'"):
            torch.autograd.grad([x.sum() for x in outputs], inputs, create_graph=True)


class Marked(Tensor):
    """A user's own class of tensors."""


@needs_kernels
@OPS
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "gradients"])
def test_fused_ops_keep_the_class_of_tensors(op, run, grad):
    """As torch's own do, whichever input is of the class."""
    torch.manual_seed(0)
    plain = [x.detach() for x in leaves(op, N, DEVICE)]
    with fastformer.backend("triton"):
        expected = run(plain)
        for i in range(len(plain)):
            given = [x.clone().requires_grad_(grad) for x in plain]
            outputs = run([x.as_subclass(Marked) if i == j else x for j, x in enumerate(given)])
            assert [type(y) for y in outputs] == [Marked] * len(expected)
            for y, value in zip(outputs, expected, strict=True):
                assert torch.equal(y.detach().as_subclass(Tensor), value)
            if grad:
                gradients(outputs[0].as_subclass(Tensor), given)


# ---- registered ops


class OpCalls(TorchDispatchMode):
    """Keeps the arguments of each registered op, once for each choice of dtypes, settings and given tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, dict[tuple[object, ...], tuple[object, ...]]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastformer":
            given = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
            key = tuple((x.dtype, x.dim()) if isinstance(x, Tensor) else str(x) for x in given)
            self.arguments.setdefault(func.overloadpacket.__name__, {}).setdefault(key, given)
        return func(*args, **(kwargs or {}))


def attend(op, *options: Tensor, shapes=((2, 2, 5, 16), (2, 1, 7, 16), (2, 1, 7, 24)), **settings) -> None:
    """Two query heads of one key head, values of a head size of their own; options that are trained, and others."""
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    outputs = tensors(op(*inputs, *options, **settings))
    gradients(outputs, [*inputs, *(x for x in options if x.requires_grad)])


@pytest.fixture(scope="module")
def op_calls() -> dict[str, list[tuple[object, ...]]]:
    """The arguments of every registered op in calls of all ops, with other options, and of other gradients."""
    layout, key_layout = (Layout.from_lengths(lengths, DEVICE) for lengths in ([5, 3], [4, 3]))
    lengths = torch.tensor([5, 0], device=DEVICE)
    with fastformer.backend("triton"), OpCalls() as seen:
        for op, call in CALLS.items():
            extra = call.extra(N, DEVICE)
            inputs = leaves(op, N, DEVICE)
            # All gradients in 16 bits and with dropout, then each alone.
            for wanted in (range(len(inputs)), *([i] for i in range(len(inputs)))):
                dtype, p = (torch.float32, 0.0) if len(wanted) == 1 else (torch.float16, 0.5 if call.dropout else 0.0)
                given = [x.detach().to(dtype).requires_grad_(i in wanted) for i, x in enumerate(inputs)]
                gradients(tensors(call.call(extra, p, *given)), [given[i] for i in wanted])
        mask = torch.randn(5, 7, device=DEVICE, requires_grad=True)
        attend(functional.attention, mask, dropout_p=0.1, key_lengths=lengths, causal=True)
        attend(functional.attention_with_weights, mask, window=(2, 1))
        packed = {"shapes": ((8, 2, 16), (7, 1, 16), (7, 1, 24)), "layout": layout, "key_layout": key_layout}
        attend(functional.packed_attention, **packed, causal=True)
        with torch.no_grad():
            q, k = (torch.randn(2, 2, n, 16, device=DEVICE) for n in (1, 7))
            functional.attention(q, k, k, key_lengths=lengths)
        x, ids = torch.randn(4, 16, device=DEVICE), torch.arange(4, device=DEVICE)
        functional.embedding(ids, x)
        functional.layer_norm(x, 16)
        functional.rms_norm(x, 16)
        functional.dropout_add_layer_norm(x, x.half(), 16)
        w1, w2 = torch.randn(32, 16, device=DEVICE, requires_grad=True), torch.randn(16, 32, device=DEVICE)
        for activation, recompute in (("relu", False), ("gelu", True)):
            gradients(functional.feed_forward(x, w1, None, w2, None, activation=activation, recompute=recompute), [w1])
        gradients(functional.feed_forward(x, w1, None, w2[:, :16], None, activation="geglu", dropout_p=0.5), [w1])
        gradients(functional.linear_cross_entropy(x, w1, ids, reduction="none"), [w1])
    return {op: [*calls.values()] for op, calls in seen.arguments.items()}


@needs_kernels
@pytest.mark.parametrize("name", autograd_function.LAUNCHERS)
def test_registered_ops_pass_opcheck(name, op_calls):
    """Of the first call what torch.compile makes of it too; of all the schema, and the results' shapes and dtypes."""
    op, utils = getattr(torch.ops.fastformer, name).default, {"test_utils": ("test_schema", "test_faketensor")}
    for i, arguments in enumerate(op_calls[name]):
        # Rows of the gradient of a mask end with columns that are not written: no two results are equal.
        everything = i == 0 and name != "attention_mask_gradient"
        torch.library.opcheck(op, arguments, **({} if everything else utils))
