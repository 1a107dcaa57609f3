"""No name inside a run folder is followed through a link, and nothing but files is opened, on writing or reading."""

import os
import shutil
import signal
import struct
import subprocess
import threading
import time

import pytest
import torch

from fastformer.apps.export import export_safetensors, load_safetensors
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.language.run import LanguageDataConfig, LanguageRun, load_generator
from fastformer.apps.plots import plot_history, save
from fastformer.apps.runs.comparison import compare_runs
from fastformer.apps.runs.folder import read_kind
from fastformer.apps.runs.own_files import refuse_output
from fastformer.apps.system import foreign_files, places
from fastformer.apps.system.foreign_files import append_file, check_path, read_file, write_file
from fastformer.apps.system.places import IrregularFileError
from fastformer.apps.text import WordTokenizer, load_tokenizer, read_lines
from fastformer.apps.train import Checkpoint, CheckpointFolder, TrainConfig, find_checkpoint, read_metrics
from tests.support.train_task import config, network, trainer

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links and pipes")
SECONDS = 20
MODEL = {"d_model": 8, "heads": 1, "layers": 1, "feed_forward": 8}


@pytest.fixture(autouse=True)
def bounded():
    """What would wait for ever fails instead."""

    def late(number, frame):
        raise AssertionError(f"still waiting after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["system", "looked at"])
def calls(request, monkeypatch):
    """Both with the system's calls and where it has none."""
    if request.param == "looked at":
        monkeypatch.setattr(places, "_RELATIVE", False)
        monkeypatch.setattr(foreign_files, "NOFOLLOW", 0)


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    (folder / ".old-thing").mkdir(parents=True)
    (folder / ".new-step-5").mkdir()
    (folder / "file").write_text("mine")
    for path in (folder / ".old-thing", folder / ".new-step-5"):
        (path / "file").write_text("mine")
    return folder


def untouched(outside):
    return {str(path.relative_to(outside)): path.read_text() for path in outside.rglob("file")} == {
        "file": "mine",
        os.path.join(".old-thing", "file"): "mine",
        os.path.join(".new-step-5", "file"): "mine",
    } and sorted(os.listdir(outside)) == [".new-step-5", ".old-thing", "file"]


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_what_stands_in_the_place_of_a_file_is_refused(tmp_path, outside, calls, kind):
    for name in ("file", ".other"):
        if kind in ("link", "dangling"):
            (tmp_path / name).symlink_to(outside / ("file" if kind == "link" else "new"))
        elif kind == "pipe":
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).mkdir()
    acts = {
        "file": (read_file, append_file, write_file),
        "other": (write_file,),  # whose temporary name is taken
    }
    for name, functions in acts.items():
        for act in functions:
            path = tmp_path / name
            with pytest.raises(OSError, match=r"is a (link|pipe|folder)") as raised:
                act(path, tmp_path) if act is read_file else act(path, b"theirs", tmp_path)
            assert str(tmp_path) in str(raised.value)
    if kind != "folder":
        with pytest.raises(IrregularFileError):
            check_path(tmp_path / "file", tmp_path)
    assert untouched(outside)


def test_a_folder_on_the_way_is_no_link(tmp_path, outside, calls):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(outside)
    path = tmp_path / "run" / "checkpoints" / "file"
    for act in (
        lambda: read_file(path, tmp_path / "run"),
        lambda: write_file(path, b"theirs", tmp_path / "run"),
        lambda: append_file(path, b"theirs", tmp_path / "run"),
        lambda: check_path(path, tmp_path / "run"),
    ):
        with pytest.raises(IrregularFileError, match="checkpoints"):
            act()
    assert untouched(outside)


def test_the_chosen_folder_may_be_reached_through_a_link(tmp_path, calls):
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to("real")
    write_file(tmp_path / "run" / "file", b"one", tmp_path / "run")
    append_file(tmp_path / "run" / "file", b" two", tmp_path / "run")
    assert read_file(tmp_path / "run" / "file", tmp_path / "run") == b"one two"
    assert (tmp_path / "run").is_symlink()


def test_a_hard_link_is_not_added_to(tmp_path, outside):
    os.link(outside / "file", tmp_path / "metrics.jsonl")
    with pytest.raises(IrregularFileError):
        append_file(tmp_path / "metrics.jsonl", b"theirs", tmp_path)
    write_file(tmp_path / "metrics.jsonl", b"theirs", tmp_path)  # another file under the name
    assert untouched(outside)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = tmp_path_factory.mktemp("started") / "run"
    trainer(folder, config(steps=10)).fit()
    return folder


def go_on(run):
    run.resume()
    run.fit()


WRITTEN = (
    "metrics.jsonl",
    "metrics.csv",
    ".metrics.jsonl",
    ".metrics.csv",
    "checkpoints/index.json",
    "checkpoints/.index.json",
    ".lock",
)


@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_resumed_run_writes_through_no_link(tmp_path, started, outside, name, kind):
    run = tmp_path / "run"
    shutil.copytree(started, run)
    (run / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to(outside / "file" if kind == "link" else "/dev/zero")
    again = trainer(run, config(steps=20), model=network(seed=77))
    with pytest.raises(OSError, match=name.split("/")[-1].replace(".", r"\.")):
        go_on(again)
    assert untouched(outside)


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_a_resumed_run_takes_no_folder_through_a_link(tmp_path, started, outside, name):
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    shutil.copytree(started, run)
    if name == "checkpoints":
        for part in os.listdir(run / name):
            shutil.move(run / name / part, outside / part)
        os.rmdir(run / name)
    (run / name).symlink_to(outside)
    before = sorted(os.listdir(outside))
    again = trainer(run, config(steps=20, tensorboard=True), model=network(seed=77))
    with pytest.raises(OSError, match=name):
        go_on(again)
    assert sorted(os.listdir(outside)) == before
    if name == "checkpoints":
        with pytest.raises(OSError, match=name):
            find_checkpoint(run)


@pytest.mark.parametrize("name", ["step-10", "step-20", "average", ".new-step-20", ".old-step-5", ".swap-step-10"])
def test_no_checkpoint_is_a_link(tmp_path, started, outside, name):
    run = tmp_path / "run"
    shutil.copytree(started, run)
    if (run / "checkpoints" / name).exists():
        shutil.rmtree(run / "checkpoints" / name)
    (run / "checkpoints" / name).symlink_to(outside)
    again = trainer(run, config(steps=20), model=network(seed=77))
    with pytest.raises(OSError, match=name):
        go_on(again)
    assert untouched(outside)


@pytest.mark.parametrize("name", ["meta.json", "model.safetensors", "state.pt"])
@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_no_file_of_a_checkpoint_is_anything_else(tmp_path, started, name, kind):
    path = shutil.copytree(started / "checkpoints" / "step-10", tmp_path / "step-10")
    original = (path / name).rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).symlink_to(original if kind == "link" else "/dev/zero")
    with pytest.raises((OSError, ValueError), match=name):
        Checkpoint.open(path).check()


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_files_are_read(tmp_path, started, kind):
    def put(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
        return path

    run = tmp_path / "run"
    shutil.copytree(started, run)
    acts = {
        "run/metrics.jsonl": lambda path: read_metrics(path.parent),
        "run/checkpoints/index.json": lambda path: CheckpointFolder(path.parent).last(),
        "run/config.toml": lambda path: read_kind(path.parent),
        "words/tokenizer.json": lambda path: load_tokenizer(path.parent),
        "lone/metrics.jsonl": read_metrics,
        "compared/config.toml": lambda path: compare_runs([path.parent]),
        "given.txt": read_lines,
    }
    for name, act in acts.items():
        path = put(tmp_path / name)
        with pytest.raises((OSError, ValueError)) as raised:
            act(path)
        assert path.name in str(raised.value), name


def test_a_pipe_that_somebody_writes_to_is_an_input(tmp_path):
    ours, theirs = os.pipe()
    os.write(theirs, b"one\ntwo\n")
    os.close(theirs)
    try:
        assert read_lines(f"/dev/fd/{ours}") == ["one", "two"]
    finally:
        os.close(ours)
    fcntl, termios = map(pytest.importorskip, ("fcntl", "termios"))
    os.mkfifo(tmp_path / "pipe")
    theirs = os.open(tmp_path / "pipe", os.O_RDWR)  # which waits for no reader
    os.write(theirs, b"three\n")

    def end_when_it_is_read():
        while struct.unpack("i", fcntl.ioctl(theirs, termios.FIONREAD, bytes(4)))[0]:
            time.sleep(0.01)
        os.close(theirs)

    thread = threading.Thread(target=end_when_it_is_read)
    thread.start()
    assert read_lines(tmp_path / "pipe") == ["three"]
    thread.join()


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A trained run of the command line's kind."""
    folder = tmp_path_factory.mktemp("language")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} the quick brown fox {i * 7 % 11} jumps over {i * 3 % 5}\n" for i in range(200)))
    data = LanguageDataConfig(train_text=text, valid_text=text, tokenizer="words")
    LanguageRun.create(folder / "run", data, MODEL, TrainConfig(steps=2)).fit(show=False)
    return folder / "run"


@pytest.mark.parametrize("name", ["config.toml", "data.json", "tokenizer", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_no_part_of_a_run_is_anything_else(tmp_path, language, name, kind):
    run = shutil.copytree(language, tmp_path / "run")
    original = (run / name).rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to(original if kind == "link" else "/dev/zero")
    with pytest.raises((OSError, ValueError), match=name):
        LanguageRun.open(run, {"steps": 3})
    if name != "data.json":
        with pytest.raises((OSError, ValueError), match=name):
            load_generator(run)


@pytest.mark.parametrize("name", ["tokenizer", "data.json", "config.toml", ".data.json", ".config.toml", "checkpoints"])
def test_a_new_run_in_the_folder_of_an_ended_one_writes_through_no_link(tmp_path, language, outside, name):
    run = shutil.copytree(language, tmp_path / "run")
    for part in ("checkpoints", name):
        if (run / part).is_dir():
            shutil.rmtree(run / part)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside if name in ("tokenizer", "checkpoints") else outside / "file")
    text = language.parent / "text.txt"
    data = LanguageDataConfig(train_text=text, valid_text=text, tokenizer="words")
    with pytest.raises(OSError, match=name.replace(".", r"\.")):
        LanguageRun.create(run, data, MODEL, TrainConfig(steps=2))
    assert untouched(outside)


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["history.png", ".history.png"])
def test_the_picture_of_a_resumed_run_is_drawn_through_no_link(tmp_path, language, outside, name, kind):
    run = shutil.copytree(language, tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name) if kind == "pipe" else (run / name).symlink_to(outside / "file")
    figure = plot_history({"run": read_metrics(run)})
    with pytest.raises(IrregularFileError, match=name.replace(".", r"\.")):
        save(figure, run / "history.png", run)
    with pytest.raises(IrregularFileError, match=name.replace(".", r"\.")):  # before it trains
        LanguageRun.open(run, {"steps": 3})
    assert untouched(outside)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_checkpoint_is_described_from_files_alone(tmp_path, started, kind):
    path = shutil.copytree(started / "checkpoints" / "step-10", tmp_path / "step-10") / "model.safetensors"
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(IrregularFileError, match=r"model\.safetensors"):
        Checkpoint.open(path.parent).parameters()


def test_an_exported_model_is_read_from_files_alone(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(IrregularFileError, match=r"config\.json"):
        load_safetensors(tmp_path)


def test_tokenizers_are_saved_through_no_link(tmp_path, outside):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").symlink_to(outside / "file")
    with pytest.raises(IrregularFileError, match=r"tokenizer\.json"):
        WordTokenizer.from_lines(["a b c"]).save(tmp_path / "words")
    assert untouched(outside)


def test_leftovers_that_are_not_ours_stay(tmp_path):
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    for name in (".old-thing", ".new-x", ".swap-letters"):
        (checkpoints.folder / name).mkdir(parents=True)
    (checkpoints.folder / ".new-file").write_text("mine")
    checkpoints.save(1, {"a": torch.ones(2)}, {"b": 1})
    assert {".old-thing", ".new-x", ".swap-letters", ".new-file"} < set(os.listdir(checkpoints.folder))


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_exported_model_is_read_through_no_link(tmp_path, name, kind):
    tokenizer = WordTokenizer.from_lines(["a b"])
    model = LanguageModel(LanguageConfig(tokenizer.size, d_model=8, heads=2, feed_forward=8, layers=1))
    export_safetensors(tmp_path / "model", model, [tokenizer])
    path = tmp_path / "model" / name
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside") if kind == "link" else os.mkfifo(path)
    with pytest.raises(IrregularFileError, match=rf"{name}: is a {kind}"):
        load_safetensors(tmp_path / "model")


def test_no_name_leads_upwards(tmp_path, outside, calls):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / ".." / "outside" / "file"
    for act in (read_file, check_path, lambda path, within: write_file(path, b"theirs", within)):
        with pytest.raises(IrregularFileError, match="leads out of its folder"):
            act(path, tmp_path / "run")
    assert untouched(outside)


@pytest.fixture
def deep(tmp_path):
    """A folder in a folder, more often than Python walks."""

    def make(path):
        path.mkdir(parents=True)
        above = os.open(path, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("a", dir_fd=above)
            inner = os.open("a", os.O_RDONLY, dir_fd=above)
            os.close(above)
            above = inner
        os.close(above)

    yield make
    subprocess.run(["rm", "-rf", tmp_path], check=True)


def test_folders_in_folders_are_one_line(tmp_path, started, deep):
    run = tmp_path / "run"
    shutil.copytree(started, run)
    deep(run / "checkpoints" / ".old-step-5")
    again = trainer(run, config(steps=20), model=network(seed=77))
    with pytest.raises(OSError, match=r"\.old-step-5: holds too many folders in folders"):
        again.resume()
    deep(run / "tokenizer" / "source")
    refuse_output(tmp_path / "new", runs=(run,))
    os.link(run / "checkpoints" / "step-10" / "meta.json", tmp_path / "output")
    with pytest.raises(ValueError, match="is a file of the run"):
        refuse_output(tmp_path / "output", runs=(run,))
