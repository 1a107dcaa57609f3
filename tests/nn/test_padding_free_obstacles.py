"""What has a stack run padded: a switch, and parts that may look at a whole batch."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fastformer
from fastformer.packing import Layout, to_nested
from tests.nn.layer_cases import FF, PADDING, STACKS, B, D, H, S, T, check, inputs_for, twins
from tests.support.closeness import assert_close, gradients, random
from tests.support.masks import right

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
]


@pytest.mark.parametrize("kind", STACKS)
def test_padding_free_can_be_set_for_a_call_a_stack_and_all_stacks(kind, monkeypatch, tokens_seen):
    ours, torchs = twins(kind)
    x = inputs_for(kind)
    mask = {"src_key_padding_mask" if "Encoder" in kind else "tgt_key_padding_mask": PADDING["right"][0]}
    expected = torchs(*x, **mask)

    def full(**arguments: object) -> bool:
        tokens_seen.clear()
        out = ours(*x, **mask, **arguments)
        if tokens_seen[0] == B * T:
            assert_close(out, expected)
        return tokens_seen[0] == B * T

    assert not full()
    assert full(padding_free=False)
    ours.padding_free = False
    assert full()
    assert not full(padding_free=True)
    assert full(padding_free=None)
    del ours.padding_free
    monkeypatch.setattr(type(ours), "padding_free", False)
    assert full()
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert list(other.state_dict()) == list(torchs.state_dict())


class OfBatch(nn.LayerNorm):
    def forward(self, x):
        return x - x.mean((0, 1))


CHANGES = {
    "layers.1.linear1 has hooks": lambda layer: layer.linear1.register_forward_hook(lambda *_: None),
    "layers.1 has hooks": lambda layer: layer.register_forward_hook(lambda module, args, out: out.flip(1)),
    "layers.1.norm2 is a OfBatch": lambda layer: setattr(layer, "norm2", OfBatch(D, dtype=torch.float64)),
    "layers.1.norm2 normalises over 2 dimensions": lambda layer: setattr(
        layer, "norm2", nn.LayerNorm((T, D), dtype=torch.float64)
    ),
    "layers.1.activation is a function that is not declared token_wise": lambda layer: setattr(
        layer, "activation", lambda x: x.softmax(1)
    ),
    "layers.1.activation is a Softmax": lambda layer: setattr(layer, "activation", nn.Softmax(1)),
    "layers.1.self_attn has add_bias_kv or add_zero_attn": lambda layer: setattr(
        layer,
        "self_attn",
        fastformer.MultiheadAttention(D, H, add_bias_kv=True, batch_first=True, dtype=torch.float64),
    ),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_module_that_may_mix_tokens_gets_the_padded_batch(reason, tokens_seen):
    ours, torchs = twins("TransformerEncoder", norm_first=True)
    assert ours.obstacle() is None
    CHANGES[reason](ours.layers[1])
    assert ours.obstacle() == reason
    torchs.layers[1] = copy.deepcopy(ours.layers[1])
    hidden = PADDING["right"][0]
    check(ours, torchs, (random(B, T, D),), hidden, src_key_padding_mask=hidden)
    assert set(tokens_seen) == {B * T}


class OwnDecoderLayer(fastformer.TransformerDecoderLayer):
    def _ff_block(self, x):
        return x


def test_a_foreign_layer_or_norm_gets_the_padded_batch():
    class Own(fastformer.TransformerEncoderLayer):
        def forward(self, src, **masks):
            return super().forward(src, **masks).flip(1)

    stack = fastformer.TransformerEncoder(Own(D, H, FF, batch_first=True), 2)
    assert stack.obstacle() == "layers.0 is a Own that overrides forward or a block"
    nested = to_nested(torch.zeros(3, D), Layout.from_lengths([2, 1]))
    message = "must not be nested where layers need a padded batch: layers.0 is a Own that overrides forward or a block"
    with pytest.raises(RuntimeError, match="src " + message):
        stack(nested)
    stack = fastformer.TransformerDecoder(OwnDecoderLayer(D, H, FF), 2)
    with pytest.raises(RuntimeError, match="tgt and memory " + message.replace("a Own ", "a OwnDecoderLayer ")):
        stack(nested, nested)
    norm = nn.BatchNorm1d(T)
    stack = fastformer.TransformerEncoder(fastformer.TransformerEncoderLayer(D, H, FF), 2, norm)
    assert stack.obstacle() == "norm is a BatchNorm1d"
    stack.norm = nn.LayerNorm((T, D))
    assert stack.obstacle() == "norm normalises over 2 dimensions"


def test_a_mask_that_changes_before_backward_where_hooks_keep_the_padding():
    found, x = [], random(B, T, D)
    for stack in twins("TransformerEncoder"):
        hidden = PADDING["right"][0].clone()
        stack.layers[0].register_forward_hook(lambda *_: None)
        out = stack(x, src_key_padding_mask=hidden)
        hidden.zero_()
        found.append(gradients(out.masked_fill(PADDING["right"][0][..., None], 0.0), [x, *stack.parameters()]))
    assert_close(*found)


def test_custom_stacks_are_called_as_torch_calls_them():
    """Without arguments of ours, and with layers whose batch is another dimension."""

    class Own(fastformer.TransformerEncoder):
        def forward(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
            return super().forward(src, mask, src_key_padding_mask, is_causal) + 1

    hidden, hidden_source = PADDING["right"]
    x, memory = random(B, T, D), random(B, S, D)
    ours, torchs = twins("Transformer")
    own, transposed = (
        kind(fastformer.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=first, dtype=torch.float64), 1)
        for kind, first in ((Own, True), (fastformer.TransformerEncoder, False))
    )
    assert fastformer.Transformer(D, H, custom_encoder=own).encoder is own
    ours.encoder = own
    masks = {"src_key_padding_mask": hidden_source, "tgt_key_padding_mask": hidden}
    expected = torchs.decoder(x, own(memory, None, hidden_source), tgt_key_padding_mask=hidden)
    assert_close(ours(memory, x, **masks), expected.masked_fill(hidden[..., None], 0.0))
    ours.encoder, torchs.encoder = transposed, copy.deepcopy(transposed)
    square, hidden = random(B, B, D), right([1, 3, 2], B)
    masks = {"src_key_padding_mask": hidden, "tgt_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    check(ours, torchs, (square, random(B, B, D)), hidden, **masks)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("where", ["stack", "layer", "attention"])
def test_hooks_see_padded_batches_when_packed_is_called(where, kind, batch_first):
    ours, _ = twins(kind, batch_first=batch_first)
    part = {"stack": ours, "layer": ours.layers[1], "attention": ours.layers[1].self_attn}[where]
    layout = Layout.from_lengths([3, 5, 0])
    x = [random(8, D), layout] if kind == "TransformerEncoder" else [random(8, D), layout, random(8, D), layout]
    plain = ours.packed(*x, causal=True)
    seen = []

    def loud(module, given, kwargs, out):
        seen.append([kwargs.get("query", given[0] if given else None).shape, sorted(kwargs)])
        return (out[0] * 2.0, out[1]) if isinstance(out, tuple) else out * 2.0

    handle = part.register_forward_hook(loud, with_kwargs=True)
    out = ours.packed(*x, causal=True)
    assert seen[0][0] == ((3, 5, D) if batch_first else (5, 3, D))
    assert len(seen) == 1
    assert not torch.allclose(out, plain)
    if where == "stack":
        assert_close(out, plain * 2.0)
    with pytest.raises(ValueError, match="causal must be False with attn_mask"):
        ours.packed(*x, True, torch.zeros(5, 5))
    handle.remove()
    assert_close(ours.packed(*x, causal=True), plain)
