"""Runs that were trained by hand, with the public classes: one call makes a folder of them that every command opens."""

from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.language.model import LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.runs.application import complete_run
from fastformer.apps.text import (
    Batches,
    LanguageBatches,
    ParallelCorpus,
    SpecialIds,
    Tokenizer,
    WordTokenizer,
    encode_documents,
    encode_pairs,
)
from fastformer.apps.train import CheckpointError, TrainConfig, Trainer
from fastformer.apps.translation import run as translation
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, translation_loss
from fastformer.apps.translation.search import SearchOptions
from fastformer.apps.translation.translator import Translator
from tests.support.command_line import fastformer

SIZES = {"d_model": 16, "heads": 2, "feed_forward": 32}
TRAIN = TrainConfig(steps=3, log_every=1, lr=0.05, schedule="constant", warmup_steps=0, threads=1, seed=7)
PAIRS = [("one two", "un deux"), ("two three", "deux trois"), ("three one", "trois un"), ("two", "deux")]
IDS = SpecialIds(3, 0, 2, 1)


def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    return tuple(WordTokenizer.from_lines([p[i] for p in PAIRS], special_ids=IDS) for i in (0, 1))  # type: ignore[return-value]


def translation_trainer(folder: Path) -> Trainer:
    source, target = tokenizers()
    corpus = ParallelCorpus([s for s, _ in PAIRS], [t for _, t in PAIRS])
    sizes = {**SIZES, "encoder_layers": 1, "decoder_layers": 1}
    ids = {name: value for name, value in vars(IDS).items() if name != "unk_id"}
    model = TranslationModel(TranslationConfig(source.size, target.size, **sizes, **ids))  # type: ignore[arg-type]
    batches = Batches(encode_pairs(corpus, source, target, 20), tokens=40)
    return Trainer(model, translation_loss, batches, TRAIN, folder, show=False)


def language_trainer(folder: Path, **changes: object) -> tuple[Trainer, Tokenizer]:
    texts = [s for s, _ in PAIRS]
    tokenizer = WordTokenizer.from_lines(texts)
    model = LanguageModel(LanguageConfig(tokenizer.size, **{**SIZES, "layers": 1, **changes}))  # type: ignore[arg-type]
    batches = LanguageBatches(encode_documents(texts, tokenizer), context=8, tokens=16)
    return Trainer(model, language_model_loss, batches, TRAIN, folder, show=False), tokenizer


@pytest.mark.parametrize("before", [True, False], ids=["before fit", "after fit"])
def test_a_translation_run_by_hand(tmp_path: Path, before: bool) -> None:
    trainer = translation_trainer(tmp_path / "mine")
    source, target = tokenizers()
    if before:
        complete_run(trainer, source, target, max_length=20)
    trainer.fit()
    if not before:
        complete_run(trainer, source, target, max_length=20)
    sentences = [s for s, _ in PAIRS]
    options = SearchOptions(min_length=2)  # after a few steps some models end at once
    wanted = Translator(trainer.model.eval(), source, target, 20).translate(sentences, options)  # type: ignore[arg-type]
    assert any(wanted)
    loaded = translation.load_translator(tmp_path / "mine")
    assert loaded.max_source_length == 20
    assert loaded.translate(sentences, options) == wanted
    command = ("translate", "--run", "mine", "--device", "cpu", "--min-length", "2")
    done = fastformer(*command, *sentences, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (0, wanted), done.stderr
    (tmp_path / "s.txt").write_text("\n".join(sentences) + "\n")
    (tmp_path / "t.txt").write_text("\n".join(wanted[i] or "x" for i in range(4)) + "\n")
    files = ("--source", "s.txt", "--target", "t.txt")
    for command in (
        ("evaluate", "--run", "mine", *files),
        ("info", "--run", "mine"),
        ("plot", "attention", "--run", "mine", "--source", "one two"),
        ("plot", "history", "mine"),
        ("compare", "mine"),
        ("export", "--run", "mine", "--format", "safetensors", "--to", "out"),
    ):
        done = fastformer(*command, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    for command in (("evaluate", "--run", "mine"), ("train", "--run", "mine", "--resume", "--steps", "9")):
        done = fastformer(*command, cwd=tmp_path)
        assert done.returncode == 2, command
        assert "the run was trained in Python, and its folder does not record the data" in done.stderr


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    source, target = tokenizers()
    trainer = translation_trainer(tmp_path / "mine")
    language, tokenizer = language_trainer(tmp_path / "lm", positions="learned", max_positions=8)
    other = WordTokenizer.from_lines([t for _, t in PAIRS])
    larger = WordTokenizer.from_lines([*(s for s, _ in PAIRS), "four"], special_ids=IDS)
    cases: tuple[tuple[Trainer, tuple[Tokenizer, ...], dict[str, object], str], ...] = (
        (language, (source, target), {"context": 8}, "tokenizers must be 1 for a LanguageModel, not 2"),
        (trainer, (source, other), {"max_length": 20}, "the model has pad_id=0, not the 1 of the tokenizer"),
        (trainer, (larger, target), {"max_length": 20}, f"vocabulary={source.size}, not the {larger.size} of the tok"),
        (trainer, (source, target), {}, "max_length must be given"),
        (trainer, (source, target), {"max_length": 20, "lowercase": True}, "lowercase: not needed to use a model"),
        (language, (tokenizer,), {"context": 9}, r"context \(9\) is beyond max_positions \(8\)"),
        (language, (tokenizer,), {"context": 8, "stream": "rows"}, "stream must be one of documents, columns, not 'r"),
    )
    for each, tokenizers_of_run, data, message in cases:
        with pytest.raises(ValueError, match=message):
            complete_run(each, *tokenizers_of_run, **data)
    assert not (tmp_path / "mine" / "config.toml").exists()


def test_a_checkpoint_knows_the_configuration_of_its_model(tmp_path: Path) -> None:
    """Without `architecture=`; a mistake in config.toml would load silently otherwise."""
    trainer = translation_trainer(tmp_path)
    trainer.fit()
    complete_run(trainer, *tokenizers(), max_length=20)
    settings = tmp_path / "config.toml"
    settings.write_text(settings.read_text().replace("norm_first = true", "norm_first = false"))
    with pytest.raises(CheckpointError, match="norm_first"):
        translation.load_translator(tmp_path)
