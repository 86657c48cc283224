"""A folder of results that is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamlens.errors import InputError

MANIFEST = "streamlens.json"


@contextmanager
def output_folder(path: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """A hidden sibling of `path` to write into; it becomes `path` when the block ends, and is removed if the block raises.

    With `overwrite` the new files replace those that an earlier run listed in its manifest; files of anyone else stay. Raises
    InputError where `path` is a file, or a folder that is not empty and `overwrite` is false, before anything is computed.
    """
    path = Path(path).expanduser().absolute()
    _check(path, overwrite)
    made = [folder for folder in path.parents if not folder.exists()]
    work = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"out must be a folder that can be written; got {str(path)!r} ({error.strerror})") from error
    try:
        yield work
        _write_manifest(work)
        _publish(work, path)
    except BaseException:  # also Ctrl-C: nothing half-written stays
        shutil.rmtree(work, ignore_errors=True)
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def _check(path: Path, overwrite: bool) -> None:
    if path.exists() and not path.is_dir():
        raise InputError(f"out must be a folder; got the file {str(path)!r}")
    if not overwrite and path.is_dir() and any(path.iterdir()):
        raise InputError(f"out must be a new or empty folder, unless overwrite is set (--overwrite); got {str(path)!r}, which holds files")


def _write_manifest(folder: Path) -> None:
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n")


def _publish(work: Path, path: Path) -> None:
    """Move the finished files to `path`: in one rename where it is free, file by file where it holds earlier results."""
    if not path.exists() or not any(path.iterdir()):
        os.replace(work, path)
        return
    manifest = path / MANIFEST
    earlier = json.loads(manifest.read_text())["files"] if manifest.is_file() else []
    for file in (f for f in work.rglob("*") if f.is_file()):
        target = path / file.relative_to(work)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)
    for name in set(earlier) - set(json.loads(manifest.read_text())["files"]):
        (path / name).unlink(missing_ok=True)
    shutil.rmtree(work)
