"""`Architecture`: how one model class of transformers maps to fastformer, in its settings and weights.

Nothing is ignored silently. A setting of transformers is read, known to change no number, or must have its default. A
weight is converted, or compared with the weights from which it is computed.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
        known = {each.name for base in bases for each in dataclasses.fields(base)}.union(_IDLE, self._read, idle)
        for each in dataclasses.fields(type(self.config)):
            default = each.default
            if default is dataclasses.MISSING and each.default_factory is not dataclasses.MISSING:
                default = each.default_factory()
            if each.name not in known and (value := getattr(self.config, each.name)) != default:
                raise self.refuse(each.name, value, f"{default!r}, which alone is known")


@dataclass(frozen=True)
class Architecture:
    """How one model class of transformers maps to fastformer.

    Attributes:
        network, config: the class of fastformer and the class of its configuration.
        settings: returns fastformer's settings; raises ValueError naming a setting that fastformer cannot represent.
        modules: module, or weight, in fastformer -> in transformers. {n} is the number of a layer; [q|k] stands for two
            modules whose weights are concatenated.
        idle: settings of transformers that change no number.
        transposed: whether transformers stores the matrices of layers transposed.
        computed: weight in transformers -> function (fastformer model, tensor) that returns the expected tensor.
        configuration: returns keywords of transformers' configuration; None: models cannot be converted back.
    """

    network: type[nn.Module]
    config: type
    settings: Callable[[Reader], dict[str, Any]]
    modules: Mapping[str, str]
    idle: Collection[str] = ()
    transposed: bool = False
    computed: Mapping[str, Callable[[Any, Tensor], Tensor]] = field(default_factory=dict)
    configuration: Callable[[Any], dict[str, Any]] | None = None

    def read(self, config: Any, weights: Iterable[str]) -> Any:
        """Return fastformer's configuration; raise ValueError for a setting that fastformer cannot represent."""
        reader = Reader(config, weights)
        settings = self.settings(reader)
        reader.refuse_unread(self.idle)
        return self.config(**settings)

    def _hf_names(self, name: str, known: Mapping[str, Tensor]) -> list[str]:
        """Return the weights of transformers that a weight of fastformer is concatenated from; all are in `known`."""
        layer = _LAYER.search(name)
        general = _LAYER.sub("{n}", name, count=1)
        module, kind = re.fullmatch(r"(.*?)(?:[._](weight|bias))?", general).groups()  # type: ignore[union-attr]
        pattern = self.modules.get(general)
        if pattern is None and module in self.modules:
            pattern = f"{self.modules[module]}.{kind}"
        if pattern is None:
            raise ValueError(f"{name} has no counterpart in these models")
        pattern = pattern.format(n=layer[0] if layer else "")
        parts = re.search(r"\[(.*)\]", pattern)
        names = [pattern.replace(parts[0], each) for each in parts[1].split("|")] if parts else [pattern]
        if missing := [each for each in names if each not in known]:
            raise ValueError(f"{', '.join(missing)}: not among the weights, for {name}")
        return names

    def _transposed(self, name: str, x: Tensor) -> Tensor:
        """Return a weight in the other library's order of dimensions."""
        return x.t() if self.transposed and ".layers." in name else x

    def load(self, model: Any, hf_weights: Mapping[str, Tensor]) -> None:
        """Put copies of the weights of a model of transformers into a model of fastformer.

        Raises:
            ValueError: naming a weight that is missing or unexpected, that has another shape, or that differs from a
                weight it is tied with or computed from.
        """
        weights, unread = {}, set(hf_weights)
        for name, like in model.state_dict().items():
            names = self._hf_names(name, hf_weights)
            tensors = [self._transposed(name, hf_weights[each].detach()) for each in names]
            tensors = [x.squeeze(0) if x.dim() > like.dim() else x for x in tensors]  # final_logits_bias is [1, V]
            shapes = " and ".join(str(list(x.shape)) for x in tensors)
            if {x.shape[1:] for x in tensors} != {like.shape[1:]} or sum(map(len, tensors)) != len(like):
                raise ValueError(f"{', '.join(names)}: shape {shapes} does not fit {name}, {list(like.shape)}")
            weights[name] = torch.cat(tensors) if len(tensors) > 1 else tensors[0].clone()
            unread.difference_update(names)
        if unexpected := unread.difference(self.computed):
            raise ValueError(f"{', '.join(sorted(unexpected))}: weights that {type(model).__name__} does not have")
        names_of = {id(module): name for name, module in model.named_modules()}
        for modules in getattr(model, "tied", list)():
            one, other = (f"{names_of[id(module)]}.weight" for module in modules)
            if not torch.equal(weights[one], weights[other]):
                raise ValueError(f"{one} and {other} are tied in the configuration, but their weights differ")
        model.load_state_dict(weights, assign=True)
        for name in self.computed.keys() & hf_weights.keys():
            x = hf_weights[name].detach()
            expected = self.computed[name](model, x).detach().to(x.dtype)
            if expected.shape != x.shape or float((expected - x).abs().max()) > 2 * torch.finfo(x.dtype).eps:
                raise ValueError(f"{name}: not what {type(model).__name__} computes")

    def convert_back(self, model: nn.Module, hf_weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the weights of a model of fastformer, in the names and shapes of `hf_weights`.

        Raises:
            ValueError: naming a weight that has no counterpart.
        """
        converted = {name: torch.zeros_like(like) for name, like in hf_weights.items()}
        for name, weight in model.state_dict().items():
            names = self._hf_names(name, hf_weights)
            for hf_name, part in zip(names, weight.chunk(len(names)), strict=True):
                converted[hf_name] = self._transposed(name, part).detach().reshape(hf_weights[hf_name].shape).clone()
        for name in self.computed.keys() & hf_weights.keys():
            converted[name] = self.computed[name](model, hf_weights[name]).detach().clone()
        return converted
