"""What tests of packed weights share."""

import pytest

from fastformer.nn import inference_weights


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a few numbers are packed like large ones."""
    monkeypatch.setattr(inference_weights, "_MIN_PACKED_SIZE", 1)
