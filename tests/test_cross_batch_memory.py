import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import mirrored

from keras_ccp import losses
from keras_ccp.layers import l2_normalize, lipschitz_normalize
from keras_ccp.losses.memory import CrossBatchMemory, EmbeddingMemory

SMALL = np.array([0, 0, 1, 1])


def random_batches(*sizes, dim=3, num_classes=4):
    """One `(labels, unit embeddings)` a size."""
    rng = np.random.default_rng(0)
    for size in sizes:
        labels = rng.integers(0, num_classes, size).astype("int32")
        yield labels, l2_normalize(rng.normal(size=(size, dim)).astype("float32"))


def linear_model(dim=3):
    return keras.Sequential([keras.Input((dim,)), keras.layers.Dense(2)])


# --- The paper's own implementation ---


@pytest.mark.parametrize("jit_compile", [None, False, True])
def test_matches_the_reference_up_to_own_copies(golden, jit_compile):
    labels = golden["in/labels"]
    batches = [golden[f"in/{name}"] for name in ("emb", "xbm_emb_2", "xbm_emb_3")]
    batches = [lipschitz_normalize(batch) for batch in batches]
    loss = CrossBatchMemory(
        losses.CosineContrastiveLoss(0.5, similarity="dot"), size=24, start_step=1
    )
    step = loss if jit_compile is None else tf.function(loss, jit_compile=jit_compile)
    values = [float(step(labels, batch)) for batch in batches]
    # The reference counts every sample as a positive of its copy in the memory, with
    # its dot product with itself as the similarity.
    own = [0.0]  # the first step is without the memory
    for batch in batches[1:]:
        squares = np.sum(np.square(np.float64(batch)), axis=1)
        own.append(np.mean(np.maximum(0, 1 - 1e-5 - squares)))
    assert min(own[1:]) > 0.05
    expected = golden["out/XBM_C1_lip/losses_3_batches"] - own
    np.testing.assert_allclose(values, expected, rtol=1e-5)


# --- The definition as loops ---


def contrastive_terms(pairs):
    pos, neg = [0.0], [0.0]
    for _, same, x, r in pairs:
        d = math.dist(x, r)
        (pos if same else neg).append(max(0.0, d if same else 1.2 - d))
    return sum(sum(t) / max(1, np.count_nonzero(t)) for t in (pos, neg))


def multi_similarity_terms(pairs):
    sums = {}
    for i, same, x, r in pairs:
        scale = -2 if same else 40
        row = sums.setdefault(i, {True: 1.0, False: 1.0})
        row[same] += math.exp(scale * (np.dot(x, r) - 0.5))
    rows = [math.log(s[True]) / 2 + math.log(s[False]) / 40 for s in sums.values()]
    return np.mean(rows)


def loop_steps(terms, batches, size, start_step):
    memory = []  # (step, i) tells a sample from its own copy; newest first
    for step, (labels, embeddings) in enumerate(batches):
        samples = [
            ((step, i), int(label), x)
            for i, (label, x) in enumerate(
                zip(labels, np.float64(embeddings), strict=True)
            )
        ]
        memory = (samples + memory)[:size]
        value = 0.0
        for references in [samples] + [memory] * (step >= start_step):
            value += terms(
                [
                    (name, label == other, x, r)
                    for name, label, x in samples
                    for other_name, other, r in references
                    if name != other_name
                ]
            )
        yield value


@pytest.mark.parametrize("start_step", [0, 2])
@pytest.mark.parametrize("size", [6, 15, 100])
@pytest.mark.parametrize(
    ("inner", "terms"),
    [
        (losses.ContrastiveLoss(0.0, 1.2), contrastive_terms),
        (losses.MultiSimilarityLoss(), multi_similarity_terms),
    ],
)
def test_matches_the_definition(inner, terms, size, start_step):
    # Batches of one size and of several; 6 keeps the batch alone, 15 wraps around
    # inside a batch, 100 is never full.
    batches = list(random_batches(6, 6, 6, 4, 5, 6))
    loss = CrossBatchMemory(inner, size, start_step)
    values = [float(loss(labels, x)) for labels, x in batches]
    expected = list(loop_steps(terms, batches, size, start_step))
    np.testing.assert_allclose(values, expected, rtol=1e-5)


# --- What counts ---


def test_gradients_flow_through_the_batch_only():
    loss = CrossBatchMemory("multi_similarity", size=12)
    (past_labels, past), (labels, x) = random_batches(6, 6)
    with tf.GradientTape() as tape:
        tape.watch((past, x))
        loss(past_labels, past)
        value = loss(labels, x)
    past_gradient, gradient = tape.gradient(value, (past, x))
    assert past_gradient is None
    # The same loss with constants as references.
    inner = losses.MultiSimilarityLoss()
    with tf.GradientTape() as tape:
        tape.watch(x)
        references = np.concatenate([x, past])
        reference_labels = np.concatenate([labels, past_labels])
        rows = inner.pairs(labels, x, reference_labels, references, exclude_self=True)
        value = inner(labels, x) + tf.reduce_mean(rows)
    np.testing.assert_allclose(gradient, tape.gradient(value, x), rtol=1e-5, atol=1e-7)


def test_before_start_step_it_is_the_wrapped_loss():
    loss, inner = CrossBatchMemory("contrastive", 50, 2), losses.ContrastiveLoss()
    first, second, third = random_batches(8, 8, 8)
    for labels, x in (first, second):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            value, expected = loss(labels, x), inner(labels, x)
        assert value == expected
        np.testing.assert_array_equal(
            tape.gradient(value, x), tape.gradient(expected, x)
        )
    assert loss(*third) > inner(*third)


def test_other_references_are_left_to_the_wrapped_loss():
    loss = CrossBatchMemory("multi_similarity", size=10)
    (labels, x), (references, r) = random_batches(6, 5)
    rows = loss.pairs(labels, x, references, r)
    np.testing.assert_array_equal(
        rows, losses.MultiSimilarityLoss().pairs(labels, x, references, r)
    )
    rows = loss.pairs(labels, x, labels, x, exclude_self=True)
    np.testing.assert_array_equal(rows, losses.MultiSimilarityLoss().call(labels, x))
    assert loss.memory is None


def test_wraps_a_function():
    def one(labels, embeddings, *references, exclude_self=False):
        return tf.fill(tf.shape(labels), tf.cast(tf.size(references[0]), tf.float32))

    loss = CrossBatchMemory(one, size=10)
    values = [float(loss(labels, x)) for labels, x in random_batches(4, 4, 4)]
    assert values == [4 + 4, 4 + 8, 4 + 10]  # references in the batch + in the memory


@pytest.mark.parametrize("labels", [[11317, 11317, 11320, 11320], 2**31 + SMALL])
def test_neighbouring_labels_survive_mixed_precision(labels):
    # float16 has no 11317: it would fall together with 11320. int32 has no 2^31.
    keras.config.set_dtype_policy("mixed_float16")
    x = tf.constant([[1.0, 0.0], [-1.0, 0.0]] * 2, "float16")
    apart, small = (CrossBatchMemory("contrastive", size=8) for _ in range(2))
    for _ in range(2):
        value = apart(np.array(labels)[:, None], x)
        assert value.dtype == tf.float32
        assert value == small(SMALL, x)
    np.testing.assert_array_equal(apart.memory.labels[:4], labels)
    assert apart.memory.embeddings.dtype == "float32"
    # As `CCPModel` calls it; the gradient has the dtype of the embeddings.
    with tf.GradientTape() as tape:
        tape.watch(x)
        rows = apart.call(tf.constant(labels), x)
    assert rows.dtype == tf.float32
    assert tape.gradient(rows, x).dtype == tf.float16


# --- In a model ---


def test_compiled_for_any_batch_size():
    loss, expected = (CrossBatchMemory("triplet", size=9, start_step=1) for _ in "ab")
    specs = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, 3])]
    step = tf.function(loss.call, input_signature=specs)
    for labels, x in random_batches(5, 4, 9, 2):
        np.testing.assert_allclose(
            step(labels, x), expected.call(labels, x), rtol=1e-5, atol=1e-7
        )
    with pytest.raises(tf.errors.InvalidArgumentError, match="Received a larger batch"):
        step(*next(random_batches(10)))


def test_building_a_model_leaves_the_memory_as_it_is():
    loss = CrossBatchMemory("contrastive", size=9)
    specs = keras.KerasTensor((6,), "int32"), keras.KerasTensor((6, 3))
    for _ in range(2):
        # As Keras builds a model under a strategy; the first time without a memory.
        keras.src.backend.compute_output_spec(loss, *specs)
        assert all(not np.any(weight) for weight in loss.memory.get_weights())
    loss(*next(random_batches(6)))
    before = loss.memory.get_weights()
    keras.src.backend.compute_output_spec(loss, *specs)
    for weight, kept in zip(loss.memory.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, kept)


def trained_model(epochs=2):
    labels, x = next(random_batches(24))
    model = linear_model()
    model.compile("sgd", loss=CrossBatchMemory("contrastive", size=20))
    model.fit(x, labels, batch_size=8, epochs=epochs, verbose=0, shuffle=False)
    return model


def assert_same_memory(memory, other):
    assert int(memory.num_rows) > 0
    for weight, kept in zip(memory.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, kept)


def test_memory_is_saved_with_the_model_and_with_its_weights(tmp_path):
    model, other = trained_model(), trained_model(epochs=0)
    model.save(tmp_path / "model.keras")
    read = keras.models.load_model(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    other.loss.build(2)
    other.load_weights(tmp_path / "model.weights.h5")
    for loss in (read.loss, other.loss):
        assert_same_memory(loss.memory, model.loss.memory)
    labels, x = next(random_batches(8))
    assert read.test_on_batch(x, labels) == model.test_on_batch(x, labels)


class Tracking(keras.Model):
    """A model that has the memory as an attribute, as `CCPModel` has."""

    def __init__(self, loss):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        loss.build(2)
        self.memory = loss.memory
        self.compile("sgd", loss=loss)

    def call(self, inputs):
        return self.dense(inputs)


def test_memory_is_a_part_of_a_model_that_tracks_it(tmp_path):
    labels, x = next(random_batches(24))
    models = [Tracking(CrossBatchMemory("contrastive", size=20)) for _ in range(3)]
    for model in models:
        model(x)
    assert len(models[0].trainable_weights) == 2
    assert len(models[0].weights) == 6
    models[0].fit(x, labels, batch_size=8, verbose=0)
    models[0].save_weights(tmp_path / "model.weights.h5")
    models[1].load_weights(tmp_path / "model.weights.h5")
    assert_same_memory(models[1].loss.memory, models[0].loss.memory)
    path = tf.train.Checkpoint(models[0]).save(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(models[2]).restore(path)
    assert_same_memory(models[2].loss.memory, models[0].loss.memory)


# --- Replicas ---


def split(strategy, values, first):
    """Values of which the first replica gets the `first` ones."""
    halves = tf.constant(values[:first]), tf.constant(values[first:])
    return strategy.experimental_distribute_values_from_function(
        lambda context: halves[context.replica_id_in_sync_group]
    )


@pytest.mark.parametrize("inner", ["contrastive", "multi_similarity"])
def test_two_replicas_give_what_one_gives(inner):
    strategy = mirrored()
    loss, single = (CrossBatchMemory(inner, size=15, start_step=1) for _ in range(2))
    with strategy.scope():
        loss.build(3)

    def step(labels, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = loss.call(labels, x)
        return rows, tape.gradient(rows, x)

    run = tf.function(lambda *args: strategy.run(step, args=args))
    for labels, x in random_batches(8, 8, 8):
        results = run(split(strategy, labels, 3), split(strategy, x, 3))
        rows, gradient = (
            np.concatenate(strategy.experimental_local_results(result))
            for result in results
        )
        with tf.GradientTape() as tape:
            tape.watch(x)
            expected = single.call(labels, x)
        np.testing.assert_allclose(rows, expected, rtol=1e-5)
        np.testing.assert_allclose(
            gradient, tape.gradient(expected, x), rtol=1e-4, atol=1e-5
        )
    for weight, expected in zip(
        loss.memory.weights, single.memory.weights, strict=True
    ):
        copies = strategy.experimental_local_results(weight.value)
        assert len(copies) == 2
        for copy in copies:
            np.testing.assert_array_equal(copy, expected)


# --- Arguments ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("contrastive", 0), "size=0"),
        (("contrastive", 9, -1), "start_step=-1"),
        (("xbm", 9), "loss='xbm'"),
        ((CrossBatchMemory("contrastive", 8), 16), "loss without a memory"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CrossBatchMemory(*arguments)


def test_a_batch_must_fit_into_the_memory():
    loss = CrossBatchMemory("contrastive", size=5)
    message = re.escape("Received a larger batch: size=5, 6 rows")
    labels, x = next(random_batches(6))
    for step in (loss, tf.function(loss), tf.function(loss, jit_compile=True)):
        with pytest.raises(ValueError, match=message):
            step(labels, x)
    assert loss.memory is None
    loss(labels[:5], x[:5])


def test_one_memory_serves_one_model():
    loss = CrossBatchMemory("contrastive", size=5)
    loss.build(3)
    memory = loss.memory
    loss.build(3)
    assert loss.memory is memory
    with pytest.raises(ValueError, match="embedding_dim=4"):
        loss.build(4)
    with pytest.raises(ValueError, match="embedding_dim=2"):
        loss([0, 1], [[1.0, 0.0], [0.0, 1.0]])


def test_survives_serialisation():
    loss = CrossBatchMemory("contrastive", 7)
    for is_built in (False, True):
        read = keras.saving.deserialize_keras_object(
            keras.saving.serialize_keras_object(loss)
        )
        assert (read.memory is not None) == is_built
        loss.build(3)
    memory = EmbeddingMemory(7, 3)
    assert EmbeddingMemory.from_config(memory.get_config()).embeddings.shape == (7, 3)
