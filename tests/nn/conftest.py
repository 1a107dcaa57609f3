"""What the tests of modules share."""

from typing import Any

import pytest

from fastformer.nn import layer_stack

_MOST_WASTED = layer_stack._MOST_WASTED


@pytest.fixture(autouse=True)
def _few_tokens_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks of tests are so small that their batches would run padded."""
    monkeypatch.setattr(layer_stack, "_MOST_WASTED", (0, 0))


@pytest.fixture
def few_tokens_run_padded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it, and few tokens run padded, as they do outside of tests."""
    return lambda: monkeypatch.setattr(layer_stack, "_MOST_WASTED", _MOST_WASTED)
