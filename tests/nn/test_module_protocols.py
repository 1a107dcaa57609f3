"""Every module, stack and model beside torch.nn's, where it has the class: torch's module database, and its tools.

Autocast, GradScaler, activation checkpointing, torch.func, copies, pickles, torch.export, counters, modes, profiler.
"""

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, functionalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastformer
from fastformer import functional
from fastformer.nn.modules import DROP_INS as REPLACED
from tests.support.closeness import assert_close, gradients
from tests.support.fused_op import needs_kernels
from tests.support.noise import DEVIATIONS, noise
from tests.support.protocol_cases import CASES, DROP_INS, Subject, leaves

pytestmark = [pytest.mark.usefixtures("slow_path"), pytest.mark.filterwarnings("ignore:There is a performance drop")]
HALVES = [torch.float16, torch.bfloat16]
B, L = 3, 5
PADDED = [*DROP_INS, "FeedForward", "LinearCrossEntropy"]  # the others take a Layout, which is no tensor
# Their outputs at padding are 0; those of torch are not compared.
STACKS = ("TransformerEncoder", "TransformerDecoder", "Transformer")


def real(name: str, out: Tensor, call: Any) -> Tensor:
    """Return torch's output with zeros at padding."""
    if name not in STACKS:
        return out
    hidden = call[1]["src_key_padding_mask" if name == "TransformerEncoder" else "tgt_key_padding_mask"]
    return out.masked_fill(hidden[..., None], 0.0)


@pytest.mark.parametrize("name", CASES)
def test_autocast_gives_torchs_dtypes_and_accuracy(name):
    """Dtypes are torch's; errors are of the low precision, of output and gradients."""
    case, dtype = CASES[name], HALVES[len(name) % 2]
    ours, other = case.pair()
    given = case.inputs(B, L, torch.float32)
    exact = real(name, case.run(case.function(other), given), given)
    wanted = gradients(exact, leaves(given, other))
    with torch.autocast("cpu", dtype):
        out = case.run(case.function(ours), given)
        theirs = case.run(case.function(other), given)
    assert out.dtype == theirs.dtype
    if name == "LinearCrossEntropy":
        assert out.dtype == torch.float32
    noise = 32 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps  # of a few products one after another
    assert_close(out.float(), exact, roundings=noise)
    assert_close(gradients(out, leaves(given, ours)), wanted, roundings=4 * noise)


@pytest.mark.parametrize("name", CASES)
def test_scaled_steps_equal_unscaled_ones_and_overflow_is_left_out(name):
    """A step is that without a scaler; where a gradient is no number, it is left out and the scale is halved."""
    case = CASES[name]
    ours, plain = case.pair(dtype=torch.float64)
    given = case.inputs(B, L, torch.float64)

    def step(module: nn.Module, loss: Tensor, scales: bool) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scales)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    for module, scales in ((ours, True), (plain, False)):
        out = real(name, case.run(case.function(module), given), given)
        assert step(module, out.pow(2).sum(), scales) == (2.0**10 if scales else 1.0)
    assert_close(list(ours.state_dict().values()), list(plain.state_dict().values()), roundings=1e4)
    before = [p.detach().clone() for p in ours.parameters()]
    assert step(ours, case.run(case.function(ours), given).sum() * torch.inf, True) == 2.0**9
    assert all(torch.equal(a, w) for a, w in zip(ours.parameters(), before, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_checkpointing_recomputes_the_same_bits(name):
    """Dropout included; the reentrant form needs an input with a gradient, and ids have none."""
    case = CASES[name]
    module, _ = case.pair(dropout=0.5)
    args, kwargs = case.inputs(B, L, torch.float32)
    reentrant = len(name) % 2 == 0 and any(isinstance(x, Tensor) and x.requires_grad for x in args)
    inputs = leaves((args, kwargs), module)

    def run(*args: Any) -> Tensor:
        return case.run(case.function(module), (args, kwargs))

    torch.manual_seed(3)
    expected = run(*args)
    expected.sum().backward()
    wanted = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    torch.manual_seed(3)
    out = checkpoint(run, *args, use_reentrant=reentrant)
    torch.rand(7)
    out.sum().backward()
    assert torch.equal(out, expected)
    for x, w in zip(inputs, wanted, strict=True):
        assert (x.grad is None) == (w is None)
        if w is not None:  # reentrant, what was one tensor in three places is three: other sums
            assert_close(x.grad, w, roundings=100 if reentrant else 0)


def as_function(case: Subject, module: nn.Module) -> Callable[..., Tensor]:
    """The module as a function of its parameters; functional_call calls forward only."""

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return case.run(case.function(self.inner), (args, kwargs))

    called = Called()

    def function(parameters: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        named = {f"inner.{name}": value for name, value in parameters.items()}
        return functional_call(called, named, args, kwargs)  # type: ignore[no-any-return]

    return function


def of_squares(out: Tensor, module: nn.Module) -> tuple[Tensor, ...]:
    """Gradients of the sum of the squares; a classifier's output layer plays no part in forward."""
    parameters = list(module.parameters())
    return torch.autograd.grad(out.pow(2).sum(), parameters, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("name", CASES)
def test_an_ensemble_by_vmap_equals_each_model(name):
    """Many models of one form at once, and the gradients of each."""
    case = CASES[name]
    models = [case.pair(dtype=torch.float64)[0] for _ in range(3)]
    args, kwargs = case.inputs(B, L, torch.float64)
    parameters, _ = torch.func.stack_module_state(models)
    parameters = {key: p.detach() for key, p in parameters.items()}
    function = as_function(case, models[0])

    def loss(p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = function(p, *args, **kwargs)
        return out.pow(2).sum(), out

    found, outs = torch.func.vmap(torch.func.grad(loss, has_aux=True))(parameters)
    for i, model in enumerate(models):
        expected = case.run(case.function(model), (args, kwargs))
        assert_close(outs[i], expected.detach())
        assert_close([found[key][i] for key in parameters], of_squares(expected, model))


def through_file(module: nn.Module) -> nn.Module:
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)  # type: ignore[no-any-return]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": through_file,
}


@pytest.mark.parametrize(("name", "how"), [(name, [*COPIES][i % 3]) for i, name in enumerate(CASES)])
def test_copies_compute_the_same_with_parameters_of_their_own(name, how):
    """Of a module that has run: the same class, values and dropout, parameters of its own, what is tied still tied."""
    case = CASES[name]
    module, _ = case.pair(dropout=0.5)
    given = case.inputs(B, L, torch.float32)
    case.run(case.function(module), given)
    other = COPIES[how](module)
    assert type(other) is type(module)
    assert [type(x) for x in other.modules()] == [type(x) for x in module.modules()]
    assert dict(other.named_parameters()).keys() == dict(module.named_parameters()).keys()
    assert not {id(p) for p in other.parameters()} & {id(p) for p in module.parameters()}
    outs = []
    for one in (module, other):
        torch.manual_seed(1)
        outs.append(case.run(case.function(one), given))
    assert torch.equal(*outs)
    state = {key: value.double() for key, value in other.state_dict().items()}
    other.load_state_dict(state, assign=True)
    assert dict(other.named_parameters()).keys() == dict(module.named_parameters()).keys()


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "export") for name in PADDED), *((name, "functionalize") for name in PADDED[::3])]
)
def test_programs_compute_what_the_module_does(name, how):
    """A program made of a module computes what the module does, with other masks too."""
    case = CASES[name]
    module = case.pair()[0].eval()
    args, kwargs = case.inputs(B, L, torch.float32)
    (again, _) = case.inputs(B, L, torch.float32)
    masks = {key: x.flip(-1) if key.endswith("padding_mask") else x for key, x in kwargs.items()}

    def called(*given: Tensor) -> Any:
        return module(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

    with torch.no_grad():
        if how == "export":
            found = case.run(torch.export.export(module, args, kwargs).module(), (again, masks))
        else:
            found = case.run(functionalize(called), ((*again, *masks.values()), {}))
        assert_close(found, case.run(module, (again, masks)))


@pytest.mark.parametrize("ours", REPLACED.values())
def test_forward_takes_torchs_arguments_in_torchs_order_and_every_argument_by_position(ours: type[nn.Module]) -> None:
    """torch.onnx's exporter of traces passes every argument of a signature by position."""
    given, expected = (inspect.signature(cls.forward).parameters for cls in (ours, getattr(nn, ours.__name__)))
    assert [*given][: len(expected)] == [*expected]
    assert all(given[name].default is its.default for name, its in expected.items())
    assert {its.kind for its in given.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap_is_torchs(randomness: str) -> None:
    for length in (100, 20_000):
        x, found = torch.ones(4, length), []
        for dropout in (functional.dropout, F.dropout):
            torch.manual_seed(0)
            found.append(torch.vmap(lambda row, dropout=dropout: dropout(row, 0.5), randomness=randomness)(x))
        assert torch.equal(*found)
        assert (found[0][0] == found[0][1]).all() == (randomness == "same")


class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen = [*getattr(self, "seen", ()), func]
        return func(*args, **(kwargs or {}))


@needs_kernels
def test_dispatch_modes_and_the_profiler_see_fused_ops(triton_backend: None) -> None:
    x = torch.randn(4, 16)
    with Ops() as ops:
        functional.layer_norm(x, 16)
    assert torch.ops.fastformer.layer_norm.default in ops.seen
    with torch.profiler.profile() as profile:
        functional.layer_norm(x, 16)
    assert "fastformer::layer_norm" in {event.name for event in profile.events()}


SAMPLED = ("LayerNorm", "RMSNorm", "MultiheadAttention", *(f"Transformer{x}" for x in ("EncoderLayer", "DecoderLayer")))
SAMPLED += ("TransformerEncoder", "Transformer")


@cache
def database() -> dict[type, Any]:
    pytest.importorskip("expecttest", reason="torch's module database needs the expecttest package")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    return {info.module_cls: info for info in module_db}


def results(module: nn.Module, inputs: tuple[Tensor, ...], arguments: dict[str, Tensor | None]) -> list[Tensor]:
    """Outputs, rows of padding set to 0 where a stack of ours does so, and gradients of inputs and parameters."""
    out = module(*inputs, **arguments)
    outputs = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    of_target = isinstance(module, nn.Transformer)
    padding = arguments.get("tgt_key_padding_mask" if of_target else "src_key_padding_mask")
    if padding is not None and not isinstance(module, nn.TransformerEncoderLayer):
        hidden = padding.mT if of_target and padding.dim() == 2 and not module.batch_first else padding
        if type(module).__module__.startswith("torch."):
            outputs = [x.masked_fill(hidden[..., None], 0.0) for x in outputs]
    return [*outputs, *gradients(outputs, [*(x for x in inputs if x.requires_grad), *module.parameters()])]


def noise_of(
    module: nn.Module, inputs: tuple[Tensor, ...], arguments: dict[str, Tensor | None], dtype: torch.dtype
) -> list[float]:
    exact = copy.deepcopy(module).double()
    doubles = tuple(x.detach().double().requires_grad_(x.requires_grad) for x in inputs)
    masks = {k: x.double() if isinstance(x, Tensor) and x.dtype == dtype else x for k, x in arguments.items()}
    return noise(lambda: results(exact, doubles, masks), results(exact, doubles, masks), dtype)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_sample_of_torchs_database(name, training, dtype):
    info = database()[getattr(nn, name)]
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    assert samples
    for sample in samples:
        args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
        settings = {"device": "cpu", "dtype": dtype} if name != "TransformerEncoder" else {}
        torchs = getattr(nn, name)(*args, **{**kwargs, **settings}).train(training)
        ours = getattr(fastformer, name)(*args, **{**kwargs, **settings}).train(training)
        assert isinstance(ours, type(torchs))
        ours.load_state_dict(torchs.state_dict(), strict=True)
        inputs, arguments = sample.forward_input.args, sample.forward_input.kwargs
        found, wanted = (results(module, inputs, arguments) for module in (ours, torchs))
        noises = cache(lambda: noise_of(torchs, inputs, arguments, dtype))  # noqa: B023
        for index, (a, w) in enumerate(zip(found, wanted, strict=True)):
            try:
                assert_close(a, w)
            except AssertionError:
                # The gradient of a norm over four numbers that happen to be alike magnifies roundings, on both sides.
                assert (a.shape, a.dtype) == (w.shape, w.dtype)
                error, allowed = (a - w).abs().max(), 2 * DEVIATIONS * noises()[index]
                assert error <= allowed, f"result {index}: error {error:.3g}, allowed {allowed:.3g}"
