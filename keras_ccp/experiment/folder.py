"""The folder of a run: made, kept by one process, its files written whole."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing keeps a second process out
    fcntl = None

LOCK_FILE = ".lock"


def check_folder(out: Path) -> None:
    """Refuses a place where no folder can be; makes nothing.

    Args:
        out: folder, there or not.

    Raises:
        NotADirectoryError: If it, or what it is to lie in, is a file.
        PermissionError: If it is in a folder that may not be written.
    """
    above = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not above.is_dir():
        raise NotADirectoryError(
            "`out` must be a folder, or a new name for one. Received: "
            f"{out}, where {above} is a file"
        )
    if not os.access(above, os.W_OK):
        raise PermissionError(
            "`out` must be in a folder that you may write; choose another. Received: "
            f"{out}, where {above} may not be written"
        )


def make_folder(out: Path) -> None:
    """Makes a folder, and those above it, where there is none.

    Args:
        out: folder.

    Raises:
        OSError: If it cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            "`out` must be a folder that can be made; choose another. Received: "
            f"{out} ({error.strerror})"
        ) from error


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keeps other processes out of a folder inside the `with` block.

    The system gives the folder free when the process ends, however it ends. Where it
    knows no such locks, nothing is kept out.

    Args:
        out: folder, which is there.

    Raises:
        BlockingIOError: If another process has it.
    """
    with (out / LOCK_FILE).open("a") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"Another process trains in {out}: wait for its end, end it, or choose "
                "another `out`"
            ) from None
        except OSError:  # a file system without locks, as some of networks are
            pass
        yield


def write_whole(path: Path, text: str) -> None:
    """Writes a file: all of it, or none if the process dies.

    Args:
        path: where to.
        text: its content, written as UTF-8.
    """
    partial = path.with_name(f"partial_{path.name}")
    partial.write_text(text, encoding="utf-8", newline="")
    partial.replace(path)
