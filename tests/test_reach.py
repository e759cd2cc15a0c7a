"""References beyond the reach of a loss are left out, and nothing else changes."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import CCPModel, layers, losses
from keras_ccp.losses.reach import within_reach

NUM_CLASSES, PROXIES, DIM = 1100, 4, 8


def few(monkeypatch, number):
    monkeypatch.setattr("keras_ccp.losses.reach._MANY", number)


@pytest.mark.parametrize(
    "normalize", [layers.lipschitz_normalize, layers.l2_normalize, tf.identity]
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_stays(monkeypatch, normalize, dtype):
    few(monkeypatch, 1)
    rng = np.random.default_rng(0)
    anchors = normalize(rng.normal(size=(6, DIM)) * 0.3).numpy().astype(dtype)
    references = tf.constant(rng.normal(size=(3000, DIM)).astype("float32") * 0.3)
    labels = np.arange(6, dtype="int32")
    reference_labels = rng.integers(0, 300, 3000).astype("int32")
    kept_labels, kept = within_reach(
        0.7, labels, anchors, reference_labels, references, normalize
    )
    # Oracle: NumPy's distances in float64. What may be within reach if products were of
    # bfloat16, 2^-7 (||a|| + ||b||)^2 beyond in the square, may stay.
    normalized = np.asarray(normalize(references)).astype("float64")
    differences = anchors.astype("float64")[:, None] - normalized
    nearest = np.linalg.norm(differences, axis=2).min(axis=0)
    lengths = np.linalg.norm(normalized, axis=1) + np.linalg.norm(anchors, axis=1).max()
    is_own = reference_labels < 6
    must = np.flatnonzero((nearest <= 0.7) | is_own)
    may = np.flatnonzero((nearest**2 <= 0.49 + lengths**2 / 128 + 1e-5) | is_own)
    assert 200 < len(must) < len(may) < 2800
    stays = np.flatnonzero(np.isin(normalized, np.asarray(kept)).all(axis=1))
    assert set(must) <= set(stays) <= set(may)
    np.testing.assert_array_equal(kept_labels, reference_labels[stays])
    np.testing.assert_array_equal(kept, np.asarray(normalize(references))[stays])


def test_what_lies_at_the_reach_stays_and_nan_too(monkeypatch):
    few(monkeypatch, 1)
    anchors = tf.constant([[1.0, 0.0]])
    # Distances 0.5, the next above it, 0.6, and none.
    references = tf.constant([[0.5, 0.0], [0.49999997, 0.0], [0.4, 0], [np.nan, 0]])
    labels = np.arange(1, 5, dtype="int32")
    kept, _ = within_reach(0.5, [0], anchors, labels, references, tf.identity)
    np.testing.assert_array_equal(kept, [1, 2, 4])


@pytest.mark.parametrize("length", [0.0, 1e-38, 1e-20, 1e20, 1e37, 1e38, 3e38])
def test_lengths_at_the_ends_of_float32(monkeypatch, length):
    few(monkeypatch, 1)
    # The first is normalised to (1, 0), or (0, 0) if it is short: both within 1.
    references = tf.constant([[length, 0.0], [0.0, -1.0]])
    kept, _ = within_reach(
        1.0,
        [9],
        tf.constant([[1.0, 0.0]]),
        np.arange(2, dtype="int32"),
        references,
        layers.lipschitz_normalize,
    )
    np.testing.assert_array_equal(kept, [0])


def test_what_products_of_bfloat16_would_lose_stays(monkeypatch):
    # Stands in for a GPU or TPU, which may round the factors of a product.
    few(monkeypatch, 1)

    def product(a, b, **kwargs):
        a, b = (tf.cast(tf.cast(x, tf.bfloat16), tf.float32) for x in (a, b))
        return tf.linalg.matmul(a, b, **kwargs)

    rng = np.random.default_rng(0)
    anchors = layers.l2_normalize(rng.normal(size=(4, 3)).astype("float32"))
    references = layers.l2_normalize(rng.normal(size=(20000, 3)).astype("float32"))
    monkeypatch.setattr("keras_ccp.losses.reach.tf.matmul", product)
    labels = np.arange(20000, dtype="int32")
    kept, _ = within_reach(0.5, [-1], anchors, labels, references, layers.l2_normalize)
    distances = np.linalg.norm(
        anchors.numpy().astype("float64")[:, None] - references, axis=2
    )
    assert set(np.flatnonzero(distances.min(axis=0) < 0.5)) <= set(kept.numpy())
    assert len(kept) < 15000


def test_few_references_and_losses_without_reach_keep_all():
    references = tf.random.stateless_normal((5000, DIM), (0, 0))
    for reach, n in ((0.1, 4000), (np.inf, 5000)):
        labels = np.arange(n, dtype="int32")
        kept, _ = within_reach(
            reach, [0], references[:1], labels, references[:n], tf.identity
        )
        assert len(kept) == n


def test_which_losses_have_a_reach():
    class Doubled(losses.ContrastiveLoss):
        def pairs(self, *args, **kwargs):
            return 2 * super().pairs(*args, **kwargs)

    assert losses.ContrastiveLoss(0.1, 0.4).reach == 0.4
    assert losses.ContrastiveLoss(mining="hard").reach == np.inf
    assert Doubled().reach == np.inf
    assert losses.TripletLoss().reach == np.inf
    changed = losses.ContrastiveLoss()
    changed.pairs = lambda *args, **kwargs: tf.zeros(len(args[0]))
    assert changed.reach == np.inf


def test_a_margin_that_changes_during_training(monkeypatch):
    few(monkeypatch, 1)
    loss = losses.ContrastiveLoss()
    loss.negative_margin = tf.Variable(0.5)
    references = tf.constant([[0.6, 0.0], [0.3, 0.0]])  # 0.4 and 0.7 from the anchor

    @tf.function
    def kept():
        labels = np.arange(1, 3, dtype="int32")
        anchors = tf.constant([[1.0, 0.0]])
        return within_reach(loss.reach, [0], anchors, labels, references, tf.identity)[
            0
        ]

    assert kept().numpy().tolist() == [1]
    loss.negative_margin.assign(0.8)
    assert kept().numpy().tolist() == [1, 2]


def train(normalization="lipschitz", num_replicas=1, **arguments):
    """Losses and weights of three steps with proxies near and far."""
    keras.utils.set_random_seed(0)
    scope = contextlib.nullcontext()
    if num_replicas > 1:
        scope = tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(num_replicas)],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        ).scope()
    with scope:
        embedder = keras.Sequential([keras.Input((6,)), keras.layers.Dense(DIM)])
        model = CCPModel(embedder, NUM_CLASSES, PROXIES, normalization=normalization)
        model.compile(
            keras.optimizers.SGD(0.5, momentum=0.9), "contrastive", **arguments
        )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 8, 6)).astype("float32") / 4
    y = np.sort(rng.integers(0, NUM_CLASSES, (3, 8)), axis=1).astype("int32")
    proxies = rng.normal(size=(NUM_CLASSES, PROXIES, DIM)) * rng.uniform(
        0.2, 0.6, (NUM_CLASSES, 1, 1)
    )
    model.proxies.assign(proxies)
    history = model.fit(tf.data.Dataset.from_tensor_slices((x, y)), verbose=0)
    return history.history["loss"], model.get_weights()


@pytest.mark.parametrize("normalization", ["lipschitz", "l2", None])
def test_training_is_that_with_all_proxies(monkeypatch, normalization):
    loss, weights = train(normalization)
    few(monkeypatch, 10**6)
    expected_loss, expected = train(normalization)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for weight, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)


def test_xla_and_replicas_train_the_same():
    expected_loss, expected = train()
    for other in ({"jit_compile": True}, {"num_replicas": 2}):
        loss, weights = train(**other)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        for weight, reference in zip(weights, expected, strict=True):
            np.testing.assert_allclose(weight, reference, rtol=1e-5, atol=1e-5)
