"""Generated bad input for the command line: arguments, files, standard input and damaged run folders.

Whatever comes in, a command ends with exit code 0, or with 2 and one line of error (a usage message where no such
option or value exists), within limits of time and memory. Nothing changes but what the command names, and a refused
command loses nothing.
"""

import gzip
import json
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import typer.main

from fastformer.apps.cli.console import app
from fastformer.apps.text import read_lines
from fastformer.apps.train import read_weights, write_weights
from fastformer.apps.train.checkpoint import WEIGHTS
from tests.fuzz.conftest import TOML_VALUES, Explore, chance, changed_json, damaged, encoded, limits, text
from tests.support.command_line import Done, fastformer, succeed

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
SHARE = 1 / 6  # of the inputs of other tests: a command takes as long as a hundred files
EARLIER = b"earlier\n"
_SIZES = "--d-model 8 --heads 2 --feed-forward 8 --tokenizer words --threads 1 --device cpu --validate-every 1"
_PAIRS = " ".join(f"--{part}-{side} text.txt" for part in ("train", "valid", "test") for side in ("source", "target"))
# In a folder with text.txt and labels.tsv; these runs have two checkpoints of 20 KB each.
TRAIN = {
    "tr": f"train {_PAIRS} --bleu-sentences 0 --encoder-layers 1 --decoder-layers 1 --batch-tokens 64 {_SIZES}",
    "lm": f"train lm --train-text text.txt --held-out 0.2 --layers 1 --context 8 --batch-tokens 64 {_SIZES}",
    "cl": f"train classify --train-text labels.tsv --held-out 0.2 --layers 1 --batch-sentences 8 {_SIZES}",
}
# What stands first, so that a command gets somewhere; what is drawn follows and wins.
COMMANDS = {
    "translate": "--run tr --max-length 4 --beam 2 --device cpu seven",
    "evaluate": "--run tr --max-length 4 --beam 2 --device cpu",
    "generate": "--run lm --max-new-tokens 3 --device cpu the",
    "classify": "--run cl --device cpu the",
    "export": "--run lm --format safetensors --to exported",
    "compare": "tr lm",
    "info": "--run cl",
    "data": "multi30k --from .",
    "plot history": "tr --output out.png",
    "plot positions": "--d-model 8 --length 5 --output out.png",
    "plot attention": "--run lm --text the --output out.png --device cpu",
    "train": TRAIN["tr"].removeprefix("train ") + " --steps 1 --run new",
    "train lm": TRAIN["lm"].removeprefix("train lm ") + " --steps 1 --run new",
    "train classify": TRAIN["cl"].removeprefix("train classify ") + " --steps 1 --run new",
}
# A model with 10^18 layers, or a run of as many steps, is what was asked for.
ENDLESS = {"steps", "epochs", "minutes", "layers", "encoder_layers", "decoder_layers", "train_size", "size", "threads"}
SMALL = ("-1", "0", "1", "2", "7", "1.5", "1e400", "-1e400", "nan", "inf", "0x10")
HUGE = ("1" + "0" * 15, "9" * 30, "-" + "9" * 30)
NAMES = ("", " ", "x", "--", "-", "é", "\udcff", "a\nb", "\x1b[31m", "[/x]", "%s", "\u2028", ".", "..", "y" * 3000)
FILES = ("tr", "lm", "text.txt", "bad.txt", "no/such", "tr/config.toml", "new", "/", "/dev/null")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny run of each kind, and a few files."""
    folder = tmp_path_factory.mktemp("fuzz_commands")
    lines = [f"the {x} sees {y} {z}" for x in ("cat", "dog", "hen") for y in ("a", "no") for z in ("fox", "cow")]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    (folder / "labels.tsv").write_text("".join(f"{line.split()[1]}\t{line}\n" for line in lines * 2))
    (folder / "bad.txt").write_bytes(b"fine\n\xff\xfe\n")
    for name, command in TRAIN.items():
        succeed(*command.split(), "--steps", "2", "--run", name, cwd=folder)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(arguments: list[str], home: Path, stdin: bytes = b"") -> Done:
    """Run a command, and check how it ends; it neither waits for the disk nor draws its figures."""
    with limits(memory=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **how: file.write(b"\x89PNG"))
        done = fastformer(*arguments, cwd=home, stdin=stdin)
    assert done.returncode in (0, 2), done
    if done.returncode == 2:
        *before, last = done.stderr.removesuffix("\n").split("\n")
        assert last.startswith("error: "), done.stderr[-500:]
        assert len(last) > len("error: ")
        assert not any(line.startswith("error: ") for line in before), done.stderr[-500:]
        assert "codec can't encode" not in last, last
        assert "out of memory" not in last, last  # sizes are bounded before they are built
    return done


@pytest.fixture(scope="module")
def before(home: Path) -> dict[str, bytes]:
    """The files of that folder."""
    return content(home)


def restore(home: Path, files: dict[str, bytes]) -> None:
    """Put a folder back as it was, whatever the input before has left."""
    now = content(home)
    for path in [*home.iterdir()]:
        if path.is_dir() and any(now.get(x) != files.get(x) for x in {*now, *files} if x.startswith(f"{path.name}/")):
            shutil.rmtree(path)
        elif path.is_file() and path.name not in files:
            path.unlink()
    for name, data in files.items():
        path = home / name
        if not path.is_file() or now.get(name) != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def test_arguments_of_every_command_are_taken_or_refused_in_one_line(
    home: Path, before: dict[str, bytes], explore: Explore
) -> None:
    """Options of every command with values of a wrong type, out of range, enormous, or not text."""
    parameters = {}
    for name in COMMANDS:
        command: Any = typer.main.get_command(app)
        for part in name.split():
            command = command.commands[part]
        parameters[name] = [each for each in command.params if not getattr(each, "is_eager", False)]

    def check(random: Random) -> str:
        restore(home, before)
        name = random.choice(list(COMMANDS))
        arguments = [*name.split(), *COMMANDS[name].split()]
        for parameter in random.choices(parameters[name], k=random.randrange(4)):
            numbers = SMALL if parameter.name in ENDLESS else SMALL + HUGE
            pool = random.choice((numbers, numbers, NAMES, FILES))
            option = random.choice(parameter.opts)
            if not option.startswith("-"):
                arguments.append(random.choice((*NAMES, *FILES)))
            elif getattr(parameter, "is_flag", False):
                arguments.append(random.choice([*parameter.opts, *parameter.secondary_opts]))
            else:
                arguments += [option, *(random.choice(pool) for _ in range(parameter.nargs))]
        done = run(arguments, home)
        outputs = ("--output", "--to", "--plot", *(["--run"] if name.startswith("train") else []))
        named = {os.path.normpath(arguments[i + 1]) for i, x in enumerate(arguments[:-1]) if x in outputs}
        now = content(home)
        for changed in (x for x in {*now, *before} if now.get(x) != before.get(x)):
            assert any(changed == x or changed.startswith(f"{x}/") for x in named), (arguments, changed)
            assert done.returncode == 0 or changed not in before or changed.endswith(".lock"), (arguments, changed)
        return "done" if done.returncode == 0 else "refused"

    explore(check, {"done": 0.1, "refused": 0.1}, SHARE)


def test_text_of_any_encoding_is_read_or_refused_in_one_line(
    home: Path, before: dict[str, bytes], explore: Explore
) -> None:
    """Files and standard input in any encoding, any line ends: a line out for each line in, or one line why not."""
    commands = [
        "translate --run tr --input one --output out --max-length 4 --beam 2 --device cpu",
        "translate --run tr --output out --max-length 4 --beam 2 --device cpu",
        "evaluate --run tr --source one --target two --output out --max-length 4 --beam 2 --device cpu",
        "evaluate --run lm --source one --device cpu",
        "generate --run lm --max-new-tokens 2 --prompt-file one --output out --device cpu",
        "classify --run cl --probabilities --input one --output out --device cpu",
        f"train --train-source one --train-target two --valid-size 1 --test-size 1 {_SIZES} --steps 1 --run new",
        f"train lm --train-text one --held-out 0.2 {_SIZES} --steps 1 --run new",
        f"train classify --train-text one --held-out 0.2 {_SIZES} --steps 1 --run new",
    ]

    def check(random: Random) -> str:
        restore(home, before)
        one, two = (encoded(random, text(random)) for _ in range(2))
        two = one if chance(random, 50) else two  # two files with as many lines
        one = gzip.compress(one, mtime=0) if chance(random, 30) else one
        one = damaged(random, one) if chance(random, 30) else one
        for name, data in (("one", one), ("two", two), ("out", EARLIER)):
            (home / name).write_bytes(data)
        command = random.choice(commands)
        done = run(command.split(), home, one if "--input" not in command else b"")
        out = (home / "out").read_bytes()
        if done.returncode == 2:
            assert out == EARLIER, command
        elif command.split()[0] in ("translate", "generate", "classify"):
            lines = read_lines(home / "one") if one.removeprefix(b"\xef\xbb\xbf") else []
            assert out.count(b"\n") == len(lines), command
        return "done" if done.returncode == 0 else "refused"

    explore(check, {"done": 0.1, "refused": 0.1}, SHARE)


def damage(random: Random, folder: Path) -> bool:
    """Change a run folder in one place; return whether a command that reads its model must refuse the run."""
    checkpoint = sorted(folder.glob("checkpoints/step-*"))[-1]
    match random.randrange(8):
        case 0:  # tensors that do not fit the model
            weights = read_weights(checkpoint / WEIGHTS)
            name = random.choice(sorted(weights))
            x = weights.pop(name)
            kind = random.choice(("missing", "dtype", "shape", "huge", "number", "more"))
            changes = {
                "dtype": lambda: x.to(random.choice((torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn))),
                "shape": lambda: torch.stack([x, x]),
                "huge": lambda: torch.zeros(0, 2**62 - 1),
                "number": lambda: torch.full_like(x, random.choice((float("nan"), float("inf")))),
                "more": lambda: x,
            }
            weights |= {name: changes[kind]()} if kind in changes else {}
            weights |= {"more": x.clone()} if kind == "more" else {}
            (checkpoint / WEIGHTS).unlink()
            write_weights(checkpoint / WEIGHTS, weights)
            return True
        case 1:  # the tokenizer of another run
            path = random.choice(sorted(folder.rglob("tokenizer.json")))
            tokenizer = json.loads(path.read_text())
            tokenizer["words"] += [f"more {i}" for i in range(random.choice((1, 1000)))]
            path.write_text(json.dumps(tokenizer))
            return True
        case 2:
            lines = (folder / "config.toml").read_text().splitlines()
            settings = [i for i, line in enumerate(lines) if " = " in line and line.split(" = ")[0] not in ENDLESS]
            at = random.choice(settings)
            lines[at] = f"{lines[at].split(' = ')[0]} = {random.choice((*HUGE, *TOML_VALUES))}"
            (folder / "config.toml").write_text("\n".join(lines), "utf-8", "surrogatepass")
        case _:
            names = [
                path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in (".png", ".csv")
            ]
            path = random.choice(names)
            data = path.read_bytes()
            path.unlink()
            whole = chance(random, 50) and path.suffix == ".json"
            changes = [changed_json(random, json.loads(data)) if whole else damaged(random, data)] * 4
            changes += [b"", b"{}", b"null", b"\xff", data[: len(data) // 2], b'{"removed": ["../../text.txt"]}']
            if chance(random, 90):
                path.write_bytes(random.choice(changes))
            else:
                path.mkdir()
    return False


def test_damaged_run_folders_are_read_or_refused_in_one_line_and_lose_nothing(
    home: Path, before: dict[str, bytes], explore: Explore
) -> None:
    """A run of which one or several places are damaged, foreign or gone: done, or one line why not; nothing is lost."""
    model = {
        "tr": "translate --run tr --checkpoint last --output out --max-length 4 --beam 2 --device cpu seven",
        "lm": "generate --run lm --checkpoint last --output out --max-new-tokens 2 --device cpu the",
        "cl": "classify --run cl --checkpoint last --output out --device cpu the",
    }

    def check(random: Random) -> str:
        restore(home, before)
        kind = random.choice(("tr", "lm", "cl"))
        must_refuse = [damage(random, home / kind) for _ in range(random.choice((1, 1, 1, 0)))]
        (home / "out").write_bytes(EARLIER)
        files = content(home)
        reading = [model[kind], f"export --run {kind} --checkpoint last --format safetensors --to exported"]
        reading.append(f"evaluate --run {kind} --checkpoint last --device cpu")
        resume = " ".join(TRAIN[kind].split()[: 1 if kind == "tr" else 2])
        others = [f"info --run {kind}", "compare tr lm cl", f"{resume} --run {kind} --resume --steps 3 --device cpu"]
        others.append(f"plot history {kind} --output out.png")
        command = random.choice(reading + others)
        done = run(command.split(), home)
        now = content(home)
        assert done.returncode == 2 or command not in reading or True not in must_refuse, command
        assert done.returncode == 0 or must_refuse, (command, done.stderr)
        if done.returncode == 2:
            lost = [name for name, data in files.items() if now.get(name) != data and not name.endswith(".lock")]
            assert not lost, (command, lost)
        outside = [x for x in {*now, *files} if not x.startswith((f"{kind}/", "out", "exported/"))]
        assert all(now.get(name) == files.get(name) for name in outside), command
        return "done" if done.returncode == 0 else "refused"

    explore(check, {"done": 0.1, "refused": 0.1}, SHARE)
