"""Backup: a killed `fit` goes on where it was, to the same result."""

import collections
import itertools
import logging
import os
import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_ccp.arguments import check_int
from keras_ccp.checkpoint import load_latest, save_checkpoint
from keras_ccp.model import CCPModel

logger = logging.getLogger("keras_ccp")


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
