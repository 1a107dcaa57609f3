"""Declare how an architecture of transformers maps to fastformer: settings and weights.

Nothing is ignored silently. A setting of transformers is read, known to change no number, or must have its default. A
weight is converted, or compared with the weights from which it is computed.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

# Name in transformers -> in fastformer; of several names for one function, the last is written back.
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
# Settings of training; a conversion may lose these.
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
    """A configuration of transformers with the names of the model's weights; it records which settings are read."""

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
        """The model type in transformers."""
        return str(type(self.config).model_type)

    def refuse(self, name: str, value: Any, allowed: str) -> ValueError:
        """Return the error for a setting with a value that is not allowed."""
        return ValueError(f"{self.kind}: {name} must be {allowed}, not {value!r}")

    def require(self, **required: Any) -> None:
        """Raise ValueError for a setting with another value than the required one."""
        for name, required_value in required.items():
            if (value := getattr(self, name)) != required_value:
                raise self.refuse(name, value, repr(required_value))

    def choose(self, name: str, choices: Mapping[str, str]) -> str:
        """Translate a setting's value by `choices`, value in transformers -> in fastformer."""
        value = getattr(self, name)
        if value not in choices:
            raise self.refuse(name, value, f"one of {', '.join(choices)}")
        return choices[value]

    def ids(self, bos: str = "bos_token_id") -> dict[str, int]:
        """Return the special ids; missing padding or bos is replaced by eos; of several eos ids the first is used."""
        size, eos = self.vocab_size, self.eos_token_id
        eos = eos[0] if isinstance(eos, list | tuple) and eos else eos
        if not isinstance(eos, int) or not 0 <= eos < size:
            raise self.refuse("eos_token_id", self.eos_token_id, f"a whole number below vocab_size, {size}")
        ids = {"pad_id": self.pad_token_id, "bos_id": getattr(self, bos), "eos_id": eos}
        return {name: i if isinstance(i, int) and 0 <= i < size else eos for name, i in ids.items()}

    def refuse_unread(self, idle: Iterable[str]) -> None:
        """Raise ValueError for a setting that was neither read nor idle and differs from its default."""
        if getattr(self.config, "quantization_config", None) is not None:
            raise self.refuse("quantization_config", self.config.quantization_config, "None")
        bases = [each for each in type(self.config).__mro__ if each.__name__ == "PreTrainedConfig"]
        common = {each.name for base in bases for each in dataclasses.fields(base)}
        for each in dataclasses.fields(type(self.config)):
            known = each.name in common | _IDLE | self._read or each.name in idle
            default = each.default
            if default is dataclasses.MISSING and each.default_factory is not dataclasses.MISSING:
                default = each.default_factory()
            if not known and (value := getattr(self.config, each.name)) != default:
                raise self.refuse(each.name, value, f"{default!r}, which alone is known")


@dataclass(frozen=True)
class Architecture:
    """How one model class of transformers maps to fastformer.

    Attributes:
        network, config: the class of fastformer and the class of its configuration.
        settings: returns fastformer's settings; raises ValueError naming a setting that fastformer cannot represent.
        weights: name in fastformer -> name in transformers, or names whose tensors are concatenated. {n} is the number
            of a layer; `.T` marks a transposed matrix, `[0]` the only row of a matrix.
        implied: name in transformers -> function (fastformer model, tensor) that returns the expected tensor.
        idle: settings of transformers that change no number.
        configuration: returns keywords of transformers' configuration; None: models cannot be converted back.
        unlike: settings of fastformer that a conversion to transformers and back may change.
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
        """Return fastformer's configuration; raise ValueError for a setting that fastformer cannot represent."""
        reader = Reader(config, weights)
        settings = self.settings(reader)
        reader.refuse_unread(self.idle)
        return self.config(**settings)
