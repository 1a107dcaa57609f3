"""Declare an architecture of transformers: its settings and weights as those of fastformer.

Nothing is passed over: a setting of transformers is read, known to change no number, or must have its default; a weight
becomes one of fastformer, or is compared with the weights that it follows from.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

# Name in transformers -> in fastformer; of several the last is written.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "swish": "silu",
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Settings of all architectures that change no number.
_IDLE = frozenset({"use_cache", "initializer_range", "init_std"})
# Settings of training, which may be lost in a conversion.
TRAINING = frozenset(
    {
        "dropout",
        "attention_dropout",
        "activation_dropout",
        "embedding_dropout",
        "output_dropout",
        "initialisation",
        "initialisation_range",
        "embedding_initialisation",
        "embedding_range",
    }
)


class Reader:
    """A configuration of transformers, with the names of the model's weights, that records what was read."""

    def __init__(self, config: Any, weights: Iterable[str]) -> None:
        self.config, self.weights = config, frozenset(weights)
        self._read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        try:
            return getattr(self.config, name)
        except AttributeError:
            raise ValueError(f"the {self.kind} configuration has no {name}") from None

    @property
    def kind(self) -> str:
        """Return the model type, as transformers names it."""
        return str(type(self.config).model_type)

    def refuse(self, name: str, value: Any, allowed: str) -> ValueError:
        """Return the error that names a setting."""
        return ValueError(f"{self.kind}: {name} must be {allowed}, not {value!r}")

    def require(self, **wanted: Any) -> None:
        """Raise ValueError for a setting with another value."""
        for name, value in wanted.items():
            if (found := getattr(self, name)) != value:
                raise self.refuse(name, found, repr(value))

    def choose(self, name: str, ours: Mapping[str, str]) -> str:
        """Return the name of a setting's value in fastformer."""
        value = getattr(self, name)
        if value not in ours:
            raise self.refuse(name, value, f"one of {', '.join(ours)}")
        return ours[value]

    def ids(self, bos: str = "bos_token_id") -> dict[str, int]:
        """Return the special ids; where there is no padding or bos, it is eos; of several eos, the first counts."""
        size, eos = self.vocab_size, self.eos_token_id
        eos = eos[0] if isinstance(eos, list | tuple) and eos else eos
        if not isinstance(eos, int) or not 0 <= eos < size:
            raise self.refuse("eos_token_id", self.eos_token_id, f"a whole number below vocab_size, {size}")
        found = {"pad_id": self.pad_token_id, "bos_id": getattr(self, bos), "eos_id": eos}
        return {name: i if isinstance(i, int) and 0 <= i < size else eos for name, i in found.items()}

    def refuse_unread(self, idle: Iterable[str]) -> None:
        """Raise ValueError for a setting that was not read, is not idle, and has not its default."""
        if getattr(self.config, "quantization_config", None) is not None:
            raise self.refuse("quantization_config", self.config.quantization_config, "None")
        bases = [each for each in type(self.config).__mro__ if each.__name__ == "PreTrainedConfig"]
        common = {each.name for base in bases for each in dataclasses.fields(base)}
        for each in dataclasses.fields(type(self.config)):
            known = each.name in common | _IDLE | self._read or each.name in idle
            default = each.default
            if default is dataclasses.MISSING and each.default_factory is not dataclasses.MISSING:
                default = each.default_factory()
            if not known and (found := getattr(self.config, each.name)) != default:
                raise self.refuse(each.name, found, f"{default!r}, which alone is known")


@dataclass(frozen=True)
class Architecture:
    """One class of models of transformers.

    Attributes:
        network, config: class of fastformer, and of its settings.
        settings: makes the settings of fastformer; raises ValueError naming one that it does not have.
        weights: name in fastformer -> in transformers, of several one below the other; {n} is the number of a layer,
            `.T` marks a transposed matrix, `[0]` the one row of a matrix.
        implied: name in transformers -> its value, of our model and of the tensor.
        idle: settings of transformers that change no number.
        configuration: makes the keywords of transformers' configuration; None: there is no way back.
        unlike: settings of fastformer that may change on the way there and back.
    """

    network: type[nn.Module]
    config: type
    settings: Callable[[Reader], dict[str, Any]]
    weights: Mapping[str, str]
    implied: Mapping[str, Callable[[Any, Tensor], Tensor]] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()
    configuration: Callable[[Any], dict[str, Any]] | None = None
    unlike: frozenset[str] = frozenset()

    def read(self, config: Any, weights: Iterable[str]) -> Any:
        """Return the settings of fastformer; raise ValueError naming a setting that it cannot have, and its value."""
        reader = Reader(config, weights)
        found = self.settings(reader)
        reader.refuse_unread(self.idle)
        return self.config(**found)
