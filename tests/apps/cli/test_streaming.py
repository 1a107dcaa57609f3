"""Commands that read lines answer by batch and in order, through pipes too, and keep what was finished."""

import os
import select
import subprocess
import sys

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.classification.model import ClassifierConfig, SequenceClassifier
from fastformer.apps.cli.console import input_batches, put_lines
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.text import TextError, WordTokenizer
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.run import DataConfig, TranslationRun
from tests.apps.runs.test_folders import ENVIRONMENT
from tests.support.command_line import fastformer
from tests.support.run_folders import save_run

LINES = [" ".join(f"w{(i * k) % 7}" for k in range(1, 2 + i % 5)) for i in range(40)]
WORDS = ("--max-length", "4", "--beam", "2")
COMMANDS = {
    "translate": ("translate", "--run", "translation", *WORDS),
    "classify": ("classify", "--run", "classifier", "--probabilities"),
    "generate": ("generate", "--run", "language", "--max-new-tokens", "3", "--seed", "1"),
    "score": ("score", "--run", "translation"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of each kind with random weights, and a file of lines."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = WordTokenizer.from_lines(LINES, splitting="whitespace")
    sizes = {"d_model": 8, "heads": 2, "feed_forward": 8}
    torch.manual_seed(0)
    translation = TranslationConfig(tokenizer.size, tokenizer.size, encoder_layers=1, decoder_layers=1, **sizes)
    language = LanguageConfig(tokenizer.size, layers=1, **sizes)
    classifier = ClassifierConfig(tokenizer.size, classes=3, layers=1, **sizes)
    save_run(folder / "translation", TranslationModel(translation), tokenizer, tokenizer, max_length=9)
    save_run(folder / "language", LanguageModel(language), tokenizer, context=9)
    save_run(folder / "classifier", SequenceClassifier(classifier), tokenizer, labels=("x", "y", "z"), max_length=9)
    (folder / "lines").write_text("".join(f"{line}\n" for line in LINES))
    return folder


def inputs(command, *names):
    """The options by which a command reads these files."""
    options = {"translate": ["--input"], "classify": ["--input"], "generate": ["--prompt-file"]}
    return [
        each for pair in zip(options.get(command, ["--source", "--target"]), names * 2, strict=False) for each in pair
    ]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="names of open pipes")
@pytest.mark.parametrize("command", ["translate", "classify", "generate"])
def test_a_program_at_the_other_end_of_a_pipe_gets_each_answer(runs, command):
    whole = fastformer(*COMMANDS[command], *inputs(command, "lines"), cwd=runs).stdout.splitlines()
    reader, writer = os.pipe()
    given = [] if command == "translate" else inputs(command, f"/dev/fd/{reader}")  # translate reads standard input
    process = subprocess.Popen(
        [sys.executable, "-m", "fastformer", *COMMANDS[command], *given, "--batch-size", "1", "--device", "cpu"],
        stdin=reader, stdout=subprocess.PIPE, pass_fds=[reader], cwd=runs, env=ENVIRONMENT,
        bufsize=0,
    )  # fmt: skip
    assert process.stdout is not None
    for line, answer in list(zip(LINES, whole, strict=True))[:3]:
        os.write(writer, f"{line}\n".encode())
        assert select.select([process.stdout], [], [], 600)[0], "no answer to a line"
        assert process.stdout.readline().decode() == f"{answer}\n"
    os.close(reader), os.close(writer)
    assert process.communicate(timeout=600)[0] == b""
    assert process.returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_in_batches_gives_what_it_gives_at_once(runs, command):
    outputs = {
        size: fastformer(*COMMANDS[command], *inputs(command, "lines"), "--batch-size", size, cwd=runs)
        for size in ("1", "3", "64")
    }
    assert {done.returncode for done in outputs.values()} == {0}
    words = {size: done.stdout.split() for size, done in outputs.items()}
    for size in ("1", "3"):
        if command == "score":  # numbers of four digits, of sums that were rounded in another order
            assert list(map(float, words[size])) == pytest.approx(list(map(float, words["64"])), abs=1.5e-4)
        else:
            assert words[size] == words["64"]
    assert len(outputs["1"].stdout.splitlines()) == len(LINES)


@pytest.mark.parametrize("command", ["translate", "classify", "generate"])
def test_arguments_a_file_and_standard_input_give_the_same(runs, tmp_path, command):
    (tmp_path / "in").write_text("w1 w2\n\nw3\n")
    given = ["w1 w2", "", "w3"]
    expected = fastformer(*COMMANDS[command], *inputs(command, str(tmp_path / "in")), cwd=runs)
    assert expected.returncode == 0, expected.stderr
    assert len(expected.stdout.splitlines()) == 3
    assert fastformer(*COMMANDS[command], *given, cwd=runs).stdout == expected.stdout
    if command != "generate":
        by_stdin = fastformer(*COMMANDS[command], cwd=runs, stdin="\n".join(given).encode())
        assert by_stdin.stdout == expected.stdout
    done = fastformer(
        *COMMANDS[command], *inputs(command, str(tmp_path / "in")), "--output", str(tmp_path / "out"), cwd=runs
    )
    assert (done.returncode, done.stdout, (tmp_path / "out").read_text()) == (0, "", expected.stdout)


@pytest.mark.parametrize("command", ["translate", "classify", "generate"])
def test_a_file_with_a_wrong_byte_gives_an_error_before_any_answer(runs, tmp_path, command):
    (tmp_path / "wrong").write_bytes("".join(f"{line}\n" for line in LINES).encode() + b"\xff\n")
    options = (*inputs(command, tmp_path / "wrong"), "--batch-size", "1", "--output", tmp_path / "out")
    done = fastformer(*COMMANDS[command], *map(str, options), cwd=runs)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"wrong:{len(LINES) + 1}: not valid UTF-8" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["wrong"]


def test_lines_of_a_file_are_read_several_batches_ahead(tmp_path):
    (tmp_path / "lines").write_text("a\nb\nc\nd\ne\n")
    given = input_batches(None, tmp_path / "lines", tmp_path / "out", "texts", 2, ahead=2)
    assert list(given) == [["a", "b", "c", "d"], ["e"]]
    (tmp_path / "lines").write_text("")
    with pytest.raises(TextError, match="the file is empty"):
        input_batches(None, tmp_path / "lines", tmp_path / "out", "texts", 2)


def test_an_interrupted_output_stays_beside_the_earlier_one_and_is_named(tmp_path, caplog):
    out = tmp_path / "out"
    out.write_text("earlier\n")
    (tmp_path / "out.partial").write_text("of another run\n")

    def lines():
        yield "one"
        assert (tmp_path / "out.2.partial").read_text() == "one\n"  # as soon as it is there
        yield "two"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        put_lines(lines(), out)
    assert out.read_text() == "earlier\n"
    assert (tmp_path / "out.partial").read_text() == "of another run\n"
    assert (tmp_path / "out.2.partial").read_text() == "one\ntwo\n"
    assert f"{tmp_path / 'out.2.partial'} holds what was finished" in caplog.text
    put_lines(iter(["three"]), out)
    assert out.read_text() == "three\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.2.partial", "out.partial"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("translate --run translation <&-", "standard input is closed: give sentences, or --input"),
        ("translate --run translation a >&-", "standard output is closed: give --output"),
        ("translate --run translation --input lines >&-", "standard output is closed: give --output"),
        ("generate --run language a >&-", "standard output is closed: give --output"),
    ],
)
def test_a_closed_stream_is_named(runs, words, message):
    """The answers would go nowhere, with exit status 0."""
    command = f"exec {sys.executable} -m fastformer {words.replace(' --run', ' --device cpu --run')}"
    done = subprocess.run(
        command, shell=True, stderr=subprocess.PIPE, text=True, timeout=600, cwd=runs, env=ENVIRONMENT
    )
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


@pytest.mark.parametrize("device", ["meta", "mps", "xla", "vulkan", "privateuseone", "nonsense"])
@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has it")
def test_devices_that_cannot_train_are_named(runs, device):
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used"):
        TranslationRun.check(DataConfig(), {"d_model": 8, "heads": 2}, TrainConfig(steps=1), device)
    done = fastformer("translate", "--run", "translation", "--device", device, "a", cwd=runs)
    message = f"device must be auto, cpu, cuda, cuda:N, mps or xpu, not {device!r}"
    if device == "mps":
        message = "device 'mps' was asked for, but torch sees no MPS devices"
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")
