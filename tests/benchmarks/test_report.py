"""Committed figures, tables and charts are those of the recorded runs."""

import json
import math
import re
import subprocess
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.harness import environment
from benchmarks.harness.environment import DIRTY
from benchmarks.harness.record import FORMAT, Row
from benchmarks.report import charts, pages, results, tables
from tests.benchmarks.races import pytest_benchmarks

MACHINE = {
    "date": "2026-01-02", "commit": "0123456789abcdef", "python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0",
    "processor": "A CPU", "gpu": "A GPU", "driver": "580.1", "cuda": "13.0", "cudnn": "91900",
}  # fmt: skip
MEASURED = Row(
    *("attention", "attention, length 1,024 | D64", "sdpa", "measured", 0.002, 0.003, 1.5, 1.2, 30, (1, 1), 5e13),
    wall=1.3,
    graph=1.7,
    floor=0.625,
    operations_per_second=4.56e14,
    bytes_per_second=1.2e12,
    peak_bytes=(300, 400),
    saved_bytes=(0, 0),
    at={"length": 1024},
    notes={"timer": "CUDA events", "gates": {"output": 1e-3}},
)
SLOW = replace(MEASURED, case="attention, length 2,048 | D64", ratio=0.5, theirs=0.001, at={"length": 2048})
FULL = replace(
    MEASURED, against="eager", status="out of memory", theirs=None, ratio=None, wall=None, graph=None, peak_bytes=None
)
WRONG = replace(FULL, against="flex", status="wrong: output is off by 3e-01", goal=None)
CEILINGS = {"copy": 4.2e12, "matmul_bfloat16": 7.5e14}


def record(path, rows, machine=MACHINE, ceilings=CEILINGS, version=FORMAT):
    lines = [{"format": version, "machine": machine}, *({"row": asdict(row)} for row in rows)]
    lines += [] if ceilings is None else [{"ceilings": ceilings}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def result(tmp_path):
    """A run, condensed, written and read again."""
    run = record(tmp_path / "run.jsonl", [MEASURED, SLOW, FULL, WRONG])
    return results.load(results.save(results.condense([run], "h200"), tmp_path / "results"))


def test_the_readme_and_the_tables_agree_with_the_results():
    results = pages.load_results()
    assert pages.section(results) in (pages.ROOT / "README.md").read_text(encoding="utf-8")
    assert (pages.ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8") == pages.all_tables(results)


def test_the_charts_agree_with_the_results():
    pytest.importorskip("PIL")
    wanted = {name: digest for result in pages.load_results() for name, digest in charts.digests(result).items()}
    found = {path.name: charts.digest_of(path) for path in pages.DOCS.glob(f"{charts.PREFIX}*.png")}
    assert found == wanted


def test_a_result_keeps_what_the_run_measured(result):
    assert result.machine == MACHINE
    assert (result.timer, result.ceilings, result.matmul, result.complete) == (
        "CUDA events",
        CEILINGS,
        (5e13, 5e13),
        True,
    )
    expected = [asdict(replace(row, notes={}, matmul_rate=0.0)) for row in (MEASURED, SLOW, FULL, WRONG)]
    assert [asdict(replace(row, matmul_rate=0.0)) for row in result.rows] == expected


def test_the_heading_names_all_that_a_figure_depends_on(result):
    said = tables.heading(result)
    for part in ("A GPU", "A CPU", "driver 580.1", "CUDA 13.0", "cuDNN 91900", "torch 2.11.0", "triton 3.6.0"):
        assert part in said
    for part in ("Python 3.12.3", "2026-01-02", "commit 01234567:", "CUDA events", "copy 4.2 TB/s", "750 TFLOP/s"):
        assert part in said


def test_the_whole_table(result):
    lines = tables.whole_table(result.rows).splitlines()
    assert lines[0] == (
        "| case | against | ratio | goal | by the wall clock | as CUDA graphs | of the floor | TFLOP/s | GB/s "
        "| peak memory | saved for backward |"
    )
    rest = "62 % | 456 | 1,200"
    assert lines[2] == rf"| attention, length 1,024 \| D64 | sdpa | 1.50 | 1.2 | 1.30 | 1.70 | {rest} | 0.75 | 1.00 |"
    assert "| sdpa | 0.50 | 1.2 (missed) |" in lines[3]
    assert "| eager | out of memory | 1.2 |" in lines[4]
    assert "| flex | wrong: output is off by 3e-01 | - |" in lines[5]


@pytest.mark.parametrize(("goal", "said"), [(None, "0.75"), (0.75, "0.75 (goal 0.75)"), (0.5, "0.75 (missed 0.5)")])
def test_memory_has_goals_of_its_own(goal, said):
    both = replace(MEASURED, saved_bytes=MEASURED.peak_bytes, peak_goal=goal, saved_goal=goal)
    assert f"| {said} | {said} |" in tables.whole_table([both])


def test_columns_that_no_row_fills_are_left_out():
    plain = replace(MEASURED, graph=None, wall=None, floor=None, operations_per_second=None, bytes_per_second=None)
    plain = replace(plain, peak_bytes=None, saved_bytes=None)
    assert tables.whole_table([plain]).splitlines()[0] == "| case | against | ratio | goal |"


def test_the_summary(result):
    lines = tables.summary_table(result.rows).splitlines()
    assert lines[2] == f"| attention | sdpa | 2 | {math.sqrt(0.75):.2f} | 0.50 | 1.50 | 1 of 2 |  |"
    assert lines[3] == "| attention | eager | 1 | - | - | - | - | 1 out of memory |"
    assert lines[4] == "| attention | flex | 1 | - | - | - | - | 1 wrong |"
    assert tables.misses(result.rows, "x") == (r"Missed: attention, length 2,048 \| D64 against sdpa (0.50 of 1.2).")


def test_ours_out_of_memory_is_a_goal_not_held():
    lost = replace(FULL, status="fastformer is out of memory", ours=None)
    assert tables.goals_held([MEASURED, lost, FULL]) == "1 of 2"


def test_large_results_are_summarised_in_the_readme(result):
    assert "of the floor" in pages.section([result])
    large = replace(result, rows=tuple(replace(MEASURED, case=f"case {i}") for i in range(tables.WHOLE + 1)))
    text = pages.section([large])
    assert "goals held" in text
    assert "of the floor" not in text
    assert text.startswith(pages.BEGIN)
    assert text.endswith(pages.END)
    decisive = replace(MEASURED, **dict(zip(("benchmark", "against"), tables.DECISIVE[0], strict=True)))
    text = pages.section([replace(large, rows=(*large.rows, decisive))])
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {decisive.benchmark}"]


def test_a_run_that_was_cut_is_read_as_far_as_it_came(tmp_path):
    path = record(tmp_path / "cut.jsonl", [MEASURED, SLOW], ceilings=None)
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    cut = results.condense([path], "cut")
    assert [row.case for row in cut.rows] == [MEASURED.case]
    assert not cut.complete
    assert "cut before its end" in tables.heading(cut)


def test_of_a_case_measured_twice_the_later_counts(tmp_path):
    run = results.read_run(record(tmp_path / "run.jsonl", [MEASURED, SLOW, replace(MEASURED, ratio=9.0)]))
    assert [row.ratio for row in run.rows] == [9.0, 0.5]


@pytest.fixture
def three_runs(tmp_path):
    """In folders of their own, as benchmarks.lane leaves them."""

    def write(name, rows, change=None, **others):
        (tmp_path / "lane" / name).mkdir(parents=True)
        return record(tmp_path / "lane" / name / pages.RECORD, rows, MACHINE | (change or {}), **others)

    write("ops", [MEASURED, WRONG], ceilings={"copy": 1.0, "matmul_float32": 2.0})
    write("training", [SLOW, replace(MEASURED, ratio=9.0)], {"date": "2026-01-03"})
    (tmp_path / "lane" / "training" / "tuning.jsonl").write_text("{}", encoding="utf-8")
    return write


def test_several_runs_of_a_machine_are_one_result(three_runs, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(pages, "write", lambda results: [])
    for given in ([tmp_path / "lane"], [tmp_path / "lane" / run / pages.RECORD for run in ("ops", "training")]):
        assert pages.main([*map(str, given), "h200"]) == 0
        (found,) = pages.load_results(tmp_path / "results")
        assert [(row.case, row.against, row.ratio) for row in found.rows] == [
            (MEASURED.case, "sdpa", 9.0),
            (WRONG.case, "flex", None),
            (SLOW.case, "sdpa", 0.5),
        ]
        assert (found.ceilings, found.complete) == ({"copy": 4.2e12, "matmul_float32": 2.0, **CEILINGS}, True)
        assert found.machine["date"] == "2026-01-03"
    three_runs("cut", [FULL], ceilings=None)
    assert not results.merge(sorted((tmp_path / "lane").rglob(pages.RECORD))).complete


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"commit": "abcdef0"},
            "ops/benchmarks.jsonl and .*/zero/.* differ in commit: '0123456789abcdef' and 'abcdef0'",
        ),
        ({"torch": "2.12.0"}, "differ in torch: '2.11.0' and '2.12.0'"),
        ({"gpu": "Another"}, "differ in gpu: 'A GPU' and 'Another'"),
        ({"xpu": "A GPU"}, "differ in xpu: None and 'A GPU'"),
    ],
)
def test_runs_of_other_machines_or_code_are_refused(change, message, three_runs, tmp_path):
    three_runs("zero", [SLOW], change)
    with pytest.raises(ValueError, match=message):
        results.condense(sorted((tmp_path / "lane").rglob(pages.RECORD)), "name")


def test_a_lane_that_was_cut_is_no_complete_run(tmp_path):
    path = record(tmp_path / "run.jsonl", [MEASURED])
    assert results.read_run(path).complete
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"ceilings": {"copy": 1.0}, "cut": ["attention"]}) + "\n")
    run = results.read_run(path)
    assert (run.complete, run.ceilings) == (False, {**CEILINGS, "copy": 1.0})


@pytest.mark.parametrize(
    ("rows", "change", "message"),
    [
        ([MEASURED], {"commit": "0123456" + DIRTY}, "uncommitted"),
        ([MEASURED], {"commit": "unknown"}, "FASTFORMER_COMMIT"),
        ([MEASURED], {"commit": ""}, "FASTFORMER_COMMIT"),
        ([], {}, "no measurement"),
        ([replace(FULL, ours=None)], {}, "no measurement"),
        ([replace(MEASURED, status="dry run")], {}, "dry run"),
    ],
)
def test_runs_that_prove_nothing_are_refused(tmp_path, rows, change, message):
    with pytest.raises(ValueError, match=message):
        results.condense([record(tmp_path / "run.jsonl", rows, MACHINE | change)], "name")


@pytest.mark.parametrize("name", ["", "../name", "A", "a--b", "a.b"])
def test_names_are_those_of_files(tmp_path, name):
    with pytest.raises(ValueError, match=r"NAME is .*; allowed are small letters and digits"):
        results.condense([record(tmp_path / "run.jsonl", [MEASURED])], name)


def test_another_version_is_refused_by_both_versions_names(tmp_path):
    message = f"format {FORMAT + 1}, and this version reads format {FORMAT}"
    with pytest.raises(ValueError, match=message):
        results.condense([record(tmp_path / "run.jsonl", [MEASURED], version=FORMAT + 1)], "name")
    old = tmp_path / "old.json"
    old.write_text('{"date": "2026-01-02", "rows": []}', encoding="utf-8")
    with pytest.raises(ValueError, match=f"format None, and this version reads format {FORMAT}: measure again"):
        results.load(old)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("not json\n{}\n", "line 1 is no JSON"),
        (json.dumps({"format": FORMAT}), "names no machine"),
        (json.dumps({"format": FORMAT, "machine": {}}) + '\n{"row": {"speed": 1}}', "unknown field 'speed'"),
        (json.dumps({"format": FORMAT, "machine": {}}) + '\n{"row": {"case": "a"}}', "no 'benchmark'"),
    ],
)
def test_a_file_that_is_no_run_is_named(tmp_path, text, message):
    path = tmp_path / "run.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        results.condense([path], "name")
    assert str(path) in str(error.value)


def test_the_command_line_refuses_in_one_line_and_keeps_everything(tmp_path, capsys):
    before = (pages.ROOT / "README.md").read_text(encoding="utf-8")
    for arguments in (["a"], [str(tmp_path / "none.jsonl"), "name"], [str(tmp_path), "name"]):
        assert pages.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert (pages.ROOT / "README.md").read_text(encoding="utf-8") == before


def test_growth_is_drawn_of_cases_that_differ_in_one_number():
    rows = [
        replace(
            MEASURED,
            case=f"attention, length {n:,} D64, {direction}",
            ours=n * 1e-6,
            theirs=None if n == 4096 else n * 4e-6,
            status="out of memory" if n == 4096 else "measured",
            peak_bytes=None,
            at={"length": n, "padding": n / 1e5},
        )
        for direction in ("forward", "backward")
        for n in (1024, 2048, 4096)
    ]
    panels = charts.panels(rows)
    assert [panel.title for panel in panels] == [f"attention, length … D64, {d}" for d in ("forward", "backward")]
    assert {panel.axis for panel in panels} == {"length"}
    assert panels[0].lines == {"fastformer": [(1024, 1), (2048, 2), (4096, 4)], "sdpa": [(1024, 4), (2048, 8)]}
    assert panels[0].out_of_memory == {"sdpa": [4096]}
    assert charts.panels(rows[:2]) == []


@pytest.mark.parametrize(
    ("case", "axis", "value", "family"),
    [
        ("layer norm 8,192 x 1,024", "width", 1024, "layer norm 8,192 x …"),
        ("batch 6, d512 6+6", "batch", 6, "batch …, d512 6+6"),
        ("6+6 layers, batch 6", "batch", 6, "6+6 layers, batch …"),
        ("step, 55.0 % padding", "padding", 0.55, "step, … % padding"),
        ("length 16k, forward", "length", 16384, "length …, forward"),
        ("greedy search", "beam", 1, None),
    ],
)
def test_the_number_on_the_axis_is_found_in_a_case(case, axis, value, family):
    assert charts._family(case, axis, value) == family


def test_many_rows_share_a_bar_with_worst_and_best():
    many = [replace(MEASURED, ratio=2.0 ** (i % 3 - 1), goal=1.0) for i in range(60)]
    (bar,) = charts.bars(many)
    assert (bar.ratio, bar.worst, bar.best, bar.goal, bar.goals, bar.missed) == (1.0, 0.5, 2.0, 1.0, 60, 20)
    assert len(charts.bars(many[:9])) == 9


def test_pictures_are_written_with_their_digest(result, tmp_path):
    pytest.importorskip("matplotlib")
    third = replace(SLOW, case="attention, length 4,096 | D64", at={"length": 4096})
    result = replace(result, rows=(*result.rows, third))
    drawn = charts.draw(result, tmp_path / "docs")
    assert {path.name: charts.digest_of(path) for path in drawn} == charts.digests(result)
    assert [path.name for path in drawn] == ["benchmarks-h200.png", "benchmarks-h200-attention-scaling.png"]
    faster = replace(result, rows=(replace(MEASURED, ratio=1.6), *result.rows[1:]))
    assert charts.digests(faster)[drawn[0].name] != charts.digest_of(drawn[0])


@pytest.mark.parametrize("given", ["", "unknown", "HEAD", "0123"])
def test_a_commit_is_a_hash_or_an_error(given, monkeypatch):
    monkeypatch.setenv(environment.COMMIT, given)
    with pytest.raises(ValueError, match=f"FASTFORMER_COMMIT: the commit is '{given}'; needed are 7 to 40"):
        environment.facts(torch.device("cpu"))


def test_the_commit_is_never_that_of_a_repository_around_a_copy(tmp_path, monkeypatch):
    monkeypatch.delenv(environment.COMMIT, raising=False)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*git, *command], check=True)
    assert re.fullmatch("[0-9a-f]{40}", environment.commit())
    (tmp_path / "new").write_text("", encoding="utf-8")
    assert environment.commit().endswith(DIRTY)
    monkeypatch.setattr(environment, "ROOT", tmp_path / "copy")
    (tmp_path / "copy").mkdir()
    with pytest.raises(ValueError, match=r"the commit is 'unknown'; .* set FASTFORMER_COMMIT"):
        environment.commit()


def test_a_record_without_a_commit_is_refused_before_anything_is_measured(tmp_path):
    record = str(tmp_path / "run.jsonl")
    ran = pytest_benchmarks("benchmarks", "--benchmark-only", "--record", record, **{environment.COMMIT: ""})
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--record: FASTFORMER_COMMIT: the commit is ''" in ran.stderr
    assert not list(tmp_path.iterdir())
