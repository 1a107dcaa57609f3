"""What resuming reads, compared with the run before torch acts on it: it may be a stranger's, and its hash right.

torch checks neither the shapes of an optimiser's state, through which its kernels then write beyond their memory, nor
the place in NumPy's generator. So a state is first read without its tensors' memory, compared entry by entry with what
this run would write, and only then read. A compressed archive, which may be a thousand times its size, is refused.
"""

import math
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastformer.apps.train.config import TrainConfig
from fastformer.apps.train.weights import CheckpointError, same_kind

# What each optimiser keeps of a parameter: tensors like the parameter.
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_MOST = 2**63 - 1  # a count that torch and NumPy can hold
# Of a list: a process each, at most. A pickle names one thing a million times in some megabytes.
_LONGEST = 1 << 14


def read_state(path: Path, device: str) -> dict[str, Any]:
    """The state in a file, without running code of it, on "cpu", or on "meta": everything but the tensors' numbers.

    Raises:
        CheckpointError: it is no state.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist()):
                raise CheckpointError(f"{path}: not a training state: its archive is compressed")
        state = torch.load(path, map_location=device, weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # what reading an archive or a pickle of anybody's may raise has no bounds
        raise CheckpointError(f"{path}: not a training state ({_short(error)})") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: not a training state, but of type {type(state).__name__}")
    return state


def check_state(state: Mapping[str, Any], parameters: Sequence[Tensor], origin: Path) -> None:
    """Compare a state with what a run of these parameters writes; tensors may be on "meta".

    Args:
        state: as read.
        parameters: of the optimiser, in its order, sharded or not: their whole shapes count.
        origin: for messages.

    Raises:
        CheckpointError: naming the first entry that is missing, unknown or not what it must be.
    """
    try:
        _Entry("state", state).record(
            required={
                "optimizer_name": _one_of(*MOMENTS),
                "schedule_name": _text,
                "schedule": _schedule,
                "sums": _sums,
                "position": _position,
                "random": _random,
                "optimizer": lambda each: _optimizer(each, state["optimizer_name"], parameters),
            },
            optional={"metric": _text, "scaler": _scaler, "random_of_others": _list_of(_random)},
        )
    except _Unfit as error:
        raise CheckpointError(f"{origin}: not a state of this run: {error}") from None


def check_settings(state: Mapping[str, Any], step: int, config: TrainConfig, origin: Path) -> None:
    """Compare a state with the settings that a resumed run cannot change, and with the step of its checkpoint.

    Raises:
        CheckpointError: naming what differs.
    """
    if state["optimizer_name"] != config.optimizer or state["schedule_name"] != config.schedule:
        raise CheckpointError(
            f"{origin}: was trained with optimizer={state['optimizer_name']} and schedule={state['schedule_name']}, "
            f"not {config.optimizer} and {config.schedule}"
        )
    if state["position"]["step"] != step:
        raise CheckpointError(f"{origin}: its state is of step {state['position']['step']}")
    rated_by = state.get("metric", config.metric)
    if state["position"]["best_value"] is not None and rated_by != config.metric:
        raise CheckpointError(f"{origin}: was rated by metric={rated_by}, not by {config.metric}")


def check_numbers(state: Mapping[str, Any], origin: Path) -> None:
    """Look at the numbers in a state's tensors, once they have been read: steps, sums, generators.

    Raises:
        CheckpointError: one is no count, or no finite number, or torch does not take its generator's state.
    """
    generators = [state["random"], *state.get("random_of_others", [])]
    try:
        for each in generators:
            torch.Generator().set_state(each["torch"])
    except RuntimeError as error:
        raise CheckpointError(f"{origin}: not a state of this run: random.torch: {_short(error)}") from None
    counts = {f"optimizer.state.{i}.step": each.get("step") for i, each in state["optimizer"]["state"].items()}
    sums = {f"sums.{name}": x for name, x in state["sums"].items() if isinstance(x, Tensor)}
    for name, x in {**counts, **sums}.items():
        value = 0.0 if x is None else float(x)
        if not math.isfinite(value) or (value < 0 and name in counts):
            raise CheckpointError(f"{origin}: not a state of this run: {name} is {value}")


class _Unfit(Exception):
    """One entry is not what it must be; the message says which and why."""


class _Entry:
    """A value of a state and its name, for checks that name what they find."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def must(self, fits: bool, wanted: str) -> None:
        """Raise unless it fits."""
        if not fits:
            raise _Unfit(f"{self.name} must be {wanted}, not {_shown(self.value)}")

    def record(self, required: "Mapping[Any, Check]", optional: "Mapping[Any, Check] | None" = None) -> None:
        """Check a dictionary with these entries and no others, in the order of the checks."""
        self.must(isinstance(self.value, dict), "a dictionary")
        checks = {**required, **(optional or {})}
        for key in required:
            if key not in self.value:
                raise _Unfit(f"{self.name} has no {key}")
        for key in self.value:
            if key not in checks:
                raise _Unfit(f"{self.name} has an unknown entry {_shown(key)}")
        for key, check in checks.items():
            if key in self.value:
                check(_Entry(f"{self.name}.{key}", self.value[key]))

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Check a plain tensor of this shape, and of this kind of number."""
        x = self.value
        self.must(type(x) is Tensor and x.layout is torch.strided and not x.is_quantized, "a tensor")
        self.must(tuple(x.shape) == tuple(shape), f"of shape {list(shape)}")
        self.must(same_kind(x.dtype, dtype), f"of {dtype}")


Check = Callable[[_Entry], None]


def _text(entry: _Entry) -> None:
    entry.must(isinstance(entry.value, str), "a text")


def _one_of(*choices: str) -> Check:
    return lambda entry: entry.must(
        isinstance(entry.value, str) and entry.value in choices, "one of " + ", ".join(choices)
    )


def _flag(entry: _Entry) -> None:
    entry.must(type(entry.value) is bool, "true or false")


def _count(entry: _Entry) -> None:
    entry.must(type(entry.value) is int and 0 <= entry.value <= _MOST, "a count")


def _number(above: float = -math.inf, at_most: float = math.inf) -> Check:
    """A finite number of a range."""

    def check(entry: _Entry) -> None:
        value = entry.value
        fits = type(value) in (int, float) and abs(value) <= 1e308 and above < value <= at_most
        entry.must(fits, "a finite number" + (f" above {above:g}" if above > -math.inf else ""))

    return check


def _value(entry: _Entry) -> None:
    """What a validation computed, or infinity before the first."""
    if type(entry.value) is not float or not math.isinf(entry.value):
        _number()(entry)


def _or_none(check: Check) -> Check:
    return lambda entry: None if entry.value is None else check(entry)


def _list_of(check: Check) -> Check:
    def each(entry: _Entry) -> None:
        entry.must(isinstance(entry.value, list) and len(entry.value) <= _LONGEST, f"a list of at most {_LONGEST:,}")
        for index, value in enumerate(entry.value):
            check(_Entry(f"{entry.name}.{index}", value))

    return each


def _scalar(entry: _Entry) -> None:
    entry.tensor((), torch.float32)


def _schedule(entry: _Entry) -> None:
    start = _or_none(_number(at_most=1.0))
    entry.record({"decay_start": start, "scale": _number(above=0.0), "best_loss": _value, "bad": _count})


def _sums(entry: _Entry) -> None:
    required = {"loss": _scalar, "norm": _scalar, "tokens": _count, "steps": _count, "seconds": _number()}
    entry.record(required, {"skips": _scalar, "epoch_loss": _scalar, "epoch_tokens": _count})


def _position(entry: _Entry) -> None:
    counts = dict.fromkeys(("step", "epoch", "batch", "tokens", "worse", "records"), _count)
    entry.record(
        {**counts, "seconds": _number(), "best_value": _or_none(_value)},
        {"validation_due": _flag, "share": _number(above=0.0, at_most=1.0), "reserve": _number()},
    )


def _scaler(entry: _Entry) -> None:
    positive = dict.fromkeys(("scale", "growth_factor", "backoff_factor", "growth_interval"), _number(above=0.0))
    entry.record({**positive, "_growth_tracker": _count} if entry.value else {})


def _optimizer(entry: _Entry, name: str, parameters: Sequence[Tensor]) -> None:
    """Tensors like the parameters; one without a gradient so far has none."""

    def of(parameter: Tensor) -> Check:
        def like(found: _Entry) -> None:
            if found.value is not None:  # momentum, where there is none
                found.tensor(parameter.shape, parameter.dtype)

        if name == "sgd":
            return lambda found: found.record({}, dict.fromkeys(MOMENTS[name], like))
        moments = dict.fromkeys(MOMENTS[name], lambda found: found.tensor(parameter.shape, parameter.dtype))
        return lambda found: found.record({"step": _scalar, **moments})

    # The groups' settings are the configuration's, whatever a state says; which parameters they hold must be the same.
    entry.must(isinstance(entry.value, dict) and set(entry.value) == {"state", "param_groups"}, "an optimiser's state")
    _list_of(lambda group: group.must(isinstance(group.value, dict), "a dictionary"))(
        _Entry(f"{entry.name}.param_groups", entry.value["param_groups"])
    )
    groups = [_indices(group) for group in entry.value["param_groups"]]
    count = sum(map(len, groups))  # before they are put together
    found = [index for group in groups for index in group] if count == len(parameters) else []
    if any(type(index) is not int for index in found) or found != list(range(len(parameters))):
        raise _Unfit(f"{entry.name} is of {count} parameters, this model has {len(parameters)}")
    _Entry(f"{entry.name}.state", entry.value["state"]).record({}, {i: of(p) for i, p in enumerate(parameters)})


def _indices(group: Mapping[str, Any]) -> list[Any]:
    indices = group.get("params")
    return indices if isinstance(indices, list) else []


def _random(entry: _Entry) -> None:
    """States of generators: NumPy looks at none of its numbers, and reads where the position says."""

    def words(count: int) -> Callable[[Any], bool]:
        return lambda x: (
            isinstance(x, list | tuple) and len(x) == count and all(type(i) is int and 0 <= i < 2**32 for i in x)
        )

    def python(found: _Entry) -> None:
        x = found.value
        fits = (
            isinstance(x, tuple)
            and len(x) == 3
            and type(x[0]) is int
            and x[0] == 3
            and words(625)(x[1])
            and x[1][-1] <= 624
        )
        found.must(fits, "a state of Python's generator")
        _or_none(_number())(_Entry(f"{found.name}.2", x[2]))

    def numpy(found: _Entry) -> None:
        x = found.value
        fits = isinstance(x, tuple) and len(x) == 5 and type(x[0]) is str and x[0] == "MT19937" and words(624)(x[1])
        fits = fits and type(x[2]) is int and 0 <= x[2] <= 624 and type(x[3]) is int and x[3] in (0, 1)
        found.must(fits, "a state of NumPy's generator")
        _number()(_Entry(f"{found.name}.4", x[4]))

    def cuda(found: _Entry) -> None:
        found.tensor((16,), torch.uint8)  # seed and offset

    states: dict[str, Check] = {
        "python": python,
        "numpy": numpy,
        "torch": lambda found: found.tensor(torch.get_rng_state().shape, torch.uint8),
    }
    entry.record({**states, "cuda": _list_of(cuda)})


def _shown(value: Any) -> str:
    """A value in a few words, whatever it is."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    if value is None or isinstance(value, bool | int | float | str):
        text = f"{value:.3g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else ""
        text = text or (hex(value) if isinstance(value, int) and abs(value) > _MOST else str(value))
        return text if len(text) <= 40 else f"{text[:37]}…"
    return f"of type {type(value).__name__}"


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    name = "a pickle that may run code" if isinstance(error, pickle.UnpicklingError) else type(error).__name__
    return f"{name}: {text[:120]}" if text else name
