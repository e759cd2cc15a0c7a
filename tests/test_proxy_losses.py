"""ProxyAnchorLoss, ProxyNCALoss and SoftTripleLoss."""

import math

import numpy as np
import pytest
import tensorflow as tf

from keras_ccp.layers import l2_normalize, lipschitz_normalize
from keras_ccp.losses import ProxyAnchorLoss, ProxyNCALoss, SoftTripleLoss

NORMALIZE = {"lip": lipschitz_normalize, "l2": l2_normalize}
ALL = [ProxyAnchorLoss, ProxyNCALoss, SoftTripleLoss]


def with_gradients(loss, labels, x, references, r, **kwargs):
    """Rows, their mean and its gradients with respect to `x` and `r`."""
    tensors = tf.convert_to_tensor(x), tf.convert_to_tensor(r)
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        rows = loss.pairs(labels, tensors[0], references, tensors[1], **kwargs)
        value = tf.reduce_mean(rows)
    return rows, value, tape.gradient(value, tensors)


# --- The paper's own implementation ---


GOLDEN_LOSSES = {
    "ProxyAnchor_{}_d0.1_a32": ProxyAnchorLoss(0.1, 32, similarity="dot"),
    # Recorded as a softmax of cosine / 0.11: a squared distance has twice the cosine.
    "ProxyNCA_{}_t0.11": ProxyNCALoss(0.22, similarity="dot"),
}


def assert_golden(golden, case, loss, normalize, per_class):
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
    gradients = tape.gradient(value, (embeddings, proxies))
    case = f"out/{case}_p{per_class}"
    np.testing.assert_allclose(value, golden[f"{case}/loss"], rtol=1e-5, atol=1e-5)
    for side, gradient in zip(("emb", "proxies"), gradients, strict=True):
        expected = golden[f"{case}/grad_{side}"]
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("per_class", [1, 2])
@pytest.mark.parametrize("norm", NORMALIZE)
@pytest.mark.parametrize("form", GOLDEN_LOSSES)
def test_matches_the_reference(golden, form, norm, per_class):
    loss = GOLDEN_LOSSES[form]
    assert_golden(golden, form.format(norm), loss, NORMALIZE[norm], per_class)


@pytest.mark.parametrize("per_class", [1, 2])
@pytest.mark.parametrize(
    "form, loss",
    [
        ("ProxyAnchor_l2_d0.1_a32", ProxyAnchorLoss(0.1, 32)),
        ("ProxyNCA_l2_t0.11", ProxyNCALoss(0.22)),
    ],
)
def test_cosine_normalises_for_itself(golden, form, loss, per_class):
    assert_golden(golden, form, loss, tf.identity, per_class)


# --- The formulas as loops ---


def dot(a, b):
    return float(a @ b)


def cosine(a, b):
    return a @ b / math.sqrt((a @ a) * (b @ b))


def is_pair(i, j, exclude_self):
    return not (exclude_self and i == j)


def loop_proxy_anchor(similarity, x, labels, r, references, exclude_self):
    pos, neg = [], []
    for j in range(len(r)):
        here = [i for i in range(len(x)) if is_pair(i, j, exclude_self)]
        own = [similarity(x[i], r[j]) for i in here if labels[i] == references[j]]
        rest = [similarity(x[i], r[j]) for i in here if labels[i] != references[j]]
        if own:
            pos.append(math.log(1 + sum(math.exp(-8 * (s - 0.2)) for s in own)))
        if rest:
            neg.append(math.log(1 + sum(math.exp(8 * (s + 0.2)) for s in rest)))
    return np.mean(pos or [0.0]) + np.mean(neg or [0.0])


def loop_proxy_nca(similarity, x, labels, r, references, exclude_self):
    total = 0.0
    for i in range(len(x)):
        own = everyone = 0.0
        for j in range(len(r)):
            if is_pair(i, j, exclude_self):
                squared_distance = 2 - 2 * similarity(x[i], r[j])
                everyone += math.exp(-squared_distance / 0.5)
                own += math.exp(-squared_distance / 0.5) * (labels[i] == references[j])
        total += -math.log(own / everyone) if own else 0.0
    return total / len(x)


def to_class(similarities):
    weights = [math.exp(s / 0.3) for s in similarities]
    return sum(w * s for w, s in zip(weights, similarities, strict=True)) / sum(weights)


def loop_soft_triple(similarity, x, labels, r, references, exclude_self):
    total, classes = 0.0, set(references)
    for i in range(len(x)):
        exponentials = {}
        for c in classes:
            here = [
                similarity(x[i], r[j])
                for j in range(len(r))
                if references[j] == c and is_pair(i, j, exclude_self)
            ]
            if here:
                shift = 0.05 if c == labels[i] else 0.0
                exponentials[c] = math.exp(7 * (to_class(here) - shift))
        if labels[i] in exponentials:
            total -= math.log(exponentials[labels[i]] / sum(exponentials.values()))
    spread = 0.0
    for c in classes:
        own = [r[j] for j in range(len(r)) if references[j] == c]
        if similarity is cosine:
            own = [v / math.sqrt(v @ v) for v in own]
        for s in range(len(own)):
            for t in range(s):
                # sqrt(2 - 2 w.w') for unit vectors
                distance = math.dist(own[s], own[t])
                spread += distance / (len(classes) * len(own) * (len(own) - 1))
    return total / len(x) + 0.6 * spread


LOOPS = {
    "proxy_anchor": (lambda s: ProxyAnchorLoss(0.2, 8, s), loop_proxy_anchor),
    "proxy_nca": (lambda s: ProxyNCALoss(0.5, s), loop_proxy_nca),
    "soft_triple": (
        lambda s: SoftTripleLoss(7, 0.3, 0.6, 0.05, s),
        loop_soft_triple,
    ),
}
SIMILARITIES = {"cosine": cosine, "dot": dot}


def random_problem(seed=0):
    """12 samples of classes -2 to 4 (one alone), 9 references: 1, 3, 0, 2, 1, 2.

    The class of two samples, -2, has no reference; class 5 has no sample.
    """
    rng = np.random.default_rng(seed)
    labels = np.array([0, 0, 0, 1, 1, 1, 1, -2, -2, 3, 3, 4])
    references = np.array([5, 1, 3, 1, 0, 5, 3, 4, 1])
    return rng.normal(size=(12, 3)), labels, rng.normal(size=(9, 3)), references


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("name", LOOPS)
def test_matches_loops(name, similarity):
    make, loop = LOOPS[name]
    loss, measure = make(similarity), SIMILARITIES[similarity]
    x, labels, r, references = random_problem()
    rows = loss.pairs(labels, x, references, r)
    assert rows.shape == (12,) and rows.dtype == tf.float64
    expected = loop(measure, x, labels, r, references, False)
    assert np.mean(rows) == pytest.approx(expected)
    for exclude_self in (True, False):
        rows = loss.pairs(labels, x, labels, x, exclude_self=exclude_self)
        expected = loop(measure, x, labels, x, labels, exclude_self)
        assert np.mean(rows) == pytest.approx(expected)
    assert float(loss(labels, x.astype("float32"))) == pytest.approx(
        loop(measure, x, labels, x, labels, True), rel=1e-5
    )


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("name", LOOPS)
def test_gradient_matches_finite_differences(name, similarity):
    make, loop = LOOPS[name]
    x, labels, r, references = random_problem(seed=1)
    *_, gradients = with_gradients(make(similarity), labels, x, references, r)
    for array, gradient in zip((x, r), gradients, strict=True):
        for index in np.ndindex(array.shape):
            kept, values = array[index], []
            for step in (1e-6, -1e-6):
                array[index] = kept + step
                problem = x, labels, r, references, False
                values.append(loop(SIMILARITIES[similarity], *problem))
            array[index] = kept
            slope = (values[0] - values[1]) / 2e-6
            assert gradient[index].numpy() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("make", ALL)
def test_references_come_in_any_order_and_under_any_numbers(make):
    loss = make()
    x, labels, r, references = random_problem()
    expected = loss.pairs(labels, x, references, r)
    order = np.random.default_rng(3).permutation(9)
    rows = loss.pairs(labels, x, references[order], r[order])
    np.testing.assert_allclose(rows, expected)
    # 2^31 - 1 is the last int32.
    renamed = dict(zip([-2, 0, 1, 3, 4, 5], [7, 2**31 - 1, 0, -9, 11317, 6]))  # noqa: B905
    rows = loss.pairs(
        np.array([[renamed[c]] for c in labels]),
        x,
        np.array([renamed[c] for c in references]),
        r,
    )
    np.testing.assert_allclose(rows, expected)


# --- Closed forms ---


EAST, NORTH, WEST = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]


def softplus(z):
    return max(z, 0.0) + math.log1p(math.exp(-abs(z)))


def in_batch(loss, labels, embeddings):
    """Value and gradient of the in-batch loss; both must be finite."""
    embeddings = tf.constant(embeddings, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(embeddings)
        value = loss(tf.constant(labels), embeddings)
    gradient = tape.gradient(value, embeddings).numpy()
    assert np.isfinite(value) and np.isfinite(gradient).all()
    return float(value), gradient


@pytest.mark.parametrize(
    "loss, expected",
    [
        # Two positives of a proxy at s = 1, two negatives at s = -1: both exponents
        # are -32 (1 - .1).
        (ProxyAnchorLoss(), 2 * math.log1p(2 * math.exp(-28.8))),
        # Two own proxies at d^2 = 0 and two at d^2 = 4: 2 e^-40 / 2.
        (ProxyNCALoss(), math.log1p(math.exp(-40))),
        # S_y = 1, S_j = -1: 20 (-1 - 1 + .01). Proxies of a class coincide.
        (SoftTripleLoss(), math.log1p(math.exp(-39.8))),
    ],
)
def test_perfect_batch(loss, expected):
    points = np.array([EAST, EAST, WEST, WEST], "float32")
    _, value, gradients = with_gradients(
        loss, [0, 0, 1, 1], points, [0, 0, 1, 1], points
    )
    assert float(value) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradients, 0.0, atol=1e-6)


@pytest.mark.parametrize(
    "loss, expected",
    [
        # Proxies lie on the other class: exponents 32 (1 + .1), two of each.
        (ProxyAnchorLoss(), 2 * (35.2 + math.log(2))),
        # 2 e^0 others to 2 e^-40 own.
        (ProxyNCALoss(), 40.0),
        # 20 (1 + 1 + .01)
        (SoftTripleLoss(), 40.2),
    ],
)
def test_worst_batch(loss, expected):
    points = np.array([EAST, EAST, WEST, WEST], "float32")
    _, value, _ = with_gradients(loss, [0, 0, 1, 1], points, [1, 1, 0, 0], points)
    assert float(value) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "loss, expected",
    [
        # One positive a proxy at s = 1, two negatives.
        (
            ProxyAnchorLoss(),
            math.log1p(math.exp(-28.8)) + math.log1p(2 * math.exp(35.2)),
        ),
        # One own to two others.
        (ProxyNCALoss(), math.log(3)),
        # S_y = S_j
        (SoftTripleLoss(), softplus(20 * 0.01)),
    ],
)
@pytest.mark.parametrize("point", [EAST, [0.3, 0.7], [3e3, -7e3]])
def test_identical_points(loss, expected, point):
    value, gradient = in_batch(loss, [0, 0, 1, 1], [point] * 4)
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-5)


@pytest.mark.parametrize(
    "loss, expected",
    [
        # No positives; one negative a proxy at s = 0.
        (ProxyAnchorLoss(), math.log1p(math.exp(3.2))),
        (ProxyNCALoss(), 0.0),
        (SoftTripleLoss(), 0.0),
    ],
)
def test_one_sample_a_class(loss, expected):
    value, _ = in_batch(loss, [0, 1], [EAST, NORTH])
    assert value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "loss, expected",
    [
        # No negatives; s = 0.
        (ProxyAnchorLoss(), math.log1p(math.exp(3.2))),
        (ProxyNCALoss(), 0.0),
        # One class of two at sqrt(2): .2 sqrt(2) / (1 * 2 * 1)
        (SoftTripleLoss(), 0.1 * math.sqrt(2)),
        (SoftTripleLoss(tau=0), 0.0),
    ],
)
def test_one_class(loss, expected):
    value, _ = in_batch(loss, [7, 7], [EAST, NORTH])
    assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "loss, expected",
    [
        # Each proxy has a negative at s = 0 and -1; the second is 0 to 12 digits.
        (ProxyAnchorLoss(), (softplus(3.2) + softplus(-28.8)) / 2),
        (ProxyNCALoss(), 0.0),
        # The regulariser alone: no class has two.
        (SoftTripleLoss(), 0.0),
    ],
)
def test_class_without_references(loss, expected):
    rows, value, gradients = with_gradients(loss, [3], [EAST], [1, 2], [NORTH, WEST])
    assert rows.shape == (1,)
    assert float(value) == pytest.approx(expected, rel=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_nothing_to_compare_with(make, similarity):
    none = np.zeros((0, 2), "float32")
    rows, _, gradients = with_gradients(
        make(similarity=similarity), [1, 2], [EAST, WEST], np.zeros(0, "int32"), none
    )
    np.testing.assert_array_equal(rows, [0.0, 0.0])
    np.testing.assert_array_equal(gradients[0], np.zeros((2, 2)))


# --- SoftTriple's regulariser ---


def regularizer(references, r, similarity="cosine"):
    """Value and gradient; no sample has a reference, so there is nothing else."""
    loss = SoftTripleLoss(tau=1.0, similarity=similarity)
    x = np.ones((2, np.shape(r)[1]), "float32")
    rows, value, gradients = with_gradients(
        loss, [-1, -1], x, references, np.array(r, "float32")
    )
    np.testing.assert_array_equal(rows[0], rows[1])
    return float(value), gradients[1].numpy()


def test_regularizer_counts_pairs_within_classes():
    # Class 0: E-N, N-W sqrt(2), E-W 2, over 3 * 2. Class 1: E-W 2, over 2. Class 2
    # has no pair, but is one of the three classes.
    value, _ = regularizer([0, 1, 0, 2, 1, 0], [EAST, EAST, NORTH, WEST, WEST, WEST])
    expected = ((2 * math.sqrt(2) + 2) / 6 + 2 / 2) / 3
    assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("similarity", SIMILARITIES)
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
    function = tf.function(SoftTripleLoss().pairs).get_concrete_function(
        tf.TensorSpec([2], tf.int32),
        tf.TensorSpec([2, dim]),
        tf.TensorSpec([count], tf.int32),
        tf.TensorSpec([count, dim]),
    )
    graphs = [function.graph, *(f.graph for f in function.graph._functions.values())]
    sizes = [
        output.shape.num_elements() or 0
        for graph in graphs
        for operation in graph.get_operations()
        for output in operation.outputs
        if output.shape.is_fully_defined()
    ]
    assert max(sizes) == count * dim
