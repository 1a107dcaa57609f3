"""What writes down how modules are called: hooks on one or on all, a subclass of a layer, an attention of one's own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Calls(list[tuple[Any, ...]]):
    """Calls in their order.

    Args:
        widths: last dimensions of activations, whose values are not written down; those of masks and hints are.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = widths

    def add(self, *call: Any) -> None:
        """Write down a call as plain values, which compare by ==."""
        self.append(tuple(map(self._described, call)))

    def _described(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            values = None if x.dim() and x.shape[-1] in self.widths else repr(x.flatten().tolist())
            return type(x).__name__, x.dtype, tuple(x.shape), values
        if isinstance(x, tuple):
            return tuple(map(self._described, x))
        if isinstance(x, dict):
            return tuple(sorted((name, self._described(value)) for name, value in x.items()))
        return type(x).__name__, x


def ahead(length: int) -> Tensor:
    """True where a key comes later than the query."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def additive(hidden: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mask of 0 and -inf that says the same."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


@contextmanager
def hooked(model: nn.Module, places: list[str], calls: Calls) -> Iterator[None]:
    """Write down what the modules at these places are called with, and that they returned."""
    handles = []
    for name in places:

        def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            calls.add(name, args, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            calls.add(name, "returned", output)

        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def hooked_everywhere(model: nn.Module, calls: Calls) -> Iterator[None]:
    """Write down each module that is called, by hooks that torch calls for all."""
    names = {module: name for name, module in model.named_modules()}
    handles = [
        register_module_forward_pre_hook(lambda module, args: calls.add(names[module], args)),
        register_module_forward_hook(lambda module, args, output: calls.add(names[module], output)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Recording:
    """A layer that writes down what its blocks are given."""

    calls: Calls

    def _sa_block(self, *args: Any, **kwargs: Any) -> Tensor:
        Recording.calls.add("self", args, kwargs)
        return super()._sa_block(*args, **kwargs)

    def _mha_block(self, *args: Any, **kwargs: Any) -> Tensor:
        Recording.calls.add("cross", args, kwargs)
        return super()._mha_block(*args, **kwargs)


class Attention(nn.Module):
    """An attention of somebody's own, which adds its masks to the scores as they come."""

    calls: Calls
    in_proj_bias, _qkv_same_embed_dim = None, True

    def __init__(self, heads: int, batch_first: bool = True) -> None:
        super().__init__()
        self.num_heads, self.batch_first = heads, batch_first
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q, k, v, attn_mask=None, key_padding_mask=None, need_weights=True, is_causal=False):
        Attention.calls.add(attn_mask, key_padding_mask, need_weights, is_causal)
        scores = self.scale * q @ k.mT
        return scores.softmax(-1) @ v, None


@contextmanager
def collected(cls: type, calls: Calls) -> Iterator[None]:
    """Have a recording class write here."""
    cls.calls = calls
    yield


def weights_of(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """What each attention of a model weighs, in the order of their calls: `[heads, T, S]` of the first sequence."""
    seen = []

    def watch(module: nn.MultiheadAttention) -> None:
        original = module.forward

        def forward(*args, **kwargs):
            seen.append(original(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})[1][0])
            return original(*args, **kwargs)

        module.forward = forward

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            watch(module)
    model(*inputs)
    return seen
