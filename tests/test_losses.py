"""The formulas: golden values, loops in float64, closed forms."""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import tensorflow as tf
from conftest import pair_problem, with_gradients

from keras_ccp import losses
from keras_ccp.layers import l2_normalize, lipschitz_normalize
from keras_ccp.losses import ProxyAnchorLoss, ProxyNCALoss, SoftTripleLoss

# ==== The paper's own implementation ====

NORMALIZE = {"lip": lipschitz_normalize, "l2": l2_normalize}
GOLDEN_PAIRS = {
    "C1_{}": losses.CosineContrastiveLoss(0.5, similarity="dot"),
    "C2_{}_m0_0.5": losses.ContrastiveLoss(0.0, 0.5),
    "C2_{}_m0.2858_0.513": losses.ContrastiveLoss(0.2858, 0.513),
    "C2_{}_m0_1.2": losses.ContrastiveLoss(0.0, 1.2),
    "MS_{}_a2_b40_l0.5": losses.MultiSimilarityLoss(2, 40, 0.5, similarity="dot"),
    "MS_{}_a2_b50_l0.5": losses.MultiSimilarityLoss(2, 50, 0.5, similarity="dot"),
    "Triplet_{}_m0.05": losses.TripletLoss(0.05),
    "Triplet_{}_m0.2": losses.TripletLoss(0.2),
}
GOLDEN_PROXIES = {
    "ProxyAnchor_{}_d0.1_a32": ProxyAnchorLoss(0.1, 32, similarity="dot"),
    # Recorded as a softmax of cosine / 0.11: a squared distance has twice the cosine.
    "ProxyNCA_{}_t0.11": ProxyNCALoss(0.22, similarity="dot"),
}
AGAINST_PROXIES = [
    *((f"{form}_proxy_p", loss) for form, loss in GOLDEN_PAIRS.items()),
    *((f"{form}_p", loss) for form, loss in GOLDEN_PROXIES.items()),
]


def assert_golden(golden, case, value, gradients):
    np.testing.assert_allclose(value, golden[f"out/{case}/loss"], rtol=1e-5, atol=1e-5)
    for side, gradient in zip(("emb", "proxies"), gradients, strict=False):
        expected = golden[f"out/{case}/grad_{side}"]
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", NORMALIZE)
@pytest.mark.parametrize("form", GOLDEN_PAIRS)
def test_matches_the_reference_in_batch(golden, form, norm):
    embeddings = tf.constant(golden["in/emb"])
    with tf.GradientTape() as tape:
        tape.watch(embeddings)
        value = GOLDEN_PAIRS[form](golden["in/labels"], NORMALIZE[norm](embeddings))
    gradients = [tape.gradient(value, embeddings)]
    assert_golden(golden, f"{form.format(norm)}_pair", value, gradients)


def check_against_proxies(golden, case, loss, normalize, per_class):
    embeddings = tf.constant(golden["in/emb"])
    proxies = tf.constant(golden[f"in/proxies_p{per_class}"])
    with tf.GradientTape() as tape:
        tape.watch((embeddings, proxies))
        rows = loss.pairs(
            golden["in/labels"],
            normalize(embeddings),
            golden[f"in/proxy_labels_p{per_class}"],
            normalize(proxies),
        )
        value = tf.reduce_mean(rows)
    case += f"{per_class}_sampleanchor" if "Triplet" in case else str(per_class)
    assert_golden(golden, case, value, tape.gradient(value, (embeddings, proxies)))


@pytest.mark.parametrize("per_class", [1, 2])
@pytest.mark.parametrize("norm", NORMALIZE)
@pytest.mark.parametrize("form, loss", AGAINST_PROXIES)
def test_matches_the_reference_against_proxies(golden, form, loss, norm, per_class):
    case = form.format(norm)
    check_against_proxies(golden, case, loss, NORMALIZE[norm], per_class)


@pytest.mark.parametrize(
    "case, loss",
    [
        ("ProxyAnchor_l2_d0.1_a32_p", ProxyAnchorLoss(0.1, 32)),
        ("ProxyNCA_l2_t0.11_p", ProxyNCALoss(0.22)),
    ],
)
def test_cosine_normalises_for_itself(golden, case, loss):
    check_against_proxies(golden, case, loss, tf.identity, 2)


# ==== The formulas as loops ====


def loop_pairs(labels, references, exclude_self):
    for i, j in product(range(len(labels)), range(len(references))):
        if not (exclude_self and i == j):
            yield i, j, labels[i] == references[j]


def cosine(a, b):
    return a @ b / math.sqrt((a @ a) * (b @ b))


def loop_contrastive(labels, x, references, r, exclude_self):
    pos, neg = [0.0], [0.0]
    for i, j, same in loop_pairs(labels, references, exclude_self):
        d = math.dist(x[i], r[j])
        (pos if same else neg).append(max(0.0, d - 0.2 if same else 0.9 - d))
    return sum(sum(t) / max(1, np.count_nonzero(t)) for t in (pos, neg))


def loop_cosine_contrastive(labels, x, references, r, exclude_self):
    total = 0.0
    for i, j, same in loop_pairs(labels, references, exclude_self):
        s = cosine(x[i], r[j])
        total += max(0.0, 1 - s - 1e-5 if same else s - 0.3)
    return total / len(x)


def loop_multi_similarity(labels, x, references, r, exclude_self):
    pos, neg = np.ones(len(x)), np.ones(len(x))
    for i, j, same in loop_pairs(labels, references, exclude_self):
        s = cosine(x[i], r[j])
        if same:
            pos[i] += math.exp(-2 * (s - 0.4))
        else:
            neg[i] += math.exp(30 * (s - 0.4))
    return np.mean(np.log(pos) / 2 + np.log(neg) / 30)


def loop_triplet(labels, x, references, r, exclude_self):
    terms = [0.0]
    for i, j, same in loop_pairs(labels, references, exclude_self):
        for k in range(len(r)):
            if same and references[k] != labels[i]:
                terms.append(math.dist(x[i], r[j]) - math.dist(x[i], r[k]) + 0.3)
    active = [term for term in terms if term > 0]
    return sum(active) / max(1, len(active))


def loop_proxy_anchor(labels, x, references, r, exclude_self):
    sums = {}  # of a proxy, positives or negatives
    for i, j, same in loop_pairs(labels, references, exclude_self):
        s = cosine(x[i], r[j])
        term = math.exp(-8 * (s - 0.2) if same else 8 * (s + 0.2))
        sums[same, j] = sums.get((same, j), 1.0) + term
    sides = [[sums[key] for key in sums if key[0] == same] for same in (True, False)]
    return sum(np.mean(np.log(side or [1.0])) for side in sides)


def loop_proxy_nca(labels, x, references, r, exclude_self):
    own, everyone = np.zeros(len(x)), np.zeros(len(x))
    for i, j, same in loop_pairs(labels, references, exclude_self):
        near = math.exp(-(2 - 2 * cosine(x[i], r[j])) / 0.5)
        everyone[i] += near
        own[i] += near * same
    shares = np.where(own > 0, own, 1.0) / np.where(own > 0, everyone, 1.0)
    return -np.mean(np.log(shares))


def to_class(similarities):
    weights = np.exp(np.array(similarities) / 0.3)
    return weights @ similarities / weights.sum()


def loop_soft_triple(similarity, labels, x, references, r, exclude_self):
    total, classes = 0.0, set(references)
    for i in range(len(x)):
        here = {}
        for _, j, _ in filter(
            lambda pair: pair[0] == i, loop_pairs(labels, references, exclude_self)
        ):
            here.setdefault(references[j], []).append(similarity(x[i], r[j]))
        shifted = {
            c: math.exp(7 * (to_class(s) - 0.05 * (c == labels[i])))
            for c, s in here.items()
        }
        if labels[i] in shifted:
            total -= math.log(shifted[labels[i]] / sum(shifted.values()))
    spread = 0.0
    for c in classes:
        own = [r[j] for j in range(len(r)) if references[j] == c]
        if similarity is cosine:
            own = [v / math.sqrt(v @ v) for v in own]
        for s, t in product(range(len(own)), repeat=2):
            # sqrt(2 - 2 w.w') for unit vectors; each pair comes twice
            share = 2 * len(classes) * len(own) * (len(own) - 1)
            spread += math.dist(own[s], own[t]) / share if s != t else 0.0
    return total / len(x) + 0.6 * spread


LOOPS = {
    "contrastive": (losses.ContrastiveLoss(0.2, 0.9), loop_contrastive),
    "cosine_contrastive": (losses.CosineContrastiveLoss(0.3), loop_cosine_contrastive),
    "multi_similarity": (losses.MultiSimilarityLoss(2, 30, 0.4), loop_multi_similarity),
    "triplet": (losses.TripletLoss(0.3), loop_triplet),
    "proxy_anchor": (ProxyAnchorLoss(0.2, 8), loop_proxy_anchor),
    "proxy_nca": (ProxyNCALoss(0.5), loop_proxy_nca),
    **{
        name: (SoftTripleLoss(7, 0.3, 0.6, 0.05, name[12:] or "cosine"), partial(
            loop_soft_triple, similarity
        ))
        for name, similarity in (("soft_triple", cosine), ("soft_triple-dot", np.dot))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_matches_loops(name):
    loss, loop = LOOPS[name]
    labels, x, references, r = pair_problem()
    rows = loss.pairs(labels, x, references, r)
    assert rows.shape == (12,) and rows.dtype == tf.float64
    assert np.mean(rows) == pytest.approx(loop(labels, x, references, r, False))
    for exclude_self in (True, False):
        rows = loss.pairs(labels, x, labels, x, exclude_self=exclude_self)
        expected = loop(labels, x, labels, x, exclude_self)
        assert np.mean(rows) == pytest.approx(expected)


@pytest.mark.parametrize("name", LOOPS)
def test_gradient_matches_finite_differences(name):
    loss, loop = LOOPS[name]
    labels, x, references, r = pair_problem(seed=1)
    *_, gradients = with_gradients(loss, labels, x, references, r)
    for array, gradient in zip((x, r), gradients, strict=True):
        for index in np.ndindex(array.shape):
            kept, values = array[index], []
            for step in (1e-6, -1e-6):
                array[index] = kept + step
                values.append(loop(labels, x, references, r, False))
            array[index] = kept
            slope = (values[0] - values[1]) / 2e-6
            assert gradient[index].numpy() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("loss", [ProxyAnchorLoss(), ProxyNCALoss(), SoftTripleLoss()])
def test_references_come_in_any_order_and_under_any_numbers(loss):
    labels, x, references, r = pair_problem()
    expected = loss.pairs(labels, x, references, r)
    order = np.random.default_rng(3).permutation(9)
    rows = loss.pairs(labels, x, references[order], r[order])
    np.testing.assert_allclose(rows, expected)
    numbers = np.array([2**31 - 1, 0, 7, -9, 11317, 6])  # the first is the last int32
    rows = loss.pairs(numbers[labels][:, None], x, numbers[references], r)
    np.testing.assert_allclose(rows, expected)


# ==== Closed forms ====

EAST, NORTH, WEST = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]
TWICE = [0, 0, 1, 1]
POSITIVE = math.log1p(math.exp(-1)) / 2  # MS, one positive at s = 1: alpha (.5 - 1)


ARC_MARGIN = math.radians(28.6)
COS_MARGIN = math.cos(ARC_MARGIN)


def softplus(z):
    return max(z, 0.0) + math.log1p(math.exp(-abs(z)))


IDENTICAL = {
    # Every distance is 0, every similarity 1. Positives cost nothing but in MS.
    "contrastive": 0.5,
    "cosine_contrastive": 2 * 0.5,  # two negatives a sample
    "multi_similarity": POSITIVE + math.log1p(2 * math.exp(20)) / 40,
    "triplet": 0.1,
    # One positive a proxy at s = 1, two negatives.
    "proxy_anchor": math.log1p(math.exp(-28.8)) + math.log1p(2 * math.exp(35.2)),
    "proxy_nca": math.log(3),  # one own to two others
    "soft_triple": softplus(20 * 0.01),  # S_y = S_j
    # One positive to two negatives, all at s = 1, d = 0.
    "nt_xent": math.log(3),
    "n_pairs": math.log(3),
    "sup_con": math.log(3),
    # Positives weigh 1.4 - 1, negatives 1 + .4.
    "circle": softplus(-80 * 0.4 * (1 - 0.6) + math.log(2) + 80 * 1.4 * (1 - 0.4)),
    "margin": 1.4,  # 1.2 - 0 + .2; positives cost nothing
    "lifted_structure": (math.log(4) + 1) ** 2 / 2,  # two negatives at either end
    "arc_face": softplus(64 * (1 - COS_MARGIN) + math.log(2)),
    "cos_face": softplus(64 * 0.35 + math.log(2)),
    "sub_center_arc_face": softplus(64 * (1 - COS_MARGIN)),  # one other class
}
# Losses that are 0 without a positive or without a negative.
NEED_BOTH = dict.fromkeys(
    ("nt_xent", "n_pairs", "sup_con", "circle", "margin", "lifted_structure")
    + ("arc_face", "cos_face", "sub_center_arc_face"),
    0,
)
# Labels and vectors of a batch, those of references or None, and values by loss.
CLOSED = {
    # Classes collapsed on opposite points: d_ap = 0, d_an = 2, s_an = -1. Negatives of
    # MS: log(1 + 2 e^(40 (-1 - .5))) / 40 is 0 to 25 digits.
    "perfect": (
        (TWICE, [EAST, EAST, WEST, WEST], None),
        {"contrastive": 0, "cosine_contrastive": 0, "multi_similarity": POSITIVE}
        | {"triplet": 0},
    ),
    "perfect proxies": (
        (TWICE, [EAST, EAST, WEST, WEST], (TWICE, [EAST, EAST, WEST, WEST])),
        {
            # Two positives of a proxy at s = 1, two negatives at s = -1: both
            # exponents are -32 (1 - .1).
            "proxy_anchor": 2 * math.log1p(2 * math.exp(-28.8)),
            # Two own proxies at d^2 = 0 and two at d^2 = 4: 2 e^-40 / 2.
            "proxy_nca": math.log1p(math.exp(-40)),
            # S_y = 1, S_j = -1: 20 (-1 - 1 + .01). Proxies of a class coincide.
            "soft_triple": math.log1p(math.exp(-39.8)),
        },
    ),
    # A class is spread over both ends, both classes alike: each sample has one
    # positive at d = 2, s = -1, one negative at d = 0, s = 1, one at d = 2, s = -1.
    "worst": (
        (TWICE, [EAST, WEST, EAST, WEST], None),
        {
            "contrastive": 2.5,  # mean(2 - 0) + mean(.5 - 0)
            "cosine_contrastive": 2.49999,  # (1 + 1 - 1e-5) + (1 - .5)
            # log(1 + e^3) / 2 + log(1 + e^20 + e^-60) / 40
            "multi_similarity": softplus(3) / 2 + softplus(20) / 40,
            "triplet": 1.1,  # two a sample: 2 - 0 + .1 and 2 - 2 + .1
            "nt_xent": softplus(math.log(math.exp(2 / 0.07) + 1)),
            "n_pairs": math.log(2 + math.exp(2)),
            "sup_con": math.log(2 * math.exp(-10) + math.exp(10)) + 10,
            # The positive weighs 1.4 + 1, the negatives 1.4 and 0.
            "circle": 80 * 2.4 * 1.6 + 80 * 1.4 * 0.6,
            # Two triplets a sample: 2 - 1.2 + .2 twice, 1.2 - 0 + .2 once.
            "margin": (2 * 1.0 + 1.4) / 3,
            "lifted_structure": (math.log(2 * (math.e + 1 / math.e)) + 2) ** 2 / 2,
            # At an angle of pi: cos - margin sin(margin).
            "arc_face": 64 * (2 + ARC_MARGIN * math.sin(ARC_MARGIN)),
            "sub_center_arc_face": 64 * (2 + ARC_MARGIN * math.sin(ARC_MARGIN)),
            "cos_face": 64 * (2 + 0.35),
        },
    ),
    "worst proxies": (
        (TWICE, [EAST, EAST, WEST, WEST], ([1, 1, 0, 0], [EAST, EAST, WEST, WEST])),
        {
            # Proxies lie on the other class: exponents 32 (1 + .1), two of each.
            "proxy_anchor": 2 * (35.2 + math.log(2)),
            "proxy_nca": 40.0,  # 2 e^0 others to 2 e^-40 own
            "soft_triple": 40.2,  # 20 (1 + 1 + .01)
        },
    ),
    **{
        f"identical {point}": ((TWICE, [point] * 4, None), IDENTICAL)
        for point in (EAST, [0.3, 0.7], [3e3, -7e3])
    },
    # No positives. Negatives: d = sqrt(2), s = 0, far enough for those with margins.
    "one sample a class": (
        ([0, 1], [EAST, NORTH], None),
        dict.fromkeys(["contrastive", "cosine_contrastive", "triplet"], 0)
        | {"proxy_nca": 0, "soft_triple": 0}
        | {"multi_similarity": softplus(-20) / 40, "proxy_anchor": softplus(3.2)}
        | NEED_BOTH,
    ),
    # No negatives; d = sqrt(2), s = 0.
    "one class": (
        ([7, 7], [EAST, NORTH], None),
        {"contrastive": math.sqrt(2), "cosine_contrastive": 0.99999, "triplet": 0}
        | {"multi_similarity": math.log1p(math.e) / 2, "proxy_nca": 0}
        # One class of two at sqrt(2): .2 sqrt(2) / (1 * 2 * 1)
        | {"proxy_anchor": softplus(3.2), "soft_triple": 0.1 * math.sqrt(2)}
        | NEED_BOTH,
    ),
    "class without references": (
        ([3], [EAST], ([1, 2], [NORTH, WEST])),
        # Each proxy has a negative at s = 0 and -1; the second is 0 to 12 digits.
        # SoftTriple: the regulariser alone, and no class has two.
        {"proxy_anchor": (softplus(3.2) + softplus(-28.8)) / 2, "proxy_nca": 0}
        | {"soft_triple": 0},
    ),
}


@pytest.mark.parametrize("case", CLOSED)
def test_closed_form(case):
    (labels, x, references), values = CLOSED[case]
    x, in_batch = np.array(x, "float32"), references is None
    references, r = references or (labels, x)
    for name, expected in values.items():
        problem = labels, x, references, np.array(r, "float32")
        loss = losses.get(name)
        _, value, gradients = with_gradients(loss, *problem, exclude_self=in_batch)
        assert float(value) == pytest.approx(expected, rel=1e-5, abs=1e-6), name
        gradients = [sum(gradients)] if in_batch else gradients
        assert all(np.isfinite(gradient).all() for gradient in gradients), name
        if "identical" in case or case == "perfect proxies":
            np.testing.assert_allclose(gradients, np.zeros_like(gradients), atol=1e-5)


def test_triplet_ties_do_not_count():
    # d_ap = d_an = 1: without a margin that is not above 0. Last triplet: 1 - .5.
    rows = losses.TripletLoss(0.0).pairs(
        [0], [[0.0]], [0, 1, 1, 1], [[1.0], [-1.0], [1.0], [0.5]]
    )
    np.testing.assert_allclose(rows, [0.5])


@pytest.mark.parametrize("name", ["proxy_anchor", "proxy_nca", "soft_triple"])
def test_nothing_to_compare_with(name):
    problem = [1, 2], [EAST, WEST], np.zeros(0, "int32"), np.zeros((0, 2), "float32")
    rows, _, gradients = with_gradients(losses.get(name), *problem)
    np.testing.assert_array_equal(rows, [0.0, 0.0])
    np.testing.assert_array_equal(gradients[0], np.zeros((2, 2)))


# ==== SoftTriple's regulariser ====


def regularizer(references, r, similarity="cosine"):
    """Value and gradient; no sample has a reference, so there is nothing else."""
    loss = SoftTripleLoss(tau=1.0, similarity=similarity)
    problem = [-1, -1], np.ones((2, 2), "float32"), references, np.array(r, "float32")
    rows, value, gradients = with_gradients(loss, *problem)
    np.testing.assert_array_equal(rows[0], rows[1])
    return float(value), gradients[1].numpy()


def test_regularizer_counts_pairs_within_classes():
    # Class 0: E-N, N-W sqrt(2), E-W 2, over 3 * 2. Class 1: E-W 2, over 2. Class 2
    # has no pair, but is one of the three classes.
    value, _ = regularizer([0, 1, 0, 2, 1, 0], [EAST, EAST, NORTH, WEST, WEST, WEST])
    expected = ((2 * math.sqrt(2) + 2) / 6 + 2 / 2) / 3
    assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_regularizer_of_coinciding_proxies(similarity):
    # Two of three coincide; the third pulls on both alike.
    value, gradient = regularizer([4, 4, 4], [EAST, EAST, NORTH], similarity)
    assert value == pytest.approx(2 * math.sqrt(2) / 6, rel=1e-6)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[0], gradient[1])
    assert np.abs(gradient[0]).max() > 0.05
    value, gradient = regularizer([4, 4], [[0.6, 0.8]] * 2, similarity)
    assert value == 0.0
    np.testing.assert_array_equal(gradient, 0.0)


def test_memory_does_not_grow_with_the_square_of_the_references():
    count, dim = 1000, 3
    specs = [tf.TensorSpec([2], tf.int32), tf.TensorSpec([2, dim])]
    specs += [tf.TensorSpec([count], tf.int32), tf.TensorSpec([count, dim])]
    function = tf.function(SoftTripleLoss().pairs).get_concrete_function(*specs)
    graphs = [function.graph, *(f.graph for f in function.graph._functions.values())]
    sizes = [
        output.shape.num_elements() or 0
        for graph in graphs
        for operation in graph.get_operations()
        for output in operation.outputs
        if output.shape.is_fully_defined()
    ]
    assert max(sizes) == count * dim
