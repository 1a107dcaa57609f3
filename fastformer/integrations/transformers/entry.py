"""The entry of a Hugging Face model: keep the sequences of a flattened batch apart.

A flattened batch holds several sequences in a row; its position ids begin again with each of them, as
`DataCollatorWithFlattening` makes them. transformers tells its mask functions so only where there is no cache, and
encoders never. The forward of each model with `attn_implementation="fastformer"` therefore reads the position ids
before anything else does, and `mask_rules` asks here.

Letters: B batch, L length of a row.
"""

import json
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial, update_wrapper
from importlib import resources
from inspect import signature
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import masking_utils

from fastformer.modes import compiling, has_values

_MIXING = {"conv", "linear_attention", "mamba", "recurrent"}  # kinds of layers
_INSTALLED = "_reads_position_ids"  # attribute of a model whose forward is `forward`


@dataclass(eq=False)
class Flattened:
    """A flattened batch inside the forward of a model.

    Attributes:
        model: the innermost model that was given these position ids.
        given: the position ids as the model was given them.
        position_ids: int64 `[B, L]`.
        numbers: int64 `[B, L]`, equal for the tokens of one sequence; None if every row is one sequence.
        masked: whether the model asked for a mask that keeps the sequences apart.
    """

    model: nn.Module
    given: Tensor
    position_ids: Tensor
    numbers: Tensor | None
    masked: bool = False

    def mask_function(self, function: Any, shape: tuple[int, int, int], kept_apart: bool) -> Any:
        """Return a mask function that keeps the sequences apart.

        Args:
            function: the mask function of the model.
            shape: batch, queries and keys of the mask.
            kept_apart: whether the function is known to keep them apart already, as transformers' own does.

        Raises:
            ValueError: the model's class mixes tokens outside its attention, or there are keys beside the row's own.
        """
        if not compiling() and not keeps_apart(self.model):
            self.refuse("no test has shown that this class does")
        if shape != (*self.position_ids.shape, self.position_ids.shape[1]):
            self.refuse("its cache holds tokens or has a fixed length")
        self.masked = True
        if kept_apart:
            return function
        if compiling() or not hasattr(masking_utils, "packed_sequence_compatibility_function"):
            return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(self.numbers))
        return masking_utils.packed_sequence_compatibility_function(function, self.position_ids, self.numbers)

    def refuse(self, reason: str) -> NoReturn:
        raise ValueError(
            "position_ids begin again within a row, which makes it a flattened batch of several sequences, and "
            f"{type(self.model).__name__} cannot keep them apart: {reason}. Pass one sequence a row with an "
            "attention_mask; or, if a cache is the reason, pass use_cache=False and no past_key_values"
        )


# The batch of the forward that runs: in each thread; and while torch.compile traces, which knows no ContextVar.
_running: ContextVar[Any] = ContextVar("fastformer_batch", default=None)
_traced: list[Any] = []


def _current() -> Any:
    if _traced:
        return _traced[-1]
    return None if compiling() else _running.get()


def _inside(batch: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, inside of which `_current` returns the batch."""
    if compiling():
        _traced.append(batch)
        try:
            return function(*args, **kwargs)
        finally:
            _traced.pop()
    token = _running.set(batch)
    try:
        return function(*args, **kwargs)
    finally:
        _running.reset(token)


def flattened() -> Flattened | None:
    """Return the flattened batch of the model whose forward runs, or None."""
    batch: Flattened | None = _current()
    return batch if batch is not None and batch.numbers is not None else None


def install(model: nn.Module) -> None:
    """Have a model's forward read its position ids; harmless to repeat."""
    if _INSTALLED not in model.__dict__:
        inner, names = model.forward, tuple(signature(type(model).forward).parameters)[1:]
        model.__dict__[_INSTALLED] = True
        model.__dict__["forward"] = update_wrapper(partial(forward, model, inner, names), inner)


def uninstall(model: nn.Module) -> None:
    """Undo `install`, unless another library has wrapped the forward since."""
    if getattr(model.__dict__.get("forward"), "func", None) is forward:
        del model.__dict__["forward"], model.__dict__[_INSTALLED]


def forward(model: Any, inner: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Run a model's own forward, inside of which `flattened` returns its batch."""
    if model.config._attn_implementation != "fastformer":
        return inner(*args, **kwargs)
    given = dict(zip(names, args, strict=False)) | kwargs
    outer, batch = _current(), _read(model, given)
    output = _inside(batch, inner, *args, **kwargs)
    if batch is not None and batch.numbers is not None:
        if not (batch.masked or compiling()):
            batch.refuse("its attention asked for no mask that could do it")
        if outer is not None:
            outer.masked = True
    return output


def _read(model: nn.Module, given: dict[str, Any]) -> Flattened | None:
    """Read the arguments of a model; waits for the device if there are position ids and no padding mask."""
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.shape[-1] < 2:
        return None
    if positions.dim() == 3 and positions.shape[0] == 4:  # of text, time, height and width
        positions = positions[0]
    outer: Flattened | None = _current()
    if outer is not None and outer.given is given["position_ids"]:  # of a model with a head, say, which has read them
        outer.model = model
        return outer
    if positions.dim() != 2 or not _is_without_padding(mask):
        return None
    states = next((x for x in (given.get("input_ids"), given.get("inputs_embeds")) if isinstance(x, Tensor)), positions)
    rows = positions.expand(states.shape[0], -1)
    numbers = masking_utils.find_packed_sequence_indices(rows)
    batch = Flattened(model, given["position_ids"], rows, numbers)
    if numbers is not None and given.get("encoder_hidden_states") is not None:
        batch.refuse("it attends to an encoder's states too")
    return batch


def _is_without_padding(mask: Any) -> bool:
    if mask is None:
        return True
    if not isinstance(mask, Tensor) or mask.dim() != 2 or compiling() or not has_values(mask):
        return False
    return bool(torch.all(mask != 0))


def keeps_apart(model: Any) -> bool:
    """Whether only attention mixes tokens in a model: as recorded, or if it is none of transformers'."""
    if _MIXING & set(getattr(model.config.get_text_config(), "layer_types", None) or ()):
        return False
    return not type(model).__module__.startswith("transformers.") or identity(model) in _kept_apart()


@lru_cache(maxsize=1)
def survey() -> dict[str, Any]:
    """Return what was found for each type of model: see `tests/integrations/survey.py`, which writes it."""
    text = resources.files("fastformer.integrations.transformers").joinpath("tested.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@lru_cache(maxsize=1)
def _kept_apart() -> frozenset[str]:
    return frozenset(name for found in survey()["types"].values() for name in found.get("kept_apart", ()))


def identity(model: nn.Module) -> str:
    """Return the name of a model's class as the record of the survey has it."""
    cls = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch."))
    return f"{cls.__module__.removeprefix('transformers.models.')}.{cls.__name__}"
