"""Several replicas train exactly what one trains, with every loss."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import CCPCallback, CCPModel, losses
from keras_ccp.distribute import gather_batch, gather_rows

LOSSES = {
    **{name: lambda name=name: losses.get(name) for name in losses._BY_NAME},
    "mined triplet": lambda: losses.TripletLoss(0.5, mining="hard"),
    "memory": lambda: losses.CrossBatchMemory("contrastive", size=20, start_step=1),
}
NUM_STEPS, BATCH, NUM_CLASSES = 5, 8, 4


def strategy_of(num_replicas):
    if num_replicas == 1:
        return None
    # Without collective operations, whose keys two strategies of a process would share.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def batches():
    """Steps whose samples are sorted by class: replicas hold different classes."""
    rng = np.random.default_rng(0)
    labels = np.sort(rng.integers(0, NUM_CLASSES, (NUM_STEPS, BATCH)), axis=1)
    return rng.normal(size=(NUM_STEPS, BATCH, 6)).astype("float32"), labels


@functools.cache
def train(name, num_replicas, in_batch_weight=0.5, proxies=2, switch=False):
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
    if switch:
        pool = np.concatenate([x[0], x[1]]), np.arange(16) % NUM_CLASSES
        callback = CCPCallback(pool, (x[1], y[1]), pool_size=3, seed=0)
        callback.set_model(model)
        callback.project()
    return history.history["loss"], model.get_weights()


def assert_equal(actual, expected):
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    for weight, other in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_replicas_train_what_one_trains(name, num_replicas):
    assert_equal(train(name, num_replicas), train(name, 1))


@pytest.mark.parametrize(
    "arguments",
    [
        {"switch": True},
        {"in_batch_weight": 0, "proxies": 0},
    ],
)
def test_switches_and_pairwise_training_on_replicas(arguments):
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
