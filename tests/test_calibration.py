"""Thresholds against scikit-learn's curves, and by hand."""

import numpy as np
import pytest
from sklearn import metrics

from keras_ccp import retrieval


def problem(num_classes=30, size=8, spread=0.6, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(num_classes), size)
    centers = rng.normal(size=(num_classes, 4))
    embeddings = centers[labels] + spread * rng.normal(size=(len(labels), 4))
    return embeddings, labels


def all_pairs(embeddings, labels):
    first, second = np.triu_indices(len(labels), 1)
    distances = np.linalg.norm(embeddings[first] - embeddings[second], axis=1)
    return labels[first] == labels[second], distances


def test_equals_scikit_learn():
    embeddings, labels = problem()
    embeddings = np.round(2 * embeddings)  # whole numbers: exact ties
    same, distances = all_pairs(embeddings, labels)
    found = retrieval.calibrate(embeddings, labels, false_match_rate=0.01, resamples=20)
    assert found.roc_auc.value == pytest.approx(metrics.roc_auc_score(same, -distances))
    false, true, thresholds = metrics.roc_curve(
        same, -distances, drop_intermediate=False
    )
    at = np.flatnonzero(false <= 0.01)[-1]
    assert found.true_match_rate.value == pytest.approx(true[at])
    assert found.false_match_rate.value == pytest.approx(false[at])
    nearest = np.argmin(abs(false - (1 - true)))
    expected = (false[nearest] + 1 - true[nearest]) / 2
    assert found.equal_error_rate.value == pytest.approx(expected)
    f1 = [metrics.f1_score(same, distances <= -t) for t in thresholds[1:]]
    assert found.best_f1.value == pytest.approx(max(f1))

    # The thresholds give those rates.
    matches = distances <= found.threshold
    assert matches[same].mean() == pytest.approx(found.true_match_rate.value)
    assert matches[~same].mean() == pytest.approx(found.false_match_rate.value)
    matches = distances <= found.best_f1_threshold
    assert metrics.f1_score(same, matches) == pytest.approx(found.best_f1.value)


def test_by_hand():
    # Same: 1 and 2. Others: 3 and 4 from 0, 2 and 3 from 1 and so on: 4, 3, 6, 5.
    embeddings, labels = [[0.0], [1.0], [4.0], [6.0]], [0, 0, 1, 1]
    found = retrieval.calibrate(embeddings, labels, false_match_rate=0.25)
    # One of four others, at 3, is within; the next is at 4.
    assert found.threshold == 3.5
    assert found.true_match_rate.value == 1.0
    assert found.false_match_rate.value == 0.25
    # Both and no other up to 2; the next is at 3.
    assert found.best_f1_threshold == 2.5
    assert (found.best_f1.value, found.roc_auc.value) == (1.0, 1.0)
    assert found.equal_error_rate.value == 0.0


def test_nothing_matches_where_the_nearest_are_of_others():
    embeddings, labels = [[0.0], [5.0], [0.0], [5.0]], [0, 0, 1, 1]
    found = retrieval.calibrate(embeddings, labels, false_match_rate=0.25)
    assert found.threshold < 0
    assert found.true_match_rate.value == 0.0


def test_interval_covers():
    # 0.8840 is the mean over 12 times 220 classes. Of 150 draws of 30 classes 92 %
    # held it; with that share 31 or fewer of 40 come once in 100.
    truth = 0.8840
    hits = 0
    for seed in range(40):
        found = retrieval.calibrate(*problem(seed=seed), resamples=100).roc_auc
        hits += found.low <= truth <= found.high
    assert hits >= 32


def test_many_pairs_are_of_whole_classes():
    embeddings, labels = problem()
    found = retrieval.calibrate(embeddings, labels, 0.1, resamples=5, max_pairs=3000)
    # 9 classes of 8 make 2,556 pairs, 10 would make 3,160. Those that were drawn:
    order = np.random.default_rng(0).permutation(30)
    rows = np.isin(labels, order[:9])
    same, distances = all_pairs(embeddings[rows], labels[rows])
    expected = metrics.roc_auc_score(same, -distances)
    assert found.roc_auc.value == pytest.approx(expected)


def test_classes_of_many_images():
    # One class alone makes more pairs than may be taken.
    embeddings, labels = problem(num_classes=2, size=400)
    found = retrieval.calibrate(embeddings, labels, 0.1, resamples=9, max_pairs=9000)
    same, distances = all_pairs(embeddings, labels)
    truth = metrics.roc_auc_score(same, -distances)
    assert found.roc_auc.value == pytest.approx(truth, abs=0.1)


@pytest.mark.parametrize("labels, rate", [([0, 1, 2], 0.5), ([0, 0, 1], 0.4)])
def test_too_few_pairs(labels, rate):
    with pytest.raises(ValueError, match="at least 1 / false_match_rate"):
        retrieval.calibrate(np.eye(3), labels, false_match_rate=rate)
