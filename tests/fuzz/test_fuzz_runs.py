"""Run folders from strangers: a command succeeds or says in one line why not, and nothing outside the folder changes.

One to three faults an input (`fuzz_runs`), one command each, in this process, under a limit of memory and of time. What
once failed stays below, as a case by itself.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.train import CheckpointFolder
from tests.fuzz.fuzz_commands import RESUME, TINY, contents, run, train_tiny, tree
from tests.fuzz.fuzz_runs import LAST, Fault, Stranger

# A glyph that a font lacks, a model that shrinks: to a user no error.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

_MODEL = (
    r"config\.toml|tokenizer(/tokenizer\.json|/source(/tokenizer\.json)?|/target(/tokenizer\.json)?)?"
    rf"|checkpoints|{LAST}(/meta\.json|/model\.safetensors)?"
)
COMMANDS = {
    "translate": "translate --run run --checkpoint last --output out seven" + TINY,
    "generate": "generate --run run --checkpoint last --output out --max-new-tokens 3 --device cpu the",
    "evaluate": "evaluate --run run --checkpoint last",
    "export": "export --run run --checkpoint last --format safetensors --to exported",
    "info": "info --run run",
    "resume": "--run run --steps 3",
}
# What a command cannot do without, and what it does not look at (anything may be there).
NEEDED = dict.fromkeys(("translate", "generate", "evaluate", "export"), _MODEL) | {
    "info": r"config\.toml",
    "resume": rf"{_MODEL}|data\.json|metrics\.jsonl|{LAST}/(optimizer\.safetensors|state\.json)",
}
_IGNORED = (
    r"\.?metrics.*|\.(config\.toml|data\.json|lock)|\.?history\.png|tensorboard|stray|notes.*|demo\.txt|attention\.png"
    r"|.*/(optimizer\.safetensors|state\.json)|tokenizer/(stray|\.tokenizer\.json)|checkpoints/\.new-x"
)
UNREAD = dict.fromkeys(COMMANDS, _IGNORED) | {"resume": r"stray|notes.*|tokenizer/stray|checkpoints/\.new-x"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs."""
    folder = tmp_path_factory.mktemp("fuzz_runs")
    train_tiny(folder)
    return folder


def test_run_folders(home: Path, request: pytest.FixtureRequest) -> None:
    count, before = request.config.getoption("--fuzz"), tree(home, "run", "out", "exported")
    ended = [attempt(home, before, number) for number in range(count)]
    assert min(sum(code == 0 for code, _ in ended), sum(code == 2 for code, _ in ended)) > count / 10
    assert sum(not faults for _, faults in ended) > count / 30


def attempt(home: Path, before: dict, number: int) -> tuple[int, list[Fault]]:
    """One input: the exit code, and what was put in."""
    random = Random(number)
    kind = random.choice(("tr", "lm"))
    shutil.copytree(home / kind, home / "run")
    stranger = Stranger(home / "run", home / kind)
    faults = stranger.faults(random, random.choice((0, 1, 1, 1, 2, 3)))
    name = random.choice([x for x in COMMANDS if x != {"tr": "generate", "lm": "translate"}[kind]])
    command = f"{RESUME[kind]} {COMMANDS[name]}" if name == "resume" else COMMANDS[name]
    given = contents(home / "run")
    done = run(command.split(), home, number, figures=False)
    about = f"input {number}: {kind}: {command}: {faults}: {done.stderr[-300:]}"
    assert tree(home, "run", "out", "exported") == before, about
    if done.returncode == 2:
        # Nothing that was there is lost; the lock names who held it last.
        assert contents(home / "run").items() >= {x for x in given.items() if x[0] != ".lock"}, about
        assert not (home / "exported").exists(), about
    elif name == "resume":
        assert CheckpointFolder(home / "run" / "checkpoints").open().step == 3, about
    expected(name, faults, done.returncode, about)
    shutil.rmtree(home / "run")
    shutil.rmtree(home / "exported", ignore_errors=True)
    (home / "out").unlink(missing_ok=True)
    return done.returncode, faults


def expected(command: str, faults: list[Fault], code: int, about: str) -> None:
    """A fault where it matters is refused, and one that does not concern a command keeps it from nothing."""
    if any(fault.certain and re.fullmatch(NEEDED[command], fault.name) for fault in faults):
        assert code == 2, about
    if all(re.fullmatch(UNREAD[command], fault.name) for fault in faults):
        assert code == 0, about


@pytest.fixture
def copied(home: Path) -> Iterator[Path]:
    """A copy of the translation run."""
    yield shutil.copytree(home / "tr", home / "run")
    shutil.rmtree(home / "run")
    shutil.rmtree(home / "exported", ignore_errors=True)
    (home / "out").unlink(missing_ok=True)


def test_a_setting_that_was_left_out_has_its_default(home: Path, copied: Path) -> None:
    path = copied / "config.toml"
    path.write_text("".join(line for line in path.open() if not line.startswith("max_length")))
    assert run(COMMANDS["translate"].split(), home, 1).returncode == 0


def test_metrics_are_read_before_a_resumed_run_writes(home: Path, copied: Path) -> None:
    (copied / "metrics.jsonl").write_text("no record\n" * 2)
    before = contents(copied)
    done = run(f"{RESUME['tr']} {COMMANDS['resume']}".split(), home, 1)
    assert "metrics.jsonl:1: is not a JSON record" in done.stderr
    after = contents(copied)
    assert {name: after[name] for name in before if name != ".lock"} == {
        n: x for n, x in before.items() if n != ".lock"
    }
