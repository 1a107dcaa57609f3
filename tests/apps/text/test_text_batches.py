"""Encoding, batches and their shares: eos everywhere, nothing lost, nothing twice, resumable."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastformer.apps.language.model import language_model_loss
from fastformer.apps.text import (
    Batch,
    Batches,
    EncodedPairs,
    LabelledBatch,
    LabelledBatches,
    ParallelCorpus,
    SampledBatches,
    Sequences,
    SpecialIds,
    WordTokenizer,
    collate,
    collate_source,
    encode_pairs,
    encode_source,
    number_corpus,
    train_sentencepiece,
)
from fastformer.apps.text.batch import share_of
from fastformer.apps.translation.model import translation_loss
from tests.support.language_task import random_batch as language_batch
from tests.support.language_task import random_model as language_model
from tests.support.python import python
from tests.support.translation_task import random_batch, random_model

SOURCE_IDS = SpecialIds(unk_id=0, pad_id=1, bos_id=2, eos_id=3)
TARGET_IDS = SpecialIds(unk_id=3, pad_id=0, bos_id=1, eos_id=2)


def make_pairs(pairs: list[tuple[list[int], list[int]]]) -> EncodedPairs:
    source, target = [left for left, _ in pairs], [right for _, right in pairs]
    return EncodedPairs(Sequences.from_lists(source), Sequences.from_lists(target), SOURCE_IDS, TARGET_IDS)


def numbered_pairs(count: int, longest: int = 12) -> EncodedPairs:
    """Random lengths; the first source token is the number of the pair, so that a batch can be traced."""
    lengths = np.random.default_rng(0).integers(1, longest + 1, (count, 2))
    return make_pairs([([100 + i, *[9] * (s - 1)], [8] * t) for i, (s, t) in enumerate(lengths)])


def pair_numbers(batch: Batch) -> list[int]:
    starts = torch.cumsum(batch.source_lengths, 0) - batch.source_lengths
    first = batch.source[starts] if batch.source.dim() == 1 else batch.source[:, 0]
    return (first - 100).tolist()


sentences = st.lists(st.integers(4, 99), max_size=6)
some_pairs = st.lists(st.tuples(sentences, sentences), min_size=1, max_size=8)
some_options = st.fixed_dictionaries({"shuffle": st.booleans(), "bucket": st.booleans(), "packed": st.booleans()})
some_sizes = st.one_of(
    st.fixed_dictionaries({"sentences": st.integers(1, 30)}), st.fixed_dictionaries({"tokens": st.integers(13, 90)})
)


@settings(deadline=None)
@given(some_pairs)
def test_batches_are_packed_or_padded_with_special_ids(pairs):
    """Source = tokens + eos, target_in = bos + tokens, target_out = tokens + eos; in inference as in training.

    A tutorial put eos on the source in training but not in inference.
    """
    packed, padded = (collate(make_pairs(pairs), form) for form in (True, False))
    assert packed.tokens == padded.tokens == sum(len(right) + 1 for _, right in pairs)
    for name, rows, pad_id in (
        ("source", [[*left, SOURCE_IDS.eos_id] for left, _ in pairs], SOURCE_IDS.pad_id),
        ("target_in", [[TARGET_IDS.bos_id, *right] for _, right in pairs], TARGET_IDS.pad_id),
        ("target_out", [[*right, TARGET_IDS.eos_id] for _, right in pairs], TARGET_IDS.pad_id),
    ):
        lengths = [len(row) for row in rows]
        assert getattr(packed, f"{name.split('_')[0]}_lengths").tolist() == lengths
        assert getattr(packed, name).tolist() == [i for row in rows for i in row]
        assert getattr(padded, name).tolist() == [row + [pad_id] * (max(lengths) - len(row)) for row in rows]
    source, lengths = collate_source([left for left, _ in pairs], SOURCE_IDS)
    assert torch.equal(source, packed.source)
    assert torch.equal(lengths, packed.source_lengths)
    assert {value.dtype for value in vars(packed).values()} == {torch.int64}


CORPUS = ParallelCorpus(
    ["a b c d", "a b", "e", "a b c d e f", ""], ["A B", "A B C D E F", "E", "A B C D E F G", "A"], name="toy"
)


def toy_tokenizers() -> tuple[WordTokenizer, WordTokenizer]:
    return tuple(WordTokenizer.from_lines(lines) for lines in (["a b c d e f"], ["A B C D E F G"]))


def test_too_long_pairs_are_dropped_and_counted():
    source, target = toy_tokenizers()
    pairs = encode_pairs(CORPUS, source, target, max_length=5)
    assert [source.decode(pairs.source[i]) for i in range(len(pairs))] == ["a b c d", "e"]
    assert [target.decode(pairs.target[i]) for i in range(len(pairs))] == ["A B", "E"]
    assert str(pairs) == "2 pairs, 5 source and 3 target tokens, 3 pairs too long or empty dropped"
    unknown = encode_pairs(CORPUS.take([0, 2], "toy"), source, WordTokenizer.from_lines(["A"]))
    assert str(unknown) == "2 pairs, 5 source and 3 target tokens, 2 of them <unk>"
    assert len(encode_pairs(CORPUS.take([1], "toy"), source, target, max_length=7)) == 1  # six tokens and eos just fit
    with pytest.raises(ValueError, match="toy: no pair has between 1 and 5 tokens a side"):
        encode_pairs(CORPUS.take([1], "toy"), source, target, max_length=6)
    with pytest.raises(ValueError, match="empty: no pair"):
        encode_pairs(ParallelCorpus([], [], name="empty"), source, target)
    with pytest.raises(ValueError, match="sampling needs a SentencePieceTokenizer, not WordTokenizer"):
        encode_pairs(CORPUS, source, target, sampling=0.1)
    with pytest.raises(ValueError, match="too_long must be drop or truncate, not 'cut'"):
        encode_pairs(CORPUS, source, target, too_long="cut")


def test_too_long_pairs_are_truncated_and_keep_eos():
    source, target = toy_tokenizers()
    pairs = encode_pairs(CORPUS, source, target, max_length=4, too_long="truncate")
    assert [source.decode(pairs.source[i]) for i in range(len(pairs))] == ["a b c", "a b", "e", "a b c"]
    assert [target.decode(pairs.target[i]) for i in range(len(pairs))] == ["A B", "A B C", "E", "A B C"]
    assert (pairs.dropped, pairs.truncated) == (1, 3)
    batch = collate(pairs, packed=False)
    ends = torch.arange(len(pairs))
    assert batch.source.shape[1] == batch.target_out.shape[1] == 4
    assert (batch.source[ends, batch.source_lengths - 1] == source.eos_id).all()
    assert (batch.target_out[ends, batch.target_lengths - 1] == target.eos_id).all()
    cut, count = encode_source(CORPUS.source[:4], source, max_length=4)
    assert [cut[i] for i in range(4)] == [pairs.source[i] for i in range(4)]
    assert count == 2
    with pytest.raises(ValueError, match="max_length must be at least 2"):
        encode_source(["a"], source, max_length=1)


def test_many_sentences_are_encoded_in_order():
    """More than are encoded at a time."""
    source, _ = toy_tokenizers()
    lines = ["a b", "", "c"] * 3400
    sequences, _ = encode_source(lines, source, 9)
    assert [sequences[i] for i in range(len(sequences))] == source.encode_batch(lines)


@settings(deadline=None)
@given(st.integers(1, 60), some_sizes, some_options, st.integers(0, 3), st.integers(0, 4), st.data())
def test_every_pair_exactly_once_within_the_size_and_resumable(count, size, options, seed, epoch, data):
    pairs = numbered_pairs(count)
    seen = list(Batches(pairs, **size, **options, seed=seed).epoch(epoch))
    assert sorted(i for batch in seen for i in pair_numbers(batch)) == list(range(count))
    for batch in seen:
        assert (batch.source.dim() == 1) == options["packed"]
        assert max(batch.source.numel(), batch.target_in.numel()) <= size.get("tokens", 10**9)
        assert len(batch) <= size.get("sentences", 10**9)
    if "sentences" in size:
        assert len(seen) == -(-count // size["sentences"])
    start = data.draw(st.integers(0, len(seen)))
    again = Batches(pairs, **size, **options, seed=seed)
    assert again.batches_in(epoch) == len(seen)
    for left, right in zip(again.epoch(epoch, start=start), seen[start:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(vars(left).values(), vars(right).values(), strict=True))


@pytest.mark.parametrize("bucket", [False, True])
def test_order_depends_on_seed_and_epoch_or_is_that_of_the_file_or_length(bucket):
    pairs = numbered_pairs(200)

    def order(seed: int, epoch: int, shuffle: bool = True) -> list[int]:
        batches = Batches(pairs, tokens=50, seed=seed, bucket=bucket, shuffle=shuffle)
        return [i for batch in batches.epoch(epoch) for i in pair_numbers(batch)]

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(*key)) for key in ((1, 0), (1, 1), (2, 0), (0, 1))}) == 4
    lengths = [int(batch.target_lengths.max()) for batch in Batches(pairs, sentences=10, bucket=bucket).epoch(0)]
    assert lengths != sorted(lengths)  # also the batches of buckets are shuffled
    by_length = sorted(range(200), key=lambda i: (pairs.target.lengths[i], pairs.source.lengths[i], i))
    assert order(1, 3, shuffle=False) == (by_length if bucket else list(range(200)))


def test_buckets_save_padding_and_budgets_are_filled():
    pairs = numbered_pairs(2000, longest=40)
    bucketed, random = (Batches(pairs, tokens=400, bucket=bucket, packed=False) for bucket in (True, False))
    assert bucketed.padding_share() < 0.25 < 0.4 < random.padding_share() < 0.6
    positions = sum(batch.source.numel() + batch.target_in.numel() for batch in bucketed.epoch(0))
    real = int(pairs.source.lengths.sum() + pairs.target.lengths.sum()) + 2 * len(pairs)
    assert bucketed.padding_share() == pytest.approx(1 - real / positions)
    packed = [max(b.source.numel(), b.target_in.numel()) for b in Batches(pairs, tokens=400, bucket=False).epoch(0)]
    assert min(packed[:-1]) > 400 - 41  # each batch is full: no sentence of at most 41 tokens fits in what is left


def test_bad_arguments_of_batches():
    pairs = make_pairs([([9], [9]), ([9] * 30, [9] * 5)])
    for options in ({}, {"sentences": 2, "tokens": 9}):
        with pytest.raises(ValueError, match="give either sentences or tokens, got sentences="):
            Batches(pairs, **options)
    with pytest.raises(ValueError, match="batches of 20 tokens are too small for sentence pair 2, which has 31 tokens"):
        Batches(pairs, tokens=20)
    assert Batches(pairs, tokens=31).batches_in(0) == 2
    with pytest.raises(ValueError, match="there are no sequences to make batches of"):
        Batches(make_pairs([]), tokens=20)
    sequences = pairs.source
    for labels in (np.zeros(3, int), make_pairs([([9] * 2, [9]), ([9], [9])]).source):
        with pytest.raises(ValueError, match="labels must be one for each sequence, or one for each token"):
            LabelledBatches(sequences, labels, size=2)
    with pytest.raises(TypeError, match="Cannot cast"):  # probabilities are no labels
        next(LabelledBatches(sequences, np.zeros(2), size=2).epoch(0))


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_sampled_pieces_depend_on_seed_and_epoch_and_spell_the_same_text(model_type):
    corpus = number_corpus("fr", 300, 1, 1)[0]
    tokenizer = train_sentencepiece(corpus.source + corpus.target, 90, model_type=model_type)
    options = {"tokens": 200, "max_length": 60}

    def targets(batches: SampledBatches, epoch: int, start: int = 0) -> list[list[int]]:
        return [
            ids.tolist() for b in batches.epoch(epoch, start) for ids in b.target_out.split(b.target_lengths.tolist())
        ]

    batches = SampledBatches(corpus, tokenizer, tokenizer, 0.2, seed=1, **options)
    first, second = targets(batches, 0), targets(batches, 1)
    assert targets(batches, 0) == first
    resumed = targets(SampledBatches(corpus, tokenizer, tokenizer, 0.2, seed=1, **options), 1, start=3)
    assert resumed == second[len(second) - len(resumed) :]
    whole = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(corpus.target)]
    for epoch in (first, second):
        assert sorted(map(tokenizer.decode, epoch)) == sorted(map(tokenizer.decode, whole))
        assert sum(map(len, epoch)) > sum(map(len, whole))
    other = targets(SampledBatches(corpus, tokenizer, tokenizer, 0.2, seed=2, **options), 0)
    assert len({str(sorted(each)) for each in (first, second, other)}) == 3


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 9))
def test_every_sequence_has_one_process_and_shares_are_about_equal(lengths, world):
    rows = [share_of(torch.tensor(lengths, dtype=torch.int64), rank, world) for rank in range(world)]
    assert [i for each in rows for i in range(len(lengths))[each]] == list(range(len(lengths)))
    for each in rows:
        assert sum(lengths[each]) <= sum(lengths) / world + max(lengths, default=0)


@pytest.mark.parametrize("packed", [True, False])
def test_the_losses_of_the_shares_of_pairs_add_up(packed):
    batch = random_batch([(3, 5), (1, 0), (0, 2), (7, 1), (2, 2)], packed=packed)
    model = random_model().double()
    shares = [batch.share(rank, 3) for rank in range(3)]
    assert sum(share.tokens for share in shares) == batch.tokens
    total = sum(translation_loss(model, share) for share in shares)
    torch.testing.assert_close(total, translation_loss(model, batch), rtol=1e-6, atol=0)
    if packed:
        for name in ("source", "target_in", "target_out", "source_lengths", "target_lengths"):
            assert torch.equal(torch.cat([getattr(share, name) for share in shares]), getattr(batch, name))


def test_the_losses_of_the_shares_of_documents_add_up():
    batch = language_batch([4, 1, 6, 2, 2])
    model = language_model().double()
    total = sum(language_model_loss(model, batch.share(rank, 2)) for rank in range(2))
    torch.testing.assert_close(total, language_model_loss(model, batch), rtol=1e-6, atol=0)


@pytest.mark.parametrize("ids", [torch.arange(6), torch.arange(9).view(3, 3)], ids=["packed", "padded"])
def test_labels_stay_with_their_sequences(ids):
    for labels in (ids + 10, torch.tensor([7, 8, 9])):
        batch = LabelledBatch(ids, labels, torch.tensor([2, 3, 1]))
        shares = [batch.share(rank, 2) for rank in range(2)]
        for name in ("ids", "labels", "lengths"):
            assert torch.equal(torch.cat([getattr(share, name) for share in shares]), getattr(batch, name))
        assert [len(share) for share in shares] == [1, 2]


def test_a_process_may_get_nothing():
    batches = random_batch([(2, 3)]), language_batch([4]), LabelledBatch(*(torch.ones(n).long() for n in (2, 2, 1)))
    for batch in batches:
        shares = [batch.share(rank, 3) for rank in range(3)]
        assert [share is None for share in shares] == [True, False, True]


DRAW = """
from fastformer.apps.text import ParallelCorpus, SampledBatches, train_sentencepiece
lines = ["the cat sat on the mat", "a dog ran to the house"] * 9
tokenizers = [train_sentencepiece(lines, 40, model_type=name) for name in ("bpe", "unigram")]
batches = SampledBatches(ParallelCorpus(lines, lines), *tokenizers, 0.5, tokens=99, seed=1)
print([(batch.source.tolist(), batch.target_in.tolist()) for batch in batches.epoch(1)])
"""


@pytest.mark.slow
def test_another_process_draws_the_same_pieces_or_a_warning_says_so():
    first, second = (python("-c", DRAW) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout or "draws other pieces in each process" in second.stderr
