"""Two processes under DistributedDataParallel, each with other padding, against one process that sees both batches."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastformer
from tests.support.closeness import assert_close, random
from tests.support.processes import leave, run_two, two_of_gloo

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")

WORLD, B, S, T, D = 2, 3, 5, 4, 8
# Sentences of both processes; in the first step the second process has nothing but padding.
LENGTHS = [([[5, 2, 0], [0, 0, 0]], [[1, 4, 3], [0, 0, 0]]), ([[1, 1, 2], [5, 5, 5]], [[2, 0, 4], [4, 4, 3]])]


def transformer() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Transformer(D, 2, 1, 1, 16, 0.0, batch_first=True, dtype=torch.float64)
    fastformer.convert(model)
    return model


def transformer_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    torch.manual_seed(10 * step + rank)
    source, target = random(B, S, D, grad=False), random(B, T, D, grad=False)
    hidden = [
        torch.arange(n) >= torch.tensor(side[rank])[:, None] for n, side in zip((S, T), LENGTHS[step], strict=True)
    ]
    masks = dict(zip(("src_key_padding_mask", "tgt_key_padding_mask"), hidden, strict=True))
    return model(source, target, memory_key_padding_mask=hidden[0], **masks).pow(3).sum()


def trained(wrap: Callable[[nn.Module], nn.Module], loss: Callable[[nn.Module, int], Tensor]) -> dict[str, Tensor]:
    """The parameters of a model after two steps."""
    model = transformer()
    wrapped, optimizer = wrap(model), torch.optim.SGD(model.parameters(), 0.01)
    for step in range(2):
        optimizer.zero_grad()
        loss(wrapped, step).backward()
        optimizer.step()
    return model.state_dict()


def work(rank: int, folder: str) -> None:
    two_of_gloo(rank, folder)
    found = trained(DistributedDataParallel, lambda model, step: transformer_loss(model, step, rank))
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    leave(rank, folder)


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    run_two(work, tmp_path)
    mean = lambda model, step: sum(transformer_loss(model, step, rank) for rank in range(WORLD)) / WORLD  # noqa: E731
    found, start = torch.load(tmp_path / "found.pt", weights_only=True), transformer().state_dict()
    for key, expected in trained(lambda model: model, mean).items():
        assert_close(found[key], expected, roundings=1e3)
    assert any(not torch.equal(found[key], start[key]) for key in found)


ROOT = Path(__file__).parents[3]

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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def ends(program: str, *arguments: str) -> list[tuple[int, str, str]]:
    """Exit codes and what two processes wrote."""
    port = free_port()
    known = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, **known, **paths, "RANK": str(rank), "LOCAL_RANK": str(rank)},
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


@pytest.mark.slow  # processes that import torch
def test_a_command_ends_with_its_own_exit_code():
    assert ends(HELD + COMMAND, "hold", "3") == [(3, "held 0\n", ""), (3, "held 1\n", "")]
