"""What a result was measured on: machine, driver, versions, commit, date."""

import importlib
import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "FASTFORMER_COMMIT"  # environment variable: what to believe where a copy of the files has no history
DIRTY = "+changes"
_HASH = re.compile(r"[0-9a-f]{7,40}(\+changes)?")


def facts(device: torch.device) -> dict[str, str]:
    """Return name and version of everything that a figure depends on.

    Raises:
        ValueError: nothing says of which commit the files are; see `commit`.
    """
    machine = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
    }
    with suppress(ImportError):
        machine["triton"] = importlib.import_module("triton").__version__
    if device.type == "cuda":
        machine |= {
            "gpu": torch.cuda.get_device_name(device),
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }
    return machine


def commit() -> str:
    """Return the commit of the files, with `+changes` if they differ from it.

    Raises:
        ValueError: they have no history, and the environment variable names no commit.
    """
    if COMMIT in os.environ:
        return checked(os.environ[COMMIT], COMMIT)
    git = ("git", "--git-dir", str(ROOT / ".git"), "--work-tree", str(ROOT))  # never of a repository around a copy
    head = _first_line(*git, "rev-parse", "HEAD")
    changed = head != "unknown" and _first_line(*git, "status", "--porcelain") != ""
    return checked(head + DIRTY * changed, str(ROOT))


def checked(commit: str, where: str) -> str:
    """Return a commit's hash, or raise ValueError with the place where it was read."""
    if not _HASH.fullmatch(commit):
        raise ValueError(
            f"{where}: the commit is {commit!r}; needed are 7 to 40 hexadecimal digits. If a copy of the files has no "
            f"history, set {COMMIT} to the output of `git rev-parse HEAD` in the original"
        )
    return commit


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _first_line(*command: str) -> str:
    """Return the first line that a command prints, "" if it prints nothing, "unknown" if it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return ran.stdout.partition("\n")[0].strip()
