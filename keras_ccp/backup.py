"""Backup: a killed `fit` goes on where it was, to the same result."""

import collections
import inspect
import io
import itertools
import logging
import numbers
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import keras
import ml_dtypes  # noqa: F401, teaches NumPy the name "bfloat16"
import numpy as np
import tensorflow as tf

from keras_ccp.distribute import is_chief
from keras_ccp.files import write_file

logger = logging.getLogger("keras_ccp")


class Backup(keras.callbacks.Callback):
    """Saves the whole state of a training at each epoch's end, and goes on from it.

    The state is that of the model (embedder, proxies or samples, snapshot, number of
    projections, cross-batch memory, random seeds of its layers, all of it for each
    replica), of the optimizer (its learning rate too) and of the callbacks of this
    `fit` with `get_state()` and `set_state(state)`, as `CCPCallback` has them: a dict,
    also nested, of arrays, numbers and strings. Of other callbacks, such as Keras'
    `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint`, it is public attributes
    that are numbers or lists of arrays; what else one of your own gathers is named in a
    warning, since it is not resumed. So a `fit` that was killed and is called again
    with the same directory ends as if it had never stopped, given the same data from
    that place on:

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
    best weights as the first did. Delete the directory to train again. On another
    number of replicas, all of them go on from the state of the first.

    Args:
        directory: folder for this run alone; made if it is missing.
        keep: int, number of backups to keep. The second is used where the newest is
            damaged. Defaults to 2.

    Raises:
        ValueError: by `fit`, if the backup is that of another model, optimizer or list
            of callbacks, or all are damaged.
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 2):
        super().__init__()
        self.directory = os.fspath(directory)
        self.keep = keep

    @property
    def num_epochs(self) -> int:
        """Epochs that the backup holds, 0 without one."""
        return load_latest(self.directory)[0]

    def first_epoch(self) -> int:
        """Where `fit` begins: nowhere if a callback had stopped the training."""
        num_epochs, arrays = load_latest(self.directory)
        return sys.maxsize if arrays.get("stopped") else num_epochs

    # ==== Keras events ====

    def on_train_begin(self, logs=None):
        num_epochs, arrays = load_latest(self.directory)
        if not arrays:
            return
        now = {*self._variables(), *self._callbacks()}
        names = {"/".join(name.split("/")[:2]) for name in arrays} - {"stopped"}
        then = {name for name in names if not name.startswith("others/")}
        if now != then:
            raise ValueError(
                "`directory` must hold the backup of this same training. Received: "
                f"{self.directory}, where {min(now - then, default='nothing more')!r} "
                f"is {min(then - now, default='nothing more')!r}\n"
                "Choose another one, or delete it to begin again"
            )
        for name, variable in self._variables().items():
            replicas, values = self._replicas(variable), arrays[name]
            if len(values) != len(replicas):
                values = itertools.repeat(values[0])
            for replica, value in zip(replicas, values, strict=False):
                replica.assign(value)
        for name, callback in self._callbacks().items():
            callback.set_state(_nested(arrays, f"{name}/"))
        for name, callback in self._others().items():
            for key, value in _nested(arrays, f"{name}/").items():
                is_list = isinstance(value, dict)
                value = [*value.values()] if is_list else value.item()
                setattr(callback, key, value)
            if lost := _not_kept(callback):
                logger.warning("not resumed of %s: %s", name[7:], ", ".join(lost))
        logger.info("goes on after epoch %d from %s", num_epochs, self.directory)

    def on_epoch_begin(self, epoch, logs=None):
        self._steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self._steps = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        if self._steps < (self.params.get("steps") or 1):
            logger.info("epoch %d was cut short and is not saved", epoch + 1)
        elif is_chief(self.model.distribute_strategy):
            arrays: dict[str, Any] = {"stopped": bool(self.model.stop_training)}
            for name, variable in self._variables().items():
                values = [replica.numpy() for replica in self._replicas(variable)]
                # Replicas differ in the statistics of batch normalisation.
                same = all(np.array_equal(value, values[0]) for value in values)
                arrays[name] = np.stack(values[:1] if same else values)
            for name, callback in self._callbacks().items():
                arrays |= _flat(callback.get_state(), f"{name}/")
            for name, callback in self._others().items():
                arrays |= _flat(_simple_state(callback), f"{name}/")
            save_checkpoint(self.directory, epoch + 1, arrays, self.keep)

    # ==== The state ====

    def _variables(self) -> dict[str, keras.Variable]:
        """By names that an equal model of another process, or built later, has too."""
        parts = {"model": self.model, "optimizer": self.model.optimizer}
        return {
            # Keras numbers unnamed layers and variables throughout a process.
            f"{part}/{i} {re.sub(r'_[0-9]+', '', v.path).replace('/', '.')} "
            f"{tuple(v.shape)} {v.dtype}": v
            for part, owner in parts.items()
            for i, v in enumerate(owner.variables)
        }

    def _replicas(self, variable: keras.Variable) -> tuple[tf.Variable, ...]:
        """The variable on each replica of this process."""
        strategy = self.model.distribute_strategy
        return strategy.experimental_local_results(variable.value)

    def _callbacks(self) -> dict[str, Any]:
        """Callbacks with a state, by name."""
        return self._named("callbacks", True)

    def _others(self) -> dict[str, Any]:
        """Callbacks that say nothing of their state, by name."""
        return self._named("others", False)

    def _named(self, prefix: str, has_state: bool) -> dict[str, Any]:
        counts: collections.Counter = collections.Counter()
        named = {}
        for callback in self.model.fit_callbacks:
            is_one = hasattr(callback, "get_state") and hasattr(callback, "set_state")
            if is_one == has_state:
                kind = type(callback).__name__
                counts[kind] += 1
                named[f"{prefix}/{kind} {counts[kind]}"] = callback
        return named


def _attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Public attributes that neither Keras nor an argument of the constructor sets."""
    given = {*inspect.signature(type(callback).__init__).parameters, "params"}
    attributes = vars(callback).items()
    return {k: v for k, v in attributes if k[0] != "_" and k not in given}


def _simple_state(callback: keras.callbacks.Callback) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in _attributes(callback).items():
        # Flags say what a callback found when it began, such as a file to append to.
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            state[name] = value
        elif _is_arrays(value):
            state[name] = {f"{i:05d}": array for i, array in enumerate(value)}
    return state


def _is_arrays(value: Any) -> bool:
    kinds = np.ndarray, np.generic
    return isinstance(value, list) and all(isinstance(v, kinds) for v in value)


def _not_kept(callback: keras.callbacks.Callback) -> list[str]:
    """Names of attributes in which a callback may gather what is lost."""
    if type(callback).__module__.partition(".")[0] in ("keras", "keras_ccp"):
        # Keras keeps the number of batches to itself.
        counts = getattr(callback, "save_freq", "epoch") != "epoch"
        return ["the batches counted for `save_freq`"] if counts else []
    kinds = list, dict, set, bool, np.ndarray, collections.deque
    return [
        name
        for name, value in _attributes(callback).items()
        if isinstance(value, kinds) and not (_is_arrays(value) and value)
    ]


# ==== Files ====


def save_checkpoint(
    directory: str | os.PathLike, step: int, arrays: dict[str, Any], keep: int = 2
) -> Path:
    """Writes arrays, numbers or strings by name, and keeps the newest files."""
    directory = Path(directory)
    for partial in directory.glob("partial_checkpoint-*"):
        partial.unlink(missing_ok=True)  # of a process that died: it takes up room
    path = directory / f"checkpoint-{step:08d}.npz"
    _write_arrays(path, arrays)
    others = set(directory.glob("checkpoint-*.npz"))
    # Later ones are of a past that did not happen: this run has gone back.
    for other in others - set(sorted(o for o in others if o <= path)[-keep:]):
        other.unlink(missing_ok=True)
    return path


def load_latest(directory: str | os.PathLike) -> tuple[int, dict[str, np.ndarray]]:
    """Step and arrays of the newest undamaged file, 0 and no arrays without files."""
    paths = sorted(Path(directory).glob("checkpoint-*.npz"), reverse=True)
    for path in paths:
        try:
            return int(path.stem.partition("-")[2]), _read_arrays(path)
        # Of damage zipfile and NumPy raise what they stumble over.
        except Exception as error:
            logger.warning("%s is damaged and left out: %s", path, error)
    if paths:
        raise ValueError(
            "`directory` must hold an undamaged backup. Received: "
            f"{str(directory)!r}, where all {len(paths)} are damaged\n"
            "Copy one back, or delete them to begin again"
        )
    return 0, {}


def _write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Writes a `.npz`, with the types that NumPy does not know in the names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, array in arrays.items():
            array = np.asarray(array)
            if array.dtype.kind == "V":  # such as bfloat16
                name = f"{name} as {array.dtype.name}"
                array = array.view(f"u{array.dtype.itemsize}")
            # By hand, since `np.savez` would pickle objects.
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    write_file(path, buffer.getbuffer())


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads what `_write_arrays` wrote; the checksums of the format are looked at."""
    arrays = {}
    # Opened here, since NumPy leaves open what is damaged.
    with open(path, "rb") as opened, np.load(opened) as file:
        for name in file.files:
            known, _, dtype = name.partition(" as ")
            arrays[known] = file[name].view(dtype) if dtype else file[name]
    return arrays


# ==== Nested dicts as one, names joined by "/" ====


def _flat(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat = {}
    for name, value in state.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _nested(flat: dict[str, Any], prefix: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in flat.items():
        if name.startswith(prefix):
            *parents, leaf = name.removeprefix(prefix).split("/")
            inner = state
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[leaf] = value
    return state
