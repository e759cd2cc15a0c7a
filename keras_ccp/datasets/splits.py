"""Class-disjoint splits: no class is on both sides."""

import numbers

import numpy as np

from keras_ccp.checks import check_int


def split_class_ids(
    num_classes: int, fraction_or_count: float | int, seed: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Splits the classes 0..C-1 in two.

    Args:
        num_classes: Number of classes C, at least 2.
        fraction_or_count: Size of the first part: a share of the classes, a float
            between 0 and 1, or a number of classes, an int between 1 and C-1.
        seed: None takes the first classes by id; a seed takes the first of
            `np.random.default_rng(seed).permutation(num_classes)`.

    Returns:
        The class ids of the first and of the second part, each int64 in ascending
        order.

    Raises:
        ValueError: If one of the parts would be empty, or the seed is negative.
        TypeError: If `fraction_or_count` is not a number, or another argument not an
            integer.
    """
    check_int("num_classes", num_classes, minimum=1)
    if num_classes == 1:
        raise ValueError(
            "`num_classes` must be at least 2: a single class cannot be split; split "
            "its images, or load more classes. Received: num_classes=1"
        )
    if seed is not None:
        check_int("seed", seed, minimum=0)
    is_number = isinstance(fraction_or_count, numbers.Real)
    if not is_number or isinstance(fraction_or_count, bool):
        raise TypeError(
            "`fraction_or_count` must be a float between 0 and 1 or a number of "
            f"classes. Received: fraction_or_count={fraction_or_count!r}"
        )
    if isinstance(fraction_or_count, numbers.Integral):
        count = int(fraction_or_count)
    elif 0 < fraction_or_count < 1:
        count = round(float(fraction_or_count) * num_classes)
    else:
        count = 0
    if not 0 < count < num_classes:
        raise ValueError(
            "`fraction_or_count` must leave at least one class on each side: a float "
            f"above {0.5 / num_classes:.6g} and below {1 - 0.5 / num_classes:.6g}, or "
            f"an int from 1 to {num_classes - 1}, for {num_classes} classes. "
            f"Received: fraction_or_count={fraction_or_count}"
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
    class `k * n // num_folds` on, and validates on the `n // num_folds` that follow.
    For 98 classes and 4 folds validation is 74-97, 0-23, 25-48, 49-72; where
    `num_folds` does not divide n some classes never validate.

    Source: Musgrave, Belongie and Lim, "A Metric Learning Reality Check", ECCV 2020,
    https://arxiv.org/abs/2003.08505.

    Args:
        num_classes: Number of training classes n, at least `num_folds`.
        num_folds: Number of folds, at least 2.

    Returns:
        For each fold the class ids to train on and those to validate on, each int64 in
        ascending order.

    Raises:
        ValueError: If there are fewer than 2 folds, or fewer classes than folds.
        TypeError: If an argument is not an integer.
    """
    check_int("num_folds", num_folds, minimum=2)
    check_int("num_classes", num_classes, minimum=1)
    if num_classes < num_folds:
        raise ValueError(
            "`num_classes` must be at least `num_folds`: each fold validates on a "
            "class of its own; take fewer folds. "
            f"Received: num_classes={num_classes}, num_folds={num_folds}"
        )
    num_training = num_classes - num_classes // num_folds
    folds = []
    for fold in range(num_folds):
        ring = np.arange(num_classes) + fold * num_classes // num_folds
        ring %= num_classes
        folds.append((np.sort(ring[:num_training]), np.sort(ring[num_training:])))
    return folds


def ablation_split(num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Class ids of the one split the ablation studies use: 2/3 train, 1/3 validate.

    The first `round(2 * n / 3)` classes by id train: 67 of CUB's 100, 65 of
    Cars196's 98.

    Args:
        num_classes: Number of training classes n, at least 2.

    Returns:
        The class ids to train on and those to validate on, each int64 in ascending
        order.

    Raises:
        ValueError: If there are fewer than 2 classes.
        TypeError: If `num_classes` is not an integer.
    """
    return split_class_ids(num_classes, 2 / 3)
