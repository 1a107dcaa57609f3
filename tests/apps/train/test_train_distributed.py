"""Two processes train what one process trains: same losses, same weights, one set of files; with gloo on the CPU."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from fastformer.apps.train import CheckpointFolder, ProcessError, Processes, join_processes, read_metrics
from fastformer.apps.train.processes import local_device
from fastformer.apps.translation.model import translation_loss
from fastformer.apps.translation.run import load_translator
from tests.apps.cli.test_cli import TRAIN as SMALL
from tests.apps.train.distributed_task import (
    WORLD,
    double_trainer,
    language,
    resume,
    transformer_loss,
    transformer_steps,
    translation_batches,
    translation_model,
    work,
)
from tests.support.closeness import assert_close
from tests.support.command_line import succeed
from tests.support.noise import DEVIATIONS, noise
from tests.support.processes import start_processes
from tests.support.python import variables

pytestmark = pytest.mark.slow  # processes that import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)


TIMES = ("seconds", "tokens_per_second")


def values(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in TIMES} for record in read_metrics(folder)]


def assert_close_records(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], relative: float) -> None:
    assert [list(record) for record in ours] == [list(record) for record in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.pop("kind") == other.pop("kind")
        assert one == pytest.approx(other, rel=relative)


def assert_same_run(one: Path, other: Path) -> None:
    """Records (of sums in fp32) and last weights (in fp64) agree."""
    assert_close_records(values(one), values(other), 1e-6)
    last = [CheckpointFolder(folder / "checkpoints").open() for folder in (one, other)]
    assert last[0].step == last[1].step
    weights = [checkpoint.weights() for checkpoint in last]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-7, atol=1e-10)


def spawn(folder: Path, name: str) -> list[dict[str, Any]]:
    """What two processes saw that do the scenarios of a name."""
    running = start_processes(work, (str(folder), name), WORLD, join=False)
    until = time.monotonic() + 240
    while not running.join(1):
        if time.monotonic() > until:
            for process in running.processes:
                process.kill()
            pytest.fail("the processes wait for one another")
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The runs of one process, and all scenarios of two, started once."""
    folder = tmp_path_factory.mktemp("ddp")
    double_trainer(folder / "one").fit()
    double_trainer(folder / "parts", steps=6).fit()
    return folder, spawn(folder, "ddp")


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """As `ddp`, with sharded parameters."""
    folder = tmp_path_factory.mktemp("fsdp")
    double_trainer(folder / "one").fit()
    double_trainer(folder / "fsdp-parts", steps=6).fit()
    double_trainer(folder / "one-sgd", optimizer="sgd").fit()
    double_trainer(folder / "fsdp-sgd", optimizer="sgd", steps=6).fit()
    return folder, spawn(folder, "fsdp")


def test_the_losses_are_those_of_one_process(ddp):
    folder, seen = ddp
    assert_same_run(folder / "whole", folder / "one")
    counts = [record["step"] for record in read_metrics(folder / "whole") if record["kind"] == "train"]
    assert counts == list(range(1, 21))  # each record once
    for each in seen:  # accumulated batches are exchanged once a step; the model is one bucket
        assert each["whole"] == {"steps": 20, "exchanges": 20}


def test_a_process_with_padding_alone_takes_part(ddp):
    folder, _ = ddp
    mean = lambda model, step: sum(transformer_loss(model, step, rank) for rank in range(WORLD)) / WORLD  # noqa: E731
    for name, expected in transformer_steps(lambda model: model, mean).items():
        for rank in range(WORLD):
            actual = torch.load(folder / f"transformer-{rank}.pt", weights_only=True)[name]
            assert_close(actual, expected, roundings=1e3)


def test_a_run_goes_on_with_another_number_of_processes(ddp):
    folder, seen = ddp
    assert [each["resumed"] for each in seen] == [{"reason": "steps", "best": "step-13"}] * 2
    resume(double_trainer(folder / "parts", seed=60)).fit()
    assert_same_run(folder / "parts", folder / "one")


def test_dropout_differs_between_processes_and_resumes_bit_for_bit(ddp):
    folder, seen = ddp
    assert seen[0]["dropout"]["drawn"] != seen[1]["dropout"]["drawn"]
    # Ctrl-C reached the second process alone.
    assert [(each["dropout"]["reason"], each["dropout"]["step"]) for each in seen] == [("interrupted", 3)] * 2
    assert values(folder / "stopped") == values(folder / "dropout")
    ours, theirs = (CheckpointFolder(folder / name / "checkpoints").open().weights() for name in ("stopped", "dropout"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_the_first_process_validates_for_all(ddp):
    _, seen = ddp
    first, second = (each["plateau"] for each in seen)
    assert (first.pop("called"), second.pop("called")) == (4, 0)
    assert first == second
    assert (first["reason"], first["step"], first["value"]) == ("patience", 16, 1.0)


def test_an_error_of_one_process_ends_all(ddp):
    _, seen = ddp
    for each, first in zip(
        seen,
        (
            ["ValueError", "no text to validate on"],
            ["ProcessError", "process 0 failed: ValueError: no text to validate on"],
        ),
        strict=True,
    ):
        failing, infinite, unshared = each["failing"]
        assert failing == first
        assert infinite[1].startswith("loss or gradient is not finite at step 1 ")
        assert "Rows has no method share(rank, world), which 2 processes need" in unshared[1]


def test_sharded_parameters_train_the_same_and_their_checkpoints_are_whole(fsdp):
    folder, seen = fsdp
    assert_same_run(folder / "fsdp", folder / "one")
    assert_same_run(folder / "fsdp-sgd", folder / "one-sgd")
    assert sum(each["sharded"]["held"] for each in seen) == seen[0]["sharded"]["all"]
    assert [each["sharded"]["exchanges"] for each in seen] == [20, 20]
    assert (folder / "fsdp-parts" / "checkpoints" / "average").is_dir()
    (folder / "fsdp-parts" / "checkpoints" / "average").rename(folder / "average")
    resume(double_trainer(folder / "fsdp-parts", seed=60)).fit()
    assert_close_records(values(folder / "fsdp-parts"), values(folder / "one"), 1e-6)

    language(0, folder, "ddp")
    assert [each["language"]["obstacle"] for each in seen] == [None, None]
    runs = [folder / f"language-{how}" for how in ("fsdp", "ddp")]
    assert_same_run(*runs)
    files = [run / "checkpoints" / "step-6" / "model.safetensors" for run in runs]
    assert files[0].stat().st_size == files[1].stat().st_size  # tied embeddings once


def test_one_process_is_alone_with_and_without_a_group(monkeypatch):
    with join_processes() as processes:
        assert (processes.rank, processes.world, processes.is_main) == (0, 1, True)
        assert processes.agree([3.5, 0.0], True) == ([3.5, 0.0], True)
        assert processes.gather(4) == [4]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ProcessError, match="train within `fastformer"):
        Processes.current()
    assert local_device("cpu") == "cpu"
    with pytest.raises(
        ValueError, match=r"'cuda:0' is one GPU, but torchrun started several processes; give device 'cuda'"
    ):
        local_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device("cuda") == "cuda:1"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="process 1 of this machine has no own GPU: torch sees 1"):
        local_device("cuda")


TRAIN = (
    f"{SMALL} --warmup-steps 2 --dropout 0 --schedule inverse_sqrt --validate-every 3 --log-every 3 --bleu-sentences 0"
)


def worker(launcher: int, rank: int) -> int:
    """The process id of a worker that torchrun started."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError(f"torchrun {launcher} has no worker {rank}")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the workers in /proc")
def test_a_killed_worker_ends_torchrun_and_one_process_resumes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    launcher = subprocess.Popen(
        [*torchrun, "fastformer", *f"{TRAIN} --steps 100000 --run run".split()],
        cwd=tmp_path, env=variables(OMP_NUM_THREADS="1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints")
    try:
        until = time.monotonic() + 120
        while len(checkpoints.paths()) < 2 and launcher.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert launcher.poll() is None, launcher.communicate()
        assert checkpoints.paths()
        os.kill(worker(launcher.pid, 1), signal.SIGKILL)
        out, err = launcher.communicate(timeout=600)
    finally:
        launcher.kill()
    assert launcher.returncode != 0
    assert "Signal 9 (SIGKILL)" in err
    assert out.count("training: 200 pairs") == 1
    assert "processes: 2, ddp" in out
    steps = [record["step"] for record in read_metrics(tmp_path / "run") if record["kind"] == "validation"]
    assert steps == sorted(set(steps))

    last = checkpoints.open().step
    succeed("train", *f"--run run --resume --steps {last + 3} --device cpu".split(), cwd=tmp_path)
    assert checkpoints.open().step == last + 3
    (actual,) = load_translator(tmp_path / "run", device="cpu").translate(["one"])
    assert isinstance(actual, str)


def test_gradients_of_sharded_layers_in_bf16_are_as_exact_as_bf16(fsdp):
    """Within the noise of a formula all of whose numbers are rounded to bf16."""
    folder, _ = fsdp
    batches = translation_batches()

    def in_fp64() -> list[torch.Tensor]:
        model = translation_model().double()
        total = sum(translation_loss(model, each) for each in batches)
        tokens = sum(each.tokens for each in batches)
        return [total.detach(), *torch.autograd.grad(total / tokens, list(model.parameters()))]

    exact = in_fp64()
    step = torch.load(folder / "bf16.pt")
    assert step["dtypes"] == {"torch.float32"}
    values = [step["loss"], *step["grads"].values()]
    for value, expected, allowed in zip(values, exact, noise(in_fp64, exact, torch.bfloat16), strict=True):
        assert float((value.double() - expected).abs().max()) <= DEVIATIONS * allowed
    norm = math.sqrt(sum(float(x.double().square().sum()) for x in step["grads"].values()))
    assert float(step["norm"]) == pytest.approx(norm, rel=1e-5)


def test_gathered_layers_decode_with_a_cache_and_others_say_why_not(fsdp):
    for each in fsdp[1]:
        assert each["caches"]["gathered"] == each["caches"]["plain"] > 1
        assert each["caches"]["message"] == (
            "layers.0 is sharded, and decoding with a cache does not gather parameters: call unshard() on it"
        )


# In process 0, gloo is the last to hold a tensor, and takes half a second to let it go.
HELD = """
import sys, time, weakref
import torch
import torch.distributed as dist
from fastformer.apps.train import join_processes, processes as module

def hold(processes):
    x = torch.ones(3)
    if processes.rank == 0:
        weakref.finalize(x, time.sleep, 0.5).atexit = False
    else:
        time.sleep(0.3)
    work = dist.all_reduce(x, group=processes.control, async_op=True)
    if processes.rank == 1:
        work.wait()
        time.sleep(0.5)
    del x, work
    time.sleep(0.4)
"""
COMMAND = """
import typer
from fastformer.apps.cli import app, main

@app.command("hold")
def command(code: int) -> None:
    with join_processes() as processes:
        hold(processes)
        print("held", processes.rank)
    if code:
        raise typer.Exit(code)

main()
"""


def ends(program: str, *arguments: str) -> list[tuple[int, str, str]]:
    """Return exit codes and output of two processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    known = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments], env=variables(**known, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=120) for process in started]
        return [(process.returncode, *both) for process, both in zip(started, said, strict=True)]
    finally:
        for process in started:
            process.kill()


def test_a_command_ends_with_its_own_exit_code():
    assert ends(HELD + COMMAND, "hold", "3") == [(3, "held 0\n", ""), (3, "held 1\n", "")]
