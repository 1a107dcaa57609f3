"""Runs side by side: what their folders say, whatever they train, complete or not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason="checkpoints need the extra `apps`")
pytest.importorskip("tomli_w", reason="run folders need the extra `apps`")

from fastformer.apps.runs.comparison import compare_runs, summarise
from fastformer.apps.runs.toml import save_toml
from fastformer.apps.train import CheckpointFolder
from tests.support.command_line import fastformer

SETTINGS = {"run": {"kind": "language"}, "model": {"heads": 2, "vocabulary": 9}, "train": {"lr": 0.5, "metric": "loss"}}


def record(kind: str, step: int, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "epoch": 1, "seconds": step / 2, **values}


RECORDS = [
    record("validation", 1, loss=float("nan"), perplexity=float("nan"), bleu=float("nan")),
    record("train", 1, loss=9.0, lr=0.5),
    record("validation", 2, loss=3.0, perplexity=20.0, bleu=11.0),
    record("validation", 4, loss=2.0, perplexity=7.4, bleu=10.0),
    record("validation", 6, loss=2.0, perplexity=7.4, bleu=9.0),
    record("train", 7, loss=1.0, lr=0.5),
]


def make_run(
    folder: Path, records: list[dict[str, Any]] | None = None, weights: bool = False, **changes: dict[str, Any]
) -> Path:
    """A run folder with these metrics; `changes` are settings by section."""
    folder.mkdir(parents=True)
    names = SETTINGS.keys() | changes.keys()
    save_toml(folder / "config.toml", {name: SETTINGS.get(name, {}) | changes.get(name, {}) for name in names})
    if records is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    if weights:
        table = torch.nn.Parameter(torch.zeros(9, 4))
        tensors = {"embedding.weight": table, "output.weight": table, "norm.weight": torch.zeros(4)}
        CheckpointFolder(folder / "checkpoints").save(6, tensors, {}, None, {}, None)
    return folder


def test_a_run_is_summed_up(tmp_path: Path) -> None:
    run = summarise(make_run(tmp_path / "run", RECORDS, weights=True))
    assert (run.name, run.steps, run.seconds, run.clock) == ("run", 7, 3.5, "wall")
    assert run.parameters == 9 * 4 + 4  # the tied matrix counts once
    assert run.best_step == 4  # the first of two that are as good
    assert run.best == {"loss": 2.0, "perplexity": 7.4, "bleu": 10.0}
    assert run.settings["model.heads"] == 2


@pytest.mark.parametrize(
    ("metric", "step"), [("loss", 4), ("perplexity", 4), ("bleu", 2), ("exact", 6)], ids=lambda x: str(x)
)
def test_the_best_validation_is_that_by_the_runs_own_metric(tmp_path: Path, metric: str, step: int) -> None:
    """Lower is better for losses alone; of a metric that no validation has, the last one counts."""
    assert summarise(make_run(tmp_path / "run", RECORDS, train={"metric": metric})).best_step == step


def test_settings_that_differ_and_the_values_that_any_run_has(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", RECORDS)
    two = make_run(
        tmp_path / "two", [record("validation", 1, loss=1.0, accuracy=0.5)], model={"heads": 4, "bias": True}
    )
    comparison = compare_runs([one, two])
    assert [run.name for run in comparison.runs] == ["one", "two"]
    assert comparison.differing == {"model.heads": [2, 4], "model.bias": [None, True]}
    assert comparison.values == ["loss", "perplexity", "bleu", "accuracy"]
    new = make_run(tmp_path / "new")  # no metrics yet
    (run,) = compare_runs([new]).runs
    assert (run.steps, run.seconds, run.best_step, run.best, run.parameters) == (None, None, None, {}, None)


@pytest.mark.parametrize(
    ("changes", "report", "same"),
    [
        ({"train": {"lr": 0.1}}, {}, True),
        ({"data": {"bleu_sentences": 3}}, {"test": "c"}, True),
        ({"data": {"dataset": "other"}}, {}, False),
        ({"model": {"target_vocabulary": 10}}, {}, False),
        ({"run": {"kind": "translation"}}, {}, False),
        ({}, {"validation": "c"}, False),
        ({}, {"fingerprint": "b"}, False),
    ],
    ids=str,
)
def test_losses_compare_where_text_and_vocabulary_are_the_same(
    tmp_path: Path, changes: dict, report: dict, same: bool
) -> None:
    """A file may have changed between two runs, and a path that is relative lead to another one."""
    runs = [make_run(tmp_path / "one", RECORDS), make_run(tmp_path / "two", RECORDS, **changes)]
    known = {"fingerprint": "a", "validation": "b"}
    for run, read in zip(runs, (known, known | report), strict=True):
        (run / "data.json").write_text(json.dumps(read))
    assert compare_runs(runs).same_tokens is same


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs must name at least one run folder"):
        compare_runs([])
    with pytest.raises(FileNotFoundError, match=r"nothing is not a run folder: it has no config\.toml"):
        compare_runs([tmp_path / "nothing"])
    folder = make_run(tmp_path / "run", RECORDS, weights=True)
    with pytest.raises(ValueError, match=r"runs names .*run twice"):
        compare_runs([folder, folder / ".." / "run"])
    weights = next(folder.rglob("model.safetensors"))
    for damage in (b"", b"\xff" * 64, weights.read_bytes()[:20]):
        weights.write_bytes(damage)
        with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
            compare_runs([folder])
    shutil.rmtree(folder / "checkpoints")
    for damage in ("[]", "{", '{"validation": 3}'):
        (folder / "data.json").write_text(damage)
        with pytest.raises(ValueError, match=r"data\.json: "):
            compare_runs([folder])
    (folder / "config.toml").write_text("[model\n")
    with pytest.raises(ValueError, match=r"config\.toml: not a TOML file"):
        compare_runs([folder])


def test_different_bleu_signatures_are_reported(tmp_path: Path) -> None:
    one, two = (
        make_run(tmp_path / name, [record("validation", 2, loss=3.0, bleu=11.0, bleu_signature=f"tok:{name}")])
        for name in ("13a", "zh")
    )
    old = make_run(tmp_path / "old", RECORDS)
    assert not compare_runs([one, two]).same_bleu
    assert compare_runs([one, old]).same_bleu  # nothing is known of the older run
    done = fastformer("compare", str(one), str(two), cwd=tmp_path)
    assert "tok:13a" in done.stdout
    assert "The runs have different BLEU signatures: their BLEU does not compare." in done.stdout
