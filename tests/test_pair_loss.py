"""What the contract of `PairLoss` promises, for every loss."""

import json
import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import losses

ALL = list(losses._BY_NAME)


def random_problem():
    """12 samples of 5 classes, one of them alone, and 9 references."""
    rng = np.random.default_rng(0)
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4], "int32")
    references = np.array([5, 1, 3, 1, 0, 5, 3, 4, 1], "int32")
    x, r = rng.normal(size=(12, 3)), rng.normal(size=(9, 3))
    return x.astype("float32"), labels, r.astype("float32"), references


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_trains_any_keras_model(name, jit_compile):
    x, labels, _, _ = random_problem()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    before = model.get_weights()[0]
    model.compile("sgd", loss=losses.get(name), jit_compile=jit_compile)
    expected = losses.get(name)(labels, model(x))
    history = model.fit(x, labels[:, None], batch_size=12, verbose=0)
    assert history.history["loss"][0] == pytest.approx(float(expected), rel=1e-5)
    assert np.abs(model.get_weights()[0] - before).max() > 0


@pytest.mark.parametrize("name", ALL)
def test_compiled_equals_eager(name):
    loss = losses.get(name)
    x, labels, r, references = random_problem()
    expected = loss.pairs(labels, x, references, r)
    compiled = tf.function(loss.pairs, jit_compile=True)
    np.testing.assert_allclose(
        compiled(labels, x, references, r), expected, rtol=1e-5, atol=1e-6
    )
    unknown_batch = tf.function(
        loss.pairs,
        input_signature=[
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([None, 3]),
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([None, 3]),
        ],
    )
    rows = unknown_batch(labels.astype("int32"), x, references.astype("int32"), r)
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_neighbouring_labels_survive_mixed_precision(name):
    # float16 has no 11317: it would fall together with 11320.
    keras.config.set_dtype_policy("mixed_float16")
    x = np.array([[1.0, 0.0], [-1.0, 0.0]] * 2, "float16")
    loss, labels = losses.get(name), np.array([11317, 11317, 11320, 11320])
    apart = loss(labels[:, None], x)
    assert apart.dtype == tf.float32
    assert float(apart) == float(loss([0, 0, 1, 1], x))
    assert float(apart) != float(loss([0, 0, 0, 0], x))
    rows = loss.pairs(labels, x, labels[::-1], x)
    assert rows.dtype == tf.float32
    np.testing.assert_array_equal(rows, loss.pairs([0, 0, 1, 1], x, [1, 1, 0, 0], x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ALL)
def test_computes_in_float32_or_better(name, dtype):
    x, labels, r, references = random_problem()
    x = tf.cast(x, dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        rows = losses.get(name).pairs(labels, x, references, r)
    assert rows.dtype == (tf.float64 if dtype == "float64" else tf.float32)
    assert tape.gradient(rows, x).dtype == dtype


@pytest.mark.parametrize(
    "loss",
    [
        losses.ContrastiveLoss(0.1, 0.7, name="near"),
        losses.CosineContrastiveLoss(0.2, similarity="dot", reduction="sum"),
        losses.MultiSimilarityLoss(3, 30, 0.4, similarity="dot"),
        losses.TripletLoss(0.3, reduction=None),
    ],
)
def test_survives_serialisation(loss):
    config = loss.get_config()
    assert type(loss).from_config(config).get_config() == config
    written = json.dumps(keras.saving.serialize_keras_object(loss))
    read = keras.saving.deserialize_keras_object(json.loads(written))
    assert type(read) is type(loss) and read.get_config() == config


@pytest.mark.parametrize("name", ALL)
def test_two_replicas_give_what_one_gives(name):
    loss = losses.get(name)
    x, labels, r, references = random_problem()

    def step(batch):
        embeddings, batch_labels = batch
        with tf.GradientTape() as tape:
            tape.watch(embeddings)
            rows = loss.pairs(batch_labels, embeddings, references, r)
            value = tf.reduce_mean(rows)
        return rows, tape.gradient(value, embeddings)

    # Without collective operations, whose keys two strategies of a process would share.
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    batches = tf.data.Dataset.from_tensor_slices((x, labels)).batch(12)
    batch = next(iter(strategy.experimental_distribute_dataset(batches)))
    rows, gradients = tf.function(strategy.run)(step, args=(batch,))
    expected_rows, expected_gradient = step((tf.constant(x), labels))
    rows = np.concatenate(strategy.experimental_local_results(rows))
    gradients = np.concatenate(strategy.experimental_local_results(gradients))
    np.testing.assert_allclose(rows, expected_rows, rtol=1e-5)
    # Each replica averages over half the batch.
    np.testing.assert_allclose(gradients / 2, expected_gradient, rtol=1e-4, atol=1e-6)


# --- Arguments ---


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: losses.ContrastiveLoss(-0.1), ValueError, "positive_margin=-0.1"),
        (lambda: losses.ContrastiveLoss(0, "1"), TypeError, "negative_margin='1'"),
        (lambda: losses.CosineContrastiveLoss(True), TypeError, "margin=True"),
        (lambda: losses.CosineContrastiveLoss(math.nan), ValueError, "margin=nan"),
        (
            lambda: losses.CosineContrastiveLoss(similarity="l2"),
            ValueError,
            "similarity='l2'",
        ),
        (lambda: losses.MultiSimilarityLoss(alpha=0), ValueError, "alpha=0"),
        (lambda: losses.MultiSimilarityLoss(beta=-1), ValueError, "beta=-1"),
        (lambda: losses.MultiSimilarityLoss(base=None), TypeError, "base=None"),
        (lambda: losses.TripletLoss(-1), ValueError, "margin=-1"),
        (lambda: losses.get("tripplet"), ValueError, "loss='tripplet'"),
        (lambda: losses.get(3), TypeError, "loss=3"),
        (
            lambda: losses.get(losses.MultiSimilarityLoss),
            TypeError,
            "`loss` must be a loss, not its class: call it, MultiSimilarityLoss()",
        ),
        (lambda: losses.get(int), TypeError, "Received: loss=<class 'int'>"),
        (
            lambda: losses.PairLoss().pairs([0], [[1.0]], [0], [[1.0]]),
            NotImplementedError,
            "PairLoss must implement",
        ),
    ],
)
def test_wrong_arguments_are_named(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize("name", ALL)
def test_get(name):
    loss = losses.get(name)
    assert isinstance(loss, losses.PairLoss)
    assert losses.get(loss) is loss
    assert loss.get_config() == type(loss)().get_config()
    with pytest.raises(ValueError, match=f'"{name}"'):
        losses.get("unknown")


# --- Shapes, reductions and functions ---

X = np.zeros((6, 4), "float32")
SIX = np.arange(6) % 3


@pytest.mark.parametrize("name", [*ALL, "memory", "function"])
@pytest.mark.parametrize(
    "labels, embeddings, error, message",
    [
        (np.eye(6, 5), X, ValueError, "one-hot rows .* labels of shape [(]6, 5"),
        ([0, 1, 2], X, ValueError, "one label for each row .* shape [(]3,[)], em"),
        (["a"] * 6, X, TypeError, "`labels` must be whole numbers; number strings"),
        (tf.constant(["a"] * 6), X, TypeError, "`labels` must be whole numbers"),
        (SIX, X[:, 0], ValueError, "`embeddings` must have shape [(]n, dim[)]"),
        (3, X, ValueError, "Received: labels of shape [(][)]"),
    ],
)
def test_what_does_not_fit_a_bare_loss_is_said(
    name, labels, embeddings, error, message
):
    with pytest.raises(error, match=message):
        any_loss(name)(labels, embeddings)


def rows_of_zeros(
    labels, embeddings, reference_labels, reference_embeddings, exclude_self=False
):
    return tf.reduce_sum(embeddings, axis=1)


def any_loss(name):
    if name == "memory":
        return losses.CrossBatchMemory("contrastive", 12)
    return losses.get(rows_of_zeros if name == "function" else name)


@pytest.mark.parametrize("name", [*ALL, "memory", "function"])
@pytest.mark.parametrize(
    "references, message",
    [
        (([0, 1], X[:2, :3]), "`reference_embeddings` must be as wide as `embeddings`"),
        (([0, 1, 2], X[:2]), "`reference_labels` must hold one label for each row"),
        ((np.eye(2, 3), X[:2]), "`reference_labels` must have shape (n,) or (n, 1)"),
        (([0, 1], X), "`reference_labels` must hold one label for each row"),
    ],
)
def test_references_that_do_not_fit_are_named(name, references, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        any_loss(name).pairs(SIX, X, *references)


@pytest.mark.parametrize("name", ALL)
def test_one_hot_labels_in_any_keras_model(name):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", losses.get(name))
    with pytest.raises(ValueError, match="turn one-hot rows into numbers"):
        model.fit(X, np.eye(6, 5), verbose=0)


def test_shapes_that_are_known_in_the_graph_only_pass():
    spec = [tf.TensorSpec(None, "int32"), tf.TensorSpec(None, "float32")]
    pairs = losses.TripletLoss().pairs
    traced = tf.function(pairs, input_signature=[*spec, *spec])
    rows = traced(SIX.astype("int32"), X, np.zeros(1, "int32"), X[:1])
    np.testing.assert_allclose(rows, pairs(SIX, X, [0], X[:1]))


@pytest.mark.parametrize("reduction", ["sum", "none", None])
def test_another_reduction_than_the_mean_is_refused(reduction):
    loss = losses.TripletLoss(reduction=reduction)
    message = f"`reduction` must be .* Received: reduction={reduction!r} of TripletLoss"
    with pytest.raises(ValueError, match=message):
        losses.check_rows(loss, 4)
    with pytest.raises(ValueError, match=message):
        losses.CrossBatchMemory(loss, 8)
    with pytest.raises(ValueError, match=f"reduction={reduction!r}"):
        losses.check_rows(losses.get(OfAnotherLibrary(reduction)), 4)
    for name in ("sum_over_batch_size", "mean"):
        losses.check_rows(losses.TripletLoss(reduction=name), 4)


class OfAnotherLibrary:
    name = "other"

    def __init__(self, reduction):
        self.reduction = reduction

    def pairs(self, *arguments, exclude_self=False):
        return rows_of_zeros(*arguments)


class WithoutExclusion(losses.PairLoss):
    def pairs(self, labels, embeddings, reference_labels, reference_embeddings):
        return rows_of_zeros(labels, embeddings, reference_labels, reference_embeddings)


@pytest.mark.parametrize(
    "make",
    [
        lambda: losses.get(lambda y_true, y_pred: y_pred),
        lambda: losses.get(lambda a, b, c, d: b),
        lambda: losses.FunctionLoss(lambda: None),
        lambda: losses.check_rows(WithoutExclusion(), 4),
    ],
)
def test_a_function_of_other_arguments_is_refused(make):
    with pytest.raises(TypeError, match="must take the arguments of PairLoss.pairs"):
        make()


@pytest.mark.parametrize(
    "result, received",
    [
        (lambda x, r: None, "None"),
        (lambda x, r: (x, r), "[(]<tf.Tensor"),
        (lambda x, r: tf.reduce_sum(r, 1), "shape [(]3,[)]"),  # a value a reference
        (lambda x, r: tf.reduce_sum(x), "shape [(][)]"),
    ],
)
def test_a_function_of_another_result_is_refused(result, received):
    def function(labels, x, reference_labels, r, exclude_self=False):
        return result(x, r)

    with pytest.raises(ValueError, match=f"one value an anchor.*Received: {received}"):
        losses.check_rows(losses.get(function), 4)


def test_saving_a_function_says_what_loading_wants():
    registered = keras.saving.register_keras_serializable("tests")(rows_of_zeros)
    losses.FunctionLoss(registered).get_config()  # no warning, which is an error here

    def mine(labels, embeddings, *references, exclude_self=False):
        return rows_of_zeros(labels, embeddings, *references)

    for loss in (losses.FunctionLoss(mine), losses.CrossBatchMemory(mine, 8)):
        with pytest.warns(
            UserWarning, match="'mine' is not registered.*custom_objects"
        ):
            written = keras.saving.serialize_keras_object(loss)
        with keras.saving.custom_object_scope({"mine": mine}):
            keras.saving.deserialize_keras_object(written).get_config()
