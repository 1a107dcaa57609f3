"""How the threads of a process wait for each other, which torch's OpenMP runtime reads when torch is imported.

Threads that sleep at once need longer to wake than a small operation takes: two of them train a small model slower than
one. Threads that spin for a moment first do not, but where somebody else computes on the same cores they spend the time
that the scheduler would give them after a sleep. Two cores, tokens per second of recipes/multi30k-en-de-cpu.toml:

    threads, and how they wait              idle     one core busy    both busy
    two, asleep at once                    3,300             4,200        2,200
    two, at most 3,000 pauses              5,900             2,800        2,200
    two, at most 10,000 pauses             6,500             1,800        2,300
    one                                    4,400             5,100        3,100

A pause is 40 to 140 cycles: 3,000 are 0.05 to 0.15 ms.
"""

import time
from collections.abc import Mapping
from pathlib import Path

_LOAD = Path("/proc/loadavg")  # "0.52 1.52 1.74 1/345 8422": running and all threads of the machine
_LOOKS, _APART = 5, 0.01  # who computes is there at each look, 10 ms apart; what wakes for a moment is not


def waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings to add: spin for a moment where nobody else computes, else sleep at once; those there are kept."""
    if "OMP_WAIT_POLICY" in environment:
        return {}
    spins = "GOMP_SPINCOUNT" not in environment and _is_idle()
    # For GNU's runtime the number is stronger than the policy; others sleep.
    return {"OMP_WAIT_POLICY": "PASSIVE"} | ({"GOMP_SPINCOUNT": "3000"} if spins else {})


def _is_idle() -> bool:
    """Whether this thread is the only one that runs; False where the system does not tell."""
    for look in range(_LOOKS):
        time.sleep(_APART if look else 0.0)
        try:
            running = int(_LOAD.read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):
            return False
        if running <= 1:
            return True
    return False
