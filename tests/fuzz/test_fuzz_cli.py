"""Generated bad input for the command line: arguments, files, standard input and damaged run folders.

Whatever comes in, a command ends with exit code 0, or with 2 and one line (a usage message where no such option or
value exists), within the time limit, and the file of --output is whole or the earlier one. `--fuzz 10000` makes 10,000
inputs a test; see `fuzz`. What once failed stays below, as a case by itself.
"""

import codecs
import gzip
import itertools
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fuzz import fuzz

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

import typer.main

from fastformer.apps.cli.console import app
from fastformer.apps.text import read_lines
from tests.apps.cli.test_cli import TRAIN
from tests.apps.cli.test_cli_language import TEXT, TRAIN_LM
from tests.fuzz.fuzz_commands import TINY, run
from tests.support.command_line import fastformer

# A glyph that a font lacks, a model that shrinks: to a user no error.
pytestmark = pytest.mark.filterwarnings("ignore")
EARLIER = b"earlier\n"
# What stands first, so that a command gets somewhere; what is drawn follows and wins.
COMMANDS = {
    "translate": "--run tr seven" + TINY,
    "evaluate": "--run tr" + TINY,
    "generate": "--run lm --max-new-tokens 3 --device cpu the",
    "export": "--run lm --format safetensors --to exported",
    "compare": "tr lm",
    "info": "",
    "data": "multi30k --from .",
    "plot history": "tr",
    "plot positions": "--d-model 8 --length 5",
    "plot attention": "--run lm --text the --device cpu",
    "train": " ".join(TRAIN.split()[1:]) + " --steps 1 --run new",
    "train lm": " ".join(TRAIN_LM.split()[2:]) + " --steps 1 --run new",
}
# A model with 10^18 layers, or a run of as many steps, is what was asked for.
ENDLESS = {"steps", "epochs", "minutes", "layers", "encoder_layers", "decoder_layers", "train_size", "size", "threads"}
NUMBERS = (
    "-1",
    "0",
    "1",
    "2",
    "7",
    "1" + "0" * 15,
    "9" * 30,
    "-" + "9" * 30,
    "1.5",
    "1e400",
    "-1e400",
    "nan",
    "inf",
    "0x10",
)
WORDS = (
    "",
    " ",
    "x",
    "--",
    "-",
    "é",
    "\udcff",
    "a\nb",
    "\x1b[31m",
    "[/x]",
    "%s",
    "\u2028",
    ".",
    "..",
    "/",
    "/dev/null",
    "y" * 3000,
)
FILES = ("tr", "lm", "text.txt", "bad.txt", "empty", "no/such", "tr/config.toml", "new")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny run of each kind, and a few files."""
    folder = tmp_path_factory.mktemp("fuzz_cli")
    (folder / "text.txt").write_text("\n".join(TEXT) + "\n")
    (folder / "bad.txt").write_bytes(b"fine\n\xff\xfe\n")
    (folder / "empty").touch()
    for command, name in ((TRAIN, "tr"), (TRAIN_LM, "lm")):
        done = fastformer(*command.split(), "--run", name, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def options() -> dict[str, list[Any]]:
    """The parameters of every command, as typer knows them."""
    found = {}
    for name in COMMANDS:
        command: Any = typer.main.get_command(app)
        for part in name.split():
            command = command.commands[part]
        found[name] = [each for each in command.params if not getattr(each, "is_eager", False)]
    return found


def drawn_options(random: Random, parameters: list[Any]) -> list[str]:
    """Up to three options with values that may or may not fit."""
    arguments: list[str] = []
    for parameter in random.choices(parameters, k=random.randint(0, 3)):
        numbers = [x for x in NUMBERS if len(x) < 15] if parameter.name in ENDLESS else NUMBERS
        pool = random.choice((numbers, numbers, WORDS, FILES))
        name = random.choice(parameter.opts)
        if not name.startswith("-"):
            arguments.append(random.choice((*WORDS, *FILES)))
        elif getattr(parameter, "is_flag", False):
            arguments.append(random.choice([*parameter.opts, *parameter.secondary_opts]))
        else:
            arguments += [name, *(random.choice(pool) for _ in range(parameter.nargs))]
    if random.random() < 0.05:
        arguments.insert(random.randrange(len(arguments) + 1), random.choice(("--no-such", "-x", "stray")))
    return arguments


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def restore(folder: Path, files: dict[str, bytes]) -> set[str]:
    """Put a folder back as it was, and say which files were not."""
    now = content(folder)
    changed = {name for name in {*now, *files} if now.get(name) != files.get(name)}
    for name in changed:
        path = folder / name
        if name in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[name])
        else:
            path.unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    return changed


@pytest.fixture
def numbers(request: pytest.FixtureRequest) -> range:
    """The numbers of the inputs; a command takes as long as a hundred files."""
    return range(request.config.getoption("--fuzz") // 10)


@pytest.mark.slow
def test_arguments(home: Path, numbers: range) -> None:
    """Options of every command with values of a wrong type, out of range, enormous, or not text.

    No file changes but what --output, --to and --plot name.
    """
    parameters, before = options(), content(home)
    done = 0
    for number in numbers:
        random = Random(number)
        name = random.choice(list(COMMANDS))
        arguments = [*name.split(), *COMMANDS[name].split(), *drawn_options(random, parameters[name])]
        result = run(arguments, home, number)
        done += result.returncode == 0
        pairs = list(itertools.pairwise(arguments))
        named = {x for option, x in pairs if option in ("--output", "--to", "--plot") and result.returncode == 0}
        named |= {x for option, x in pairs if option == "--run" and name.startswith("train")}
        allowed = {os.path.normpath(x) for x in named} | {f"{x}.png" for x in ("history", "positions", "attention")}
        for changed in restore(home, before):
            assert any(changed == x or changed.startswith(f"{x}/") for x in allowed), (
                f"input {number}: {arguments}: {changed}"
            )
    assert done > len(numbers) / 10


@pytest.mark.slow
def test_text(home: Path, numbers: range) -> None:
    """Files and standard input in any encoding, any line ends: a line out for each line in, or one line why not."""
    before = content(home)
    done = 0
    for number in numbers:
        random = Random(number)
        content_ = [fuzz.encoded(random, fuzz.text(random)) for _ in range(2)]
        if random.random() < 0.5:  # two files with as many lines
            content_[1] = content_[0]
        if random.random() < 0.3:
            content_[0] = gzip.compress(content_[0], mtime=0)
        if random.random() < 0.3:
            content_[0] = fuzz.damaged(random, content_[0])
        for name, data in zip(("one", "two"), content_, strict=True):
            (home / name).write_bytes(data)
        (home / "out").write_bytes(EARLIER)
        command = random.choice(
            (
                "translate --run tr --input one --output out" + TINY,
                "translate --run tr --output out" + TINY,
                "evaluate --run tr --source one --target two --output out" + TINY,
                "evaluate --run lm --source one",
                "generate --run lm --max-new-tokens 2 --prompt-file one --output out --device cpu",
                COMMANDS["train"].join(
                    ("train ", " --train-source one --train-target two --valid-size 1 --test-size 1")
                ),
                COMMANDS["train lm"].join(("train lm ", " --train-text one")),
            )
        )
        stdin = content_[0] if "--input" not in command else b""
        result = run(command.split(), home, number, stdin)
        done += result.returncode == 0
        out = (home / "out").read_bytes()
        if result.returncode == 2:
            assert out == EARLIER, f"input {number}: {command}"
        elif command.startswith(("translate", "generate")):
            given = read_lines(home / "one") if content_[0].removeprefix(codecs.BOM_UTF8) else []
            assert out.count(b"\n") == len(given), f"input {number}: {command}"
        restore(home, before)
    assert done > len(numbers) / 10


@pytest.mark.slow
def test_damaged_runs(home: Path, numbers: range) -> None:
    """One file of a run is damaged, empty, a folder, or gone."""
    before = content(home)
    done = 0
    for number in numbers:
        random = Random(number)
        name = random.choice([x for x in before if x.startswith(("tr/", "lm/")) and not x.endswith((".png", ".csv"))])
        data = before[name]
        path = home / name
        drawn = random.random()
        path.unlink()
        if drawn < 0.05:
            path.mkdir()
        elif drawn < 0.8:
            path.write_bytes(fuzz.damaged(random, data))
        elif drawn < 0.95:
            path.write_bytes(random.choice((b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"best": 3}')))
        (home / "out").write_bytes(EARLIER)
        kind = name[:2]
        command = random.choice(
            (
                *("compare tr lm", f"info --run {kind}", f"plot history {kind} --output out.png"),
                f"translate --run tr --output out --checkpoint {random.choice(('best', 'last'))} seven" + TINY,
                "generate --run lm --output out --max-new-tokens 2 --device cpu the cat",
                f"evaluate --run {kind} --device cpu",
                f"export --run {kind} --format safetensors --to exported",
                {"tr": "train", "lm": "train lm"}[kind] + f" --run {kind} --resume --steps 5 --device cpu",
            )
        )
        result = run(command.split(), home, number)
        done += result.returncode == 0
        assert result.returncode == 0 or (home / "out").read_bytes() == EARLIER, f"input {number}: {command}"
        if path.is_dir():
            shutil.rmtree(path)
        restore(home, before)
    assert done > len(numbers) / 10


def test_lines_of_standard_input_end_where_those_of_files_do(home: Path) -> None:
    """U+2028, U+0085 and form feeds stand inside sentences; a byte order mark is no word, a NUL no text."""
    data = "\ufeffone\u2028two\x85three\x0cfour\r\nfive\n".encode()
    done = run(["translate", "--run", "tr", *TINY.split()], home, 0, data)
    assert (done.returncode, done.stdout.count("\n")) == (0, 2)
    done = run(["translate", "--run", "tr", *TINY.split()], home, 0, "one".encode("utf-16-le"))
    assert "standard input:1: a NUL character" in done.stderr


def test_an_argument_that_is_not_utf8_is_refused_before_anything_is_done(home: Path) -> None:
    done = run(["plot", "history", "tr", "--output", "a\udcff.png"], home, 0)
    assert (
        done.stderr == "error: argument 'a\\udcff.png': \\udcff at character 2 is not text, and UTF-8 cannot hold it\n"
    )
    assert not list(home.glob("a*.png"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("lm/config.toml", b"", "[model] has no source_vocabulary, target_vocabulary"),
        ("tr/data.json", b"[]", "data.json: damaged"),
    ],
)
def test_a_run_folder_without_what_it_needs(home: Path, name: str, data: bytes, message: str) -> None:
    before = content(home)
    (home / name).write_bytes(data)
    try:
        done = run(
            ["info", "--run", "lm"] if data == b"" else ["train", "--run", "tr", "--resume", "--steps", "5"], home, 0
        )
    finally:
        restore(home, before)
    assert message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-extra", "9" * 30], ""),
        (["--max-length", "9" * 30], ""),
        (["--max-ratio", "1e300", "--max-length", "2"], ""),
        (
            ["--length-penalty", "1" + "0" * 15],
            "length_penalty must be at least -30 and at most 30, not 1000000000000000.0",
        ),
    ],
)
def test_limits_of_search_that_no_tensor_holds(home: Path, arguments: list[str], message: str) -> None:
    done = run(["translate", "--run", "tr", "seven", *TINY.split(), *arguments], home, 0)
    assert (done.returncode, done.stderr) == ((2, f"error: {message}\n") if message else (0, ""))
    expected = run(["translate", "--run", "tr", "seven", *TINY.split()], home, 0)
    assert message or arguments[0] != "--max-extra" or done.stdout == expected.stdout


def test_a_size_that_no_tensor_has(home: Path) -> None:
    before = content(home)
    done = run(["train", *COMMANDS["train"].split(), "--max-positions", "9" * 30], home, 0)
    restore(home, before)
    assert (done.returncode, done.stdout.count("Traceback")) == (2, 0)


def test_a_device_is_no_file_to_replace(home: Path) -> None:
    done = run(["evaluate", "--run", "tr", *TINY.split(), "--output", "/dev/null"], home, 0)
    assert done.returncode == 0
    assert Path("/dev/null").is_char_device()


def test_a_damaged_index_of_checkpoints_removes_nothing_else(home: Path) -> None:
    before = content(home)
    (home / "precious").mkdir()
    (home / "precious" / "thesis.txt").write_text("precious")
    (home / "tr" / "checkpoints" / "index.json").write_text('{"kept": [], "removed": ["../../precious"], "best": 3}')
    try:
        assert run(["train", "--run", "tr", "--resume", "--steps", "5", "--device", "cpu"], home, 0).returncode == 0
        assert (home / "precious" / "thesis.txt").read_text() == "precious"
    finally:
        restore(home, before)
