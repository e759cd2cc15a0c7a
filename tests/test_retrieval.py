import numpy as np
import pytest
import tensorflow as tf

from keras_ccp.layers import l2_normalize, lipschitz_normalize
from keras_ccp.retrieval import (
    ExactSearch,
    covering_radius,
    evaluate,
    score_queries,
    search,
)

METRICS = (
    "precision_at_1",
    "precision_at_r",
    "map_at_r",
    "recall_at_1",
    "recall_at_4",
)


def search_oracle(query, gallery, k, exclude_self=False):
    """All float64 differences, and a stable sort."""
    difference = query[:, None].astype(np.float64) - gallery[None].astype(np.float64)
    distances = np.sqrt(np.einsum("qgd,qgd->qg", difference, difference))
    if exclude_self:
        np.fill_diagonal(distances, np.inf)
    order = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(distances, order, axis=1), order


def evaluate_oracle(query, labels, gallery=None, gallery_labels=None):
    one_set = gallery is None
    if one_set:
        gallery, gallery_labels = query, labels
    _, order = search_oracle(query, gallery, len(gallery) - one_set, one_set)
    rows = []
    for label, nearest in zip(labels, order, strict=True):
        hits = [bool(gallery_labels[index] == label) for index in nearest]
        r = sum(hits)
        if r:
            precisions = [sum(hits[: j + 1]) / (j + 1) for j in range(r) if hits[j]]
            rows.append([hits[0], sum(hits[:r]) / r, sum(precisions) / r])
            rows[-1] += [any(hits[:1]), any(hits[:4])]
    means = np.mean(rows, axis=0)
    return {**dict(zip(METRICS, means, strict=True)), "num_queries": len(rows)}


def make_set(kind, size, dim, rng):
    points = rng.standard_normal((size, dim))
    if kind == "offset":
        points = 1000 + 1e-3 * points
    elif kind == "grid":  # ties and duplicates
        points = np.round(0.7 * points)
    elif kind == "collapsed":
        points[:] = 1.0
    elif kind == "two_heaps":  # no origin makes both small
        points *= 1e-3
        points[::2] += 1000
    elif kind == "outlier":
        points[0] *= 1e6
    elif kind == "huge":  # squares overflow in float32
        points = np.maximum(points, 0) * 1e25
    elif kind == "tiny":
        points = points * 1e-30
    return points


KINDS = "plain offset grid collapsed two_heaps outlier huge tiny".split()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equals_the_loop_oracle(kind, dtype):
    rng = np.random.default_rng(2)
    for size, num_gallery, dim, k in ((50, 300, 4, 7), (160, 90, 17, 60)):
        query = make_set(kind, size, dim, rng).astype(dtype)
        gallery = make_set(kind, num_gallery, dim, rng).astype(dtype)
        labels = rng.integers(0, 9, size) * rng.integers(0, 2, size)  # half in class 0
        gallery_labels = rng.integers(0, 9, num_gallery)
        for other, exclude_self in ((gallery, False), (query, True)):
            k = min(k, len(other) - 1)
            distances, indices = search(query, other, k, exclude_self)
            expected = search_oracle(query, other, k, exclude_self)
            np.testing.assert_array_equal(indices, expected[1])
            np.testing.assert_allclose(distances, expected[0], rtol=1e-6)
            again = search(query, other, k, exclude_self, chunk_size=13)
            np.testing.assert_array_equal(distances, again[0])
            np.testing.assert_array_equal(indices, again[1])
        for arguments in ((query, labels), (query, labels, gallery, gallery_labels)):
            result = evaluate(*arguments, metrics=METRICS)
            expected = evaluate_oracle(*arguments)
            assert result.pop("num_skipped") == size - expected["num_queries"]
            assert result == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("normalization", ["lip", "l2", "none"])
def test_matches_the_reference(golden, normalization):
    function = {"lip": lipschitz_normalize, "l2": l2_normalize, "none": tf.identity}
    embeddings = function[normalization](golden["in/metric_emb"])
    labels = golden["in/metric_labels"]
    result = evaluate(embeddings, labels)
    names = ("map_at_r", "precision_at_r", "precision_at_1")
    expected = golden[f"out/metric_{normalization}_bsNone"]
    np.testing.assert_allclose([result[x] for x in names], expected, rtol=2e-7)
    # One class has a single image.
    assert (result["num_queries"], result["num_skipped"]) == (29, 1)


def test_matches_the_reference_with_a_gallery(golden):
    embeddings, labels = golden["in/metric_emb"], golden["in/metric_labels"]
    result = evaluate(embeddings[:12], labels[:12], embeddings[12:], labels[12:])
    names = ("map_at_r", "precision_at_r", "precision_at_1")
    for expected in ("bsNone", "bs4"):
        expected = golden[f"out/metric_none_split12_{expected}"]
        np.testing.assert_allclose([result[x] for x in names], expected, rtol=2e-7)


@pytest.mark.parametrize(
    "hits, map_at_r",
    [
        ([1, 0, 0], 1 / 3),  # (1/1) / 3
        ([1, 0, 1], 5 / 9),  # (1/1 + 2/3) / 3 = 0.5556
        ([0, 0, 1], 1 / 9),  # (1/3) / 3
        ([1, 1, 1], 1.0),
        ([0, 0, 0], 0.0),
    ],
)
def test_by_hand(hits, map_at_r):
    # On a line, nearest first; the hits that are missing from R = 3 are far away.
    labels = [*hits, *[1] * (3 - sum(hits)), 0]
    gallery = np.arange(1.0, len(labels) + 1)[:, None]
    result = evaluate(np.zeros((1, 1)), [1], gallery, labels, metrics=METRICS)
    assert result == pytest.approx(
        {
            "precision_at_1": hits[0],
            "precision_at_r": sum(hits) / 3,
            "map_at_r": map_at_r,
            "recall_at_1": hits[0],
            "recall_at_4": 1.0 if 1 in labels[:4] else 0.0,
            "num_queries": 1,
            "num_skipped": 0,
        }
    )
    assert all(type(result[name]) is float for name in METRICS)
    assert type(result["num_queries"]) is type(result["num_skipped"]) is int


def test_scores_of_each_query_have_the_same_bits_for_any_chunk_size():
    # Classes of 17 to 31: beside a longer row, a shorter one is summed as alone.
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(5), [17, 20, 23, 27, 31])
    centers = rng.standard_normal((5, 3))[labels]
    embeddings = (centers + 0.5 * rng.standard_normal((118, 3))).astype(np.float32)
    expected = score_queries(embeddings, labels)
    for chunk_size in (1, 5, 40):
        scores = score_queries(embeddings, labels, chunk_size=chunk_size)
        for name, values in scores.items():
            np.testing.assert_array_equal(values, expected[name])


def test_far_queries_tie_where_their_float64_differences_do():
    # 1 - 1e-17 and 1 - 2e-17 are both 1 in float64: the lower index comes first.
    for query, scale in ((1.0, 1e-17), (1e10, 1e-7)):
        gallery = scale * np.array([[1.0], [2.0]])
        assert search(np.array([[query]]), gallery, 2)[1].tolist() == [[0, 1]]


def test_the_own_row_is_excluded_by_index():
    # Rows 0 and 2 are equal: each finds the other, never itself; row 1 is far.
    embeddings = np.array([[1.0, 0.0], [9.0, 0.0], [1.0, 0.0]], np.float32)
    distances, indices = search(embeddings, embeddings, 2, exclude_self=True)
    assert indices.tolist() == [[2, 1], [0, 2], [0, 1]]
    assert distances.tolist() == [[0, 8], [8, 8], [0, 8]]
    # The equal row is of another class: a miss, and not skipped as "the own row".
    result = evaluate(embeddings, [0, 0, 1])
    assert result["precision_at_1"] == 0.5  # row 0 finds row 2, row 1 finds row 0
    assert result["num_skipped"] == 1


def test_strangers_of_equal_distance_come_by_index():
    gallery = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]], np.float32)
    _, indices = search(np.zeros((1, 2), np.float32), gallery, 4)
    assert indices.tolist() == [[0, 1, 2, 3]]
    # With the hit among the equally near, its place decides: first or last.
    first = evaluate(np.zeros((1, 2)), [1], gallery, [1, 0, 0, 0])
    last = evaluate(np.zeros((1, 2)), [1], gallery, [0, 0, 0, 1])
    assert (first["precision_at_1"], last["precision_at_1"]) == (1.0, 0.0)


def test_large_classes_do_not_raise_what_others_pay():
    # 6,000 rows, one class of 1,000: a depth of 999 for all would find 6 M neighbours.
    rng = np.random.default_rng(4)
    labels = np.concatenate([np.zeros(1000, int), 1 + np.arange(5000) // 2])
    embeddings = rng.standard_normal((2501, 16))[labels]
    embeddings += 0.1 * rng.standard_normal((6000, 16))
    result = evaluate(embeddings.astype(np.float32), labels)
    assert result["map_at_r"] > 0.9 and result["num_queries"] == 6000


def test_no_graphs_are_traced(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("a graph was made")

    monkeypatch.setattr(tf.Graph, "__init__", refuse)
    rng = np.random.default_rng(5)
    for size in (20, 33, 50):
        evaluate(rng.standard_normal((size, 3)), np.arange(size) // 2, chunk_size=8)


def test_all_skipped_is_an_error():
    with pytest.raises(ValueError, match="all 3 queries are skipped"):
        evaluate(np.eye(3), [0, 1, 2])
    with pytest.raises(ValueError, match="all 2 queries are skipped"):
        evaluate(np.eye(2), [0, 1], np.eye(2), [2, 3])


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"query_embeddings": np.full((4, 2), np.nan)}, ValueError, "in 4 of 4 rows"),
        ({"query_embeddings": [["1", "2"]] * 4}, TypeError, "must be real numbers"),
        ({"query_labels": [0, 0, 1]}, ValueError, "`query_labels` .* 3 labels for 4"),
        (
            {"query_labels": [0, 0.5, 1, 1]},
            TypeError,
            "`query_labels` must be integers",
        ),
        ({"gallery_embeddings": np.zeros((4, 2))}, ValueError, "`gallery_labels` must"),
        ({"gallery_labels": [1]}, TypeError, "`gallery_embeddings` must be"),
        (
            {"gallery_embeddings": np.zeros((1, 3)), "gallery_labels": [1]},
            ValueError,
            r"`gallery_embeddings` must have shape \(n, 2\).*\(1, 3\)",
        ),
        ({"metrics": ["map"]}, ValueError, "map_at_r, recall_at_<k>.*'map'"),
        ({"metrics": ["recall_at_0"]}, ValueError, "Received: 'recall_at_0'"),
        ({"chunk_size": -1}, ValueError, "`chunk_size` must be at least 1"),
    ],
)
def test_evaluate_errors_name_what_is_wrong(change, error, message):
    arguments = {"query_embeddings": np.zeros((4, 2)), "query_labels": [0, 0, 1, 1]}
    with pytest.raises(error, match=message):
        evaluate(**{**arguments, **change})


def test_search_errors_name_what_is_wrong():
    points = np.zeros((4, 2))
    with pytest.raises(ValueError, match="`k` .*at most 4,.* Received: k=5"):
        search(points, points, 5)
    with pytest.raises(ValueError, match="`k` .*at most 3,.* Received: k=4"):
        search(points, points, 4, exclude_self=True)
    with pytest.raises(ValueError, match="`exclude_self` .*4 queries.*gallery of 3"):
        search(points, points[:3], 1, exclude_self=True)
    with pytest.raises(ValueError, match="`k` must be at least 1. Received: k=0"):
        search(points, points, 0)


@pytest.mark.parametrize("exponent", [664, -664, 1020, -1000])
def test_any_float64_magnitude(exponent):
    rng = np.random.default_rng(6)
    # Multiples of 1/1024, which stay exact when they are made tiny.
    points = np.round(rng.standard_normal((40, 3)) * 1024) / 1024
    labels = np.arange(40) % 5
    scaled = np.ldexp(points, exponent)
    _, expected = search(points, points, 9, exclude_self=True)
    distances, indices = search(scaled, scaled, 9, exclude_self=True)
    np.testing.assert_array_equal(indices, expected)
    assert np.isinf(distances).all() if exponent > 0 else not distances.any()
    _, indices = search(scaled[:7], scaled[7:], 9)
    np.testing.assert_array_equal(indices, search(points[:7], points[7:], 9)[1])
    assert evaluate(scaled, labels) == evaluate(points, labels)
    centers = points[:10].reshape(5, 2, 3)
    for factors in (None, centers):
        radius = covering_radius(points, labels, factors)
        far = None if factors is None else np.ldexp(factors, exponent)
        expected = np.ldexp(radius, exponent)
        assert covering_radius(scaled, labels, far) == pytest.approx(expected, abs=0)


def test_covering_radius():
    # Class 0: -1 and 1 around their mean; class 2: one sample; class 1 is absent.
    embeddings = np.array([[-1.0, 0.0], [1.0, 0.0], [3.0, 4.0]], np.float32)
    labels = [0, 0, 2]
    assert covering_radius(embeddings, labels) == 0.5  # (1 + 0) / 2
    # Class 0: 1 is on a center, -1 is 1 from (0, 0). Class 2: ||(3, 4)|| = 5.
    centers = np.zeros((3, 2, 2))
    centers[0, 1] = [1.0, 0.0]
    assert covering_radius(embeddings, labels, centers) == 3.0  # (1 + 5) / 2
    for wrong, message in (
        (centers[:2], "`centers` must .* and labels up to 2"),
        (centers[0], "`centers` must have shape"),
        (np.zeros((3, 1, 3)), r"`centers` must have shape \(n, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            covering_radius(embeddings, labels, wrong)


def test_approximate_index_is_refused_unless_told():
    class Index:
        is_exact, backend = False, "scann"
        embeddings = np.eye(3, dtype="float32")
        labels = np.array([0, 0, 1])

    with pytest.raises(ValueError, match="allow_approximate"):
        evaluate(np.eye(3, dtype="float32"), [0, 0, 1], index=Index())


# ==== What the quick scores cannot tell ====


def test_few_rows_of_many_are_compared_exactly(monkeypatch):
    # A row far out has an error that would let through all others.
    points = np.random.default_rng(7).standard_normal((3000, 8)).astype(np.float32)
    points[17] *= 1e8
    compared = []
    direct = ExactSearch._direct

    def record(self, query, row, column):
        compared.append(len(row))
        return direct(self, query, row, column)

    monkeypatch.setattr(ExactSearch, "_direct", record)
    _, indices = search(points, points, 5, exclude_self=True)
    monkeypatch.undo()
    # Its own row is compared with all.
    assert sum(compared) < 3000 * 8 + 3000
    rows = np.array([0, 17, 2999])
    expected = search_oracle(points[rows], points, 6)[1][:, 1:]
    np.testing.assert_array_equal(indices[rows], expected)


def test_bounds_are_not_below_the_scores():
    rng = np.random.default_rng(8)
    points = rng.standard_normal((500, 40)) * np.exp(3 * rng.standard_normal((500, 1)))
    exact = ExactSearch(points.astype(np.float32))
    query = points[::9].astype(np.float32)
    bounds, bar, error = exact._upper_bounds(query, 4, None)
    moved, _ = exact._moved(exact.gallery)
    x, _ = exact._moved(query)
    true = x @ moved.T - np.square(moved).sum(axis=1) / 2
    reach = bounds >= bar[:, None]
    assert (reach.sum(axis=1) >= 4).all()
    assert (bounds >= true)[reach].all()
    assert (bounds - true <= 2 * error[:, None])[reach].all()


def test_a_collapsed_set_is_searched_in_its_order(monkeypatch):
    # In blocks of queries that are halved until little is held at once.
    monkeypatch.setattr("keras_ccp.retrieval.exact_search._MOST_FOUND", 3000)
    points = np.ones((400, 3), np.float32)
    points[100:, 0] = -0.0
    points[200:, 0] = 0.0
    distances, indices = search(points, points, 50, exclude_self=True)
    expected = search_oracle(points, points, 50, exclude_self=True)
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_array_equal(distances, expected[0])
    labels = np.arange(400) % 7
    result = evaluate(points, labels, metrics=METRICS)
    del result["num_skipped"]
    assert result == pytest.approx(evaluate_oracle(points, labels), rel=1e-12)


@pytest.mark.parametrize("kind", ["sorted", "duplicates", "heaps"])
def test_sets_in_parts_give_what_a_loop_gives(kind):
    rng = np.random.default_rng(3)
    points = rng.standard_normal((900, 5)).astype(np.float32)
    labels = rng.integers(0, 150, 900)
    if kind == "sorted":  # on a line
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
