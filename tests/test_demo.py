"""The demo, whole: what the README promises of it."""

from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the demo needs the extra `apps`")
pytest.importorskip("matplotlib", reason="the demo needs the extra `apps`")

from rich.console import Console

from fastformer.demo import run_demo


@pytest.mark.slow
@pytest.mark.parametrize("target", ["fr", "de"])
def test_numbers_never_seen_are_translated_exactly(tmp_path: Path, target: str) -> None:
    console = Console(record=True)
    scores = run_demo(tmp_path / "demo", target, "cpu", console)
    assert scores.sentences == 500
    assert scores.exact >= 0.99
    assert all((tmp_path / "demo" / name).stat().st_size > 5000 for name in ("attention.png", "history.png"))
    assert "numbers that never occurred in training" in console.export_text()
