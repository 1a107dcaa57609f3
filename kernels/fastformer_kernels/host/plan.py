"""Plans of launchers: tensors of the same description get the same allocations and the same launches.

A launcher depends on shapes, strides, dtypes, alignments and numbers alone: it chooses tiles, allocates, and binds up
to 77 arguments. The first call of a description is recorded; later calls, such as those of a model's other layers,
repeat the record. A call that uses or returns a tensor that is neither an argument nor `recorded` has no plan, and
always runs the launcher; tests/kernels/test_plan.py looks for launchers that do more than they record.

One core, fp32, microseconds of a launcher, recorded, by plan: layer norm 21, 44, 14; packed attention 60, 90, 17.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from fastformer_kernels.host.launch import Launch, guard, precision, record_launches, repeat

# When a launcher has this many plans they are deleted, because sizes may never repeat. A plan takes 2 to 4 KB (layer
# norm, attention), so the plans of a dozen launchers take about 1 MiB.
_MOST_PLANS = 32
_NEVER = "does more than a plan can"
_SPECIALISES_STORAGE = torch.version.hip is not None  # for AMD, Triton specialises on storages below 2 GiB
_TENSORS = (Tensor, torch.nn.Parameter)


class _Plan(NamedTuple):
    """The record of a call. Slots number its tensors: first the arguments, then the allocations."""

    allocations: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]  # size, stride, dtype
    launches: list[tuple[Launch, list[tuple[int, int]]]]  # without tensors; their (index, slot) are listed
    result: int | tuple[int, ...]  # slots

    def run(self, args: tuple[Any, ...], device: torch.device) -> Any:
        slots = list(args)
        for size, stride, dtype in self.allocations:
            slots.append(torch.empty_strided(size, stride, dtype=dtype, device=device))
        repeat(self.launches, slots)
        return slots[self.result] if isinstance(self.result, int) else tuple([slots[slot] for slot in self.result])


_Plans = dict[tuple[Any, ...], _Plan | str]
_all_plans: list[_Plans] = []  # of each launcher


def forget() -> None:
    """Delete all plans, for callers that replaced a function of a launcher."""
    for plans in _all_plans:
        plans.clear()


def _record_call(launcher: Callable[..., Any], args: tuple[Any, ...], plans: _Plans, key: Any) -> Any:
    """Call the launcher, and store its plan under `key`."""
    slots = {id(x): slot for slot, x in enumerate(args) if type(x) in _TENSORS}
    if len(slots) < sum(type(x) in _TENSORS for x in args):  # a launch cannot tell repeated tensors apart
        return launcher(*args)
    with record_launches() as record:
        result = launcher(*args)
    slots |= {id(x): slot for slot, x in enumerate(record.allocated, start=len(args))}
    for alias, base in record.aliases:
        if id(base) in slots:
            slots[id(alias)] = slots[id(base)]
    plans[key] = _NEVER
    repeated = []
    for compiled, grid, values in record.launches:
        places = [(i, slots.get(id(x), -1)) for i, x in enumerate(values) if type(x) in _TENSORS]
        if compiled is None or any(slot < 0 for _, slot in places):
            return result
        without_tensors = values.copy()
        for i, _ in places:
            without_tensors[i] = None
        repeated.append((Launch(compiled, grid, without_tensors), places))
    results = [slots.get(id(x), -1) for x in ([result] if isinstance(result, Tensor) else result)]
    if repeated and min(results) >= 0:
        allocations = [(tuple(x.shape), x.stride(), x.dtype) for x in record.allocated]
        plans[key] = _Plan(allocations, repeated, results[0] if isinstance(result, Tensor) else tuple(results))
    return result


def planned(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs the launcher once per description, then its plan; the launcher in the interpreter.

    Args:
        launcher: takes tensors, at least one, None, numbers, strings, dtypes and lists of these; returns a tensor or a
            tuple of them; and depends only on the description of these and torch's precision of fp32 products.
    """
    if knobs.runtime.interpret:
        return launcher
    plans: _Plans = {}
    _all_plans.append(plans)

    @wraps(launcher)
    def run(*args: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() > 0:  # a mode must see the launcher's ops
            return launcher(*args)
        description: list[Any] = []
        first: Any = None
        for x in args:
            if type(x) in _TENSORS:
                if first is None:
                    first = x
                description += x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16 == 0
                if _SPECIALISES_STORAGE:
                    description.append(x.untyped_storage().nbytes() < 1 << 31)
            elif isinstance(x, Tensor):  # a subclass: it has no description, and a key would keep it alive
                return launcher(*args)
            else:
                description.append(tuple(x) if isinstance(x, list) else x)
        key = (precision(first), *description)
        plan = plans.get(key)
        if isinstance(plan, _Plan):
            with guard(first):
                return plan.run(args, first.device)
        if plan == _NEVER:
            return launcher(*args)
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        return _record_call(launcher, args, plans, key)

    return run
