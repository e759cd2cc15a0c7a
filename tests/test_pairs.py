import numpy as np
import pytest
import tensorflow as tf

from keras_ccp.layers import l2_normalize
from keras_ccp.losses.pairs import (
    class_masks,
    log_one_plus_sum_exp,
    pairwise_distances,
    pairwise_similarities,
)


def test_distances_match_the_reference(golden):
    rows = tf.constant(golden["in/pdist_ref_rows"])
    columns = tf.constant(golden["in/pdist_cols"])
    with tf.GradientTape() as tape:
        tape.watch((rows, columns))
        distances = pairwise_distances(rows, columns)
    upstream = tf.constant(golden["in/pdist_dy"])
    gradients = tape.gradient(distances, (rows, columns), upstream)
    np.testing.assert_allclose(distances, golden["out/pdist_sq0"], atol=1e-6)
    for gradient, side in zip(gradients, ("ref", "cols"), strict=True):
        np.testing.assert_allclose(
            gradient, golden[f"out/pdist_sq0_grad_{side}"], atol=1e-6
        )


def test_distances_keep_their_digits():
    # Both norms are 1000; in float32 their squares agree in all digits.
    rows = tf.constant([[1000.0, 0.0]])
    columns = tf.constant([[1000.0, 0.0], [1000.0, 1e-3], [1000.0, 2e-3], [-1e3, 0.0]])
    distances = pairwise_distances(rows, columns)
    np.testing.assert_allclose(distances, [[0.0, 1e-3, 2e-3, 2000.0]], rtol=1e-5)
    # Neighbours in a random direction, far nearer than their length.
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, 128)).astype("float32")
    columns = (rows + 1e-5 * rng.normal(size=rows.shape)).astype("float32")
    exact = np.linalg.norm(rows.astype("float64") - columns, axis=1)
    distances = tf.linalg.diag_part(pairwise_distances(rows, columns))
    np.testing.assert_allclose(distances, exact, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e-6, 1.0, 1e6, 1e25])
def test_cosine_is_the_dot_product_of_normalized_vectors(scale):
    # Oracle: both sides normalised by their own layer, then one product.
    rng = np.random.default_rng(0)
    rows, columns = rng.normal(size=(2, 7, 5)).astype("float32")
    columns[0] *= scale
    rows, columns = tf.constant(rows), tf.constant(columns)
    upstream = tf.constant(rng.normal(size=(7, 7)).astype("float32"))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch((rows, columns))
        actual = pairwise_similarities(rows, columns, "cosine")
        expected = l2_normalize(rows) @ tf.transpose(l2_normalize(columns))
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    for side in (rows, columns):
        np.testing.assert_allclose(
            tape.gradient(actual, side, upstream),
            tape.gradient(expected, side, upstream),
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.parametrize("dim", [3, 128, 512])
def test_equal_vectors_have_distance_and_gradient_zero(dim):
    vectors = tf.constant(np.random.default_rng(0).normal(size=(40, dim)), tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(vectors)
        own = tf.linalg.diag_part(pairwise_distances(vectors, vectors))
    np.testing.assert_array_equal(own, 0.0)
    np.testing.assert_array_equal(tape.gradient(own, vectors), 0.0)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64", "float32"])
def test_masks_with_labels_of_any_form(dtype):
    labels = np.array([[1], [2], [1]], dtype)
    pos_mask, neg_mask = class_masks(labels, np.array([1, 2, 1, 3]), exclude_self=True)
    expected_pos = [[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    expected_neg = [[0, 1, 0, 1], [1, 0, 1, 1], [0, 1, 0, 1]]
    np.testing.assert_array_equal(pos_mask, np.array(expected_pos, bool))
    np.testing.assert_array_equal(neg_mask, np.array(expected_neg, bool))


def test_log_one_plus_sum_exp_has_no_overflow_and_no_loss():
    exponents = tf.constant([[1e4, 1e4], [-30.0, 9.0], [1.0, 2.0], [-1e4, 0.0]])
    mask = tf.constant([[True, True], [True, False], [False, False], [True, False]])
    with tf.GradientTape() as tape:
        tape.watch(exponents)
        values = log_one_plus_sum_exp(exponents, mask)
    # 1e4 + log 2; log(1 + e^-30) = e^-30; nothing; e^-10000
    expected = [1e4 + np.log(2), np.exp(-30), 0.0, 0.0]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    # The softmax with an additional exponent 0.
    expected = [[0.5, 0.5], [np.exp(-30), 0.0], [0.0, 0.0], [0.0, 0.0]]
    np.testing.assert_allclose(tape.gradient(values, exponents), expected, rtol=1e-6)


@pytest.mark.parametrize("size", [4096, 5000])
def test_many_references_are_as_good_as_few(size):
    # They are split; oracle: NumPy in float64, and the gradient of two halves.
    rng = np.random.default_rng(0)
    rows, columns = rng.normal(size=(3, 4)), rng.normal(size=(size, 4))
    rows, columns = (tf.constant(x.astype("float32")) for x in (rows, columns))
    upstream = tf.constant(rng.normal(size=(3, size)).astype("float32"))
    with tf.GradientTape() as tape:
        tape.watch((rows, columns))
        distances = pairwise_distances(rows, columns)
    gradients = tape.gradient(distances, (rows, columns), upstream)
    differences = rows.numpy()[:, None] - columns.numpy().astype("float64")
    expected = np.linalg.norm(differences, axis=2)
    np.testing.assert_allclose(distances, expected, rtol=1e-6)
    weighted = upstream.numpy()[..., None] * differences / expected[..., None]
    np.testing.assert_allclose(gradients[0], weighted.sum(1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradients[1], -weighted.sum(0), rtol=1e-4, atol=1e-5)
