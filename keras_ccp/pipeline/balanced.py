"""Batches of P distinct classes with K images each."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_ccp.arguments import check_bool, check_int
from keras_ccp.datasets import Dataset, check_labels
from keras_ccp.pipeline.augmentation import small_image_augmentation

Augmentation = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def balanced_batches(
    dataset: Dataset,
    classes_per_batch: int,
    samples_per_class: int,
    seed: int | None = None,
    augment: Augmentation | None = None,
    drop_small_classes: bool = False,
) -> tf.data.Dataset:
    """Endless training batches of P distinct classes with K images each.

    At any time the visits of two classes differ by at most one, and an image comes
    again only after all images of its class came. With the same seed every iterator
    gives the same batches, bit for bit.

    Args:
        dataset: Images and labels.
        classes_per_batch: Number P of classes in a batch.
        samples_per_class: Number K of images of each of them. A class with fewer
            images repeats them within the batch.
        seed: Seed of the order and of `augment`, an int from 0. None draws one, once.
        augment: Maps a batch of images and a `(2,)` int64 seed, another one in every
            batch, to a batch of images; for example `small_image_augmentation()`.
        drop_small_classes: Leave out the classes with fewer than K images. The
            others keep their labels.

    Returns:
        Infinite, prefetched tf.data.Dataset of `(P * K, height, width, channels)`
        images and `(P * K,)` int32 labels, the K images of a class in a row.

    Raises:
        ValueError: If a number is not positive, the seed is negative, or there are
            fewer than P classes.
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
    augment_seed = seed % 2**63

    def load(step: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        images = gather(dataset.images, rows)
        if augment is not None:
            images = _as_images(augment(images, tf.stack([augment_seed, step])))
            images = tf.ensure_shape(images, [size, *images.shape[1:]])
        return images, gather(dataset.labels, rows)

    batches = tf.data.Dataset.from_generator(
        lambda: enumerate(index_batches()),
        output_signature=(
            tf.TensorSpec((), tf.int64),
            tf.TensorSpec((size,), tf.int64),
        ),
    )
    batches = batches.map(load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    # Known to be endless: `EvaluationData` refuses it rather than read for ever.
    endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    return batches.apply(endless).prefetch(tf.data.AUTOTUNE)


def _check_augment(augment: Any) -> None:
    expected = (
        "`augment` must be None or a function that is called augment(images, seed)"
    )
    if not callable(augment):
        raise TypeError(f"{expected}. Received: augment={augment!r}")
    if augment is small_image_augmentation:
        raise TypeError(
            f"{expected}: call what makes it, augment=small_image_augmentation(). "
            "Received: augment=small_image_augmentation"
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
        drop_small_classes: Leave out the classes with fewer than K images.

    Returns:
        Endless iterator of `(P * K,)` int64 indices into `labels`.

    Raises:
        ValueError: If a number is not positive, the seed is negative, or there are
            fewer than P classes.
        TypeError: If a number is not an int or `drop_small_classes` not a bool.
    """
    check_int("classes_per_batch", classes_per_batch, minimum=1)
    check_int("samples_per_class", samples_per_class, minimum=1)
    check_int("seed", seed, minimum=0)
    check_bool("drop_small_classes", drop_small_classes)
    labels = check_labels(labels)
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    rows_by_class = np.split(order, starts[1:])
    kept = "classes"
    if drop_small_classes:
        rows_by_class = [r for r in rows_by_class if len(r) >= samples_per_class]
        kept = f"classes with at least {samples_per_class} images"
    if classes_per_batch > len(rows_by_class):
        raise ValueError(
            f"`classes_per_batch` must not exceed the number of {kept}, "
            f"{len(rows_by_class)}. Received: classes_per_batch={classes_per_batch}"
        )
    rng = np.random.default_rng(seed)
    return _index_batches(rows_by_class, classes_per_batch, samples_per_class, rng)


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
        chosen, classes = draw(classes, classes_per_batch, len(rows_by_class), rng)
        for c in chosen:
            rows = rows_by_class[c]
            picks, images[c] = draw(images[c], samples_per_class, len(rows), rng)
            batch.append(rows[picks])
        yield np.concatenate(batch)


def draw(
    queue: np.ndarray, count: int, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draws from shuffled rounds of 0..size-1 laid end to end.

    Each round holds every number once. Where a draw runs into the next round, that
    round begins with the numbers this draw has used least: `count <= size` numbers
    of one draw are distinct.

    Args:
        queue: What is left of the current round.
        count: How many to draw.
        size: Length of a round.
        rng: Source of randomness.

    Returns:
        `(count,)` drawn numbers and the new queue.
    """
    drawn, queue = queue[:count], queue[count:]
    while len(drawn) < count:
        order = rng.permutation(size)
        uses = np.bincount(drawn, minlength=size)
        first = np.argsort(uses[order], kind="stable")[: count - len(drawn)]
        drawn = np.concatenate([drawn, order[first]])
        queue = np.delete(order, first)
    return drawn, queue


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
    taken = tf.numpy_function(
        lambda index: values[index], [rows], values.dtype, stateful=False
    )
    taken.set_shape([*rows.shape, *values.shape[1:]])
    return taken
