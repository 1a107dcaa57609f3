"""What holds for every fused op: backends, checkpointing, compilation.

The calls are in fused_calls.py, one line an op.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fastformer
from fastformer import functional
from fastformer.backend import BackendError
from fastformer.functional import choice
from fastformer.host import autograd_function
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
            actual = [*outputs, *gradients(outputs, given)]
        assert len(allocated) > before
        for whole in allocated:
            margins = torch.cat([whole[:margin], whole[-margin:]])
            assert (margins.isnan() if margins.is_floating_point() else margins == 77).all()
        outputs = run(inputs)
        for a, b in zip(actual, [*outputs, *gradients(outputs, inputs)], strict=True):
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
    monkeypatch.setattr(choice, "_INTERPRETED", True)  # without a GPU, the reason would be the CPU
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


@pytest.fixture
def mesh():
    """A device mesh of this process alone."""
    distributed = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=distributed.FakeStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh(DEVICE, (1,))
    torch.distributed.destroy_process_group()


@needs_kernels
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm", [fastformer.LayerNorm, fastformer.RMSNorm])
def test_kernels_leave_nested_tensors_and_dtensors_to_torch(norm, mesh, no_launch):
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    parts = [torch.randn(length, N, device=DEVICE) for length in (2, 3)]
    jagged, strided = (torch.nested.nested_tensor(parts, layout=form) for form in (torch.jagged, torch.strided))
    parallel = parallelize_module(norm(N, device=DEVICE), mesh, SequenceParallel())
    for module, x in (
        (norm(N, device=DEVICE), jagged),
        (norm(N, device=DEVICE), strided),
        (parallel, distribute_tensor(torch.randn(1, 4, N, device=DEVICE), mesh, [Shard(1)])),
    ):
        with fastformer.backend("triton"), pytest.raises(BackendError, match="no rule for nested tensors and DTensors"):
            module(x)


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


@needs_kernels
@pytest.mark.parametrize("op", ["embedding", "rotary"])
def test_autocast_leaves_what_multiplies_no_matrices(op, run):
    """As torch does with F.embedding, sums and products; norms and products of matrices have tests of their own."""
    inputs = leaves(op, N, DEVICE)
    with fastformer.backend("triton"):
        (expected,) = run(inputs)
        with torch.autocast(DEVICE, torch.bfloat16):
            (actual,) = run(inputs)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)


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
    assert_close(twice, once)


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
        assert_close(found(), expected)


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
