"""A folder as OPUS-MT's: its tokenizers, its translations by our search, and runs that begin with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastformer.apps.cli import app
from fastformer.apps.pretrained import from_transformers, to_transformers
from fastformer.apps.text import TextError, load_tokenizer, number_corpus
from fastformer.apps.text.marian_tokenizer import read_marian
from fastformer.apps.train import TrainConfig, read_metrics
from fastformer.apps.translation import DataConfig, SearchOptions, TranslationRun, Translator, load_translator
from tests.apps.pretrained.marian_folder import CODE, write_marian_folder

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")  # which transformers never calls

TRAIN, VALID, TEST = number_corpus("fr", 400, 50, 50)
LIMIT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("opus")
    write_marian_folder(folder, TRAIN)
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.MarianTokenizer.from_pretrained(folder, local_files_only=True)


def test_ids_and_text_are_those_of_marian_tokenizer(folder: Path, theirs: Any, tmp_path: Path) -> None:
    source, target = read_marian(folder)
    lines = [*TEST.source, f"{CODE} forty-two", ">>xx<< one", "☃ snow", "", "  two   three "]
    assert source.encode_batch(lines) == [theirs(line)["input_ids"][:-1] for line in lines]
    expected = [theirs(text_target=line)["input_ids"] for line in TEST.target]
    assert [[*ids, target.eos_id] for ids in target.encode_batch(TEST.target)] == expected
    assert [target.decode(ids) for ids in expected] == theirs.batch_decode(expected, skip_special_tokens=True)
    assert [target.decode(ids) for ids in expected] == TEST.target
    assert (target.eos_id, target.unk_id, target.bos_id) == (0, 1, target.pad_id)
    assert source.encode_batch(TEST.source) != target.encode_batch(TEST.source)  # two models, or this says nothing
    source.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode_batch(lines) == source.encode_batch(lines)
    (tmp_path / "vocabulary.json").write_text("[]")
    with pytest.raises(TextError, match=r"vocabulary\.json is damaged"):
        load_tokenizer(tmp_path)


def generated(model: Any, tokenizer: Any, beam: int) -> list[str]:
    model.generation_config.forced_eos_token_id = None
    inputs = tokenizer(TEST.source, return_tensors="pt", padding=True)
    found = model.generate(
        **inputs, num_beams=beam, do_sample=False, max_new_tokens=LIMIT, length_penalty=1.0, early_stopping=False,
        bad_words_ids=[[tokenizer.pad_token_id]],
    )  # fmt: skip
    return list(tokenizer.batch_decode(found, skip_special_tokens=True))


def translated(translator: Translator, beam: int) -> list[str]:
    return translator.translate(TEST.source, SearchOptions(beam=beam, max_ratio=0.0, max_extra=LIMIT), batch_size=16)


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: Any) -> Path:
    """A run that was begun with the folder by the command line."""
    place = tmp_path_factory.mktemp("run")
    for name, corpus in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
        (place / f"{name}.en").write_text("".join(f"{line}\n" for line in corpus.source))
        (place / f"{name}.fr").write_text("".join(f"{line}\n" for line in corpus.target))
    files = [
        f"--{part}-{side} {place}/{part}.{language}"
        for part in ("train", "valid", "test")
        for side, language in (("source", "en"), ("target", "fr"))
    ]
    settings = "--device cpu --steps 240 --batch-tokens 600 --lr 5e-3 --warmup-steps 10 --validate-every 120"
    command = f"train --from {folder} --run {place}/run {' '.join(files)} {settings} --bleu-sentences 0"
    ended = CliRunner().invoke(app, command.split())
    assert ended.exit_code == 0, ended.output
    return place / "run"


@pytest.mark.parametrize("beam", [1, 4])
def test_translations_after_training_are_those_of_generate(run: Path, theirs: Any, beam: int) -> None:
    """The other way round: what was trained here is translated by transformers."""
    ours = load_translator(run)
    expected = generated(to_transformers(ours.model), theirs, beam)
    assert len(set(expected)) > 30
    assert translated(ours, beam) == expected


def test_fine_tuning_begins_with_the_model_and_lowers_its_loss(run: Path, folder: Path) -> None:
    from fastformer.apps.text import encode_pairs
    from fastformer.apps.translation import corpus_loss

    pairs = encode_pairs(VALID, *read_marian(folder), 256, "truncate")
    before, after = (corpus_loss(m.eval(), pairs) for m in (from_transformers(folder), load_translator(run).model))
    assert after < before / 2
    config = load_translator(run).model.config
    assert (config.activation, config.positions, config.attention_dropout) == ("silu", "sinusoidal_halves", 0.0)
    assert config.bos_id == config.pad_id == config.target_vocabulary - 1


def test_the_first_step_is_of_the_models_weights(run: Path, folder: Path, tmp_path: Path) -> None:
    data = DataConfig(
        tokenizer="pretrained", train_source=run.parent / "train.en", train_target=run.parent / "train.fr",
        valid_size=10, test_size=10, bleu_sentences=0,
    )  # fmt: skip
    begun = TranslationRun.create(tmp_path / "a", data, {"dropout": 0.2}, TrainConfig(steps=1), pretrained=folder)
    assert begun.model_config.dropout == 0.2
    expected = from_transformers(folder).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in begun.new_model().state_dict().items())


def test_the_run_goes_on_and_is_evaluated(run: Path) -> None:
    steps = len(read_metrics(run))
    resumed = CliRunner().invoke(app, f"train --run {run} --resume --steps 244 --device cpu".split())
    assert resumed.exit_code == 0, resumed.output
    assert "ended after 244 steps" in resumed.output
    assert len(read_metrics(run)) > steps
    scored = CliRunner().invoke(app, f"evaluate --run {run} --beam 2 --device cpu".split())
    assert scored.exit_code == 0, scored.output
    assert "BLEU" in scored.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--d-model 64", "d_model: set by the model of"),
        ("--vocabulary 100", "vocabulary has an effect only with tokenizer=bpe"),
        ("--tokenizer bpe", "tokenizer must be pretrained with a model to begin with"),
        ("--resume", "--resume takes its data and model from the run folder"),
    ],
)
def test_settings_of_the_folders_model_are_refused(folder: Path, tmp_path: Path, options: str, message: str) -> None:
    command = f"train --from {folder} --run {tmp_path}/run {options} --steps 1 --device cpu"
    ended = CliRunner().invoke(app, command.split())
    assert ended.exit_code != 0
    assert message in " ".join((ended.output + str(ended.exception)).split())
    assert not (tmp_path / "run" / "config.toml").exists()


def test_other_runs_begin_with_no_model_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    command = f"train lm --from {folder} --run {tmp_path}/run --steps 1 --device cpu"
    ended = CliRunner().invoke(app, command.split())
    message = "holds no run and no exported model, with which a language-model run can begin"
    assert str(ended.exception) == f"{folder} {message}"
    assert not (tmp_path / "run").exists()


def test_folders_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    import shutil

    from fastformer.apps.translation.pretrained import read_pretrained

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    words = json.loads((copy / "vocab.json").read_text())
    (copy / "vocab.json").write_text(json.dumps({**words, "more": len(words)}))
    with pytest.raises(ValueError, match=f"the source tokenizer has {len(words) + 1} entries, the model {len(words)}"):
        read_pretrained(copy)
    (copy / "vocab.json").write_text(json.dumps({**words, "<pad>": words[CODE], CODE: words["<pad>"]}))
    with pytest.raises(ValueError, match=r"the target tokenizer has pad_id 2, the model \d+"):
        read_pretrained(copy)
    (copy / "vocab.json").write_text(json.dumps({**words, "<pad>": 3}))
    with pytest.raises(TextError, match="ids must be 0 to"):
        read_pretrained(copy)
    (copy / "target.spm").unlink()
    with pytest.raises(FileNotFoundError, match=r"target\.spm: no such file"):
        read_pretrained(copy)
