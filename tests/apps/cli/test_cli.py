"""The command line as a person uses it, with real files, right and wrong input."""

import inspect
import json
import math
import re
import sys
from importlib.metadata import PackageNotFoundError
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

import fastformer as fastformer_package
from fastformer import functional
from fastformer.apps.cli import main
from fastformer.apps.cli.console import app
from fastformer.apps.cli.options import int_or_text
from fastformer.apps.system.waiting import waiting
from fastformer.apps.translation.run import load_translator
from tests.support.command_line import fastformer

TRAIN = (
    "train --valid-size 8 --test-size 8 --train-size 200 --vocabulary 60 --no-joint --d-model 16 --heads 2 "
    "--encoder-layers 1 --decoder-layers 1 --feed-forward 32 --batch-tokens 300 --steps 4 --warmup-steps 2 "
    "--validate-every 2 --bleu-sentences 4 --threads 1 --device cpu"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny trained run in `run/`."""
    folder = tmp_path_factory.mktemp("cli")
    done = fastformer(*TRAIN.split(), "--run", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "ended after 4 steps" in done.stdout
    return folder


def test_given_translations_are_scored(run: Path, tmp_path: Path) -> None:
    """A line a pair in the order of the files: log probability, tokens, perplexity."""
    sources, targets = ["nine", "twelve thousand one", "nine"], ["neuf", "douze mille un", "douze mille"]
    (tmp_path / "s").write_text("".join(f" {line} \n" for line in sources), encoding="utf-8")
    (tmp_path / "t").write_text("\n".join(targets), encoding="utf-8")
    arguments = ["score", "--run", "run", "--source", str(tmp_path / "s"), "--target", str(tmp_path / "t")]
    done = fastformer(*arguments, "--batch-size", "2", "--device", "cpu", cwd=run)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [[float(x) for x in line.split("\t")] for line in done.stdout.splitlines()]
    for row, (log_p, tokens) in zip(rows, load_translator(run / "run").score(sources, targets), strict=True):
        # Four digits, and fp32's roundings of another batch.
        assert row == pytest.approx([log_p, tokens, math.exp(-log_p / tokens)], abs=2e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("nine\none", "neuf", "s has 2 lines but t has 1; they must be pairs"),
        ("nine\n\n", "neuf\nun\n", "source 2 has 0 tokens; scored sentences must have 1 to 255"),
        ("nine\none\n", "neuf\n  \n", "target 2 has 0 tokens; scored sentences must have 1 to 255"),
        ("nine\n" + "one " * 300, "neuf\nun", "source 2 has 300 tokens; scored sentences must have 1 to 255"),
        ("", "neuf", "s: the file is empty"),
    ],
)
def test_what_cannot_be_scored_is_named(run: Path, source: str, target: str, message: str) -> None:
    (run / "s").write_text(source, encoding="utf-8")
    (run / "t").write_text(target, encoding="utf-8")
    done = fastformer("score", "--run", "run", "--source", "s", "--target", "t", "--output", "scores", cwd=run)
    assert done.returncode == 2
    assert re.sub(r"has \d{3} tokens", "has 300 tokens", done.stderr) == f"error: {message}\n"
    assert not (run / "scores").exists()
    assert fastformer("score", "--run", "run", "--source", "s", cwd=run).returncode == 2


def test_a_run_folder_describes_itself(run: Path) -> None:
    names = {path.name for path in (run / "run").iterdir()}
    assert {"config.toml", "data.json", "tokenizer", "checkpoints", "metrics.jsonl", "metrics.csv"} <= names
    assert (run / "run" / "history.png").stat().st_size > 1000
    described = fastformer("info", "--run", "run", cwd=run)
    assert described.returncode == 0
    assert "parameters" in described.stdout
    assert "backend: auto" in described.stdout


def test_the_version_is_the_package_s(tmp_path: Path) -> None:
    done = fastformer("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"fastformer {fastformer_package.__version__}\n")


def ops_after(heading: str, text: str) -> dict[str, str]:
    """The indented `op, op: verdict` lines under a heading of `fastformer info`, a verdict for each op."""
    lines = text.split("\n")[text.split("\n").index(heading) + 1 :]
    rows = [line.strip().split(": ", 1) for line in takewhile(lambda line: line.startswith("  "), lines)]
    assert len({verdict for _, verdict in rows}) == len(rows)  # no reason is said twice
    return {op: verdict for ops, verdict in rows for op in ops.split(", ")}


def test_info_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(
        "fastformer.apps.cli.commands.metadata.version", lambda name: {"triton": "3.6.0"}.get(name, "1.0")
    )
    monkeypatch.setattr("fastformer.functional.choice._TRITON", True)
    monkeypatch.setattr("fastformer.functional.choice._INTERPRETED", False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    heading = "with backend auto, a float32 tensor on cpu takes"
    text = fastformer("info", cwd=tmp_path).stdout
    assert {"Triton: 3.6.0", "GPU: none"} <= set(text.split("\n"))
    assert f"torch {torch.__version__}" in text
    verdicts = ops_after(heading, text)
    assert tuple(verdicts) == functional.OPS
    assert all(verdict.startswith("reference (needs a GPU") for verdict in verdicts.values())
    with fastformer_package.backend("triton"):
        text = fastformer("info", cwd=tmp_path).stdout
    assert "backend: triton (" in text
    assert ops_after(heading, text) == verdicts
    assert "raises (" in ops_after("with it, a float32 tensor on cpu takes", text)["layer_norm"]


def test_info_with_a_gpu_and_without_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    gpu = SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132, total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr("fastformer.apps.cli.commands.metadata.version", absent)
    lines = fastformer("info", cwd=tmp_path).stdout.split("\n")
    assert "GPU 0: H200, compute capability 9.0, 132 multiprocessors, 140 GiB" in lines
    assert "Triton: not installed (pip install 'fastformer[triton]')" in lines


def test_evaluate_prints_signatures(run: Path) -> None:
    done = fastformer(*["evaluate", "--run", "run", "--beam", "1", "--max-length", "5"], cwd=run)
    assert done.returncode == 0, done.stderr
    assert re.search(r"BLEU \d+\.\d+ \(nrefs:1\|case:mixed\|.*tok:13a", done.stdout)
    done = fastformer(*["evaluate", "--run", "run", "--bleu-tokenizer", "char", "--beam", "1"], cwd=run)
    assert "tok:char" in done.stdout
    assert re.search(r"chrF \d+\.\d+ \(nrefs:1", done.stdout)


def test_resume_continues_and_a_longer_budget_is_taken(run: Path) -> None:
    done = fastformer(*["train", "--run", "run", "--resume", "--steps", "6", "--device", "cpu"], cwd=run)
    assert done.returncode == 0, done.stderr
    assert "ended after 6 steps" in done.stdout
    steps = [json.loads(line)["step"] for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 6


def test_flags_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        "[data]\nvocabulary = 60\njoint = false\ntrain_size = 100\nvalid_size = 5\ntest_size = 5\nbleu_sentences = 0\n"
        "[model]\nd_model = 16\nheads = 2\nencoder_layers = 1\ndecoder_layers = 1\nfeed_forward = 16\n"
        "[train]\nsteps = 1\nlr = 0.5\nbatch_tokens = 200\n"
    )
    done = fastformer(*["train", "--config", "c.toml", "--lr", "0.25", "--device", "cpu", "--run", "r"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = (tmp_path / "r" / "config.toml").read_text()
    assert "lr = 0.25" in config
    assert "d_model = 16" in config


def test_every_whole_number_is_typed_as_one() -> None:
    """typer would take 64.0 for 64, which neither Python nor a file may say."""
    groups, names = [app], []
    for group in groups:
        groups += [each.typer_instance for each in group.registered_groups if each.typer_instance is not None]
        for command in group.registered_commands:
            for name, parameter in inspect.signature(command.callback or main).parameters.items():
                hint, *options = get_args(parameter.annotation) or (parameter.annotation,)
                if int in (hint, *get_args(hint)):
                    assert options[0].parser is int_or_text, (command.callback, name)
                    names.append(name)
    assert {"d_model", "steps", "beam", "top_k", "batch_size", "length"} <= set(names)


def test_standard_input_that_is_not_utf8(run: Path) -> None:
    done = fastformer("translate", "--run", "run", cwd=run, stdin=b"ok\n\xff\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "standard input:2: not valid UTF-8 (byte 0xff)" in done.stderr


def test_a_corrupt_checkpoint_is_named(run: Path) -> None:
    weights = next((run / "run" / "checkpoints").rglob("model.safetensors"))
    content = {path: path.read_bytes() for path in (run / "run" / "checkpoints").rglob("model.safetensors")}
    try:
        for path in content:
            path.write_bytes(content[path][:-10])
        done = fastformer("translate", "--run", "run", "one", cwd=run)
    finally:
        for path, kept in content.items():
            path.write_bytes(kept)
    assert done.returncode == 2
    assert weights.name in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("running", "given", "added"),
    [
        ("1/300", {}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}),
        ("2/300", {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ("9 cores", {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (None, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ("1/300", {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ("1/300", {"OMP_WAIT_POLICY": "ACTIVE"}, {}),
    ],
)
def test_threads_spin_on_an_idle_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: str | None, given: dict[str, str], added: dict[str, str]
) -> None:
    if running is not None:
        (tmp_path / "loadavg").write_text(f"0.52 1.52 1.74 {running} 8422")
    monkeypatch.setattr("fastformer.apps.system.waiting._LOAD", tmp_path / "loadavg")
    assert waiting(given) == added


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 12 bytes"),
    ],
    ids=["host", "GPU", "torch on a CPU"],
)
def test_too_little_memory_is_one_line(run: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def full() -> None:
        raise error

    monkeypatch.setattr(sys.modules["fastformer.apps.cli"], "app", full)
    done = fastformer("info", cwd=run)
    assert done.returncode == 2
    assert done.stderr == f"error: out of memory ({error})\n"


def test_another_runtime_error_is_a_bug_and_shows_where(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(sys.modules["fastformer.apps.cli"], "app", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        fastformer("info", cwd=run)
