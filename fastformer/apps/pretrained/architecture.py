"""Declare how an architecture of transformers maps to fastformer: settings, and weights by name.

Nothing is ignored silently. A setting of transformers is read, known to change no number, or must have its default. A
weight is converted, or compared with the weights from which it is computed.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
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
HF_ACTIVATIONS = {name: hf_name for hf_name, name in ACTIVATIONS.items()}
# Settings of all architectures that change no number.
_IDLE = frozenset({"use_cache", "initializer_range", "init_std"})
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


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
            raise ValueError(f"the {self.config.model_type} configuration has no {name}") from None

    def refuse(self, name: str, value: Any, allowed: str) -> ValueError:
        """Return the error for a setting with a value that is not allowed."""
        return ValueError(f"{self.config.model_type}: {name} must be {allowed}, not {value!r}")

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

    def settings(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the settings that differ in name only, by `names`: name in fastformer -> in transformers."""
        return {name: getattr(self, hf_name) for name, hf_name in names.items()}

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


class _HfWeight(NamedTuple):
    """The name of a weight in transformers, and how it is stored: `.T` transposed, `[0]` with a dimension of size 1."""

    name: str
    mark: str

    def to_fastformer(self, x: Tensor) -> Tensor:
        x = x.detach()
        return x.t() if self.mark == ".T" else x[0] if self.mark else x

    def to_transformers(self, x: Tensor) -> Tensor:
        return x.t() if self.mark == ".T" else x[None] if self.mark else x


def hf_settings(config: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the inverse of `Reader.settings`; an unset dropout rate is `dropout`."""
    values = {hf_name: getattr(config, name) for name, hf_name in names.items()}
    return {name: config.dropout if value is None else value for name, value in values.items()}


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

    def _hf_weights(self, name: str, known: Mapping[str, Tensor]) -> list[_HfWeight]:
        """Return the weights of transformers that a weight of fastformer is concatenated from, in order.

        Raises ValueError if there is none, or one is not in `known`.
        """
        layer = _LAYER.search(name)
        pattern = self.weights.get(_LAYER.sub("{n}", name, count=1))
        if pattern is None:
            raise ValueError(f"{name} has no counterpart in these models")
        names = pattern.format(n=layer[0] if layer else "").split()
        weights = [_HfWeight(*re.fullmatch(r"(.*?)(\.T|\[0\])?", each).groups("")) for each in names]  # type: ignore[union-attr]
        if missing := [each.name for each in weights if each.name not in known]:
            raise ValueError(f"{', '.join(missing)}: not among the weights, for {name}")
        return weights

    def convert(self, model: Any, hf_weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the weights of a model of transformers, for a model of fastformer.

        Raises:
            ValueError: naming a weight that is missing or unexpected, that has another shape, or that differs from a
                weight it is tied with.
        """
        weights, unread = {}, set(hf_weights)
        for name, like in model.state_dict().items():
            sources = self._hf_weights(name, hf_weights)
            names = [source.name for source in sources]
            tensors = [source.to_fastformer(hf_weights[source.name]) for source in sources]
            shapes = " and ".join(str(list(x.shape)) for x in tensors)
            if {x.shape[1:] for x in tensors} != {like.shape[1:]} or sum(map(len, tensors)) != len(like):
                raise ValueError(f"{', '.join(names)}: shape {shapes} does not fit {name}, {list(like.shape)}")
            weights[name] = torch.cat(tensors) if len(tensors) > 1 else tensors[0].clone()
            unread.difference_update(names)
        if unexpected := unread.difference(self.implied):
            raise ValueError(f"{', '.join(sorted(unexpected))}: weights that {type(model).__name__} does not have")
        names_of = {id(module): name for name, module in model.named_modules()}
        for modules in model.tied() if hasattr(model, "tied") else ():
            one, other = (f"{names_of[id(module)]}.weight" for module in modules)
            if not torch.equal(weights[one], weights[other]):
                raise ValueError(f"{one} and {other} are tied in the configuration, but their weights differ")
        return weights

    def check_implied(self, model: nn.Module, hf_weights: Mapping[str, Tensor]) -> None:
        """Raise ValueError for a weight that differs from the tensor that the model computes for it."""
        for name in self.implied.keys() & hf_weights.keys():
            x = hf_weights[name].detach()
            expected = self.implied[name](model, x).detach().to(x.dtype)
            if expected.shape != x.shape or float((expected - x).abs().max()) > 2 * torch.finfo(x.dtype).eps:
                raise ValueError(f"{name}: not what {type(model).__name__} computes")

    def convert_back(self, model: nn.Module, hf_weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the weights of a model of fastformer, in the names and shapes of `hf_weights`.

        Raises:
            ValueError: naming a weight that has no counterpart.
        """
        converted = {name: torch.zeros_like(like) for name, like in hf_weights.items()}
        for name, weight in model.state_dict().items():
            targets = self._hf_weights(name, hf_weights)
            sizes = [len(target.to_fastformer(hf_weights[target.name])) for target in targets]
            for target, rows in zip(targets, weight.split(sizes), strict=True):
                converted[target.name] = target.to_transformers(rows).detach().clone()
        for name in self.implied.keys() & hf_weights.keys():
            converted[name] = self.implied[name](model, hf_weights[name]).detach().clone()
        return converted
