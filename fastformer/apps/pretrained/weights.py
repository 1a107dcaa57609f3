"""Weights by name, from transformers to ours and back, each by the same table."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.apps.pretrained.architecture import Architecture

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def theirs_of(name: str, architecture: Architecture) -> list[str] | None:
    """What lies in a weight of ours, marks included; None: the table does not have it."""
    layer = _LAYER.search(name)
    found = architecture.weights.get(_LAYER.sub("{n}", name, count=1))
    return None if found is None else found.format(n=layer[0] if layer else "").split()


def read(ours: nn.Module, theirs: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """Our weights, of theirs; nothing of theirs is shared.

    Args:
        ours: what is to have them; its weights may be on "meta".
        theirs: by name.
        architecture: of theirs.

    Raises:
        ValueError: naming a weight that is missing, that is left over, or that does not fit.
    """
    found, left = {}, set(theirs)
    for name, like in ours.state_dict().items():
        marked = theirs_of(name, architecture)
        if marked is None:
            raise ValueError(f"{name} has no counterpart in these models")
        names = [_plain(each) for each in marked]
        if missing := [each for each in names if each not in theirs]:
            raise ValueError(f"{', '.join(missing)}: not among the weights, for {name}")
        parts = [_as_ours(theirs[_plain(each)], each) for each in marked]
        shapes = " and ".join(str(list(part.shape)) for part in parts)
        if {part.shape[1:] for part in parts} != {like.shape[1:]} or sum(map(len, parts)) != len(like):
            raise ValueError(f"{', '.join(names)}: {shapes} is not what {name} takes, {list(like.shape)}")
        found[name] = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
        left.difference_update(names)
    if left := left.difference(architecture.implied):
        raise ValueError(f"{', '.join(sorted(left))}: weights that {type(ours).__name__} has no place for")
    return found


def check_ties(ours: Any, found: Mapping[str, Tensor]) -> None:
    """Refuse weights that differ where the model has one for both; raises ValueError naming them."""
    names = {id(module): name for name, module in ours.named_modules()}
    for module, owner in ours.tied() if hasattr(ours, "tied") else ():
        one, other = (f"{names[id(each)]}.weight" for each in (module, owner))
        if not torch.equal(found[one], found[other]):
            raise ValueError(f"{one} and {other} are tied in the configuration, but their weights differ")


def check_implied(ours: nn.Module, theirs: Mapping[str, Tensor], architecture: Architecture) -> None:
    """Refuse weights that are not what they should follow from; raises ValueError naming the first."""
    for name, implied in architecture.implied.items():
        if name in theirs:
            x = theirs[name].detach()
            expected = implied(ours, x).detach().to(x.dtype)
            if expected.shape != x.shape or float((expected - x).abs().max()) > 2 * torch.finfo(x.dtype).eps:
                raise ValueError(f"{name}: not what {type(ours).__name__} has in its place")


def write(ours: nn.Module, theirs: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """Their weights, of ours.

    Args:
        ours: the model.
        theirs: the weights that are to be, for their shapes.
        architecture: of theirs.

    Raises:
        ValueError: naming a weight of ours that has no counterpart.
    """
    found: dict[str, Tensor] = {}
    for name, x in ours.state_dict().items():
        marked = theirs_of(name, architecture)
        names = [_plain(each) for each in marked or ()]
        if marked is None or not all(each in theirs for each in names):
            raise ValueError(f"{name} has no counterpart in these models")
        sizes = [len(_as_ours(theirs[_plain(each)], each)) for each in marked]
        for each, part in zip(marked, x.split(sizes), strict=True):
            found[_plain(each)] = _as_theirs(part, each).detach().clone()
    for name, implied in architecture.implied.items():
        if name in theirs:
            found[name] = implied(ours, theirs[name]).detach().clone()
    return {name: found.get(name, torch.zeros_like(like)) for name, like in theirs.items()}


def _plain(marked: str) -> str:
    return marked.removesuffix(".T").removesuffix("[0]")


def _as_ours(x: Tensor, marked: str) -> Tensor:
    x = x.detach()
    return x.t() if marked.endswith(".T") else x[0] if marked.endswith("[0]") else x


def _as_theirs(x: Tensor, marked: str) -> Tensor:
    return x.t() if marked.endswith(".T") else x[None] if marked.endswith("[0]") else x
