"""Convert weights by name, from transformers to fastformer and back, with one table of names."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastformer.apps.pretrained.architecture import Architecture

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


class _HfWeight(NamedTuple):
    """The name of a weight in transformers, and how it is stored: `.T` transposed, `[0]` with a dimension of size 1."""

    name: str
    mark: str

    def to_fastformer(self, x: Tensor) -> Tensor:
        x = x.detach()
        return x.t() if self.mark == ".T" else x[0] if self.mark else x

    def to_transformers(self, x: Tensor) -> Tensor:
        return x.t() if self.mark == ".T" else x[None] if self.mark else x


def _hf_weights(name: str, architecture: Architecture) -> list[_HfWeight]:
    """Return the weights of transformers that a weight of fastformer is concatenated from, in order."""
    layer = _LAYER.search(name)
    pattern = architecture.weights.get(_LAYER.sub("{n}", name, count=1))
    if pattern is None:
        raise ValueError(f"{name} has no counterpart in these models")
    return [
        _HfWeight(*re.fullmatch(r"(.*?)(\.T|\[0\])?", each).groups(""))  # type: ignore[union-attr]
        for each in pattern.format(n=layer[0] if layer else "").split()
    ]


def read(model: nn.Module, hf_weights: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """Return copies of the weights of a model of transformers, for a model of fastformer.

    Raises:
        ValueError: naming a weight that is missing, that is unexpected, or whose shape does not fit.
    """
    weights, unread = {}, set(hf_weights)
    for name, like in model.state_dict().items():
        sources = _hf_weights(name, architecture)
        names = [source.name for source in sources]
        if missing := [each for each in names if each not in hf_weights]:
            raise ValueError(f"{', '.join(missing)}: not among the weights, for {name}")
        tensors = [source.to_fastformer(hf_weights[source.name]) for source in sources]
        shapes = " and ".join(str(list(x.shape)) for x in tensors)
        if {x.shape[1:] for x in tensors} != {like.shape[1:]} or sum(map(len, tensors)) != len(like):
            raise ValueError(f"{', '.join(names)}: shape {shapes} does not fit {name}, {list(like.shape)}")
        weights[name] = torch.cat(tensors) if len(tensors) > 1 else tensors[0].clone()
        unread.difference_update(names)
    if unexpected := unread.difference(architecture.implied):
        raise ValueError(f"{', '.join(sorted(unexpected))}: weights that {type(model).__name__} does not have")
    return weights


def check_ties(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError for weights that differ although the model ties them."""
    names = {id(module): name for name, module in model.named_modules()}
    for modules in model.tied() if hasattr(model, "tied") else ():
        one, other = (f"{names[id(module)]}.weight" for module in modules)
        if not torch.equal(weights[one], weights[other]):
            raise ValueError(f"{one} and {other} are tied in the configuration, but their weights differ")


def check_implied(model: nn.Module, hf_weights: Mapping[str, Tensor], architecture: Architecture) -> None:
    """Raise ValueError for a weight that differs from the tensor that the model computes for it."""
    for name, implied in architecture.implied.items():
        if name in hf_weights:
            x = hf_weights[name].detach()
            expected = implied(model, x).detach().to(x.dtype)
            if expected.shape != x.shape or float((expected - x).abs().max()) > 2 * torch.finfo(x.dtype).eps:
                raise ValueError(f"{name}: not what {type(model).__name__} computes")


def write(model: nn.Module, hf_weights: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """Return copies of the weights of a model of fastformer, in the names and shapes of `hf_weights`.

    Raises:
        ValueError: naming a weight that has no counterpart.
    """
    converted: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        targets = _hf_weights(name, architecture)
        if not all(target.name in hf_weights for target in targets):
            raise ValueError(f"{name} has no counterpart in these models")
        sizes = [len(target.to_fastformer(hf_weights[target.name])) for target in targets]
        for target, rows in zip(targets, weight.split(sizes), strict=True):
            converted[target.name] = target.to_transformers(rows).detach().clone()
    for name, implied in architecture.implied.items():
        if name in hf_weights:
            converted[name] = implied(model, hf_weights[name]).detach().clone()
    return {name: converted.get(name, torch.zeros_like(like)) for name, like in hf_weights.items()}
