"""Refuses training data that CCPModel cannot use, before a step is spent on it."""

import contextlib
import itertools
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_ccp.datasets import check_labels

_MARK = "keras_ccp-labels:"


def checked_training_data(
    x: Any, y: Any, num_classes: int | None, input_shape: tuple | None = None
) -> tuple[Any, Any]:
    """Returns training data whose labels are known to fit, or raises.

    Arrays are checked as a whole, the first item of a `PyDataset` is looked at. A
    `tf.data.Dataset` and a generator also check each later batch as it comes, so
    that no step is taken on a bad one.

    Args:
        x: images, or a source of `(images, labels)` batches: a batched
            `tf.data.Dataset`, a generator or a `keras.utils.PyDataset`.
        y: `(n,)` or `(n, 1)` integer labels, or `None` when `x` brings them.
        num_classes: int, labels must lie below it, or `None` for no upper bound.
        input_shape: `(height, width, channels)` each image must fit, `None` where
            free, or `None` for no check.

    Returns:
        `(x, y)`, ready for `keras.Model.fit`.

    Raises:
        TypeError: if labels are missing or are not integers.
        ValueError: if a label is negative or too large, sample weights are given,
            or a source has no batch.
    """
    if y is not None:
        _check_images(x, input_shape)
        _check_labels(y, num_classes)
        if len(x) != len(y):
            raise ValueError(
                "`x` and `y` must have the same length. "
                f"Received: len(x)={len(x)}, len(y)={len(y)}"
            )
        return x, y
    if isinstance(x, tf.data.Dataset):
        _check_batch(next(iter(x.take(1)), None), num_classes, input_shape)
        return x.map(lambda *batch: _graph_checked(batch, num_classes)), None
    if isinstance(x, types.GeneratorType):
        first = next(x, None)
        _check_batch(first, num_classes, input_shape)
        return _checked_generator(first, x, num_classes, input_shape), None
    if isinstance(x, keras.utils.PyDataset):
        _check_batch(x[0] if x.num_batches != 0 else None, num_classes, input_shape)
        return x, None
    raise TypeError(
        "`y` must be given with `x` unless `x` is a tf.data.Dataset, a generator or "
        f"a PyDataset of (images, labels). Received: type(x)={type(x).__name__}, y=None"
    )


@contextlib.contextmanager
def label_errors() -> Iterator[None]:
    """Raises what TensorFlow reports of a bad label as one plain `ValueError`."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if _MARK not in str(error):
            raise
        message = str(error).split(_MARK, 1)[1].split("\n", 1)[0].strip()
        raise ValueError(message) from None


def refuse_sample_weight(weight: Any, argument: str = "sample_weight") -> None:
    """Raises if sample weights are given.

    Args:
        weight: what was passed; only `None` is right.
        argument: name of the argument, for the message.

    Raises:
        ValueError: if `weight` is not `None`.
    """
    if weight is not None:
        raise ValueError(
            f"`{argument}` is not supported: the loss compares pairs, so a sample has "
            f"no loss of its own. Received: type({argument})={type(weight).__name__}; "
            "draw samples more often instead"
        )


def refuse_endless_epoch(x: Any, steps_per_epoch: int | None) -> None:
    """Raises if the end of an epoch is nowhere.

    Args:
        x: training data.
        steps_per_epoch: int, or `None` for as many steps as there are data.

    Raises:
        ValueError: if the data are endless and there is no number of steps.
    """
    endless = isinstance(x, tf.data.Dataset) and (
        x.cardinality() == tf.data.INFINITE_CARDINALITY
    )
    if endless and steps_per_epoch is None:
        raise ValueError(
            "`steps_per_epoch` must be given with endless data such as "
            "balanced_batches, e.g. steps_per_epoch=25. Received: steps_per_epoch=None"
        )


class EndOfData(keras.callbacks.Callback):
    """Stops the training in good order where Keras would go on without data."""

    message = None

    def on_epoch_begin(self, epoch, logs=None):
        self._batches = 0

    def on_train_batch_end(self, batch, logs=None):
        # `batch` is the last of several when steps_per_execution is set.
        self._batches = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        steps = self.params.get("steps") or 1
        if self._batches < steps and not self.model.stop_training:
            self.message = (
                f"`x` must give data for {steps} steps in each epoch. Received: its "
                f"end after {self._batches} steps of epoch {epoch + 1}; training was "
                "stopped there. Use .repeat(), balanced_batches or fewer steps"
            )
            self.model.stop_training = True


def _range(num_classes: int | None) -> str:
    return "0 or more" if num_classes is None else f"from 0 to {num_classes - 1}"


def _check_labels(labels: Any, num_classes: int | None) -> None:
    labels = check_labels(labels, "y")
    if num_classes is not None and labels.max() >= num_classes:
        raise ValueError(
            f"`y` must hold labels {_range(num_classes)} (num_classes={num_classes}). "
            f"Received: label {labels.max()} in row {labels.argmax()}; "
            "keras_ccp.datasets.Dataset numbers classes 0..C-1"
        )


def _check_images(images: Any, input_shape: tuple | None) -> None:
    # A list of images of different sizes has no shape, an array of them no number.
    shape = getattr(images, "shape", None)
    if shape is None or str(getattr(images, "dtype", "")) == "object":
        raise TypeError(
            "`x` must be one array of images of the same size; resize them first. "
            f"Received: type(x)={type(images).__name__}"
        )
    given = tuple(shape)[1:]
    if input_shape is None or None in given:
        return
    fits = len(given) == len(input_shape) and all(
        expected in (None, actual)
        for expected, actual in zip(input_shape, given, strict=True)
    )
    if not fits:
        raise ValueError(
            f"`x` must hold images of shape {input_shape}, the embedder's input. "
            f"Received: x.shape={tuple(shape)}"
        )


def _check_batch(
    batch: Any, num_classes: int | None, input_shape: tuple | None
) -> None:
    if batch is None:
        raise ValueError(
            "`x` must give at least one batch of (images, labels). Received: no batch"
        )
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or batch[1] is None:
        raise TypeError(
            "`x` must give batches of (images, labels). "
            f"Received: a batch of type {type(batch).__name__}"
        )
    images, labels, *weights = batch
    if weights:
        refuse_sample_weight(weights[0])
    labels = np.asarray(labels)
    if labels.ndim == 0:
        raise ValueError(
            "`x` must give batches; call .batch(...) on it. "
            "Received: single (image, label) elements"
        )
    _check_images(images, input_shape)
    _check_labels(labels, num_classes)


def _graph_checked(batch: tuple, num_classes: int | None) -> tuple:
    images, labels, *rest = batch
    # Checked as they come: a cast to int32 would turn NaN into a number.
    fits = tf.reduce_all(labels >= 0)
    if num_classes is not None:
        fits &= tf.reduce_all(labels < tf.cast(num_classes, labels.dtype))
    message = (
        f"{_MARK} `y` must hold integer labels {_range(num_classes)} "
        f"(num_classes={num_classes}). Received: a batch with a label outside"
    )
    with tf.control_dependencies([tf.debugging.Assert(fits, [message])]):
        labels = tf.identity(labels)
    return (images, labels, *rest)


def _checked_generator(
    first: Any, rest: Any, num_classes: int | None, input_shape: tuple | None
) -> Any:
    for batch in itertools.chain([first], rest):
        _check_batch(batch, num_classes, input_shape)
        yield batch
