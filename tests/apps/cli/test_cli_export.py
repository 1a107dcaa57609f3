"""`fastformer export`, from runs of both kinds."""

from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.export import load_safetensors
from fastformer.apps.language.run import load_generator
from fastformer.apps.translation.run import load_translator
from tests.apps.cli.test_cli import TRAIN
from tests.apps.cli.test_cli_language import TEXT, TRAIN_LM
from tests.support.command_line import fastformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run of each kind."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "text.txt").write_text("\n".join(TEXT))
    for command in (f"{TRAIN} --run translation", f"{TRAIN_LM} --run language"):
        done = fastformer(*command.split(), cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("kind", ["translation", "language"])
def test_a_run_is_exported(folder: Path, tmp_path: Path, kind: str) -> None:
    load = load_translator if kind == "translation" else load_generator
    weights = load(folder / kind).model.state_dict()
    done = fastformer("export", "--run", kind, "--format", "safetensors", "--to", str(tmp_path / "s"), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("s: config.json, model.safetensors, tokenizer")
    exported = load_safetensors(tmp_path / "s").state_dict()
    assert all((exported[name] == weight).all() for name, weight in weights.items())
    ctranslate2 = pytest.importorskip("ctranslate2")
    done = fastformer("export", "--run", kind, "--quantization", "int8", "--to", str(tmp_path / "c"), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert ctranslate2.contains_model(str(tmp_path / "c"))
