"""What the fuzzers share."""

import pytest


@pytest.fixture
def numbers(request: pytest.FixtureRequest) -> range:
    """The numbers of the inputs."""
    return range(request.config.getoption("--fuzz"))
