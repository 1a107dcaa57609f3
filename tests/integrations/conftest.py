"""What the tests of Hugging Face models share."""

from typing import Any

import pytest

from fastformer import functional
from fastformer.integrations.transformers import entry


@pytest.fixture(autouse=True)
def _few_tokens_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests are so small that their batches would run padded in inference."""
    monkeypatch.setattr(entry, "_MOST_WASTED", 0)


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each packed attention got."""
    tokens, op = list[int](), functional.packed_attention

    def counting(q: Any, *args: Any, **settings: Any) -> Any:
        tokens.append(q.shape[0])
        return op(q, *args, **settings)

    monkeypatch.setattr(functional, "packed_attention", counting)
    return tokens
