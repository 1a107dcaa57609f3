"""The README's figures are those of the committed results."""

import pytest

from benchmarks import report

RUN = {
    "datetime": "2026-01-02T03:04:05",
    "commit_info": {"id": "0123456789abcdef", "dirty": False},
    "machine_info": {"cpu": {"brand_raw": "A CPU"}},
    "benchmarks": [
        {
            "extra_info": {
                "case": "a step",
                "against": "something",
                "ratio": 1.23456,
                "goal": 1.5,
                "ours_seconds": [1.0, 2.0],
                "matmul_flops_per_second": 5e10,
                "timer": "CPU time",
                "torch": "2.13.0",
                "python": "3.11",
            }
        }
    ],
}


def test_the_readme_agrees_with_the_results():
    assert report.section() in (report.ROOT / "README.md").read_text(encoding="utf-8")


def test_a_run_becomes_a_table_that_names_what_was_missed():
    text = report.table(report.condense(RUN))
    assert "| a step | something | 1.23 | 1.5 (missed) |" in text
    assert "2026-01-02 at commit 01234567: A CPU, torch 2.13.0" in text


def test_a_run_of_uncommitted_code_is_refused():
    with pytest.raises(ValueError, match="uncommitted"):
        report.condense({**RUN, "commit_info": {"id": "0", "dirty": True}})
    with pytest.raises(ValueError, match="no benchmark"):
        report.condense({**RUN, "benchmarks": []})
