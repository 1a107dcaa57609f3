"""`TrainConfig`, every training hyperparameter with its help line, and the TOML files that hold such dataclasses.

The help text and the allowed values live in the fields' metadata, so the command line, the error messages and the run
folder's config.toml are made from one place. `load_toml` gives back plain dictionaries of what the file states and not
finished objects: flags on the command line may then override the file before defaults fill the rest.
"""

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastformer.apps.system.guarded import read_file, write_file
from fastformer.apps.train.compilation import BACKENDS
from fastformer.apps.train.schedules import SCHEDULES

_ADAM = ("adamw", "adam")


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    only: Mapping[str, Any] | None = None,
    fixed: bool = False,
) -> Any:
    """A field with its help line and its rule, which `check_values` enforces and the command line shows.

    only, fixed: beside which other settings it has an effect, and whether a run keeps it; see `conditions`.
    """
    metadata = {"help": help, "choices": choices, "at_least": at_least, "above": above, "below": below}
    return field(default=default, metadata=metadata | {"at_most": at_most, "only": only, "fixed": fixed})


def other_default(settings: type, name: str, default: Any, **changes: Any) -> Any:
    """The field `name` of a dataclass with another default, for a subclass; what `changes` leaves of its rule stays."""
    (found,) = (each for each in dataclasses.fields(settings) if each.name == name)
    return field(default=default, metadata={**found.metadata, **changes})


@dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters of a run. At least one of steps, epochs and minutes must be set; the first reached ends it."""

    optimizer: str = option("adamw", "optimiser", choices=("adamw", "adam", "sgd"), fixed=True)
    lr: float = option(1e-3, "peak learning rate", above=0)
    betas: tuple[float, float] = option(
        (0.9, 0.98), "Adam's decay rates of gradient and square", at_least=0, below=1, only={"optimizer": _ADAM}
    )
    eps: float = option(1e-9, "Adam's term that avoids division by zero", above=0, only={"optimizer": _ADAM})
    momentum: float = option(0.9, "momentum of steps", at_least=0, below=1, only={"optimizer": "sgd"})
    weight_decay: float = option(0.0, "weight decay of matrices (biases and norms are left alone)", at_least=0)
    schedule: str = option("inverse_sqrt", "learning-rate schedule", choices=SCHEDULES, fixed=True)
    warmup_steps: int = option(4000, "steps of linear rise to the peak learning rate", at_least=0)
    min_lr: float = option(0.0, "lowest learning rate", at_least=0, only={"schedule": SCHEDULES[1:]})
    plateau_factor: float = option(0.5, "factor of one reduction", above=0, below=1, only={"schedule": "plateau"})
    plateau_patience: int = option(
        2, "validations without a lower loss to accept", at_least=0, only={"schedule": "plateau"}
    )
    plateau_divisor: float = option(4.0, "divisor of one reduction", above=1, only={"schedule": "divide_on_plateau"})
    label_smoothing: float = option(0.1, "probability mass spread over all words", at_least=0, below=1)
    clip_norm: float = option(1.0, "largest gradient norm; 0: no clipping", at_least=0)
    accumulate: int = option(1, "batches whose gradients make one step", at_least=1)
    steps: int | None = option(None, "end after this many optimiser steps", at_least=1)
    epochs: int | None = option(None, "end after this many passes over the data", at_least=1)
    minutes: float | None = option(None, "end after this many minutes, validations included", above=0)
    clock: str = option(
        "wall",
        "what minutes counts: wall, or cpu: time of the processor, on a busy machine",
        choices=("wall", "cpu"),
        fixed=True,
    )
    batch_tokens: int = option(
        4096, "most tokens in a batch", at_least=1, only={"batch_sentences": None, "stream": "documents"}, fixed=True
    )
    batch_sentences: int | None = option(
        None, "most sentences in a batch", at_least=1, only={"texts": "sentence pairs"}, fixed=True
    )
    validate_every: int | None = option(None, "validate and save every n steps; unset: after each epoch", at_least=1)
    metric: str = option(
        "loss", "validation value that decides best weights and early stopping, such as bleu", fixed=True
    )
    patience: int | None = option(None, "stop after this many validations without a better metric", at_least=1)
    keep: int = option(3, "last checkpoints to keep, besides the best", at_least=1)
    average: int = option(1, "average the last n checkpoints at the end; 1: no averaging", at_least=1)
    seed: int = option(1, "seed of every random generator", at_least=0, below=2**32, fixed=True)
    precision: str = option(
        "fp32", "fp32, or autocast to bf16 or fp16 (the latter with loss scaling)", choices=("fp32", "bf16", "fp16")
    )
    cuda_graphs: bool = option(
        False,
        "repeat steps as CUDA graphs, for small batches; fp32 or bf16",
        only={"hardware": "a CUDA device", "processes": "one process"},
    )
    compile: str | None = option(
        None, "torch.compile the steps, with this compiler; eager and aot_eager only trace", choices=BACKENDS
    )
    checkpoint_activations: bool = option(
        False, "keep of each layer only its input, and compute it again in backward: less memory"
    )
    parallel: str = option(
        "ddp",
        "torchrun: ddp, every process holds the model; fsdp: its part of it",
        choices=("ddp", "fsdp"),
        only={"processes": "several processes"},
    )
    sharded_checkpoints: bool = option(False, "each process writes its own part of a checkpoint")
    threads: int | None = option(None, "CPU threads of torch; unset: torch's choice", at_least=1)
    log_every: int = option(50, "steps between two records of loss and speed", at_least=1)
    tensorboard: bool = option(False, "write TensorBoard event files too")

    def __post_init__(self) -> None:
        """Check every value; raises ValueError with one line naming field, value and what is allowed."""
        check_values(self)
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}; it must not be")
        if self.cuda_graphs and self.precision == "fp16":
            raise ValueError("cuda_graphs=True is for precision fp32 and bf16, not for fp16")
        for other, value in (("compile", self.compile), ("checkpoint_activations", self.checkpoint_activations)):
            if self.cuda_graphs and value:
                raise ValueError(f"cuda_graphs=True does not go together with {other}={value!r}; leave one of them out")
        if self.average > self.keep:
            raise ValueError(f"average={self.average} needs keep >= {self.average}, but keep={self.keep}")
        if self.steps is None and self.epochs is None and self.minutes is None:
            raise ValueError("no end of training is set; give steps, epochs or minutes")


def check_values(config: Any) -> None:
    """Check a dataclass instance against its type hints and its fields' metadata (choices, at_least, above, below …).

    Values that stand for others are replaced: a text by the path and a path by the text that is asked for, a list by a
    tuple.
    """
    hints = typing.get_type_hints(type(config))
    for each in dataclasses.fields(config):
        value, rule = _as_hinted(getattr(config, each.name), hints[each.name]), each.metadata
        object.__setattr__(config, each.name, value)  # settings are frozen
        _check_type(each.name, value, hints[each.name])
        if rule.get("choices") and value is not None and value not in rule["choices"]:
            raise ValueError(f"{each.name}={value!r} is not allowed; choose {', '.join(rule['choices'])}")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not _within(number, rule):
                raise ValueError(f"{each.name}={value} is out of range; it must be {_range_text(rule)}")


def _as_hinted(value: Any, hint: Any) -> Any:
    """A value in the type that is asked for, where it is one in another form."""
    kinds = {hint, *typing.get_args(hint)}
    if isinstance(value, list):
        return tuple(value)
    if Path in kinds and isinstance(value, str | os.PathLike):
        return Path(value)
    return os.fspath(value) if str in kinds and isinstance(value, os.PathLike) else value


def _within(number: float, rule: Mapping[str, Any]) -> bool:
    at_least, above, below = rule.get("at_least"), rule.get("above"), rule.get("below")
    return (
        abs(number) != float("inf")
        and number == number
        and (at_least is None or number >= at_least)
        and (above is None or number > above)
        and (below is None or number < below)
        and (rule.get("at_most") is None or number <= rule["at_most"])
    )


def _range_text(rule: Mapping[str, Any]) -> str:
    names = {"at_least": "at least", "above": "above", "below": "below", "at_most": "at most"}
    parts = [f"{text} {rule[key]}" for key, text in names.items() if rule.get(key) is not None]
    return " and ".join(parts) or "a finite number"


def _check_type(name: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        raise ValueError(f"{name}={value!r} has the wrong type; it must be {_hint_text(hint)}")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple and arguments[-1] is Ellipsis:
        return isinstance(value, tuple) and all(_fits(one, arguments[0]) for one in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if hint is Any or not isinstance(hint, type):
        return True
    if hint in (int, float):  # bool is an int to Python, but `steps = true` is a mistake
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _hint_text(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_hint_text(one) for one in arguments if one is not type(None))
    if origin is tuple:
        return f"a list of {len(arguments)} values"
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, arguments))
    names = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false", Path: "a path"}
    return names.get(hint, str(hint))


def load_toml(path: Path | str, sections: Mapping[str, type]) -> dict[str, dict[str, Any]]:
    """The values that a TOML file states: {section: {key: value}}, with every section present.

    sections: {"model": TranslationConfig, "train": TrainConfig, …}; a key must be a field of its section's dataclass
    and have its type. Arrays become tuples. Raises FileNotFoundError, or ValueError naming file, section and key.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such configuration file")
    content = read_toml(path)
    result: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for section, values in content.items():
        if section not in sections:
            raise ValueError(f"{path}: unknown section [{section}]{_nearest(section, sections)}")
        if not isinstance(values, dict):
            raise ValueError(f"{path}: {section} must be a section [{section}], not a value")
        hints = typing.get_type_hints(sections[section])
        names = {each.name for each in dataclasses.fields(sections[section]) if each.init}
        for key, value in values.items():
            if key not in names:
                raise ValueError(f"{path}: unknown key {key!r} in [{section}]{_nearest(key, names)}")
            result[section][key] = _from_toml(path, section, key, value, hints[key])
    return result


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds; a byte order mark is dropped. Raises ValueError, naming the file, when it is none."""
    try:
        return tomllib.loads(read_file(path).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not all that tomllib raises is a TOMLDecodeError
        raise ValueError(f"{path}: not a TOML file: {error}") from None


def _from_toml(path: Path, section: str, key: str, value: Any, hint: Any) -> Any:
    value = _as_hinted(value, hint)
    try:
        _check_type(key, value, hint)
    except ValueError as error:
        raise ValueError(f"{path}: [{section}] {error}") from None
    return value


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"


def save_toml(path: Path | str, sections: Mapping[str, Any]) -> None:
    """Write {section: dataclass instance or mapping} as TOML that `load_toml` reads back; unset values are left out.

    A file that is there is replaced in one step; a link is refused.
    """
    import tomli_w

    content = {}
    for section, values in sections.items():
        items = values if isinstance(values, Mapping) else {f.name: getattr(values, f.name) for f in _fields(values)}
        content[section] = {key: _to_toml(value) for key, value in items.items() if value is not None}
    path = Path(path)
    write_file(path, tomli_w.dumps(content).encode("utf-8"), path.parent)


def _fields(config: Any) -> list[dataclasses.Field[Any]]:
    return [each for each in dataclasses.fields(config) if each.init]


def _to_toml(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_to_toml(one) for one in value] if isinstance(value, tuple | list) else value
