"""What is shown is never worth a run: broken outputs, a closed terminal, signals; and no output replaces an input."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fastformer.apps import cli
from fastformer.apps.cli.console import check_output
from fastformer.apps.system.atomic import write_atomic
from fastformer.apps.system.run_lock import check_locked
from fastformer.apps.text import prepare
from fastformer.apps.train import CheckpointFolder, Result, TrainConfig, read_metrics
from fastformer.apps.train.interrupt import Interrupt
from fastformer.apps.train.progress import Progress
from fastformer.apps.translation import demo
from fastformer.apps.translation.commands import demo as demo_command
from fastformer.apps.translation.demo import run_demo
from fastformer.apps.translation.run import DataConfig, TranslationRun
from tests.apps.runs.test_run_lock import ENVIRONMENT, command, train, wait_for
from tests.support.train_task import config, trainer

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals, /dev/full and closed pipes")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} the quick brown fox {i * 7 % 11} jumps over {i * 3 % 5}\n" for i in range(300)))
    return path


def last_step(run):
    return CheckpointFolder(run / "checkpoints").open().step


class Broken:
    """A stream whose writes fail after the first `good`."""

    def __init__(self, error, good=0, tty=False):
        self.error, self.good, self.tty, self.asked = error, good, tty, 0

    def write(self, text):
        self.asked += 1
        if self.asked > self.good:
            raise self.error
        return len(text)

    def flush(self):
        if self.asked > self.good:
            raise self.error

    def isatty(self):
        return self.tty

    def fileno(self):
        raise OSError("none")


@pytest.mark.parametrize("tty", [False, True], ids=["file", "terminal"])
@pytest.mark.parametrize("good", [0, 3])
@pytest.mark.parametrize("error", [OSError(28, "full"), BrokenPipeError(), ValueError("closed")], ids=repr)
def test_a_broken_stream_ends_the_showing_and_no_run(tmp_path, monkeypatch, error, good, tty):
    stream = Broken(error, good, tty)
    monkeypatch.setattr(sys, "stderr", stream)
    result = trainer(tmp_path, config(), show=True).fit()
    assert result.reason == "steps"
    assert last_step(tmp_path) == 20
    assert stream.asked == good + 1


def test_no_stream_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert trainer(tmp_path, config(), show=True).fit().reason == "steps"


def test_what_is_shown_is_saved_before(tmp_path, monkeypatch):
    shown = []

    def line(self, text):
        shown.append((text.split(":")[0], CheckpointFolder(tmp_path / "checkpoints").last()))

    monkeypatch.setattr(Progress, "line", line)
    trainer(tmp_path, config(steps=None, epochs=2, validate_every=None)).fit()
    step = {"step-7": tmp_path / "checkpoints" / "step-7", "step-14": tmp_path / "checkpoints" / "step-14"}
    told = [(kind, path) for kind, path in shown if kind in ("mean of training", "validation")]
    assert sorted(told) == sorted((kind, path) for path in step.values() for kind in ("mean of training", "validation"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "redirected",
    [
        *("2>/dev/full", ">/dev/full 2>&1", "<&- >&- 2>&-"),
        *(pytest.param(x, marks=pytest.mark.long) for x in (">/dev/full", ">&-", "2>&-", ">&- 2>&-")),
    ],
)
def test_a_command_without_a_terminal_trains(tmp_path, text, redirected):
    words = " ".join(command(tmp_path / "run", text, "--steps", "3", "--log-every", "1"))
    ended = subprocess.run(["sh", "-c", f"exec {words} {redirected}"], env=ENVIRONMENT, timeout=600)
    assert ended.returncode == 0
    assert last_step(tmp_path / "run") == 3
    assert (tmp_path / "run" / "history.png").exists()


@pytest.mark.slow
def test_a_pipe_that_nobody_reads_any_more(tmp_path, text):
    words = " ".join(command(tmp_path / "run", text, "--steps", "5", "--log-every", "1", "--validate-every", "1"))
    script = f"{{ {words}; echo $? > {tmp_path / 'code'}; }} 2>&1 | head -n 2"
    subprocess.run(["sh", "-c", script], env=ENVIRONMENT, timeout=600, capture_output=True)
    assert (tmp_path / "code").read_text().strip() == "0"
    assert last_step(tmp_path / "run") == 5


@pytest.mark.slow
def test_an_error_on_a_broken_terminal_has_its_exit_code(tmp_path, text):
    words = " ".join(command(tmp_path / "run", text, "--steps", "-1"))
    ended = subprocess.run(["sh", "-c", f"exec {words} 2>/dev/full"], env=ENVIRONMENT, timeout=600)
    assert ended.returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_saves_and_is_told_by_the_exit_code(tmp_path, text, number):
    run = tmp_path / "run"
    words = command(run, text, "--steps", "1000000", "--log-every", "1", "--validate-every", "1000000")
    before = signal.signal(number, signal.SIG_DFL)  # what nohup ignores, processes under it do
    process = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        signal.signal(number, before)
        wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0)
        process.send_signal(number)
        process.send_signal(number)  # a terminal that closes may send two
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert "interrupted" in out
    assert last_step(run) >= 1
    assert read_metrics(run)[-1]["kind"] == "validation"


@pytest.mark.parametrize("ignored", [False, True], ids=["", "ignored"])
@pytest.mark.parametrize("module", ["fastformer", "fastformer.__main__"], ids=["python -m", "script"])
def test_an_interrupted_import_shows_no_traceback(tmp_path, module, ignored):
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(3)\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), ENVIRONMENT.get("PYTHONPATH"))))
    run = ["-m", module] if module == "fastformer" else ["-c", f"from {module} import main; main()"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        ended = subprocess.run([sys.executable, *run], env=ENVIRONMENT | {"PYTHONPATH": path}, capture_output=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended.returncode, ended.stderr) == (3 if ignored else -signal.SIGINT, b"")


@pytest.mark.parametrize(
    ("when", "code"),
    [
        ("atexit.register(interrupt)", -signal.SIGINT),  # while Python takes everything apart
        ("cli.give_up_on = lambda stream: interrupt()", 130),  # while a pipe takes no more: a second one
    ],
)
def test_ctrl_c_at_the_end_shows_no_traceback(when, code):
    script = f"""
import atexit, os, signal, sys
import fastformer.apps.cli as cli
from fastformer.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
{when}
sys.argv = ["fastformer", "--help"]
main()
"""
    ended = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True)
    assert (ended.returncode, ended.stderr) == (code, b"")


@pytest.mark.parametrize("where", ["_open_streams", "_show_warnings", "app"])
def test_ctrl_c_at_any_time_shows_no_traceback(monkeypatch, where):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, where, interrupted)
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 130


def test_nohup_is_respected(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    of_others = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Interrupt(lambda: None) as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupt.requested
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert interrupt.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGTERM, of_others)


def test_a_handler_of_the_caller_stays():
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with Interrupt(lambda: None) as interrupt:
            signal.raise_signal(signal.SIGTERM)
            assert not interrupt.requested
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_demo_that_is_asked_to_end_ends_once_it_is_saved(tmp_path, monkeypatch):
    ended = Result("interrupted", 1, 1, 1, 1.0, {}, None, None, int(signal.SIGTERM))
    monkeypatch.setattr(TranslationRun, "fit", lambda self: ended)
    with pytest.raises(SystemExit) as raised:
        run_demo(tmp_path / "demo", "fr", "cpu", Console(quiet=True))
    assert raised.value.code == 128 + signal.SIGTERM


@pytest.fixture
def short_demo(monkeypatch):
    """A demo of two steps."""
    small = {"d_model": 8, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 8}
    monkeypatch.setattr(demo, "MODEL", {**demo.MODEL, **small})
    monkeypatch.setattr(demo, "TRAIN", replace(demo.TRAIN, epochs=None, steps=2, warmup_steps=1, batch_tokens=100))
    few = {name: corpus.take(range(40), name) for name, corpus in demo.read_corpora(DataConfig(**demo.DATA)).items()}
    monkeypatch.setattr(demo, "read_corpora", lambda data: few)


@pytest.mark.parametrize("error", [OSError(28, "full"), BrokenPipeError()], ids=repr)
def test_a_broken_output_ends_no_demo(tmp_path, monkeypatch, short_demo, error):
    stream = Broken(error)
    monkeypatch.setattr(sys, "stdout", stream)
    demo_command(run=tmp_path / "demo", target="fr", device="cpu")
    assert stream.asked == 1
    assert (tmp_path / "demo" / "attention.png").exists()


def test_a_demo_keeps_its_folder_to_its_end(tmp_path, monkeypatch, short_demo):
    """Else one that begins while the first evaluates would remove the model that it evaluates."""
    called = []

    def holding(call):
        def held(*arguments, **options):
            called.append(call.__name__)
            check_locked(tmp_path / "demo")
            return call(*arguments, **options)

        return held

    for name in ("evaluate", "plot_history", "attend"):
        monkeypatch.setattr(demo, name, holding(getattr(demo, name)))
    run_demo(tmp_path / "demo", "fr", "cpu", Console(quiet=True))
    assert called == ["evaluate", "plot_history", "attend"]


def test_a_demo_that_was_killed_is_followed_by_the_next(tmp_path, monkeypatch, short_demo):
    """While it wrote that the folder is a demo's, or when it had removed some files of an earlier one."""
    run_demo(tmp_path / "whole", "fr", "cpu", Console(quiet=True))
    ended = Result("interrupted", 1, 1, 1, 1.0, {}, None, None, int(signal.SIGTERM))
    monkeypatch.setattr(TranslationRun, "fit", lambda self: ended)

    def begins(name):
        (tmp_path / name / ".lock").write_text("process 1 on nowhere since 2020-01-01\n")
        with pytest.raises(SystemExit):
            run_demo(tmp_path / name, "fr", "cpu", Console(quiet=True))

    files = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file())
    removed = [path for path in files if path.name != "demo.txt"]
    for gone in (removed[:1], removed[-1:], removed[::2], ["config.toml"], ["data.json"]):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / "half")
        for path in gone:
            (folder / path).unlink()
        begins("half")
        shutil.rmtree(folder)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".demo.txt").write_bytes(b"made by")
    begins("new")
    (tmp_path / "new" / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="notes is not a run's"):
        run_demo(tmp_path / "new", "fr", "cpu", Console(quiet=True))


@pytest.mark.parametrize("way", ["symbolic", "hard"])
def test_a_prepared_dataset_replaces_no_original(tmp_path, way):
    origin, folder = tmp_path / "from", tmp_path / "to"
    origin.mkdir()
    folder.mkdir()
    for language in ("fr", "en"):
        lines = [f"{language} {i}" for i in range(20_000)]
        (origin / f"europarl-v7.fr-en.{language}").write_text("\n".join(lines) + "\n")
    original = origin / "europarl-v7.fr-en.en"
    before = original.read_bytes()
    (folder / "train.en").symlink_to(original) if way == "symbolic" else os.link(original, folder / "train.en")
    with pytest.raises(ValueError, match=r"train\.en is one of the originals"):
        prepare("europarl", origin, folder)
    assert original.read_bytes() == before
    assert os.listdir(folder) == ["train.en"]


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


@pytest.mark.parametrize("way", ["same", "symbolic", "hard"])
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.slow
def test_an_output_never_replaces_its_input(runs, invoke, tmp_path, name, way):
    before = (runs / "source.txt").read_bytes()
    output = runs / "source.txt" if way == "same" else tmp_path / "output"
    if way == "symbolic":
        output.symlink_to(runs / "source.txt")
    elif way == "hard":
        os.link(runs / "source.txt", output)
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


def test_a_file_of_somebody_elses_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    """In a sticky folder, such as /tmp, the rename failed when all was translated; a read-only file was replaced."""
    (tmp_path / "file").write_bytes(b"theirs")
    tmp_path.chmod(0o1777)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1, raising=False)
        for refuses in (check_output, lambda path: write_atomic(path, b"new")):
            with pytest.raises(PermissionError, match="cannot be written"):
                refuses(tmp_path / "file")
    check_output(tmp_path / "file")
    (tmp_path / "file").chmod(0o444)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "file")  # for root, all is writable
    with pytest.raises(PermissionError, match="cannot be written"):
        write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"theirs"


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


@pytest.mark.parametrize(
    "line",
    [
        "export --run translation --to loop",
        "compare loop",
        "data multi30k --from . --to loop",
        "translate --run translation --beam 9223372036854775807 the",
        "translate --run translation --beam 99999999999999999999 the",
    ],
)
def test_a_loop_of_links_and_a_number_beyond_all_are_a_users_mistakes(runs, invoke, line):
    if not (runs / "loop").is_symlink():
        (runs / "loop").symlink_to("loop")
    assert isinstance(invoke(line).exception, ValueError | OSError)


WRITES = {
    **{name: line for name, line in OUTPUTS.items() if name != "evaluate the run's own"},
    "plot history": "plot history translation --output {}",
    "plot positions": "plot positions --run translation --output {}",
    "plot attention": "plot attention --run translation --source the --output {}",
    "compare": "compare translation language --plot {}",
}


@pytest.mark.parametrize("name", WRITES)
def test_an_output_never_replaces_a_file_of_its_run(runs, invoke, tmp_path, name):
    run = runs / ("language" if name == "generate" else "translation")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "run").symlink_to(run)
    os.link(run / "data.json", tmp_path / "hard")
    for output in (
        run / "config.toml",
        run / "tokenizer" / "new.png",
        tmp_path / "run" / "metrics.csv",
        next(run.rglob("model.safetensors")),
        tmp_path / "hard",
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
    report = {
        "name": "multi30k",
        "languages": ["en", "fr"],
        "lines": counts,
        "notice": "",
        "tokens": {},
        "warnings": [],
    }
    (folder / "dataset.json").write_text(json.dumps(report))
    data = DataConfig(dataset=str(folder), tokenizer="words", bleu_sentences=0)
    model = {"d_model": 8, "heads": 1, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 8}
    TranslationRun.create(tmp_path / "run", data, model, TrainConfig(steps=2)).fit(show=False)
    os.link(folder / "test.fr", tmp_path / "hard")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for output in (folder / "test.fr", folder / "dataset.json", tmp_path / "hard"):
        ended = invoke(f"evaluate --run {tmp_path / 'run'} --beam 1 --output {output}")
        assert "would be replaced" in str(ended.exception), output
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert invoke(f"evaluate --run {tmp_path / 'run'} --beam 1 --output {folder / 'new'}").exit_code == 0


def test_an_output_without_a_name_is_written_to(invoke, tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        (tmp_path / "file").unlink()
        ended = invoke(f"translate --run translation --input source.txt --output /proc/self/fd/{file.fileno()}")
        assert ended.exit_code == 0, ended.exception
        file.seek(0)
        assert len(file.read().splitlines()) == 200
    assert list(tmp_path.iterdir()) == []
