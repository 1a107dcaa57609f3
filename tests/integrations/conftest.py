"""What the tests of Hugging Face models share."""

import pytest


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each packed attention got."""
    from tests.integrations.tiny_transformers import count_packed

    return count_packed(monkeypatch)
