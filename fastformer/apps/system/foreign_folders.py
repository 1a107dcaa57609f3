"""Folders of a run: made, renamed and removed without following a link, as `foreign_files.py` does with files."""

import errno
import os
import shutil
import stat
from pathlib import Path

from fastformer.apps.system.foreign_files import open_new, open_regular
from fastformer.apps.system.places import IrregularFileError, held_above, named, place_of


def make_folder(path: Path) -> None:
    """Make a folder, with those above it, where none is yet; errors as `Path.mkdir`."""
    top = held_above(path)
    if top is None:
        path.mkdir(parents=True, exist_ok=True)
        return
    whole = path.absolute()
    for each in reversed((whole, *whole.parents)[: len(whole.relative_to(top[0]).parts)]):
        with place_of(each, top[0]) as (name, above), named(each):
            try:
                os.mkdir(name, dir_fd=above)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                    raise


def rename_folder(path: Path, new: Path, within: Path) -> None:
    """Give a folder another name; both stand in one folder."""
    with place_of(path, within) as (name, above), place_of(new, within) as (renamed, _), named(path):
        os.replace(name, renamed, src_dir_fd=above, dst_dir_fd=above)


def copy_folder(path: Path, new: Path, within: Path) -> None:
    """Make a folder with copies of the files and folders of another one, all on the disk."""
    make_folder(new)
    for name in names_in(path):
        if is_folder(path / name, within):
            copy_folder(path / name, new / name, within)
            continue
        with open_regular(path / name, within) as source, open_new(new / name, within) as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())


def remove(path: Path, within: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it.

    Raises IrregularFileError for folders in folders beyond what Python walks, and leaves them.
    """
    with place_of(path, within) as (name, above), named(path):
        if stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            try:
                shutil.rmtree(name, dir_fd=above)
            except RecursionError:
                raise IrregularFileError(errno.ELOOP, "holds too many folders in folders", str(path)) from None
        else:
            os.unlink(name, dir_fd=above)


def names_in(folder: Path) -> list[str]:
    """The names of what stands in a folder."""
    with place_of(folder / "any", folder) as (_, inside):
        return os.listdir(folder if inside is None else inside)


def is_folder(path: Path, within: Path) -> bool:
    """Whether a folder is there, and no link to one."""
    try:
        with place_of(path, within) as (name, above):
            return stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
