"""Every loss under the float16 and bfloat16 policies."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import CCPModel, losses

NUM_CLASSES, BATCH, DIM = 4, 16, 8
POLICIES = ["mixed_float16", "mixed_bfloat16"]


def make_model(name, policy):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    embedder = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(DIM),
        ]
    )
    model = CCPModel(embedder, NUM_CLASSES, 2, in_batch_weight=0.5, proximal_weight=0.1)
    model.compile(keras.optimizers.Adam(1e-2), name, jit_compile=False)
    model.take_snapshot()
    return model


def batch():
    images = np.random.default_rng(0).normal(size=(BATCH, 6)).astype("float32")
    return images, np.arange(BATCH) % NUM_CLASSES


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", losses._BY_NAME)
def test_first_step_is_that_of_float32(name, policy):
    expected = make_model(name, "float32").train_on_batch(*batch(), return_dict=True)
    model = make_model(name, policy)
    logs = model.train_on_batch(*batch(), return_dict=True)
    assert logs["loss"] == pytest.approx(expected["loss"], rel=1e-2)
    assert model.proxy_bank.proxies.dtype == "float32"
    assert {weight.dtype for weight in model.frozen_weights} == {"float32"}
    # float16 steps go through loss scaling; the logged loss is the unscaled one.
    is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert is_scaled == (policy == "mixed_float16")


def test_a_float64_network_trains_as_a_float32_one():
    single = make_model("contrastive", "float32")
    keras.config.set_floatx("float64")
    try:
        double = make_model("contrastive", "float64")
        double.set_weights(single.get_weights())
        logs = double.train_on_batch(*batch(), return_dict=True)
    finally:
        keras.config.set_floatx("float32")
    expected = single.train_on_batch(*batch(), return_dict=True)
    assert double.embedder.weights[0].dtype == "float64"
    assert logs["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for weight, other in zip(double.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", losses._BY_NAME)
def test_ten_steps_stay_finite_and_learn(name, policy):
    model = make_model(name, policy)
    before = model.get_weights()
    data = tf.data.Dataset.from_tensors(batch()).repeat(10)
    history = model.fit(data, epochs=2, verbose=0).history["loss"]
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert np.isfinite(history).all() and history[1] < history[0]
    assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
