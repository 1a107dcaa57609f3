"""Stacks of ours and of torch with the same parameters, paddings, and the comparison of the two."""

import torch
from torch import Tensor, nn

import fastformer
from tests.support.closeness import assert_close, gradients

D, H, FF, B, T, S = 6, 3, 7, 3, 5, 4


def right(lengths: list[int], columns: int) -> Tensor:
    return torch.arange(columns) >= torch.tensor(lengths)[:, None]


def left(lengths: list[int], columns: int) -> Tensor:
    return right(lengths, columns).flip(1)


# Of the targets [B, T] and of the sources [B, S].
PADDING = {
    "right": (right([5, 2, 3], T), right([1, 4, 2], S)),
    "left": (left([5, 2, 3], T), left([1, 4, 2], S)),
    "both sides": (torch.stack([right([3], T)[0], left([2], T)[0], right([5], T)[0]]), left([1, 4, 2], S)),
    "gaps": (torch.tensor([[0, 1, 0, 0, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]]).bool(), right([3, 3, 4], S)),
    "a column of padding": (right([3, 2, 1], T), right([3, 3, 2], S)),
    "none": (right([5, 5, 5], T), right([4, 4, 4], S)),
}
AHEAD = torch.ones(T, T).triu(1).bool()


def randomise(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.4)


def stacks(kind: str, dtype: torch.dtype = torch.float64, **settings: object) -> tuple[nn.Module, nn.Module]:
    made = []
    for library in (fastformer, nn):
        chosen = {"d_model": D, "nhead": H, "dim_feedforward": FF, "dropout": 0.0, "batch_first": True, **settings}
        if kind == "Transformer":
            made.append(library.Transformer(num_encoder_layers=1, num_decoder_layers=2, **chosen, dtype=dtype))
        else:
            layer = getattr(library, kind + "Layer")(**chosen, dtype=dtype)
            made.append(getattr(library, kind)(layer, 2, nn.LayerNorm(D, dtype=dtype)))
    randomise(made[0])
    made[1].load_state_dict(made[0].state_dict(), strict=True)
    return made[0], made[1]


def check(ours: nn.Module, torchs: nn.Module, inputs: tuple[Tensor, ...], padding: Tensor, **arguments: object) -> None:
    """Compare real rows, and the gradients that come from them; padding `[B, T]` of the output, in its layout."""
    out, expected = ours(*inputs, **arguments), torchs(*inputs, **arguments)
    assert not out[padding].any()
    assert_close(out, expected.masked_fill(padding[..., None], 0.0))
    leaves = [*inputs, *ours.parameters()]
    wanted = gradients(expected.masked_fill(padding[..., None], 0.0), [*inputs, *torchs.parameters()])
    for a, w in zip(gradients(out, leaves), wanted, strict=True):
        assert_close(a, w)


def change(name):
    def hook(layer):
        layer.linear1.register_forward_hook(lambda *_: None)

    def own_hook(layer):
        layer.register_forward_hook(lambda module, args, out: out.flip(1))

    def batch_norm(layer):
        class OfBatch(nn.LayerNorm):
            def forward(self, x):
                return x - x.mean((0, 1))

        layer.norm2 = OfBatch(D, dtype=torch.float64)

    def own_activation(layer):
        layer.activation = lambda x: x.softmax(1)

    def softmax(layer):
        layer.activation = nn.Softmax(1)

    def bias_kv(layer):
        layer.self_attn = fastformer.MultiheadAttention(D, H, add_bias_kv=True, batch_first=True, dtype=torch.float64)

    def norm_over_positions(layer):
        layer.norm2 = nn.LayerNorm((T, D), dtype=torch.float64)

    return {
        "a norm over positions": (norm_over_positions, "layers.1.norm2 normalises over 2 dimensions"),
        "hooks": (hook, "layers.1.linear1 has hooks"),
        "hooks of its own": (own_hook, "layers.1 has hooks"),
        "another norm": (batch_norm, "layers.1.norm2 is a OfBatch"),
        "another activation": (own_activation, "layers.1.activation is a function of your own"),
        "an activation over positions": (softmax, "layers.1.activation is a Softmax"),
        "bias of keys": (bias_kv, "layers.1.self_attn has add_bias_kv or add_zero_attn"),
    }[name]
