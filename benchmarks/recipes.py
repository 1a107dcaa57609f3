"""Train recipes for several seeds under a time limit, evaluate them, and compare the scores with goals.

    python -m benchmarks.recipes --recipe recipes/multi30k-en-de-gpu.toml --data FOLDER --minutes 9 --out DIR
    python -m benchmarks.recipes ... -- --batch-tokens 8192                   # options of `fastformer train`

FOLDER holds the published files of the dataset, or folders of them. A seed is `fastformer train`, then `fastformer
evaluate`; `--at-once` seeds run in parallel. On a GPU a short training of each recipe runs first, because it fills the
cache of compiled kernels. A seed begins only if the time left covers the budget of its recipe. DIR gets:

- record.jsonl: one line a seed, with machine, commit, times, scores and goals
- RECIPE-SEED: the run folder, and RECIPE-SEED.txt, the translations of the test set
- log.txt: the output of the commands

A seed whose run folder exists is not trained again. Exit code: 1 if a command failed, 2 for invalid arguments, else 0.
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

from benchmarks.harness import environment
from benchmarks.lane import run_command

GRACE = 25.0  # seconds from the interruption of a training to its end
MARGIN = 25.0  # seconds of a seed beside the budget of its recipe: start, data, evaluation
MIN, MAX = "at least", "at most"
# By recipe: value of the record, bound. Seconds count from the start of `fastformer train` to its end.
GOALS: Mapping[str, Sequence[tuple[str, str, float]]] = {
    "multi30k-en-de-gpu": (("BLEU", MIN, 40.0), ("BLEU, Moses tokens", MIN, 41.0), ("training seconds", MAX, 180)),
    "multi30k-en-fr-gpu": (("BLEU, Moses tokens", MIN, 61.5),),
    "wikitext2-word-gpu": (("perplexity", MAX, 80), ("training seconds", MAX, 300)),
}
_SCORE = re.compile(r"^(BLEU|chrF|perplexity) ([\d.,]+)", re.MULTILINE)


class Recipe(NamedTuple):
    """A file of settings, and the folder of its dataset."""

    path: Path
    settings: Mapping[str, Any]
    dataset: str | None = None

    @property
    def is_language(self) -> bool:
        return bool(self.settings.get("run", {}).get("kind") == "language")

    @property
    def seconds(self) -> float:
        return MARGIN + 60 * float(self.settings.get("train", {}).get("minutes", 0.0))


def read_recipe(path: Path, data: Path | None, out: Path) -> Recipe:
    """Read a recipe, and prepare its dataset from the published files once.

    Raises:
        ValueError, OSError: an invalid recipe, or missing files.
    """
    from fastformer.apps.text import prepare

    settings = tomllib.loads(path.read_text(encoding="utf-8"))
    name = Path(settings.get("data", {}).get("dataset", "")).name
    if name in ("", "numbers", "docstrings"):  # files of the recipe, or built in
        return Recipe(path, settings)
    if data is None:
        raise ValueError(f"--data: the dataset {name} of {path} needs the folder of its published files")
    folder = out / "data" / name
    if not folder.is_dir():
        published = [each for each in sorted(data.glob("*/")) if each.name.replace("-", "") == name]
        prepare(name, published[0] if published else data, folder)
    return Recipe(path, settings, str(folder))


class Session:
    """Trainings of one call of the command, until a moment of `time.monotonic`."""

    def __init__(self, options: argparse.Namespace, out: Path, train_options: Sequence[str]) -> None:
        import torch

        self.options, self.out, self.train_options = options, out, train_options
        self.end: float = time.monotonic() + 60 * options.minutes
        self.log = out / "log.txt"
        self.gpu = torch.cuda.is_available() and options.device != "cpu"
        self.machine = environment.facts(torch.device("cuda" if self.gpu else "cpu"))

    def left(self) -> float:
        return self.end - time.monotonic() - GRACE

    def train(self, recipe: Recipe, run: Path, *more: str) -> str:
        """Train a recipe into a run folder; return the state of the command."""
        command = [sys.executable, "-m", "fastformer", "train", *(["lm"] if recipe.is_language else [])]
        command += ["--config", str(recipe.path), "--run", str(run), "--device", self.options.device]
        command += [] if recipe.dataset is None else ["--dataset", recipe.dataset]
        return run_command([*command, *self.train_options, *more], max(1.0, self.left()), self.log, GRACE)

    def evaluate(self, recipe: Recipe, run: Path) -> dict[str, float]:
        """Return the scores of a run on its test set."""
        translations, output = run.with_suffix(".txt"), run.with_suffix(".scores")
        command = [sys.executable, "-m", "fastformer", "evaluate", "--run", str(run), "--device", self.options.device]
        if not recipe.is_language:
            command += ["--beam", str(self.options.beam), "--output", str(translations)]
        run_command(command, max(1.0, self.left() + GRACE), output)
        matches = _SCORE.findall(output.read_text(encoding="utf-8"))
        scores = {name: float(value.replace(",", "")) for name, value in matches}
        if not recipe.is_language and recipe.dataset and translations.is_file():
            scores |= moses_bleu(translations, Path(recipe.dataset), recipe.settings["data"]["target"])
        return scores

    def seed(self, recipe: Recipe, seed: int) -> str:
        """Train and evaluate one seed, and record it; return its state."""
        run = self.out / f"{recipe.path.stem}-{seed}"
        if run.exists():
            return f"{run.name}: not trained again"
        if self.left() < recipe.seconds:
            return f"{run.name}: left out, {self.left():.0f} s were left"
        begin = time.monotonic()
        state = self.train(recipe, run, "--seed", str(seed))
        row: dict[str, Any] = {"recipe": recipe.path.stem, "seed": seed, "state": state, "machine": self.machine}
        row |= {"options": list(self.train_options), "at once": self.options.at_once}
        row["training seconds"] = time.monotonic() - begin
        if (run / "metrics.jsonl").is_file():
            row |= speed(run / "metrics.jsonl") | self.evaluate(recipe, run)
        row["goals"] = judged(recipe.path.stem, row)
        with (self.out / "record.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return f"{run.name}: {state}"


def speed(metrics: Path) -> dict[str, float]:
    """Return steps, and the median of tokens per second over the records, which leaves out compilation."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    rates = [record["tokens_per_second"] for record in records if record["kind"] == "train"]
    steps = {"steps": records[-1]["step"]} if records else {}
    return steps | ({"tokens/s": statistics.median(rates)} if rates else {})


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


def judged(recipe: str, row: Mapping[str, Any]) -> dict[str, bool]:
    """Return for each goal whether a row reaches it; goals whose value is missing are left out."""
    return {
        f"{value} {bound} {limit:g}": row[value] >= limit if bound == MIN else row[value] <= limit
        for value, bound, limit in GOALS.get(recipe, ())
        if value in row
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
            held = [row["goals"][goal] for row in group if goal in row["goals"]]
            lines.append(f"{recipe}, goal {goal}: reached by {sum(held)} of {len(held)}")
    return lines


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.recipes", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--recipe", type=Path, nargs="+", required=True, help="TOML files for `fastformer train --config`")
    add("--data", type=Path, help="folder of the datasets' published files")
    add("--seeds", default="1,2,3", metavar="N,...", help="default: 1,2,3")
    add("--minutes", type=float, default=9.0, help="of all seeds together (default: 9)")
    add("--at-once", type=int, default=1, metavar="N", help="seeds in parallel; each is then slower (default: 1)")
    add("--out", type=Path, help="folder of the results (default: a new one, printed)")
    add("--device", default="auto", help="default: a GPU if there is one")
    add("--beam", type=int, default=5, help="for the translation of the test set (default: 5)")
    options = parser.parse_args(arguments)
    try:
        options.seeds = sorted({int(seed) for seed in options.seeds.split(",")})
    except ValueError:
        parser.error(f"--seeds is {options.seeds!r}; allowed are whole numbers such as 1,2,3")
    if not options.minutes > 0 or options.at_once < 1:
        parser.error("--minutes must be above 0, --at-once 1 or more")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and evaluate the seeds, and print the summary."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    place = given.index("--") if "--" in given else len(given)
    options, train_options = parse(given[:place]), given[place + 1 :]
    try:
        out = (options.out or Path(tempfile.mkdtemp(prefix="recipes-"))).resolve()
        out.mkdir(parents=True, exist_ok=True)
        session = Session(options, out, train_options)
        recipes = [read_recipe(path, options.data, out) for path in options.recipe]
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    print(f"results in {out}", flush=True)
    for recipe in recipes if session.gpu else ():
        with tempfile.TemporaryDirectory() as folder:
            session.train(recipe, Path(folder) / "run", "--steps", "30", "--validate-every", "30", "--average", "1")
    states = []
    with ThreadPoolExecutor(options.at_once) as threads:
        jobs = [threads.submit(session.seed, recipe, seed) for recipe in recipes for seed in options.seeds]
        for state in (job.result() for job in jobs):
            print(state, flush=True)
            states.append(state)
    print("\n".join(summary(out / "record.jsonl")))
    return int(any(": failed" in state for state in states))


if __name__ == "__main__":
    sys.exit(main())
