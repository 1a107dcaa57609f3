"""What tests of the benchmarks' commands share."""

import pytest

from benchmarks.harness.environment import COMMIT


@pytest.fixture(autouse=True)
def _commit(monkeypatch):
    """Also where the files have no history."""
    monkeypatch.setenv(COMMIT, "0123456")


@pytest.fixture
def refused(capsys):
    """What a command says that does not take its arguments."""

    def run(main, *arguments):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
        assert code == 2
        return capsys.readouterr().err

    return run
