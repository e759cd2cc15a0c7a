import math
from itertools import product

import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import losses
from keras_ccp.layers import l2_normalize, lipschitz_normalize

NORMALIZE = {"lip": lipschitz_normalize, "l2": l2_normalize}
ALL = ["contrastive", "cosine_contrastive", "multi_similarity", "triplet"]

# --- The paper's own implementation ---


GOLDEN_LOSSES = {
    "C1_{}": losses.CosineContrastiveLoss(0.5, similarity="dot"),
    "C2_{}_m0_0.5": losses.ContrastiveLoss(0.0, 0.5),
    "C2_{}_m0.2858_0.513": losses.ContrastiveLoss(0.2858, 0.513),
    "C2_{}_m0_1.2": losses.ContrastiveLoss(0.0, 1.2),
    "MS_{}_a2_b40_l0.5": losses.MultiSimilarityLoss(2, 40, 0.5, similarity="dot"),
    "MS_{}_a2_b50_l0.5": losses.MultiSimilarityLoss(2, 50, 0.5, similarity="dot"),
    "Triplet_{}_m0.05": losses.TripletLoss(0.05),
    "Triplet_{}_m0.2": losses.TripletLoss(0.2),
}


def assert_golden(golden, case, value, gradients):
    np.testing.assert_allclose(value, golden[f"out/{case}/loss"], rtol=1e-5, atol=1e-5)
    for side, gradient in zip(("emb", "proxies"), gradients, strict=False):
        expected = golden[f"out/{case}/grad_{side}"]
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", NORMALIZE)
@pytest.mark.parametrize("form", GOLDEN_LOSSES)
def test_matches_the_reference_in_batch(golden, form, norm):
    embeddings = tf.constant(golden["in/emb"])
    with tf.GradientTape() as tape:
        tape.watch(embeddings)
        value = GOLDEN_LOSSES[form](golden["in/labels"], NORMALIZE[norm](embeddings))
    gradients = [tape.gradient(value, embeddings)]
    assert_golden(golden, f"{form.format(norm)}_pair", value, gradients)


@pytest.mark.parametrize("per_class", [1, 2])
@pytest.mark.parametrize("norm", NORMALIZE)
@pytest.mark.parametrize("form", GOLDEN_LOSSES)
def test_matches_the_reference_against_proxies(golden, form, norm, per_class):
    embeddings = tf.constant(golden["in/emb"])
    proxies = tf.constant(golden[f"in/proxies_p{per_class}"])
    with tf.GradientTape() as tape:
        tape.watch((embeddings, proxies))
        rows = GOLDEN_LOSSES[form].pairs(
            golden["in/labels"],
            NORMALIZE[norm](embeddings),
            golden[f"in/proxy_labels_p{per_class}"],
            NORMALIZE[norm](proxies),
        )
        value = tf.reduce_mean(rows)
    case = f"{form.format(norm)}_proxy_p{per_class}"
    if form.startswith("Triplet"):
        case += "_sampleanchor"
    assert_golden(golden, case, value, tape.gradient(value, (embeddings, proxies)))


@pytest.mark.parametrize("weight", [0, 0.1])
@pytest.mark.parametrize(
    "name, loss",
    [
        ("C1", losses.CosineContrastiveLoss(0.5, similarity="dot")),
        ("C2", losses.ContrastiveLoss(0.0, 0.5)),
        ("MS", losses.MultiSimilarityLoss(2, 50, 0.5, similarity="dot")),
        ("Triplet", losses.TripletLoss(0.05)),
    ],
)
def test_matches_the_reference_step(golden, name, loss, weight):
    labels = golden["in/ccp/labels"]
    embeddings = tf.constant(golden["in/ccp/emb"])
    proxies = tf.constant(golden["in/ccp/proxies"])
    with tf.GradientTape() as tape:
        tape.watch((embeddings, proxies))
        near = lipschitz_normalize(embeddings)
        rows = loss.pairs(
            labels, near, golden["in/ccp/proxy_labels"], lipschitz_normalize(proxies)
        )
        value = tf.reduce_mean(rows) + weight * loss(labels, near)
    gradients = tape.gradient(value, (embeddings, proxies))
    assert_golden(golden, f"CCP_{name}_pair{weight}_proxy1", value, gradients)


# --- The formulas as loops ---


def loop_pairs(labels, references, exclude_self):
    for i, j in product(range(len(labels)), range(len(references))):
        if not (exclude_self and i == j):
            yield i, j, labels[i] == references[j]


def loop_contrastive(x, labels, r, references, exclude_self):
    pos, neg = [0.0], [0.0]
    for i, j, same in loop_pairs(labels, references, exclude_self):
        d = math.dist(x[i], r[j])
        (pos if same else neg).append(max(0.0, d - 0.2 if same else 0.9 - d))
    return sum(sum(t) / max(1, np.count_nonzero(t)) for t in (pos, neg))


def cosine(a, b):
    return a @ b / math.sqrt((a @ a) * (b @ b))


def loop_cosine_contrastive(x, labels, r, references, exclude_self):
    total = 0.0
    for i, j, same in loop_pairs(labels, references, exclude_self):
        s = cosine(x[i], r[j])
        total += max(0.0, 1 - s - 1e-5 if same else s - 0.3)
    return total / len(x)


def loop_multi_similarity(x, labels, r, references, exclude_self):
    pos, neg = np.ones(len(x)), np.ones(len(x))
    for i, j, same in loop_pairs(labels, references, exclude_self):
        s = cosine(x[i], r[j])
        if same:
            pos[i] += math.exp(-2 * (s - 0.4))
        else:
            neg[i] += math.exp(30 * (s - 0.4))
    return np.mean(np.log(pos) / 2 + np.log(neg) / 30)


def loop_triplet(x, labels, r, references, exclude_self):
    terms = [0.0]
    for i, j, same in loop_pairs(labels, references, exclude_self):
        for k in range(len(r)):
            if same and references[k] != labels[i]:
                terms.append(math.dist(x[i], r[j]) - math.dist(x[i], r[k]) + 0.3)
    active = [term for term in terms if term > 0]
    return sum(active) / max(1, len(active))


LOOPS = {
    "contrastive": (losses.ContrastiveLoss(0.2, 0.9), loop_contrastive),
    "cosine_contrastive": (losses.CosineContrastiveLoss(0.3), loop_cosine_contrastive),
    "multi_similarity": (losses.MultiSimilarityLoss(2, 30, 0.4), loop_multi_similarity),
    "triplet": (losses.TripletLoss(0.3), loop_triplet),
}


def random_problem(seed=0):
    """12 samples of classes 0-4 (one alone), 9 references of 0-5: 1, 3, 0, 2, 1, 2."""
    rng = np.random.default_rng(seed)
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4])
    references = np.array([5, 1, 3, 1, 0, 5, 3, 4, 1])
    return rng.normal(size=(12, 3)), labels, rng.normal(size=(9, 3)), references


@pytest.mark.parametrize("name", ALL)
def test_matches_loops(name):
    loss, loop = LOOPS[name]
    x, labels, r, references = random_problem()
    rows = loss.pairs(labels, x, references, r)
    assert rows.shape == (12,) and rows.dtype == tf.float64
    assert np.mean(rows) == pytest.approx(loop(x, labels, r, references, False))
    rows = loss.pairs(labels, x, labels, x, exclude_self=True)
    assert np.mean(rows) == pytest.approx(loop(x, labels, x, labels, True))
    rows = loss.pairs(labels, x, labels, x)
    assert np.mean(rows) == pytest.approx(loop(x, labels, x, labels, False))


@pytest.mark.parametrize("name", ALL)
def test_gradient_matches_finite_differences(name):
    loss, loop = LOOPS[name]
    x, labels, r, references = random_problem(seed=1)
    tensors = tf.constant(x), tf.constant(r)
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        value = tf.reduce_mean(loss.pairs(labels, tensors[0], references, tensors[1]))
    gradients = tape.gradient(value, tensors)
    for array, gradient in zip((x, r), gradients, strict=True):
        for index in np.ndindex(array.shape):
            kept, values = array[index], []
            for step in (1e-6, -1e-6):
                array[index] = kept + step
                values.append(loop(x, labels, r, references, False))
            array[index] = kept
            slope = (values[0] - values[1]) / 2e-6
            assert gradient[index].numpy() == pytest.approx(slope, abs=1e-6)


# --- Closed forms ---


def in_batch(loss, labels, embeddings):
    """Value and gradient of the in-batch loss; both must be finite."""
    embeddings = tf.constant(embeddings, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(embeddings)
        value = loss(tf.constant(labels), embeddings)
    gradient = tape.gradient(value, embeddings).numpy()
    assert np.isfinite(value) and np.isfinite(gradient).all()
    return float(value), gradient


EAST, NORTH, WEST = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]
POSITIVE = math.log1p(math.exp(-1)) / 2  # MS, one positive at s = 1: alpha (.5 - 1)


@pytest.mark.parametrize(
    "name, expected",
    [
        # Classes collapsed on opposite points: d_ap = 0, d_an = 2, s_an = -1.
        ("contrastive", 0.0),
        ("cosine_contrastive", 0.0),
        # Negatives: log(1 + 2 e^(40 (-1 - .5))) / 40 is 0 to 25 digits.
        ("multi_similarity", POSITIVE),
        ("triplet", 0.0),
    ],
)
def test_perfect_batch(name, expected):
    value, _ = in_batch(losses.get(name), [0, 0, 1, 1], [EAST, EAST, WEST, WEST])
    assert value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "name, expected",
    [
        # A class is spread over both ends, both classes alike: each sample has one
        # positive at d = 2, s = -1, one negative at d = 0, s = 1, one at d = 2, s = -1.
        # mean(2 - 0) + mean(.5 - 0)
        ("contrastive", 2.5),
        # (1 + 1 - 1e-5) + (1 - .5)
        ("cosine_contrastive", 2.49999),
        # log(1 + e^3) / 2 + log(1 + e^20 + e^-60) / 40
        (
            "multi_similarity",
            math.log1p(math.exp(3)) / 2 + math.log1p(math.exp(20)) / 40,
        ),
        # Two triplets a sample: 2 - 0 + .1 and 2 - 2 + .1; mean 1.1
        ("triplet", 1.1),
    ],
)
def test_worst_batch(name, expected):
    value, _ = in_batch(losses.get(name), [0, 0, 1, 1], [EAST, WEST, EAST, WEST])
    assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "name, expected",
    [
        # No positives. Negatives: d = sqrt(2), s = 0, far enough for everyone but MS.
        ("contrastive", 0.0),
        ("cosine_contrastive", 0.0),
        ("multi_similarity", math.log1p(math.exp(-20)) / 40),
        ("triplet", 0.0),
    ],
)
def test_one_sample_a_class(name, expected):
    value, _ = in_batch(losses.get(name), [0, 1], [EAST, NORTH])
    assert value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "name, expected",
    [
        # Every distance is 0, every similarity 1. Positives cost nothing but in MS.
        ("contrastive", 0.5),
        # Two negatives a sample.
        ("cosine_contrastive", 2 * 0.5),
        ("multi_similarity", POSITIVE + math.log1p(2 * math.exp(20)) / 40),
        ("triplet", 0.1),
    ],
)
@pytest.mark.parametrize("point", [EAST, [0.3, 0.7], [3e3, -7e3]])
def test_identical_points(name, expected, point):
    value, gradient = in_batch(losses.get(name), [0, 0, 1, 1], [point] * 4)
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-6)


@pytest.mark.parametrize(
    "name, expected",
    [
        # No negatives; d = sqrt(2), s = 0.
        ("contrastive", math.sqrt(2)),
        ("cosine_contrastive", 0.99999),
        ("multi_similarity", math.log1p(math.e) / 2),
        ("triplet", 0.0),
    ],
)
def test_one_class(name, expected):
    value, _ = in_batch(losses.get(name), [7, 7], [EAST, NORTH])
    assert value == pytest.approx(expected, rel=1e-6)


def test_triplet_ties_do_not_count():
    # d_ap = d_an = 1: without a margin that is not above 0. Last triplet: 1 - .5.
    rows = losses.TripletLoss(0.0).pairs(
        [0], [[0.0]], [0, 1, 1, 1], [[1.0], [-1.0], [1.0], [0.5]]
    )
    np.testing.assert_allclose(rows, [0.5])
