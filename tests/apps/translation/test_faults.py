"""Faults of well-known tutorials that must not come back: in the model, its masks and loss, decoding, text and scores.

Where one property tells a fault from the right result, the faulty variant stands beside it.
"""

import re
from dataclasses import replace

import pytest
import sacrebleu
import torch
import torch.nn.functional as F

from fastformer import functional
from fastformer.apps.models.embeddings import sinusoidal_positions
from fastformer.apps.text import WordTokenizer, read_parallel
from fastformer.apps.text.scores import score_translations
from fastformer.apps.translation.model import TranslationModel, translation_loss
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from fastformer.apps.translation.translator import Translator
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from tests.support.translation_task import (
    BOS,
    EOS,
    PAD,
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
    table = sinusoidal_positions(20, 16)
    torch.testing.assert_close(table.double(), paper_positions(20, 16), atol=1e-6, rtol=0)


def test_positions_do_not_drown_words():
    """Without the scale sqrt(d) positions are several times louder than words."""

    def loudness(scale):
        torch.manual_seed(0)
        embedding = TranslationModel(config(d_model=96, heads=4, scale_embeddings=scale)).source_embedding
        ids = torch.arange(embedding.tokens.num_embeddings)
        words = embedding(ids, torch.zeros_like(ids), 1) - embedding.table[0]
        return (embedding.table.norm(dim=1).mean() / words.norm(dim=1).mean()).item()

    assert loudness(scale=False) > 5
    assert loudness(scale=True) < 1.5


# Masks


def test_masks_hide_keys_and_weights_sum_to_one_over_them():
    """Faults: the mask on the query axis, -1e-12 for what is hidden, softmax over the queries."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 5, 8)
    mask = torch.tensor([True, False, True, False, True]).expand(4, 5).clone()
    mask[3] = False  # a query that may attend to nothing gives 0, neither NaN nor the mean of everything
    out, weights = functional.attention_with_weights(q, k, k, mask)
    torch.testing.assert_close(out, weights @ k)
    assert weights[..., ~mask].max() == 0
    torch.testing.assert_close(weights.sum(-1), torch.tensor([1.0, 1.0, 1.0, 0.0]).expand(1, 1, 4))
    maps = random_model(1).attention_maps(torch.tensor([4, 5, 6, EOS]), torch.tensor([BOS, 7, 8]))
    for weights in maps.values():
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


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

    def hidden(ids):
        return hidden_states(model, replace(batch, target_in=ids))

    for position in (1, 4, 7):
        assert first_moved(hidden, batch.target_in, position) == position


@pytest.mark.slow
@torch.no_grad()
def test_generation_is_what_training_saw():
    """Every generated token is the model's choice after its prefix alone, by the forward pass of training."""
    model = reversing_model()
    batch = reverse_batch(50, 8)
    for row, actual in zip(split_rows(batch), greedy_search(model, batch.source, batch.source_lengths), strict=True):
        tokens = torch.tensor([BOS, *actual.ids])
        hidden = model(row, torch.tensor([len(row)]), tokens, torch.tensor([len(tokens)]))
        assert model.logits(hidden).argmax(-1).tolist() == [*actual.ids, EOS]


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
    assert batch.tokens == sum(sizes)


def test_targets_are_shifted():
    """The prediction of a token cannot see it: unshifted targets leave nothing to predict."""
    model = random_model(5).double()
    batch = random_batch([(4, 6)])
    assert torch.equal(batch.target_in, torch.cat([torch.tensor([BOS]), batch.target_out[:-1]]))
    changed = batch.target_in.clone()
    changed[4] = changed[4] % 12 + 4  # the label of position 3
    before, after = (hidden_states(model, replace(batch, target_in=ids)) for ids in (batch.target_in, changed))
    torch.testing.assert_close(before[3], after[3], atol=0, rtol=0)


def test_the_model_gives_logits():
    """Normalised once, in the loss: a log_softmax in the model as well would make each row sum to 1."""
    model = random_model(6)
    logits = model.logits(hidden_states(model, random_batch(LENGTHS)))
    assert logits.logsumexp(-1).abs().min() > 1e-3
    expected = F.cross_entropy(logits, random_batch(LENGTHS).target_out, reduction="sum")
    torch.testing.assert_close(translation_loss(model, random_batch(LENGTHS)), expected, atol=1e-4, rtol=0)


# Layers


@pytest.mark.parametrize("norm_first", [True, False])
def test_every_parameter_is_used(norm_first):
    """A layer with one norm used twice, and the other never, leaves gradients of 0."""
    model = random_model(7, norm_first=norm_first)
    everything = list(range(4, 17))
    translation_loss(model, pairs_batch([everything], [everything])).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_dropout_is_before_the_norm():
    """Dropout after it leaves rows that are not normalised, zeros among them."""
    torch.manual_seed(0)
    layer = TransformerEncoderLayer(64, 4, 32, 0.5, batch_first=True).train()
    out = layer(torch.randn(3, 7, 64))
    torch.testing.assert_close(out.std(-1, correction=0), torch.ones(3, 7), atol=1e-3, rtol=0)
    assert not (out == 0).any()


# Decoding


def test_each_step_works_on_one_token(monkeypatch):
    """A decoder that recomputes the padded prefix works on n (n + 1) / 2 tokens for a sentence of n."""
    model = random_model(8, output_bias=True)
    with torch.no_grad():
        model.output.bias[EOS] -= 100
    batch = random_batch([(4, 1)] * 3)
    tokens, embed = [], model.target_embedding.forward
    monkeypatch.setattr(
        model.target_embedding, "forward", lambda ids, *at: tokens.append(ids.numel()) or embed(ids, *at)
    )
    options = SearchOptions(beam=2, max_ratio=0.0, max_extra=20)
    greedy_search(model, batch.source, batch.source_lengths, options)
    beam_search(model, batch.source, batch.source_lengths, options)
    assert tokens == [3] * 20 + [6] * 20


@pytest.mark.slow
@torch.no_grad()
def test_beams_differ_and_end_with_the_sentence():
    """Not at an unfinished prefix: what wins was followed by eos, since the limit is far away."""
    model = reversing_model()
    batch = reverse_batch(60, 6)
    options = SearchOptions(beam=4, n_best=4)
    for row, actual in zip(
        split_rows(batch), beam_search(model, batch.source, batch.source_lengths, options), strict=True
    ):
        assert len({tuple(h.ids) for h in actual}) == 4
        tokens = torch.tensor([BOS, *actual[0].ids])
        hidden = model(row, torch.tensor([len(row)]), tokens, torch.tensor([len(tokens)]))
        total = model.logits(hidden).log_softmax(-1)[range(len(tokens)), [*actual[0].ids, EOS]].sum()
        assert actual[0].log_probability == pytest.approx(float(total), abs=1e-4)


# Text and scores


def words_and_model(monkeypatch, **changes):
    """A tokenizer, a model, and the sources that the model has encoded."""
    words = WordTokenizer.from_lines(["a b c d e f"])
    model = random_model(9, source_vocabulary=words.size, target_vocabulary=words.size, **changes)
    sources, encode = [], model.encode

    def record(source, lengths):
        sources.extend(row.tolist() for row in torch.split(source, lengths.tolist()))
        return encode(source, lengths)

    monkeypatch.setattr(model, "encode", record)
    return words, model, sources


def test_inference_gives_the_source_that_training_gave(monkeypatch):
    """With eos; and nothing but the source: BLEU is not teacher-forced."""
    words, model, sources = words_and_model(monkeypatch)
    monkeypatch.setattr(model, "forward", None)
    Translator(model, words, words).translate(["a b", "c"], SearchOptions(beam=2))
    training = pairs_batch([words.encode("a b"), words.encode("c")], [[4], [4]])
    assert sources == [row.tolist() for row in split_rows(training)]
    assert all(row[-1] == EOS for row in sources)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_too_long_sentences_keep_their_eos(monkeypatch, positions):
    words, model, sources = words_and_model(monkeypatch, positions=positions, max_positions=6)
    actual = Translator(model, words, words, max_source_length=6).translate(["a b c d e f a b c d", "a"])
    assert len(actual) == 2
    assert sorted(sources, key=len) == [[*words.encode("a"), EOS], [*words.encode("a b c d e"), EOS]]


def test_no_newline_token(tmp_path):
    (tmp_path / "a.en").write_bytes(b"one two\r\nthree\n")
    (tmp_path / "a.fr").write_bytes(b"un deux\ntrois\n")
    corpus = read_parallel(tmp_path / "a.en", tmp_path / "a.fr")
    assert corpus.source == ["one two", "three"]
    for splitting in ("punctuation", "whitespace"):
        words = WordTokenizer.from_lines([*corpus.source, "with one\n"], splitting=splitting)
        assert not [word for word in words.words if re.search(r"\s", word)]
        assert words.encode("one\n") == words.encode("one")


def aligned_score(translation, reference):
    """The tutorials' "BLEU": the share of equal characters at equal positions."""
    return (
        100 * sum(a == b for a, b in zip(translation, reference, strict=False)) / min(len(translation), len(reference))
    )


def test_bleu_is_sacrebleu_of_decoded_text():
    """A right translation shifted by a word scores high and a truncated one low; aligned characters say the reverse."""
    reference = "The two men in red shirts are waiting at the corner of a busy street for the bus to come ."
    shifted, truncated = f"So {reference}", " ".join(reference.split()[:8])
    assert aligned_score(shifted, reference) < 20
    assert aligned_score(truncated, reference) == 100
    right, short = (score_translations([text], [reference]).bleu for text in (shifted, truncated))
    assert right > 90
    assert short < 40
    assert right == pytest.approx(sacrebleu.corpus_bleu([shifted], [[reference]]).score)
