"""The recipes for a GPU are accepted, and the command that trains them keeps its time and what it has found."""

import argparse
import dataclasses
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

for needed in ("sacrebleu", "safetensors", "tomli_w"):
    pytest.importorskip(needed, reason="training needs the extra `apps`")

import torch
from torch import nn

from benchmarks import bench_language
from benchmarks.recipes import command as recipes
from benchmarks.recipes import plan, seed
from benchmarks.recipes import table as recipe_table
from benchmarks.recipes.plan import steps_of, with_changes
from benchmarks.recipes.seed import Training, lowercase_tokenised, train_and_evaluate
from benchmarks.recipes.table import CUT, DONE, GOALS, RECORD, TRAINED, Goal, read_rows, table
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.language.run import LanguageRun, evaluate_text
from fastformer.apps.runs.toml import save_toml
from fastformer.apps.text import number_corpus
from fastformer.apps.translation.run import evaluate, load_translator
from fastformer.apps.translation.search import SearchOptions
from tests.benchmarks.test_processes import python

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SIZES = {"d_model": 16, "heads": 2, "feed_forward": 32}
TINY = {
    "data": {
        "dataset": "numbers", "vocabulary": 60, "train_size": 200, "valid_size": 8, "test_size": 8, "joint": False,
        "bleu_sentences": 4,
    },
    "model": {**SIZES, "encoder_layers": 1, "decoder_layers": 1},
    "train": {"steps": 4, "warmup_steps": 2, "threads": 1, "batch_tokens": 300, "log_every": 2},
}  # fmt: skip
TEXTS = dict.fromkeys(("train_text", "valid_text", "test_text"), "train.txt")
LANGUAGE = {
    "run": {"kind": "language"},
    "data": {**TEXTS, "tokenizer": "words", "document": "file", "context": 16},
    "model": {**SIZES, "layers": 1},
    "train": {"steps": 3, "threads": 1, "batch_tokens": 32},
}


@pytest.fixture
def recipe(tmp_path):
    save_toml(tmp_path / "tiny.toml", TINY)
    return tmp_path / "tiny.toml"


def options(*recipes, **changes):
    given = {
        "recipe": list(recipes), "data": None, "seeds": [1, 2], "at_once": 1, "device": "cpu", "beam": 2, "change": {},
        "warm_up": True, "dry_run": False,
    }  # fmt: skip
    return argparse.Namespace(**{**given, **changes})


def row(seed=1, status=DONE, recipe="tiny", **values):
    return {"recipe": recipe, "variant": "", "seed": seed, "status": status, "reason": "minutes", "goals": {}, **values}


def write(record, *rows):
    record.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")


# The recipes.


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_one_that_training_takes(path, tmp_path):
    stated = with_changes(path, [], tmp_path / "config.toml")
    assert stated["train"]["minutes"] > 0
    assert with_changes(path, [plan.tiny(stated["run"]["kind"])], tmp_path / "tiny.toml")["train"]["steps"] == 4


def test_every_goal_has_its_recipe_which_leaves_time_for_all_that_the_goal_counts(tmp_path):
    assert set(GOALS) == {path.stem for path in RECIPES.glob("*-gpu.toml")}
    for name, goals in GOALS.items():
        path = RECIPES / f"{name}.toml"
        train = with_changes(path, [], tmp_path / f"{name}.toml")["train"]
        assert train["precision"] == "bf16"
        assert "ot measured on a GPU" in path.read_text(encoding="utf-8")
        for goal in goals:
            if goal.value == "training_seconds":
                assert 60 * train["minutes"] <= goal.bound - 20


# One run.


def job_of(config, folder, **changes):
    given = {"facts": {"recipe": "tiny", "variant": "", "seed": 1}, "beam": 2}
    return Training(str(config), str(folder / "run"), "cpu", str(folder / RECORD), **{**given, **changes})


def test_a_translation_is_trained_scored_and_recorded(recipe, tmp_path):
    goals = (Goal("bleu", 101.0), Goal("training_seconds", 600, at_least=False), Goal("perplexity", 1.0))
    found = train_and_evaluate(job_of(recipe, tmp_path, goals=goals))
    first, last = map(json.loads, (tmp_path / RECORD).read_text(encoding="utf-8").splitlines())
    assert (first["status"], last["status"]) == (TRAINED, DONE)
    assert first.items() <= {**last, "status": TRAINED}.items()
    assert last == json.loads(json.dumps(found)) == read_rows(tmp_path / RECORD)[0]

    corpus = number_corpus("fr", 200, 8, 8)[2]
    translator = load_translator(tmp_path / "run")
    scores, translations = evaluate(translator, corpus, SearchOptions(beam=2))
    lower, _ = evaluate(translator, corpus, SearchOptions(beam=2), lowercase=True)
    assert [last[name] for name in ("bleu", "chrf", "bleu_signature", "test_sentences", "bleu_lowercase")] == [
        scores.bleu, scores.chrf, scores.bleu_signature, 8, lower.bleu,
    ]  # fmt: skip
    assert "case:lc" in last["bleu_lowercase_signature"]
    kept = json.loads((tmp_path / "translations.jsonl").read_text(encoding="utf-8"))
    assert kept == {"recipe": "tiny", "variant": "", "seed": 1, "translations": translations}
    assert last["goals"] == {"bleu >= 101": False, "training_seconds <= 600": True, "perplexity >= 1": None}
    assert (last["steps"], last["reason"], last["best"]) == (4, "steps", "step-4")
    assert last["training_seconds"] >= last["preparation_seconds"] > 0
    assert last["tokens_per_second"] > 0
    assert last["validations"][-1]["bleu"] >= 0
    assert {"torch", "commit", "date", "sentencepiece"} <= last["machine"].keys()


def test_a_language_model_is_recorded_with_the_tokens_its_perplexity_is_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("the cat sat on the mat\na dog barked at the cat\n" * 20, encoding="utf-8")
    save_toml(Path("recipe.toml"), LANGUAGE)
    goal = Goal("perplexity", 1e9, at_least=False)
    found = train_and_evaluate(job_of(Path("recipe.toml"), tmp_path, goals=(goal,)))
    _, expected = evaluate_text(tmp_path / "run")
    assert (found["perplexity"], found["test_tokens"]) == (expected.per_token, expected.tokens)
    _, expected = evaluate_text(tmp_path / "run", overlap=8)
    assert (found["overlap"], found["perplexity_overlapped"]) == (8, expected.per_token)
    assert found["perplexity_overlapped"] != found["perplexity"]
    assert found["goals"] == {"perplexity <= 1e+09": True}
    assert not (tmp_path / "translations.jsonl").exists()


def test_what_is_interrupted_is_evaluated_and_called_cut(recipe, tmp_path, monkeypatch):
    fit = seed.TranslationRun.fit
    monkeypatch.setattr(seed.TranslationRun, "fit", lambda run: dataclasses.replace(fit(run), reason="interrupted"))
    assert train_and_evaluate(job_of(recipe, tmp_path, test=3))["status"] == CUT
    assert read_rows(tmp_path / RECORD)[0]["test_sentences"] == 3


def test_a_warm_up_records_nothing(recipe, tmp_path):
    train_and_evaluate(dataclasses.replace(job_of(recipe, tmp_path, test=2), record=None))
    assert not (tmp_path / RECORD).exists()
    assert not (tmp_path / "translations.jsonl").exists()
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_tokens_of_moses_where_they_are_to_be_had(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    assert lowercase_tokenised(["a"], ["a"], "fr")["bleu_lowercase_tokenised"] is None

    class Normalizer:
        def __init__(self, language):
            assert language == "fr"

        def normalize(self, text):
            return text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")

    class Tokenizer(Normalizer):
        def tokenize(self, text, return_str):
            return text.replace("'", "' ").replace(".", " .")

    moses = SimpleNamespace(MosesPunctNormalizer=Normalizer, MosesTokenizer=Tokenizer)
    monkeypatch.setitem(sys.modules, "sacremoses", moses)
    found = lowercase_tokenised(["L\N{RIGHT SINGLE QUOTATION MARK}homme rit ."], ["l'homme rit."], "fr")
    assert found["bleu_lowercase_tokenised"] == pytest.approx(100.0)
    assert "(fr)" in found["bleu_lowercase_tokenised_signature"]
    assert "tok:none" in found["bleu_lowercase_tokenised_signature"]


# What there is to do.


def test_seeds_that_are_done_are_not_trained_again(recipe, tmp_path):
    record = tmp_path / RECORD
    write(record, row(1, TRAINED), row(1), row(2, TRAINED), row(3, CUT), row(4) | {"variant": "dry run"})
    names = [step.name for step in steps_of(options(recipe, seeds=[1, 2, 3, 4]), tmp_path, tmp_path)]
    assert names == ["tiny, seed 2", "tiny, seed 3", "tiny, seed 4"]
    change = {"train": {"lr": 0.5}}
    (step, *_) = steps_of(options(recipe, change=change), tmp_path, tmp_path)
    assert step.name == "tiny, train.lr=0.5, seed 1"
    job = Training.load(Path(step.arguments[-1]))
    assert job.facts["settings"]["train"]["lr"] == 0.5
    assert "lr = 0.5" in Path(job.config).read_text(encoding="utf-8")


def test_on_a_gpu_compilation_comes_first_and_alone(recipe, tmp_path):
    timed = {"train": {"minutes": 2.0}}
    steps = steps_of(options(recipe, recipe, device="cuda", change=timed, seeds=[5]), tmp_path, tmp_path)
    assert [step.alone for step in steps] == [True, True, False, False]
    first, last = (Training.load(Path(steps[i].arguments[-1])) for i in (0, -1))
    assert first.record is None
    assert "steps = 30" in Path(first.config).read_text(encoding="utf-8")
    assert "seed = 5" in Path(last.config).read_text(encoding="utf-8")
    assert (steps[0].seconds, steps[-1].seconds) == (0.0, 145.0)
    assert not any(step.alone for step in steps_of(options(recipe, device="cuda", warm_up=False), tmp_path, tmp_path))
    assert len({Training.load(Path(step.arguments[-1])).folder for step in steps}) == 4


def test_published_files_are_prepared_once(tmp_path, monkeypatch):
    prepared = []
    monkeypatch.setattr(plan, "prepare", lambda name, source, to: prepared.append((name, source, to)))
    (tmp_path / "files" / "wikitext-2").mkdir(parents=True)
    found = plan.prepared("data/wikitext2", tmp_path / "files", tmp_path)
    assert prepared == [("wikitext2", tmp_path / "files" / "wikitext-2", Path(found))]
    Path(found).mkdir(parents=True)
    (Path(found) / "dataset.json").touch()
    assert plan.prepared("data/wikitext2", tmp_path / "files", tmp_path) == found
    assert plan.prepared("data/multi30k", tmp_path / "files", tmp_path).endswith("multi30k")
    assert prepared[1:] == [("multi30k", tmp_path / "files", tmp_path / "data" / "multi30k")]
    with pytest.raises(ValueError, match=r"--data: the dataset multi30k of the recipe needs the folder"):
        plan.prepared("data/multi30k", None, tmp_path)


# Processes and their time.


def test_a_seed_without_time_is_left_out_and_a_failed_one_stops_nothing(tmp_path, monkeypatch):
    steps = [python("fails", "raise SystemExit(7)"), python("long", "", seconds=100.0), python("last", "print('y')")]
    found = {outcome.name: outcome.state for outcome in recipes.run_all(steps, 20.0, 1, tmp_path / "log.txt")}
    assert (found["fails"], found["last"]) == ("failed, exit code 7", "done")
    assert found["long"].startswith("left out: ")
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert "fails, 16 s at most" in log, "of 20 s, with 4 to end in"
    assert log.endswith("\ny\n")
    clock = SimpleNamespace(monotonic=iter([0.0, 17.0]).__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(recipes, "time", clock)
    (late,) = recipes.run_all([python("late", "")], 20.0, 1, tmp_path / "log.txt")
    assert late.state == "left out: 3 s were left", "those to end in"


@pytest.mark.slow
def test_several_at_once_but_compilation_alone(tmp_path):
    def marks(name, other):
        """Say "+", wait until the other one has, too, and say "-"."""
        here, there = (str(tmp_path / each) for each in (name, other))
        return (
            f"import os, time; print('+{name}', flush=True); open({here!r}, 'w').close()\n"
            f"while not os.path.exists({there!r}): time.sleep(0.01)\n"
            f"time.sleep(0.1); print('-{name}', flush=True)"
        )

    steps = [
        python(name, marks(name, other), alone=alone)
        for name, other, alone in (
            ("a", "a", True),
            ("b", "c", False),
            ("c", "b", False),
            ("d", "d", True),
            ("e", "e", False),
        )
    ]
    assert {outcome.state for outcome in recipes.run_all(steps, 30.0, 2, tmp_path / "log.txt")} == {"done"}
    printed = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    marks_of = [line for line in printed if line.startswith(("+", "-"))]
    assert marks_of[:2] == ["+a", "-a"]
    assert {mark[0] for mark in marks_of[2:4]} == {"+"}
    assert marks_of[6:] == ["+d", "-d", "+e", "-e"]


# The record and the table.


def test_a_record_that_a_crash_cut_is_read_and_a_damaged_one_is_named(tmp_path):
    record = tmp_path / RECORD
    write(record, row(1, TRAINED), row(2), row(1, bleu=3.0))
    with record.open("a", encoding="utf-8") as file:
        file.write('{"recipe": "ti')
    assert [(each["seed"], each["status"]) for each in read_rows(record)] == [(1, DONE), (2, DONE)]
    with record.open("a", encoding="utf-8") as file:
        file.write("\n")
    with pytest.raises(ValueError, match=r"record\.jsonl:4: is no row of this record"):
        read_rows(record)
    assert read_rows(tmp_path / "none") == []


def test_the_table_counts_what_is_done():
    goal = Goal("bleu", 40.0)
    rows = [row(i + 1, bleu=bleu, goals={str(goal): bleu >= 40}) for i, bleu in enumerate((39.0, 41.0))]
    rows += [row(3, CUT, bleu=1.0, goals={str(goal): False}) | {"reason": "interrupted"}, row(4, TRAINED)]
    lines = table([*rows, row(1, recipe="other", perplexity=70.0)])
    cells = [line.split() for line in lines]
    assert cells[:2] == [["tiny"], ["seed", "BLEU", "status"]]
    assert cells[4] == ["3", "1.00", "cut", "(interrupted)"]
    assert cells[5] == ["4", "-", "trained"]
    assert cells[6:8] == [["mean", "40.00"], ["deviation", "1.41"]]
    assert lines[8] == "goal bleu >= 40: held by 1 of 2"
    assert cells[9:] == [["other"], ["seed", "perplexity", "status"], ["1", "70.00", "done"]]
    unknown = table([row(goals={"perplexity <= 80": None})])
    assert unknown[-1] == "goal perplexity <= 80: not judged"


# The command.


@pytest.fixture
def command(tmp_path, monkeypatch, recipe):
    """The command in this process, in a folder of its own; its runs are processes."""
    monkeypatch.chdir(tmp_path)
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    given = ["--recipe", str(recipe), "--out", "out", "--runs", "runs", "--device", "cpu", "--minutes", "1"]

    def run(arguments=()):
        return recipes.main([*given, *arguments])

    run.handlers = handlers
    return run


@pytest.mark.slow
def test_the_command_from_recipe_to_table(command, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert command(["--seeds", "3"]) == 0, (tmp_path / "out" / "log.txt").read_text(encoding="utf-8")
    assert signal.SIGTERM in command.handlers
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "log.txt", "record.jsonl", "summary.txt", "translations.jsonl",
    ]  # fmt: skip
    (found,) = read_rows(tmp_path / "out" / RECORD)
    assert (found["status"], found["machine"]["commit"], found["settings"]["train"]["seed"]) == (DONE, "0123456", 3)
    assert (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "nan"], "--minutes is nan; allowed is more than 0"),
        (["--at-once", "0"], "--at-once is 0; allowed is 1 and more"),
        (["--seeds", "1,1"], "'1,1' is no list of different whole numbers"),
        (["--seeds", "a"], "'a' is no list of different whole numbers"),
        (["--set", "lr=1"], "'lr=1' is not data.NAME=VALUE"),
        (["--set", "train.lt=1"], "unknown key 'lt' in [train]; did you mean 'lr'?"),
        (["--set", "train.lr=high"], "lr must be a finite number"),
        (["--set", "train.lr=-1"], "lr must be above 0, not -1"),
        (["--set", "data.dataset=data/multi30k"], "--data: the dataset multi30k of the recipe needs the folder"),
        (["--out", __file__], "is no folder"),
        (["--recipe", "nothing.toml"], "nothing.toml: there is no such"),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(arguments, message, command, monkeypatch, refused):
    monkeypatch.setattr(recipes, "run_all", lambda *arguments: pytest.fail("something ran"))
    assert message in refused(command, *arguments).strip().splitlines()[-1]


def test_what_is_missing_is_named(command, monkeypatch, refused):
    monkeypatch.setenv("FASTFORMER_COMMIT", "")
    assert refused(command).startswith("error: FASTFORMER_COMMIT: the commit is '';")
    find = recipes.importlib.util.find_spec
    monkeypatch.setattr(recipes.importlib.util, "find_spec", lambda name: None if name == "tomli_w" else find(name))
    assert refused(command) == "error: not installed here: tomli-w (pip install tomli-w)\n"


def test_the_columns_name_values_of_the_rows():
    values = {value for value, _, _ in recipe_table._COLUMNS.values()} | {g.value for gs in GOALS.values() for g in gs}
    source = Path(seed.__file__).read_text(encoding="utf-8")
    assert all(f'"{value}"' in source for value in values)


def test_the_tutorial_is_the_tutorial():
    """PyTorch's word_language_model subclasses nn.Transformer, and hands it no rate of dropout."""
    settings = LanguageRun.application.read_settings(RECIPES / "wikitext2-word-tutorial.toml")
    config = LanguageConfig(vocabulary=33_278, **settings["model"])
    assert config == bench_language.CONFIG
    c = config = dataclasses.replace(config, vocabulary=2_000)
    torch.manual_seed(0)
    model = LanguageModel(config)
    with pytest.warns(UserWarning, match="nested"):
        original = nn.Transformer(c.d_model, c.heads, c.layers, 1, c.feed_forward).encoder
    twin = bench_language.TutorialLanguageModel(model)
    for encoder in (model.decoder, twin.encoder):
        assert [name for name, _ in encoder.named_parameters()] == [name for name, _ in original.named_parameters()]
        for ours, theirs in zip(encoder.layers, original.layers, strict=True):
            assert ours.norm_first == theirs.norm_first
            assert ours.self_attn.dropout == theirs.self_attn.dropout == 0.1
            rates = {name: module.p for name, module in theirs.named_modules() if isinstance(module, nn.Dropout)}
            assert {name: m.p for name, m in ours.named_modules() if isinstance(m, nn.Dropout)} == rates
    assert model.embedding.dropout.p == twin.dropout.p == 0.2
    for name, theirs in original.named_parameters():
        if theirs.dim() > 1:  # 40,000 numbers at least: their deviation is known to 0.5 %
            assert model.decoder.get_parameter(name).std().item() == pytest.approx(theirs.std().item(), rel=0.03), name
    for weight in (model.embedding.tokens.weight, model.output.weight):
        assert 0.0999 < weight.abs().max() <= 0.1
    assert (model.output.bias == 0).all()
