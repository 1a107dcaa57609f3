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
from tests.support.protocol_cases import CASES, DROP_INS, leaves

pytestmark = [pytest.mark.usefixtures("slow_path"), pytest.mark.filterwarnings("ignore:There is a performance drop")]
B, L = 3, 5
PADDED = [*DROP_INS, "FeedForward", "LinearCrossEntropy"]  # the others take a Layout, which is no tensor
STACKS = ("TransformerEncoder", "TransformerDecoder", "Transformer")
every_case = pytest.mark.parametrize("name", CASES)


def zero_padding(name: str, out: Tensor, call: Any) -> Tensor:
    """Return torch's output with zeros at padding, as a stack of fastformer computes it."""
    if name not in STACKS:
        return out
    hidden = call[1]["src_key_padding_mask" if name == "TransformerEncoder" else "tgt_key_padding_mask"]
    return out.masked_fill(hidden[..., None], 0.0)


@every_case
def test_autocast_gives_torchs_dtypes_and_accuracy(name):
    """Errors of outputs and gradients are those of the low precision."""
    case, dtype = CASES[name], [torch.float16, torch.bfloat16][len(name) % 2]
    module, other = case.pair()
    inputs = case.inputs(B, L, torch.float32)
    exact = zero_padding(name, case.run(case.function(other), inputs), inputs)
    expected = gradients(exact, leaves(inputs, other))
    with torch.autocast("cpu", dtype):
        out, torchs = (case.run(case.function(each), inputs) for each in (module, other))
    assert out.dtype == torchs.dtype
    if name == "LinearCrossEntropy":
        assert out.dtype == torch.float32
    roundings = 32 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps  # of a few products one after another
    assert_close(out.float(), exact, roundings=roundings)
    assert_close(gradients(out, leaves(inputs, module)), expected, roundings=4 * roundings)


@every_case
def test_scaled_steps_equal_unscaled_ones_and_overflow_is_left_out(name):
    """A step with a gradient that is not finite is left out, and the scale is halved."""
    case = CASES[name]
    module, plain = case.pair(dtype=torch.float64)
    inputs = case.inputs(B, L, torch.float64)

    def step(module: nn.Module, loss: Tensor, scales: bool) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scales)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    for each, scales in ((module, True), (plain, False)):
        out = zero_padding(name, case.run(case.function(each), inputs), inputs)
        assert step(each, out.pow(2).sum(), scales) == (2.0**10 if scales else 1.0)
    assert_close(list(module.parameters()), list(plain.parameters()), roundings=1e4)
    before = [p.detach().clone() for p in module.parameters()]
    assert step(module, case.run(case.function(module), inputs).sum() * torch.inf, True) == 2.0**9
    assert all(map(torch.equal, module.parameters(), before))


@every_case
@pytest.mark.parametrize("packed", [True, False])
def test_checkpointing_recomputes_the_same_bits(name, packed, few_tokens_run_padded):
    """With dropout; the reentrant form needs an input with a gradient, and ids have none."""
    if not packed:
        few_tokens_run_padded()
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
    expected_gradients = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    torch.manual_seed(3)
    out = checkpoint(run, *args, use_reentrant=reentrant)
    torch.rand(7)
    out.sum().backward()
    assert torch.equal(out, expected)
    for x, gradient in zip(inputs, expected_gradients, strict=True):
        assert (x.grad is None) == (gradient is None)
        if gradient is not None:  # reentrant, what was one tensor in three places is three: other sums
            assert_close(x.grad, gradient, roundings=100 if reentrant else 0)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.method == "forward"])
def test_an_ensemble_by_vmap_equals_each_model(name):
    """Outputs and gradients of several models of one form at once."""
    case = CASES[name]
    models = [case.pair(dtype=torch.float64)[0] for _ in range(3)]
    inputs = case.inputs(B, L, torch.float64)
    stacked = {key: p.detach() for key, p in torch.func.stack_module_state(models)[0].items()}

    def loss(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = case.run(lambda *args, **kwargs: functional_call(models[0], parameters, args, kwargs), inputs)
        return out.pow(2).sum(), out

    actual, outs = torch.func.vmap(torch.func.grad(loss, has_aux=True))(stacked)
    for i, model in enumerate(models):
        out, parameters = case.run(model, inputs), dict(model.named_parameters())
        assert_close(outs[i], out.detach())
        # A classifier's output layer plays no part in forward.
        expected = torch.autograd.grad(out.pow(2).sum(), parameters.values(), allow_unused=True, materialize_grads=True)
        assert_close([actual[key][i] for key in parameters], expected)


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


@pytest.mark.parametrize(("name", "form"), [(name, [*COPIES][i % 3]) for i, name in enumerate(CASES)])
def test_copies_compute_the_same_with_parameters_of_their_own(name, form):
    """Classes, values, dropout and tied parameters are those of the module, which has run before."""
    case = CASES[name]
    module, _ = case.pair(dropout=0.5)
    inputs = case.inputs(B, L, torch.float32)
    case.run(case.function(module), inputs)
    other = COPIES[form](module)
    assert [type(x) for x in other.modules()] == [type(x) for x in module.modules()]
    assert dict(other.named_parameters()).keys() == dict(module.named_parameters()).keys()
    assert not {id(p) for p in other.parameters()} & {id(p) for p in module.parameters()}
    outs = []
    for each in (module, other):
        torch.manual_seed(1)
        outs.append(case.run(case.function(each), inputs))
    assert torch.equal(*outs)
    other.load_state_dict({key: value.double() for key, value in other.state_dict().items()}, assign=True)
    assert dict(other.named_parameters()).keys() == dict(module.named_parameters()).keys()


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "export") for name in PADDED), *((name, "functionalize") for name in PADDED[::3])]
)
def test_programs_compute_what_the_module_does_with_other_masks_too(name, form):
    case = CASES[name]
    module = case.pair()[0].eval()
    args, kwargs = case.inputs(B, L, torch.float32)
    other_args, _ = case.inputs(B, L, torch.float32)
    masks = {key: x.flip(-1) if key.endswith("padding_mask") else x for key, x in kwargs.items()}

    def call(*tensors: Tensor) -> Any:
        return module(*tensors[: len(args)], **dict(zip(kwargs, tensors[len(args) :], strict=True)))

    with torch.no_grad():
        if form == "export":
            out = case.run(torch.export.export(module, args, kwargs).module(), (other_args, masks))
        else:
            out = case.run(functionalize(call), ((*other_args, *masks.values()), {}))
        assert_close(out, case.run(module, (other_args, masks)))


@pytest.mark.parametrize("cls", REPLACED.values())
def test_forward_takes_torchs_arguments_in_torchs_order_and_every_argument_by_position(cls: type[nn.Module]) -> None:
    """torch.onnx's exporter of traces passes every argument of a signature by position."""
    parameters, expected = (inspect.signature(x.forward).parameters for x in (cls, getattr(nn, cls.__name__)))
    assert [*parameters][: len(expected)] == [*expected]
    assert all(parameters[name].default is parameter.default for name, parameter in expected.items())
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap_is_torchs(randomness: str) -> None:
    for length in (100, 20_000):
        x, outs = torch.ones(4, length), []
        for dropout in (functional.dropout, F.dropout):
            torch.manual_seed(0)
            outs.append(torch.vmap(lambda row, dropout=dropout: dropout(row, 0.5), randomness=randomness)(x))
        assert torch.equal(*outs)
        assert (outs[0][0] == outs[0][1]).all() == (randomness == "same")


class RecordedOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@needs_kernels
def test_dispatch_modes_and_the_profiler_see_fused_ops(triton_backend: None) -> None:
    x = torch.randn(4, 16)
    with RecordedOps() as recorded, torch.profiler.profile() as profile:
        functional.layer_norm(x, 16)
    assert torch.ops.fastformer.layer_norm.default in recorded.ops
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
    """Return outputs, with zeros at padding where fastformer's stacks have them, and gradients of all leaves."""
    out = module(*inputs, **arguments)
    outputs = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    is_transformer = isinstance(module, nn.Transformer)
    padding = arguments.get("tgt_key_padding_mask" if is_transformer else "src_key_padding_mask")
    if padding is not None and not isinstance(module, nn.TransformerEncoderLayer):
        hidden = padding.mT if is_transformer and padding.dim() == 2 and not module.batch_first else padding
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
@pytest.mark.parametrize(
    ("name", "training", "dtype"),
    [
        (name, training, [torch.float64, torch.float32][(i + training) % 2])
        for i, name in enumerate(SAMPLED)
        for training in (True, False)
    ],
)
def test_every_sample_of_torchs_database(name, training, dtype):
    info = database()[getattr(nn, name)]
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    assert samples
    for sample in samples:
        args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
        settings = {"device": "cpu", "dtype": dtype} if name != "TransformerEncoder" else {}
        torchs, module = (
            getattr(library, name)(*args, **{**kwargs, **settings}).train(training) for library in (nn, fastformer)
        )
        assert isinstance(module, type(torchs))
        module.load_state_dict(torchs.state_dict(), strict=True)
        inputs, arguments = sample.forward_input.args, sample.forward_input.kwargs
        actual, expected = (results(each, inputs, arguments) for each in (module, torchs))
        noises = cache(lambda: noise_of(torchs, inputs, arguments, dtype))  # noqa: B023
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            try:
                assert_close(a, e)
            except AssertionError:
                # The gradient of a norm over four numbers that happen to be alike magnifies roundings, on both sides.
                assert (a.shape, a.dtype) == (e.shape, e.dtype)
                error, allowed = (a - e).abs().max(), 2 * DEVIATIONS * noises()[index]
                assert error <= allowed, f"result {index}: error {error:.3g}, allowed {allowed:.3g}"
