"""A folder whose files have the names of a run's, but are somebody's, is left alone: by `train`, `demo` and `data`."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from fastformer.apps.language.run import LanguageDataConfig, LanguageRun
from fastformer.apps.runs.own_files import refuse_output
from fastformer.apps.text import prepare
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation import demo
from fastformer.apps.translation.demo import run_demo

MODEL = {"d_model": 8, "heads": 1, "layers": 1, "feed_forward": 8}
SETTINGS = "[model]\nd_model = 8\n[train]\nsteps = 3\n"
LOCK = "process 1 on here since 2026-01-01 00:00:00\n"
FOLDERS = {
    "settings and data": {"config.toml": SETTINGS, "data.json": "[1, 2]"},
    "with metrics": {"config.toml": SETTINGS, "data.json": "{}", "metrics.csv": "a,b", "history.png": "mine"},
    "settings and a lock": {"config.toml": SETTINGS, ".lock": ""},
    "metrics and a lock": {"metrics.csv": "a,b", ".lock": LOCK},
    "a tokenizer and a lock": {"tokenizer/tokenizer.json": "{}", ".lock": ""},
    "data and a lock": {"data.json": "[1]", ".lock": LOCK},
    "settings and a demo": {"config.toml": SETTINGS, "demo.txt": "mine"},
    "metrics and a demo": {"metrics.jsonl": "{}", "demo.txt": "mine"},
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def create(folder: Path, text: Path) -> LanguageRun:
    data = LanguageDataConfig(train_text=text, valid_text=text, tokenizer="words")
    return LanguageRun.create(folder, data, MODEL, TrainConfig(steps=1))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the fox {i} sees the hen {i % 7}\n" for i in range(40)))
    return path


@pytest.mark.parametrize("name", FOLDERS)
def test_a_new_run_takes_none(tmp_path: Path, text: Path, name: str) -> None:
    folder = write(tmp_path / "theirs", FOLDERS[name])
    # What says of itself that it is a language run is no proof either.
    for kind in ("", "[run]\nkind = 'language'\n"):
        if "config.toml" in FOLDERS[name]:
            (folder / "config.toml").write_text(kind + SETTINGS)
        before = contents(folder)
        with pytest.raises(FileExistsError, match=r"no run folder|holds a"):
            create(folder, text)
        assert contents(folder) == before


@pytest.mark.parametrize("removed", [(), ("config.toml",), ("config.toml", "data.json"), ("tokenizer",)])
def test_what_a_killed_run_left_is_still_replaced(tmp_path: Path, text: Path, removed: tuple[str, ...]) -> None:
    run = create(tmp_path / "run", text)
    before = contents(run.folder)
    for name in removed:
        path = run.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    left = contents(run.folder)
    del run
    write(tmp_path / "run", {".lock": LOCK})
    (tmp_path / "run" / "checkpoints" / ".new-step-1").mkdir(parents=True) if not removed else None
    if "config.toml" not in removed:  # which `plot history RUN --output RUN/history.png` needs
        (tmp_path / "run" / ".history.png.0_a9xyzw.tmp").write_text("half a picture")
    assert {name: before[name] for name in left if name != ".lock"}.items() <= contents(tmp_path / "run").items()
    assert set(before) - {".lock"} <= set(contents(create(tmp_path / "run", text).folder))


@pytest.mark.parametrize(
    "files",
    [
        {"demo.txt": "my notes", "thesis.tex": "mine", "photos/one": "mine"},
        {"demo.txt": "my notes"},
        {"demo.txt": demo._MARK.decode(), "thesis.tex": "mine"},
        {"demo.txt": demo._MARK.decode(), "checkpoints/thesis.tex": "mine"},
        {"demo.txt": demo._MARK.decode(), "config.toml": SETTINGS},
        {"thesis.tex": "mine"},
    ],
    ids=lambda files: " ".join(files),
)
def test_a_demo_replaces_a_demo_alone(tmp_path: Path, files: dict[str, str]) -> None:
    folder = write(tmp_path / "demo", files)
    with pytest.raises(FileExistsError, match=r"not an earlier demo|is no run folder"):
        run_demo(folder, "fr", "cpu", Console(quiet=True))
    assert contents(folder) == {name: content.encode() for name, content in files.items()}


def test_what_came_while_the_demo_read_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "demo", {"demo.txt": demo._MARK.decode()})
    read = demo.read_corpora

    def slowly(data: object) -> object:
        write(folder, {"thesis.tex": "mine"})
        return read(data)  # type: ignore[arg-type]

    monkeypatch.setattr(demo, "read_corpora", slowly)
    with pytest.raises(FileExistsError, match=r"thesis\.tex is not a run's"):
        run_demo(folder, "fr", "cpu", Console(quiet=True))
    assert contents(folder) == {"demo.txt": demo._MARK, "thesis.tex": b"mine"}


def europarl(folder: Path) -> Path:
    lines = "".join(f"a sentence {i}\n" for i in range(6100))
    return write(folder, {f"europarl-v7.fr-en.{language}": lines for language in ("fr", "en")})


@pytest.mark.parametrize("content", ["[]", '{"name": "my own"}', "mine", '{"splits": {}}'])
def test_a_dataset_of_somebodys_own_is_not_replaced(tmp_path: Path, content: str) -> None:
    origin, files = europarl(tmp_path / "from"), {"dataset.json": content, "train.en": "mine"}
    folder = write(tmp_path / "to", files)
    with pytest.raises(ValueError, match="of no prepared dataset"):
        prepare("europarl", origin, folder)
    assert contents(folder) == {name: content.encode() for name, content in files.items()}


@pytest.mark.parametrize("name", [".lock", ".train.en", ".dataset.json"])
def test_what_a_dataset_needs_on_its_way_may_be_somebodys_too(tmp_path: Path, name: str) -> None:
    origin, folder = europarl(tmp_path / "from"), write(tmp_path / "to", {name: "mine"})
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is there, and of no prepared dataset"):
        prepare("europarl", origin, folder)
    assert contents(folder) == {name: b"mine"}


def test_a_dataset_is_not_compared_with_all_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Europarl in a home folder, all of that was walked for each of six files."""
    origin = europarl(tmp_path / "from")
    write(origin, {"other/folder/file": "", "prepared/notes": "mine"})
    looked: list[Path] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: [looked.append(Path(path)), scan(path)][1])
    for _ in range(2):
        prepare("europarl", origin, origin / "prepared")
    assert not [path for path in looked if path.is_relative_to(origin / "other")]
    assert (origin / "prepared" / "notes").read_text() == "mine"


@pytest.mark.parametrize("left", [{".lock": LOCK}, {".lock": ""}, {".lock": LOCK, ".dataset.json": "{"}])
def test_a_dataset_follows_one_that_was_killed(tmp_path: Path, left: dict[str, str]) -> None:
    origin, folder = europarl(tmp_path / "from"), write(tmp_path / "to", left)
    prepare("europarl", origin, folder)
    write(folder, {**left, ".train.en": "half", "dataset.json": "{}"})
    prepare("europarl", origin, folder)
    assert not [name for name in contents(folder) if name.startswith(".")]


def test_a_prepared_dataset_is_prepared_again_and_half_of_one_too(tmp_path: Path) -> None:
    origin = europarl(tmp_path / "from")
    prepare("europarl", origin, tmp_path / "to")
    before = contents(tmp_path / "to")
    for content in (before["dataset.json"].decode(), json.dumps({})):
        write(tmp_path / "to", {"dataset.json": content, "train.en": "half"})
        prepare("europarl", origin, tmp_path / "to")
        assert contents(tmp_path / "to") == before


@pytest.mark.skipif(os.name != "posix", reason="links")
@pytest.mark.parametrize("name", ["train.en", "dataset.json"])
def test_a_dataset_is_written_through_no_link(tmp_path: Path, name: str) -> None:
    origin = europarl(tmp_path / "from")
    prepare("europarl", origin, tmp_path / "to")
    (tmp_path / "outside").write_bytes((tmp_path / "to" / name).read_bytes())
    (tmp_path / "to" / name).unlink()
    (tmp_path / "to" / name).symlink_to(tmp_path / "outside")
    before = contents(tmp_path)
    with pytest.raises(OSError, match=f"{re.escape(name)}: is a link"):
        prepare("europarl", origin, tmp_path / "to")
    assert contents(tmp_path) == before


def test_an_output_is_not_compared_with_all_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--run /` was walked to its last file before anybody said that it is no run."""
    (tmp_path / "other" / "folder").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-1" / "state.pt").write_text("")
    os.link(tmp_path / "checkpoints" / "step-1" / "state.pt", tmp_path / "output")
    looked: list[Path] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: [looked.append(Path(path)), scan(path)][1])
    with pytest.raises(ValueError, match="is a file of the run"):
        refuse_output(tmp_path / "output", runs=(tmp_path,))
    refuse_output(tmp_path / "another", runs=(tmp_path,))
    assert tmp_path / "checkpoints" / "step-1" in looked
    assert not {tmp_path / "other", tmp_path / "other" / "folder"}.intersection(looked)
