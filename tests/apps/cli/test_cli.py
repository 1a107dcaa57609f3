"""The command line as a user calls it: training, evaluation, figures, comparisons; real files, and wrong input."""

import json
import math
import re
import sys
import tomllib
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastformer as fastformer_package
from fastformer import functional
from fastformer.apps.system.openmp import wait_variables
from fastformer.apps.translation.run import load_translator
from tests.support.command_line import fastformer, succeed
from tests.support.train_task import config, trainer

TRAIN = (
    "train --valid-size 8 --test-size 8 --train-size 200 --vocabulary 60 --no-joint --d-model 16 --heads 2 "
    "--encoder-layers 1 --decoder-layers 1 --feed-forward 32 --batch-tokens 300 --steps 4 --warmup-steps 2 "
    "--validate-every 2 --bleu-sentences 4 --threads 1 --device cpu"
)

TRAIN_LM = (
    "train lm --run lm --config own.toml --train-text text.txt --held-out 0.1 --tokenizer words --d-model 16 --heads 2 "
    "--layers 1 --feed-forward 32 --context 8 --batch-tokens 64 --steps 4 --validate-every 2 --threads 1 --device cpu"
)
TEXT = [
    f"the {animal} sees the {other}" for animal in ("cat", "dog", "cow", "hen") for other in ("mouse", "bird", "fox")
]


def test_given_translations_are_scored(runs: Path, tmp_path: Path) -> None:
    """A line a pair in the order of the files: log probability, tokens, perplexity."""
    sources, targets = ["w1", "w2 w3 w1", "w1"], ["w4", "w5 w1", "w2 w6"]
    (tmp_path / "s").write_text("".join(f" {line} \n" for line in sources))
    (tmp_path / "t").write_text("\n".join(targets))
    arguments = ["score", "--run", "translation", "--source", str(tmp_path / "s"), "--target", str(tmp_path / "t")]
    done = fastformer(*arguments, "--batch-size", "2", "--device", "cpu", cwd=runs)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [[float(x) for x in line.split("\t")] for line in done.stdout.splitlines()]
    for row, (log_p, tokens) in zip(rows, load_translator(runs / "translation").score(sources, targets), strict=True):
        # Four digits, and fp32's roundings of another batch.
        assert row == pytest.approx([log_p, tokens, math.exp(-log_p / tokens)], abs=2e-4, rel=1e-3)


def test_what_was_read_is_printed_before_the_vocabulary_is_learned(tmp_path: Path) -> None:
    done = fastformer(*TRAIN.replace("--vocabulary 60", "--vocabulary 5").split(), "--run", "run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "train: 200 pairs\nvalid: 8 pairs\ntest: 8 pairs\n")
    assert "a vocabulary of 5 is too small" in done.stderr


@pytest.mark.parametrize("vocabulary", ["", "--vocabulary 90"])
def test_only_a_vocabulary_size_that_the_user_gives_is_warned_about(
    tmp_path: Path, vocabulary: str, caplog: pytest.LogCaptureFixture
) -> None:
    succeed(*TRAIN.replace("--vocabulary 60", f"--tokenizer char {vocabulary}").split(), "--run", "run", cwd=tmp_path)
    assert any("a vocabulary of 90 is more" in each for each in caplog.messages) == bool(vocabulary)
    assert not any("a vocabulary of 8,000" in each for each in caplog.messages)


def test_a_translation_model_is_trained_described_and_evaluated(tmp_path: Path) -> None:
    out = succeed(*TRAIN.split(), "--average", "2", "--run", "run", cwd=tmp_path)
    assert "run folder: run; " in out
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.toml", "data.json", "tokenizer", "checkpoints", "metrics.jsonl", "metrics.csv"} <= names
    assert (tmp_path / "run" / "history.png").stat().st_size > 1000
    described = fastformer("info", "--run", "run", cwd=tmp_path).stdout
    assert "run: translation run, " in described
    assert re.search(r"checkpoints: best step-\d+ \(loss \d+\.\d+\), last step-\d+, average\n", described)
    for tokenizer, options in (("13a", ""), ("char", "--bleu-tokenizer char")):
        out = succeed(*f"evaluate --run run --beam 1 --max-length 5 {options}".split(), cwd=tmp_path)
        assert re.search(rf"BLEU \d+\.\d+ \(nrefs:1\|case:mixed\|.*tok:{tokenizer}", out)
        assert re.search(r"chrF \d+\.\d+ \(nrefs:1", out)
        assert "pairs; greedy search; checkpoint best\n" in out
    succeed(*["train", "--config", "run/config.toml", "--seed", "2", "--run", "again"], cwd=tmp_path)
    settings = [(tmp_path / name / "config.toml").read_text().splitlines() for name in ("run", "again")]
    assert [pair for pair in zip(*settings, strict=True) if pair[0] != pair[1]] == [("seed = 1", "seed = 2")]


def test_the_version_is_the_package_s(tmp_path: Path) -> None:
    done = fastformer("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"fastformer {fastformer_package.__version__}\n")


def ops_after(heading: str, text: str) -> dict[str, str]:
    """The indented `op, op: verdict` lines under a heading of `fastformer info`, a verdict for each op."""
    lines = text.split("\n")[text.split("\n").index(heading) + 1 :]
    rows = [line.strip().split(": ", 1) for line in takewhile(lambda line: line.startswith("  "), lines)]
    assert len({verdict for _, verdict in rows}) == len(rows)  # no reason is said twice
    return {op: verdict for ops, verdict in rows for op in ops.split(", ")}


def test_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132, total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr("fastformer.functional.choice._TRITON", True)
    monkeypatch.setattr("fastformer.functional.choice._INTERPRETED", False)
    heading = "with backend auto, a float32 tensor on cpu takes"
    text = fastformer("info", cwd=tmp_path).stdout
    assert "GPU 0: H200, compute capability 9.0, 132 multiprocessors, 140 GiB" in text.split("\n")
    assert f"torch {torch.__version__}" in text
    verdicts = ops_after(heading, text)
    assert tuple(verdicts) == functional.OPS
    assert all(verdict.startswith("reference (needs a GPU") for verdict in verdicts.values())
    with fastformer_package.backend("triton"):
        text = fastformer("info", cwd=tmp_path).stdout
    assert ops_after(heading, text) == verdicts
    assert "raises (" in ops_after("with it, a float32 tensor on cpu takes", text)["layer_norm"]


def test_threads_spin_on_an_idle_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastformer.apps.system.openmp._LOAD", tmp_path / "loadavg")
    assert wait_variables({}) == {"OMP_WAIT_POLICY": "PASSIVE"}  # the load is unknown
    for running, spinning in ((1, {"GOMP_SPINCOUNT": "3000"}), (2, {})):
        (tmp_path / "loadavg").write_text(f"0.52 1.52 1.74 {running}/300 8422")
        assert wait_variables({}) == {"OMP_WAIT_POLICY": "PASSIVE", **spinning}
    assert wait_variables({"OMP_WAIT_POLICY": "ACTIVE"}) == {}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 12 bytes"),
        KeyboardInterrupt(),
        RuntimeError("shapes do not fit"),
    ],
    ids=["host", "GPU", "torch on a CPU", "Ctrl-C", "a bug"],
)
def test_only_a_bug_shows_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def failing() -> None:
        raise error

    monkeypatch.setattr(sys.modules["fastformer.apps.cli"], "app", failing)
    if "shapes" in str(error):
        with pytest.raises(RuntimeError, match="shapes"):
            fastformer("info", cwd=tmp_path)
        return
    done = fastformer("info", cwd=tmp_path)
    interrupted = isinstance(error, KeyboardInterrupt)
    assert (done.returncode, done.stderr) == (130, "") if interrupted else (2, f"error: out of memory ({error})\n")


def test_a_language_model_is_trained_by_a_file_and_flags_and_evaluated(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXT) + "\n")
    (tmp_path / "own.toml").write_text("[train]\nlr = 0.01\nwarmup_steps = 3\n")
    out = succeed(*TRAIN_LM.split(), "--clip-norm", "0.5", cwd=tmp_path)
    assert "vocabulary 13" in out
    assert "run folder: lm; " in out
    train = tomllib.loads((tmp_path / "lm" / "config.toml").read_text())["train"]
    names = ("schedule", "label_smoothing", "warmup_steps", "lr", "clip_norm", "batch_tokens")
    assert [train[name] for name in names] == ["cosine", 0.0, 3, 0.01, 0.5, 64]
    out = succeed("evaluate", "--run", "lm", cwd=tmp_path)
    assert re.search(r"perplexity \d+\.\d\d per token \(6 predicted, <eos> counted\)", out)
    (tmp_path / "other.txt").write_text("the unicorn sees\nthe cat\n")
    done = fastformer("evaluate", "--run", "lm", "--source", "other.txt", "--checkpoint", "last", cwd=tmp_path)
    assert "(7 predicted, <eos> counted, 1 of them <unk>)" in done.stdout


def test_options_decide_the_text_that_is_generated(runs: Path) -> None:
    def generate(*arguments: str) -> str:
        options = "generate --run language --device cpu --max-new-tokens 12"
        done = fastformer(*options.split(), *arguments, cwd=runs)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    first = generate("w1 w2 ", "--seed", "3")
    assert first.startswith("w1 w2 ")
    assert first == generate("w1 w2", "--seed", "3", "--checkpoint", "last")
    assert first != generate("w1 w2", "--seed", "4")
    assert first != generate("w1 w2", "--temperature", "0")
    # Texts of several lines: an empty line ends each.
    endless = ("--no-stop-at-eos", "--max-new-tokens", "60", "--temperature", "4", "--seed", "3")
    single, both = generate("w1", *endless), generate("w1", "w2", *endless)
    assert single.count("\n") > 1
    assert both.startswith(single + "w2")
    assert both.endswith("\n\n")


class Broken:
    """A stream whose writes fail after the first `good`."""

    def __init__(self, error: Exception, good: int) -> None:
        self.error, self.good, self.asked = error, good, 0

    def write(self, text: str) -> int:
        self.asked += 1
        if self.asked > self.good:
            raise self.error
        return len(text)

    def flush(self) -> None:
        if self.asked > self.good:
            raise self.error

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize("error", [OSError(28, "full"), ValueError("closed")], ids=repr)
def test_a_broken_stream_ends_the_output_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stream = Broken(error, good=3)
    monkeypatch.setattr(sys, "stderr", stream)
    assert trainer(tmp_path, config(), show=True).fit().reason == "steps"
    assert stream.asked == 4


def record_line(kind: str, step: int, **values: Any) -> str:
    return json.dumps({"kind": kind, "step": step, "epoch": 1, "seconds": step / 2, **values}) + "\n"


RECORDS = "".join(
    [
        record_line("validation", 1, loss=float("nan"), perplexity=float("nan"), bleu=float("nan")),
        record_line("train", 1, loss=9.0),
        record_line("validation", 2, loss=3.0, perplexity=20.0, bleu=11.0, bleu_signature="tok:13a"),
        record_line("validation", 4, loss=2.0, perplexity=7.4, bleu=10.0, bleu_signature="tok:zh"),
        record_line("validation", 6, loss=2.0, perplexity=7.4, bleu=9.0),
        record_line("train", 7, loss=1.0),
    ]
)
BEST = {"loss": "4", "perplexity": "4", "bleu": "2", "exact": "6", "begun": "–"}


@pytest.fixture
def measured_runs(tmp_path: Path) -> Path:
    """A measured_runs with a run for each metric of `BEST`; `begun` has no records."""
    for name in BEST:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"[train]\nmetric = '{name}'\nlr = 0.5\n")
        if name != "begun":
            (tmp_path / name / "metrics.jsonl").write_text(RECORDS)
            data = {"fingerprint": name, "validation": "equal", "training": name}
            (tmp_path / name / "data.json").write_text(json.dumps(data))
    return tmp_path


def test_compare_prints_the_best_validation_by_the_metric_of_each_run_and_the_settings_that_differ(
    measured_runs: Path,
) -> None:
    """Lower is better for losses only; the last validation is shown if none has the metric."""
    out = succeed("compare", *BEST, cwd=measured_runs)
    *printed, remark = out.splitlines()
    assert remark == "The runs differ in text or tokens: their losses and perplexities do not compare."
    names, *lines = [line.strip().rsplit(maxsplit=len(BEST)) for line in printed]
    assert names == list(BEST)
    rows = {name: values for name, *values in lines}
    assert rows["best validation at step"] == [*BEST.values()]
    assert rows["steps"] == ["7", "7", "7", "7", "–"]
    assert rows["bleu_signature"] == ["tok:zh", "tok:zh", "tok:13a", "–", "–"]
    assert rows["train.metric"] == names
    assert rows["text.fingerprint"] == [name[:8] for name in names[:-1]] + ["–"]
    assert not {"train.lr", "text.training"} & rows.keys()


@pytest.mark.parametrize(
    ("options", "begin"),
    [
        ("--run translation --source w1 --kind encoder --layer 1 --head 2", "w1 -> "),
        ("--run translation --source w1 --layer all --head mean --target w2", "w1 -> w2"),
        ("--run language --text w1 --layer all", "wrote "),
        ("--run classification --text w1 --head mean", ""),
    ],
)
def test_plot_attention_writes_a_picture(runs: Path, tmp_path: Path, options: str, begin: str) -> None:
    out = succeed("plot", "attention", *options.split(), "--output", str(tmp_path / "new" / "a.png"), cwd=runs)
    assert out.startswith(begin)
    assert out.endswith(f"wrote {tmp_path / 'new' / 'a.png'}\n")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("command", "name"), [("history loss begun bleu", "p.png"), ("positions --d-model 7 --length 5", "p.PNG")]
)
def test_figures_are_png_files(measured_runs: Path, command: str, name: str) -> None:
    succeed("plot", *command.split(), "--output", name, cwd=measured_runs)
    assert (measured_runs / name).read_bytes().startswith(b"\x89PNG")
