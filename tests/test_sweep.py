"""Scores part by part: shortlists hold the nearest, whatever comes in which order."""

import numpy as np
import pytest
from test_retrieval import METRICS, evaluate_oracle, search_oracle

from keras_ccp.retrieval import evaluate, search, sweep
from keras_ccp.retrieval.scores import Scores
from keras_ccp.retrieval.shortlist import LARGEST_GROUP, Shortlist


def shortlist_of(scores, wanted, error, parts):
    """Adds the columns of `scores` in parts, by rows and by columns in turn."""
    shortlist = Shortlist(wanted, scores.shape[1], np.full(len(scores), error))
    for number, members in enumerate(parts):
        part = np.ascontiguousarray(scores[:, members])
        if number % 2:
            # With two further queries, as a block has that was filled up.
            part = np.concatenate([part, np.full((2, len(members)), 1e30)])
            part = np.asfortranarray(part.astype(np.float32))
        shortlist.add(part, members)
    return shortlist.finish()


@pytest.mark.parametrize("wanted", [1, 3, 40, 200])
@pytest.mark.parametrize("order", ["random", "rising", "falling"])
def test_a_shortlist_has_the_highest_scores(wanted, order):
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((30, 1024)).astype(np.float32)
    if order != "random":  # each part has better scores than all before, or worse ones
        scores = np.sort(scores, axis=1)
    if order == "falling":
        scores = scores[:, ::-1]
    parts = np.split(rng.permutation(1024) if order == "random" else np.arange(1024), 8)
    crowded, values, members = shortlist_of(scores, wanted, 1e-6, parts)
    assert not crowded.any()
    np.testing.assert_array_equal(
        values[:, :wanted], np.sort(scores, axis=1)[:, ::-1][:, :wanted]
    )
    np.testing.assert_array_equal(
        members[:, :wanted], np.argsort(-scores, axis=1)[:, :wanted]
    )


def test_a_shortlist_has_all_that_the_error_cannot_rule_out():
    # The second highest is 0.5, so with an error of 0.1 all from 0.3 on may be second.
    scores = np.full((1, LARGEST_GROUP), -1.0, np.float32)
    scores[0, [3, 20, 40, 41]] = 0.9, 0.5, 0.31, 0.29
    crowded, values, members = shortlist_of(scores, 2, 0.1, [np.arange(LARGEST_GROUP)])
    assert not crowded.any()
    assert members.tolist() == [[3, 20, 40]]
    np.testing.assert_array_equal(values, np.float32([[0.9, 0.5, 0.31]]))


def test_a_query_that_all_of_a_part_reaches_is_thinned_out():
    # Of 200 queries two find the second part nearer than all of the first, one of them
    # in equal scores. The longest list is what all of them take memory for.
    rng = np.random.default_rng(2)
    scores = rng.standard_normal((200, 2048)).astype(np.float32)
    scores[2:, :1024] += 10
    scores[:2, :1024] -= 100
    scores[1, 1024:] = 1.0
    for order in (np.ascontiguousarray, np.asfortranarray):
        shortlist = Shortlist(60, 2048, np.full(200, 1e-6))
        for members in np.split(np.arange(2048), 2):
            shortlist.add(order(scores[:, members]), members)
            for query, _ in shortlist._parts:
                assert np.bincount(query).max() <= 2 * 60 + 32
        crowded, values, _ = shortlist.finish()
        assert np.flatnonzero(crowded).tolist() == [1]
        best = np.sort(np.delete(scores, 1, axis=0), axis=1)[:, ::-1][:, :60]
        np.testing.assert_array_equal(values[:, :60], best)


def test_too_many_near_ties_are_given_up():
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((3, 512)).astype(np.float32)
    scores[1] = 1.0
    crowded, _, members = shortlist_of(scores, 5, 1e-6, np.split(np.arange(512), 4))
    assert crowded.tolist() == [False, True, False]
    expected = np.argsort(-scores[[0, 2]], axis=1)[:, :5]
    np.testing.assert_array_equal(members[:, :5], expected)


def test_a_shortlist_stays_short():
    # 256 parts, each better than all before: what was listed before is forgotten.
    scores = np.arange(256 * 64, dtype=np.float32)[None]
    shortlist = Shortlist(4, scores.size, np.zeros(1))
    for members in np.split(np.arange(scores.size), 256):
        shortlist.add(scores[:, members], members)
        assert sum(len(part[0]) for part in shortlist._parts) < 150
    assert shortlist.finish()[2].tolist() == [[16383, 16382, 16381, 16380]]


def test_scores_of_one_set_are_those_of_both_sides():
    rows = np.random.default_rng(2).uniform(-0.4, 0.4, (9, 5))
    rows[0, 0] = 0.4  # less the mean it is between 1/4 and 1/2: all is doubled
    scores = Scores(rows, rows, np.float32)
    one, other = np.arange(4), np.append(np.arange(4, 9), scores.padding)
    found = scores.product(one, scores.gallery_rows(other))
    squares = np.square(rows[one, None] - rows[other[:-1]]).sum(axis=2)
    np.testing.assert_allclose(found[:, :-1], -(2**2) * squares / 2, atol=1e-6)
    assert (found[:, -1] == -np.inf).all()
    # The sums run over the same terms in another order.
    back = scores.product(other, scores.gallery_rows(one)).T
    np.testing.assert_allclose(found, back, atol=1e-6)


@pytest.mark.parametrize("kind", ["sorted", "random", "duplicates", "heaps"])
def test_blocks_of_one_set_give_what_a_loop_gives(kind, monkeypatch):
    monkeypatch.setattr("keras_ccp.retrieval.exact_search.SMALLEST_BLOCK", 64)
    rng = np.random.default_rng(3)
    points = rng.standard_normal((900, 5)).astype(np.float32)
    labels = rng.integers(0, 150, 900)
    if kind == "sorted":  # on a line: each block is nearer to the last than to others
        points = np.arange(900, dtype=np.float32)[:, None] / 7
    elif kind == "duplicates":
        points[1::2] = points[::2]
        labels[:250] = 0  # one class needs many neighbours
    elif kind == "heaps":
        points = (1e-3 * points + np.repeat(np.arange(3), 300)[:, None]).astype("f")
    expected = search_oracle(points, points, 6, exclude_self=True)
    # A copy is the same set.
    found = search(points, points.copy(), 6, exclude_self=True, chunk_size=100)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    result = evaluate(points, labels, metrics=METRICS, chunk_size=100)
    del result["num_skipped"]
    assert result == pytest.approx(evaluate_oracle(points, labels), rel=1e-12)


def test_both_ways_through_one_set_agree(monkeypatch):
    rng = np.random.default_rng(4)
    points = rng.standard_normal((3000, 16)).astype(np.float32)
    in_pairs = search(points, points, 5, exclude_self=True)
    monkeypatch.setattr("keras_ccp.retrieval.exact_search._LISTED_AT_ONCE", 0)
    monkeypatch.setattr(sweep, "in_pairs", None)
    in_rows = search(points, points, 5, exclude_self=True)
    for one, other in zip(in_pairs, in_rows, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_small_chunk_is_one_of_queries_not_of_both_sides(monkeypatch):
    # Blocks of 2 with blocks of 2 would be 150 ** 2 / 2 products.
    monkeypatch.setattr("keras_ccp.retrieval.exact_search.in_pairs", None)
    points = np.random.default_rng(5).standard_normal((300, 4)).astype(np.float32)
    found = search(points, points, 3, exclude_self=True, chunk_size=2)
    expected = search_oracle(points, points, 3, exclude_self=True)
    np.testing.assert_array_equal(found[1], expected[1])


def test_queries_that_want_many_go_in_small_chunks(monkeypatch):
    sizes = []
    make = Shortlist

    def record(wanted, num_gallery, error):
        sizes.append(wanted * len(error))
        return make(wanted, num_gallery, error)

    monkeypatch.setattr(sweep, "Shortlist", record)
    monkeypatch.setattr(sweep, "_MOST_LISTED", 1000)
    points = np.random.default_rng(6).standard_normal((200, 4)).astype(np.float32)
    search(points, points, 90)
    # Chunks of 12 queries: the first number of them that wants 1,000 or more.
    assert max(sizes) == 12 * 90 and sum(sizes) == 200 * 90
