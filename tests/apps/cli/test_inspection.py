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
from tests.apps.cli.test_cli import TRAIN
from tests.support.command_line import fastformer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny trained runs of translation, of pieces and of words; and one that only began."""
    folder = tmp_path_factory.mktemp("inspection")
    for name, options in (("pieces", ""), ("words", "--tokenizer words --decoder-layers 2 --positions learned")):
        done = fastformer(*TRAIN.split(), *options.split(), "--run", name, cwd=folder)
        assert done.returncode == 0, done.stderr
    (folder / "begun").mkdir()
    (folder / "begun" / "config.toml").write_text((folder / "pieces" / "config.toml").read_text())
    return folder


@pytest.mark.parametrize("run", ["pieces", "words"])
def test_the_maps_of_a_sentence_carry_its_tokens_and_its_weights(trained: Path, run: str) -> None:
    translator = load_translator(trained / run)
    found = attend(translator, "twelve thousand one")
    assert found.target == translator.translate(["twelve thousand one"], SearchOptions())[0]
    source, target = translator.source_tokenizer, translator.target_tokenizer
    ids = source.encode("twelve thousand one")
    cross, decoder = found.maps["cross"], found.maps["decoder"]
    assert cross.keys == found.maps["encoder"].queries == source.pieces([*ids, source.eos_id])
    assert (cross.keys[-1], decoder.keys[0], decoder.queries[-1]) == ("<eos>", "<bos>", "<eos>")
    assert decoder.keys[1:] == decoder.queries[:-1] == cross.queries[:-1]
    given = attend(translator, "twelve thousand one", "douze mille un")
    assert given.maps["cross"].queries == target.pieces([*target.encode("douze mille un"), target.eos_id])
    read = torch.tensor([target.bos_id, *target.encode("douze mille un")])
    expected = translator.model.attention_maps(torch.tensor([*ids, source.eos_id]), read)
    assert all(torch.equal(given.maps[kind].weights, expected[kind]) for kind in ("encoder", "decoder", "cross"))
    assert attend(translator, "one", "").maps["cross"].queries == ["<eos>"]


@pytest.mark.parametrize(
    ("options", "begin"),
    [
        ("--run translation --source w1", "w1 -> "),
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
    ("command", "name", "begin"),
    [
        ("history pieces begun words", "p.png", b"\x89PNG"),
        ("history pieces", "p.PNG", b"\x89PNG"),
        ("positions --d-model 7 --length 5", "p.png", b"\x89PNG"),
    ],
)
def test_figures_have_the_format_of_their_name(
    trained: Path, tmp_path: Path, command: str, name: str, begin: bytes
) -> None:
    done = fastformer("plot", *command.split(), "--output", str(tmp_path / name), cwd=trained)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name).read_bytes().startswith(begin)


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


def compare(folder: Path, *runs: str) -> dict[str, list[str]]:
    """The rows of the table that `fastformer compare` prints: {name: a text for each run}."""
    done = fastformer("compare", *runs, cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = [line.strip().rsplit(maxsplit=len(runs)) for line in done.stdout.splitlines()]
    assert lines[0] == list(runs)
    return {name: values for name, *values in lines[1:]}


def test_compare_prints_a_table(trained: Path) -> None:
    rows = compare(trained, "pieces", "words", "begun")
    assert rows["steps"] == ["4", "4", "–"]
    assert rows["data.tokenizer"] == ["bpe", "words", "bpe"]
    for name in ("loss", "perplexity", "bleu"):
        assert float(rows[name][0]) >= 0
    assert any(name.startswith("The runs differ in text or tokens") for name in rows)


def test_compare_shows_the_best_validation_by_the_metric_of_each_run(tmp_path: Path) -> None:
    """Lower is better for losses only; the last validation is shown if none has the metric."""
    best = {"loss": "4", "perplexity": "4", "bleu": "2", "exact": "6", "begun": "–"}
    for name in best:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"[train]\nmetric = '{name}'\nlr = 0.5\n")
        if name != "begun":
            (tmp_path / name / "metrics.jsonl").write_text(RECORDS)
            (tmp_path / name / "data.json").write_text('{"fingerprint": "a", "training": "text"}')
    rows = compare(tmp_path, *best)
    assert rows["best validation at step"] == [*best.values()]
    assert rows["steps"] == ["7", "7", "7", "7", "–"]
    assert rows["bleu_signature"] == ["tok:zh", "tok:zh", "tok:13a", "–", "–"]
    assert rows["text.fingerprint"] == ["a", "a", "a", "a", "–"]
    assert "train.lr" not in rows


@pytest.mark.parametrize(("file", "content"), [("data.json", "[]"), ("data.json", "{"), ("config.toml", "[model\n")])
def test_compare_names_a_damaged_file(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / file).write_text(content)
    done = fastformer("compare", ".", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {file}: ")
