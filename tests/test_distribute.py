"""Several replicas train exactly what one trains, with every loss."""

import contextlib
import functools
import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

from keras_ccp import (
    CCPCallback,
    CCPModel,
    build_embedder,
    datasets,
    distribute,
    losses,
)
from keras_ccp.app.config import DistributionConfig
from keras_ccp.backbones import small_cnn
from keras_ccp.distribute import (
    gather_batch,
    gather_rows,
    is_chief,
    make_strategy,
)
from keras_ccp.pipeline import EvaluationData, balanced_batches

LOSSES = {
    **{name: lambda name=name: losses.get(name) for name in losses._BY_NAME},
    "mined triplet": lambda: losses.TripletLoss(0.5, mining="hard"),
    "memory": lambda: losses.CrossBatchMemory("contrastive", size=20, start_step=1),
}
NUM_STEPS, BATCH, NUM_CLASSES = 5, 8, 4


def strategy_of(num_replicas):
    return make_strategy("mirrored", num_replicas) if num_replicas > 1 else None


def batches():
    """Steps whose samples are sorted by class: replicas hold different classes."""
    rng = np.random.default_rng(0)
    labels = np.sort(rng.integers(0, NUM_CLASSES, (NUM_STEPS, BATCH)), axis=1)
    return rng.normal(size=(NUM_STEPS, BATCH, 6)).astype("float32"), labels


@functools.cache
def train(name, num_replicas, in_batch_weight=0.5, proxies=2, project=False):
    keras.utils.set_random_seed(0)
    strategy = strategy_of(num_replicas)
    with strategy.scope() if strategy else contextlib.nullcontext():
        embedder = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(5, activation="tanh"),
                keras.layers.Dense(4),
            ]
        )
        model = CCPModel(
            embedder,
            NUM_CLASSES,
            proxies,
            proximal_weight=0.1,
            in_batch_weight=in_batch_weight,
            proxy_learning_rate_multiplier=3.0,
        )
        # Not Adam, whose first step keeps but the sign of a gradient.
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9), LOSSES[name](), jit_compile=False
        )
    model.take_snapshot()
    x, y = batches()
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((x, y.astype("int32"))), verbose=0
    )
    if project:
        pool = np.concatenate([x[0], x[1]]), np.arange(16) % NUM_CLASSES
        callback = CCPCallback(pool, (x[1], y[1]), pool_size=3, seed=0)
        callback.set_model(model)
        callback.project()
    return history.history["loss"], model.get_weights()


def assert_equal(actual, expected):
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    for weight, other in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-5)


# Four where something is counted over all of them in another way.
FOUR = "contrastive", "proxy_anchor", "soft_triple", "lifted_structure", "memory"


@pytest.mark.parametrize(
    ("name", "num_replicas"),
    [*((name, 2) for name in LOSSES), *((name, 4) for name in FOUR)],
)
def test_replicas_train_what_one_trains(name, num_replicas):
    assert_equal(train(name, num_replicas), train(name, 1))


@pytest.mark.parametrize(
    "arguments",
    [
        {"project": True},
        {"in_batch_weight": 0, "proxies": 0},
    ],
)
def test_projections_and_pairwise_training_on_replicas(arguments):
    expected = train("contrastive", 1, **arguments)
    assert_equal(train("contrastive", 2, **arguments), expected)


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (3, 1, 2, 5)])
def test_gathered_rows_and_their_gradient(sizes):
    strategy = strategy_of(len(sizes))
    values = np.split(np.arange(2.0 * sum(sizes)).reshape(-1, 2), np.cumsum(sizes)[:-1])
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )

    def step(rows):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            batch = gather_batch(rows)
            # Each replica weighs its own view by position: 1 for its first row.
            weights = tf.range(1.0, sum(sizes) + 1.0)[:, tf.newaxis]
            loss = tf.reduce_sum(tf.cast(weights, batch.dtype) * batch**2)
        return gather_rows(rows), batch, tape.gradient(loss, rows)

    outputs = tf.function(strategy.run)(step, args=(rows,))
    everything, batch, gradients = map(strategy.experimental_local_results, outputs)
    order = [np.roll(np.arange(len(sizes)), -r) for r in range(len(sizes))]
    expected = [np.zeros_like(value) for value in values]
    for replica, replicas in enumerate(order):
        own_first = np.concatenate([values[other] for other in replicas])
        np.testing.assert_array_equal(everything[replica], np.concatenate(values))
        np.testing.assert_array_equal(batch[replica], own_first)
        weights = np.split(
            np.arange(1.0, sum(sizes) + 1), np.cumsum([sizes[r] for r in replicas])[:-1]
        )
        for other, weight in zip(replicas, weights, strict=True):
            expected[other] += 2 * weight[:, None] * values[other]
    for gradient, value in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, value)


# ==== Embedding ====


@keras.saving.register_keras_serializable("tests")
class WithReplica(keras.layers.Layer):
    """Puts the number of the replica beside each row."""

    def call(self, inputs):
        context = tf.distribute.get_replica_context()  # none while it is built
        replica = 0 if context is None else context.replica_id_in_sync_group
        replica = tf.fill(tf.shape(inputs), tf.cast(replica, inputs.dtype))
        return tf.concat([inputs, replica], axis=1)


def row_model(num_replicas):
    """Images of one number -> that number and the replica that saw it."""
    with make_strategy("mirrored", num_replicas).scope():
        images = keras.Input((1,))
        model = CCPModel(
            keras.Model(images, WithReplica()(images)), 2, 0, normalization=None
        )
        model.compile(keras.optimizers.SGD(), "contrastive")
    return model


@pytest.mark.parametrize(("num_replicas", "batch_size"), [(2, 128), (2, 4), (3, 6)])
def test_every_row_is_embedded_once_in_order(num_replicas, batch_size):
    model = row_model(num_replicas)
    for count in (1, 5, 9):
        rows = np.arange(float(count), dtype="float32")[:, None]
        data = EvaluationData((rows, np.zeros(count, "int32")))
        embeddings = model.predict(data.batches(batch_size=batch_size), verbose=0)
        np.testing.assert_array_equal(embeddings[:, :1], rows)
    if batch_size < 9:
        assert set(embeddings[:, 1]) == set(range(num_replicas))
    pairs = tf.data.Dataset.from_tensor_slices((rows, np.zeros(9, "int32"))).batch(2)
    some = np.array([0, 1, 3, 7, 8])
    streamed = EvaluationData(pairs).batches(some, batch_size)
    embeddings = model.predict(streamed, verbose=0)
    np.testing.assert_array_equal(embeddings[:, 0], some)


def test_replicas_share_a_full_batch_evenly():
    model = row_model(2)
    rows = np.arange(256.0, dtype="float32")[:, None]
    data = EvaluationData((rows, np.zeros(256, "int32")))
    replicas = model.predict(data.batches(), verbose=0)[:, 1]
    np.testing.assert_array_equal(replicas.reshape(2, 2, 64)[..., 0], [[0, 1], [0, 1]])
    assert replicas.sum() == 128


def test_batch_norm_sees_the_whole_batch():
    """Two replicas, of 1.. and of 9.., end with the weights and statistics of one."""

    def train(devices):
        keras.utils.set_random_seed(0)
        strategy = make_strategy("mirrored", devices)
        with strategy.scope():
            layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
            embedder = keras.Sequential([keras.Input((2,)), *layers])
            model = CCPModel(embedder, 2, 1, normalization=None)
            model.compile(keras.optimizers.SGD(0.1), "contrastive")
        images = np.arange(24, dtype="float32").reshape(12, 2) ** 1.1 / 10
        data = tf.data.Dataset.from_tensor_slices((images, np.arange(12) % 2))
        model.fit(data.batch(4), epochs=2, verbose=0)
        return model.get_weights()

    for weight, other in zip(train(2), train(1), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-5)


def test_small_cnn_trains_on_two_replicas_what_it_trains_on_one():
    """The example of docs/distribution.md, weights and statistics of batch norm."""

    def train(devices):
        keras.utils.set_random_seed(0)
        with make_strategy("mirrored", devices).scope():
            embedder = build_embedder(small_cnn())
            model = CCPModel(embedder, num_classes=4, proxies_per_class=2)
            model.compile(keras.optimizers.SGD(0.1), "multi_similarity")
        data = datasets.emoji().select_classes(range(4))
        batches = balanced_batches(data, 4, 4, seed=0)
        history = model.fit(batches, steps_per_epoch=4, verbose=0).history
        return history["loss"], model.get_weights()

    one, two = train(1), train(2)
    assert_equal(two, one)


# ==== Strategies ====


def test_strategies():
    assert make_strategy("none", None) is tf.distribute.get_strategy()
    for devices, count in ((None, 1), (3, 3)):
        strategy = make_strategy("mirrored", devices)
        assert strategy.num_replicas_in_sync == count and is_chief(strategy)
        assert not distribute.has_workers(strategy)
    tf.zeros(())
    with pytest.raises(RuntimeError, match="initialized"):  # by TensorFlow
        make_strategy("mirrored", 5)


def test_workers_need_addresses(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match="TF_CONFIG.*\n.*docs/distribution.md"):
        make_strategy("multi_worker", None)


def test_files_of_other_workers_vanish(tmp_path, monkeypatch):
    out = tmp_path / "new" / "run"
    with distribute.writable(out, make_strategy("none", None)) as directory:
        assert directory == out and out.is_dir()
    monkeypatch.setattr(distribute, "is_chief", lambda strategy: False)
    with distribute.writable(out, make_strategy("none", None)) as directory:
        (directory / "file").touch()
    assert not directory.exists() and list(out.iterdir()) == []


def test_guide(monkeypatch):
    guide = Path(__file__).parent.parent / "docs" / "distribution.md"
    blocks = re.findall(r"```(\w+)\n(.*?)```", guide.read_text("utf-8"), re.DOTALL)
    for language, text in blocks:
        if language == "yaml" and text.startswith("distribution:"):
            DistributionConfig.model_validate(yaml.safe_load(text)["distribution"])
        if found := re.search(r"TF_CONFIG='(.*?)'", text, re.DOTALL):
            given = json.loads(found[1])
            assert len(given["cluster"]["worker"]) == 2 and given["task"]["index"] == 0
    (code,) = [text for language, text in blocks if language == "python"]
    strategy = make_strategy("mirrored", 2)
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: strategy)
    namespace = {}
    exec(compile(code, str(guide), "exec"), namespace)
    assert namespace["model"].distribute_strategy.num_replicas_in_sync == 2
