"""The fused update against Keras' own, which is its oracle (Keras 3.15.1)."""

import keras
import numpy as np
import pytest

from keras_ccp.model import fuse_adam


def updated(optimizer, fuse, steps=5):
    """The weights and slots after some steps along fixed gradients."""
    rng = np.random.default_rng(0)
    weights = [keras.Variable(rng.normal(size=size)) for size in ((7, 3), (5,))]
    optimizer.build(weights)
    if fuse:
        fuse_adam(optimizer)
    for step in range(steps):
        # Over eight powers of ten, and zero.
        gradients = [
            (rng.normal(size=w.shape) * 10.0 ** (2 * step - 6)).astype("float32")
            for w in weights
        ]
        gradients[1][0] = 0
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return [v.numpy() for v in weights + optimizer.variables]


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(1e-2),
        lambda: keras.optimizers.Adam(1e-2, beta_1=0.5, beta_2=0.9, epsilon=0.1),
        lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
        lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2),
        lambda: keras.optimizers.Adam(1e-2, use_ema=True, global_clipnorm=1.0),
        lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(1e-2, decay_steps=5)
        ),
    ],
)
def test_the_fused_update_is_that_of_keras(make):
    for fused, plain in zip(updated(make(), True), updated(make(), False), strict=True):
        np.testing.assert_allclose(fused, plain, rtol=1e-5, atol=1e-7)


def test_a_scaler_of_the_loss_is_looked_through():
    inner = keras.optimizers.Adam(1e-2)
    fuse_adam(keras.optimizers.LossScaleOptimizer(inner))
    assert "update_step" in vars(inner)


def test_what_the_kernel_cannot_do_stays_with_keras():
    class Slower(keras.optimizers.Adam):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate / 2)

    for optimizer in (
        keras.optimizers.Adam(amsgrad=True),
        keras.optimizers.SGD(),
        Slower(),
    ):
        fuse_adam(optimizer)
        assert "update_step" not in vars(optimizer)
