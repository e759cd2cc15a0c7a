"""Batches of P distinct classes with K images each."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_ccp.checks import as_labels, check_int
from keras_ccp.datasets import Dataset
from keras_ccp.images import Augmentation, check_files, decode_center_crop

IN_ORDER = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}


def balanced_batches(
    dataset: Dataset,
    classes_per_batch: int,
    samples_per_class: int,
    seed: int | None = None,
    augment: Augmentation | None = None,
    drop_small_classes: bool = False,
    first_batch: int = 0,
) -> tf.data.Dataset:
    """Endless training batches of P distinct classes with K images each.

    At any time the visits of two classes differ by at most one, and an image comes
    again only after all images of its class came. With the same seed every iterator
    gives the same batches, bit for bit.

    Args:
        dataset: Images and labels. Encoded images (paths or bytes) are read and decoded
            in parallel, when their turn comes.
        classes_per_batch: Number P of classes in a batch.
        samples_per_class: Number K of images of each of them. A class with fewer
            images repeats them within the batch.
        seed: Seed of the order and of `augment`, an int from 0. Defaults to `None`,
            which draws one, once.
        augment: Maps a batch of images and a `(2,)` int64 seed, another one in every
            batch, to a batch of images; for example `small_image_augmentation()`.
            Where images are encoded it maps one of them, a scalar string of the bytes
            of its file, and a seed, another one for every image, to one image of known
            shape; for example `mlrc_augmentation()`. Defaults to `None`: arrays stay as
            they are, encoded images are prepared as for evaluation, by `dataset.size`
            and `dataset.short_side`.
        drop_small_classes: Leave out the classes with fewer than K images. The
            others keep their labels. Defaults to `False`.
        first_batch: Number of batches to leave out at the beginning, without the time
            that their images would take: a training that was stopped goes on there.
            Defaults to 0.

    Returns:
        Infinite, prefetched tf.data.Dataset of `(P * K, height, width, channels)`
        images, or of what else the dataset holds, and `(P * K,)` int32 labels, the K
        images of a class in a row. A file that is missing is named by a
        `tf.errors.NotFoundError`, one that cannot be decoded ends in a
        `tf.errors.InvalidArgumentError`: `keras_ccp.datasets.verify` names it.

    Raises:
        ValueError: If a number is not positive or there are fewer than P classes.
    """
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
        lambda: enumerate(
            itertools.islice(index_batches(), first_batch, None), first_batch
        ),
        output_signature=(
            tf.TensorSpec((), tf.int64),
            tf.TensorSpec((size,), tf.int64),
        ),
    )
    load = _decoded if dataset.is_encoded else _gathered
    batches = load(batches, dataset, augment, size, seed % 2**63)
    # Known to be endless: `EvaluationData` refuses it rather than read it to no end.
    endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    return batches.apply(endless).prefetch(tf.data.AUTOTUNE)


def _gathered(
    batches: tf.data.Dataset,
    dataset: Dataset,
    augment: Augmentation | None,
    size: int,
    seed: int,
) -> tf.data.Dataset:
    def load(step: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        images = gather_inputs(dataset.images, rows)
        if augment is not None:
            images = augment(images, tf.stack([seed, step]))
            images = keras.tree.map_structure(
                lambda part: tf.ensure_shape(part, [size, *part.shape[1:]]), images
            )
        return images, gather(dataset.labels, rows)

    return batches.map(load, **IN_ORDER)


def _decoded(
    batches: tf.data.Dataset,
    dataset: Dataset,
    augment: Augmentation | None,
    size: int,
    seed: int,
) -> tf.data.Dataset:
    files, read, check = encoded_files(dataset.images)

    def load(step: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, ...]:
        numbers = step * size + tf.range(size, dtype=tf.int64)
        return gather(files, rows, check), numbers, gather(dataset.labels, rows)

    def decode(
        file: tf.Tensor, number: tf.Tensor, label: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        if augment is None:
            image = decode_center_crop(read(file), dataset.size, dataset.short_side)
        else:
            image = augment(read(file), tf.stack([seed, number]))
        return image, label

    images = batches.map(load, **IN_ORDER).unbatch().map(decode, **IN_ORDER)
    return images.batch(size, drop_remainder=True, **IN_ORDER)


def encoded_files(
    images: Sequence[str | bytes],
) -> tuple[np.ndarray, Callable, Callable | None]:
    """Paths or encoded images as bytes (n,), what makes the content of one, and what
    looks at some of them before."""
    files = np.empty(len(images), object)
    files[:] = [os.fsencode(image) for image in images]
    if isinstance(images[0], str):
        return files, tf.io.read_file, check_files
    return files, tf.identity, None


def gather(
    values: np.ndarray, rows: tf.Tensor, check: Callable | None = None
) -> tf.Tensor:
    """Takes rows of an array, or of an object array of bytes, inside a graph.

    The array stays where it is: a constant would be copied into the graph, and could
    not be larger than 2 GB.
    """
    dtype = tf.string
    if values.dtype != object:
        # TensorFlow takes the bytes of an array as they are, whatever their order.
        dtype = values.dtype.newbyteorder("=")
        values = values.astype(dtype, copy=False)

    def take(index: np.ndarray) -> np.ndarray:
        if check is not None:
            check(values[index])
        return values[index]

    taken = tf.numpy_function(take, [rows], dtype, stateful=False)
    taken.set_shape([*rows.shape, *values.shape[1:]])
    return taken


def gather_inputs(inputs: Any, rows: tf.Tensor) -> Any:
    """Takes rows of an array, or of each array of a dict."""
    return keras.tree.map_structure(lambda array: gather(array, rows), inputs)


# ==== Which images make up the batches ====


def balanced_indices(
    labels: np.ndarray,
    classes_per_batch: int,
    samples_per_class: int,
    seed: int,
    drop_small_classes: bool = False,
) -> Iterator[np.ndarray]:
    """The rows of each batch of `balanced_batches`.

    Args:
        labels: `(n,)` int labels.
        classes_per_batch: Number P of classes in a batch.
        samples_per_class: Number K of images of each of them.
        seed: Seed of the order, an int from 0.
        drop_small_classes: As for `balanced_batches`. Defaults to `False`.

    Returns:
        Endless iterator of `(P * K,)` int64 indices into `labels`.
    """
    check_int("classes_per_batch", classes_per_batch, minimum=1)
    check_int("samples_per_class", samples_per_class, minimum=1)
    labels = as_labels("labels", labels)
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    rows_by_class = np.split(order, starts[1:])
    if drop_small_classes:
        rows_by_class = [r for r in rows_by_class if len(r) >= samples_per_class]
    if classes_per_batch > len(rows_by_class):
        raise ValueError(
            f"`classes_per_batch` must be at most the {len(rows_by_class)} classes "
            f"there are to draw from. Received: classes_per_batch={classes_per_batch}\n"
            "Lower it, or keep small classes (drop_small_classes=False)"
        )
    rng = np.random.default_rng(seed)
    return _index_batches(
        rows_by_class, int(classes_per_batch), int(samples_per_class), rng
    )


def _index_batches(
    rows_by_class: list[np.ndarray],
    classes_per_batch: int,
    samples_per_class: int,
    rng: np.random.Generator,
) -> Iterator[np.ndarray]:
    classes = np.empty(0, np.int64)
    images = [np.empty(0, np.int64) for _ in rows_by_class]
    while True:
        batch = []
        chosen, classes = _draw(classes, classes_per_batch, len(rows_by_class), rng)
        for c in chosen:
            rows = rows_by_class[c]
            picks, images[c] = _draw(images[c], samples_per_class, len(rows), rng)
            batch.append(rows[picks])
        yield np.concatenate(batch)


def _draw(
    queue: np.ndarray, count: int, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draws from what is left of a shuffled round of 0..size-1, then from new rounds.

    Each round holds every number once. Where a draw runs into the next round, that
    round begins with the numbers this draw has used least: `count <= size` numbers
    of one draw are distinct. Returns the drawn numbers and the new queue.
    """
    drawn, queue = queue[:count], queue[count:]
    while len(drawn) < count:
        order = rng.permutation(size)
        uses = np.bincount(drawn, minlength=size)
        first = np.argsort(uses[order], kind="stable")[: count - len(drawn)]
        drawn = np.concatenate([drawn, order[first]])
        queue = np.delete(order, first)
    return drawn, queue
