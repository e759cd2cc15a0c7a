"""Backup: a killed `fit` goes on where it was, to the same result."""

import collections
import contextlib
import errno
import hashlib
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import ml_dtypes  # noqa: F401, teaches NumPy the name "bfloat16"
import numpy as np
import tensorflow as tf

from keras_ccp.checks import check_int
from keras_ccp.model import CCPModel

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


class Backup(keras.callbacks.Callback):
    """Saves the whole state of a training at each epoch's end, and goes on from it.

    The state is that of the model (embedder, proxies or reference samples, frozen
    copy, number of projections, cross-batch memory, random seeds of its layers, all of
    it for each replica), of the optimizer (its learning rate too) and of the callbacks
    of this `fit` with `get_state()` and `set_state(state)`, as `CCPCallback` has them:
    a dict, also nested, of arrays, numbers and strings. So a `fit` that was killed and
    is called again with the same directory ends as if it had never stopped, given the
    same data from that place on:

    ```python
    backup = Backup("run/backup")
    done = backup.num_epochs * steps_per_epoch
    batches = balanced_batches(dataset, 8, 4, seed=0, first_batch=done)
    model.fit(
        batches,
        steps_per_epoch=steps_per_epoch,
        epochs=100,
        callbacks=[CCPCallback(pool, validation, seed=0), backup],
    )
    ```

    `epochs` counts those before the kill. An epoch that was cut short is not saved but
    run again. The backup stays when `fit` ends: a further `fit` runs the epochs that
    `epochs` adds, or none if a callback had stopped the training, and ends with the
    best weights as the first did. Delete the directory to train anew. On another number
    of replicas, all of them go on from the state of the first.

    Args:
        directory: folder for this run alone; made if it is missing.
        keep: int, number of backups to keep. The second is used where the newest is
            damaged. Defaults to 2.

    Raises:
        TypeError: if `keep` is not an integer.
        ValueError: if `keep` is below 1. By `fit`: if the backup is that of another
            model, optimizer or list of callbacks, or all are damaged.
        OSError: by `fit`, if a backup cannot be written. Those before it remain.
    """

    # CCPModel.fit runs this callback after those whose work it saves.
    runs_last = True

    def __init__(self, directory: str | os.PathLike, keep: int = 2):
        super().__init__()
        check_int("keep", keep, minimum=1)
        self.directory = os.fspath(directory)
        self.keep = keep
        self._stateful: dict[str, Any] = {}

    @property
    def num_epochs(self) -> int:
        """Epochs that the backup holds, 0 without one."""
        latest = load_latest(self.directory)
        return 0 if latest is None else latest[0]

    def set_callbacks(self, callbacks: list[keras.callbacks.Callback]) -> None:
        """Takes the callbacks whose state is to be saved; `CCPModel.fit` calls it.

        Args:
            callbacks: all callbacks of the `fit`.
        """
        self._stateful = {}
        counts: collections.Counter = collections.Counter()
        for callback in callbacks:
            if hasattr(callback, "get_state") and hasattr(callback, "set_state"):
                name = type(callback).__name__
                counts[name] += 1
                self._stateful[f"{name} {counts[name]}"] = callback

    # ==== Keras events ====

    def on_train_begin(self, logs=None):
        if not isinstance(self.model, CCPModel):
            raise TypeError(
                "Backup needs a `CCPModel`. "
                f"Received: type(model)={type(self.model).__name__}"
            )
        latest = load_latest(self.directory)
        if latest is None:
            return
        num_epochs, arrays = latest
        state = _nested(arrays)
        self._check(state)
        self._restore(state)
        # As the backup callback of Keras does it.
        self.model._initial_epoch = num_epochs
        if state["stopped"]:
            self.model._initial_epoch = max(num_epochs, self.params["epochs"])
        logger.info("goes on after epoch %d from %s", num_epochs, self.directory)

    def on_epoch_begin(self, epoch, logs=None):
        # Has been read. Left as it is, it would hold for every later `fit`.
        self.model._initial_epoch = None
        self._batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self._batches = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        if self._batches < (self.params.get("steps") or 1):
            logger.info("epoch %d was cut short and is not saved", epoch + 1)
            return
        strategy = self.model.distribute_strategy
        if strategy is None or strategy.extended.should_checkpoint:
            state = {
                **self._variable_values(),
                "callbacks": {n: c.get_state() for n, c in self._stateful.items()},
                "stopped": bool(self.model.stop_training),
            }
            save_checkpoint(self.directory, epoch + 1, _flat(state), self.keep)

    def on_train_end(self, logs=None):
        self.model._initial_epoch = None

    # ==== The state ====

    def _variables(self) -> dict[str, list[keras.Variable]]:
        return {
            "model": self.model.variables,
            "optimizer": self.model.optimizer.variables,
        }

    def _replicas(self, variable: keras.Variable) -> list[tf.Variable]:
        """The variable on each replica of this process."""
        strategy = self.model.distribute_strategy
        if strategy is None:
            return [variable.value]
        return strategy.experimental_local_results(variable.value)

    def _variable_values(self) -> dict[str, dict[str, np.ndarray]]:
        """`(1, ...)` values by name, `(replicas, ...)` where replicas differ.

        They do in the statistics of batch normalisation.
        """
        state: dict[str, dict[str, np.ndarray]] = {}
        for part, variables in self._variables().items():
            state[part] = {}
            for index, variable in enumerate(variables):
                values = [replica.numpy() for replica in self._replicas(variable)]
                if all(np.array_equal(value, values[0]) for value in values):
                    values = values[:1]
                state[part][_name(index, variable)] = np.stack(values)
        return state

    def _check(self, state: dict[str, Any]) -> None:
        """Raises with the first difference between a backup and this training."""
        for part, variables in self._variables().items():
            live = [
                f"{_name(index, v)} {tuple(v.shape)} {v.dtype}"
                for index, v in enumerate(variables)
            ]
            saved = [
                f"{name} {values.shape[1:]} {values.dtype}"
                for name, values in state.get(part, {}).items()
            ]
            self._compare(f"{part} has variable", live, saved)
        saved = list(state.get("callbacks", {}))
        self._compare("`fit` has callback", list(self._stateful), saved)

    def _compare(self, what: str, live: list[str], saved: list[str]) -> None:
        for now, then in itertools.zip_longest(live, saved, fillvalue="none further"):
            if now != then:
                raise ValueError(
                    "`directory` must hold the backup of this same training; choose "
                    "another one, or delete it to begin anew. Received: "
                    f"directory={self.directory!r}, where {what} {now!r} now and "
                    f"{then!r} in the backup"
                )

    def _restore(self, state: dict[str, Any]) -> None:
        for part, variables in self._variables().items():
            for variable, values in zip(variables, state[part].values(), strict=True):
                replicas = self._replicas(variable)
                if len(values) != len(replicas):
                    values = itertools.repeat(values[0])
                for replica, value in zip(replicas, values, strict=False):
                    replica.assign(value)
        for name, callback in self._stateful.items():
            callback.set_state(state["callbacks"][name])


def _name(index: int, variable: keras.Variable) -> str:
    """A name that an equal model of another process, or built later, has as well."""
    # Keras numbers unnamed layers and variables throughout a process.
    return f"{index} {re.sub(r'_[0-9]+', '', variable.path).replace('/', '.')}"


def _flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, names joined by "/"."""
    flat = {}
    for name, value in state.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}/"))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """What `_flat` was called on, without empty dicts."""
    state: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split("/")
        inner = state
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[leaf] = value
    return state
