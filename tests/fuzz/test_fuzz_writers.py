"""Two writers on one folder, in thousands of orders: one is refused by name, and the folder is one writer's own, whole.

New runs, resumed ones and readers; a writer that is killed, a lock that a dead process left, one that a living process
holds. What once failed stays below, as a case by itself.
"""

import gc
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import fuzz

pytest.importorskip("typer", reason="the command line needs the extra `apps`")
if os.name != "posix":
    pytest.skip("needs processes that fork", allow_module_level=True)

import torch

from fastformer.apps.train import CheckpointFolder, read_metrics
from tests.fuzz.fuzz_commands import RESUME, SECONDS, TRAIN, check_ending, contents, run, train_tiny
from tests.fuzz.fuzz_writers import Writer, race

# A glyph that a font lacks, a model that shrinks: to a user no error.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

# Two new runs differ in their text, so in their vocabularies, and in their width.
NEW = {
    "one": TRAIN["lm"] + " --run run",
    "two": TRAIN["lm"].replace("text.txt", "other.txt").replace("--d-model 8", "--d-model 12") + " --run run",
}
WIDTH = {"text.txt": 8, "other.txt": 12}
AGAIN = {"three": RESUME["lm"] + " --run run --steps 3", "four": RESUME["lm"] + " --run run --steps 4"}
READ = {
    "export": "export --run run --checkpoint last --format safetensors --to exported",
    "generate": "generate --run run --max-new-tokens 2 --device cpu the",
    "evaluate": "evaluate --run run --device cpu",
    "info": "info --run run",
}
CALLS_OF_A_RUN = 400  # with those of its beginning and end
BUSY = re.compile(r"error: run is being written by process \d+ on \S+ since 20[-\d: ]+; wait")
ANOTHER = re.compile(r"error: run holds a run already|error: run is being written by another process")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz_writers")
    train_tiny(folder)
    text = (folder / "text.txt").read_text()
    (folder / "other.txt").write_text(text + text.replace("the", "one").replace("sees", "hears"))
    gc.collect()
    gc.freeze()  # what is there now need not be copied into each child
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked child has none of them
    yield folder
    torch.set_num_threads(threads)
    gc.unfreeze()


def test_two_writers(home: Path, request: pytest.FixtureRequest) -> None:
    found: Counter[str] = Counter()
    for number in range(request.config.getoption("--fuzz") // 10):  # a pair takes as long as ten folders
        found += attempt(home, number)
    assert found["refused"] > 0.1 * found["inputs"]
    assert found["killed"] > 0.1 * found["inputs"]


def attempt(home: Path, number: int) -> Counter[str]:
    """One input: what came of it."""
    random = Random(number)
    new = random.random() < 0.4
    writing = NEW if new else AGAIN
    one = random.choice(list(writing))
    other = random.choice([*writing, *READ] if random.random() < 0.5 else list(writing))
    kill = random.random() < 0.3
    if not new:
        shutil.copytree(home / "lm", home / "run")
        if random.random() < 0.3:
            (home / "run" / ".lock").write_bytes(random.choice((b"", b"process 1 on x since 2020\n", os.urandom(99))))
    lines = [{**writing, **READ}[name] for name in (one, other)]
    with fuzz.time_limit(SECONDS):
        writers = race(random, lines, home, kill)
    codes = [writer.done.returncode for writer in writers]
    about = f"input {number}: {one}, {other}: {codes}: {[writer.done.stderr[-300:] for writer in writers]}"
    for writer in writers:
        if writer.done.returncode >= 0:
            check_ending(writer.done, about)
    refused = [x.done for x in writers if x.done.returncode == 2]
    if other in writing:
        assert all(BUSY.search(x.stderr) or ANOTHER.search(x.stderr) for x in refused), about
    if min(codes) >= 0:
        assert codes[0] == 0 or codes[1] == 0, about
        assert codes[0] == 0 or other in writing, about  # a reader is in nobody's way
        assert not (home / "run" / ".lock").exists(), about
        assert codes.count(0) < 2 or not (new and other in writing), about
    check_whole(home, number, min(codes) >= 0, about)
    shutil.rmtree(home / "run", ignore_errors=True)
    shutil.rmtree(home / "exported", ignore_errors=True)
    return Counter(inputs=1, refused=len(refused), killed=-9 in codes)


def check_whole(home: Path, number: int, ended: bool, about: str) -> None:
    """The folder is one run, whose text, tokenizer, settings and weights belong together, and which goes on."""
    folder = home / "run"
    if ended or CheckpointFolder(folder / "checkpoints").paths():
        settings = (folder / "config.toml").read_text()
        (text,), (width,) = (
            re.findall(rf'^{key} = "?([\w.]+)"?$', settings, re.M) for key in ("train_text", "d_model")
        )
        assert WIDTH[text] == int(width), about
        CheckpointFolder(folder / "checkpoints").open()
        # The former asks the data for its fingerprint too, and takes three times as long.
        line = f"{RESUME['lm']} --run run --steps 5" if number % 3 == 0 else READ["evaluate"]
        done = run(line.split(), home, number, figures=False)
        assert done.returncode == 0, f"{about}: {done.stderr}"
        records = [(record["kind"], record["step"]) for record in read_metrics(folder)]
        assert len(records) == len(set(records)), about
    else:  # killed before its first checkpoint
        done = run([*NEW["one"].split()], home, number, figures=False)
        assert done.returncode == 0, f"{about}: {done.stderr}"


def test_a_living_process_keeps_its_folder(home: Path, request: pytest.FixtureRequest) -> None:
    """One stands at any of its calls while the other runs from its beginning to its end."""
    for number in range(0, request.config.getoption("--fuzz"), 10):
        random = Random(number)
        shutil.copytree(home / "lm", home / "run")
        first = Writer.start(AGAIN["four"], home)
        try:
            while not (home / "run" / ".lock").exists() or not (home / "run" / ".lock").read_bytes():
                first.go_on()
            for _ in range(random.randrange(20)):
                first.go_on()
            before = contents(home / "run")
            done = run(AGAIN["three"].split(), home, number, figures=False)
            assert done.returncode == 2
            assert f"is being written by process {first.pid} on" in done.stderr
            assert contents(home / "run") == before
            while first.done is None:
                first.go_on()
            assert first.done.returncode == 0, first.done
        finally:
            first.kill()
        shutil.rmtree(home / "run")


WAYS = ("other", "link", "empty", "nothing")  # what is in the place of a folder that was moved


def test_a_moved_run_leaves_alone_what_took_its_place(home: Path, request: pytest.FixtureRequest) -> None:
    """A writer stands still before any of its calls, and goes on where its folder has another name."""
    for number in range(request.config.getoption("--fuzz") // 10):
        random = Random(number)
        line, way = random.choice([NEW["one"], *AGAIN.values()]), random.choice(WAYS)
        run, other, moved = home / "run", home / "other", home / "moved"
        shutil.copytree(home / "lm", other)
        (other / ".lock").write_text("its")
        for step in range(6):  # it saves these steps just now
            (other / "checkpoints" / f".new-step-{step}").mkdir()
            for name in ("model.safetensors", "state.pt")[: step % 3]:
                (other / "checkpoints" / f".new-step-{step}" / name).write_text("its")
        if line != NEW["one"]:
            shutil.copytree(home / "lm", run)
        before = contents(other)
        writer = Writer.start(line, home)
        try:
            for _ in range(random.randrange(CALLS_OF_A_RUN)):
                if writer.done is None:
                    writer.go_on()
            if run.exists() and writer.done is None:
                run.rename(moved)
                if way == "other":
                    other.rename(run)
                elif way == "link":
                    run.symlink_to(other)
                elif way == "empty":
                    run.mkdir()
            done = writer.to_its_end()
        finally:
            writer.kill()
        about = f"input {number}: {way}, {line[:30]}: call {writer.calls}: {done}"
        check_ending(done, about)
        assert contents(other if other.exists() else run) == before, about
        if moved.exists() and way in ("empty", "nothing"):
            assert done.returncode == 0 or not (run / "config.toml").exists(), about
        if moved.exists():
            shutil.rmtree(run, ignore_errors=True) if not run.is_symlink() else run.unlink()
            moved.rename(run)
        if run.exists():
            check_whole(home, number, False, about)
        for folder in (run, other):
            shutil.rmtree(folder, ignore_errors=True)


def test_a_signal_at_any_call_loses_nothing(home: Path, request: pytest.FixtureRequest) -> None:
    """Whatever is sent to it, a run goes on, and what stands in its folder is whole."""
    for number in range(request.config.getoption("--fuzz") // 10):
        random = Random(number)
        line = random.choice([NEW["one"], *AGAIN.values()])
        if line != NEW["one"]:
            shutil.copytree(home / "lm", home / "run")
        sent = random.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP))
        writer = Writer.start(line, home)
        try:
            for _ in range(random.randrange(CALLS_OF_A_RUN)):
                if writer.done is None:
                    writer.go_on()
            if writer.done is None:
                for each in (sent, *random.choice(((), (sent,))), signal.SIGCONT):
                    os.kill(writer.pid, each)
            done = writer.to_its_end()
        finally:
            writer.kill()
        about = f"input {number}: {sent.name}, {line[:30]}: call {writer.calls}: {done}"
        assert done.returncode in (0, 2, 130, 128 + sent, -sent), about
        if (home / "run").exists():
            check_whole(home, number, False, about)
        shutil.rmtree(home / "run", ignore_errors=True)
