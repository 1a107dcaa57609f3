"""Committed figures, tables and charts are those of the recorded runs."""

import math
import re
import subprocess

import pytest
import torch

from benchmarks import report, tables
from benchmarks.harness import environment
from benchmarks.harness.environment import DIRTY
from benchmarks.harness.record import Record, Row
from benchmarks.report import condense, load_results

MACHINE = {
    "date": "2026-01-02", "commit": "0123456789abcdef", "python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0",
    "processor": "A CPU", "gpu": "A GPU", "driver": "580.1", "cuda": "13.0", "cudnn": "91900",
}  # fmt: skip
MEASURED = Row(
    benchmark="attention",
    case="attention, length 1,024 | D64",
    against="sdpa",
    status="measured",
    ours=0.002,
    theirs=0.003,
    ratio=1.5,
    goal=1.2,
    rounds=30,
    matmul_rate=5e13,
    wall=1.3,
    graph=1.7,
    floor=0.625,
    operations_per_second=4.56e14,
    bytes_per_second=1.2e12,
    peak_bytes=(300, 400),
    saved_bytes=(0, 0),
    notes={"timer": "CUDA events", "gates": {"output": 1e-3}},
)
CEILINGS = {"copy": 4.2e12, "matmul_bfloat16": 7.5e14}


def changed(row: Row = MEASURED, **values) -> Row:
    return row.model_copy(update=values)


SLOW = changed(case="attention, length 2,048 | D64", ratio=0.5, theirs=0.001, graph=None)
FULL = changed(against="eager", status="out of memory", theirs=None, ratio=None, wall=None, graph=None, peak_bytes=None)
WRONG = changed(FULL, against="flex", status="wrong: output is off by 3e-01", goal=None)


def record(path, rows, machine=MACHINE, ceilings=CEILINGS):
    path.parent.mkdir(parents=True, exist_ok=True)
    written = Record(machine, path)
    for row in rows:
        written.add(row)
    if ceilings is None:
        written._file.close()
    else:
        written.close(ceilings)
    return path


@pytest.fixture
def result(tmp_path):
    """Return a run, condensed, written and read again."""
    run = record(tmp_path / "run.jsonl", [MEASURED, SLOW, FULL, WRONG])
    condense([run], "h200").save(tmp_path / "results")
    return load_results(tmp_path / "results")[0]


def test_readme_tables_and_charts_agree_with_the_results():
    image = pytest.importorskip("PIL.Image")
    results = load_results()
    section = report.section(results)
    assert section in (report.ROOT / "README.md").read_text(encoding="utf-8")
    assert sum(line.startswith("| ") for line in section.splitlines()) <= report.ROWS + 2 * len(results)
    assert (report.ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8") == report.all_tables(results)
    assert {path.name for path in report.DOCS.glob("benchmarks-*.png")} == {each.chart for each in results}
    for each in results:
        with image.open(report.DOCS / each.chart) as picture:
            assert picture.info["Source"] == each.digest


def test_a_result_keeps_what_the_run_measured(result):
    assert (result.machine, result.timer, result.ceilings) == (MACHINE, "CUDA events", CEILINGS)
    assert (result.matmul, result.complete) == ((5e13, 5e13), True)
    assert list(result.rows) == [changed(row, notes={}, matmul_rate=None) for row in (MEASURED, SLOW, FULL, WRONG)]


def test_the_tables(result):
    lines = report.whole_table(result.rows).splitlines()
    assert lines[0] == (
        "| case | against | ratio | goal | by the wall clock | as CUDA graphs | of the floor | TFLOP/s | GB/s "
        "| peak memory | saved for backward |"
    )
    rest = "62 % | 456 | 1,200"
    assert lines[2] == rf"| attention, length 1,024 \| D64 | sdpa | 1.50 | 1.2 | 1.30 | 1.70 | {rest} | 0.75 | 1.00 |"
    assert "| sdpa | 0.50 | 1.2 (missed) |" in lines[3]
    assert "| eager | out of memory | 1.2 |" in lines[4]
    assert "| flex | wrong: output is off by 3e-01 | - |" in lines[5]
    plain = Row(benchmark="a", case="a", against="b", status="measured")
    assert report.whole_table([plain]).splitlines()[0] == "| case | against | ratio | goal |"
    lines = report.summary_table(result.rows).splitlines()
    assert lines[2] == f"| attention | sdpa | 2 | {math.sqrt(0.85):.2f} | 0.50 | 1.70 | 1 of 2 |  |"
    assert lines[3:] == [
        "| attention | eager | 1 | - | - | - | - | 1 out of memory |",
        "| attention | flex | 1 | - | - | - | - | 1 wrong |",
    ]
    assert report.missed_goals(result.rows) == r"Missed: attention, length 2,048 \| D64 against sdpa (0.50 of 1.2)."
    waiting = changed(ratio=0.4)  # for the host: as CUDA graphs it is faster
    assert report.missed_goals([waiting]) == ""
    lost = changed(FULL, status="fastformer is out of memory", ours=None)
    assert tables.goals_held([MEASURED, lost, FULL]) == "1 of 2"


def test_a_run_that_was_cut_is_read_as_far_as_it_came(tmp_path):
    path = record(tmp_path / "cut.jsonl", [MEASURED, SLOW], ceilings=None)
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    cut = condense([path], "cut")
    assert [row.case for row in cut.rows] == [MEASURED.case]
    assert "the run was cut before its end" in cut.heading


def test_several_runs_of_a_machine_are_one_result_with_the_later_row_of_a_case(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "write", lambda results: [])
    lane = tmp_path / "lane"
    first = record(
        lane / "ops" / "benchmarks-a.jsonl", [MEASURED, WRONG], ceilings={"copy": 1.0, "matmul_float32": 2.0}
    )
    later = record(lane / "zero" / "benchmarks-b.jsonl", [SLOW, changed(ratio=9.0)], MACHINE | {"date": "2026-01-03"})
    (lane / "tuning.jsonl").write_text("{}", encoding="utf-8")
    for runs in ([lane], [first, later]):
        assert report.main([*map(str, runs), "h200"]) == 0
        (result,) = load_results(tmp_path / "results")
        assert [(row.case, row.against, row.ratio) for row in result.rows] == [
            (MEASURED.case, "sdpa", 9.0),
            (WRONG.case, "flex", None),
            (SLOW.case, "sdpa", 0.5),
        ]
        assert (result.ceilings, result.complete) == ({"copy": 4.2e12, "matmul_float32": 2.0, **CEILINGS}, True)
        assert result.machine["date"] == "2026-01-03"
    cut = record(lane / "cut.jsonl", [FULL], ceilings=None)
    assert not condense([first, cut], "h200").complete


def test_rows_of_other_commits_name_them(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "write", lambda results: [])
    commits = [MACHINE["commit"], "1" * 40, "2" * 40]
    runs = [
        record(tmp_path / str(number), rows, MACHINE | {"commit": commit})
        for number, (rows, commit) in enumerate(zip(([MEASURED, WRONG], [SLOW], [MEASURED]), commits, strict=True))
    ]
    assert report.main([*map(str, runs[:2]), "h200"]) == 0
    assert report.main(["--keep", str(runs[2]), "h200"]) == 0
    (result,) = load_results(tmp_path / "results")
    assert {(row.case, row.against): row.commit for row in result.rows} == {
        (MEASURED.case, "sdpa"): None,
        (WRONG.case, "flex"): commits[0],
        (SLOW.case, "sdpa"): commits[1],
    }
    assert result.machine["commit"] == commits[2]
    assert "2 of 3 rows are of earlier commits" in result.heading
    assert f"| {commits[1][:8]} |" in report.all_tables([result])
    other = record(tmp_path / "other", [SLOW], MACHINE | {"gpu": "Another"})
    assert report.main(["--keep", str(other), "h200"]) == 2


@pytest.mark.parametrize(
    ("rows", "change", "message"),
    [
        ([SLOW], {"gpu": "Another"}, "differ in gpu: 'A GPU' and 'Another'"),
        ([SLOW], {"xpu": "A GPU"}, "differ in xpu: None and 'A GPU'"),
        ([MEASURED], {"commit": "0123456" + DIRTY}, "uncommitted"),
        ([MEASURED], {"commit": "unknown"}, "FASTFORMER_COMMIT"),
        ([changed(FULL, ours=None)], {}, "no measurement"),
        ([changed(status="dry run")], {}, "dry run"),
    ],
)
def test_runs_that_differ_or_prove_nothing_are_refused(tmp_path, rows, change, message):
    paths = [record(tmp_path / "b", rows, MACHINE | change)]
    paths = [record(tmp_path / "a", rows), *paths] if "differ" in message else paths
    with pytest.raises(ValueError, match=message):
        condense(paths, "name")


def test_the_commit_is_that_of_the_files_or_an_error(tmp_path, monkeypatch):
    for commit in ("", "unknown", "HEAD", "0123"):
        monkeypatch.setenv(environment.COMMIT, commit)
        with pytest.raises(ValueError, match=f"FASTFORMER_COMMIT: the commit is '{commit}'; needed are 7 to 40"):
            environment.facts(torch.device("cpu"))
    monkeypatch.delenv(environment.COMMIT)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*git, *command], check=True)
    assert re.fullmatch("[0-9a-f]{40}", environment.commit())
    (tmp_path / "new").write_text("", encoding="utf-8")
    assert environment.commit().endswith(DIRTY)
    monkeypatch.setattr(environment, "ROOT", tmp_path / "copy")  # within a repository, without a history of its own
    (tmp_path / "copy").mkdir()
    with pytest.raises(ValueError, match=r"the commit is 'unknown'; .* set FASTFORMER_COMMIT"):
        environment.commit()
