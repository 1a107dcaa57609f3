"""What `fastformer train` refuses before it reads any data."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

import fastformer as package
from fastformer.apps.language import run as language_modelling
from fastformer.apps.language.run import LanguageDataConfig, LanguageRun, LanguageTrainConfig
from fastformer.apps.text import write_lines
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation import demo
from fastformer.apps.translation import run as translation
from fastformer.apps.translation.run import DataConfig, TranslationRun
from fastformer.backend import BackendError
from tests.apps.cli.test_cli import TRAIN as TRAIN_TRANSLATION
from tests.apps.cli.test_cli_language import TEXT, TRAIN_LM
from tests.support.command_line import fastformer

SMALL = {"d_model": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 16}
FILES = "train --run new --steps 1 --device cpu --train-source s.txt --train-target t.txt"

EARLY = [
    (f"{TRAIN_TRANSLATION} --metric blue", "'blue' is no value of this validation; choose loss, perplexity, bleu"),
    (f"{TRAIN_TRANSLATION} --metric bleu --bleu-sentences 0", "metric='bleu' is not computed here; it needs a search"),
    (f"{TRAIN_TRANSLATION} --metric chrf --bleu-sentences 0", "metric='chrf' is not computed here; it needs a search"),
    (f"{TRAIN_TRANSLATION} --metric word_perplexity", "metric='word_perplexity' is no value of this validation"),
    (f"{TRAIN_TRANSLATION} --heads 3", "heads (3) must divide d_model (16)"),
    (f"{TRAIN_TRANSLATION} --d-model 64.0", "d_model must be a whole number, at least 1 and at most 2,147,483,647, "),
    (f"{TRAIN_TRANSLATION} --encoder-layers many", "encoder_layers must be a whole number, at least 1 and at most "),
    (f"{TRAIN_TRANSLATION} --dropout 2", "dropout must be at least 0 and below 1, not 2.0"),
    (f"{TRAIN_TRANSLATION} --norm-eps 0", "norm_eps must be above 0, not 0.0"),
    (f"{TRAIN_TRANSLATION} --embeddings shared", "embeddings 'shared' needs one joint vocabulary, but joint=False"),
    (f"{TRAIN_TRANSLATION} --positions learned --max-positions 9", "max_length (256) is beyond max_positions (9)"),
    (f"{TRAIN_TRANSLATION} --pad-id 2", "special ids must be four distinct integers"),
    (f"{TRAIN_TRANSLATION} --eos-id 60", "eos_id must be at least 0 and below vocabulary (60), not 60"),
    (f"{TRAIN_TRANSLATION} --character-coverage 1.5", "coverage must be at least 0.98 and at most 1, not 1.5"),
    (f"{TRAIN_TRANSLATION} --character-coverage 0.5", "coverage must be at least 0.98 and at most 1, not 0.5"),
    (f"{TRAIN_TRANSLATION} --device meta", "device must be auto, cpu, cuda, cuda:N, mps or xpu, not 'meta'"),
    (f"{TRAIN_TRANSLATION} --cuda-graphs", "cuda_graphs has an effect only with a CUDA device, not with a CPU"),
    (f"{TRAIN_TRANSLATION} --parallel fsdp", "parallel has an effect only with several processes"),
    (f"{TRAIN_TRANSLATION} --run file.txt", "file.txt is a file; a run needs a folder"),
    (f"{TRAIN_TRANSLATION} --run file.txt/run", "file.txt is a file; a run needs a folder"),
    (f"{TRAIN_TRANSLATION} --batch-sentences 8", "batch_tokens has an effect only without batch_sentences"),
    (f"{TRAIN_TRANSLATION} --config tokens.toml --batch-sentences 8", "batch_tokens has an effect only without"),
    (f"{FILES} --valid-source no.txt --valid-target t.txt", "no.txt: no such file"),
    (f"{FILES} --source en --dataset numbers", "dataset has an effect only without train_source; source has"),
    (f"{TRAIN_LM} --metric bleu", "no value of this validation; choose loss, perplexity, word_perplexity"),
    (f"{TRAIN_LM} --metric word_perplexity", "it needs tokens that are not the words between spaces"),
    (f"{TRAIN_LM} --batch-sentences 4", "batch_sentences has an effect only with sentence pairs, not with running"),
    (f"{TRAIN_LM} --stream columns", "batch_tokens has an effect only with stream=documents, not with stream=columns"),
    (f"{TRAIN_LM} --size 9", "size has an effect only with docstrings, not with a text file to split"),
    (f"{TRAIN_LM} --context 65", "batch_tokens (64) must be at least context (65)"),
    (f"{TRAIN_LM} --valid-text no.txt", "no.txt: no such file"),
]  # fmt: skip


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a few files; whoever reads data fails."""

    def read(*arguments: Any) -> None:
        raise AssertionError("data was read")

    for module, name in (
        (translation, "read_corpora"),
        (language_modelling, "read_text_corpora"),
        (demo, "read_corpora"),
    ):
        monkeypatch.setattr(module, name, read)
    for name in ("s.txt", "t.txt", "file.txt", "text.txt"):
        write_lines(tmp_path / name, TEXT)
    (tmp_path / "tokens.toml").write_text("[train]\nbatch_tokens = 300\n")
    return tmp_path


@pytest.mark.parametrize(("command", "message"), EARLY, ids=[" ".join(c.split()[-4:]) for c, _ in EARLY])
def test_what_could_only_fail_late_is_refused_before_data_is_read(unread: Path, command: str, message: str) -> None:
    before = sorted(unread.rglob("*"))
    done = fastformer(*command.split(), *(() if "--run" in command else ("--run", "new")), cwd=unread)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.strip().split("\n")) == 1
    assert sorted(unread.rglob("*")) == before


@pytest.mark.parametrize("command", [TRAIN_TRANSLATION, TRAIN_LM, "demo --device cpu"])
def test_a_backend_that_cannot_be_met_is_refused_before_data_is_read(
    unread: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (unread / "new").mkdir()
    (unread / "new" / "demo.txt").write_text("made by `fastformer demo`, which may replace this folder\n")
    before = sorted(unread.rglob("*"))
    monkeypatch.setattr("fastformer.functional.choice._INTERPRETED", False)
    with package.backend("triton"):
        done = fastformer(*command.split(), "--run", "new", cwd=unread)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: backend 'triton' was asked for, but attention needs")
    monkeypatch.setattr(sys.modules["fastformer.backend"].process, "backend", "foo")
    done = fastformer(*command.split(), "--run", "new", cwd=unread)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: FASTFORMER_BACKEND is 'foo'; it must be one of auto, triton, reference\n"
    assert sorted(unread.rglob("*")) == before


def test_a_head_that_kernels_cannot_take_is_refused_before_data_is_read(unread: Path, triton_backend: None) -> None:
    model = {**SMALL, "d_model": 514, "heads": 2}
    with pytest.raises(BackendError, match="head sizes from 1 to 256, not 257"):
        TranslationRun.create(unread / "new", DataConfig(), model, TrainConfig(steps=1))


def test_python_is_refused_as_early(unread: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = unread / "new"
    with pytest.raises(ValueError, match="metric='blue' is no value of this validation"):
        TranslationRun.create(run, DataConfig(), SMALL, TrainConfig(steps=1, metric="blue"))
    with pytest.raises(ValueError, match="device='cuda:77' cannot be used"):
        TranslationRun.create(run, DataConfig(), SMALL, TrainConfig(steps=1), "cuda:77")
    with pytest.raises(ValueError, match="batch_sentences is for translation"):
        LanguageRun.create(run, LanguageDataConfig(), {}, LanguageTrainConfig(steps=1, batch_sentences=8))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs sacrebleu: pip install 'fastformer\[apps\]'"):
        TranslationRun.create(run, DataConfig(), SMALL, TrainConfig(steps=1))
    with pytest.raises(ImportError, match=r"needs tensorboard: pip install 'fastformer\[tensorboard\]'"):
        LanguageRun.create(run, LanguageDataConfig(), {}, LanguageTrainConfig(steps=1, tensorboard=True))
    assert not run.exists()


def test_a_batch_without_room_for_a_sentence_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    data = DataConfig(train_size=50, valid_size=5, test_size=5, vocabulary=60)
    with pytest.raises(ValueError, match="tokens=3 is less than sentence pair"):
        TranslationRun.create(tmp_path / "run", data, SMALL, TrainConfig(steps=1, batch_tokens=3))
    assert not (tmp_path / "run").exists()
