"""torch's own module database, run against our classes: every sample it has, values and gradients."""

import copy
import warnings
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import fastformer
from tests.support.closeness import assert_close, gradients
from tests.support.noise import DEVIATIONS, noise

pytest.importorskip("expecttest", reason="torch's module database needs the expecttest package")

NAMES = (
    "LayerNorm",
    "RMSNorm",
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "Transformer",
)


@cache
def database():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    return {info.module_cls: info for info in module_db}


def flat(result) -> list[Tensor]:
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def without_padding(module: nn.Module, outputs: list[Tensor], arguments: dict[str, Tensor | None]) -> list[Tensor]:
    """What a stack of ours returns for a key padding mask: rows of padding are 0."""
    name = "tgt_key_padding_mask" if isinstance(module, nn.Transformer) else "src_key_padding_mask"
    padding = arguments.get(name)
    if padding is None or isinstance(module, nn.TransformerEncoderLayer):
        return outputs
    assert padding.dtype == torch.bool
    if isinstance(module, nn.Transformer) and padding.dim() == 2 and not module.batch_first:
        padding = padding.transpose(0, 1)
    return [x.masked_fill(padding[..., None], 0.0) for x in outputs]


def results(module: nn.Module, inputs: tuple[Tensor, ...], arguments: dict[str, Tensor | None]) -> list[Tensor]:
    """Outputs, those of torch as ours should be, and gradients of inputs and parameters."""
    outputs = flat(module(*inputs, **arguments))
    if type(module).__module__.startswith("torch."):
        outputs = without_padding(module, outputs, arguments)
    return [*outputs, *gradients(outputs, [*(x for x in inputs if x.requires_grad), *module.parameters()])]


def noise_of(
    module: nn.Module, inputs: tuple[Tensor, ...], arguments: dict[str, Tensor | None], dtype: torch.dtype
) -> list[float]:
    exact = copy.deepcopy(module).double()
    doubles = tuple(x.detach().double().requires_grad_(x.requires_grad) for x in inputs)
    masks = {k: x.double() if isinstance(x, Tensor) and x.dtype == dtype else x for k, x in arguments.items()}
    return noise(lambda: results(exact, doubles, masks), results(exact, doubles, masks), dtype)


@pytest.mark.usefixtures("slow_path")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", NAMES)
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


def test_every_class_that_replaces_torchs_is_a_subclass_of_it():
    for name in (*NAMES, "TransformerDecoder"):
        assert issubclass(getattr(fastformer, name), getattr(nn, name))
