"""Outputs of commands: answers come by batch and in order, and no output replaces an input or a file of a run."""

import math
import os
import select
import subprocess
import sys

import pytest
import torch

from fastformer.apps.cli.console import check_output, input_batches, put_lines
from fastformer.apps.text import WordTokenizer
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.run import DataConfig, TranslationRun
from tests.apps.conftest import LINES
from tests.support.command_line import fastformer, save_run, succeed
from tests.support.python import variables

COMMANDS = {
    "translate": ("translate", "--run", "translation", "--max-length", "4", "--beam", "2"),
    "classify": ("classify", "--run", "classification", "--probabilities"),
    "generate": ("generate", "--run", "language", "--max-new-tokens", "3", "--seed", "1"),
    "score": ("score", "--run", "translation"),
}


def inputs(command, name):
    """The options by which a command reads a file."""
    options = {"score": ("--source", name, "--target", name), "generate": ("--prompt-file", name)}
    return options.get(command, ("--input", name))


@pytest.mark.slow
def test_a_program_at_the_other_end_of_a_pipe_gets_each_answer(runs):
    whole = fastformer(*COMMANDS["translate"], "--input", "lines", cwd=runs).stdout.splitlines()
    command = [sys.executable, "-m", "fastformer", *COMMANDS["translate"], "--batch-size", "1", "--device", "cpu"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(command, cwd=runs, env=variables(OMP_NUM_THREADS="1"), **pipes) as process:
        for line, answer in list(zip(LINES, whole, strict=True))[:3]:
            process.stdin.write(f"{line}\n".encode())
            assert select.select([process.stdout], [], [], 600)[0], "no answer to a line"
            assert process.stdout.readline().decode() == f"{answer}\n"
        assert process.communicate(timeout=600)[0] == b""
    assert process.returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_batches_of_any_size_a_file_arguments_and_standard_input_give_the_same(runs, tmp_path, command):
    (tmp_path / "in").write_text("w1 w2\n\nw3\n" if command != "score" else "w1 w2\nw3\n")
    file, given = inputs(command, str(tmp_path / "in")), ["w1 w2", "", "w3"]
    expected = fastformer(*COMMANDS[command], *file, cwd=runs)
    assert (expected.returncode, expected.stderr) == (0, "")
    one_by_one = fastformer(*COMMANDS[command], *file, "--batch-size", "1", cwd=runs).stdout
    if command == "score":  # numbers of four digits, of sums that were rounded in another order
        numbers = [list(map(float, output.split())) for output in (one_by_one, expected.stdout)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1.5e-4)
    else:
        assert one_by_one == expected.stdout
        assert fastformer(*COMMANDS[command], *given, cwd=runs).stdout == expected.stdout
    if command in ("translate", "classify"):
        assert fastformer(*COMMANDS[command], cwd=runs, stdin="\n".join(given).encode()).stdout == expected.stdout
    done = fastformer(*COMMANDS[command], *file, "--output", str(tmp_path / "out"), cwd=runs)
    assert (done.returncode, done.stdout, (tmp_path / "out").read_text()) == (0, "", expected.stdout)


def test_samples_of_a_file_do_not_depend_on_the_batch_size(runs, tmp_path):
    """A sentence that occurs again in another batch is drawn anew, too."""
    (tmp_path / "in").write_text("w1 w2\n" * 40)
    command = "translate", "--run", "translation", "--sample", "--seed", "1", *inputs("translate", str(tmp_path / "in"))
    outputs = [fastformer(*command, "--batch-size", size, cwd=runs).stdout for size in ("1", "64")]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].splitlines())) > 16


@pytest.mark.parametrize("command", ["translate", "classify", "generate"])
def test_a_wrong_byte_gives_an_error_before_any_answer(runs, tmp_path, command):
    content = "".join(f"{line}\n" for line in LINES).encode() + b"\xff\n"
    (tmp_path / "wrong").write_bytes(content)
    options = (*inputs(command, str(tmp_path / "wrong")), "--batch-size", "1", "--output", str(tmp_path / "out"))
    cases = [(options, b"")] if command == "generate" else [(options, b""), ((), content)]
    for arguments, stdin in cases:
        done = fastformer(*COMMANDS[command], *arguments, cwd=runs, stdin=stdin)
        assert (done.returncode, done.stdout) == (2, "")
        assert f":{len(LINES) + 1}: not valid UTF-8 (byte 0xff)" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["wrong"]


def test_an_interrupted_output_stays_beside_the_earlier_one_and_is_named(tmp_path, caplog):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    out.write_text("earlier\n")
    partial.write_text("of another run\n")

    def lines():
        yield from ("one", "two")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        put_lines(lines(), out)
    assert (out.read_text(), partial.read_text()) == ("earlier\n", "of another run\n")
    assert (tmp_path / "out.2.partial").read_text() == "one\ntwo\n"
    assert f"{tmp_path / 'out.2.partial'} holds what was finished" in caplog.text
    put_lines(iter(["three"]), out)
    assert out.read_text() == "three\n"


def test_a_closed_stream_is_named(monkeypatch, tmp_path):
    """The answers would go nowhere, with exit status 0."""
    monkeypatch.setattr(sys, "stdin", None)  # translate <&-
    with pytest.raises(ValueError, match="standard input is closed: give texts, or --input"):
        input_batches(None, None, None, "texts", 2)
    monkeypatch.setattr(sys, "__stdout__", None)  # translate >&-
    with pytest.raises(ValueError, match="standard output is closed: give --output"):
        check_output(None, run=tmp_path)


@pytest.mark.parametrize("device", ["meta", "mps", "nonsense"])
@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has it")
def test_devices_that_cannot_train_are_named(runs, device):
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used"):
        TranslationRun.check(DataConfig(), {"d_model": 8, "heads": 2}, TrainConfig(steps=1), device)
    done = fastformer("translate", "--run", "translation", "--device", device, "a", cwd=runs)
    message = f"device must be auto, cpu, cuda, cuda:N, mps or xpu, not {device!r}"
    if device == "mps":
        message = "device 'mps' was asked for, but torch sees no MPS devices"
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


@pytest.fixture(scope="module")
def ends_of_lines(tmp_path_factory):
    """Return a folder with a run that translates everything to a word with an end of a line within."""
    folder = tmp_path_factory.mktemp("lines")
    tokenizer = WordTokenizer(["<unk>", "<pad>", "<bos>", "<eos>", "a", "b\r\nc"], splitting="whitespace")
    sizes = {"d_model": 8, "heads": 2, "feed_forward": 8, "encoder_layers": 1, "decoder_layers": 1}
    torch.manual_seed(0)
    model = TranslationModel(TranslationConfig(tokenizer.size, tokenizer.size, output_bias=True, **sizes))
    with torch.no_grad():
        model.output.bias[5] = 50.0
    save_run(folder / "run", model, tokenizer, tokenizer, max_length=9)
    (folder / "source").write_text("a\na a\n")
    return folder


@pytest.mark.parametrize("command", ["translate --input source", "evaluate --source source --target source"])
def test_each_sentence_gives_one_line_in_spite_of_byte_tokens(ends_of_lines, command):
    """One more line, and every later line would stand beside another sentence."""
    options = "--run run --beam 1 --max-length 2 --device cpu --output out"
    succeed(*command.split(), *options.split(), cwd=ends_of_lines)
    assert (ends_of_lines / "out").read_text() == "b c b c\nb c b c\n"


def test_each_sentence_gives_n_best_lines(ends_of_lines):
    """An empty one has a single translation, and of one token there are four: three words and the end."""
    arguments = "translate --run run --beam 6 --n-best 6 --max-length 1 --device cpu --scores"
    scored = fastformer(*arguments.split(), cwd=ends_of_lines, stdin=b"a\n\na a\n")
    assert scored.returncode == 0, scored.stderr
    scores = [float(line.split("\t")[0]) for line in scored.stdout.splitlines()]
    actual = [scores[first : first + 6] for first in (0, 6, 12)]
    assert [sum(x > -math.inf for x in each) for each in actual] == [4, 1, 4]
    assert all(each == sorted(each, reverse=True) for each in actual)


needs_links = pytest.mark.skipif(os.name != "posix", reason="symbolic links")
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


@needs_links
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


@needs_links
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
