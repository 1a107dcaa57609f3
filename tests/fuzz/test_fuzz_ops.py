"""Hostile arguments of the ops and layouts: the formula in fp64, or a clear error before anything runs.

Tolerances are the noise of the formula. What once failed stays below, as a case by itself.
"""

from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastformer.packing import Layout, pack, unpack
from tests.fuzz import fuzz
from tests.fuzz.fuzz_ops import OPS, Call, lengths, spoilt
from tests.support.closeness import gradients
from tests.support.noise import DEVIATIONS, noise

CLEAR = (ValueError, TypeError, IndexError, RuntimeError, OverflowError)  # the last of numbers like 10**30


def as_leaves(arguments: dict[str, Any], wide: bool, learns: bool) -> tuple[dict[str, Any], list[Tensor]]:
    """The same arguments, floating ones as leaves with gradients (a copy; views stay views); in fp64 if `wide`."""
    leaves: list[Tensor] = []
    found = dict(arguments)
    for name, x in arguments.items():
        floats = isinstance(x, Tensor) and x.is_floating_point() and x.dtype.itemsize > 1 and not x.is_meta
        if floats and (learns or name != "mask"):
            wide_here = wide and name != "mask"
            leaf = x.detach().double() if wide_here else x.detach()
            found[name] = leaf.requires_grad_()
            leaves.append(leaf)
    return found, leaves


def results(op: Any, arguments: dict[str, Any], wide: bool, meddle: bool = False, learns: bool = True) -> list[Tensor]:
    """Outputs, then gradients."""
    given, leaves = as_leaves(arguments, wide, learns)
    out = op(**given)
    outputs = list(out) if isinstance(out, tuple) else [out]
    if meddle:
        with torch.no_grad():
            for name, x in given.items():
                if isinstance(x, Tensor) and x.numel() and not x.requires_grad and name not in ("ids", "target"):
                    x.zero_()
    return [*outputs, *gradients([x for x in outputs if x.requires_grad], leaves)] if leaves else outputs


def check(number: int) -> str:
    """One call; what came of it."""
    random = Random(number)
    torch.manual_seed(number)
    call = random.choice(OPS)(random)
    wrong = random.random() < 0.35
    if wrong:
        spoilt(random, call.arguments)
    meddle = random.random() < 0.2
    kept = {k: x.detach().clone() for k, x in call.arguments.items() if isinstance(x, Tensor)}
    exact: list[Tensor] | None = None
    try:
        exact = [x.detach() for x in results(call.formula, call.arguments, wide=True, learns=not meddle)]
    except Exception:  # what the formula does not take, an op may refuse
        exact = None
    found, error = [], None
    try:
        found = results(call.op, call.arguments, wide=False, meddle=meddle, learns=not meddle)
    except CLEAR as caught:
        error = caught
    for x, y in zip(kept.values(), _tensors(call.arguments), strict=True):
        assert meddle or x.is_meta or torch.equal(x, y) or x.isnan().any(), "an argument was changed"
    if error is not None:
        if meddle and "modified by an inplace" in str(error):
            return "noticed"
        assert wrong or exact is None, f"refused: {error!r}"
        assert str(error).strip(), f"no word: {error!r}"
        return "refused"
    if any(x.is_meta for x in found):
        return "meta"
    call.arguments |= kept  # for the noise
    if exact is None:
        # An op may not look at what no element needs; and ours adds a bias of integers, which torch wants converted.
        whole = any(k.startswith("bias") and not x.is_floating_point() for k, x in kept.items())
        assert whole or any(x.numel() == 0 for x in kept.values()), "taken, though the formula is not defined"
        return "empty"
    if any(isinstance(x, int | float) and not abs(x) < 1e6 for x in call.arguments.values()):
        return "too large"  # for the dtype: inf and NaN
    close(call, found, exact, learns=not meddle)
    return "equal"


def _tensors(arguments: dict[str, Any]) -> list[Tensor]:
    return [x.detach() for x in arguments.values() if isinstance(x, Tensor)]


COMPUTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # others are only passed on


def close(call: Call, found: list[Tensor], exact: list[Tensor], learns: bool) -> None:
    """Hold results to the noise of the formula."""
    assert len(found) == len(exact)
    moved = None
    dtypes = [x.dtype for x in _tensors(call.arguments) if x.dtype in COMPUTED]
    dtype = max(dtypes, key=lambda d: torch.finfo(d).eps, default=torch.float64)
    widest = torch.finfo(dtype).eps
    for index, (x, e) in enumerate(zip(found, exact, strict=True)):
        assert x.shape == e.shape, f"result {index}: {list(x.shape)}, not {list(e.shape)}"
        known = e.isfinite()
        if not known.any():
            continue
        error = float((x.double() - e)[known].abs().max())
        largest = max(1.0, float(e[known].abs().max()))
        allowed = (100 if widest < 1e-6 else 1) * widest * largest
        if not error <= allowed:
            moved = moved or noise(
                lambda: results(call.formula, call.arguments, wide=True, learns=learns), exact, dtype
            )
            allowed = 2 * DEVIATIONS * (moved[index] if moved[index] == moved[index] else np.inf) + widest * largest
        assert error <= allowed, f"result {index}: error {error:.3g}, allowed {allowed:.3g}"


def test_ops(numbers: range) -> None:
    fuzz.each(numbers, check, {"equal": 0.4, "refused": 0.1})


def whole(given: Any) -> list[int] | None:
    """What lengths say, or None where they are none."""
    if isinstance(given, Tensor | np.ndarray):
        given = given.tolist()
    plain = isinstance(given, list | tuple) and all(type(x) is int for x in given)
    return list(given) if plain else None


def check_layout(number: int) -> str:
    """A layout of anything: its parts agree with each other, and with lengths as they were; or a clear error."""
    random = Random(number)
    torch.manual_seed(number)
    if random.random() < 0.6:
        given = lengths(random, random.randint(0, 4), random.randint(0, 5))
        if random.random() < 0.2:
            given = random.choice((None, 3, "ab", [1.5], [[1]], [True], [2**70], given, torch.zeros(2, 2), [None]))
        columns = random.choice((None, None, 5, 9, 0, -1))
        make = lambda: Layout.from_lengths(given, columns=columns)  # noqa: E731
        wanted = whole(given)
    else:
        hidden = torch.rand(random.choice(((2, 3), (0, 3), (2, 0), (1, 1), (3,), (1, 2, 3)))) < 0.4
        given = (
            hidden if random.random() < 0.8 else random.choice((hidden.int(), hidden.tolist(), hidden.float(), None))
        )
        make = lambda: Layout.from_mask(given)  # noqa: E731
        wanted = (~hidden).sum(-1).tolist() if hidden.dim() == 2 else None
    layout = fuzz.attempt(make, (ValueError, TypeError), number)
    if layout is None:
        return "refused"
    assert wanted is not None
    if isinstance(given, Tensor | np.ndarray) and len(given):
        given[0] = 0  # the caller's own
    assert layout.lengths.tolist() == wanted
    assert layout.offsets.tolist() == [0, *np.cumsum(wanted).tolist()]
    assert layout.mask().sum(1).tolist() == wanted
    x = torch.randn(layout.total, 3)
    assert torch.equal(pack(unpack(x, layout), layout), x)
    assert (layout.batch, layout.max_length) == (len(wanted), max(wanted, default=0))
    return "equal"


def test_layouts(numbers: range) -> None:
    fuzz.each(numbers, check_layout, {"equal": 0.4, "refused": 0.1})
