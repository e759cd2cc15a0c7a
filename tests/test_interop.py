"""Losses, samplers and index of tensorflow-similarity; losses of tensorflow-addons."""

import functools
import importlib.util
import math
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import on_replicas, pair_problem

from keras_ccp import CCPModel, build_embedder, losses, retrieval
from keras_ccp.losses import other_libraries

tfsim = pytest.importorskip("tensorflow_similarity")

SIMILARITY = {
    "MultiSimilarityLoss": {"alpha": 3.0, "beta": 20.0, "epsilon": 0.2},
    "TripletLoss": {"margin": 0.3},
    "CircleLoss": {"gamma": 16.0},
    "PNLoss": {"negative_mining_strategy": "hard"},
    "SoftNearestNeighborLoss": {"temperature": 0.5},
}
ADDONS = {
    "contrastive": {"margin": 1.2},
    "lifted_struct": {"margin": 0.8},
    "npairs": {},
    "triplet_hard": {"margin": 0.4},
    "triplet_semihard": {"margin": 0.2},
}
needs_addons = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_addons") is None,
    reason="tensorflow-addons has no wheel for Python from 3.12 on",
)
# Its constructor does not call that of the Keras class.
sampler_warning = pytest.mark.filterwarnings(
    "ignore:Your `PyDataset` class should call:UserWarning"
)
ALL = [*SIMILARITY, *(pytest.param(name, marks=needs_addons) for name in ADDONS)]


def foreign(name, **arguments):
    cls = getattr(tfsim.losses, name)
    return cls(reduction="sum_over_batch_size", **arguments)


def make(name):
    if name in ADDONS:
        return losses.from_addons(name, **ADDONS[name])
    return losses.from_similarity(foreign(name, **SIMILARITY[name]))


def unit_rows(*shape):
    rows = np.random.default_rng(0).normal(size=shape)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def problem():
    """12 samples of classes 0-4 and 10 references of the same, unit vectors."""
    labels, _, _, _ = pair_problem()
    references = np.array([1, 3, 1, 0, 2, 3, 4, 1, 2, 4], "int32")
    rows = unit_rows(22, 3)
    return labels, rows[:12], references, rows[12:]


# ==== Values: the library's own, and the definitions as loops in float64 ====


IN_BATCH = ["lifted_struct", "triplet_hard", "triplet_semihard"]
IN_BATCH = [*SIMILARITY, *(pytest.param(name, marks=needs_addons) for name in IN_BATCH)]


@pytest.mark.parametrize("name", IN_BATCH)
def test_in_batch_it_is_the_loss_of_the_library(name):
    labels, x, _, _ = problem()
    if name in SIMILARITY:  # eagerly it works on Keras 3
        own = foreign(name, **SIMILARITY[name])
    else:
        own = functools.partial(other_libraries._load_function(name), **ADDONS[name])
    expected = pytest.approx(float(own(labels, tf.constant(x, "float32"))), rel=1e-5)
    loss = make(name)
    assert float(loss(labels[:, None], x)) == expected
    rows = loss.pairs(labels, x, labels, x, exclude_self=True)
    assert rows.shape == (12,) and rows.dtype == tf.float32
    assert np.mean(rows) == expected


def split(i, labels, references, exclude_self=False):
    """Positives and negatives of sample i."""
    others = [j for j in range(len(references)) if not (exclude_self and i == j)]
    same = [j for j in others if references[j] == labels[i]]
    return same, [j for j in others if references[j] != labels[i]]


def loop_multi_similarity(d, pos, neg, _):
    kept = [p for p in pos if d[p] > min(d[neg]) - 0.2]
    near = [n for n in neg if d[n] < max(d[pos]) + 0.2]
    if not kept or not near:
        return 0.0
    pull = math.log(1 + sum(math.exp(3 * (d[p] - 0.5)) for p in kept)) / 3
    return pull + math.log(1 + sum(math.exp(-20 * (d[n] - 0.5)) for n in near)) / 20


def loop_triplet(d, pos, neg, _):
    farther = [d[n] for n in neg if d[n] > max(d[pos])]
    negative = min(farther) if farther else max(d[neg])
    return max(0.0, max(d[pos]) - negative + 0.3)


def loop_circle(d, pos, neg, _):
    # Optima 0.4 and 1.4, margins 0.4 and 0.6.
    pull = sum(math.exp(-16 * max(0, 0.4 + d[p]) * (0.4 - d[p])) for p in pos)
    push = sum(math.exp(16 * max(0, 1.4 - d[n]) * (0.6 - d[n])) for n in neg)
    return math.log(1 + pull) + math.log(1 + push)


def loop_pn(d, pos, neg, among):
    p, n = max(pos, key=lambda j: d[j]), min(neg, key=lambda j: d[j])
    return math.log(1 + math.exp(d[p] - min(d[n], among[p, n])))


def loop_soft_nn(d, pos, neg, _):
    near = np.exp(-2 * d / 0.5)  # squared distance of unit vectors: 2 - 2 cos
    return -math.log(1e-9 + sum(near[pos]) / (sum(near[pos]) + sum(near[neg])))


LOOPS = {
    "MultiSimilarityLoss": loop_multi_similarity,
    "TripletLoss": loop_triplet,
    "CircleLoss": loop_circle,
    "PNLoss": loop_pn,
    "SoftNearestNeighborLoss": loop_soft_nn,
}


@pytest.mark.parametrize("name", SIMILARITY)
def test_similarity_loss_against_references_matches_its_loop(name):
    labels, x, references, r = problem()
    expected = [
        LOOPS[name](1 - r @ x[i], *split(i, labels, references), 1 - r @ r.T)
        for i in range(12)
    ]
    rows = make(name).pairs(labels, x, references, r)
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5)


def distances(x):
    return np.linalg.norm(x[:, None] - x, axis=-1)


def loop_lifted(labels, x):
    d, terms = distances(x), []
    for i in range(len(x)):
        pos, neg = split(i, labels, labels, True)
        for j in pos:
            others = np.exp(0.8 - d[j])[split(j, labels, labels)[1]]
            push = math.log(np.exp(0.8 - d[i])[neg].sum() + others.sum())
            terms.append(max(0.0, push + d[i, j]) ** 2)
    return np.mean(terms) / 2


def loop_npairs(labels, x):
    s, terms = np.exp(x @ x.T), []
    for i in range(len(x)):
        pos, _ = split(i, labels, labels)  # itself among them
        terms.append(-np.mean(np.log(s[i, pos] / s[i].sum())))
    return np.mean(terms)


def loop_hard(labels, x):
    d, terms = distances(x), []
    for i in range(len(x)):
        pos, neg = split(i, labels, labels, True)
        terms.append(max(0.0, max(d[i, pos]) - min(d[i, neg]) + 0.4))
    return np.mean(terms)


def loop_semihard(labels, x):
    d, terms = distances(x), []
    for i in range(len(x)):
        pos, neg = split(i, labels, labels, True)
        for p in d[i, pos]:
            negative = min((n for n in d[i, neg] if n > p), default=max(d[i, neg]))
            terms.append(max(0.0, p - negative + 0.2))
    return np.mean(terms)


BATCH_LOOPS = {
    "lifted_struct": loop_lifted,
    "npairs": loop_npairs,
    "triplet_hard": loop_hard,
    "triplet_semihard": loop_semihard,
}


@needs_addons
@pytest.mark.parametrize("name", BATCH_LOOPS)
def test_references_are_further_rows_of_an_addons_batch(name):
    labels, x, references, r = problem()
    expected = BATCH_LOOPS[name](np.append(labels, references), np.concatenate([x, r]))
    rows = make(name).pairs(labels, x, references, r)
    assert rows.shape == (12,) and rows.dtype == tf.float32
    np.testing.assert_allclose(rows, expected, rtol=1e-5)
    # Where the references are the batch itself nothing is doubled.
    both = np.append(labels, references), np.concatenate([x, r])
    rows = make(name).pairs(*both, *both, exclude_self=True)
    np.testing.assert_allclose(rows, expected, rtol=1e-5)


@needs_addons
@pytest.mark.parametrize("exclude_self", [False, True])
def test_contrastive_is_the_mean_over_pairs(exclude_self):
    labels, x, references, r = problem()
    if exclude_self:
        references, r = labels, x
    expected = []
    for i in range(12):
        pos, neg = split(i, labels, references, exclude_self)
        d = np.linalg.norm(r - x[i], axis=1)
        terms = [*d[pos] ** 2, *np.maximum(1.2 - d[neg], 0) ** 2]
        expected.append(np.mean(terms))
    rows = make("contrastive").pairs(labels, x, references, r, exclude_self)
    np.testing.assert_allclose(rows, expected, rtol=1e-5)


@needs_addons
def test_another_function_of_a_batch():
    def spread(labels, embeddings, power=1.0):
        return tf.reduce_sum(embeddings, axis=1) ** power  # one value a sample

    loss = losses.from_addons(spread, power=2.0)
    rows = loss.pairs([0, 1], [[1.0, 1.0], [1.0, 2.0]], [2], [[2.0, 3.0]])
    np.testing.assert_allclose(rows, [38 / 3] * 2, rtol=1e-6)  # (4 + 9 + 25) / 3
    assert loss.name == "spread"


# ==== Ends ====


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "labels, x",
    [
        (problem()[0], problem()[1]),
        ([0, 0, 1, 1], [[1.0, 0.0]] * 4),  # one point
        ([0, 0, 1, 1], [[0.0, 0.0]] * 4),
        ([7, 7], unit_rows(2, 3)),  # one class
        ([0, 1], unit_rows(2, 3)),  # no positive
        ([3], [[1.0, 0.0]]),  # one sample
    ],
)
def test_value_and_gradient_are_finite(name, labels, x):
    x, loss = tf.constant(x, tf.float32), make(name)
    for references, r, exclude_self in ((labels, x, True), ([7, 0], x[:1], False)):
        r = tf.concat([r, x[:1]], axis=0) if not exclude_self else r
        with tf.GradientTape() as tape:
            tape.watch((x, r))
            rows = loss.pairs(labels, x, references, r, exclude_self)
        assert np.isfinite(rows).all()
        gradients = tape.gradient(rows, [x, r], unconnected_gradients="zero")
        assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_soft_nearest_neighbours_that_underflow():
    # d = 400 and 900: exp(-d) is 0 in float32. -log(e^-400 / (e^-400 + e^-900)) = 0.
    loss = losses.from_similarity(foreign("SoftNearestNeighborLoss"))
    rows = loss.pairs([0], [[0.0]], [0, 1], [[20.0], [30.0]])
    np.testing.assert_allclose(rows, [0.0], atol=1e-6)
    # All samples alike: log of how many others there are of how many positives.
    rows = loss.pairs([0, 0, 1], [[5.0]] * 3, [0, 0, 1], [[5.0]] * 3, exclude_self=True)
    np.testing.assert_allclose(rows, [math.log(2), math.log(2), 0], rtol=1e-6)


@needs_addons
@pytest.mark.parametrize("name", ["lifted_struct", "triplet_semihard"])
def test_nothing_to_compare_costs_nothing(name):
    own = other_libraries._load_function(name)
    assert np.isnan(own(np.array([0, 1]), tf.constant([[1.0], [2.0]])))
    assert float(make(name)([0, 1], [[1.0], [2.0]])) == 0.0
    assert float(make(name)([0, 0], [[1.0], [2.0]])) == 0.0


@pytest.mark.parametrize("name", ALL)
def test_neighbouring_labels_survive_mixed_precision(name):
    # float16 has no 11317: it would fall together with 11320.
    keras.config.set_dtype_policy("mixed_float16")
    loss, x = make(name), np.array([[1, 0], [0, 1], [0.6, 0.8], [0.8, 0.6]], "float16")
    labels = np.array([11317, 11317, 11320, 11320])
    apart = loss(labels[:, None], x)
    assert apart.dtype == tf.float32
    assert float(apart) == float(loss([0, 0, 1, 1], x))
    assert float(apart) != float(loss([0, 0, 0, 0], x))


# ==== Training ====


# Each way that a batch is gathered.
GATHERED = ["MultiSimilarityLoss", "PNLoss"]
GATHERED += [
    pytest.param(name, marks=needs_addons) for name in ("contrastive", "npairs")
]


@pytest.mark.parametrize("name", GATHERED)
def test_two_replicas_give_what_one_gives(name):
    loss = make(name)
    labels, x, references, r = problem()
    x, r = x.astype("float32"), tf.constant(r, "float32")

    def step(embeddings, batch_labels):
        with tf.GradientTape() as tape:
            tape.watch((embeddings, r))
            rows = loss.pairs(batch_labels, embeddings, references, r)
            in_batch = loss.call(batch_labels, embeddings)
            value = tf.reduce_mean(rows + 0.5 * in_batch)
        return (value, *tape.gradient(value, (embeddings, r)))

    expected = step(tf.constant(x), labels)
    value, gradient, reference_gradient = on_replicas(step, x, labels)
    np.testing.assert_allclose(np.mean(value), expected[0], rtol=1e-5)
    # Each replica averages over half the batch.
    for found, whole in (
        (np.concatenate(gradient) / 2, expected[1]),
        (sum(reference_gradient) / 2, expected[2]),
    ):
        np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)


def pictures(num_classes=4, per_class=6):
    """Noisy pictures of their class, 4 by 4."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(num_classes), per_class)
    patterns = rng.normal(size=(num_classes, 4, 4, 1))
    noise = rng.normal(size=(len(labels), 4, 4, 1))
    return (patterns[labels] + 0.3 * noise).astype("float32"), labels


def small_model(proxies_per_class=1):
    backbone = keras.Sequential(
        [keras.Input((4, 4, 1)), keras.layers.Conv2D(4, 3, activation="relu")]
    )
    return CCPModel(
        build_embedder(backbone, embedding_dim=3),
        num_classes=4,
        proxies_per_class=proxies_per_class,
        in_batch_weight=0.5,
        normalization="l2",
    )


@sampler_warning
@pytest.mark.parametrize(
    "name",
    ["MultiSimilarityLoss", pytest.param("triplet_semihard", marks=needs_addons)],
)
def test_sampler_feeds_a_model_that_is_saved(name, tmp_path):
    images, labels = pictures()
    sampler = tfsim.samplers.MultiShotMemorySampler(
        images,
        labels,
        classes_per_batch=3,
        examples_per_class_per_batch=4,
        steps_per_epoch=10,
    )
    model = small_model()
    # Compiled by XLA in the test of the guide.
    model.compile(keras.optimizers.Adam(0.02), make(name), jit_compile=False)
    history = model.fit(sampler, epochs=3, verbose=0).history["pair_loss"]
    assert history[-1] < 0.8 * history[0]

    model.save(tmp_path / "model.keras")
    read = keras.saving.load_model(tmp_path / "model.keras")
    assert type(read.loss) is type(model.loss)
    assert read.loss.get_config() == model.loss.get_config()
    embeddings = model.predict(images, verbose=0)
    np.testing.assert_allclose(read.predict(images, verbose=0), embeddings, rtol=1e-5)
    assert float(read.loss(labels, embeddings)) == float(model.loss(labels, embeddings))


def test_trained_embedder_in_the_similarity_index():
    images, labels = pictures()
    model = small_model(proxies_per_class=0)
    model.compile("adam", make("MultiSimilarityLoss"))
    model.fit(images, labels, batch_size=24, epochs=3, verbose=0)
    embeddings = model.predict(images, verbose=0)
    nearest, _ = retrieval.search(embeddings, embeddings, k=2)

    index = tfsim.indexer.Indexer(embedding_size=3, distance="cosine")
    index.batch_add(embeddings, labels=labels, data=images, verbose=0)
    # Of unit vectors the squared distance is 2 (1 - cos).
    looked_up = index.batch_lookup(embeddings, k=2, verbose=0)
    cosine = np.array([[hit.distance for hit in hits] for hits in looked_up])
    np.testing.assert_allclose(2 * cosine, nearest**2, atol=1e-5)
    (first,) = index.single_lookup(embeddings[5:6], k=1)
    assert first.label == labels[5]

    # Five others of each class. Their MAP@K counts the query itself in r and in k.
    own = retrieval.evaluate(embeddings, labels)
    metrics = [
        tfsim.retrieval_metrics.RecallAtK(k=1, drop_closest_lookup=True),
        tfsim.retrieval_metrics.MapAtK(
            r=dict.fromkeys(range(4), 6), k=6, clip_at_r=True, drop_closest_lookup=True
        ),
    ]
    theirs = index.evaluate_retrieval(embeddings, labels, metrics, verbose=0)
    recall, map_at_r = (float(value) for value in theirs.values())
    assert recall == pytest.approx(own["precision_at_1"])
    assert map_at_r == pytest.approx(own["map_at_r"])


# ==== The libraries themselves ====


@pytest.mark.parametrize(
    "module, make_loss",
    [
        ("tensorflow_similarity.losses", lambda: make("TripletLoss")),
        pytest.param(
            "tensorflow_addons",
            lambda: losses.from_addons("npairs"),
            marks=needs_addons,
        ),
    ],
)
def test_without_the_library(monkeypatch, module, make_loss):
    monkeypatch.setitem(sys.modules, module, None)
    other_libraries._load_function.cache_clear()
    with pytest.raises(ImportError, match=r'pip install "keras-ccp\[interop\]"'):
        make_loss()


@needs_addons
def test_loading_addons_leaves_no_trace(monkeypatch):
    other = type(sys)("tensorflow_addons.other")
    monkeypatch.setitem(sys.modules, other.__name__, other)
    other_libraries._load_function.cache_clear()
    losses.from_addons("triplet_hard")
    assert sys.modules["tensorflow_addons.other"] is other
    left = [name for name in sys.modules if name.startswith("tensorflow_addons")]
    assert left == [other.__name__]
    assert "keras.src.engine" not in sys.modules
    assert not hasattr(keras.src, "engine")


@pytest.mark.parametrize(
    "given",
    [
        "TripletLoss",
        losses.TripletLoss(),
        tfsim.losses.TripletLoss,
        foreign("MultiNegativesRankLoss"),
    ],
)
def test_other_losses_are_refused(given):
    with pytest.raises(TypeError, match="`loss` must be a MultiSimilarityLoss, .+Rec"):
        losses.from_similarity(given)


@needs_addons
def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="Received: function='npair'"):
        losses.from_addons("npair")
    with pytest.raises(TypeError, match="unexpected keyword argument 'margin'"):
        losses.from_addons("npairs", margin=1)
