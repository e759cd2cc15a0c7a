"""Checkpoints: named arrays in one file, whole or not there, and checked when read.

A file is a magic number, the SHA-256 of all that follows, the length of a JSON header,
the header (step; name, dtype and shape of each array) and the bytes of the arrays.
Nothing of it is ever executed or unpickled.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401, teaches NumPy the name "bfloat16"
import numpy as np

from keras_ccp.arguments import check_int

logger = logging.getLogger("keras_ccp")

_MAGIC = b"\x93kerasccp-checkpoint-1\n"
_NUM_DIGEST_BYTES = 32
_NUM_LENGTH_BYTES = 8
_FILE_NAME = re.compile(r"checkpoint-(\d{8,18})\.bin")
_TEMPORARY = ".tmp"
# What file systems that are mounted over a network say of it.
_CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.ENOTSUP)
_DTYPE = re.compile(r"[<>|][biufcSU]\d+|bfloat16|float8_\w+|u?int[24]")


def save_checkpoint(
    directory: str | os.PathLike, step: int, arrays: dict[str, Any], keep: int = 2
) -> Path:
    """Writes a checkpoint, then removes those before it but the newest.

    The file gets its name once all of it is on the disk. So a process or machine that
    dies at any moment leaves the earlier checkpoints and at most a temporary file,
    which the next call removes. Checkpoints of later steps, from which this run has
    gone back, are removed too.

    Args:
        directory: Folder of the checkpoints of one run; made if it is missing.
        step: Int from 0, how far the run is.
        arrays: Arrays, numbers or strings by name.
        keep: Int, number of checkpoints to keep, this one included. Defaults to 2.

    Returns:
        Path of the file.

    Raises:
        TypeError: If an array holds Python objects, or a number is not an integer.
        ValueError: If `step` is negative or `keep` is below 1.
        OSError: If the file cannot be written, such as on a full disk. The earlier
            checkpoints are still there.
    """
    check_int("step", step, minimum=0)
    check_int("keep", keep, minimum=1)
    chunks = _encoded(step, {name: np.asarray(a) for name, a in arrays.items()})
    directory = Path(directory)
    path = directory / f"checkpoint-{step:08d}.bin"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Of a process that died: they take room that may be needed now.
        for temporary in directory.glob(f"checkpoint-*.bin{_TEMPORARY}"):
            temporary.unlink(missing_ok=True)
        _write(path, chunks)
    except OSError as error:
        raise OSError(
            error.errno,
            f"The checkpoint of step {step} cannot be written: {error.strerror}. "
            "Earlier checkpoints are kept: make room and start again to go on from "
            "the newest",
            str(path),
        ) from error
    files = _files(directory)
    kept = sorted(other for other in files if other <= step)[-keep:]
    for other, file in files.items():
        if other not in kept:
            file.unlink(missing_ok=True)
    return path


def load_latest(
    directory: str | os.PathLike,
) -> tuple[int, dict[str, np.ndarray]] | None:
    """Reads the newest checkpoint that is undamaged.

    Args:
        directory: Folder that `save_checkpoint` wrote to; it may be missing.

    Returns:
        Step and read-only arrays by name, or `None` if there is no checkpoint.

    Raises:
        ValueError: If there are checkpoints and all of them are damaged.
        OSError: If a file cannot be read.
    """
    files = _files(Path(directory))
    for step in sorted(files, reverse=True):
        try:
            return step, read_arrays(files[step], step)
        except ValueError as error:
            logger.warning(
                "checkpoint %s is left out, the one before it is tried: %s",
                files[step],
                error,
            )
    if files:
        raise ValueError(
            "`directory` must hold a checkpoint that is undamaged. Received: "
            f"directory={str(directory)!r}, where all {len(files)} are damaged or "
            "foreign; copy one back, or delete them to begin anew"
        )
    return None


def write_arrays(path: Path, step: int, arrays: dict[str, Any]) -> None:
    """Writes one file of arrays, which gets its name once all of it is on the disk.

    Args:
        path: The file; its folder is made if it is missing.
        step: Int from 0, which is kept with the arrays.
        arrays: Arrays, numbers or strings by name.

    Raises:
        TypeError: If an array holds Python objects.
        OSError: If it cannot be written. A file that was there still is.
    """
    chunks = _encoded(step, {name: np.asarray(a) for name, a in arrays.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, chunks)


def read_arrays(path: Path, step: int) -> dict[str, np.ndarray]:
    """Reads one file of arrays.

    Args:
        path: The file.
        step: Int, with which it was written.

    Returns:
        Read-only arrays by name.

    Raises:
        ValueError: If it is not as it was written.
        OSError: If it cannot be read.
    """
    return _decoded(memoryview(path.read_bytes()), step)


def _files(directory: Path) -> dict[int, Path]:
    """Checkpoints of a folder by step, in any state."""
    if not directory.is_dir():
        return {}
    matches = ((_FILE_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return {int(match[1]): path for match, path in matches if match and path.is_file()}


def _write(path: Path, chunks: list[Any]) -> None:
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, before older files go
        except OSError as error:
            if error.errno not in _CANNOT_SYNC_FOLDERS:
                raise
        finally:
            os.close(folder)


# ==== The format ====


def _encoded(step: int, arrays: dict[str, np.ndarray]) -> list[Any]:
    """The parts of a file, in order, without a copy of the arrays."""
    header = {"step": int(step), "arrays": []}
    payload = []
    for name, array in arrays.items():
        dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
        if not _DTYPE.fullmatch(dtype):
            raise TypeError(
                "`arrays` must hold numbers or strings. "
                f"Received: arrays[{name!r}] of dtype {array.dtype}"
            )
        header["arrays"].append([name, dtype, array.shape])
        # Bytes, since NumPy exports neither bfloat16 nor strings as a buffer.
        payload.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    text = json.dumps(header).encode()
    body = [len(text).to_bytes(_NUM_LENGTH_BYTES, "little"), text, *payload]
    digest = hashlib.sha256()
    for chunk in body:
        digest.update(chunk)
    return [_MAGIC, digest.digest(), *body]


def _decoded(content: memoryview, step: int) -> dict[str, np.ndarray]:
    """The arrays of a file. Raises ValueError for all that is not as it was written."""
    if content[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it is not a file of this package")
    start = len(_MAGIC) + _NUM_DIGEST_BYTES
    if hashlib.sha256(content[start:]).digest() != content[len(_MAGIC) : start]:
        raise ValueError("it is truncated or changed")
    payload = start + _NUM_LENGTH_BYTES
    payload += int.from_bytes(content[start:payload], "little")
    try:
        header = json.loads(bytes(content[start + _NUM_LENGTH_BYTES : payload]))
        arrays = dict(_arrays(header["arrays"], content[payload:]))
        if header["step"] != step:
            raise ValueError(f"it was renamed: it is of step {header['step']!r:.50}")
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        # Only where someone made the file so: its checksum is right.
        raise ValueError(f"its header is wrong: {error!r}") from error
    return arrays


def _arrays(entries: Any, payload: memoryview) -> Iterator[tuple[str, np.ndarray]]:
    position = 0
    for name, dtype, shape in entries:
        if not _DTYPE.fullmatch(dtype):
            raise ValueError(f"array {name} has dtype {dtype!r:.50}")
        dtype = np.dtype(dtype)
        count = math.prod(shape)
        flat = payload[position : position + count * dtype.itemsize]
        position += len(flat)
        yield name, np.frombuffer(flat, dtype, count).reshape(shape)
    if position != len(payload):
        raise ValueError(f"its arrays take {position} of {len(payload)} bytes")
