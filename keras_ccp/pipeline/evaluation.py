"""Finite labelled images for evaluation and for choosing proxies."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_ccp.checks import as_array, as_labels, check_finite, check_int
from keras_ccp.datasets import Dataset, check_ids
from keras_ccp.pipeline.balanced import gather
from keras_ccp.pipeline.decoding import decode_center_crop
from keras_ccp.pipeline.encoded_batches import decoder, encoded_batches, numbered


class EvaluationData:
    """Images in a fixed order, with labels in memory.

    Arrays are not copied. Encoded images (paths or bytes) are read and decoded anew for
    each `batches`, and never all held in memory. A tf.data.Dataset is read twice here,
    for its labels and to see that they come in the same order again, and once more for
    each `batches`.

    Args:
        data: A `Dataset`; a pair `(x, y)` of arrays, x `(n, ...)`, y `(n,)` or
            `(n, 1)` integers; or a finite, batched tf.data.Dataset of such pairs that
            is not shuffled anew.
        name: What the data are called in error messages.

    Attributes:
        labels: `(n,)` int32 array.

    Raises:
        ValueError: If the data are empty, infinite, not batched, in another order the
            second time, if images hold NaN or infinity, or if labels are negative, NaN,
            floats or not one an image.
        TypeError: If the data or labels are of another type.
    """

    def __init__(self, data: Any, name: str = "data") -> None:
        self.name = name
        self._stream: tf.data.Dataset | None = None
        self._images: np.ndarray | None = None
        self._encoded: Dataset | None = None
        if isinstance(data, tf.data.Dataset):
            self._stream = data
            self.labels = _stream_labels(data, name)
        elif isinstance(data, Dataset) and data.is_encoded:
            self._encoded, self.labels = data, data.labels
            # Traced once: for each `batches` it would take a good part of a second.
            self._decode = decoder(
                lambda encoded, number: decode_center_crop(
                    encoded, data.size, data.short_side
                )
            )
        elif isinstance(data, Dataset):
            self._images, self.labels = data.images, data.labels
        else:
            self._images, self.labels = _arrays(data, name)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_shape(self) -> tuple[int | None, ...] | None:
        """Shape of one image, None where it is unknown, or None without known rank."""
        if self._images is not None:
            return self._images.shape[1:]
        if self._encoded is not None:
            return self._encoded.size, self._encoded.size, 3
        shape = self._stream.element_spec[0].shape
        return None if shape.rank is None else tuple(shape.as_list()[1:])

    @property
    def first_images(self) -> np.ndarray | None:
        """Images as they are given, a batch or more; None where they are encoded."""
        if self._stream is not None:
            return next(iter(self._stream.take(1)))[0].numpy()
        return self._images

    def shares_images(self, other: "EvaluationData") -> bool:
        """Whether an image in memory, or the whole stream, is also one of another's.

        Args:
            other: other images.
        """
        if self._stream is not None:
            return self._stream is other._stream
        images, others = (
            data._images if data._encoded is None else data._encoded.images
            for data in (self, other)
        )
        return others is not None and np.shares_memory(images, others)

    def batches(
        self,
        rows: Sequence[int] | np.ndarray | None = None,
        batch_size: int = 128,
    ) -> tf.data.Dataset:
        """Returns the images in batches, the last of which may be smaller.

        Args:
            rows: `(k,)` rows to return, in this order; None returns all. A
                tf.data.Dataset is streamed once, so its rows must ascend.
            batch_size: Images in a batch.

        Returns:
            Finite tf.data.Dataset of `(batch, ...)` images. Encoded images are uint8,
            their short side resized to the `short_side` of the `Dataset` and the centre
            cut out; one that cannot be read or decoded raises a
            `tf.errors.InvalidArgumentError` that names it.

        Raises:
            ValueError: If a row does not exist, there are no rows, or rows of a
                tf.data.Dataset do not ascend.
            TypeError: If rows or `batch_size` are not ints.
        """
        check_int("batch_size", batch_size, minimum=1)
        if rows is not None:
            rows = check_ids(rows, len(self), "rows")
        return self._batches(rows, batch_size).with_options(_shared_by_rows())

    def _batches(self, rows: np.ndarray | None, batch_size: int) -> tf.data.Dataset:
        if self._stream is not None:
            return self._streamed_batches(rows, batch_size)
        if self._encoded is not None:
            return self._decoded_batches(rows, batch_size)
        if rows is None:
            indices = tf.data.Dataset.range(len(self))
        else:
            indices = tf.data.Dataset.from_tensor_slices(rows)
        images = self._images
        return (
            indices.batch(batch_size)
            .map(lambda i: gather(images, i), num_parallel_calls=tf.data.AUTOTUNE)
            .prefetch(tf.data.AUTOTUNE)
        )

    def labelled_batches(self, batch_size: int = 128) -> tf.data.Dataset:
        """Returns the images with their labels, in order.

        Args:
            batch_size: Images in a batch.

        Returns:
            Finite tf.data.Dataset of `(batch, ...)` images and `(batch,)` labels.
        """
        labels = tf.data.Dataset.from_tensor_slices(self.labels).batch(batch_size)
        return tf.data.Dataset.zip(self.batches(batch_size=batch_size), labels)

    def _decoded_batches(
        self, rows: np.ndarray | None, batch_size: int
    ) -> tf.data.Dataset:
        rows = np.arange(len(self)) if rows is None else rows
        images = encoded_batches(
            numbered(tf.data.Dataset.from_tensor_slices(rows).batch(batch_size)),
            self._encoded.images,
            self._decode,
            lambda images, _: images,
            batch_size,
        )
        num_batches = tf.data.experimental.assert_cardinality(
            -(-len(rows) // batch_size)
        )
        return images.apply(num_batches).prefetch(tf.data.AUTOTUNE)

    def _streamed_batches(
        self, rows: np.ndarray | None, batch_size: int
    ) -> tf.data.Dataset:
        if rows is None:
            images = self._stream.map(lambda x, _: x)
        else:
            if (np.diff(rows) <= 0).any():
                raise ValueError(
                    f"`rows` must ascend where `{self.name}` is a tf.data.Dataset; "
                    "sort them, or pass arrays. "
                    f"Received: rows={rows[:10].tolist()}"
                )
            images = _select_rows(self._stream, rows, len(self))
        count = len(self) if rows is None else len(rows)
        # tf.data would pass on the number of batches before, and Keras believe it.
        num_batches = tf.data.experimental.assert_cardinality(-(-count // batch_size))
        return images.rebatch(batch_size).apply(num_batches).prefetch(tf.data.AUTOTUNE)


def _shared_by_rows() -> tf.data.Options:
    """Several workers share out each batch, not the files it comes from."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return options


def _select_rows(stream: tf.data.Dataset, rows: np.ndarray, n: int) -> tf.data.Dataset:
    """The images of some rows, in batches as they fall, none of them empty."""
    keep = np.zeros(n, bool)
    keep[rows] = True

    def take(
        start: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        images, _ = batch
        stop = start + tf.shape(images, tf.int64)[0]
        return stop, tf.boolean_mask(images, tf.constant(keep)[start:stop])

    selected = stream.scan(tf.constant(0, tf.int64), take)
    return selected.filter(lambda images: tf.shape(images)[0] > 0)


def _arrays(data: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise TypeError(
            f"`{name}` must be a `keras_ccp.datasets.Dataset`, a pair (x, y) of "
            "arrays or a batched tf.data.Dataset of (x, y). "
            f"Received: {name} of type {type(data)}"
        )
    images = as_array(name, data[0])
    if images.ndim < 2 or images.dtype.kind not in "uif":
        raise TypeError(
            f"`{name}` must have images of one size as one array of numbers. "
            f"Received: x of dtype {images.dtype} and shape {images.shape}"
        )
    if not len(images):
        raise ValueError(f"`{name}` must not be empty. Received: 0 images")
    check_finite(name, images, "images")
    labels = as_labels(f"{name} labels", data[1])
    if len(images) != len(labels):
        raise ValueError(
            f"`{name}` must have one label an image. "
            f"Received: {len(images)} images and {len(labels)} labels"
        )
    return images, labels


def _stream_labels(stream: tf.data.Dataset, name: str) -> np.ndarray:
    if stream.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"`{name}` must be finite; remove `.repeat()` or add `.take(...)`. "
            f"Received: an infinite tf.data.Dataset"
        )
    spec = stream.element_spec
    if not isinstance(spec, tuple) or not (
        len(spec) == 2 and all(isinstance(part, tf.TensorSpec) for part in spec)
    ):
        raise TypeError(
            f"`{name}` must be a tf.data.Dataset of pairs (x, y) of tensors. "
            f"Received: elements {spec}"
        )
    labels = as_labels(f"{name} labels", _read_labels(stream, name))
    if not np.array_equal(labels, _read_labels(stream, name)):
        raise ValueError(
            f"`{name}` must give its images in the same order each time; remove "
            "`.shuffle(...)` or pass it `reshuffle_each_iteration=False`. "
            f"Received: {len(labels)} labels that were not the same when read again"
        )
    return labels


def _read_labels(stream: tf.data.Dataset, name: str) -> np.ndarray:
    """Labels (n,) of one pass, of the type they have."""
    parts = []
    for images, labels in stream:
        if labels.shape.rank == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.shape.rank != 1 or images.shape[:1] != labels.shape:
            raise ValueError(
                f"`{name}` must give batches of images with one label each; call "
                "`.batch(...)` on it if it is not batched. Received: an element of "
                f"shapes {images.shape} and {labels.shape}"
            )
        check_finite(name, images.numpy(), "images of a batch")
        parts.append(labels.numpy())
    if not parts:
        raise ValueError(f"`{name}` must not be empty. Received: no batch")
    return np.concatenate(parts)
