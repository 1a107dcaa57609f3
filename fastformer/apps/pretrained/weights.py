"""Convert weights by name, from transformers to fastformer and back, by the same table."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastformer.apps.pretrained.architecture import Architecture

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


class _Part(NamedTuple):
    """A weight of transformers, and its mark: `.T` is transposed in fastformer, `[0]` a row of a matrix."""

    name: str
    mark: str

    def as_ours(self, x: Tensor) -> Tensor:
        x = x.detach()
        return x.t() if self.mark == ".T" else x[0] if self.mark else x

    def as_theirs(self, x: Tensor) -> Tensor:
        return x.t() if self.mark == ".T" else x[None] if self.mark else x


def _parts(name: str, architecture: Architecture) -> list[_Part]:
    """Return the weights of transformers that one of fastformer consists of, from top to bottom."""
    layer = _LAYER.search(name)
    found = architecture.weights.get(_LAYER.sub("{n}", name, count=1))
    if found is None:
        raise ValueError(f"{name} has no counterpart in these models")
    return [
        _Part(*re.fullmatch(r"(.*?)(\.T|\[0\])?", each).groups(""))  # type: ignore[union-attr]
        for each in found.format(n=layer[0] if layer else "").split()
    ]


def read(ours: nn.Module, theirs: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """Return copies of the weights of a model of transformers, for a model of fastformer.

    Raises:
        ValueError: naming a weight that is missing, that is left over, or that does not fit.
    """
    found, left = {}, set(theirs)
    for name, like in ours.state_dict().items():
        sources = _parts(name, architecture)
        names = [source.name for source in sources]
        if missing := [each for each in names if each not in theirs]:
            raise ValueError(f"{', '.join(missing)}: not among the weights, for {name}")
        parts = [source.as_ours(theirs[source.name]) for source in sources]
        shapes = " and ".join(str(list(part.shape)) for part in parts)
        if {part.shape[1:] for part in parts} != {like.shape[1:]} or sum(map(len, parts)) != len(like):
            raise ValueError(f"{', '.join(names)}: {shapes} is not what {name} takes, {list(like.shape)}")
        found[name] = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
        left.difference_update(names)
    if left := left.difference(architecture.implied):
        raise ValueError(f"{', '.join(sorted(left))}: weights that {type(ours).__name__} has no place for")
    return found


def check_ties(ours: Any, found: Mapping[str, Tensor]) -> None:
    """Raise ValueError for weights that differ although the model ties them."""
    names = {id(module): name for name, module in ours.named_modules()}
    for module, owner in ours.tied() if hasattr(ours, "tied") else ():
        one, other = (f"{names[id(each)]}.weight" for each in (module, owner))
        if not torch.equal(found[one], found[other]):
            raise ValueError(f"{one} and {other} are tied in the configuration, but their weights differ")


def check_implied(ours: nn.Module, theirs: Mapping[str, Tensor], architecture: Architecture) -> None:
    """Raise ValueError for a weight that differs from what it should follow from."""
    for name, implied in architecture.implied.items():
        if name in theirs:
            x = theirs[name].detach()
            expected = implied(ours, x).detach().to(x.dtype)
            if expected.shape != x.shape or float((expected - x).abs().max()) > 2 * torch.finfo(x.dtype).eps:
                raise ValueError(f"{name}: not what {type(ours).__name__} has in its place")


def write(ours: nn.Module, theirs: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """Return copies of the weights of a model of fastformer, in the names and shapes of `theirs`.

    Raises:
        ValueError: naming a weight that has no counterpart.
    """
    found: dict[str, Tensor] = {}
    for name, x in ours.state_dict().items():
        targets = _parts(name, architecture)
        if not all(target.name in theirs for target in targets):
            raise ValueError(f"{name} has no counterpart in these models")
        sizes = [len(target.as_ours(theirs[target.name])) for target in targets]
        for target, part in zip(targets, x.split(sizes), strict=True):
            found[target.name] = target.as_theirs(part).detach().clone()
    for name, implied in architecture.implied.items():
        if name in theirs:
            found[name] = implied(ours, theirs[name]).detach().clone()
    return {name: found.get(name, torch.zeros_like(like)) for name, like in theirs.items()}
