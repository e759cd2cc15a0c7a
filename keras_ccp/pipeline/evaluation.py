"""Finite labelled images for evaluation and for choosing proxies, and embeddings."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_ccp.checks import as_labels, check_finite
from keras_ccp.datasets import Dataset, verify
from keras_ccp.datasets.dataset import as_inputs, num_rows
from keras_ccp.images import decode_center_crop
from keras_ccp.pipeline.batches import IN_ORDER, encoded_files, gather, gather_inputs


class EvaluationData:
    """Images, or what else a network takes, in a fixed order, with labels in memory.

    Arrays are not copied. Encoded images (paths or bytes) are read and decoded again
    for each `batches`, and never all held in memory. A tf.data.Dataset is read twice
    here, for its labels and to see that they come in the same order again, and once
    more for each `batches`.

    Args:
        data: A `Dataset`; a pair `(x, y)`, x `(n, ...)` or a dict of arrays, y `(n,)`
            or `(n, 1)` integers; or a finite, batched tf.data.Dataset of such pairs
            that is not shuffled each time it is read.
        name: What the data are called in error messages. Defaults to `"data"`.

    Attributes:
        labels: `(n,)` int32 array.
        image_shape: Shape of one image, None where it is unknown, or None without
            known rank.
        name: As given.

    Raises:
        ValueError: If the data are empty, infinite, in another order the second time,
            if images hold NaN or infinity, or if labels are negative or not one an
            image.
        TypeError: If the data or labels are of another type.

    Example:
        ```python
        data = EvaluationData(keras_ccp.datasets.emoji())
        for images in data.batches(rows=[5, 2, 7], batch_size=2):
            print(images.shape)  # (2, 32, 32, 3), then (1, 32, 32, 3)
        ```
    """

    def __init__(self, data: Any, name: str = "data") -> None:
        self.name = name
        self._stream = self._encoded = self._images = self.image_shape = None
        if isinstance(data, tf.data.Dataset):
            self._stream, self.labels = data, _stream_labels(data, name)
            shapes = [part.shape for part in keras.tree.flatten(data.element_spec[0])]
            if len(shapes) == 1 and shapes[0].rank:
                self.image_shape = tuple(shapes[0])[1:]
            return
        if isinstance(data, Dataset):
            self._images, self.labels = data.images, data.labels
        else:
            self._images, self.labels = _arrays(data, name)
        if not isinstance(self._images, dict):
            self.image_shape = self._images.shape[1:]
        if isinstance(data, Dataset) and data.is_encoded:
            self._encoded, self.image_shape = data, (data.size, data.size, 3)
            self._files, read, self._check = encoded_files(data.images)
            # Traced once: for each `batches` it would take a good part of a second.
            self._prepare = tf.function(
                lambda file: decode_center_crop(read(file), data.size, data.short_side),
                input_signature=[tf.TensorSpec((), tf.string)],
                autograph=False,
            )

    def __len__(self) -> int:
        return len(self.labels)

    def shares_images(self, other: "EvaluationData") -> bool:
        """Whether an image in memory, or the whole stream, is also one of another's.

        Args:
            other: Other images.
        """
        if self._stream is not None or other._stream is not None:
            return self._stream is other._stream
        parts = keras.tree.flatten(self._images), keras.tree.flatten(other._images)
        return any(map(np.shares_memory, *parts))

    def batches(
        self,
        rows: Sequence[int] | np.ndarray | None = None,
        batch_size: int = 128,
    ) -> tf.data.Dataset:
        """Returns the images in batches, the last of which may be smaller.

        Args:
            rows: `(k,)` rows to return, in this order. A tf.data.Dataset is streamed
                once, so its rows must ascend. Defaults to `None`, all.
            batch_size: Images in a batch. Defaults to 128.

        Returns:
            Finite tf.data.Dataset of `(batch, ...)` images. Encoded images are uint8,
            their short side resized to the `short_side` of the `Dataset` and the centre
            cut out.

        Raises:
            ValueError: If rows of a tf.data.Dataset do not ascend.
        """
        count = len(self) if rows is None else len(rows)
        if self._stream is not None:
            images = self._streamed(rows).rebatch(batch_size)
        else:
            rows = tf.data.Dataset.from_tensor_slices(
                np.arange(count) if rows is None else np.asarray(rows)
            )
            images = rows.batch(batch_size).map(self._load, **IN_ORDER)
            if self._encoded is not None:
                images = images.unbatch().map(self._prepare, **IN_ORDER)
                images = images.batch(batch_size, **IN_ORDER)
        # tf.data would pass on the number of batches before, and Keras believe it.
        num_batches = tf.data.experimental.assert_cardinality(-(-count // batch_size))
        options = tf.data.Options()
        # Several workers share out each batch, not the files it comes from.
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        images = images.apply(num_batches).prefetch(tf.data.AUTOTUNE)
        return images.with_options(options)

    def labelled_batches(self, batch_size: int = 128) -> tf.data.Dataset:
        """Returns the images with their labels, in order.

        Args:
            batch_size: Images in a batch. Defaults to 128.

        Returns:
            Finite tf.data.Dataset of `(batch, ...)` images and `(batch,)` labels.
        """
        labels = tf.data.Dataset.from_tensor_slices(self.labels).batch(batch_size)
        return tf.data.Dataset.zip(self.batches(batch_size=batch_size), labels)

    @tf.autograph.experimental.do_not_convert
    def _load(self, rows: tf.Tensor) -> tf.Tensor:
        if self._encoded is None:
            return gather_inputs(self._images, rows)
        return gather(self._files, rows, self._check)

    def _streamed(self, rows: np.ndarray | None) -> tf.data.Dataset:
        """The images of some rows, in batches as they fall, none of them empty."""
        if rows is None:
            return self._stream.map(lambda images, _: images)
        if (np.diff(rows) <= 0).any():
            raise ValueError(
                f"`rows` must ascend where `{self.name}` is a tf.data.Dataset. "
                f"Received: rows={list(rows[:10])}\nSort them, or pass arrays"
            )
        keep = np.zeros(len(self), bool)
        keep[rows] = True

        def take(
            start: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]
        ) -> tuple[tf.Tensor, tf.Tensor]:
            images, _ = batch
            stop = start + _batch_size(images)
            kept = tf.constant(keep)[start:stop]
            return stop, keras.tree.map_structure(
                lambda part: tf.boolean_mask(part, kept), images
            )

        selected = self._stream.scan(tf.constant(0, tf.int64), take)
        return selected.filter(lambda images: _batch_size(images) > 0)


def _batch_size(images: Any) -> tf.Tensor:
    return tf.shape(keras.tree.flatten(images)[0], tf.int64)[0]


def embed(model: keras.Model, data: Any, progress: bool = False) -> np.ndarray:
    """Embeds images, as inference does: with `training=False`.

    Args:
        model: Images -> `(batch, dim)` embeddings.
        data: `EvaluationData` or what it takes, a pair `(x, y)` as a tuple; images
            without labels: an array or a dict of arrays, a list of paths or of encoded
            bytes (prepared for evaluation at the size of the model's input), or a
            tf.data.Dataset of batches.
        progress: Show a bar on the standard error stream. Defaults to `False`.

    Returns:
        `(n, dim)` float32 embeddings, in the order of the data.

    Raises:
        ValueError: If an image cannot be decoded; the message names it.
    """
    if isinstance(data, (tuple, Dataset)) or _is_labelled(data):
        data = EvaluationData(data)
    elif not isinstance(data, (EvaluationData, tf.data.Dataset)):
        data = _without_labels(model, data)
    batches = data.batches() if isinstance(data, EvaluationData) else data
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            embeddings = model.predict(batches, verbose=int(progress))
    except tf.errors.InvalidArgumentError:
        if isinstance(data, EvaluationData) and data._encoded is not None:
            verify(data._encoded)
        raise
    return np.asarray(embeddings, np.float32)


def _is_labelled(data: Any) -> bool:
    return isinstance(data, tf.data.Dataset) and isinstance(data.element_spec, tuple)


def _without_labels(model: keras.Model, images: Any) -> EvaluationData:
    labels = np.zeros(num_rows(images), np.int32)
    is_dict = isinstance(images, Mapping)
    if is_dict or not isinstance(images[0], (str, bytes, os.PathLike)):
        return EvaluationData((images, labels))
    return EvaluationData(Dataset(images, labels).with_size(model.input_shape[1]))


def _arrays(data: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise TypeError(
            f"`{name}` must be a `keras_ccp.datasets.Dataset`, a pair (x, y) of arrays "
            f"or a batched tf.data.Dataset of (x, y). Received: {type(data)}\n"
            "`Dataset(images, labels)` takes paths, encoded bytes and arrays"
        )
    if isinstance(data[0], Mapping):
        images = as_inputs(name, data[0])
        return images, as_labels(f"{name} labels", data[1], num_rows(images))
    images = np.asarray(data[0])
    if images.ndim < 2 or images.dtype.kind not in "uif":
        raise TypeError(
            f"`{name}` must have images as one array of numbers. Received: x of dtype "
            f"{images.dtype}, shape {images.shape}\nBring them to one size first"
        )
    check_finite(name, images, "images")
    return images, as_labels(f"{name} labels", data[1], len(images))


def _stream_labels(stream: tf.data.Dataset, name: str) -> np.ndarray:
    if stream.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"`{name}` must be finite. Received: an infinite tf.data.Dataset\n"
            "Remove `.repeat()` or add `.take(...)`"
        )
    if not isinstance(stream.element_spec, tuple) or len(stream.element_spec) != 2:
        raise TypeError(
            f"`{name}` must be a tf.data.Dataset of pairs (x, y) of tensors. "
            f"Received: elements {stream.element_spec}\nMap it to (images, labels)"
        )

    def read() -> np.ndarray:
        parts = []
        for images, labels in stream:
            for part in keras.tree.flatten(images):
                if part.dtype != tf.string:
                    check_finite(name, part.numpy(), "images of a batch")
            parts.append(labels.numpy())
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    labels = as_labels(f"{name} labels", read())
    if not np.array_equal(labels, as_labels(f"{name} labels", read())):
        raise ValueError(
            f"`{name}` must give its images in the same order each time. Received: "
            f"{len(labels)} labels that were not the same when read again\nRemove "
            "`.shuffle(...)` or pass it `reshuffle_each_iteration=False`"
        )
    return labels
