"""Class-disjoint splits."""

import re

import numpy as np
import pytest

from keras_ccp.datasets import ablation_split, mlrc_folds, split_class_ids


def test_split_class_ids_with_a_seed():
    # np.random.default_rng(0).permutation(6) is [3 2 5 4 0 1] (numpy 2.4.6).
    first, second = split_class_ids(6, 0.5, seed=0)
    assert first.tolist() == [2, 3, 5]
    assert second.tolist() == [0, 1, 4]
    with pytest.raises(ValueError, match="non-negative"):  # by NumPy
        split_class_ids(6, 0.5, seed=-1)


@pytest.mark.parametrize(
    ("size", "count"),
    # round(0.5 * 5) = round(2.5) = 2, to the even number.
    [(0.5, 2), (0.3, 2), (0.9, 4), (1, 1), (4, 4), (np.int64(3), 3)],
)
def test_split_class_ids_sizes(size, count):
    first, second = split_class_ids(5, size)
    assert first.tolist() == list(range(count))
    assert second.tolist() == list(range(count, 5))


@pytest.mark.parametrize(
    ("num_classes", "size"),
    [(5, size) for size in (0, 5, -1, 0.0, 1.0, 0.05, 0.95, 1.5)]
    + [(1, 1), (1, 0.5), (2, 0.8)],
)
def test_split_class_ids_refuses_an_empty_side(num_classes, size):
    message = f"Received: {size} of {num_classes} classes"
    with pytest.raises(ValueError, match=re.escape(message)):
        split_class_ids(num_classes, size)


@pytest.mark.parametrize(
    ("num_classes", "validation"),
    [
        # The paper's rows: first and last class id of each fold, Cars196 and CUB.
        (98, [(74, 97), (0, 23), (25, 48), (49, 72)]),
        (100, [(75, 99), (0, 24), (25, 49), (50, 74)]),
        # In-shop by the rule: 3997 // 4 = 999 validate; the folds begin at
        # k * 3997 // 4 = 0, 999, 1998, 2997, and validate from 2998 classes later.
        (3997, [(2998, 3996), (0, 998), (999, 1997), (1998, 2996)]),
        (4, [(3, 3), (0, 0), (1, 1), (2, 2)]),
    ],
)
def test_mlrc_folds(num_classes, validation):
    folds = mlrc_folds(num_classes)
    assert len(folds) == 4
    for (train, held_out), (first, last) in zip(folds, validation, strict=True):
        assert held_out.tolist() == list(range(first, last + 1))
        others = set(range(num_classes)) - set(range(first, last + 1))
        assert train.tolist() == sorted(others)


def test_mlrc_folds_of_another_number():
    # 7 // 3 = 2 validate; folds begin at 0, 7 // 3 = 2, 14 // 3 = 4, plus 5 on a ring.
    folds = mlrc_folds(7, num_folds=3)
    assert [held_out.tolist() for _, held_out in folds] == [[5, 6], [0, 1], [2, 3]]


@pytest.mark.parametrize(("num_classes", "count"), [(100, 67), (98, 65), (2, 1)])
def test_ablation_split(num_classes, count):
    # 200 / 3 = 66.7, 196 / 3 = 65.3, 4 / 3 = 1.3
    train, validation = ablation_split(num_classes)
    assert train.tolist() == list(range(count))
    assert validation.tolist() == list(range(count, num_classes))
