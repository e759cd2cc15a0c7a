"""Refuses training data that CCPModel cannot use, before a step is spent on it."""

import contextlib
import itertools
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_ccp.arguments import refuse_sample_weight
from keras_ccp.datasets import check_labels
from keras_ccp.image_checks import ImageSpec, check_images

# Around the messages that have to pass through TensorFlow.
_MARK = "<keras_ccp>"


def checked_training_data(
    x: Any, y: Any, num_classes: int | None, spec: ImageSpec
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
        spec: what each image must fit.

    Returns:
        `(x, y)`, ready for `keras.Model.fit`.

    Raises:
        TypeError: if labels are missing or are not integers.
        ValueError: if a label is negative or too large, images are of another shape
            or range, sample weights are given, or a source has no batch.
    """
    is_stream = isinstance(
        x, (tf.data.Dataset, types.GeneratorType, keras.utils.PyDataset)
    )
    if y is not None:
        if is_stream:
            raise TypeError(
                "`y` must be left out where `x` brings the labels. Received: "
                f"type(x)={type(x).__name__}, type(y)={type(y).__name__}"
            )
        check_images("x", x, spec)
        y = _checked_labels(y, num_classes)
        if len(x) != len(y):
            raise ValueError(
                "`x` and `y` must have the same length. "
                f"Received: len(x)={len(x)}, len(y)={len(y)}"
            )
        return x, y
    if isinstance(x, tf.data.Dataset):
        _check_batch(next(iter(x.take(1)), None), num_classes, spec)
        return x.map(lambda *batch: _graph_checked(batch, num_classes)), None
    if isinstance(x, types.GeneratorType):
        first = next(x, None)
        _check_batch(first, num_classes, spec)
        return _checked_generator(first, x, num_classes, spec), None
    if isinstance(x, keras.utils.PyDataset):
        _check_batch(x[0] if x.num_batches != 0 else None, num_classes, spec)
        return _CheckedPyDataset(x, num_classes, spec), None
    raise TypeError(
        "`y` must be given with `x` unless `x` is a tf.data.Dataset, a generator or "
        "a PyDataset of (images, labels); balanced_batches makes one of a Dataset. "
        f"Received: type(x)={type(x).__name__}, y=None"
    )


@contextlib.contextmanager
def label_errors() -> Iterator[None]:
    """Raises what TensorFlow reports of a bad label as one plain `ValueError`."""
    try:
        yield
    except (tf.errors.OpError, ValueError) as error:
        if _MARK not in str(error):
            raise
        message = str(error).split(_MARK)[-2]
        raise ValueError(message.strip()) from None


def _range(num_classes: int | None) -> str:
    return "0 or more" if num_classes is None else f"from 0 to {num_classes - 1}"


def _checked_labels(labels: Any, num_classes: int | None) -> np.ndarray:
    labels = check_labels(labels, "y")
    if num_classes is not None and labels.max() >= num_classes:
        raise ValueError(
            f"`y` must hold labels {_range(num_classes)} (num_classes={num_classes}). "
            f"Received: label {labels.max()} in row {labels.argmax()}; "
            "keras_ccp.datasets.Dataset numbers classes 0..C-1"
        )
    return labels


def _check_batch(batch: Any, num_classes: int | None, spec: ImageSpec) -> None:
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
    check_images("x", images, spec)
    _checked_labels(labels, num_classes)


def _graph_checked(batch: tuple, num_classes: int | None) -> tuple:
    images, labels, *rest = batch
    # Checked as they come: a cast to int32 would turn NaN into a number.
    fits = tf.reduce_all(labels >= 0)
    if num_classes is not None:
        fits &= tf.reduce_all(labels < tf.cast(num_classes, labels.dtype))
    message = (
        f"{_MARK} `y` must hold integer labels {_range(num_classes)} "
        f"(num_classes={num_classes}). Received: a batch with a label outside{_MARK}"
    )
    with tf.control_dependencies([tf.debugging.Assert(fits, [message])]):
        labels = tf.identity(labels)
    return (images, labels, *rest)


def _marked_check(batch: Any, num_classes: int | None, spec: ImageSpec) -> None:
    # TensorFlow reads these sources in a function of its own, and wraps the error.
    try:
        _check_batch(batch, num_classes, spec)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_MARK}{error}{_MARK}") from error


def _checked_generator(
    first: Any, rest: Any, num_classes: int | None, spec: ImageSpec
) -> Any:
    for batch in itertools.chain([first], rest):
        _marked_check(batch, num_classes, spec)
        yield batch


class _CheckedPyDataset(keras.utils.PyDataset):
    """Another PyDataset, each batch of which is checked."""

    def __init__(self, dataset, num_classes, spec):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._limits = num_classes, spec

    @property
    def num_batches(self):
        return self._dataset.num_batches

    def __getitem__(self, index):
        batch = self._dataset[index]
        _marked_check(batch, *self._limits)
        return batch

    def on_epoch_begin(self):
        self._dataset.on_epoch_begin()

    def on_epoch_end(self):
        self._dataset.on_epoch_end()
