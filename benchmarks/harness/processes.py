"""Run commands under a time limit, for `benchmarks.lane` and `benchmarks.recipes`."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_command(command: Sequence[str], seconds: float, log: Path, grace: float = 5.0, **environment: str) -> str:
    """Run a command and append its output to a log.

    After `seconds` the command is interrupted (SIGINT), so that it can write its results. After `grace` more seconds it
    is killed. Processes that it started are killed with it. Interpreters find the packages of this checkout.

    Returns:
        "done", "failed, exit code N" or "cut after N s".
    """
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": os.pathsep.join(paths)} | environment
    with log.open("ab") as file:
        file.write(f"\n===== {seconds:.0f} s at most: {' '.join(command)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        code = process.wait(seconds)
        return f"failed, exit code {code}" if code else "done"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        return f"cut after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
