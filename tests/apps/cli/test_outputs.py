"""No output replaces its input or a file of a run, and one that cannot be written is refused before the work."""

import os
import subprocess
import sys

import pytest

from fastformer.apps.train import TrainConfig
from fastformer.apps.translation.run import DataConfig, TranslationRun
from tests.apps.runs.test_folders import ENVIRONMENT, train

pytestmark = pytest.mark.skipif(os.name != "posix", reason="names and links of posix")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A translation run, and a language run, with their text."""
    folder = tmp_path_factory.mktemp("runs")
    lines = "".join(f"{i} the quick brown fox {i * 7 % 11} jumps over {i * 3 % 5}\n" for i in range(200))
    for name in ("source.txt", "target.txt"):
        (folder / name).write_text(lines)
    source, target = folder / "source.txt", folder / "target.txt"
    model = {"d_model": 8, "heads": 1, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 8}
    data = DataConfig(
        dataset="files", train_source=source, train_target=target, valid_source=source, valid_target=target,
        test_source=source, test_target=target,
        tokenizer="words", bleu_sentences=0,
    )  # fmt: skip
    TranslationRun.create(folder / "translation", data, model, TrainConfig(steps=2)).fit(show=False)
    assert train(folder / "language", source, "--steps", "2").returncode == 0
    return folder


@pytest.fixture
def invoke(runs, monkeypatch):
    from typer.testing import CliRunner

    from fastformer.apps.cli.console import app

    monkeypatch.chdir(runs)

    def run(line):
        return CliRunner().invoke(app, line.split())

    return run


SIZES = {"train": 50, "valid": 5, "test": 5}
OUTPUTS = {
    "translate": "translate --run translation --input source.txt --output {}",
    "score": "score --run translation --source source.txt --target target.txt --output {}",
    "evaluate": "evaluate --run translation --source source.txt --target target.txt --output {}",
    "evaluate the run's own": "evaluate --run translation --split valid --output {}",
    "generate": "generate --run language --prompt-file source.txt --output {}",
}


@pytest.mark.parametrize("way", ["same", "symbolic"])
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.slow
def test_an_output_never_replaces_its_input(runs, invoke, tmp_path, name, way):
    before = (runs / "source.txt").read_bytes()
    output = runs / "source.txt" if way == "same" else tmp_path / "output"
    if way == "symbolic":
        output.symlink_to(runs / "source.txt")
    ended = invoke(OUTPUTS[name].format(output))
    assert "would be replaced" in str(ended.exception)
    assert (runs / "source.txt").read_bytes() == before


@pytest.mark.parametrize(("output", "message"), [("no/such", "no: no such folder"), ("translation", "is a folder")])
@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(runs, invoke, monkeypatch, name, output, message):
    def read(*arguments, **more):
        raise AssertionError("a model was read for what cannot be written")

    monkeypatch.setattr("fastformer.apps.runs.application.Application.load_weights", read)
    ended = invoke(OUTPUTS[name].format(output))
    assert isinstance(ended.exception, OSError), ended.exception
    assert message in str(ended.exception)


@pytest.mark.skipif(not os.path.exists("/dev/stdin"), reason="standard input has a name")
def test_an_output_never_replaces_standard_input(runs):
    before = (runs / "source.txt").read_bytes()
    line = ["translate", "--run", "translation", "--output", "source.txt"]
    with (runs / "source.txt").open("rb") as text:
        ended = subprocess.run(
            [sys.executable, "-m", "fastformer", *line],
            stdin=text,
            cwd=runs,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
        )
    assert (ended.returncode, (runs / "source.txt").read_bytes()) == (2, before)
    assert "would be replaced" in ended.stderr


WRITES = {
    **{name: line for name, line in OUTPUTS.items() if name != "evaluate the run's own"},
    "plot history": "plot history translation --output {}",
    "plot attention": "plot attention --run translation --source the --output {}",
}


@pytest.mark.parametrize("name", WRITES)
def test_an_output_never_replaces_a_file_of_its_run(runs, invoke, tmp_path, name):
    run = runs / ("language" if name == "generate" else "translation")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "run").symlink_to(run)
    for output in (
        run / "config.toml",
        run / "tokenizer" / "new.png",
        tmp_path / "run" / "metrics.csv",
        next(run.rglob("model.safetensors")),
    ):
        ended = invoke(WRITES[name].format(output))
        assert "would be replaced" in str(ended.exception), output
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_an_output_beside_the_files_of_a_run_is_written(runs, invoke):
    for name in ("history.png", "mine.png"):
        ended = invoke(f"plot history translation --output translation/{name}")
        assert ended.exit_code == 0, ended.exception
        (runs / "translation" / name).unlink()


def test_an_export_into_the_run_is_refused(runs, invoke):
    ended = invoke("export --run translation --to translation/exported --format safetensors")
    assert "is in the run folder" in str(ended.exception)
    assert not (runs / "translation" / "exported").exists()


def test_an_output_never_replaces_the_data_set_of_its_run(invoke, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    counts = {f"{part}.{language}": count for part, count in SIZES.items() for language in ("en", "fr")}
    for name, count in counts.items():
        (folder / name).write_text("".join(f"{i} the fox jumps\n" for i in range(count)))
    data = DataConfig(dataset=str(folder), tokenizer="words", bleu_sentences=0)
    model = {"d_model": 8, "heads": 1, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 8}
    TranslationRun.create(tmp_path / "run", data, model, TrainConfig(steps=2)).fit(show=False)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for output in (folder / "test.fr", folder / "train.en"):
        ended = invoke(f"evaluate --run {tmp_path / 'run'} --beam 1 --output {output}")
        assert "would be replaced" in str(ended.exception), output
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert invoke(f"evaluate --run {tmp_path / 'run'} --beam 1 --output {folder / 'new'}").exit_code == 0
