"""Files and folders that are written whole or not at all, and the lock of a folder."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

LOCK_FILE = ".lock"


def write_file(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a file: all of it, or none if the process dies."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial_{path.name}")
    try:
        if isinstance(content, str):
            content = content.encode()
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def reading(what: str, remedy: str) -> Iterator[None]:
    """Says which file or archive cannot be read, and the remedy."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # a damaged file makes its reader raise anything
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        received = f"{type(error).__name__}: {error}".split("\n")[0]
        raise kind(f"{what}. Received: {received}\n{remedy}") from error


def read_json(path: str | os.PathLike, *keys: str) -> dict[str, Any]:
    """The object in a JSON file, which holds the keys."""
    remedy = "Copy it back, or delete it where it can be made again"
    with reading(f"{path} must be undamaged JSON with {', '.join(keys)}", remedy):
        values = json.loads(Path(path).read_text("utf-8"))
        for key in keys:
            values[key]
        return values


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Gives a folder to write, which takes the place of `path` once it is complete.

    What a process that died has left is put back or removed by the next.
    """
    work = path.with_name(f".{path.name}-partial")
    new, old = work / "new", work / "old"
    work.mkdir(parents=True, exist_ok=True)
    with locked(work):
        if old.exists() and not path.exists():
            old.replace(path)
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir()
        try:
            yield new
            if path.exists():
                path.replace(old)
            new.replace(path)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def check_folder(name: str, path: Path) -> None:
    """Refuses a place where no folder can be written; makes nothing."""
    above = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        reason = "may not be written" if above.is_dir() else "is a file"
        raise OSError(
            f"`{name}` must be a folder, or a new name for one. Received: {path}, "
            f"where {above} {reason}\nChoose another"
        )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes out of a folder inside the `with` block."""
    try:
        with filelock.FileLock(folder / LOCK_FILE, blocking=False):
            yield
    except filelock.Timeout:
        raise BlockingIOError(
            f"Another process works in {folder}\n"
            "Wait for its end, end it, or choose another folder"
        ) from None
