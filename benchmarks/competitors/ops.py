"""What the benchmarks of single ops share: random inputs, fp64 results, one comparison of two functions.

On a GPU ours always runs the fused kernels here, so that a fallback to the reference is an error and no figure. On a
CPU the reference is ours; where it is torch's own op there is nothing to compare. There are no bf16 tensors, then.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fastformer
from benchmarks.competitors.known import compiled, require
from benchmarks.harness.clock import Work
from benchmarks.harness.race import Direction, Op, Race

Function = Callable[..., Tensor]
Pairing = tuple[Any, str, Direction]  # a case or its name, competitor and what is timed


def with_cpu(pairings: Sequence[Pairing], *on_cpu: Pairing, name: Callable[[Any], str] = str) -> list[Any]:
    """All of them as parameters with names, and those that stand for them on a CPU, which a GPU leaves out."""

    def parameter(of: Pairing, *marks: pytest.MarkDecorator) -> Any:
        return pytest.param(*of, marks=marks, id="-".join((name(of[0]), *of[1:])))

    return [*map(parameter, pairings), *(parameter(each, pytest.mark.cpu) for each in on_cpu)]


FP32_TOLERANCE = 1e-5  # sums of up to 8,000 terms, whose roundings of 6e-8 add up to 5e-6 as a random walk


def leaves(race: Race, *shapes: Sequence[int]) -> list[Tensor]:
    """Random normal tensors that gradients are taken for."""
    return [torch.randn(*shape, device=race.device).to(race.dtype).requires_grad_() for shape in shapes]


def fp64_results(formula: Function, inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output and gradients of a formula in fp64, from the same rounded inputs."""
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
    formula: Function | None = None,
    upstream: Tensor | None = None,
    expected: Sequence[Tensor] | None = None,
    goals: Mapping[tuple[str, Direction], float] | None = None,
    timed: tuple[Mapping[str, Callable[..., Any]], Any] | None = None,
    **fields: Any,
) -> None:
    """Compare `functions["ours"]` with `functions[competitor]`, both of the same inputs.

    Args:
        race: of this case; skipped with the reason where the machine does not have the competitor.
        case: its name.
        competitor: a key of `benchmarks.competitors.COMPETITORS`; "compile" is made from `functions["eager"]`.
        functions: by competitor, and "ours".
        inputs: leaves.
        direction: what is timed.
        work: what the direction must do at least with bf16 tensors.
        tolerance: see `Race.op`; with bf16 tensors.
        formula: in fp64 the truth; unset: `functions["eager"]`.
        upstream: gradient of the output; unset: random, and one for all positions of it.
        expected: output and gradients, where fp64 of the whole would be too much; unset: from `formula`.
        goals: (competitor, direction) -> ratio, of the kernels.
        timed: other functions to time, and the gradients of their outputs; unset: those that are compared.
        fields: see `Race.op`.
    """
    require(competitor, race.device)
    kernels, truth = race.backend == "triton", formula or functions["eager"]
    if upstream is None:
        with torch.no_grad():
            upstream = torch.randn_like(truth(*inputs))

    def sides(by_name: Mapping[str, Callable[..., Any]]) -> tuple[Op, Op]:
        theirs = compiled(by_name["eager"], direction == "backward") if competitor == "compile" else by_name[competitor]

        def fused() -> Any:
            with fastformer.backend(race.backend):
                return by_name["ours"](*inputs)

        return Op("fastformer", fused, inputs), Op(competitor, lambda: theirs(*inputs), inputs)

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
