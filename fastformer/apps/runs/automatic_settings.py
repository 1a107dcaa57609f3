"""Choose the settings that a user leaves out, from the corpus, the budget and the speed of this machine.

All choices follow from two numbers: the tokens of the corpus, E (one epoch), and the tokens that the budget pays for,
T. A budget of epochs pays for `epochs` times E, and one of steps for `steps` batches. A budget of minutes pays for nine
tenths of them (one tenth is for validations) at the measured speed of a few steps. The smallest T counts. Only a budget
of minutes depends on the machine: steps and epochs give the same choice everywhere.

vocabulary   64 times the root of the number of words that occur at least ten times; at most as many as words that occur
             at least twice
size         the last row of `SIZES` that T and E are enough for
batch        0.8 times the root of T tokens, so 0.64 times as many tokens as there are steps: both grow alike
lr           4e-3 at width 128, and in inverse proportion to the width above; warm-up is a tenth of the steps
validation   five times in the run if the corpus is read more than five times or there are more than 10,000 steps; else,
             or if a number of epochs or a plateau schedule is given, after each epoch
dropout      0 where the budget reads the corpus at most twice, 0.1 at most twenty times, 0.3 beyond

docs/translation.md and docs/language-models.md describe the runs that these constants come from. Rows above width 128
are not measured.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastformer.apps.models.settings import fitting_shape
from fastformer.apps.train import BatchSource, TrainConfig
from fastformer.apps.train.graphs import GraphedUpdate, new_update
from fastformer.apps.train.processes import Processes
from fastformer.nn.activations import is_gated

# Settings chosen for every kind of run; the applications add others.
CHOSEN = ("vocabulary", "d_model", "heads", "feed_forward", "dropout", "lr", "warmup_steps", "validate_every")

_FREQUENT = 10  # times that a word occurs to count for the vocabulary
_TRAINING_SHARE = 0.9  # of a budget of minutes; one tenth is for validations
_BATCH = 0.8  # tokens of a step / root of all tokens of training
_STEP_TOKENS = 500, 4000  # least and most
_TRIAL_SECONDS, _TRIAL_STEPS = 1.0, 3  # of measuring the speed: at least both, or three times the seconds
_TRIAL_TOKENS = 1000, 4000  # of a step: on a CPU; on a GPU, where launches would limit smaller steps


class Size(NamedTuple):
    """A row of the table of sizes."""

    d_model: int
    widening: int  # width of the feed-forward layers / d_model
    budget: float  # least tokens that the budget pays for
    corpus: float  # least tokens of the corpus


# `Task.layers` has the number of layers for each row, which differs by kind of run.
SIZES = (
    Size(128, 2, 0, 0),
    Size(128, 2, 2e6, 0),
    Size(128, 2, 6e6, 0),
    Size(256, 4, 30e6, 1e6),
    Size(512, 4, 300e6, 10e6),
)


@dataclass(frozen=True)
class Task:
    """Description of what a run trains."""

    layers: Mapping[str, Sequence[int]]  # settings that count layers, each with its value in every row of `SIZES`
    tokens: int  # of the training text, as batches count them
    batch: str | None = "batch_tokens"  # setting of the batch size; None: batches of `unit` tokens are fixed
    unit: float = 1.0  # tokens for each unit of that setting: 1, or the tokens of a sentence
    per_target: float = 1.0  # tokens for each target of the loss: 1, or the tokens of a text that has one label
    longest: int = 1  # tokens of the longest text, which must fit into a batch
    data: Mapping[str, Sequence[int]] = field(default_factory=dict)  # settings of the data, as `layers`
    model: Mapping[str, Any] = field(default_factory=dict)  # settings that suit this kind of run
    train: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The chosen settings by section, none of which a user gave, and lines that report them with the reasons."""

    data: Mapping[str, Any]
    model: Mapping[str, Any]
    train: Mapping[str, Any]
    lines: tuple[str, ...] = ()


def vocabulary_size(sides: Iterable[Iterable[str]]) -> int:
    """Choose the number of entries of a sentencepiece vocabulary, for the side that needs most of them.

    At least two for each character, because in a script without spaces hardly any word occurs twice.
    """
    sizes = []
    for lines in sides:
        counts = Counter(chain.from_iterable(line.split() for line in lines))
        frequent = sum(count >= _FREQUENT for count in counts.values())
        repeated = sum(count >= 2 for count in counts.values())
        characters = len(set(chain.from_iterable(counts)))
        sizes.append(int(_rounded(max(min(64 * math.sqrt(frequent), repeated), 2 * characters, 100))))
    return max(sizes)


def choose(
    task: Task,
    defaults: Any,
    model: Mapping[str, Any],
    train: TrainConfig,
    given: Collection[str],
    speed: Callable[[Choice], float],
    data: Mapping[str, Any] = MappingProxyType({}),
    on_gpu: bool = False,
) -> Choice:
    """Choose the settings that a user did not give.

    defaults: class of the model's settings. model, train: settings as given, of training with defaults. given: names of
    all given settings. speed: returns targets of the loss per second for a choice's shape; called only if `train` has
    minutes. data: settings of the data that are chosen already. on_gpu: the rules were not measured on a GPU.
    """
    rates: dict[str, float] = {}  # measured once for rows of the same shape

    def left_out(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name not in given}

    def step_of(tokens: float) -> tuple[dict[str, int], float]:
        """Return the batch size, as given or for steps of about `tokens` tokens, and the tokens of a step."""
        if task.batch is None:
            return {}, task.unit * train.accumulate
        least, most = _STEP_TOKENS
        count = max(1, int(_rounded(min(max(tokens, least), most) / train.accumulate / task.unit, 1)))
        batch = getattr(train, task.batch) if task.batch in given else max(count, task.longest)
        return {task.batch: batch}, batch * task.unit * train.accumulate

    def candidate(row: int) -> tuple[Choice, float, float | None]:
        """Return the shape of a row, the tokens that the budget pays for, and the speed if it was measured."""
        shape = Choice(
            {**data, **left_out({name: sizes[row] for name, sizes in task.data.items()})},
            left_out(_shape(task, defaults, model, row)),
            left_out(step_of(_TRIAL_TOKENS[on_gpu])[0]),
        )
        budgets, rate = [math.inf], None
        if train.epochs is not None:
            budgets.append(train.epochs * task.tokens)
        if train.steps is not None:
            budgets.append(train.steps * step_of(_BATCH**2 * train.steps)[1])
        if train.minutes is not None:
            if str(shape) not in rates:
                rates[str(shape)] = task.per_target * speed(shape)
            rate = rates[str(shape)]
            budgets.append(_TRAINING_SHARE * 60 * train.minutes * rate)
        return shape, min(budgets), rate

    shape, tokens, rate = candidate(0)
    for row, size in enumerate(SIZES[1:], start=1):
        if task.tokens < size.corpus or tokens < size.budget or (wider := candidate(row))[1] < size.budget:
            break
        shape, tokens, rate = wider
    epochs = tokens / task.tokens
    dropout = 0.0 if epochs <= 2 else 0.1 if epochs <= 20 else 0.3

    batch, step = step_of(_BATCH * math.sqrt(tokens))
    steps = max(1.0, tokens / step)
    training = {**task.train, **batch}
    if train.optimizer != "sgd":
        training["lr"] = _rounded(4e-3 * 128 / max({**shape.model, **model}["d_model"], 128))
    training["warmup_steps"] = min(4000, int(_rounded(max(steps / 10, 1), 1)))
    if (epochs > 5 or steps > 10_000) and train.epochs is None and "plateau" not in train.schedule:
        training["validate_every"] = max(50, int(_rounded(steps / 5, 1)))

    chosen, training = {**shape.model, **left_out({"dropout": dropout})}, left_out(training)
    remark = " (the rule was not measured on a GPU)" if on_gpu else ""
    pace = "" if rate is None else f" at {rate:,.0f} tokens a second, measured here"
    lines = (
        f"chosen model: {_listed({**shape.data, **chosen})}; for {_rounded(tokens):,.0f} tokens of training, "
        f"{_rounded(epochs):,g} times the {task.tokens:,} of the corpus{remark}",
        f"chosen training: {_listed(training)}; for {_rounded(steps):,.0f} steps of {step:,.0f} tokens{pace}",
        "a flag, or a file given as --config, overrides each; --resume keeps them",
    )
    return Choice(shape.data, chosen, training, lines)


def _shape(task: Task, defaults: Any, model: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return a model's shape for a row of `SIZES`, at the given width or else the row's."""
    shape = fitting_shape(model, SIZES[row].d_model) | {name: counts[row] for name, counts in task.layers.items()}
    width, gated = shape["d_model"], is_gated(model.get("activation", defaults.activation))
    shape["feed_forward"] = -(-width // 3) * 8 if gated else width * SIZES[row].widening
    return {**shape, **task.model}


def _rounded(number: float, digits: int = 2) -> float:
    """Round to significant digits; with one, two measurements of one speed mostly give the same settings."""
    return float(f"{number:.{digits}g}")


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "nothing, all is given"


def targets_per_second(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batches: BatchSource, train: TrainConfig, world: int
) -> float:
    """Measure the targets per second of `world` processes, over a few steps of one process, which change the model.

    The first step is not counted, because it compiles and allocates. With CUDA graphs each batch makes three steps, of
    which only the last is counted: it is a replay.
    """
    device = next(model.parameters()).device
    update = new_update(model, loss, train if world == 1 else replace(train, cuda_graphs=False), Processes())
    repeats = 3 if isinstance(update, GraphedUpdate) else 1
    clock = time.process_time if train.clock == "cpu" else time.perf_counter
    if train.threads is not None:
        torch.set_num_threads(train.threads)
    model.train()
    tokens, seconds = 0, 0.0
    for step, batch in enumerate(cycle(batches.epoch(0))):
        for _ in range(repeats):
            started = clock()
            _, norm, seen = update.gradients([(batch.share(0, world) if world > 1 else None) or batch])
            update.apply(norm, train.lr)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if step == 0:
            continue
        tokens += seen
        seconds += clock() - started
        if seconds >= (_TRIAL_SECONDS if step >= _TRIAL_STEPS else 3 * _TRIAL_SECONDS):
            break
    return tokens * world / seconds
