"""Class-disjoint splits: no class is on both sides."""

import numbers

import numpy as np

from keras_ccp.arguments import check_int


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
            f"between 0 and 1 or an int from 1 to {num_classes - 1} for "
            f"{num_classes} classes. Received: fraction_or_count={fraction_or_count}"
        )
    order = np.arange(num_classes)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(num_classes)
    return np.sort(order[:count]), np.sort(order[count:])
