"""What the benchmarks use of pytest-benchmark, for machines without it: rounds and a place for results."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest


def benchmark_of(fullname: str) -> SimpleNamespace:
    """The parts of pytest-benchmark's fixture that `Race` uses."""
    return SimpleNamespace(fullname=fullname, extra_info={}, pedantic=_pedantic)


class StandIn:
    """A plugin with the fixture `benchmark`."""

    @pytest.fixture
    def benchmark(self, request: pytest.FixtureRequest) -> SimpleNamespace:
        """See `benchmark_of`."""
        return benchmark_of(request.node.nodeid)


def install(config: pytest.Config) -> None:
    """Stand in where the plugin is missing or switched off."""
    if not config.pluginmanager.hasplugin("benchmark"):
        config.addinivalue_line("markers", "benchmark: settings of pytest-benchmark, which is not here")
        config.pluginmanager.register(StandIn(), "benchmark-stand-in")


def _pedantic(run: Callable[[], object], setup: Callable[[], object], rounds: int, iterations: int) -> None:
    for _ in range(rounds):
        setup()
        for _ in range(iterations):
            run()
