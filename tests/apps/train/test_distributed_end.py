"""How several processes begin where one is missing.

And how they end while a thread of gloo's still has something of Python's to drop, for which it waits.
"""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from fastformer.apps.train import ProcessError, join_processes, processes

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
OWN = """
module._GRACE = 2.0
with join_processes() as processes:
    hold(processes)
    print("held", processes.rank)
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
@pytest.mark.parametrize("code", [0, 143])
def test_a_command_ends_with_its_own_exit_code(code):
    assert ends(HELD + COMMAND, "hold", str(code)) == [(code, "held 0\n", ""), (code, "held 1\n", "")]


@pytest.mark.slow
def test_a_program_of_ones_own_ends_once_the_threads_had_time():
    found = ends(HELD + OWN)
    assert [(code, out) for code, out, _ in found] == [(0, "held 0\n"), (0, "held 1\n")], found


@pytest.mark.parametrize(
    "changes", [{"RANK": "1"}, {"RANK": "two"}, {"WORLD_SIZE": "x"}, {"MASTER_PORT": None}], ids=str
)
def test_processes_that_do_not_find_one_another_say_so(changes, monkeypatch):
    monkeypatch.setattr(processes, "TIMEOUT", timedelta(seconds=1))
    known = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    for name, value in {**known, **changes}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(ProcessError, match="cannot connect to one another"), join_processes():
        pass
