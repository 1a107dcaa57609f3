"""The first pairs of a corpus, whatever it is made of."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.text import prepare, write_lines
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation import run as translation
from fastformer.apps.translation.run import DataConfig, read_corpora
from tests.support.command_line import fastformer

SMALL = {"d_model": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 16}
FILES = "train --run new --steps 1 --device cpu --train-source s.txt --train-target t.txt"


def pairs(folder: Path, count: int, blank: int = 0) -> dict[str, Path]:
    """Files of numbered pairs, of which every `blank`-th has an empty side."""
    source = [f"s {i}" if not blank or i % blank else "" for i in range(count)]
    write_lines(folder / "s", source)
    write_lines(folder / "t", [f"t {i}" for i in range(count)])
    return {"train_source": folder / "s", "train_target": folder / "t"}


def test_the_first_pairs_of_files_are_taken_after_those_split_off(tmp_path: Path) -> None:
    data = DataConfig(**pairs(tmp_path, 1000, blank=10), train_size=100, valid_size=7, test_size=5)
    parts = read_corpora(data)
    assert [len(parts[name]) for name in ("train", "valid", "test")] == [100, 7, 5]
    taken = {int(line.split()[1]) for part in parts.values() for line in part.source}
    assert taken == {i for i in range(125) if i % 10}  # 112 of the first 125 lines have two sides
    assert "875 more left out" in str(parts["train"])
    assert len(read_corpora(replace(data, train_size=None))["train"]) == 888
    held: dict[str, Any] = {
        f"{part}_{side}": tmp_path / side[0] for part in ("valid", "test") for side in ("source", "target")
    }
    parts = read_corpora(DataConfig(**pairs(tmp_path, 1000), **held, train_size=100))
    assert {int(line.split()[1]) for line in parts["train"].source} == set(range(100))
    assert len(parts["valid"]) == 1000


def test_the_first_pairs_of_a_dataset_folder_are_taken(tmp_path: Path) -> None:
    count = 8000
    write_lines(tmp_path / "europarl-v7.fr-en.fr", [f"f {i}" for i in range(count)])
    write_lines(tmp_path / "europarl-v7.fr-en.en", [f"e {i}" for i in range(count)])
    prepare("europarl", tmp_path, tmp_path / "data")
    folder = str(tmp_path / "data")
    whole = read_corpora(DataConfig(dataset=folder))
    part = read_corpora(DataConfig(dataset=folder, train_size=150))
    assert part["train"].source == whole["train"].source[:150]
    assert part["train"].target == whole["train"].target[:150]
    assert part["valid"] == whole["valid"]
    assert part["test"] == whole["test"]


def test_train_size_of_a_folder_is_saved_and_used(tmp_path: Path) -> None:
    files = pairs(tmp_path, 300)
    command = [*FILES.split(), "--valid-size", "5", "--test-size", "5", "--train-size", "40", "--vocabulary", "30"]
    sizes = [x for k, v in SMALL.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    for name, path in zip(("s.txt", "t.txt"), files.values(), strict=True):
        path.rename(tmp_path / name)
    done = fastformer(*command, *sizes, "--bleu-sentences", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train: 40 pairs, 250 more left out" in done.stdout
    config = tmp_path / "new" / "config.toml"
    assert "train_size = 40" in config.read_text()
    done = fastformer("train", "--run", "new", "--resume", "--steps", "2", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config.write_text(config.read_text().replace("version = 2\n", "version = 3\n"))
    with pytest.raises(ValueError, match="version must be at least 1 and at most 2, not 3"):
        translation.APPLICATION.read_config(tmp_path / "new")


def test_a_batch_smaller_than_a_sentence_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    data = DataConfig(train_size=50, valid_size=5, test_size=5, vocabulary=60)
    with pytest.raises(ValueError, match="tokens=3 is less than sentence pair"):
        translation.TranslationRun.create(tmp_path / "run", data, SMALL, TrainConfig(steps=1, batch_tokens=3))
    assert not (tmp_path / "run").exists()
