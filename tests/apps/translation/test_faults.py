"""Faults of well-known tutorials that must not come back: in the model, its masks and its loss.

Where it is cheap the faulty variant stands beside ours, and the same property tells them apart.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastformer import functional
from fastformer.apps.models.embeddings import Embedding, sinusoidal_positions
from fastformer.apps.translation.model import TranslationModel, translation_loss
from fastformer.apps.translation.search import greedy_search
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from tests.support.translation_task import (
    BOS,
    EOS,
    PAD,
    TorchTwin,
    config,
    pairs_batch,
    paper_positions,
    random_batch,
    random_model,
    reverse_batch,
    reversing_model,
    split_rows,
)

LENGTHS = [(3, 5), (6, 2)]


def hidden_states(model, batch):
    return model(batch.source, batch.source_lengths, batch.target_in, batch.target_lengths)


# Positions and embeddings


def test_positional_exponent():
    """The faulty exponent, 2i / d where i is already the dimension, uses half of the frequencies twice as fast."""
    width = 16
    dimension = torch.arange(width)
    angles = torch.arange(20)[:, None] / 10000 ** (2 * dimension / width)
    faulty = torch.where(dimension % 2 == 0, angles.sin(), angles.cos())

    def is_papers(table):
        return torch.allclose(table.double(), paper_positions(20, width), atol=1e-6)

    assert not is_papers(faulty)
    assert is_papers(sinusoidal_positions(20, width))


def test_positions_do_not_drown_words():
    """Without the scale sqrt(d) positions are several times louder than words."""
    torch.manual_seed(0)

    def loudness(embedding):
        ids = torch.arange(embedding.tokens.num_embeddings)
        with torch.no_grad():
            words = embedding(ids, torch.zeros_like(ids), 1) - embedding.table[0]
        return (embedding.table.norm(dim=1).mean() / words.norm(dim=1).mean()).item()

    tables = [Embedding(100, 256, scale=scale, dropout=0.0) for scale in (True, False)]
    for table in tables:
        nn.init.normal_(table.tokens.weight, std=256**-0.5)  # as TranslationModel draws them
    assert loudness(tables[1]) > 10
    assert loudness(tables[0]) < 1.5
    model = TranslationModel(config(d_model=96, heads=4))
    assert loudness(model.source_embedding) < 1.5
    assert loudness(model.target_embedding) < 1.5


def test_tied_option_ties():
    sizes = {kind: sum(p.numel() for p in random_model(embeddings=kind).parameters()) for kind in ("separate", "tied")}
    assert sizes["separate"] - sizes["tied"] == 17 * 12
    model = random_model(embeddings="tied")
    with torch.no_grad():
        model.target_embedding.tokens.weight.zero_()
    assert model.logits(torch.randn(3, 12)).abs().max() == 0


# Masks


def attention_weights(q, k, mask):
    out, weights = functional.attention_with_weights(q, k, k, mask)
    torch.testing.assert_close(out, weights @ k)
    return weights


def test_padding_mask_is_on_the_key_axis():
    """On the query axis real queries attend to padding, and padded ones give NaN or uniform attention."""
    torch.manual_seed(0)
    q = k = torch.randn(1, 1, 4, 8)
    real = torch.tensor([True, True, True, False])

    def ignores_padding(weights):
        return bool(weights.isfinite().all() and weights[..., :3, 3].abs().max() == 0)

    scores = q @ k.transpose(-1, -2) / 8**0.5
    assert not ignores_padding(scores.masked_fill(~real[:, None], -torch.inf).softmax(-1))
    assert ignores_padding(attention_weights(q, k, real[None, :]))
    # A query that may attend to nothing gives 0, neither NaN nor the mean of everything.
    dead = attention_weights(q, k, real[:, None].expand(4, 4))
    assert dead[..., 3, :].abs().max() == 0
    assert dead.isfinite().all()


def test_masked_keys_get_no_weight():
    """-1e-12 instead of minus infinity masks nothing; -1e9 fails in fp16."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 5, 8)
    mask = torch.tensor([True, False, True, False, True])

    def masked(weights):
        return weights[..., ~mask].max() == 0

    scores = q @ k.transpose(-1, -2) / 8**0.5
    assert not masked(scores.masked_fill(~mask, -1e-12).softmax(-1))
    assert masked(attention_weights(q, k, mask[None, :]))


def test_softmax_is_over_the_keys():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 5, 8)

    def distributions(weights):
        return torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-6)

    assert not distributions((q @ k.transpose(-1, -2) / 8**0.5).softmax(-2))
    assert distributions(attention_weights(q, k, None))
    maps = random_model(1).attention_maps(torch.tensor([4, 5, 6, EOS]), torch.tensor([BOS, 7, 8]))
    assert all(distributions(weights) for weights in maps.values())


def first_moved(run, x, position):
    """The first position of `[T, ...]` that moves when the input at `position` changes."""
    changed = x.clone()
    changed[position] = x[position] % 12 + 4 if x.dtype == torch.int64 else x[position] + 0.5
    moved = (run(x) - run(changed)).flatten(1).abs().amax(1) > 1e-6
    return int(moved.nonzero()[0])


def test_heads_are_transposed_not_viewed():
    """`view` instead of transpose mixes positions into heads: the causal mask then hides the wrong things."""
    torch.manual_seed(0)
    T, H, K = 6, 2, 4
    layer = TransformerDecoderLayer(H * K, H, 16, 0.0, batch_first=True).eval()
    attention = layer.self_attn
    x = torch.randn(T, H * K)
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)

    def ours(x):
        return attention(x, x, x, attn_mask=mask)[0]

    def viewed(x):
        q, k, v = (part.reshape(H, T, K) for part in F.linear(x, attention.in_proj_weight).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(0, 1).reshape(T, H * K)

    assert first_moved(viewed, x, 4) < 4
    assert first_moved(ours, x, 4) == 4


def test_decoder_is_causal():
    """In training and, which follows, in generation: no position moves when a later one changes."""
    model = random_model(2).double()
    batch = random_batch([(4, 7)])

    def ours(ids):
        return hidden_states(model, replace(batch, target_in=ids))

    def unmasked(ids):
        memory, _ = model.encode(batch.source, batch.source_lengths)
        x = model.target_embedding(ids, torch.arange(len(ids)), len(ids))
        for layer in model.decoder.layers:
            x = layer(x[None], memory[None])[0]
        return x

    for position in (1, 4, 7):
        assert first_moved(unmasked, batch.target_in, position) == 0
        assert first_moved(ours, batch.target_in, position) == position


@pytest.mark.slow
@torch.no_grad()
def test_generation_is_what_training_saw():
    """Every generated token is the model's choice after its prefix alone, by the forward pass of training."""
    model = reversing_model()
    batch = reverse_batch(50, 8)
    for row, found in zip(split_rows(batch), greedy_search(model, batch.source, batch.source_lengths), strict=True):
        tokens = torch.tensor([BOS, *found.ids])
        hidden = model(row, torch.tensor([len(row)]), tokens, torch.tensor([len(tokens)]))
        assert model.logits(hidden).argmax(-1).tolist() == [*found.ids, EOS]


@pytest.mark.parametrize("norm_first", [True, False])
def test_more_padding_changes_nothing(norm_first):
    """Neither a hidden state nor the loss; without the padding masks both do."""
    model = random_model(3, norm_first=norm_first).double()
    batch = random_batch(LENGTHS, packed=False)
    wide = replace(
        batch,
        **{name: F.pad(getattr(batch, name), (0, 4), value=PAD) for name in ("source", "target_in", "target_out")},
    )
    torch.testing.assert_close(hidden_states(model, wide), hidden_states(model, batch), atol=1e-12, rtol=0)
    torch.testing.assert_close(translation_loss(model, wide), translation_loss(model, batch), atol=1e-10, rtol=0)

    twin = TorchTwin(model.config).copy(model).double().train()

    def unmasked(batch):
        ahead = torch.ones(batch.target_in.shape[1], batch.target_in.shape[1], dtype=torch.bool).triu(1)
        source = twin.embed(batch.source, twin.source_tokens, None)
        target = twin.embed(batch.target_in, twin.target_tokens, None)
        return twin.transformer(source, target, tgt_mask=ahead)[:, :3]

    assert (unmasked(wide) - unmasked(batch)).abs().max() > 1e-3


# Targets and loss


def test_padding_is_not_in_the_loss():
    """A batch's loss is the sum over its sentences, each alone; with padding counted it is not."""
    model = random_model(4).double()
    batch = random_batch(LENGTHS, packed=False)
    alone = [random_batch(LENGTHS)]
    sizes = alone[0].target_lengths.tolist()
    logits = model.logits(hidden_states(model, alone[0]))
    expected = sum(
        F.cross_entropy(part, target, reduction="sum")
        for part, target in zip(logits.split(sizes), alone[0].target_out.split(sizes), strict=True)
    )
    torch.testing.assert_close(translation_loss(model, batch), expected, atol=1e-10, rtol=0)
    twin = TorchTwin(model.config).copy(model).double().train()
    faulty = F.cross_entropy(
        twin(batch.source, batch.target_in).flatten(0, 1), batch.target_out.flatten(), reduction="sum"
    )
    assert faulty - expected > 1
    assert batch.tokens == sum(sizes)


def test_targets_are_shifted():
    """The prediction of a token cannot see it: unshifted targets leave nothing to predict."""
    model = random_model(5).double()
    batch = random_batch([(4, 6)])

    def sees_its_label(target_in):
        """Whether the prediction of token 3 moves with token 3 of the target."""
        changed = batch.target_out.clone()
        changed[3] = changed[3] % 12 + 4
        before, after = (
            hidden_states(model, replace(batch, target_in=target_in(t))) for t in (batch.target_out, changed)
        )
        return not torch.allclose(before[3], after[3])

    assert sees_its_label(lambda target_out: target_out)
    assert not sees_its_label(lambda target_out: torch.cat([torch.tensor([BOS]), target_out[:-1]]))
    assert torch.equal(batch.target_in, torch.cat([torch.tensor([BOS]), batch.target_out[:-1]]))


def test_the_model_gives_logits():
    """Normalised once, in the loss: a log_softmax in the model as well would make each row sum to 1."""
    model = random_model(6)
    logits = model.logits(hidden_states(model, random_batch(LENGTHS)))

    def normalised(rows):
        return torch.allclose(rows.logsumexp(-1), torch.zeros(len(rows)), atol=1e-3)

    assert normalised(logits.log_softmax(-1))
    assert not normalised(logits)
    expected = F.cross_entropy(logits, random_batch(LENGTHS).target_out, reduction="sum")
    torch.testing.assert_close(translation_loss(model, random_batch(LENGTHS)), expected, atol=1e-4, rtol=0)


# Layers


class OneNormTwice(TransformerEncoderLayer):
    """The faulty layer: norm1 stands where norm2 belongs."""

    def compose(self, x, attention):
        x = self.norm1(x + attention(x))
        return self.norm1(x + self.linear2(F.relu(self.linear1(x))))


@pytest.mark.parametrize("norm_first", [True, False])
def test_every_parameter_is_used(norm_first):
    def unused(module, loss):
        loss.backward()
        return [name for name, p in module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]

    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    weights = torch.randn(8)
    for cls, expected in ((OneNormTwice, ["norm2.weight", "norm2.bias"]), (TransformerEncoderLayer, [])):
        layer = cls(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
        with torch.no_grad():
            nn.init.normal_(layer.norm1.weight)
            nn.init.normal_(layer.norm2.weight)
        assert unused(layer, (layer(x) * weights).sum()) == expected
    model = random_model(7, norm_first=norm_first)
    everything = list(range(4, 17))
    assert unused(model, translation_loss(model, pairs_batch([everything], [everything]))) == []


def test_dropout_is_before_the_norm():
    """Dropout after it leaves rows that are not normalised, zeros among them."""
    torch.manual_seed(0)
    layer = TransformerEncoderLayer(64, 4, 32, 0.5, batch_first=True).train()
    out = layer(torch.randn(3, 7, 64))

    def normalised(rows):
        return torch.allclose(rows.std(-1, correction=0), torch.ones(rows.shape[:-1]), atol=1e-3)

    assert not normalised(F.dropout(F.layer_norm(torch.randn(3, 7, 64), (64,)), 0.5))
    assert normalised(out)
    assert not (out == 0).any()
