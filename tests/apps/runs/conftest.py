"""A text to train on."""

import pytest


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} the quick brown fox {i * 7 % 11} jumps over {i * 3 % 5}\n" for i in range(300)))
    return path
