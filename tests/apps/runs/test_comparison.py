"""Runs side by side: what their folders say, whatever they train, complete or not."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tomli_w", reason="run folders need the extra `apps`")

from fastformer.apps.runs.comparison import differing_settings, summarise
from fastformer.apps.runs.toml import save_toml
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


def make_run(folder: Path, records: list[dict[str, Any]] | None = None, **changes: dict[str, Any]) -> Path:
    """A run folder with these metrics; `changes` are settings by section."""
    folder.mkdir(parents=True)
    names = SETTINGS.keys() | changes.keys()
    save_toml(folder / "config.toml", {name: SETTINGS.get(name, {}) | changes.get(name, {}) for name in names})
    if records is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


@pytest.mark.parametrize(
    ("metric", "step"), [("loss", 4), ("perplexity", 4), ("bleu", 2), ("exact", 6)], ids=lambda x: str(x)
)
def test_the_best_validation_is_that_by_the_runs_own_metric(tmp_path: Path, metric: str, step: int) -> None:
    """Lower is better for losses alone; of a metric that no validation has, the last one counts."""
    run = summarise(make_run(tmp_path / "run", RECORDS, train={"metric": metric}))
    assert (run.last["step"], run.best["step"]) == (7, step)
    assert summarise(make_run(tmp_path / "new")).best == {}


def test_settings_and_texts_that_differ(tmp_path: Path) -> None:
    """A file may have changed between two runs: the checksums of the text show that."""
    one = make_run(tmp_path / "one", RECORDS)
    two = make_run(tmp_path / "two", RECORDS, model={"heads": 4, "bias": True})
    for run, fingerprint in ((one, "a"), (two, "b")):
        (run / "data.json").write_text(json.dumps({"fingerprint": fingerprint, "validation": "c", "training": "text"}))
    expected = {"model.heads": [2, 4], "model.bias": [None, True], "text.fingerprint": ["a", "b"]}
    assert differing_settings([summarise(one), summarise(two)]) == expected


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing is not a run folder: it has no config\.toml"):
        summarise(tmp_path / "nothing")
    folder = make_run(tmp_path / "run", RECORDS)
    for damage in ("[]", "{"):
        (folder / "data.json").write_text(damage)
        with pytest.raises(ValueError, match=r"data\.json: "):
            summarise(folder)
    (folder / "config.toml").write_text("[model\n")
    with pytest.raises(ValueError, match=r"config\.toml: not a TOML file"):
        summarise(folder)


def test_different_bleu_signatures_are_shown(tmp_path: Path) -> None:
    for name in ("13a", "zh"):
        make_run(tmp_path / name, [record("validation", 2, loss=3.0, bleu=11.0, bleu_signature=f"tok:{name}")])
    done = fastformer("compare", "13a", "zh", cwd=tmp_path)
    assert {"tok:13a", "tok:zh"} <= set(done.stdout.split()), done.stderr
