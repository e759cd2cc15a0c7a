"""What the contract of `PairLoss` promises, for every loss."""

import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import on_replicas, pair_problem, with_gradients

from keras_ccp import losses

ALL = list(losses._BY_NAME)


def random_problem():
    labels, x, references, r = pair_problem()
    x, r = (tf.constant(points, tf.float32) for points in (x, r))
    return tf.constant(labels), x, tf.constant(references), r


@pytest.mark.parametrize("name", ALL)
def test_trains_any_keras_model(name):
    labels, x, *_ = random_problem()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    before = model.get_weights()[0]
    model.compile("sgd", loss=losses.get(name), jit_compile=False)
    expected = losses.get(name)(labels, model(x))
    history = model.fit(x, labels[:, None], batch_size=12, verbose=0)
    assert history.history["loss"][0] == pytest.approx(float(expected), rel=1e-5)
    assert np.abs(model.get_weights()[0] - before).max() > 0


@pytest.mark.parametrize("name", ALL)
def test_compiled_equals_eager(name):
    loss, problem = losses.get(name), random_problem()
    expected = with_gradients(loss, *problem)
    compiled = tf.function(lambda *args: with_gradients(loss, *args), jit_compile=True)
    found = tf.nest.flatten(compiled(*problem))
    for value, other in zip(found, tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=2e-5)
    spec = [tf.TensorSpec(None, "int32"), tf.TensorSpec(None, "float32")]
    for shapes in (spec, [tf.TensorSpec([None], "int32"), tf.TensorSpec([None, 3])]):
        rows = tf.function(loss.pairs, input_signature=[*shapes, *shapes])(*problem)
        np.testing.assert_allclose(rows, expected[0], rtol=1e-5, atol=1e-6)


# In float16 11317 is 11320; in float32 2^24 + 1 is 2^24; in int32 there is no 2^31.
NEIGHBOURS = [("mixed_float16", 11317, 3), ("float32", 2**24, 1), ("float32", 2**31, 1)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("policy, label, step", NEIGHBOURS)
def test_neighbouring_labels_stay_apart(name, policy, label, step):
    keras.config.set_dtype_policy(policy)
    x = np.array([[1.0, 0.0], [-1.0, 0.0]] * 2, "float16")
    loss, labels = losses.get(name), label + step * np.array([0, 0, 1, 1])
    apart = loss(labels[:, None], x)
    assert apart.dtype == tf.float32
    assert float(apart) == float(loss([0, 0, 1, 1], x))
    assert float(apart) != float(loss([0, 0, 0, 0], x))
    rows = loss.pairs(labels, x, labels[::-1], x)
    assert rows.dtype == tf.float32
    np.testing.assert_array_equal(rows, loss.pairs([0, 0, 1, 1], x, [1, 1, 0, 0], x))


@pytest.mark.parametrize("dtype", ["int64", "uint32"])
def test_labels_of_a_keras_model_stay_apart(dtype):
    labels, x = (2**24 + np.arange(12) // 2).astype(dtype), random_problem()[1]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Identity()])
    model.compile("sgd", losses.TripletLoss())
    expected = losses.TripletLoss()(np.arange(12) // 2, x)
    assert model.evaluate(x, labels, 12, verbose=0) == pytest.approx(float(expected))
    assert float(expected) > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ALL)
def test_computes_in_float32_or_better(name, dtype):
    labels, x, references, r = random_problem()
    x, loss = tf.cast(x, dtype), losses.get(name)
    rows, _, gradients = with_gradients(loss, labels, x, references, r)
    assert rows.dtype == (tf.float64 if dtype == "float64" else tf.float32)
    assert [gradient.dtype for gradient in gradients] == [dtype, tf.float32]
    wide = loss.pairs(labels, tf.cast(x, tf.float64), references, r)
    np.testing.assert_allclose(rows, wide, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "reduction, weight", [("sum", 1.0), (None, 1.0), ("mean", 3.0)]
)
def test_keras_reduces_the_rows(reduction, weight):
    labels, x, *_ = random_problem()
    rows = losses.TripletLoss().call(labels, x)
    loss = losses.TripletLoss(reduction=reduction)
    reduce = {"sum": np.sum, None: np.asarray, "mean": np.mean}[reduction]
    value = loss(labels, x, sample_weight=np.full(12, weight))
    np.testing.assert_allclose(value, weight * reduce(rows), rtol=1e-6)


# --- Replicas ---


def test_replicas_give_what_one_gives():
    # Classes are sorted: no replica sees what another does.
    labels, x, references, r = random_problem()

    def step(labels, x):
        results, count = [], tf.distribute.get_strategy().num_replicas_in_sync
        for loss in map(losses.get, ALL):
            with tf.GradientTape() as tape:
                tape.watch((x, r))
                rows = loss.pairs(labels, x, references, r)
                value = tf.reduce_mean(rows + loss.call(labels, x))
                # A replica's share of the gradients, which are summed.
                share = value / count
            results.append((value, *tape.gradient(share, (x, r))))
        return results

    found = on_replicas(step, labels, x)
    expected = step(labels, x)
    for (values, x_gradients, r_gradients), single in zip(found, expected, strict=True):
        whole = np.concatenate(x_gradients), np.sum(r_gradients, axis=0)
        np.testing.assert_allclose(np.mean(values), single[0], rtol=1e-5)
        for gradient, other in zip(whole, single[1:], strict=True):
            np.testing.assert_allclose(gradient, other, rtol=1e-4, atol=1e-5)


# --- Arguments ---


@pytest.mark.parametrize(
    "make, arguments",
    [
        (losses.ContrastiveLoss, [-0.1, {"negative_margin": "1"}, {"mining": "near"}]),
        (losses.CosineContrastiveLoss, [True, math.nan, {"similarity": "l2"}]),
        (losses.MultiSimilarityLoss, [0, {"beta": -1}, {"base": None}]),
        (losses.TripletLoss, [-1, {"mining": ["hard"]}, {"mining": True}]),
        (losses.ProxyAnchorLoss, ["0", {"alpha": 0}, {"similarity": "l2"}]),
        (losses.ProxyNCALoss, [0, None, {"similarity": None}]),
        (losses.SoftTripleLoss, [-1, {"gamma": 0.0}, {"tau": -0.1}, {"margin": True}]),
        (losses.ArcFaceLoss, [28.6, -0.1, {"scale": 0}]),  # 28.6 degrees
        (losses.SubCenterArcFaceLoss, [math.pi, None, {"scale": -1}]),
        (losses.CosFaceLoss, [-0.1, {"scale": 0}]),
        (losses.NTXentLoss, [0, {"similarity": "l2"}]),
        (losses.NPairsLoss, ["l2"]),
        (losses.SupConLoss, [-1, {"similarity": None}]),
        (losses.CircleLoss, [None, {"gamma": 0}]),
        (losses.LiftedStructureLoss, ["1", {"negative_margin": math.nan}]),
        (losses.MarginLoss, [-0.1, {"beta": None}]),
    ],
)
def test_wrong_arguments_are_named(make, arguments):
    first = list(make().get_config())[2]
    for given in arguments:
        given = given if isinstance(given, dict) else {first: given}
        ((argument, value),) = given.items()
        message = re.escape(f"Received: {argument}={value!r}")
        with pytest.raises((TypeError, ValueError), match=message):
            make(**given)


def test_defaults():
    defaults = {
        "contrastive": {"positive_margin": 0, "negative_margin": 0.5},
        "cosine_contrastive": {"margin": 0.5},
        "multi_similarity": {"alpha": 2, "beta": 40, "base": 0.5},
        "triplet": {"margin": 0.1},
        "proxy_anchor": {"margin": 0.1, "alpha": 32},
        "proxy_nca": {"temperature": 0.1},
        "soft_triple": {"scale": 20, "gamma": 0.1, "tau": 0.2, "margin": 0.01},
        # Those of pytorch-metric-learning 2.9.0, degrees in radians.
        "arc_face": {"margin": 28.6 * math.pi / 180, "scale": 64},
        "sub_center_arc_face": {"margin": 28.6 * math.pi / 180, "scale": 64},
        "cos_face": {"margin": 0.35, "scale": 64},
        "nt_xent": {"temperature": 0.07},
        "n_pairs": {},
        "sup_con": {"temperature": 0.1},
        "circle": {"margin": 0.4, "gamma": 80},
        "lifted_structure": {"positive_margin": 0, "negative_margin": 1},
        "margin": {"margin": 0.2, "beta": 1.2},
    }
    for name, expected in defaults.items():
        config = losses.get(name).get_config()
        assert {"name": f"{name}_loss", **expected}.items() <= config.items()
        assert (config.get("similarity", "cosine"), config.get("mining")) == (
            "cosine",
            None,
        )


@pytest.mark.parametrize("name", ALL)
def test_get(name):
    loss = losses.get(name)
    assert isinstance(loss, losses.PairLoss)
    assert losses.get(loss) is loss
    assert loss.get_config() == type(loss)().get_config()
    with pytest.raises(ValueError, match=f"\"{name}\".*Received: loss='unknown'"):
        losses.get("unknown")


@pytest.mark.parametrize(
    "other", [3, None, int, losses.TripletLoss, keras.losses.MeanSquaredError()]
)
def test_other_losses_are_refused(other):
    with pytest.raises(TypeError, match=re.escape(f"Received: loss={other!r}")):
        losses.get(other)


# --- Shapes, reductions and functions ---

X = np.zeros((6, 4), "float32")
SIX = np.arange(6) % 3


@keras.saving.register_keras_serializable("tests")
def weighted(labels, x, reference_labels, r, exclude_self=False, weight=1.0):
    return weight * tf.reduce_sum(x, axis=1)


def any_loss(name):
    if name == "memory":
        return losses.CrossBatchMemory("contrastive", 12)
    return losses.get(weighted if name == "function" else name)


@pytest.mark.parametrize("name", [*ALL, "memory", "function"])
def test_what_does_not_fit_is_said(name):
    loss, message = any_loss(name), "one label for each row .*\n.* one-hot rows"
    for labels, embeddings in (
        (np.eye(6, 5), X),
        ([0, 1, 2], X),
        ([1], X),  # would fit by broadcasting
        (SIX, X[:, 0]),
        (3, X),
    ):
        with pytest.raises(ValueError, match=message):
            loss(labels, embeddings)
        with pytest.raises(ValueError, match=message):
            loss.pairs(SIX, X, labels, embeddings)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", loss)
    with pytest.raises(ValueError, match="one-hot rows"):
        model.fit(X, np.eye(6, 5), verbose=0)


class OfAnotherLibrary:
    name = "other"

    def __init__(self, reduction):
        self.reduction = reduction

    def pairs(self, *arguments, exclude_self=False):
        return weighted(*arguments)


@pytest.mark.parametrize("reduction", ["sum", "none", None])
def test_another_reduction_than_the_mean_is_refused(reduction):
    loss = losses.TripletLoss(reduction=reduction)
    message = f"`reduction` must be .* Received: reduction={reduction!r}"
    for make in (
        lambda: losses.get(loss),
        lambda: losses.get("triplet", reduction=reduction),
        lambda: losses.CrossBatchMemory(loss, 8),
        lambda: losses.get(OfAnotherLibrary(reduction)),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    for name in ("sum_over_batch_size", "mean"):
        assert losses.get(OfAnotherLibrary(name)).name == "other"


class Overriding(losses.PairLoss):
    def pairs(self, labels, x, reference_labels, r, exclude_self=False):
        return tf.reduce_mean(x)


@pytest.mark.parametrize(
    "result",
    [
        lambda x, r: x,
        lambda x, r: tf.reduce_sum(r, 1),  # a value a reference
        lambda x, r: tf.reduce_sum(x),
    ],
)
def test_other_than_one_value_a_sample_is_refused(result):
    def function(labels, x, reference_labels, r, exclude_self=False):
        return result(x, r)

    with pytest.raises(ValueError, match="one value a sample, shape [(]batch,[)]"):
        losses.get(function).pairs(SIX, X, SIX[:3], X[:3])
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", Overriding())
    with pytest.raises(ValueError, match="Keras scales a scalar wrongly"):
        model.fit(X, SIX, verbose=0)


class Weighted(losses.PairLoss):
    """The shortest subclass, as the guide writes it."""

    def __init__(self, weight=2.0, **kwargs):
        super().__init__(weighted, weight=weight, **kwargs)


@pytest.mark.parametrize(
    "loss", [losses.get(weighted, weight=2.0), Weighted(name="weighted")]
)
def test_an_own_loss_keeps_its_arguments(loss):
    x = np.arange(24.0).reshape(6, 4)
    np.testing.assert_array_equal(loss.pairs(SIX, x, [0], x[:1]), 2 * x.sum(1))
    with keras.saving.custom_object_scope({"Weighted": Weighted}):
        written = keras.saving.serialize_keras_object(loss)
        read = keras.saving.deserialize_keras_object(written)
    assert (read.weight, read.name) == (2.0, "weighted")
    read.weight = tf.Variable(3.0)  # arguments may change during training
    np.testing.assert_array_equal(read.call(SIX, X + 1), [12.0] * 6)
