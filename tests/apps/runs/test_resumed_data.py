"""A resumed run meets the texts that it began with: those it learns from, and those that decide its best weights."""

from pathlib import Path
from typing import Any

import pytest

from fastformer.apps.classification import ClassificationDataConfig, ClassificationRun, ClassificationTrainConfig
from fastformer.apps.language.run import LanguageDataConfig, LanguageRun
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation.run import DataConfig, TranslationRun

SIZES: dict[str, Any] = {"d_model": 8, "heads": 2, "feed_forward": 8}
TRAIN: dict[str, Any] = {"steps": 1, "warmup_steps": 1, "validate_every": 1}
LINES = [f"{label}\tthe {word} is {verb}" for label, word in (("a", "cat"), ("b", "oak")) for verb in ("old", "here")]


def begin(kind: str, folder: Path) -> tuple[type[Any], Path]:
    """A run of one step, in `folder/run`, and the file that it validates on."""
    files = [folder / name for name in ("train", "valid", "test")]
    for path in files:
        path.write_text("\n".join(LINES) + "\n")
    train, valid, test = files
    run: Any
    if kind == "translation":
        sides: Any = {
            f"{name}_{side}": folder / name for name in ("train", "valid", "test") for side in ("source", "target")
        }
        data: Any = DataConfig(**sides, tokenizer="words", bleu_sentences=0)
        run = TranslationRun.create(
            folder / "run", data, {**SIZES, "encoder_layers": 1, "decoder_layers": 1}, TrainConfig(**TRAIN)
        )
    elif kind == "language":
        data = LanguageDataConfig(train_text=train, valid_text=valid, test_text=test, tokenizer="words", context=8)
        run = LanguageRun.create(folder / "run", data, {**SIZES, "layers": 1}, TrainConfig(**TRAIN))
    else:
        data = ClassificationDataConfig(train_text=train, valid_text=valid, test_text=test, tokenizer="words")
        run = ClassificationRun.create(folder / "run", data, {**SIZES, "layers": 1}, ClassificationTrainConfig(**TRAIN))
    run.fit(show=False)
    return type(run), valid


@pytest.mark.parametrize("kind", ["translation", "language", "classification"])
def test_the_best_so_far_is_of_the_same_validation_text(kind: str, tmp_path: Path) -> None:
    run, valid = begin(kind, tmp_path)
    run.open(tmp_path / "run", {"steps": 2}).fit(resume=True, show=False)
    valid.write_text("\n".join([LINES[0].replace("cat", "dog"), *LINES[1:]]) + "\n")
    for changed in ("the same number of lines", "other labels"):
        with pytest.raises(ValueError, match=r"run: the validation data differs from what this run was started with"):
            run.open(tmp_path / "run", {"steps": 3})
        if changed == "the same number of lines":
            valid.write_text("\n".join([LINES[0].replace("a\t", "b\t"), *LINES[1:]]) + "\n")
