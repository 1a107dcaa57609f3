"""`fastformer demo`: train on number words and translate held-out ones, in about a minute and without a network."""

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fastformer.apps.plots import plot_history, save
from fastformer.apps.runs.folder import MAIN, check_new
from fastformer.apps.text.scores import Scores
from fastformer.apps.train import TrainConfig, read_metrics
from fastformer.apps.translation.run import DataConfig, TranslationRun, evaluate, load_translator, read_corpora
from fastformer.apps.translation.search import SearchOptions

if TYPE_CHECKING:
    from rich.console import Console

# 100 pieces cover the syllables that number words share; with a vocabulary of whole words (60) most held-out numbers
# came out wrong, with single characters all did.
DATA = {"dataset": "numbers", "tokenizer": "bpe", "vocabulary": 100, "joint": False, "bleu_sentences": 200}
MODEL = {"d_model": 128, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "feed_forward": 256, "dropout": 0.0}
TRAIN = TrainConfig(
    lr=2e-3,
    schedule="linear",
    warmup_steps=50,
    label_smoothing=0.0,
    batch_tokens=1000,
    epochs=3,
    keep=1,
    metric="chrf",  # a German number is one word, where BLEU, of four words in a row, is always 0
)
SHOWN = 6


def run_demo(folder: Path, target: str, device: str, console: "Console") -> Scores:
    """Train, print the scores on held-out numbers, translate a few, draw an attention map; return the scores.

    Raises FileExistsError if the folder holds files, such as an earlier demo.
    """
    check_new(folder, MAIN)
    data = DataConfig(**DATA, target=target)  # type: ignore[arg-type]
    TranslationRun.check(data, MODEL, TRAIN, device)
    corpora = read_corpora(data)
    train, test = corpora["train"], corpora["test"]
    console.print(
        f"Learning to translate English number words into {'French' if target == 'fr' else 'German'}: "
        f"{len(train):,} examples such as\n  {train.source[-1]}  ->  {train.target[-1]}"
    )
    wall, cpu = time.perf_counter(), time.process_time()
    TranslationRun.create(folder, data, MODEL, TRAIN, device).fit()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    console.print(f"Set-up and training took {wall:.0f} s ({cpu:.0f} CPU-seconds).\n")

    translator = load_translator(folder, device=device)
    scores, translations = evaluate(translator, test, SearchOptions())
    console.print(f"{len(test)} numbers that never occurred in training, beam search:")
    bleu = (
        f"BLEU {scores.bleu:.1f} ({scores.bleu_signature})" if target == "fr" else "BLEU says nothing of single words"
    )
    console.print(f"  {100 * scores.exact:.1f} % translated exactly, chrF {scores.chrf:.1f}, {bleu}\n")
    for source, translation in list(zip(test.source, translations, strict=True))[:SHOWN]:
        console.print(f"  {source}\n    -> {translation}")

    save(plot_history({folder.name: read_metrics(folder)}), folder / "history.png")
    # Short enough for readable labels, long enough to show something.
    sentence = min((s for s in test.source if len(s.split()) >= 4), key=len)
    save(translator.attend(sentence).figure(), folder / "attention.png")
    console.print(f"\nPictures: {folder / 'attention.png'} (cross attention), {folder / 'history.png'}")
    command = "fastformer" if shutil.which("fastformer") else sys.argv[0]  # as .venv/bin/fastformer
    console.print(f'Your turn: {command} translate --run {folder} "ninety-nine thousand eight hundred one"')
    return scores
