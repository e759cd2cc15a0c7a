import numpy as np
import pytest
import tensorflow as tf

from keras_ccp.k_center import k_center_greedy
from keras_ccp.layers import l2_normalize


def loop_oracle(candidates, covered, num_centers, mask):
    """The same rule with Python loops over float64 differences."""
    picks = []
    for points, known, is_real in zip(candidates, covered, mask, strict=True):
        known = [point.astype(np.float64) for point in known]
        real, chosen = list(np.flatnonzero(is_real)), []
        for turn in range(num_centers):
            best, farthest = None, -1.0
            for index in real:
                point = points[index].astype(np.float64)
                nearest = min([((point - x) ** 2).sum() for x in known], default=np.inf)
                if index not in chosen[: len(real)] and nearest > farthest:
                    best, farthest = index, nearest
            if best is None:  # all are used: from the first again
                best = chosen[turn % len(real)]
            chosen.append(best)
            known.append(points[best].astype(np.float64))
        picks.append(chosen)
    return np.array(picks)


@pytest.mark.parametrize("kind", ["plain", "offset", "grid", "huge", "tiny", "mixed"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equals_the_loop_oracle(kind, dtype):
    rng = np.random.default_rng(1)
    for _ in range(8):
        num_classes, pool_size, dim = rng.integers(1, (30, 9, 20))
        num_covered, num_centers = rng.integers(0, 5), int(rng.integers(1, 11))
        points = rng.standard_normal((num_classes, pool_size + num_covered, dim))
        if kind == "offset":
            points = 1000 + 1e-3 * points
        elif kind == "grid":  # ties and duplicates
            points = np.round(points)
        elif kind in ("huge", "tiny"):  # squares overflow or vanish in float32
            points = points * (1e25 if kind == "huge" else 1e-25)
        elif kind == "mixed":  # a spread that the expanded form cannot resolve
            points[:, ::2] += 1e5
        points = points.astype(dtype)
        candidates, covered = points[:, :pool_size], points[:, pool_size:]
        mask = rng.random((num_classes, pool_size)) < 0.7
        mask[:, rng.integers(pool_size)] = True
        picks = k_center_greedy(candidates, covered, num_centers, mask)
        expected = loop_oracle(candidates, covered, num_centers, mask)
        np.testing.assert_array_equal(picks, expected)


@pytest.mark.parametrize("case", ["K4_norm0", "K4_norm1", "K4_zeroinit"])
def test_matches_the_reference(golden, case):
    points, covered = golden["in/kc_points"], golden["in/kc_init"]
    if case == "K4_zeroinit":
        covered = np.zeros_like(covered)
    seen = (points, covered)
    if case == "K4_norm1":  # picks on normalised copies
        seen = tuple(l2_normalize(x).numpy() for x in seen)
    picks = k_center_greedy(*seen, 4)
    chosen = np.take_along_axis(points, picks[:, :, None], axis=1)
    # The reference lists the first pick of every class, then the second, ...
    chosen = chosen.transpose(1, 0, 2).reshape(-1, points.shape[2])
    np.testing.assert_array_equal(chosen, golden[f"out/kc_{case}"])


def test_duplicates_are_used_once_each(golden):
    # Fewer distinct values than picks: the reference repeats rows here, we do not.
    picks = k_center_greedy(golden["in/kc_dup_points"], golden["in/kc_dup_init"], 3)
    assert all(len(set(row)) == 3 for row in picks.tolist())


def test_by_hand():
    # On a line, 0 covered: 9 is farthest; then 4 (4 from 0, 5 from 9), not 8 (1).
    candidates = np.array([[[8.0], [4.0], [9.0], [-1.0]]], np.float32)
    covered = np.zeros((1, 1, 1), np.float32)
    assert k_center_greedy(candidates, covered, 3).tolist() == [[2, 1, 0]]


def test_used_up_candidates_repeat_in_order():
    candidates = np.array([[[1.0], [3.0], [7.0]], [[1.0], [3.0], [7.0]]], np.float32)
    mask = np.array([[True, True, False], [False, True, False]])
    picks = k_center_greedy(candidates, np.zeros((2, 1, 1), np.float32), 5, mask)
    assert picks.tolist() == [[1, 0, 1, 0, 1], [1, 1, 1, 1, 1]]


def test_nothing_covered_starts_with_the_first_real_candidate():
    candidates = np.array([[[5.0], [0.0], [1.0], [9.0]]], np.float32)
    covered = np.empty((1, 0, 1), np.float32)
    mask = np.array([[False, True, True, True]])
    assert k_center_greedy(candidates, covered, 3, mask).tolist() == [[1, 3, 2]]


def test_tensors_and_many_classes():
    rng = np.random.default_rng(0)
    candidates = rng.standard_normal((3000, 7, 16), np.float32)  # several chunks
    covered = rng.standard_normal((3000, 4, 16), np.float32)
    picks = k_center_greedy(tf.constant(candidates), tf.constant(covered), 4)
    mask = np.ones((3000, 7), bool)
    np.testing.assert_array_equal(
        picks[::97], loop_oracle(candidates[::97], covered[::97], 4, mask[::97])
    )
    assert picks.shape == (3000, 4) and picks.dtype == np.int64


@pytest.mark.parametrize(
    "change, message",
    [
        ({"candidates": np.zeros((2, 3))}, r"must go together.*shapes \(\(2, 3\),"),
        ({"covered": np.zeros((2, 1, 5))}, "must go together"),
        ({"covered": np.zeros((3, 1, 4))}, "must go together"),
        ({"num_centers": 0}, "`num_centers` must be at least 1.*num_centers=0"),
        ({"mask": np.ones((2, 4), bool)}, "must go together"),
        ({"mask": np.ones((2, 3))}, "a mask of float64"),
        ({"mask": np.array([[True] * 3, [False] * 3])}, "candidate in every class"),
        ({"candidates": np.zeros((2, 0, 4))}, "candidate in every class"),
        (
            {"candidates": np.where(np.arange(24).reshape(2, 3, 4) == 20, np.nan, 0.0)},
            "`candidates` must be finite.*in 1 of 2 classes, the first at 1",
        ),
        ({"covered": np.full((2, 1, 4), np.inf)}, "`covered` must be finite.*2 of 2"),
    ],
)
def test_errors_name_what_is_wrong(change, message):
    arguments = {
        "candidates": np.zeros((2, 3, 4)),
        "covered": np.zeros((2, 1, 4)),
        "num_centers": 1,
    }
    with pytest.raises(ValueError, match=message):
        k_center_greedy(**{**arguments, **change})


@pytest.mark.parametrize("padding", [np.nan, np.inf, 1e30])
def test_padding_may_hold_anything(padding):
    rng = np.random.default_rng(3)
    candidates = 100 + rng.standard_normal((20, 6, 5)).astype(np.float32)
    covered = candidates[:, :2] + 1
    mask = rng.random((20, 6)) < 0.6
    mask[:, 4] = True
    expected = loop_oracle(candidates, covered, 6, mask)
    candidates[~mask] = padding
    picks = k_center_greedy(candidates, covered, 6, mask)
    np.testing.assert_array_equal(picks, expected)
    candidates[7, 4, 0] = np.nan
    with pytest.raises(ValueError, match="in 1 of 20 classes, the first at 7"):
        k_center_greedy(candidates, covered, 6, mask)


@pytest.mark.parametrize("exponent", [664, -664, 1020, -1000])
def test_any_float64_magnitude(exponent):
    rng = np.random.default_rng(4)
    candidates = rng.standard_normal((9, 8, 5))
    covered = rng.standard_normal((9, 2, 5))
    # Multiples of 1/1024, which stay exact when they are made tiny.
    candidates, covered = (np.round(x * 1024) / 1024 for x in (candidates, covered))
    expected = k_center_greedy(candidates, covered, 4)
    # One class stays as it is: each has its own scale.
    powers = np.full((9, 1, 1), exponent)
    powers[3] = 0
    picks = k_center_greedy(np.ldexp(candidates, powers), np.ldexp(covered, powers), 4)
    np.testing.assert_array_equal(picks, expected)
