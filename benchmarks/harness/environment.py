"""What a result was measured on: machine, driver, versions, commit, date."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "FASTFORMER_COMMIT"  # environment variable: what to believe where a copy of the files has no history
DIRTY = "+changes"
_HASH = re.compile(r"[0-9a-f]{7,40}(\+changes)?")


def facts(device: "torch.device") -> dict[str, str]:
    """Name and version of everything that a figure depends on.

    Raises:
        ValueError: nothing says of which commit the files are; see `commit`.
    """
    import torch

    machine = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
    }
    try:
        import triton

        machine["triton"] = triton.__version__
    except ImportError:
        pass
    if device.type == "cuda":
        machine |= {
            "gpu": torch.cuda.get_device_name(device),
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }
    return machine


def commit() -> str:
    """The commit of the files, with `+changes` where they differ from it.

    Raises:
        ValueError: they have no history, and the environment variable names no commit. Whoever records asks before
            the first measurement, since figures of unknown code count for nothing.
    """
    if COMMIT in os.environ:
        return checked(os.environ[COMMIT], COMMIT)
    git = ("git", "--git-dir", str(ROOT / ".git"), "--work-tree", str(ROOT))  # never of a repository around a copy
    head = _first_line(*git, "rev-parse", "HEAD")
    changed = head != "unknown" and _first_line(*git, "status", "--porcelain") != ""
    return checked(head + DIRTY * changed, str(ROOT))


def checked(commit: str, where: str) -> str:
    """Give back what is a commit's hash.

    Raises:
        ValueError: it is none; `where` it was found.
    """
    if not _HASH.fullmatch(commit):
        raise ValueError(
            f"{where}: the commit is {commit!r}; needed are 7 to 40 hexadecimal digits. Where a copy of the files has "
            f"no history, set {COMMIT} to what `git rev-parse HEAD` says where they come from"
        )
    return commit


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _first_line(*command: str) -> str:
    """The first line that a command prints, "" where it prints nothing, "unknown" where it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return ran.stdout.partition("\n")[0].strip()
