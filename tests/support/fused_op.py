"""The one check of fused kernels: as close to the exact result as plain PyTorch in the same dtype, gradients included.

The inputs are rounded to the dtype first, so that the fp64 result of the same inputs is exact for both sides. The rule:
error <= 2 x the reference's own error + 4 x the noise of the formula (noise.py). Twice, because a fused kernel adds up
in another order; the noise, because how well the reference rounds is the luck of its inputs and of the code that torch,
oneDNN and MKL choose for a machine. Right computations have errors around the noise: a result of one number is
normally distributed with it as deviation, and 6 in 100,000 are more than 4 deviations away.
"""

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer.functional import choice
from fastformer.packing import Layout
from tests.support.closeness import gradients
from tests.support.interpreter import replace_once_a_launch
from tests.support.noise import DEVIATIONS, noise

Op = Callable[..., Tensor | tuple[Tensor, ...]]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not (choice._TRITON and choice._INTERPRETED and not choice._FAULT_OF_INTERPRETER),
    reason=choice._FAULT_OF_INTERPRETER or "needs a GPU, or Triton and its interpreter",
)
# On a CPU kernels run in Triton's interpreter, or with --compiled as PTX, executed (tests/compiled).
INTERPRETED = DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
needs_compiled = pytest.mark.skipif(
    not (choice._INTERPRETED and DEVICE == "cpu" and not INTERPRETED),
    reason="needs --compiled sm_80, sm_89 or sm_90",
)
if choice._TRITON and INTERPRETED:
    replace_once_a_launch()


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, so that an element that is not written, or read too far, shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            # On a GPU torch warns of its own matrix products; determinism is not what is asked for here.
            warnings.filterwarnings("ignore", message=".*determinis")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def rounded(dtype: torch.dtype, *tensors: Tensor | None) -> list[Tensor | None]:
    """Return fp64 copies of tensors rounded to `dtype`; floating-point ones require a gradient."""
    return [
        x if x is None or not x.is_floating_point() else x.detach().to(dtype).double().requires_grad_() for x in tensors
    ]


def outputs_and_gradients(op: Op, inputs: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """Run op in `dtype`: return all outputs, and the gradients of every floating-point input."""
    cast = [
        x if x is None else x.detach().to(DEVICE, dtype).requires_grad_() if x.is_floating_point() else x.to(DEVICE)
        for x in inputs
    ]
    actual = op(*cast)
    outputs = [actual] if isinstance(actual, Tensor) else list(actual)
    leaves = [x for x in cast if x is not None and x.requires_grad]
    return [*outputs, *gradients(outputs, leaves)]


def compare(ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], noises: Sequence[float]) -> None:
    """Hold our results to the rule: those of the reference in the same dtype, in fp64, and their noise."""
    for index, (a, p, e, n) in enumerate(zip(ours, plain, exact, noises, strict=True)):
        assert a.shape == p.shape, f"result {index}: shape {list(a.shape)}, not {list(p.shape)}"
        assert a.dtype == p.dtype, f"result {index}: {a.dtype}, not {p.dtype}"
        if a.numel() == 0:
            continue
        # Triton's interpreter truncates fp32 to bf16 where GPUs round to nearest: twice the error.
        deviations = DEVIATIONS * (2 if a.dtype == torch.bfloat16 and INTERPRETED else 1)
        error, allowed = (a.double() - e).abs().max().item(), (p.double() - e).abs().max().item()
        allowed = 2 * allowed + deviations * n
        assert error <= allowed, f"result {index}: error {error:.3g}, allowed {allowed:.3g}"  # false for NaN


def assert_as_accurate_as_reference(
    op: Op,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    reference: Op | None = None,
) -> None:
    """Run op with the kernels in `dtype`, with the reference in `dtype`, and with the reference in fp64; compare.

    Args:
        op: a function of the inputs that calls `fastformer.functional`; deterministic.
        inputs: fp64; those that are floating point get a gradient.
        dtype: of the kernels' inputs.
        reference: what to compare with, a function of the same inputs; op on backend "reference" if None.
    """
    exact_inputs = rounded(dtype, *inputs)
    with fastformer.backend("reference"):
        exact = outputs_and_gradients(reference or op, exact_inputs, torch.float64)
        plain = outputs_and_gradients(reference or op, exact_inputs, dtype)
        noises = noise(lambda: outputs_and_gradients(reference or op, exact_inputs, torch.float64), exact, dtype)
    with fastformer.backend("triton"), poisoned():
        ours = outputs_and_gradients(op, exact_inputs, dtype)
    compare(ours, plain, exact, noises)


def assert_model_as_accurate_as_reference(model: nn.Module, results: Callable[[nn.Module], Sequence[Tensor]]) -> None:
    """Hold a model in its dtype to the rule, with results that are computed from a model; not those of dropout."""
    wide = copy.deepcopy(model).double()
    with fastformer.backend("reference"):
        exact, plain = results(wide), results(model)
        noises = noise(lambda: results(wide), exact, next(model.parameters()).dtype)
    with fastformer.backend("triton"):
        compare(results(model), plain, exact, noises)


def assert_module_as_accurate_as_reference(
    module: nn.Module,
    args: Sequence[Any],
    dtype: torch.dtype = torch.float32,
    method: str = "forward",
    **kwargs: Any,
) -> None:
    """Hold a call of a module to the rule: outputs, and gradients of inputs, of masks and of parameters.

    Args:
        module: whose parameters are cast to dtype.
        args: of the call; floating-point tensors are cast to dtype, too.
        dtype: of the kernels' inputs.
        method: what is called.
        **kwargs: of the call, cast like args.
    """

    def results(model: nn.Module) -> list[Tensor]:
        expected, leaves = next(model.parameters()).dtype, dict[int, Tensor]()

        def cast(x: Any) -> Any:
            if isinstance(x, Tensor) and x.is_floating_point():
                return leaves.setdefault(id(x), x.detach().to(DEVICE, expected).requires_grad_())
            return x.to(DEVICE) if isinstance(x, Tensor | Layout) else x

        actual = getattr(model, method)(*map(cast, args), **{name: cast(x) for name, x in kwargs.items()})
        outputs = [x for x in (actual if isinstance(actual, tuple) else (actual,)) if x is not None]
        return [*outputs, *gradients(outputs, [*leaves.values(), *model.parameters()])]

    assert_model_as_accurate_as_reference(module.to(DEVICE, dtype), results)
