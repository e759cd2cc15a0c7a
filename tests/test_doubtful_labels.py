"""Labels that neighbours contradict."""

import numpy as np
import pytest

from keras_ccp import retrieval


def test_finds_exchanged_labels():
    rng = np.random.default_rng(0)
    truth = np.repeat(np.arange(8), 20)
    embeddings = 10 * np.eye(8)[truth] + rng.normal(size=(160, 8))
    labels, wrong = truth.copy(), [3, 41, 77, 150]
    labels[wrong] = (truth[wrong] + 3) % 8
    found = retrieval.doubtful_labels(embeddings, labels)
    assert sorted(one.row for one in found) == wrong
    for one in found:
        assert (one.label, one.suggested) == (labels[one.row], truth[one.row])


def test_by_hand():
    # From 0.0: a 1 at .1, then two of class 0. From .1: three of class 0. From 9: two
    # of class 0 and one of 1, all far away, where its own class 2 has no other.
    embeddings = [[0.0], [0.1], [0.3], [0.6], [9.0]]
    found = retrieval.doubtful_labels(embeddings, [0, 1, 0, 0, 2], k=3)
    assert found == [
        retrieval.DoubtfulLabel(1, 1, 0, 1.0),
        retrieval.DoubtfulLabel(4, 2, 0, pytest.approx(2 / 3)),
    ]


def test_as_many_votes_are_no_doubt():
    # Each of the first two has one neighbour of its class and one of the other.
    embeddings = [[0.0], [1.0], [2.0], [3.0]]
    assert retrieval.doubtful_labels(embeddings, [0, 0, 1, 1], k=2) == []
