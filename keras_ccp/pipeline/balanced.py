"""Batches of P distinct classes with K images each."""

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_ccp.checks import check_bool, check_int
from keras_ccp.datasets import Dataset
from keras_ccp.pipeline.augmentation import small_image_augmentation
from keras_ccp.pipeline.balanced_indices import balanced_indices
from keras_ccp.pipeline.decoding import decode_center_crop
from keras_ccp.pipeline.encoded_batches import decoder, encoded_batches
from keras_ccp.pipeline.image_augmentation import (
    conventional_augmentation,
    mlrc_augmentation,
)

Augmentation = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

_MAKERS = (
    small_image_augmentation,
    mlrc_augmentation,
    conventional_augmentation,
)


def balanced_batches(
    dataset: Dataset,
    classes_per_batch: int,
    samples_per_class: int,
    seed: int | None = None,
    augment: Augmentation | None = None,
    drop_small_classes: bool = False,
    cache: bool = False,
    first_batch: int = 0,
) -> tf.data.Dataset:
    """Endless training batches of P distinct classes with K images each.

    At any time the visits of two classes differ by at most one, and an image comes
    again only after all images of its class came. With the same seed every iterator
    gives the same batches, bit for bit.

    Args:
        dataset: Images and labels. Encoded images (paths or bytes) are read and decoded
            in parallel; one that cannot be read or decoded raises a
            `tf.errors.InvalidArgumentError` that names it.
        classes_per_batch: Number P of classes in a batch.
        samples_per_class: Number K of images of each of them. A class with fewer
            images repeats them within the batch.
        seed: Seed of the order and of `augment`, an int from 0. None draws one, once.
        augment: Maps a batch of images and a `(2,)` int64 seed, another one in every
            batch, to a batch of images; for example `small_image_augmentation()`.
            Where images are encoded it maps one of them, a scalar string of the bytes
            of its file, and a seed, another one for every image, to one image of known
            shape; for example `mlrc_augmentation()`. None prepares encoded images as
            for evaluation, by `dataset.size` and `dataset.short_side`.
        drop_small_classes: Leave out the classes with fewer than K images. The
            others keep their labels.
        cache: Keep files in memory, encoded, once they are read. For slow disks.
        first_batch: Number of batches to leave out at the beginning, without the time
            that their images would take: a training that was stopped goes on there.

    Returns:
        Infinite, prefetched tf.data.Dataset of `(P * K, height, width, channels)`
        images and `(P * K,)` int32 labels, the K images of a class in a row.

    Raises:
        ValueError: If a number is not positive, the seed is negative, there are
            fewer than P classes, or `cache` is set without paths.
        TypeError: If an argument has the wrong type, or `augment` takes other arguments
            or returns no images.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(
            "`dataset` must be a `keras_ccp.datasets.Dataset`; wrap arrays with "
            f"`Dataset(images, labels)`. Received: dataset of type {type(dataset)}"
        )
    if augment is not None:
        _check_augment(augment)
    check_bool("cache", cache)
    check_int("first_batch", first_batch, minimum=0)
    if cache and not (dataset.is_encoded and isinstance(dataset.images[0], str)):
        raise ValueError(
            "`cache` must be False where images are in memory already: it is for a "
            f"Dataset of paths. Received: cache=True for {dataset!r}"
        )
    if seed is None:
        seed = int(np.random.default_rng().integers(2**31))
    index_batches = functools.partial(
        balanced_indices,
        dataset.labels,
        classes_per_batch,
        samples_per_class,
        seed,
        drop_small_classes,
    )
    index_batches()  # Refuses wrong arguments here, not at the first batch.
    size = int(classes_per_batch) * int(samples_per_class)
    first_batch = int(first_batch)
    batches = tf.data.Dataset.from_generator(
        lambda: enumerate(itertools.islice(index_batches(), first_batch, None)),
        output_signature=(
            tf.TensorSpec((), tf.int64),
            tf.TensorSpec((size,), tf.int64),
        ),
    )
    if dataset.is_encoded:
        batches = _decoded(batches, dataset, augment, size, seed, cache, first_batch)
    else:
        batches = _gathered(batches, dataset, augment, size, seed, first_batch)
    # Known to be endless: `EvaluationData` refuses it rather than read for ever.
    endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    return batches.apply(endless).prefetch(tf.data.AUTOTUNE)


def _gathered(
    batches: tf.data.Dataset,
    dataset: Dataset,
    augment: Augmentation | None,
    size: int,
    seed: int,
    first_batch: int,
) -> tf.data.Dataset:
    """Images and labels of batches (step, rows) of arrays."""
    augment_seed = seed % 2**63

    def load(step: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        images = gather(dataset.images, rows)
        if augment is not None:
            images = _as_images(
                augment(images, tf.stack([augment_seed, step + first_batch]))
            )
            images = tf.ensure_shape(images, [size, *images.shape[1:]])
        return images, gather(dataset.labels, rows)

    return batches.map(load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _decoded(
    batches: tf.data.Dataset,
    dataset: Dataset,
    augment: Augmentation | None,
    size: int,
    seed: int,
    cache: bool,
    first_batch: int,
) -> tf.data.Dataset:
    """Images and labels of batches (step, rows) of encoded images."""
    augment_seed = seed % 2**63
    first = first_batch * size

    def decode(encoded: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        if augment is None:
            return decode_center_crop(encoded, dataset.size, dataset.short_side)
        return _as_image(augment(encoded, tf.stack([augment_seed, number + first])))

    def label(images: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rows = tf.ensure_shape(rows, [size])
        images = tf.ensure_shape(images, [size, *images.shape[1:]])
        return images, tf.gather(labels, rows)

    labels = tf.constant(dataset.labels)  # small, and without a call of Python
    return encoded_batches(batches, dataset.images, decoder(decode), label, size, cache)


def _check_augment(augment: Any) -> None:
    expected = (
        "`augment` must be None or a function that is called augment(images, seed)"
    )
    if not callable(augment):
        raise TypeError(f"{expected}. Received: augment={augment!r}")
    if augment in _MAKERS:
        name = augment.__name__
        raise TypeError(
            f"{expected}: call what makes it, augment={name}(). "
            f"Received: augment={name}"
        )
    try:
        signature = inspect.signature(augment)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"{expected}. Received: a function of {signature}: {error}"
        ) from error


def _as_images(result: Any) -> tf.Tensor:
    """What `augment` returned as a tensor, if it is a batch."""
    try:
        images = tf.convert_to_tensor(result)
    except (TypeError, ValueError):
        images = None
    if images is None or not images.shape.rank:
        raise TypeError(
            "`augment` must be a function augment(images, seed) that returns a batch "
            f"of images of known rank. Received: a result of {result!r:.100}"
        )
    return images


def _as_image(result: Any) -> tf.Tensor:
    """What `augment` made of one encoded image, if it is an image."""
    image = _as_images(result)
    if image.shape.rank != 3 or not image.shape.is_fully_defined():
        raise TypeError(
            "`augment` must return one image of known shape (height, width, channels) "
            "where images are encoded, as `mlrc_augmentation()` does. "
            f"Received: a result of shape {image.shape}"
        )
    return image


def gather(values: np.ndarray, rows: tf.Tensor) -> tf.Tensor:
    """Takes rows of a numpy array inside a graph.

    The array stays where it is: a constant would be copied into the graph, and could
    not be larger than 2 GB.

    Args:
        values: `(n, ...)` array.
        rows: `(k,)` int64 indices.

    Returns:
        `(k, ...)` tensor.
    """
    # TensorFlow takes the bytes of an array as they are, whatever their order.
    dtype = values.dtype.newbyteorder("=")
    taken = tf.numpy_function(
        lambda index: values[index].astype(dtype, copy=False),
        [rows],
        dtype,
        stateful=False,
    )
    taken.set_shape([*rows.shape, *values.shape[1:]])
    return taken
