import math
from itertools import product

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import pair_problem, with_gradients

from keras_ccp import losses
from keras_ccp.losses import mining
from keras_ccp.losses.pairs import class_masks, pairwise_distances

BY_DISTANCE = ["hard", "semi_hard", "easy_positive"]
MINERS = [*BY_DISTANCE, "distance_weighted"]
LOSSES = [
    losses.ContrastiveLoss,
    losses.CosineContrastiveLoss,
    losses.MultiSimilarityLoss,
    losses.TripletLoss,
]


def chosen(mask):
    """Columns that are True, row by row."""
    return [np.flatnonzero(row).tolist() for row in np.asarray(mask)]


def mine(name, labels, x, references, r, exclude_self=False):
    masks = class_masks(labels, references, exclude_self)
    pos_mask, neg_mask = mining.mine_pairs(name, pairwise_distances(x, r), *masks, x, r)
    assert pos_mask.dtype == neg_mask.dtype == tf.bool
    return chosen(pos_mask), chosen(neg_mask)


# --- pytorch-metric-learning 2.9.0: points of the unit circle, L2 distance, float64 ---

ANGLES = np.radians([0.0, 10, 25, 70, 15, 41, 75, 100, 32, 155])
CIRCLE = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)
CIRCLE_LABELS = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])


def mine_circle(name):
    return mine(name, CIRCLE_LABELS, CIRCLE, CIRCLE_LABELS, CIRCLE, exclude_self=True)


def test_hard_matches_batch_hard_miner():
    positives, negatives = mine_circle("hard")
    assert positives == [[3], [3], [3], [0], [7], [7], [4], [4], [9], [8]]
    assert negatives == [[4], [4], [8], [6], [1], [8], [3], [3], [2], [7]]


def test_semi_hard_pairs_match_triplet_margin_miner():
    # The pairs of its triplets, type_of_triplets="semihard" and margin=10.
    positives, negatives = mine_circle("semi_hard")
    assert positives == chosen(class_masks(CIRCLE_LABELS, CIRCLE_LABELS, True)[0])
    assert negatives == [
        *([4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [5, 6, 7, 9], [4, 9], [3, 9]),
        *([0, 1, 3, 9], [0, 1, 2, 8, 9], [0, 1, 2, 3, 8, 9], [], [0, 1, 2, 4]),
    ]


def test_easy_positive_matches_batch_easy_hard_miner():
    # pos_strategy="easy", neg_strategy="semihard". It drops anchor 8, which has no
    # negative beyond its positive; here that positive, 9, stays.
    positives, negatives = mine_circle("easy_positive")
    assert positives == [[1], [0], [1], [2], [5], [4], [7], [6], [9], [8]]
    assert negatives == [[4], [8], [5], [4], [3], [3], [8], [3], [], [2]]


@pytest.mark.parametrize(
    "name, value, gradient",
    [
        # The triplets of the three miners, semi-hard within the same margin, under
        # TripletMarginLoss(0.4) with AvgNonZeroReducer; gradient of points 0 and 6.
        ("hard", 1.38098938618, [[0.101663, -0.064686], [0.120033, 0.01057]]),
        ("semi_hard", 0.22411148962, [[-0.08446, 0.011939], [0.060995, -0.066722]]),
        (
            "easy_positive",
            0.27997588506,
            [[0.005473, -0.125118], [0.350244, -0.085258]],
        ),
    ],
)
def test_mined_triplets_match(name, value, gradient):
    loss = losses.TripletLoss(0.4, mining=name)
    points = tf.constant(CIRCLE)
    problem = CIRCLE_LABELS, points, CIRCLE_LABELS, points
    _, mean, gradients = with_gradients(loss, *problem, exclude_self=True)
    assert float(mean) == pytest.approx(value, rel=1e-9)
    found = gradients[0].numpy()[[0, 6]]
    np.testing.assert_allclose(found, gradient, atol=1e-6)


# --- The definitions as loops ---


def loop_mine(name, distances, pos, neg):
    """Positives and negatives of one anchor."""
    nearest = min(pos, key=distances.__getitem__, default=None)
    if name == "hard":
        pos = [max(pos, key=distances.__getitem__)] if pos else []
    elif pos:
        neg = [k for k in neg if distances[k] > distances[nearest]]
        pos = [nearest] if name == "easy_positive" else pos
    else:
        neg = []
    if name != "semi_hard":
        neg = [min(neg, key=distances.__getitem__)] if neg else []
    return pos, neg


def loop_pairs(name, distances, labels, references, exclude_self):
    """`(anchor, positives, negatives)` of every anchor."""
    for i, row in enumerate(distances):
        others = [j for j in range(len(references)) if not (exclude_self and i == j)]
        pos = [j for j in others if references[j] == labels[i]]
        neg = [j for j in others if references[j] != labels[i]]
        yield i, *loop_mine(name, row, pos, neg)


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("name", BY_DISTANCE)
def test_masks_match_loops(name, in_batch):
    labels, x, references, r = pair_problem()
    if in_batch:
        references, r = labels, x
    distances = [[math.dist(a, b) for b in r] for a in x]
    expected = list(loop_pairs(name, distances, labels, references, in_batch))
    positives, negatives = mine(name, labels, x, references, r, in_batch)
    assert positives == [pos for _, pos, _ in expected]
    assert negatives == [neg for _, _, neg in expected]


def loop_loss(cls, name, values, pairs):
    """The loss with its defaults of distances, or of similarities."""
    if cls is losses.TripletLoss:
        terms = [
            values[i][j] - values[i][k] + 0.1
            for i, pos, neg in pairs
            for j, k in product(pos, neg)
            # Beyond the positive of the triplet, not only the anchor's nearest.
            if name != "semi_hard" or values[i][j] < values[i][k]
        ]
        terms = [term for term in terms if term > 0]
        return sum(terms) / max(1, len(terms))
    pos = [[values[i][j] for j in pos] for i, pos, _ in pairs]
    neg = [[values[i][j] for j in neg] for i, _, neg in pairs]
    if cls is losses.ContrastiveLoss:
        pos = [d for row in pos for d in row if d > 0]
        neg = [0.5 - d for row in neg for d in row if d < 0.5]
        return sum(pos) / max(1, len(pos)) + sum(neg) / max(1, len(neg))
    if cls is losses.CosineContrastiveLoss:
        pos = sum(max(0.0, 1 - 1e-5 - s) for row in pos for s in row)
        return (pos + sum(max(0.0, s - 0.5) for row in neg for s in row)) / len(pairs)
    pos = [math.log1p(sum(math.exp(2 * (0.5 - s)) for s in row)) / 2 for row in pos]
    neg = [math.log1p(sum(math.exp(40 * (s - 0.5)) for s in row)) / 40 for row in neg]
    return (sum(pos) + sum(neg)) / len(pairs)


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("name", BY_DISTANCE)
@pytest.mark.parametrize("cls", LOSSES)
def test_losses_match_loops(cls, name, in_batch):
    labels, x, references, r = pair_problem(seed=1)
    if in_batch:
        references, r = labels, x
    if cls in (losses.ContrastiveLoss, losses.TripletLoss):
        distances = values = [[math.dist(a, b) for b in r] for a in x]
    else:
        norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(r, axis=1)
        values, distances = x @ r.T / norms, -(x @ r.T) / norms
    pairs = list(loop_pairs(name, distances, labels, references, in_batch))
    rows = cls(mining=name).pairs(labels, x, references, r, exclude_self=in_batch)
    expected = loop_loss(cls, name, values, pairs)
    assert expected > 0
    assert np.mean(rows) == pytest.approx(expected, rel=1e-9)


# --- Edges ---


@pytest.mark.parametrize(
    "name, expected",
    [
        # Positives 0-2 at distance 1, 2, 2; negatives 3-6 at 2, 1, 1, 2.
        ("hard", ([[1]], [[4]])),
        ("semi_hard", ([[0, 1, 2]], [[3, 6]])),
        ("easy_positive", ([[0]], [[3]])),
    ],
)
def test_of_equals_the_first_is_chosen(name, expected):
    points = np.array([1.0, 2, -2, 2, 1, -1, -2])[:, None]
    assert mine(name, [0], [[0.0]], [0, 0, 0, 1, 1, 1, 1], points) == expected


def test_triplets_at_equal_distances_are_not_semi_hard():
    # d_ap = 1; d_an = 1 is no farther, 1.25 leaves 1 - 1.25 + .5, 1.5 is at the margin.
    rows = losses.TripletLoss(0.5, mining="semi_hard").pairs(
        [0], [[0.0]], [0, 1, 1, 1], [[1.0], [-1.0], [1.25], [1.5]]
    )
    np.testing.assert_array_equal(rows, [0.25])


@pytest.mark.parametrize("name", MINERS)
def test_missing_sides_stay_empty(name):
    x = np.eye(3)[[0, 0, 1, 1]] + 0.1
    positives, negatives = mine(name, [0, 0, 0, 0], x, [0, 0, 0, 0], x, True)
    assert all(positives) and negatives == [[]] * 4
    positives, negatives = mine(name, [0, 1, 2, 3], x, [0, 1, 2, 3], x, True)
    assert positives == [[]] * 4
    # Without a positive nothing is farther than it.
    assert any(negatives) == (name in ("hard", "distance_weighted"))
    assert mine(name, [0], x[:1], np.zeros([0], int), np.zeros([0, 3])) == ([[]], [[]])


# --- Distance-weighted ---

REFERENCE_DISTANCES = [0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.39, 1.41, 1.9]


def on_the_sphere(distances, dim):
    """Points of the unit sphere at these distances of the first axis."""
    cosines = 1 - np.square(distances) / 2
    points = np.zeros([len(distances), dim])
    points[:, 0], points[:, 1] = cosines, np.sqrt(1 - cosines**2)
    return points


@pytest.mark.parametrize("dim", [2, 3, 8])
def test_negatives_are_drawn_by_distance(dim):
    weights = []
    for d in REFERENCE_DISTANCES:
        d = max(d, 0.5)
        q = d ** (dim - 2) * (1 - d**2 / 4) ** ((dim - 3) / 2)
        weights.append(1 / q if d < 1.4 else 0.0)
    # One positive: reference 0 of class 0, at distance .1; its weight counts for none.
    weights[0] = 0.0
    expected = np.array(weights) / sum(weights)

    num_draws = 20_000
    x = np.tile(np.eye(dim)[0], (num_draws, 1))
    r = on_the_sphere(REFERENCE_DISTANCES, dim) * 3.0  # scaled to unit length inside
    labels, references = np.zeros(num_draws, int), np.arange(len(r))
    masks = class_masks(labels, references)
    distances = pairwise_distances(x, r)
    pos_mask, neg_mask = mining.mine_pairs("distance_weighted", distances, *masks, x, r)
    np.testing.assert_array_equal(pos_mask, masks[0])
    np.testing.assert_array_equal(np.sum(neg_mask, axis=1), 1)
    frequencies = np.mean(neg_mask, axis=0)
    # Four standard deviations of a share of independent draws; exactly 0 where it is.
    bound = 4 * np.sqrt(expected * (1 - expected) / num_draws)
    assert (np.abs(frequencies - expected) <= bound).all()


def test_draws_follow_the_seed():
    labels, x, references, r = pair_problem()
    x, r = np.abs(x), np.abs(r)  # all in one octant: near enough to be drawn

    def draw(seed):
        keras.utils.set_random_seed(seed)
        return [mine("distance_weighted", labels, x, references, r) for _ in range(2)]

    first, second = draw(1)
    assert first != second
    assert draw(1) == [first, second]
    assert draw(2) != [first, second]


def test_the_choice_is_constant_for_the_gradient():
    # One negative near enough: with it alone the loss is that without mining.
    x, r = tf.constant([[1.0, 0.0]]), tf.constant([[0.9, 0.1], [0.8, 0.6], [-1.0, 0.0]])
    mined = losses.MultiSimilarityLoss(mining="distance_weighted")
    *_, found = with_gradients(mined, [0], x, [0, 1, 2], r)
    *_, expected = with_gradients(losses.MultiSimilarityLoss(), [0], x, [0, 1], r[:2])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1][:2], expected[1], rtol=1e-6)
    np.testing.assert_array_equal(found[1][2:], 0.0)


# --- As an argument ---


@pytest.mark.parametrize(
    "loss",
    [
        losses.ContrastiveLoss(mining="hard"),
        losses.CosineContrastiveLoss(mining="semi_hard"),
        losses.TripletLoss(mining="semi_hard"),
        losses.TripletLoss(mining="easy_positive"),
        losses.MultiSimilarityLoss(mining="distance_weighted"),
    ],
)
def test_compiled_equals_eager(loss):
    labels, x, references, r = pair_problem()
    if loss.mining == "distance_weighted":  # one candidate each: no chance in it
        references, r = references[:2], np.abs(r[:2])
        labels = np.where(labels == 1, 1, 5)
    x, r = x.astype("float32"), r.astype("float32")
    rows = tf.function(loss.pairs, jit_compile=True)(labels, x, references, r)
    expected = loss.pairs(labels, x, references, r)
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", LOSSES)
def test_each_miner_is_used(cls):
    labels, x, references, r = pair_problem()
    problem = labels, 0.2 * x, references, 0.2 * r  # negatives within the margins
    rows = cls().pairs(*problem)
    for name in BY_DISTANCE:
        assert np.abs(cls(mining=name).pairs(*problem) - rows).max() > 1e-3
