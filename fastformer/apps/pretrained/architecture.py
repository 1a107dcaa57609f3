"""What an application says of an architecture of transformers: its settings as ours, and which weight is which.

Nothing is passed over. A setting of theirs is read, or is known to change nothing that is computed, or must be what
transformers makes it by itself; a weight of theirs becomes one of ours, or follows from others and is compared with
what it follows from.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

# Name of theirs -> of ours; of several the last is what is written.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "swish": "silu",
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Of all architectures: how they are trained, run and stored, and what generation reads.
_IDLE = frozenset({"use_cache", "initializer_range", "init_std"})
# Drawn before training, or only in training: what one side has no setting of, it may be converted without.
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
    """A configuration of transformers that keeps account of what was read.

    Attributes:
        config: as transformers has it.
        weights: the names of the model's weights.
    """

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
        """The model type, as transformers names it."""
        return str(type(self.config).model_type)

    def refuse(self, name: str, value: Any, allowed: str) -> ValueError:
        """The error that names a setting."""
        return ValueError(f"{self.kind}: {name} must be {allowed}, not {value!r}")

    def require(self, **wanted: Any) -> None:
        """Refuse a setting with another value than the wanted one."""
        for name, value in wanted.items():
            if (found := getattr(self, name)) != value:
                raise self.refuse(name, found, repr(value))

    def choose(self, name: str, ours: Mapping[str, str]) -> str:
        """What a setting is called here."""
        value = getattr(self, name)
        if value not in ours:
            raise self.refuse(name, value, f"one of {', '.join(ours)}")
        return ours[value]

    def ids(self, bos: str = "bos_token_id") -> dict[str, int]:
        """The special ids: padding is eos, and so is bos, where there is none; of several eos, the first counts."""
        size, eos = self.vocab_size, self.eos_token_id
        eos = eos[0] if isinstance(eos, list | tuple) and eos else eos
        if not isinstance(eos, int) or not 0 <= eos < size:
            raise self.refuse("eos_token_id", self.eos_token_id, f"a whole number below vocab_size, {size}")
        found = {"pad_id": self.pad_token_id, "bos_id": getattr(self, bos), "eos_id": eos}
        return {name: i if isinstance(i, int) and 0 <= i < size else eos for name, i in found.items()}

    def refuse_unread(self, idle: Iterable[str]) -> None:
        """Refuse what nobody read, unless it is idle, or as transformers has it by itself."""
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
        network, config: the class of ours, and of its settings.
        settings: the settings of ours that a configuration asks for; raises ValueError naming one that ours cannot be.
        weights: name of ours -> theirs, that lie in it one below the other; {n} is the number of a layer, `.T` a
            transposed matrix, `[0]` the one row of a matrix. Names that a model of ours has not are passed over.
        implied: name of theirs -> what it must be, of our model and of the tensor.
        idle: settings of theirs that change nothing that is computed.
        configuration: the keywords of their configuration, of our settings; None: there is no way back.
        unlike: our settings that may be other than what comes back from theirs.
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
        """The settings of ours, of a configuration of transformers.

        Raises:
            ValueError: naming a setting that ours cannot be, and its value.
        """
        reader = Reader(config, weights)
        found = self.settings(reader)
        reader.refuse_unread(self.idle)
        return self.config(**found)
