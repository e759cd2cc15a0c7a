"""Normalisation, and what the head of `build_embedder` computes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import build_embedder
from keras_ccp.layers import (
    FrozenBatchNormalization,
    LipschitzNormalization,
    l2_normalize,
    lipschitz_normalize,
)


def value_and_gradient(function, vectors, upstream):
    vectors = tf.constant(vectors)
    with tf.GradientTape() as tape:
        tape.watch(vectors)
        outputs = function(vectors)
    gradient = tape.gradient(outputs, vectors, tf.constant(upstream))
    return outputs.numpy(), gradient.numpy()


@pytest.mark.parametrize("jit_compile", [False, True])
def test_matches_the_reference(golden, jit_compile):
    function = tf.function(lipschitz_normalize, jit_compile=jit_compile)
    outputs, gradient = value_and_gradient(
        function, golden["in/lipnorm_x"], golden["in/lipnorm_dy"]
    )
    np.testing.assert_allclose(outputs, golden["out/lipnorm_y"], atol=1e-6)
    np.testing.assert_allclose(gradient, golden["out/lipnorm_dx"], atol=1e-6)


@pytest.mark.parametrize(
    "vector, normalized, gradient",
    [
        ([0.0, 0.0], [0.0, 0.0], [1.0, 2.0]),
        ([0.3, 0.4], [0.3, 0.4], [1.0, 2.0]),
        # The unit sphere is inside.
        ([1.0, 0.0], [1.0, 0.0], [1.0, 2.0]),
        # Outside, with u = v/||v||: (dy - u (u.dy)) / ||v||. Along an axis and off it,
        # where u = (.6, .8), u.dy = 2.2: ((1, 2) - (1.32, 1.76)) / 5.
        ([2.0, 0.0], [1.0, 0.0], [0.0, 1.0]),
        ([8.0, 0.0], [1.0, 0.0], [0.0, 0.25]),
        ([3.0, 4.0], [0.6, 0.8], [-0.064, 0.048]),
    ],
)
def test_values_by_hand(vector, normalized, gradient):
    outputs, actual = value_and_gradient(lipschitz_normalize, [vector], [[1.0, 2.0]])
    np.testing.assert_allclose(outputs[0], normalized, atol=1e-7)
    np.testing.assert_allclose(actual[0], gradient, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_any_length_stays_finite(scale):
    vectors = scale * np.array([[3.0, -4.0, 12.0]], np.float32)
    outputs, gradient = value_and_gradient(
        lipschitz_normalize, vectors, np.ones((1, 3), np.float32)
    )
    expected = vectors / max(1.0, 13.0 * scale)
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)
    assert np.isfinite(gradient).all()


def test_applying_it_twice_changes_nothing():
    vectors = np.random.default_rng(0).normal(size=(200, 16)).astype("float32")
    once = lipschitz_normalize(vectors)
    np.testing.assert_allclose(lipschitz_normalize(once), once, atol=2e-7)


def test_is_lipschitz():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 500, 4))
    moved = np.linalg.norm(
        lipschitz_normalize(first) - lipschitz_normalize(second), axis=1
    )
    assert (moved <= 2.0 * np.linalg.norm(first - second, axis=1)).all()


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "float16", "bfloat16"])
def test_layer_under_every_policy(policy):
    # 100^2 * 64 overflows float16; the norm is taken in float32.
    layer = LipschitzNormalization(dtype=policy)
    outputs = layer(np.full((2, 64), 100.0, "float32"))
    assert outputs.dtype == layer.compute_dtype
    np.testing.assert_allclose(tf.cast(outputs, "float32"), 0.125, rtol=1e-2)


def test_layer_in_a_model_survives_saving(tmp_path):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, LipschitzNormalization()(inputs))
    assert model.output_shape == (None, 3)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    vectors = np.array([[0.0, 3.0, 4.0]], "float32")
    np.testing.assert_allclose(loaded.predict(vectors, verbose=0), [[0.0, 0.6, 0.8]])


@pytest.mark.parametrize(
    "vector, normalized, gradient",
    [
        ([0.0, 0.0], [0.0, 0.0], [1.0, 2.0]),
        ([3.0, 4.0], [0.6, 0.8], [-0.064, 0.048]),
        # On and inside the sphere the projection is the same, divided by the norm.
        ([1.0, 0.0], [1.0, 0.0], [0.0, 2.0]),
        ([0.5, 0.0], [1.0, 0.0], [0.0, 4.0]),
    ],
)
def test_l2_normalize(vector, normalized, gradient):
    outputs, actual = value_and_gradient(l2_normalize, [vector], [[1.0, 2.0]])
    np.testing.assert_allclose(outputs[0], normalized, atol=1e-7)
    np.testing.assert_allclose(actual[0], gradient, atol=1e-7)


# ==== The head ====


def identity_backbone(shape=(2, 2, 3), dtype="float32"):
    inputs = keras.Input(shape, dtype=dtype)
    return keras.Model(inputs, keras.layers.Rescaling(1.0)(inputs))


FEATURES = np.arange(12, dtype="float32").reshape(1, 2, 2, 3)


@pytest.mark.parametrize(
    ("pooling", "pooled"),
    [
        # Channel 0 holds 0, 3, 6, 9: mean 4.5, largest 9; the others one and two more.
        ("average", [4.5, 5.5, 6.5]),
        ("max", [9.0, 10.0, 11.0]),
        ("average_max", [13.5, 15.5, 17.5]),
        ("flatten", list(range(12))),
    ],
)
def test_pooling(pooling, pooled):
    embedder = build_embedder(identity_backbone(), 2, pooling, normalization=None)
    kernel = np.random.default_rng(0).normal(size=(len(pooled), 2)).astype("float32")
    embedder.get_layer("embedding").kernel.assign(kernel)
    np.testing.assert_allclose(
        embedder(FEATURES)[0], np.array(pooled, "float32") @ kernel, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [("lipschitz", [0.6, 0.8]), ("l2", [0.6, 0.8]), (None, [3.0, 4.0])],
)
def test_normalization(normalization, expected):
    embedder = build_embedder(
        identity_backbone((1, 1, 2)), 2, normalization=normalization
    )
    embedder.get_layer("embedding").kernel.assign(np.eye(2))
    image = np.array([3.0, 4.0], "float32").reshape(1, 1, 1, 2)
    np.testing.assert_allclose(embedder(image)[0], expected, rtol=1e-6)


def test_head_has_no_bias_and_input_keeps_the_backbones_type():
    embedder = build_embedder(identity_backbone(dtype="uint8"), 7)
    assert embedder.inputs[0].dtype == "uint8"
    assert [w.name for w in embedder.weights] == ["kernel"]
    assert embedder.output_shape == (None, 7)


def test_output_is_float32_under_mixed_precision():
    keras.config.set_dtype_policy("mixed_float16")
    embedder = build_embedder(identity_backbone(), 7)
    assert embedder(FEATURES).dtype == "float32"


def test_what_has_no_head_is_refused_by_keras():
    with pytest.raises(ValueError, match="fully-defined"):
        build_embedder(identity_backbone((None, 4, 3)), pooling="flatten")
    with pytest.raises(KeyError, match="unit"):
        build_embedder(identity_backbone(), normalization="unit")


def test_frozen_batch_norm_keeps_its_statistics():
    layer = FrozenBatchNormalization()
    x = np.random.default_rng(0).normal(3.0, 2.0, (8, 2)).astype("float32")
    # Mean 0 and variance 1, as they began; epsilon is 1e-3.
    np.testing.assert_allclose(layer(x, training=True), x / 1.001**0.5, rtol=1e-6)
    np.testing.assert_array_equal(layer.moving_mean, [0, 0])
    assert len(layer.trainable_weights) == 2
