"""Sentence lengths of Multi30k en-de, kept as counts of (source, target) token lengths, and batches drawn from them.

What padding costs depends on nothing but lengths, and lengths can be handed on where sentences cannot. The counts are
joint, because bucketing lives on the two sides of a pair being about as long. Token ids are random.

    python -m benchmarks.lengths --from ../shared/data/multi30k     # counts again from the corpus, 20 s
"""

import argparse
import json
from pathlib import Path

import numpy as np

from fastformer.text import Batch, Batches, EncodedPairs, Sequences, SpecialIds, collate

HISTOGRAM = Path(__file__).with_name("multi30k_lengths.json")
VOCABULARY = 8000
SPECIAL = SpecialIds()


def count(folder: Path) -> dict[str, object]:
    """Count the lengths of the training pairs, special ids left out, under one joint BPE vocabulary of 8,000.

    Args:
        folder: with train.en and train.de, plain or .gz.
    """
    from fastformer.text import encode_pairs, read_parallel, train_sentencepiece

    source, target = (
        next(path for path in (folder / f"train.{side}", folder / f"train.{side}.gz") if path.is_file())
        for side in ("en", "de")
    )
    corpus = read_parallel(source, target)
    tokenizer = train_sentencepiece([*corpus.source, *corpus.target], VOCABULARY, model_type="bpe")
    pairs = encode_pairs(corpus, tokenizer, tokenizer)
    lengths, counts = np.unique(np.stack([pairs.source.lengths, pairs.target.lengths], 1), axis=0, return_counts=True)
    return {
        "corpus": "Multi30k en-de, training split",
        "vocabulary": f"joint BPE, {tokenizer.size} pieces",
        "pairs": len(pairs),
        "source_target_count": [[*map(int, pair), int(n)] for pair, n in zip(lengths, counts, strict=True)],
    }


def random_pairs(number: int = 29_000, seed: int = 0) -> EncodedPairs:
    """Draw pairs whose lengths are those of Multi30k and whose ids are random; 29,000 is the corpus's own size."""
    table = np.array(json.loads(HISTOGRAM.read_text())["source_target_count"])  # [cells, 3]
    random = np.random.default_rng(seed)
    lengths = table[random.choice(len(table), number, p=table[:, 2] / table[:, 2].sum()), :2]  # [number, 2]
    sides = []
    for side in range(2):
        offsets = np.concatenate([[0], np.cumsum(lengths[:, side])])
        sides.append(Sequences(random.integers(4, VOCABULARY, offsets[-1], np.int32), offsets))
    return EncodedPairs(sides[0], sides[1], SPECIAL, SPECIAL)


def typical_batch(kind: str) -> tuple[Batch, Batch, float]:
    """One batch whose share of padding is nearest to that of an epoch: packed, the same padded, and the epoch's share.

    Args:
        kind: "random" = 128 sentences in random order; "bucketed" = 4,096 positions a side, padding counted, of pairs
            sorted by (target, source) length.
    """
    pairs = random_pairs()
    if kind == "random":
        batches = Batches(pairs, sentences=128, bucket=False, packed=False)
    else:
        batches = Batches(pairs, tokens=4096, bucket=True, packed=False)
    source, target = pairs.source.lengths + 1, pairs.target.lengths + 1
    plan = [indices for indices in batches.plan(0) if kind == "bucketed" or len(indices) == 128]

    def padding(indices: np.ndarray) -> float:
        positions = len(indices) * int(source[indices].max() + target[indices].max())
        return 1 - int(source[indices].sum() + target[indices].sum()) / positions

    share = batches.padding_share()
    chosen = pairs.take(min(plan, key=lambda indices: abs(padding(indices) - share)))
    return collate(chosen, packed=True), collate(chosen, packed=False), share


def main() -> None:
    """Count again and write the numbers beside this file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--from", dest="folder", type=Path, required=True, help="folder with train.en.gz, train.de.gz")
    histogram = count(parser.parse_args().folder)
    cells = histogram.pop("source_target_count")
    assert isinstance(cells, list)
    head = json.dumps(histogram)[:-1]
    rows = ",\n".join(json.dumps(cells[i : i + 12])[1:-1] for i in range(0, len(cells), 12))
    HISTOGRAM.write_text(f'{head}, "source_target_count": [\n{rows}\n]}}\n')
    print(f"{HISTOGRAM}: {histogram['pairs']} pairs, {len(cells)} cells")


if __name__ == "__main__":
    main()
