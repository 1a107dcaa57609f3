"""One training of `benchmarks.recipes`, in a process of its own: data, training, evaluation, lines of the record.

python -m benchmarks.recipes.seed TRAINING.json        # a `Training`

Training and evaluation are the product's: `Run.create` and `fit`, then `evaluate` or `evaluate_text` with the best
weights. A line goes into the record when training has ended, and another, with the scores, when the test set is
evaluated; each holds all that is known by then, so the last line of a run counts. A training that SIGINT cuts short is
evaluated as it is. A run that only warms up fills the cache of compiled kernels and records nothing.
"""

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fastformer
from benchmarks.harness import environment
from benchmarks.recipes.table import CUT, DONE, TRAINED, Goal, judged
from fastformer.apps.language.run import LanguageRun, evaluate_text
from fastformer.apps.runs.run import Run
from fastformer.apps.runs.toml import read_toml
from fastformer.apps.text import ParallelCorpus
from fastformer.apps.text.scores import score_translations
from fastformer.apps.train import Result, read_metrics
from fastformer.apps.translation.run import TranslationRun, evaluate, load_translator
from fastformer.apps.translation.search import SearchOptions

_PACKAGES = ("numpy", "sentencepiece", "sacrebleu", "sacremoses")
_SHOWN = ("kind", "step", "seconds", "loss", "perplexity", "bleu", "chrf")  # of a validation


@dataclass(frozen=True)
class Training:
    """What a process has to do.

    `config` is a file as `fastformer train --config` takes it, `folder` the run's; `record` None means to warm up only.
    `facts` go into each line as they are. `test`: so many test sentences of a translation; None: all.
    """

    config: str
    folder: str
    device: str
    record: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()
    beam: int = 5
    test: int | None = None

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Training":
        """Read what `save` wrote."""
        read = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**read, "goals": tuple(Goal(**goal) for goal in read["goals"])})


def kind_of(config: Path) -> type[Run]:
    """The class of the runs that a file of settings is for; what is wrong in it, its application says.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is no TOML.
    """
    if not config.is_file():
        raise FileNotFoundError(f"{config}: there is no such recipe")
    run = read_toml(config).get("run")
    return LanguageRun if isinstance(run, dict) and run.get("kind") == "language" else TranslationRun


def train_and_evaluate(training: Training) -> dict[str, Any]:
    """Do a training, and give back the last line of its record."""
    begin = time.perf_counter()
    kind, device = kind_of(Path(training.config)), torch.device(training.device)
    application = kind.application
    stated = application.read_settings(Path(training.config))
    data, train = application.data(**stated["data"]), application.train(**stated["train"])
    run = kind.create(training.folder, data, stated["model"], train, device)
    prepared = time.perf_counter() - begin
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    result = run.fit()
    seconds = time.perf_counter() - begin
    row = dict(training.facts) | {"status": TRAINED, "machine": _machine(device), "backend": fastformer.get_backend()}
    row |= {"training_seconds": seconds, "preparation_seconds": prepared, **_training(run, result)}
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    _append(training.record, row)
    begin = time.perf_counter()
    row |= _perplexity(run) if isinstance(run, LanguageRun) else _scores(run, training)
    row |= {
        "evaluation_seconds": time.perf_counter() - begin,
        "status": CUT if result.reason == "interrupted" else DONE,
    }
    row["goals"] = judged(training.goals, row)
    _append(training.record, row)
    return row


def _machine(device: torch.device) -> dict[str, str]:
    found = environment.facts(device)
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _training(run: Run, result: Result) -> dict[str, Any]:
    """How training went. The rates are medians over the records, so that they leave out compilation and validation."""
    records = read_metrics(run.folder)
    rates = [record["tokens_per_second"] for record in records if record["kind"] == "train"]
    found: dict[str, Any] = {
        "reason": result.reason, "steps": result.step, "epochs": result.epoch, "tokens": result.tokens,
        "validations": [
            {key: record[key] for key in _SHOWN if key in record}
            for record in records
            if record["kind"] not in ("train", "epoch")
        ],
        "best": None if result.best is None else result.best.name,
    }  # fmt: skip
    if rates:
        found["tokens_per_second"] = statistics.median(rates)
        found["step_seconds"] = result.tokens / result.step / found["tokens_per_second"]
    return found


def _perplexity(run: LanguageRun) -> dict[str, Any]:
    """With windows that begin where the one before ended, and with windows that reread half of their context."""
    _, found = evaluate_text(run.folder, device=run.device)
    overlap = run.data.context // 2
    _, overlapped = evaluate_text(run.folder, device=run.device, overlap=overlap)
    return {
        "perplexity": found.per_token, "test_tokens": found.tokens, "test_unknown": found.unknown,
        "overlap": overlap, "perplexity_overlapped": overlapped.per_token,
    }  # fmt: skip


def _scores(run: Run, training: Training) -> dict[str, Any]:
    corpus: ParallelCorpus = run.corpora["test"]
    if training.test is not None:
        corpus = corpus.take(range(min(training.test, len(corpus))), "test")
    translator, options = load_translator(run.folder, device=run.device), SearchOptions(beam=training.beam)
    cased, translations = evaluate(translator, corpus, options)
    lower = score_translations(translations, corpus.target, lowercase=True)
    if training.record is not None:
        said = {key: training.facts[key] for key in ("recipe", "variant", "seed") if key in training.facts}
        _append(str(Path(training.record).with_name("translations.jsonl")), {**said, "translations": translations})
    return {
        "beam": training.beam, "test_sentences": cased.sentences,
        "bleu": cased.bleu, "bleu_signature": cased.bleu_signature,
        "chrf": cased.chrf, "chrf_signature": cased.chrf_signature,
        "bleu_lowercase": lower.bleu, "bleu_lowercase_signature": lower.bleu_signature,
        **lowercase_tokenised(translations, corpus.target, run.data.target),
    }  # fmt: skip


def lowercase_tokenised(translations: list[str], references: list[str], language: str) -> dict[str, Any]:
    """BLEU of lower-cased text with the punctuation and the tokens of Moses, as the literature on Multi30k gives it.

    Where sacremoses is not installed there is none; translations.jsonl keeps what it takes to have it later.
    """
    try:
        moses = importlib.import_module("sacremoses")
    except ModuleNotFoundError:
        return {"bleu_lowercase_tokenised": None, "bleu_lowercase_tokenised_signature": "no sacremoses here"}
    from sacrebleu.metrics import BLEU

    normalizer, tokenizer = moses.MosesPunctNormalizer(language), moses.MosesTokenizer(language)

    def tokenised(lines: list[str]) -> list[str]:
        return [tokenizer.tokenize(normalizer.normalize(line.lower()), return_str=True) for line in lines]

    bleu = BLEU(tokenize="none", force=True)
    score = bleu.corpus_score(tokenised(translations), [tokenised(references)]).score
    signature = f"lower-cased, Moses punctuation and tokens ({language}), {bleu.get_signature()}"
    return {"bleu_lowercase_tokenised": score, "bleu_lowercase_tokenised_signature": signature}


def _append(path: str | None, line: Mapping[str, Any]) -> None:
    """A line, whole or not at all, also where several processes write, and on the disk when this returns."""
    if path is None:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(line) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    train_and_evaluate(Training.load(Path(sys.argv[1])))
