"""The file of an index in its folder: written whole, and checked when read."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from keras_ccp.backup import read_arrays, write_arrays
from keras_ccp.index.entries import Entries

_FORMAT = 1
# The format is that of checkpoints, of step 0, and so is the name.
_STEP = 0
_FILE = "checkpoint-00000000.bin"


def has_index(path: str | os.PathLike) -> bool:
    """Whether a folder holds an index, in any state.

    Args:
        path: folder.
    """
    return (Path(path) / _FILE).is_file()


def check_index_folder(name: str, path: str | os.PathLike) -> None:
    """Refuses a folder in which an index would lie among other files.

    Args:
        name: name of the argument.
        path: folder to write; it may be missing.

    Raises:
        ValueError: If it holds other files and no index, or is a file.
    """
    path = Path(path)
    if path.is_dir():
        # What a process that died left half written is no reason.
        others = sorted({file.name for file in path.iterdir()} - {f"{_FILE}.tmp"})
        if not others or _FILE in others:
            return
        reason = f"which holds {others[0]!r} and no index"
    elif path.exists():
        reason = "which is a file"
    else:
        return
    raise ValueError(
        f"`{name}` must be a new or empty folder, or that of an index, which is "
        f"replaced; choose another. Received: {name}={str(path)!r}, {reason}"
    )


def write_index(
    path: str | os.PathLike, header: dict[str, Any], entries: Entries
) -> None:
    """Writes an index: all of it, or none if the process dies.

    Args:
        path: folder, made if it is missing.
        header: values that JSON can hold, by name.
        entries: the rows.

    Raises:
        ValueError: As `check_index_folder`.
        OSError: If it cannot be written.
    """
    check_index_folder("path", path)
    text = json.dumps({"format": _FORMAT, **header})
    arrays = {"header": np.array(text), **entries.to_arrays()}
    try:
        write_arrays(Path(path) / _FILE, _STEP, arrays)
    except OSError as error:
        raise OSError(
            error.errno,
            f"The index cannot be written: {error.strerror}. One that is in the "
            "folder is kept: make room, or choose another folder",
            str(path),
        ) from error


def read_index(path: str | os.PathLike) -> tuple[dict[str, Any], Entries]:
    """Reads what `write_index` wrote.

    Args:
        path: folder.

    Returns:
        The header, with `backend`, `fingerprint` and `metadata`, and the rows.

    Raises:
        FileNotFoundError: If there is no index.
        ValueError: If it is damaged (by its checksum), or is none of these.
        OSError: If it cannot be read.
    """
    if not has_index(path):
        raise FileNotFoundError(
            "`path` must be the folder of an index, as `keras-ccp index` and "
            f"`RetrievalIndex.save` write it. Received: path={str(path)!r}"
        )
    try:
        arrays = read_arrays(Path(path) / _FILE, _STEP)
        header = json.loads(str(arrays["header"]))
        if header["format"] != _FORMAT:
            raise ValueError(f"format {header['format']!r} is not known")
        rest = {name: header[name] for name in ("backend", "fingerprint", "metadata")}
        return header | rest, Entries.from_arrays(arrays)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            "`path` must hold an index that is undamaged; make it anew, or copy "
            f"its file from elsewhere. Received: path={str(path)!r}: {reason}"
        ) from error
