"""`fastformer plot` and `fastformer compare` as a person uses them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra `apps`")
pytest.importorskip("matplotlib", reason="plots need matplotlib")

from fastformer.apps.translation.run import load_translator
from fastformer.apps.translation.search import SearchOptions
from fastformer.apps.translation.translator import attend
from tests.support.command_line import fastformer


def record(kind: str, step: int, **values: Any) -> str:
    return json.dumps({"kind": kind, "step": step, "epoch": 1, "seconds": step / 2, **values}) + "\n"


RECORDS = "".join(
    [
        record("validation", 1, loss=float("nan"), perplexity=float("nan"), bleu=float("nan")),
        record("train", 1, loss=9.0),
        record("validation", 2, loss=3.0, perplexity=20.0, bleu=11.0, bleu_signature="tok:13a"),
        record("validation", 4, loss=2.0, perplexity=7.4, bleu=10.0, bleu_signature="tok:zh"),
        record("validation", 6, loss=2.0, perplexity=7.4, bleu=9.0),
        record("train", 7, loss=1.0),
    ]
)
BEST = {"loss": "4", "perplexity": "4", "bleu": "2", "exact": "6", "begun": "–"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run for each metric of `BEST`; `begun` has no records."""
    for name in BEST:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"[train]\nmetric = '{name}'\nlr = 0.5\n")
        if name != "begun":
            (tmp_path / name / "metrics.jsonl").write_text(RECORDS)
            data = {"fingerprint": name, "validation": "equal", "training": name}
            (tmp_path / name / "data.json").write_text(json.dumps(data))
    return tmp_path


def test_compare_prints_the_best_validation_by_the_metric_of_each_run_and_the_settings_that_differ(
    folder: Path,
) -> None:
    """Lower is better for losses only; the last validation is shown if none has the metric."""
    done = fastformer("compare", *BEST, cwd=folder)
    assert done.returncode == 0, done.stderr
    *printed, remark = done.stdout.splitlines()
    assert remark == "The runs differ in text or tokens: their losses and perplexities do not compare."
    names, *lines = [line.strip().rsplit(maxsplit=len(BEST)) for line in printed]
    assert names == list(BEST)
    rows = {name: values for name, *values in lines}
    assert rows["best validation at step"] == [*BEST.values()]
    assert rows["steps"] == ["7", "7", "7", "7", "–"]
    assert rows["bleu_signature"] == ["tok:zh", "tok:zh", "tok:13a", "–", "–"]
    assert rows["train.metric"] == names
    assert rows["text.fingerprint"] == [name[:8] for name in names[:-1]] + ["–"]
    assert not {"train.lr", "text.training"} & rows.keys()


def test_the_maps_of_a_sentence_carry_its_tokens_and_its_weights(runs: Path) -> None:
    translator = load_translator(runs / "translation")
    actual = attend(translator, "w1 w2")
    assert actual.target == translator.translate(["w1 w2"], SearchOptions())[0]
    source, target = translator.source_tokenizer, translator.target_tokenizer
    ids = [*source.encode("w1 w2"), source.eos_id]
    cross, decoder = actual.maps["cross"], actual.maps["decoder"]
    assert cross.keys == actual.maps["encoder"].queries == source.pieces(ids)
    assert (cross.keys[-1], decoder.keys[0], decoder.queries[-1]) == ("<eos>", "<bos>", "<eos>")
    assert decoder.keys[1:] == decoder.queries[:-1] == cross.queries[:-1]
    attended = attend(translator, "w1 w2", "w3 w4 w5")
    assert attended.maps["cross"].queries == ["w3", "w4", "w5", "<eos>"]
    read = torch.tensor([target.bos_id, *target.encode("w3 w4 w5")])
    expected = translator.model.attention_maps(torch.tensor(ids), read)
    assert all(torch.equal(attended.maps[kind].weights, expected[kind]) for kind in ("encoder", "decoder", "cross"))
    assert attend(translator, "w1", "").maps["cross"].queries == ["<eos>"]


@pytest.mark.parametrize(
    ("options", "begin"),
    [
        ("--run translation --source w1 --kind encoder --layer 1 --head 2", "w1 -> "),
        ("--run translation --source w1 --layer all --head mean --target w2", "w1 -> w2"),
        ("--run language --text w1 --layer all", "wrote "),
        ("--run classification --text w1 --head mean", ""),
    ],
)
def test_plot_attention_writes_a_picture(runs: Path, tmp_path: Path, options: str, begin: str) -> None:
    done = fastformer("plot", "attention", *options.split(), "--output", str(tmp_path / "new" / "a.png"), cwd=runs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(begin)
    assert done.stdout.endswith(f"wrote {tmp_path / 'new' / 'a.png'}\n")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("command", "name"), [("history loss begun bleu", "p.png"), ("positions --d-model 7 --length 5", "p.PNG")]
)
def test_figures_are_png_files(folder: Path, command: str, name: str) -> None:
    done = fastformer("plot", *command.split(), "--output", name, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / name).read_bytes().startswith(b"\x89PNG")
