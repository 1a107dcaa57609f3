"""What evaluate calls a run's own text is what the run held out: of a changed corpus another part would be."""

import json
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from tests.support.command_line import Done, fastformer

_COMMON = "--d-model 8 --heads 2 --feed-forward 8 --tokenizer words --threads 1 --warmup-steps 1 --device cpu --steps 1"
TRAIN = {
    "translation": "train --train-source text --train-target text --valid-size 8 --test-size 8 --bleu-sentences 0 "
    "--encoder-layers 1 --decoder-layers 1",
    "language": "train lm --train-text text --held-out 0.2 --layers 1 --context 8",
    "classification": "train classify --train-text text --held-out 0.2 --layers 1",
}
EVALUATE = {
    "translation": "evaluate --run run --beam 1 --max-length 2 --device cpu",
    "language": "evaluate --run run --device cpu",
    "classification": "evaluate --run run --device cpu",
}
WITH_FILE = {
    "translation": " --source text --target text",
    "language": " --source text",
    "classification": " --source text",
}
LINES = [
    f"{label}\tthe {size} {word} is {verb}"
    for label, words in (("a", ("cat", "dog", "hen")), ("b", ("oak", "elm", "fir")))
    for word in words
    for size in ("small", "large", "old")
    for verb in ("here", "there", "gone")
]


@pytest.mark.parametrize("kind", TRAIN)
def test_text_of_a_corpus_that_has_changed_is_refused(tmp_path: Path, kind: str) -> None:
    def run(line: str) -> Done:
        return fastformer(*line.split(), cwd=tmp_path)

    (tmp_path / "text").write_text("\n".join(LINES) + "\n")
    done = run(f"{TRAIN[kind]} {_COMMON} --run run")
    assert done.returncode == 0, done.stderr
    before = {split: run(f"{EVALUATE[kind]} --split {split}") for split in ("test", "valid")}
    assert [done.returncode for done in before.values()] == [0, 0]

    # One line more, and another part of the corpus is held out: most of it was trained on.
    (tmp_path / "text").write_text("\n".join(["a\tthe new hen is here", *LINES]) + "\n")
    for split, name in (("test", "test"), ("valid", "validation")):
        done = run(f"{EVALUATE[kind]} --split {split}")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"run: the {name} data differs from what this run was started with" in done.stderr
        assert "--source" in done.stderr
    assert run(EVALUATE[kind] + WITH_FILE[kind]).returncode == 0

    (tmp_path / "text").write_text("\n".join(LINES) + "\n")
    assert run(EVALUATE[kind]) == before["test"]

    # A run of an earlier version says nothing of it.
    report = json.loads((tmp_path / "run" / "data.json").read_text())
    del report["test"]
    (tmp_path / "run" / "data.json").write_text(json.dumps(report))
    (tmp_path / "text").write_text("\n".join([*LINES, LINES[0]]) + "\n")
    assert run(EVALUATE[kind]).returncode == 0
