"""Folders as OPUS-MT's: tokenizers, runs that begin with the model, and translations as transformers computes them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastformer.apps.cli import app
from fastformer.apps.pretrained import from_transformers, to_transformers
from fastformer.apps.runs.application import application_of
from fastformer.apps.text import TextError, encode_pairs, load_tokenizer, number_corpus
from fastformer.apps.text.sentencepiece_tokenizer import read_marian
from fastformer.apps.train import read_metrics
from fastformer.apps.translation import DataConfig, SearchOptions, corpus_loss, load_translator
from tests.apps.pretrained.tiny_models import CODE, write_marian_folder

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,  # the set-up of all tests trains a run
    pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses"),  # which transformers never calls
]

TRAIN, VALID, TEST = number_corpus("fr", 400, 50, 50)
LIMIT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("opus")
    write_marian_folder(folder, TRAIN)
    return folder


@pytest.fixture(scope="module")
def hf_tokenizer(folder: Path) -> Any:
    return transformers.MarianTokenizer.from_pretrained(folder, local_files_only=True)


def test_ids_and_text_are_those_of_marian_tokenizer(folder: Path, hf_tokenizer: Any, tmp_path: Path) -> None:
    source, target = read_marian(folder)
    lines = [*TEST.source, f"{CODE} forty-two", ">>xx<< one", "☃ snow", "", "  two   three "]
    assert source.encode_batch(lines) == [hf_tokenizer(line)["input_ids"][:-1] for line in lines]
    expected = [hf_tokenizer(text_target=line)["input_ids"] for line in TEST.target]
    assert [[*ids, target.eos_id] for ids in target.encode_batch(TEST.target)] == expected
    assert [target.decode(ids) for ids in expected] == TEST.target
    assert (target.eos_id, target.unk_id, target.bos_id) == (0, 1, target.pad_id)
    assert source.encode_batch(TEST.source) != target.encode_batch(TEST.source)  # two models, or this says nothing
    source.save(tmp_path)
    assert load_tokenizer(tmp_path).encode_batch(lines) == source.encode_batch(lines)
    (tmp_path / "vocabulary.json").write_text("[]")
    with pytest.raises(TextError, match=r"vocabulary\.json is damaged"):
        load_tokenizer(tmp_path)


def command(text: str) -> str:
    ended = CliRunner().invoke(app, text.split())
    assert ended.exit_code == 0, ended.output
    return ended.output


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: Any) -> Path:
    """A run that the command line began with the folder."""
    place = tmp_path_factory.mktemp("run")
    files = ""
    for name, corpus in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
        for side, lines in (("source", corpus.source), ("target", corpus.target)):
            (place / f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines))
            files += f" --{name}-{side} {place}/{name}.{side}"
    settings = "--device cpu --steps 240 --batch-tokens 600 --lr 5e-3 --warmup-steps 10 --validate-every 120"
    command(f"train --from {folder} --run {place}/run {files} {settings} --bleu-sentences 0")
    return place / "run"


@pytest.mark.parametrize("beam", [1, 4])
def test_transformers_generates_the_translations_of_a_trained_model(run: Path, hf_tokenizer: Any, beam: int) -> None:
    translator = load_translator(run)
    hf_model = to_transformers(translator.model)
    hf_model.generation_config.forced_eos_token_id = None
    actual = hf_model.generate(
        **hf_tokenizer(TEST.source, return_tensors="pt", padding=True), num_beams=beam, do_sample=False,
        max_new_tokens=LIMIT, length_penalty=1.0, early_stopping=False, bad_words_ids=[[hf_tokenizer.pad_token_id]],
    )  # fmt: skip
    expected = list(hf_tokenizer.batch_decode(actual, skip_special_tokens=True))
    assert len(set(expected)) > 30
    options = SearchOptions(beam=beam, max_ratio=0.0, max_extra=LIMIT)
    assert translator.translate(TEST.source, options, batch_size=16) == expected


def test_a_run_begins_with_the_weights_and_lowers_their_loss(run: Path, folder: Path) -> None:
    data = DataConfig(tokenizer="pretrained", train_source=run.parent / "train.source", train_target=run)
    initial, _, settings, _ = application_of("translation").load_initial_model(folder, {"dropout": 0.2}, data, None)
    assert settings["dropout"] == 0.2
    before, after = from_transformers(folder).eval(), load_translator(run).model
    assert all(torch.equal(x, initial.state_dict()[name]) for name, x in before.state_dict().items())
    pairs = encode_pairs(VALID, *read_marian(folder), 256, "truncate")
    assert corpus_loss(after, pairs) < corpus_loss(before, pairs) / 2
    assert (after.config.activation, after.config.positions) == ("silu", "sinusoidal_halves")
    steps = len(read_metrics(run))
    assert "training ends at step 244" in command(f"train --run {run} --resume --steps 244 --device cpu")
    assert len(read_metrics(run)) > steps
    assert "BLEU" in command(f"evaluate --run {run} --beam 2 --device cpu")


def test_tokenizers_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    words = json.loads((copy / "vocab.json").read_text())

    def begin(**changes: int) -> Any:
        (copy / "vocab.json").write_text(json.dumps(words | changes))
        return application_of("translation").load_initial_model(copy, {}, DataConfig(), None)

    with pytest.raises(ValueError, match=f"its source_vocabulary is {len(words) + 1}, not {len(words)}"):
        begin(more=len(words))
    with pytest.raises(ValueError, match=r"its pad_id is 2, not \d+"):
        begin(**{"<pad>": words[CODE], CODE: words["<pad>"]})
    with pytest.raises(TextError, match="ids must be 0 to"):
        begin(**{"<pad>": 3})
    (copy / "target.spm").unlink()
    with pytest.raises(FileNotFoundError, match=r"target\.spm: no such file"):
        begin()
