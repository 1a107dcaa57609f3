"""Whether a subclass computes what its caller says: both classes on the same samples, before it is believed.

Outputs, and the gradients of inputs and parameters, in the module's dtype (half precision: in fp32, too), as it is
(training or evaluation) and in the other mode. Copies are tried, without hooks, so that nothing of the model changes;
dropout is off, then everything is dropped: both are the same for all who drop the same. The samples of a norm have
variances of 1, of eps, and 0. They are the same at each call, so that what is believed once is believed again.

How far apart two ways to compute the same may be, of the largest value: 4 roundings to the dtype for each module inside
(a norm: of the normalised value, the weight, the bias and the result), and 8 sqrt(n) of fp32, in which sums over n are
made: their errors grow as those of a random walk (Higham and Mary 2019).
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastformer.backend import backend

_TOKENS, _ROWS, _SEED = 5, 3, 0
# What a class does besides its forward; ours would do without.
_OTHERS = (
    "__call__", "_save_to_state_dict", "_load_from_state_dict", "state_dict", "load_state_dict", "_apply", "train",
)  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Sample(NamedTuple):
    inputs: tuple[Tensor, ...]
    more: dict[str, Any]


def difference(module: nn.Module, torchs: type[nn.Module], ours: type[nn.Module]) -> str | None:
    """Return in what a module differs from our class, or None.

    Args:
        module: of a subclass of `torchs`; stays as it is.
        torchs: torch's class.
        ours: our class for that.
    """
    if "forward" in module.__dict__:
        return "its forward was replaced in the instance"
    for name in _OTHERS:
        if getattr(type(module), name) is not getattr(torchs, name):
            return f"it has a {name} of its own"
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "meta":
        return "it is on meta, where nothing can be tried"
    dtype = next((x.dtype for x in tensors if x.is_floating_point()), torch.get_default_dtype())
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), backend("reference"):
            for wide in {dtype, torch.promote_types(dtype, torch.float32)}:
                for rate in (0.0, 1.0):
                    for training in (module.training, not module.training):
                        theirs = _prepared(module, type(module), wide, rate, training)
                        found = _compare(theirs, _prepared(module, ours, wide, rate, training), torchs, wide, device)
                        if found is not None:
                            return found
    except Exception as error:  # whatever a forward of somebody's own may raise
        return f"it raised {type(error).__name__}: {error}"
    return None


def _prepared(module: nn.Module, cls: type[nn.Module], dtype: torch.dtype, rate: float, training: bool) -> nn.Module:
    """A copy of a module, of this class and dtype, without hooks, with this rate of dropout."""
    made: Any = copy.deepcopy(module).to(dtype)
    made.train(training)
    made.__class__ = cls
    for part in made.modules():
        for name in _HOOKS:
            part.__dict__[name] = type(part.__dict__[name])()
        if isinstance(part, nn.Dropout):
            part.p = rate
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = rate
        if hasattr(type(part), "padding_free"):
            part.padding_free = False
    return made  # type: ignore[no-any-return]


def _compare(
    theirs: nn.Module, ours: nn.Module, torchs: type[nn.Module], dtype: torch.dtype, device: torch.device
) -> str | None:
    roundings = 4.0 * sum(1 for _ in ours.modules()) * torch.finfo(dtype).eps
    longest = max([_TOKENS * _ROWS, *(size for p in ours.parameters() for size in p.shape)])
    allowed = roundings + 8.0 * math.sqrt(longest) * min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    generator = torch.Generator(device).manual_seed(_SEED)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    for sample in _SAMPLES[torchs](ours, random):
        found, wanted = _results(theirs, sample), _results(ours, sample)
        if found.keys() != wanted.keys():
            return f"{' and '.join(sorted(found.keys() ^ wanted.keys()))} is there in one of the two only"
        for name, x in found.items():
            y = wanted[name]
            if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
                return f"{name} is {_description(x)}, not {_description(y)}"
            largest = float(y.abs().nan_to_num(0.0).max()) if y.numel() else 0.0
            if not torch.allclose(x, y, rtol=0.0, atol=allowed * largest, equal_nan=True):
                return f"{name} differs by {float((x - y).abs().max()):.2g}, of at most {largest:.2g}"
    return None


def _description(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _results(module: nn.Module, sample: _Sample) -> dict[str, Tensor]:
    """Outputs and gradients, by what a report calls them."""
    inputs = [x.clone().requires_grad_() for x in sample.inputs]
    with torch.enable_grad():
        out = module(*inputs, **sample.more)
    outputs = [x for x in ([out] if isinstance(out, Tensor) else out) if x is not None]
    found = {f"output {i}" if i else "the output": x.detach() for i, x in enumerate(outputs)}
    leaves = {f"the gradient of input {i + 1}": x for i, x in enumerate(inputs)}
    leaves |= {f"the gradient of {name}": p for name, p in module.named_parameters() if p.requires_grad}
    # Not the sum: of a norm's output without a weight it has no gradient.
    weighed = [(x, torch.linspace(-1, 2, x.numel(), device=x.device).view(x.shape).to(x.dtype)) for x in outputs]
    total = torch.stack([(x * w).sum() for x, w in weighed]).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return found | {name: x for name, x in zip(leaves, gradients, strict=True) if x is not None}


Random = Callable[..., Tensor]


def _norm(module: Any, random: Random) -> Iterator[_Sample]:
    x = random(_TOKENS, *module.normalized_shape)
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if module.eps is None else module.eps
    for scale in (1.0, math.sqrt(eps), 0.0):
        yield _Sample((x * scale,), {})
    yield _Sample((random(_ROWS, _TOKENS, *module.normalized_shape),), {})  # which dimension is normalised shows here


def _hidden(x: Tensor, batch_first: bool) -> Tensor:
    """A key padding mask for x, that hides the end of the first sequence."""
    length, rows = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    hidden = torch.zeros(rows, length, dtype=torch.bool, device=x.device)
    hidden[0, -2:] = True
    return hidden


def _ahead(x: Tensor, batch_first: bool) -> Tensor:
    length = x.shape[1] if batch_first else x.shape[0]
    return torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)


def _attention(module: Any, random: Random) -> Iterator[_Sample]:
    q, k, v = (random(_ROWS, _TOKENS, width) for width in (module.embed_dim, module.kdim, module.vdim))
    masks = {"attn_mask": _ahead(q, module.batch_first), "key_padding_mask": _hidden(k, module.batch_first)}
    yield _Sample((q, k, v), {})
    yield _Sample((q, k, v), {"need_weights": False, **masks})
    yield _Sample((q, k, v), {"average_attn_weights": False, **masks})


def _encoder(names: tuple[str, str]) -> Callable[[Any, Random], Iterator[_Sample]]:
    def samples(module: Any, random: Random) -> Iterator[_Sample]:
        attention = _self_attention(module)
        x = random(_ROWS, _TOKENS, attention.embed_dim)
        yield _Sample((x,), {})
        masks = _ahead(x, attention.batch_first), _hidden(x, attention.batch_first)
        yield _Sample((x,), dict(zip(names, masks, strict=True)))

    return samples


def _decoder(module: Any, random: Random) -> Iterator[_Sample]:
    attention = _self_attention(module)
    x, memory = (random(_ROWS, _TOKENS, attention.embed_dim) for _ in range(2))
    hidden = _hidden(x, attention.batch_first)
    yield _Sample((x, memory), {})
    more = {"tgt_key_padding_mask": hidden, "memory_key_padding_mask": hidden.flip(0)}
    yield _Sample((x, memory), {"tgt_mask": _ahead(x, attention.batch_first), **more})


def _transformer(module: Any, random: Random) -> Iterator[_Sample]:
    src, tgt = (random(_ROWS, _TOKENS, module.d_model) for _ in range(2))
    hidden = _hidden(src, module.batch_first)
    yield _Sample((src, tgt), {})
    more = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    yield _Sample((src, tgt), {"tgt_mask": _ahead(tgt, module.batch_first), **more})


def _self_attention(module: Any) -> Any:
    return module.self_attn if hasattr(module, "self_attn") else module.layers[0].self_attn


_SAMPLES: dict[type[nn.Module], Callable[[Any, Random], Iterator[_Sample]]] = {
    nn.LayerNorm: _norm,
    nn.RMSNorm: _norm,
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _encoder(("src_mask", "src_key_padding_mask")),
    nn.TransformerEncoder: _encoder(("mask", "src_key_padding_mask")),
    nn.TransformerDecoderLayer: _decoder,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
}
