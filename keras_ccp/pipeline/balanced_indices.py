"""Which images make up the batches of P classes with K images each."""

from collections.abc import Iterator

import numpy as np

from keras_ccp.checks import as_labels, check_bool, check_int


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
    labels = as_labels("labels", labels)
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
