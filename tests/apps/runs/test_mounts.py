"""Containers: a folder of an image cannot be renamed, and neither a file nor a folder replaces one that is a mount."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fastformer.apps.export import export_safetensors, load_safetensors
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.system.atomic import write_atomic
from fastformer.apps.text import WordTokenizer
from fastformer.apps.train import CheckpointFolder, checkpoint_folder
from tests.support.python import ROOT, variables

TOKENIZER = WordTokenizer.from_lines(["a b c"] * 2)
MODEL = LanguageConfig(TOKENIZER.size, layers=1, d_model=8, heads=2, feed_forward=8)


def _refusing(code: int, refused: Callable[[Path], bool]) -> Callable[..., None]:
    """`os.replace`, which refuses some folders or files as the system does."""
    replace = os.replace

    def refuse(path, to, *, src_dir_fd=None, dst_dir_fd=None):
        above = Path() if src_dir_fd is None else Path(os.readlink(f"/proc/self/fd/{src_dir_fd}"))
        if refused(above / path):
            raise OSError(code, os.strerror(code))
        replace(path, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    return refuse


def _killed_once_copied(rename: Callable[..., None]) -> Callable[..., None]:
    """`rename_folder` of a process that ends where the copy of a folder that nobody renames gets its name."""

    def killed(path, new, within):
        if path.name.startswith(".old-"):
            raise KeyboardInterrupt
        rename(path, new, within)

    return killed


def _save(folder: CheckpointFolder, step: int) -> None:
    weight = torch.full((5,), float(step))
    folder.save(step, {"w": weight}, {"step": step})
    folder.save(step, {"w": weight + 100}, None)


@pytest.mark.skipif(sys.platform != "linux", reason="overlayfs is Linux's")
class TestImage:
    """A run that came with a container's image: each of its folders is renamed by nobody."""

    @pytest.fixture
    def image(self, tmp_path, monkeypatch) -> Iterator[CheckpointFolder]:
        folder = CheckpointFolder(tmp_path / "run" / "checkpoints", keep=2)
        for step in (1, 2):
            _save(folder, step)
        (folder.folder / "step-2" / "shards").mkdir()
        (folder.folder / "step-2" / "shards" / "one").write_text("one")
        opened = [os.open(path, os.O_RDONLY) for path in folder.folder.rglob("*") if path.is_dir()]
        lower = {os.fstat(each).st_ino for each in opened}  # no other folder gets such a number while they are open
        replace = _refusing(errno.EXDEV, lambda path: path.is_dir() and path.stat().st_ino in lower)
        monkeypatch.setattr(os, "replace", replace)
        yield folder
        for each in opened:
            os.close(each)

    def test_checkpoints_are_removed_and_replaced(self, image):
        _save(image, 2)
        _save(image, 3)
        assert [path.name for path in image.paths()] == ["step-2", "step-3"]
        assert {path.name for path in image.folder.iterdir()} == {"average", "index.json", "step-2", "step-3"}
        assert image.open().weights()["w"][0] == 3
        assert image.open(image.folder / "average").weights()["w"][0] == 103

    def test_one_that_is_half_removed_comes_back(self, image, monkeypatch):
        whole = {
            path.relative_to(image.folder): path.read_bytes() for path in image.folder.rglob("*") if path.is_file()
        }
        remove, removed = checkpoint_folder.remove, []

        class KilledError(BaseException):
            pass

        def killed(path, within):
            removed.append(path.name)
            if path.name == "step-2":
                remove(path / "state.pt", within)
                raise KilledError
            remove(path, within)

        monkeypatch.setattr(checkpoint_folder, "remove", killed)
        with pytest.raises(KilledError):
            _save(image, 2)
        monkeypatch.setattr(checkpoint_folder, "remove", remove)
        assert removed == ["meta.json", "step-2"]
        image.recover()
        found = {
            path.relative_to(image.folder): path.read_bytes() for path in image.folder.rglob("*") if path.is_file()
        }
        assert found == whole

    @pytest.mark.parametrize("killed_again", [False, True])
    def test_one_that_was_being_replaced_comes_back(self, image, monkeypatch, killed_again):
        step = image.folder / "step-2"
        whole = {path.name: path.read_bytes() for path in step.iterdir() if path.is_file()}
        step.rename(image.folder / ".swap-step-2")  # by a process that was killed before the image was made
        if killed_again:
            with monkeypatch.context() as dying:
                dying.setattr(checkpoint_folder, "rename_folder", _killed_once_copied(checkpoint_folder.rename_folder))
                with pytest.raises(KeyboardInterrupt):
                    image.recover()
            assert not step.exists()
        image.recover()
        assert {path.name: path.read_bytes() for path in step.iterdir() if path.is_file()} == whole
        assert {path.name for path in image.folder.iterdir()} == {"average", "index.json", "step-1", "step-2"}

    def test_another_error_is_none_of_that(self, image, monkeypatch):
        monkeypatch.setattr(os, "replace", _refusing(errno.EIO, Path.is_dir))
        with pytest.raises(OSError, match=r"Input/output.*the last good checkpoint is .*step-2"):
            _save(image, 2)
        assert image.open().step == 2


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EXDEV])
def test_a_file_that_is_a_mount_is_written_to(tmp_path, monkeypatch, code):
    path = tmp_path / "out.txt"
    path.write_text("what was there before")
    identity = path.stat().st_ino
    monkeypatch.setattr(os, "replace", _refusing(code, lambda _: True))
    write_atomic(path, b"new")
    assert (path.read_bytes(), path.stat().st_ino, os.listdir(tmp_path)) == (b"new", identity, ["out.txt"])

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match=r"out\.txt, of which .*tmp is what it should hold") as caught:
        write_atomic(path, b"newer")
    kept = str(caught.value.filename).split(" of which ")[1].split(" is ")[0]
    assert Path(kept).read_bytes() == b"newer"


@pytest.mark.parametrize("known", [True, False], ids=["mount", "bind"])
def test_an_export_into_a_mount(tmp_path, monkeypatch, known):
    """`known`: a mount of another file system; one of the same is found out by the rename."""
    model, folder = LanguageModel(MODEL), tmp_path / "out"
    folder.mkdir()
    identity = folder.stat().st_ino
    monkeypatch.setattr(os.path, "ismount", lambda path: known and os.fspath(path) == os.fspath(folder))
    monkeypatch.setattr(Path, "replace", _refusing(errno.EBUSY, lambda _: True))
    export_safetensors(folder, model, [TOKENIZER])
    assert load_safetensors(folder).config == model.config
    assert folder.stat().st_ino == identity
    assert not [path for path in (*folder.iterdir(), *tmp_path.iterdir()) if path.name.startswith(".")]


@pytest.mark.parametrize("known", [True, False], ids=["mount", "bind"])
def test_an_export_into_a_mount_that_fails_leaves_it_empty(tmp_path, monkeypatch, known):
    folder, move = tmp_path / "out", shutil.move
    folder.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: known and os.fspath(path) == os.fspath(folder))
    monkeypatch.setattr(Path, "replace", _refusing(errno.EBUSY, lambda _: True))

    def full(path, to):
        move(path, to)
        if Path(to).name == "tokenizer":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "move", full)
    with pytest.raises(OSError, match="No space"):
        export_safetensors(folder, LanguageModel(MODEL), [TOKENIZER])
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]
    monkeypatch.setattr(shutil, "move", lambda path, to: ((folder / "model.safetensors").touch(), move(path, to)))
    with pytest.raises(FileExistsError, match=r"model\.safetensors has come meanwhile"):
        export_safetensors(folder, LanguageModel(MODEL), [TOKENIZER])
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "model.safetensors"]


MOUNTS = """
import os, subprocess, sys
from pathlib import Path
from tests.apps.runs.test_mounts import MODEL, TOKENIZER, _save
from fastformer.apps.export import export_safetensors, load_safetensors
from fastformer.apps.language.model import LanguageModel
from fastformer.apps.system.atomic import write_atomic
from fastformer.apps.train import CheckpointFolder

top = Path(sys.argv[1])
def mount(*words):
    subprocess.run(["mount", *map(str, words)], check=True)
mount("-t", "tmpfs", "tmpfs", top)
for name in ("lower", "upper", "work", "seen", "volume", "bind", "other"):
    (top / name).mkdir()
for step in (1, 2):
    _save(CheckpointFolder(top / "lower" / "run" / "checkpoints", keep=2), step)
parts = f"lowerdir={top}/lower,upperdir={top}/upper,workdir={top}/work,userxattr"
mount("-t", "overlay", "overlay", "-o", parts, top / "seen")
folder = CheckpointFolder(top / "seen" / "run" / "checkpoints", keep=2)
_save(folder, 2)
_save(folder, 3)
assert [path.name for path in folder.paths()] == ["step-2", "step-3"]
assert {path.name for path in folder.folder.iterdir()} == {"average", "index.json", "step-2", "step-3"}
assert folder.open().weights()["w"][0] == 3

mount("-t", "tmpfs", "tmpfs", top / "volume")
mount("--bind", top / "other", top / "bind")
for name in ("volume", "bind"):
    export_safetensors(top / name, LanguageModel(MODEL), [TOKENIZER])
    load_safetensors(top / name)
assert not [path for path in (*top.iterdir(), *top.glob("*/*")) if path.name.startswith(".")]

for name in ("a", "b"):
    (top / name).write_text(name)
mount("--bind", top / "a", top / "b")
write_atomic(top / "b", b"new")
assert (top / "a").read_text() == "new"
print("passed")
"""


def _may_mount(folder: Path) -> bool:
    """Whether this process may have mounts of its own, with overlayfs among them."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    (folder / "lower").mkdir(parents=True)
    overlay = "mkdir l u w m && mount -t overlay o -o lowerdir=l,upperdir=u,workdir=w,userxattr m"
    command = ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs t {folder} && cd {folder} && {overlay}"]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_real_mounts(tmp_path):
    if not _may_mount(tmp_path / "probe"):
        pytest.skip("needs the right to mount overlayfs in a namespace")
    (tmp_path / "top").mkdir()
    words = ["unshare", "-rm", sys.executable, "-c", MOUNTS, str(tmp_path / "top")]
    run = subprocess.run(words, cwd=ROOT, env=variables(), capture_output=True, text=True)
    assert run.stdout.endswith("passed\n"), run.stdout + run.stderr


def test_what_a_file_system_says_of_its_files_rights_is_worth_no_work(tmp_path, monkeypatch):
    """Of one that is mounted as somebody else's (FAT, SMB), who may write a file is not its owner."""

    def refuse(path, mode, **how):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(os, "chmod", refuse)
    for content in (b"new", b"and again"):
        write_atomic(tmp_path / "output", content)
        assert (tmp_path / "output").read_bytes() == content
    path = CheckpointFolder(tmp_path / "checkpoints").save(1, {"w": torch.ones(3)}, {"step": 1})
    assert torch.equal(CheckpointFolder(tmp_path / "checkpoints").open(path).weights()["w"], torch.ones(3))
    model = LanguageModel(MODEL)
    export_safetensors(tmp_path / "exported", model, (TOKENIZER,))
    assert torch.equal(load_safetensors(tmp_path / "exported").embedding.tokens.weight, model.embedding.tokens.weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "exported", "output"]
