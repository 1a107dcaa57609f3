"""Choose how OpenMP threads wait for each other; torch's OpenMP runtime reads the variables when torch is imported.

Threads that spin for a moment before they sleep train a small model faster on an idle machine, and slower if another
process computes on the same cores: docs/translation.md has the measurements.
"""

import time
from collections.abc import Mapping
from pathlib import Path

_LOAD = Path("/proc/loadavg")  # "0.52 1.52 1.74 1/345 8422": running and all threads of the machine


def wait_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to add: spin for about 0.1 ms on an idle machine, else sleep at once."""
    if "OMP_WAIT_POLICY" in environment:
        return {}
    spins = "GOMP_SPINCOUNT" not in environment and _is_idle()
    return {"OMP_WAIT_POLICY": "PASSIVE"} | ({"GOMP_SPINCOUNT": "3000"} if spins else {})


def _is_idle() -> bool:
    """Return whether no other thread runs, in at least one of five samples; False if the system does not report it."""
    for _ in range(5):
        try:
            running = int(_LOAD.read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):
            return False
        if running <= 1:
            return True
        time.sleep(0.01)
    return False
