"""A run whose folder was moved while it is written leaves alone what stands at its place."""

import gc
import os
import shutil

import pytest

from fastformer.apps.cli import training as cli_training
from fastformer.apps.language.run import LanguageDataConfig, LanguageRun
from fastformer.apps.system.run_lock import LOCK, RunLockedError
from fastformer.apps.train import TrainConfig, checkpoint_folder, metrics
from tests.support.train_task import config, trainer, validate

pytestmark = pytest.mark.skipif(os.name != "posix", reason="folders in use are not moved there")


@pytest.mark.parametrize("when", ["record", "save", "write_weights", "write_state", "write_meta", "synchronise"])
def test_a_run_that_took_the_place_of_a_moved_one_is_left_alone(tmp_path, monkeypatch, when):
    trainer(tmp_path / "other", config()).fit()
    (tmp_path / "other" / "checkpoints" / ".new-step-99").mkdir()  # another process saves there
    (tmp_path / "other" / "checkpoints" / ".new-step-99" / "weights").write_text("its")
    before = {path.relative_to(tmp_path / "other"): path.read_bytes() for path in _files(tmp_path / "other")}

    def moving(call):
        def move(*arguments):
            if (tmp_path / "other").exists():
                (tmp_path / "run").rename(tmp_path / "moved")
                (tmp_path / "other").rename(tmp_path / "run")
            return call(*arguments)

        return move

    validated = moving(validate)
    if when not in ("record", "save"):  # while a checkpoint is written
        validated = validate
        where = f"fastformer.apps.train.checkpoint_folder.{when}"
        monkeypatch.setattr(where, moving(getattr(checkpoint_folder, when)))
    settings = config(steps=20, validate_every=4, log_every=1 if when == "record" else 100)
    with pytest.raises(OSError, match="run is another folder than when this run began"):
        trainer(tmp_path / "run", settings, validate=validated).fit()
    assert {path.relative_to(tmp_path / "run"): path.read_bytes() for path in _files(tmp_path / "run")} == before


@pytest.mark.parametrize("way", ["folder", "link"])
@pytest.mark.parametrize("where", ["learn", "_check_last", "_fit", "check_locked"])
def test_a_run_is_left_alone_whenever_it_took_the_place_of_another(tmp_path, text, monkeypatch, where, way):
    """While a run reads its data, before it resumes, before it trains, and before its picture is drawn."""
    made = {"train_text": text, "valid_text": text, "tokenizer": "words"}
    model, run, other = {"d_model": 8, "heads": 1, "layers": 1, "feed_forward": 8}, tmp_path / "run", tmp_path / "other"
    train, data = TrainConfig(steps=1, warmup_steps=1), LanguageDataConfig(**made)
    LanguageRun.create(other, data, model, train).fit(show=False)
    gc.collect()
    if where == "_check_last":
        shutil.copytree(other, run)
    before = {path.relative_to(other): path.read_bytes() for path in _files(other)}

    def moving(call):
        def first(*arguments):
            if other.exists() and not (tmp_path / "moved").exists():
                run.rename(tmp_path / "moved")
                run.symlink_to(other) if way == "link" else other.rename(run)
            return call(*arguments)

        return first

    home = cli_training if where == "check_locked" else LanguageRun
    monkeypatch.setattr(home, where, moving(getattr(home, where)))
    sections = {"data": made, "model": model, "train": {"steps": 1, "warmup_steps": 1}}
    resume = where == "_check_last"
    sections = {"data": {}, "model": {}, "train": {"steps": 3}} if resume else sections
    with pytest.raises(RunLockedError, match="run is another folder than when this run began"):
        cli_training.train_run(LanguageRun, run, None, resume, False, "cpu", sections)
    assert {path.relative_to(run): path.read_bytes() for path in _files(run)} == before


@pytest.mark.parametrize("write", ["write_file", "append_file", "make_folder", "rename_folder", "remove"])
def test_what_is_written_reaches_the_folder_that_was_locked(tmp_path, monkeypatch, write):
    """Even where another one takes its place after the last look at it."""
    trainer(tmp_path / "run", config(steps=4, validate_every=4)).fit()
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    before = {path.relative_to(tmp_path / "other"): path.read_bytes() for path in _files(tmp_path / "other")}
    home = next(home for home in (checkpoint_folder, metrics) if hasattr(home, write))
    call = getattr(home, write)

    def late(*arguments):
        if (tmp_path / "other").exists():
            (tmp_path / "run").rename(tmp_path / "moved")
            (tmp_path / "other").rename(tmp_path / "run")
        return call(*arguments)

    again = trainer(tmp_path / "run", config(steps=12, validate_every=4, log_every=1, keep=1))
    again.resume()
    monkeypatch.setattr(home, write, late)
    with pytest.raises(OSError, match=r"run is another folder than when this run began|\.new-step-8"):
        again.fit()
    assert {path.relative_to(tmp_path / "run"): path.read_bytes() for path in _files(tmp_path / "run")} == before


def _files(folder):
    return [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK]
