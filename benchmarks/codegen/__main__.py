"""Compile the kernels without a GPU: registers, spills, shared memory, tensor core instructions.

python -m benchmarks.codegen                                 # all cases on all NVIDIA GPUs; a table; exit 1 if bad
python -m benchmarks.codegen --arch 90 --only attention      # some of them
python -m benchmarks.codegen --update                        # write the results to budget.json
python -m benchmarks.codegen --fresh                         # use no record: compile all (`make codegen`)

With another Triton, or another ptxas by TRITON_PTXAS_PATH (`make ptxas-13.5.37`), only the limits hold.

A compilation whose fingerprint (`compilation.py`) is in the budget file for this Triton version is not compiled again:
the recorded resources are held to the limits. Only `--fresh`, which CI runs, checks the records themselves. The limits,
and the comparison with the budget, are in `budget.py`.
"""

import argparse
import fnmatch
import os
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.codegen.budget import BUDGET, broken_limits, compare, dump, entry, judge, read_budget, recorded
from benchmarks.codegen.compilation import GPUS, Row, compile_all, find_cases, fingerprint, record, target_of
from benchmarks.codegen.reader import ARCHITECTURES, Resources

DEFAULT = tuple(ARCHITECTURES)
HEADER = (
    *("kernel", "case", "arch", "regs", "stack", "shared", "CTAs/SM"),
    *("wgmma", "serialised", "async", "times", "loops", "options"),
)


def table(rows: list[Row], results: dict[str, Resources | str]) -> str:
    """Write the rows as an aligned table; of each loop instructions/exponentials/cycles, see `checks/loops.py`."""
    lines: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        result = results[row.name]
        numbers: tuple[str, ...] = ("-",) * 9
        if not isinstance(result, str):
            serialised = ("SERIALISED" if result.serialised else "no") if result.wgmma and row.job.arch == 90 else "-"
            loops = [f"{each.instructions:.0f}/{each.exponentials:.3g}/{each.mma_cycles:.0f}" for each in result.loops]
            numbers = (
                *map(str, (result.registers, result.stack, result.shared, result.ctas)),
                str(result.wgmma) if result.wgmma or result.other_dots else "-",
                serialised,
                str(result.async_copies),
                f"{result.replication:g}" if result.replication > 1.0 else "-",
                " ".join(loops) or "-",
            )
        lines.append((row.kernel, row.case, target_of(row.job.arch), *numbers, row.configuration))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    return "\n".join("  ".join([*map(str.ljust, line, widths), line[-1]]) for line in lines)


def stop(message: str) -> NoReturn:
    """End with the message, as `argparse` does for a bad argument."""
    print(f"benchmarks.codegen: {message}", file=sys.stderr)
    raise SystemExit(2)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.codegen", description="Compile the kernels without a GPU.")
    parser.add_argument(
        "--arch",
        type=lambda text: int(text) if text.isdigit() else text,
        nargs="+",
        default=DEFAULT,
        help=" ".join(map(str, GPUS)),
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose kernel or case contains the text")
    parser.add_argument("--update", action="store_true", help="write the budget of this Triton version")
    parser.add_argument("--fresh", action="store_true", help="compile recorded rows, too")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--cases", default="benchmarks.codegen.cases", help="the package of the cases")
    parser.add_argument("--budget", type=Path, default=BUDGET, help="the budget file")
    options = parser.parse_args(argv)
    if unknown := [arch for arch in options.arch if arch not in GPUS]:
        parser.error(f"--arch {unknown[0]}: known are {', '.join(map(str, GPUS))}")
    if options.update and "TRITON_PTXAS_PATH" in os.environ:
        parser.error("--update with TRITON_PTXAS_PATH: the budget is what Triton's own ptxas makes")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least one process is needed")
    return options


def report(
    rows: list[Row],
    results: dict[str, Resources | str],
    faults: list[str],
    version: str,
    options: argparse.Namespace,
) -> int:
    """Print the table, the broken limits and the differences to the budget, or write that; return the exit status."""
    budget = read_budget(options.budget)
    listed = budget["triton"].get(version, {})
    archs = [target_of(arch) for arch in options.arch]
    in_scope = {name for name in listed if options.only in name and name.split(" | ")[-1] in archs}
    gone = in_scope - {row.name for row in rows}
    exceptions = [e for e in budget["exceptions"] if fnmatch.fnmatchcase(version, e.get("triton", "*"))]
    broken, exempt = judge(rows, results, exceptions)
    broken = faults + broken
    print(table(rows, results))
    differences: list[str] = []
    if options.update:
        compiled = [(row, result) for row in rows if isinstance(result := results[row.name], Resources)]
        remaining = {name: value for name, value in listed.items() if name not in gone}
        budget["triton"][version] = remaining | {row.name: entry(row, result) for row, result in compiled}
        options.budget.write_text(dump(budget))
        print(f"\nWrote {len(compiled)} rows to {options.budget}")
    elif listed:
        differences = [f"{name}: in the budget, and no case asks for it" for name in sorted(gone)]
        differences += compare(rows, results, listed)
    else:
        print(f"\nThere is no budget of Triton {version}: only the limits hold")
    for heading, lines in (("Exempt", exempt), ("Differences to the budget", differences), ("Broken limits", broken)):
        if lines:
            print(f"\n{heading}:", *lines, sep="\n  ")
    print(f"\n{len(rows)} compilations: {len(broken)} broken limits, {len(differences)} differences to the budget")
    if differences:
        print("If the differences are meant: python -m benchmarks.codegen --update")
    return int(bool(broken or differences))


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status, 1 for a broken limit or a worse budget."""
    options = arguments(argv)
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET", "0") != "0":
        stop("Triton was imported with TRITON_INTERPRET set; this needs a process of its own")
    os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are defined: the interpreter's do not compile
    try:
        import triton
    except ImportError:
        stop("it needs Triton: pip install 'fastformer[triton]'")
    version = triton.__version__.split("+")[0]
    if "TRITON_PTXAS_PATH" in os.environ:
        version += f" with ptxas {triton.knobs.nvidia.ptxas.version}"

    cases = find_cases(options.cases)
    rows: list[Row] = []
    faults: list[str] = []
    for arch in dict.fromkeys(options.arch):
        rows_of_arch, raised = record(cases, arch)
        rows, faults = rows + rows_of_arch, faults + raised
    rows = [row for row in rows if any(options.only in text for text in (row.name, *row.cases))]
    rows = [row._replace(key=fingerprint(row.job)) for row in rows]
    faults = [fault for fault in faults if options.only in fault]
    if not rows and not faults:
        stop(f"no kernel and no case contains {options.only!r}; {options.cases} has {len(cases)} cases")
    known = {} if options.fresh else recorded(rows, read_budget(options.budget)["triton"].get(version, {}))
    rows.sort(key=lambda row: (row.kernel, row.case, target_of(row.job.arch)))
    new = [row for row in rows if row.name not in known]
    counts = f"{len(rows)} compilations for {len(cases)} cases, {len(known)} of them recorded"
    print(f"Triton {version}: {counts}", file=sys.stderr, flush=True)

    results: dict[str, Resources | str] = {**known}
    for number, (row, result) in enumerate(compile_all(new, options.jobs), start=1):
        results[row.name] = result
        for _, text in broken_limits(row.job.arch, result):  # now: the end may be minutes away
            print(f"{row.name}: {text}", file=sys.stderr, flush=True)
        if number % 20 == 0 or number == len(new):
            print(f"{number}/{len(new)} compiled: {row.name}", file=sys.stderr, flush=True)
    return report(rows, results, faults, version, options)


if __name__ == "__main__":
    sys.exit(main())
