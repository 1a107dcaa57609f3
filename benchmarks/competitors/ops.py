"""Random inputs, fp64 results and a comparison of two functions, for the benchmarks of single ops.

On a GPU fastformer always runs the fused kernels here, so that a fallback to the reference is an error. On a CPU it
runs the reference, in fp32; if that is torch's own op there is nothing to compare.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fastformer
from benchmarks.competitors.known import compiled, require
from benchmarks.harness.clock import Work
from benchmarks.harness.race import DIRECTIONS, Direction, Op, Race

Function = Callable[..., Tensor]
Pairing = tuple[Any, str, Direction]  # a case or its name, competitor and what is timed


def with_cpu(pairings: Sequence[Pairing], *on_cpu: Pairing, name: Callable[[Any], str] = str) -> list[Any]:
    """Return parameters with names; those of `on_cpu` are marked `cpu`, which a GPU leaves out."""

    def parameter(of: Pairing, *marks: pytest.MarkDecorator) -> Any:
        return pytest.param(*of, marks=marks, id="-".join((name(of[0]), *of[1:])))

    return [*map(parameter, pairings), *(parameter(each, pytest.mark.cpu) for each in on_cpu)]


def eager_runs(cases: Iterable[str], *further: Pairing) -> list[Any]:
    """Return cases against eager, forward and with backward, on a CPU the "quick-cpu" one; and further ones."""
    names = [name for name in cases if name != "quick-cpu"]
    runs = [(name, "eager", direction) for name in names for direction in DIRECTIONS if direction != "backward"]
    return with_cpu([*runs, *further], ("quick-cpu", "eager", "both"))


FP32_TOLERANCE = 1e-5  # sums of up to 8,000 terms, whose roundings of 6e-8 add up to 5e-6 as a random walk


def leaves(race: Race, *shapes: Sequence[int]) -> list[Tensor]:
    """Return random normal tensors that gradients are taken for."""
    return [torch.randn(*shape, device=race.device).to(race.dtype).requires_grad_() for shape in shapes]


def fp64_results(formula: Function, inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return output and gradients of a formula in fp64, from the same rounded inputs."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out = formula(*wide)
    return [out.detach(), *torch.autograd.grad(out, wide, upstream.double())]


def race_functions(
    race: Race,
    case: str,
    competitor: str,
    functions: Mapping[str, Function],
    inputs: Sequence[Tensor],
    *,
    direction: Direction,
    work: Work,
    tolerance: float,
    upstream: Tensor | None = None,
    expected: Sequence[Tensor] | None = None,
    goals: Mapping[tuple[str, Direction], float] | None = None,
    timed: tuple[Mapping[str, Callable[..., Any]], Any] | None = None,
    **fields: Any,
) -> None:
    """Compare `functions["ours"]` with `functions[competitor]`; "compile" is made from `functions["eager"]`.

    Skipped, with the reason, if the machine lacks the competitor. `work`, `tolerance` and `goals`, (competitor,
    direction) -> ratio, are those of the kernels with bf16 tensors. `upstream` is the gradient of the output, random if
    unset. `expected` are output and gradients, by default those of "eager" in fp64. `timed` are
    other functions to time, and the gradients of their outputs. `fields`: see `Race.op`.
    """
    require(competitor, race.device)
    kernels, truth = race.backend == "triton", functions["eager"]
    if upstream is None:
        with torch.no_grad():
            upstream = torch.randn_like(truth(*inputs))

    def sides(by_name: Mapping[str, Callable[..., Any]]) -> tuple[Op, Op]:
        other = compiled(by_name["eager"], direction == "backward") if competitor == "compile" else by_name[competitor]

        def fused() -> Any:
            with fastformer.backend(race.backend):
                return by_name["ours"](*inputs)

        return Op("fastformer", fused, inputs), Op(competitor, lambda: other(*inputs), inputs)

    replaced = None if timed is None else (*sides(timed[0]), timed[1])
    race.op(
        case,
        *sides(functions),
        upstream=upstream,
        expected=fp64_results(truth, inputs, upstream) if expected is None else expected,
        tolerance=tolerance if kernels else FP32_TOLERANCE,
        direction=direction,
        work=work if kernels else None,
        goal=(goals or {}).get((competitor, direction)) if kernels else None,
        timed=replaced,
        **fields,
    )
