"""A SentenceTransformer and a CrossEncoder with `padding_free` against the same models with padding, on a CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.sentence_encoders --rounds 5

Models of the size of all-MiniLM-L6-v2 (6 layers of width 384) with random weights, fp32, and texts of random words,
whose lengths are uniform in a range. Encoding sorts texts by length and takes 32 at a time, as sentence-transformers
does; training takes 32 unsorted texts. Outputs are compared first. Both sides run in turn; the ratio is the median over
rounds of process CPU time.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fastformer.integrations.transformers import padding_free

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{index}" for index in range(2000))]
SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
SHORTEST, LONGEST, BATCH, TEXTS = 4, 62, 32, 192  # words of a text; texts


def saved_model(folder: str) -> None:
    """Save a BERT with one label and a tokenizer of words."""
    (Path(folder) / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    transformers.BertTokenizer(str(Path(folder) / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(vocab_size=len(WORDS), num_labels=1, **SIZES)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)


def compare(name: str, models: list[Any], run: Callable[[Any], Tensor], rounds: int, padding: str) -> None:
    """Print how much faster the second model is than the first; their outputs must agree before."""
    padded, packed = (run(model.eval()) for model in models)
    torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-4)
    ratios = []
    for model in models:
        run(model.train("training" in name))
    for _ in range(rounds):
        seconds = []
        for model in models:
            began = time.process_time()
            run(model)
            seconds.append(time.process_time() - began)
        ratios.append(seconds[0] / seconds[1])
    print(f"| {name} | {padding} | {statistics.median(ratios):.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    torch.manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (TEXTS,)).tolist()
    texts = [" ".join(f"word{index}" for index in torch.randint(2000, (length,)).tolist()) for length in lengths]
    sorted_lengths = sorted((length + 2 for length in lengths), reverse=True)
    batches = [sorted_lengths[start : start + BATCH] for start in range(0, TEXTS, BATCH)]
    of_sorted = f"{1 - sum(sorted_lengths) / sum(len(batch) * max(batch) for batch in batches):.0%}"

    with tempfile.TemporaryDirectory() as folder:
        saved_model(folder)
        encoder: Any = SentenceTransformer(modules=[Transformer(folder), Pooling(384)], device="cpu")
        scorer: Any = CrossEncoder(folder, device="cpu")
    encoders, scorers = ([model, copy.deepcopy(model)] for model in (encoder, scorer))
    assert padding_free(encoders[1]).packed
    assert padding_free(scorers[1]).packed
    tokens = encoder.preprocess(texts[:BATCH])
    of_batch = f"{1 - tokens['attention_mask'].float().mean().item():.0%}"

    def train(model: nn.Module) -> Tensor:
        model.zero_grad(set_to_none=True)
        embeddings: Tensor = model(dict(tokens))["sentence_embedding"]
        embeddings.square().sum().backward()  # type: ignore[no-untyped-call]
        return embeddings.detach()

    def encode(model: Any) -> Tensor:
        encoded: Tensor = model.encode(texts, batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False)
        return encoded

    def score(model: Any) -> Tensor:
        pairs = list(zip(texts[: TEXTS // 2], texts[TEXTS // 2 :], strict=True))
        scores: Tensor = model.predict(pairs, batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False)
        return scores

    print("| | padding | times the model with padding |\n|---|---:|---:|")
    compare("SentenceTransformer, encoding sorted batches", encoders, encode, rounds, of_sorted)
    compare("SentenceTransformer, training step", encoders, train, rounds, of_batch)
    compare("CrossEncoder, scoring pairs", scorers, score, rounds, "")


if __name__ == "__main__":
    main()
