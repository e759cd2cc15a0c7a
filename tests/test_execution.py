"""How steps are executed changes no result beyond rounding, switches included."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import CCPCallback, CCPModel
from keras_ccp.model import reset_slots

NUM_CLASSES, BATCH, NUM_STEPS, NUM_EPOCHS = 4, 8, 4, 4
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(NUM_EPOCHS * NUM_STEPS, BATCH, 6)).astype("float32")
LABELS = RNG.integers(0, NUM_CLASSES, IMAGES.shape[:2]).astype("int32")
POOL = RNG.normal(size=(16, 6)).astype("float32"), np.arange(16) % NUM_CLASSES
UNSEEN = RNG.normal(size=(12, 6)).astype("float32"), np.arange(12) % 3


class SwitchEveryEpoch(CCPCallback):
    """Does not leave it to rounding when a problem is over."""

    def _record(self, map_at_r):
        super()._record(map_at_r)
        self.wait = self.patience


def train(
    optimizer=None,
    policy="float32",
    data=(IMAGES, LABELS),
    pool_size=4,
    **compile_arguments,
):
    """Trains by switching problems; returns the history and the model."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    images = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(images)
    # Inside the unit ball. All that is outside of it has length 1 for K-Center, which
    # would choose the farthest from the origin by the last bit.
    small = keras.initializers.RandomNormal(stddev=0.15, seed=0)
    head = keras.layers.Dense(4, kernel_initializer=small, dtype="float32")
    embedder = keras.Model(images, head(hidden))
    model = CCPModel(embedder, NUM_CLASSES, 2, proximal_weight=0.1, in_batch_weight=0.5)
    # Not Adam, whose first step keeps but the sign of a gradient.
    optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
    arguments = {"jit_compile": False, **compile_arguments}
    model.compile(optimizer, "contrastive", **arguments)
    callback = SwitchEveryEpoch(
        POOL,
        UNSEEN,
        pool_size=pool_size,
        restore_best=False,
        restore_on_projection=False,
        seed=0,
    )
    history = model.fit(
        tf.data.Dataset.from_tensor_slices(data),
        steps_per_epoch=len(data[0]) // NUM_EPOCHS,
        epochs=NUM_EPOCHS,
        callbacks=[callback],
        verbose=0,
    ).history
    assert callback.num_projections == NUM_EPOCHS
    return history, model


@functools.cache
def plain(pool_size=4):
    return train(pool_size=pool_size)


def assert_same(outcome, tolerance, expected=None):
    (history, model), (expected, other) = outcome, expected or plain()
    assert history["projection"] == list(range(NUM_EPOCHS))
    for name in ("loss", "pair_loss", "proximal_loss"):
        np.testing.assert_allclose(history[name], expected[name], tolerance, tolerance)
    for weight, same in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(weight, same, tolerance, tolerance)


def test_steps_per_execution():
    assert_same(train(steps_per_execution=2), 1e-6)


def test_xla():
    assert_same(train(jit_compile=True), 1e-5)


def test_eager_steps():
    assert_same(train(run_eagerly=True), 1e-5)


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_float16", 5e-3), ("mixed_bfloat16", 4e-2)]
)
def test_mixed_precision(policy, tolerance):
    """Float16 has 11 bits and bfloat16 8: each product is off by up to 2^-11, 2^-8."""
    # Two images a class for two proxies: rounding cannot choose another image.
    assert_same(train(policy=policy, pool_size=2), tolerance, plain(pool_size=2))


# ==== Gradient accumulation ====


def accumulate(images, labels):
    """Each batch twice, with an update after the second time."""
    data = np.repeat(images, 2, axis=0), np.repeat(labels, 2, axis=0)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2)
    return train(optimizer, data=data)


def test_accumulated_gradients_of_equal_batches_are_those_of_one():
    """The mean of two equal gradients is each of them: the same updates."""
    history, model = accumulate(IMAGES, LABELS)
    _, expected = plain()
    for weight, same in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(weight, same, rtol=1e-5, atol=1e-6)
    assert int(model.optimizer.iterations) == NUM_EPOCHS * NUM_STEPS
    assert history["val_map_at_r"] == pytest.approx(plain()[0]["val_map_at_r"])


def test_switch_forgets_gradients_gathered_for_the_old_proxies():
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=3)
    _, model = train(optimizer)
    # 16 steps: one gradient since the last update, and the switch after it.
    proxies = model.proxy_bank.proxies
    index = [v is proxies for v in model.trainable_variables].index(True)
    gathered = [v.numpy() for v in optimizer._accumulated_gradients]
    assert [v.any() for v in gathered] == [i != index for i in range(len(gathered))]


@pytest.mark.parametrize("scaled", [False, True])
def test_reset_covers_the_accumulator(scaled):
    optimizer = inner = keras.optimizers.Adam(gradient_accumulation_steps=2)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(inner)
    one, other = keras.Variable(np.ones(3), name="a"), keras.Variable(np.ones(3))
    optimizer.build([one, other])
    for slots in (inner._accumulated_gradients, inner._momentums, inner._velocities):
        for slot in slots:
            slot.assign(np.ones(3))
    reset_slots(optimizer, one)
    for slots in (inner._accumulated_gradients, inner._momentums, inner._velocities):
        assert not slots[0].numpy().any() and slots[1].numpy().all()
