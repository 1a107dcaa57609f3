"""The Makefile, as a user with half an environment meets it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.python import ROOT


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_site_stays_where_it_cannot_be_built(tmp_path: Path) -> None:
    page = tmp_path / "build" / "site" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text("here")
    command = ["make", "-f", str(ROOT / "Makefile"), "docs", "PYTHON=false"]  # a Python without any package
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "the site needs the extra docs: false -m pip install -c constraints.txt -e '.[docs]'" in done.stdout
    assert page.read_text() == "here"
