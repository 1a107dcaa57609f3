"""What a result was measured on: machine, driver, versions, commit, date."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "FASTFORMER_COMMIT"  # environment variable: what to believe where a copy of the files has no history
DIRTY = "+changes"


def facts(device: torch.device) -> dict[str, str]:
    """Name and version of everything that a figure depends on."""
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
    }
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    if device.type == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }
    return found


def commit() -> str:
    """The commit of the files, with `+changes` where they differ from it; "unknown" where there is no history."""
    if COMMIT in os.environ:
        return os.environ[COMMIT]
    head = _first_line("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if head == "unknown":
        return head
    return head + (DIRTY if _first_line("git", "-C", str(ROOT), "status", "--porcelain") != "" else "")


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
