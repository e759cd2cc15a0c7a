"""Intervals, comparisons and ties, against enumeration and simulation."""

import itertools

import numpy as np
import pytest

from keras_ccp import retrieval
from keras_ccp.retrieval.statistics import mean_interval, sign_flip_p


def embeddings_of(num_classes, per_class, noise, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(num_classes), per_class)
    centers = rng.normal(size=(num_classes, 8))[labels]
    return centers + noise * rng.normal(size=centers.shape), labels


def scores_of_classes(rng, num_classes, is_even):
    """Sums and numbers of scores whose classes have means around 0.25."""
    sizes = np.full(num_classes, 20) if is_even else rng.integers(2, 60, num_classes)
    means = rng.normal(rng.beta(1, 3, num_classes), 0.2 / np.sqrt(sizes))
    return means * sizes, sizes.astype(float)


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("num_classes", [10, 40, 100])
def test_the_interval_covers_the_mean_of_other_classes(num_classes, is_even):
    rng = np.random.default_rng(num_classes)
    covered = 0
    for seed in range(1000):
        sums, counts = scores_of_classes(rng, num_classes, is_even)
        low, high = mean_interval(sums, counts, resamples=400, seed=seed)
        covered += low <= 0.25 <= high  # the mean of a Beta(1, 3)
    assert 930 <= covered <= 970


@pytest.mark.parametrize("num_classes", [8, 40])
def test_the_test_seldom_finds_a_difference_where_there_is_none(num_classes):
    rng = np.random.default_rng(num_classes)
    found = 0
    for seed in range(1000):
        sizes = rng.integers(2, 60, num_classes)
        found += sign_flip_p(rng.normal(0, 0.1, num_classes) * sizes, 400, seed) <= 0.05
    assert 20 <= found <= 60


def test_the_p_value_of_few_classes_is_that_of_all_swaps():
    sums = np.array([3.0, -1.0, 2.0, 0.5])
    swaps = [abs(np.dot(signs, sums)) for signs in itertools.product([1, -1], repeat=4)]
    # As large as 4.5 are 4.5, 5.5 and 6.5, each on both sides.
    assert sign_flip_p(sums) == np.mean(np.array(swaps) >= 4.5) == 6 / 16


def test_a_drawn_p_value_is_near_that_of_all_swaps():
    sums = np.random.default_rng(0).normal(0.3, 1, 12)
    exact = sign_flip_p(sums, resamples=2**12)
    assert sign_flip_p(sums, resamples=2**12 - 1) == pytest.approx(exact, abs=0.03)


@pytest.mark.parametrize("metric", ["precision_at_1", "map_at_r", "recall_at_4"])
def test_an_interval_holds_the_score_that_evaluate_gives(metric):
    embeddings, labels = embeddings_of(30, 6, noise=1.0)
    found = retrieval.interval(embeddings, labels, metric=metric)
    score = retrieval.evaluate(embeddings, labels, metrics=[metric])[metric]
    assert found.value == pytest.approx(score, rel=1e-12)
    assert found.low < score < found.high


def test_an_interval_of_a_gallery_and_a_query_without_an_answer():
    query, labels = embeddings_of(12, 2, noise=1.0)
    known = labels < 11  # the last class is not in the gallery
    gallery = query[known] + 0.3
    found = retrieval.interval(query, labels, gallery, labels[known])
    again = retrieval.interval(query[known], labels[known], gallery, labels[known])
    assert found == again


def test_the_interval_widens_with_the_level_and_comes_again_with_the_seed():
    embeddings, labels = embeddings_of(20, 5, noise=1.0)
    narrow, wide, again = (
        retrieval.interval(embeddings, labels, level=level, seed=3)
        for level in (0.8, 0.99, 0.8)
    )
    assert wide.low < narrow.low < narrow.high < wide.high
    assert again == narrow


def test_one_class_has_no_interval():
    found = retrieval.interval(np.eye(3), [0, 0, 0])
    assert found.value == 1 and np.isnan([found.low, found.high]).all()


def test_a_better_embedding_is_told_from_a_worse_one():
    good, labels = embeddings_of(40, 5, noise=0.8)
    worse = good + np.random.default_rng(1).normal(0, 0.8, good.shape)
    found = retrieval.compare(good, worse, labels)
    scores = [retrieval.evaluate(e, labels)["map_at_r"] for e in (good, worse)]
    assert found.difference == pytest.approx(scores[0] - scores[1], rel=1e-9)
    assert 0 < found.low < found.difference < found.high
    assert found.p_value < 0.001
    other = retrieval.compare(worse, good, labels)
    assert other.difference == pytest.approx(-found.difference)


def test_equal_embeddings_do_not_differ():
    embeddings, labels = embeddings_of(10, 4, noise=1.0)
    found = retrieval.compare(embeddings, 2 * embeddings, labels)
    assert (found.difference, found.low, found.high, found.p_value) == (0, 0, 0, 1)


# ==== Ties ====


def map_at_r(hits, count):
    """Of the labels' hits in one order, by the definition."""
    hits = hits[:count]
    return sum(h * sum(hits[: j + 1]) / (j + 1) for j, h in enumerate(hits)) / count


def bounds_by_enumeration(points, labels):
    """Lowest and highest MAP@R over all orders of equal distances, query by query."""
    lowest, highest, copies = [], [], 0
    for row, point in enumerate(points):
        others = [i for i in range(len(points)) if i != row]
        squared = {i: float(np.sum((points[i] - point) ** 2)) for i in others}
        scores = []
        for order in itertools.permutations(others):
            near = [squared[i] for i in order]
            if near == sorted(near):
                hits = [int(labels[i] == labels[row]) for i in order]
                scores.append(map_at_r(hits, labels.count(labels[row]) - 1))
        lowest.append(min(scores))
        highest.append(max(scores))
        copies += any(squared[i] == 0 and labels[i] != labels[row] for i in others)
    return np.mean(lowest), np.mean(highest), copies


@pytest.mark.parametrize("seed", range(6))
def test_ties_are_those_of_all_orders(seed):
    rng = np.random.default_rng(seed)
    points = rng.integers(0, 3, (7, 1)).astype(float)
    labels = [0, 0, 0, 1, 1, 2, 2]
    found = retrieval.ties(points, labels)
    expected = bounds_by_enumeration(points, labels)
    assert (found.lowest, found.highest) == pytest.approx(expected[:2])
    assert found.num_copies == expected[2]
    score = retrieval.evaluate(points, labels)["map_at_r"]
    assert found.lowest - 1e-12 <= score <= found.highest + 1e-12


def test_no_ties_leave_one_score():
    embeddings, labels = embeddings_of(10, 5, noise=1.0)
    found = retrieval.ties(embeddings, labels)
    score = retrieval.evaluate(embeddings, labels)["map_at_r"]
    assert found.lowest == found.highest == pytest.approx(score, rel=1e-12)
    assert found.num_copies == 0


def test_ties_of_a_collapsed_network_and_a_gallery():
    # All at one place: of 100 rows 5 are of the query's class, all first or all last.
    gallery_labels = np.repeat(np.arange(20), 5)
    found = retrieval.ties(
        np.zeros((3, 2)), [0, 1, 30], np.zeros((100, 2)), gallery_labels
    )
    assert (found.lowest, found.highest, found.num_copies) == (0, 1, 2)
