"""Train recipes for several seeds under a time limit, evaluate them, and compare the scores with goals.

    python -m benchmarks.recipes --recipe recipes/multi30k-en-de-gpu.toml --data FOLDER --minutes 9 --out DIR
    python -m benchmarks.recipes ... -- --batch-tokens 8192                   # options of `fastformer train`

FOLDER holds the published files of the dataset, or folders of them. A seed is `fastformer train`, then `fastformer
evaluate`; `--at-once` seeds run in parallel. On a GPU a short training of each recipe runs first, because it fills the
cache of compiled kernels. A seed begins only if the time left covers the budget of its recipe. DIR gets:

- record.jsonl: one line a seed, with machine, commit, times, scores and goals
- RECIPE-SEED: the run folder, and RECIPE-SEED.txt, the translations of the test set
- log.txt: the output of the commands

Exit code: 1 if a command failed, 2 for invalid arguments, else 0.
"""

import argparse
import importlib
import json
import re
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import environment
from benchmarks.lane import run_command

GRACE = 25.0  # seconds from the interruption of a training to its end
MARGIN = 25.0  # seconds of a seed beside the budget of its recipe: start, data, evaluation
BEAM = 5
# By recipe and value. Seconds count from the start of `fastformer train` to its end.
GOALS: Mapping[str, Mapping[str, float]] = {
    "multi30k-en-de-gpu": {"BLEU": 40.0, "BLEU, Moses tokens": 41.0, "training seconds": 180},
    "multi30k-en-fr-gpu": {"BLEU, Moses tokens": 61.5},
    "wikitext2-word-gpu": {"perplexity": 80, "training seconds": 300},
}
LOWER_IS_BETTER = ("perplexity", "training seconds")
_SCORE = re.compile(r"^(BLEU|chrF|perplexity) ([\d.,]+)", re.MULTILINE)


class Recipe(NamedTuple):
    """A file of settings, and the folder of its prepared dataset."""

    path: Path
    settings: Mapping[str, Any]
    dataset: Path | None
    is_language: bool
    seconds: float  # of a seed


def read_recipe(path: Path, data: Path | None, out: Path) -> Recipe:
    """Read a recipe, and prepare its dataset from the published files once.

    Raises:
        ValueError, OSError: an invalid recipe, or missing files.
    """
    from fastformer.apps.text import prepare

    settings = tomllib.loads(path.read_text(encoding="utf-8"))
    is_language = settings.get("run", {}).get("kind") == "language"
    seconds = MARGIN + 60 * float(settings.get("train", {}).get("minutes", 0.0))
    name = Path(settings.get("data", {}).get("dataset", "")).name
    if name in ("", "numbers", "docstrings"):  # files of the recipe, or built in
        return Recipe(path, settings, None, is_language, seconds)
    if data is None:
        raise ValueError(f"--data: the dataset {name} of {path} needs the folder of its published files")
    folder = out / "data" / name
    if not folder.is_dir():
        published = [each for each in sorted(data.glob("*/")) if each.name.replace("-", "") == name]
        prepare(name, published[0] if published else data, folder)
    return Recipe(path, settings, folder, is_language, seconds)


def train(recipe: Recipe, run: Path, options: argparse.Namespace, *more: str) -> str:
    """Train a recipe into a run folder; return the state of the command."""
    command = [sys.executable, "-m", "fastformer", "train", *(["lm"] if recipe.is_language else [])]
    command += ["--config", str(recipe.path), "--run", str(run)]
    command += [] if recipe.dataset is None else ["--dataset", str(recipe.dataset)]
    seconds = options.end - time.monotonic() - GRACE
    return run_command([*command, *options.train, *more], max(1.0, seconds), options.out / "log.txt", GRACE)


def evaluate(recipe: Recipe, run: Path, seconds: float) -> dict[str, float]:
    """Return the scores of a run on its test set."""
    translations, output = run.with_suffix(".txt"), run.with_suffix(".scores")
    command = [sys.executable, "-m", "fastformer", "evaluate", "--run", str(run)]
    command += [] if recipe.is_language else ["--beam", str(BEAM), "--output", str(translations)]
    run_command(command, max(1.0, seconds), output)
    matches = _SCORE.findall(output.read_text(encoding="utf-8"))
    scores = {name: float(value.replace(",", "")) for name, value in matches}
    if recipe.dataset is not None and translations.is_file():
        scores |= moses_bleu(translations, recipe.dataset, recipe.settings["data"]["target"])
    return scores


def run_seed(recipe: Recipe, seed: int, options: argparse.Namespace) -> str:
    """Train and evaluate one seed, and record it; return its state."""
    run = options.out / f"{recipe.path.stem}-{seed}"
    begin = time.monotonic()
    if (left := options.end - begin - GRACE) < recipe.seconds:
        return f"{run.name}: left out, {left:.0f} s were left"
    state = train(recipe, run, options, "--seed", str(seed))
    row: dict[str, Any] = {"recipe": recipe.path.stem, "seed": seed, "state": state, "machine": options.machine}
    row |= {"options": options.train, "at once": options.at_once, "training seconds": time.monotonic() - begin}
    if (metrics := run / "metrics.jsonl").is_file() and not state.startswith("failed"):
        last = json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])
        row |= {"steps": last["step"]} | evaluate(recipe, run, options.end - time.monotonic())
    row["goals"] = reached_goals(recipe.path.stem, row)
    with (options.out / "record.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return f"{run.name}: {state}"


def moses_bleu(translations: Path, dataset: Path, language: str) -> dict[str, float]:
    """Return BLEU of lower-cased text with Moses punctuation and tokens, as publications on Multi30k report it.

    Return nothing if sacremoses is not installed.
    """
    try:
        moses = importlib.import_module("sacremoses")
    except ModuleNotFoundError:
        return {}
    from sacrebleu.metrics import BLEU

    normalizer, tokenizer = moses.MosesPunctNormalizer(language), moses.MosesTokenizer(language)
    texts = [path.read_text(encoding="utf-8").splitlines() for path in (translations, dataset / f"test.{language}")]
    hypotheses, references = (
        [tokenizer.tokenize(normalizer.normalize(line.lower()), return_str=True) for line in lines] for lines in texts
    )
    score = BLEU(tokenize="none", force=True).corpus_score(hypotheses, [references]).score
    return {"BLEU, Moses tokens": score}


def reached_goals(recipe: str, row: Mapping[str, Any]) -> dict[str, bool]:
    """Return for each goal with a value in the row whether the row reaches it."""
    return {
        f"{name} {limit:g}": row[name] <= limit if name in LOWER_IS_BETTER else row[name] >= limit
        for name, limit in GOALS.get(recipe, {}).items()
        if name in row
    }


def summary(record: Path) -> list[str]:
    """Return mean and deviation of each value of a recipe over its seeds, and how many seeds reach each goal."""
    rows = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()] if record.is_file() else []
    lines: list[str] = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        group = [row for row in rows if row["recipe"] == recipe]
        for name in sorted({name for row in group for name, value in row.items() if isinstance(value, float)}):
            values = [row[name] for row in group if name in row]
            deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            lines.append(f"{recipe}, {name}: {statistics.mean(values):,.2f}{deviation}, {len(values)} seeds")
        for goal in dict.fromkeys(goal for row in group for goal in row["goals"]):
            reached = [row["goals"][goal] for row in group if goal in row["goals"]]
            lines.append(f"{recipe}, goal {goal}: reached by {sum(reached)} of {len(reached)}")
    return lines


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.recipes", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--recipe", type=Path, nargs="+", required=True, help="TOML files for `fastformer train --config`")
    add("--data", type=Path, help="folder of the datasets' published files")
    add("--seeds", default="1,2,3", metavar="N,...", help="default: 1,2,3")
    add("--minutes", type=float, default=9.0, help="of all seeds together (default: 9)")
    add("--at-once", type=int, default=1, metavar="N", help="seeds in parallel; each is then slower (default: 1)")
    add("--out", type=Path, required=True, help="folder of the results")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    options.train = list(arguments[end + 1 :])
    try:
        options.seeds = sorted({int(seed) for seed in options.seeds.split(",")})
    except ValueError:
        parser.error(f"--seeds is {options.seeds!r}; allowed are whole numbers such as 1,2,3")
    if not options.minutes > 0 or options.at_once < 1:
        parser.error("--minutes must be above 0, --at-once 1 or more")
    options.end = time.monotonic() + 60 * options.minutes
    try:
        options.machine = environment.facts(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        options.recipes = [read_recipe(path, options.data, options.out) for path in options.recipe]
    except (ValueError, OSError, ImportError) as error:
        parser.error(" ".join(str(error).splitlines()))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and evaluate the seeds, and print the summary."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for recipe in options.recipes if torch.cuda.is_available() else ():
        with tempfile.TemporaryDirectory() as folder:
            train(recipe, Path(folder) / "run", options, "--steps", "30", "--validate-every", "30", "--average", "1")
    states = []
    with ThreadPoolExecutor(options.at_once) as threads:
        seeds = [
            threads.submit(run_seed, recipe, seed, options) for recipe in options.recipes for seed in options.seeds
        ]
        for state in (seed.result() for seed in seeds):
            print(state, flush=True)
            states.append(state)
    print("\n".join(summary(options.out / "record.jsonl")))
    return int(any(": failed" in state for state in states))


if __name__ == "__main__":
    sys.exit(main())
