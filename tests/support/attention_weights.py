"""Attention weights of models of torch.nn."""

from torch import Tensor, nn


def weights_of(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return the weights of each attention of a model, in order of the calls: `[heads, T, S]` of sequence 0."""
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
