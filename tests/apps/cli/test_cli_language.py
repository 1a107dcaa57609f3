"""Language models on the command line: train, evaluate, generate, info, and what is refused."""

import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from tests.apps.cli.test_cli import TRAIN as TRAIN_TRANSLATION
from tests.support.command_line import fastformer

TRAIN_LM = (
    "train lm --train-text text.txt --held-out 0.1 --tokenizer words --d-model 16 --heads 2 --layers 1 "
    "--feed-forward 32 --context 8 --batch-tokens 64 --steps 4 --warmup-steps 2 --validate-every 2 --threads 1 "
    "--label-smoothing 0 --device cpu"
)
TEXT = [
    f"the {animal} sees the {other}" for animal in ("cat", "dog", "cow", "hen") for other in ("mouse", "bird", "fox")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny trained language model in `lm/` and a translation run in `tr/`."""
    folder = tmp_path_factory.mktemp("cli_language")
    (folder / "text.txt").write_text("\n".join(TEXT) + "\n")
    done = fastformer(*TRAIN_LM.split(), "--run", "lm", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "ended after 4 steps" in done.stdout
    assert "vocabulary 13" in done.stdout
    done = fastformer(*TRAIN_TRANSLATION.split(), "--run", "tr", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_evaluate_prints_perplexity_with_the_counts(folder: Path) -> None:
    done = fastformer("evaluate", "--run", "lm", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert re.search(r"perplexity \d+\.\d\d per token \(6 predicted, <eos> counted\)", done.stdout)
    (folder / "other.txt").write_text("the unicorn sees\nthe cat\n")
    done = fastformer("evaluate", "--run", "lm", "--source", "other.txt", "--checkpoint", "last", cwd=folder)
    assert "(7 predicted, <eos> counted, 1 of them <unk>)" in done.stdout


def test_windows_overlap_where_asked_for(folder: Path) -> None:
    (folder / "long.txt").write_text(" ".join(["the cat sees the bird"] * 9) + "\n")
    command = ("evaluate", "--run", "lm", "--source", "long.txt")
    plain, none, found = (
        fastformer(*command, *more, cwd=folder) for more in ((), ("--overlap", "0"), ("--overlap", "6"))
    )
    assert found.returncode == 0, found.stderr
    assert plain.stdout == none.stdout != found.stdout
    assert re.search(r"\(46 predicted, <eos> counted\); each window rereads 6 tokens$", found.stdout.strip())


def test_files_and_flags_fill_in_the_defaults_of_language_models(folder: Path) -> None:
    (folder / "own.toml").write_text("[train]\nlr = 0.01\nwarmup_steps = 3\n")
    command = TRAIN_LM.replace("--warmup-steps 2", "--config own.toml").replace("--label-smoothing 0", "").split()
    done = fastformer(*command, "--clip-norm", "0.5", "--run", "own", cwd=folder)
    assert done.returncode == 0, done.stderr
    train = tomllib.loads((folder / "own" / "config.toml").read_text())["train"]
    names = ("schedule", "label_smoothing", "warmup_steps", "lr", "clip_norm", "batch_tokens")
    assert [train[name] for name in names] == ["cosine", 0.0, 3, 0.01, 0.5, 64]
    for command, shown in (("train lm", "cosine"), ("train", "chosen for corpus and budget")):
        text = " ".join(fastformer(*command.split(), "--help", cwd=folder).stdout.split())
        assert f"[default: {shown}]" in text


LM = "train lm --train-text text.txt --tokenizer words --steps 1 --run new"
WRONG = [
    ("train lm --run new --steps 1 --dataset missing", "missing"),
    ("train lm --run new --steps 1 --train-text no.txt", "no.txt: no such file"),
    ("train lm --run new --steps 1 --train-text empty.txt", "empty.txt: the file is empty"),
    ("train lm --run new --steps 1 --train-text blank.txt", "blank.txt: holds no word"),
    ("train lm --run new --steps 1 --valid-text text.txt", "valid_text and test_text need train_text"),
    (f"{LM} --stream rows", "stream must be one of documents, columns, not 'rows'"),
    (f"{LM} --document article", "needs titles"),
    (f"{LM} --document file", "too few"),
    (f"{LM} --context 0", "context must be at least 1, not 0"),
    (f"{LM} --stream columns --columns 1000", "columns=1000 is too many"),
    (f"{LM} --output-dropout 1", "output_dropout must be at least 0 and below 1, not 1.0"),
    (f"{LM} --positions learned --max-positions 9", "context (256) is beyond max_positions (9)"),
    ("train lm --run new --config typo.toml --steps 1", "did you mean 'columns'?"),
    ("train lm --run new --config derived.toml --steps 1", "vocabulary is set from the tokenizer"),
    ("train lm --run new --config translation.toml --steps 1", "is for a translation run; use `fastformer train`"),
    ("train --run new --config language.toml --steps 1", "is for a language-model run; use `fastformer train lm`"),
    ("train lm --run new --config kind.toml --steps 1", "classification, not 'poetry'"),
    ("train lm --run tr --resume --steps 9", "tr is a translation run; use `fastformer translate`"),
    ("train --run lm --resume --steps 9", "lm is a language-model run; use `fastformer generate`"),
    ("train --steps 9 lm --run new", "--steps must come after lm"),
    ("translate --run lm hello", "lm is a language-model run; use `fastformer generate`"),
    ("generate --run tr hello", "tr is a translation run; use `fastformer translate`"),
    ("evaluate --run lm --beam 3", "lm is a language-model run"),
    ("evaluate --run lm --overlap 8", "overlap must be at least 0 and below context (8), not 8"),
    ("evaluate --run tr --overlap 4", "tr is a translation run; --overlap is not for it"),
]


def modified(folder: Path) -> dict[Path, int]:
    """When each file of the two runs was written, but their locks."""
    paths = (path for name in ("lm", "tr") for path in (folder / name).rglob("*"))
    return {path: path.stat().st_mtime_ns for path in paths if path.name != ".lock"}


@pytest.mark.parametrize(("command", "message"), WRONG, ids=[command for command, _ in WRONG])
def test_a_mistake_gets_one_line_and_loses_nothing(folder: Path, command: str, message: str) -> None:
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text("\n  \n\n")
    (folder / "typo.toml").write_text("[data]\ncolunms = 3\n")
    (folder / "derived.toml").write_text("[model]\nvocabulary = 3\n")
    for kind in ("translation", "language"):
        (folder / f"{kind}.toml").write_text(f'[run]\nkind = "{kind}"\n')
    (folder / "kind.toml").write_text('[run]\nkind = "poetry"\n')
    before = modified(folder)
    done = fastformer(*command.split(), cwd=folder)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().split("\n")) == 1
    assert not (folder / "new" / "config.toml").exists()
    assert modified(folder) == before
