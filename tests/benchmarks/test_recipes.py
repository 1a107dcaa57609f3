"""The recipes are valid, and `benchmarks.recipes` records the scores of their seeds."""

import json
import math
import sys
import tomllib
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks import bench_language, recipes
from benchmarks.competitors.tutorials import TutorialLanguageModel
from benchmarks.recipes import GOALS, moses_bleu, reached_goals, summary
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.language.run import LanguageRun
from fastformer.apps.translation.run import TranslationRun
from tests.support.command_line import fastformer
from tests.support.python import ROOT

FOLDER = ROOT / "recipes"
TINY = """
[data]
dataset = "numbers"
vocabulary = 60
train_size = 200
valid_size = 8
test_size = 8
[train]
seed = 1
"""


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_accepted_by_training(path):
    settings = tomllib.loads(path.read_text(encoding="utf-8"))
    application = (LanguageRun if "run" in settings else TranslationRun).application
    stated = application.read_settings(path)
    application.data(**stated["data"])
    application.train(**stated["train"])
    assert stated["train"]["minutes"] > 0
    assert 60 * stated["train"]["minutes"] <= GOALS.get(path.stem, {}).get("training seconds", math.inf) - 20


def test_every_goal_has_its_recipe():
    assert set(GOALS) == {path.stem for path in FOLDER.glob("*-gpu.toml")}
    row = {"BLEU": 40.0, "training seconds": 181.0}
    assert reached_goals("multi30k-en-de-gpu", row) == {"BLEU 40": True, "training seconds 180": False}


def test_the_command_from_recipe_to_summary(tmp_path, capsys, monkeypatch):
    def run_here(command, seconds, log, grace=0.0):
        done = fastformer(*command[3:], cwd=tmp_path)
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
        return "done" if done.returncode == 0 else "failed"

    monkeypatch.setattr(recipes, "run_command", run_here)
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")
    options = ["--recipe", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "out")]
    small = "--d-model 16 --heads 2 --feed-forward 32 --encoder-layers 1 --decoder-layers 1 --warmup-steps 2"
    small += " --log-every 2 --steps 4 --validate-every 4 --bleu-sentences 4 --average 1 --lr 1e-2"
    log = tmp_path / "out" / "log.txt"
    assert recipes.main([*options, "--seeds", "2", "--", *small.split()]) == 0, log.read_text("utf-8")
    (row,) = map(json.loads, (tmp_path / "out" / "record.jsonl").read_text(encoding="utf-8").splitlines())
    assert (row["state"], row["seed"], row["machine"]["commit"], row["steps"]) == ("done", 2, "0123456", 4)
    assert min(row["chrF"], row["training seconds"]) >= 0
    config = tomllib.loads((tmp_path / "out" / "tiny-2" / "config.toml").read_text(encoding="utf-8"))
    assert (config["train"]["seed"], config["train"]["lr"], config["model"]["d_model"]) == (2, 1e-2, 16)
    # A seed without time is left out.
    (tmp_path / "tiny.toml").write_text(TINY.replace("seed = 1", "minutes = 5"), encoding="utf-8")
    assert recipes.main([*options, "--seeds", "3", "--minutes", "5"]) == 0
    output = capsys.readouterr().out
    assert "tiny-3: left out, 27" in output
    assert "tiny, BLEU: " in output


def test_the_summary_has_means_deviations_and_goals(tmp_path):
    record = tmp_path / "record.jsonl"
    rows = [
        {"recipe": "a", "seed": seed, "state": "done", "BLEU": bleu, "goals": {"BLEU 40": bleu >= 40}}
        for seed, bleu in ((1, 39.0), (2, 41.0))
    ]
    record.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert summary(record) == ["a, BLEU: 40.00 ± 1.41, 2 seeds", "a, goal BLEU 40: reached by 1 of 2"]


def test_bleu_of_moses_tokens_needs_sacremoses(monkeypatch, tmp_path):
    (tmp_path / "o.txt").write_text("L\N{RIGHT SINGLE QUOTATION MARK}homme rit .\n", encoding="utf-8")
    (tmp_path / "test.fr").write_text("l'homme rit.\n", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    assert moses_bleu(tmp_path / "o.txt", tmp_path, "fr") == {}
    normalizer, tokenizer = mock.Mock(), mock.Mock()
    normalizer.normalize = lambda text: text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    tokenizer.tokenize = lambda text, return_str: text.replace("'", "' ").replace(".", " .")
    moses = mock.Mock(MosesPunctNormalizer=lambda language: normalizer, MosesTokenizer=lambda language: tokenizer)
    monkeypatch.setitem(sys.modules, "sacremoses", moses)
    assert moses_bleu(tmp_path / "o.txt", tmp_path, "fr") == {"BLEU, Moses tokens": pytest.approx(100.0)}


def test_the_tutorial_of_the_benchmark_is_the_tutorial():
    """PyTorch's word_language_model subclasses nn.Transformer and gives it no dropout rate."""
    settings = LanguageRun.application.read_settings(FOLDER / "wikitext2-word-tutorial.toml")
    assert LanguageConfig(vocabulary=33_278, **settings["model"]) == bench_language.CONFIG
    c = LanguageConfig(vocabulary=2_000, **settings["model"])
    torch.manual_seed(0)
    model = LanguageModel(c)
    with pytest.warns(UserWarning, match="nested"):
        original = nn.Transformer(c.d_model, c.heads, c.layers, 1, c.feed_forward).encoder
    twin = TutorialLanguageModel(model, 35)
    for encoder in (model.decoder, twin.encoder):
        assert [name for name, _ in encoder.named_parameters()] == [name for name, _ in original.named_parameters()]
        for layer, expected in zip(encoder.layers, original.layers, strict=True):
            assert (layer.norm_first, layer.self_attn.dropout) == (expected.norm_first, expected.self_attn.dropout)
            rates, expected_rates = (
                {name: module.p for name, module in each.named_modules() if isinstance(module, nn.Dropout)}
                for each in (layer, expected)
            )
            assert rates == expected_rates
    assert model.embedding.dropout.p == twin.dropout.p == 0.2
    for name, expected in original.named_parameters():
        if expected.dim() > 1:  # 40,000 numbers at least: their deviation is known to 0.5 %
            assert model.decoder.get_parameter(name).std().item() == pytest.approx(expected.std().item(), rel=0.03)
    for weight in (model.embedding.tokens.weight, model.output.weight):
        assert 0.0999 < weight.abs().max() <= 0.1
    assert (model.output.bias == 0).all()
