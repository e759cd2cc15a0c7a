"""Class-disjoint splits: no class is on both sides."""

import numbers

import numpy as np


def split_class_ids(
    num_classes: int, fraction_or_count: float | int, seed: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Splits the classes 0..C-1 in two.

    Args:
        num_classes: Number of classes C, at least 2.
        fraction_or_count: Size of the first part: a share of the classes, a float
            between 0 and 1, or a number of classes, an int from 1 to C-1.
        seed: None takes the first classes by id; a seed takes the first of
            `np.random.default_rng(seed).permutation(num_classes)`.

    Returns:
        The class ids of the first and of the second part, each int64 and ascending.

    Raises:
        ValueError: If one of the parts would be empty.
    """
    count = fraction_or_count
    if not isinstance(count, numbers.Integral):
        count = round(count * num_classes)
    if not 0 < count < num_classes:
        raise ValueError(
            "`fraction_or_count` must leave a class on each side. Received: "
            f"{fraction_or_count} of {num_classes} classes\n"
            "Give a share between 0 and 1, or a smaller number of classes"
        )
    order = np.arange(num_classes)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(num_classes)
    return np.sort(order[:count]), np.sort(order[count:])


def mlrc_folds(
    num_classes: int, num_folds: int = 4
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Class-disjoint folds, contiguous by class id, of the "fair" protocol.

    The classes lie on a ring. Fold k trains on the `n - n // num_folds` classes from
    class `k * n // num_folds` on, and validates on the `n // num_folds` that follow:
    of 98 classes and 4 folds 74-97, 0-23, 25-48, 49-72.

    Source: Musgrave, Belongie and Lim, "A Metric Learning Reality Check", ECCV 2020,
    https://arxiv.org/abs/2003.08505.

    Args:
        num_classes: Number of training classes n, at least `num_folds`.
        num_folds: Number of folds, at least 2.

    Returns:
        For each fold the class ids to train on and to validate on, int64, ascending.
    """
    num_training = num_classes - num_classes // num_folds
    folds = []
    for fold in range(num_folds):
        ring = np.arange(num_classes) + fold * num_classes // num_folds
        ring %= num_classes
        folds.append((np.sort(ring[:num_training]), np.sort(ring[num_training:])))
    return folds


def ablation_split(num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Class ids of the one split the ablation studies use: 2/3 train, 1/3 validate.

    Args:
        num_classes: Number of classes n. The first `round(2 * n / 3)` train: 67 of
            CUB's 100, 65 of Cars196's 98.
    """
    return split_class_ids(num_classes, 2 / 3)
