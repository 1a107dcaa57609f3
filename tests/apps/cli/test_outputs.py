"""No output replaces its input or a file of a run, and one that cannot be written is refused before the work."""

import os
import sys

import pytest

from fastformer.apps.cli.console import input_batches
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation.run import DataConfig, TranslationRun
from tests.support.command_line import fastformer

pytestmark = pytest.mark.skipif(os.name != "posix", reason="names and links of posix")

OUTPUTS = {
    "translate": "translate --run translation --input {input} --output {output}",
    "score": "score --run translation --source {input} --target {input} --output {output}",
    "evaluate": "evaluate --run translation --source {input} --target {input} --output {output}",
    "generate": "generate --run language --prompt-file {input} --output {output}",
    "classify": "classify --run classification --input {input} --output {output}",
}
WRITES = {
    **OUTPUTS,
    "plot history": "plot history translation --output {output}",
    "plot attention": "plot attention --run translation --source w1 --output {output}",
}


def refused(folder, line, message):
    done = fastformer(*line.split(), cwd=folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_never_replaces_its_input(runs, tmp_path, name):
    text = tmp_path / "text"
    text.write_text("w1 w2\n")
    (tmp_path / "link").symlink_to(text)
    for output in (text, tmp_path / "link"):
        refused(runs, OUTPUTS[name].format(input=text, output=output), "would be replaced")
    assert text.read_text() == "w1 w2\n"


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(runs, monkeypatch, name):
    def read(*arguments, **more):
        raise AssertionError("a model was read for what cannot be written")

    monkeypatch.setattr("fastformer.apps.runs.application.Application.load_weights", read)
    for output, message in (("no/such", "no: no such folder"), ("translation", "is a folder")):
        refused(runs, OUTPUTS[name].format(input="lines", output=output), message)


@pytest.mark.skipif(not os.path.exists("/dev/stdin"), reason="standard input has a name")
def test_an_output_never_replaces_standard_input(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("w1\n")
    before = os.dup(0)
    try:
        with (tmp_path / "text").open(encoding="utf-8") as text:
            os.dup2(text.fileno(), 0)
            monkeypatch.setattr(sys, "stdin", text)
            with pytest.raises(ValueError, match="would be replaced"):
                input_batches(None, None, tmp_path / "text", "texts", 1)
    finally:
        os.dup2(before, 0)
        os.close(before)


@pytest.mark.parametrize("name", WRITES)
def test_an_output_never_replaces_a_file_of_its_run(runs, tmp_path, name):
    run = runs / {"generate": "language", "classify": "classification"}.get(name, "translation")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "run").symlink_to(run)
    weights = next(run.rglob("model.safetensors"))
    for output in (run / "config.toml", run / "tokenizer" / "new.png", tmp_path / "run" / "metrics.csv", weights):
        refused(runs, WRITES[name].format(input="lines", output=output), "would be replaced")
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_an_export_into_the_run_is_refused(runs):
    refused(runs, "export --run translation --to translation/exported --format safetensors", "is in the run folder")
    assert not (runs / "translation" / "exported").exists()


def test_an_output_never_replaces_the_data_set_of_its_run(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for part, count in (("train", 50), ("valid", 5), ("test", 5)):
        for language in ("en", "fr"):
            (folder / f"{part}.{language}").write_text("".join(f"{i} the fox jumps\n" for i in range(count)))
    data = DataConfig(dataset=str(folder), tokenizer="words", bleu_sentences=0)
    model = {"d_model": 8, "heads": 1, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 8}
    TranslationRun.create(tmp_path / "run", data, model, TrainConfig(steps=2)).fit(show=False)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for output in (folder / "test.fr", folder / "train.en"):
        refused(tmp_path, f"evaluate --run run --beam 1 --output {output}", "would be replaced")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    for written in ("evaluate --run run --beam 1 --output set/new", "plot history run --output run/history.png"):
        assert fastformer(*written.split(), cwd=tmp_path).returncode == 0
