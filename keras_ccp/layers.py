"""Normalisation of embeddings and proxies.

`keras.layers.UnitNormalization` and the sum of average and maximum pooling exist in
Keras; only what it lacks is here.
"""

from typing import Any

import keras
import tensorflow as tf


def lipschitz_normalize(vectors: tf.Tensor) -> tf.Tensor:
    """Projects vectors onto the unit ball: `v / max(1, ||v||_2)`.

    Unlike `v / ||v||` the map is Lipschitz (constant 2) and leaves the inside of the
    ball as it is, so neither its value nor its gradient is singular at zero. A vector
    of norm exactly 1 counts as inside: its gradient is the upstream one. Norms are
    taken in float32 or better and cannot overflow.

    Source: "Deep Metric Learning with Chance Constraints"
    (https://arxiv.org/abs/2209.09060).

    Args:
        vectors: `(..., dim)` float tensor.

    Returns:
        Tensor of the shape and dtype of `vectors`, norms at most 1.
    """
    vectors = tf.convert_to_tensor(vectors)
    wide = _at_least_float32(vectors)
    # The result does not depend on the length of a vector outside the ball, so one
    # with a component above 2 may be shortened to a largest component of 2 first,
    # which keeps its square finite and the vector outside. The scale is a constant
    # for the gradient for the same reason.
    largest = tf.reduce_max(tf.abs(wide), axis=-1, keepdims=True)
    wide /= tf.stop_gradient(tf.maximum(1.0, largest / 2.0))
    return tf.cast(wide / _norm_or_one(wide), vectors.dtype)


def l2_normalize(vectors: tf.Tensor) -> tf.Tensor:
    """Scales vectors to unit length: `v / ||v||_2`; zero stays zero.

    The gradient at zero is the upstream gradient, where `tf.math.l2_normalize`
    multiplies it by a million.

    Args:
        vectors: `(..., dim)` float tensor.

    Returns:
        Tensor of the shape and dtype of `vectors`, norms 1 or 0.
    """
    vectors = tf.convert_to_tensor(vectors)
    wide = _at_least_float32(vectors)
    # A largest component of 2 puts every vector outside the ball, so that projecting
    # onto the ball gives unit length. Below the threshold a vector is taken for zero.
    largest = tf.reduce_max(tf.abs(wide), axis=-1, keepdims=True)
    scale = tf.where(largest > 1e-12, largest / 2.0, tf.ones_like(largest))
    wide /= tf.stop_gradient(scale)
    return tf.cast(wide / _norm_or_one(wide), vectors.dtype)


def _at_least_float32(tensor):
    """Widens float16 and bfloat16; squares of small components underflow there."""
    return tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32)


def _norm_or_one(vectors):
    """Returns `max(1, ||v||)`, a constant where the norm is at most 1."""
    squared = tf.reduce_sum(tf.square(vectors), axis=-1, keepdims=True)
    # The inner maximum keeps the square root away from zero, where its gradient is
    # infinite; the outer condition makes the boundary belong to the inside.
    norm = tf.sqrt(tf.maximum(squared, 1.0))
    return tf.where(norm > 1.0, norm, tf.ones_like(norm))


@keras.saving.register_keras_serializable(package="keras_ccp")
class LipschitzNormalization(keras.layers.Layer):
    """Layer form of `lipschitz_normalize`: `v / max(1, ||v||_2)` over the last axis.

    Applying it twice changes nothing but rounding. Under a float16 policy it receives
    and returns float16 but takes the norm in float32.

    Source: "Deep Metric Learning with Chance Constraints"
    (https://arxiv.org/abs/2209.09060).

    Args:
        **kwargs: `name`, `dtype` and the other arguments of `keras.layers.Layer`.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return lipschitz_normalize(inputs)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        return input_shape


def normalization_layer(normalization: str | None, name: str) -> keras.layers.Layer:
    """Makes the layer that normalises embeddings.

    Args:
        normalization: `"lipschitz"` (v / max(1, ||v||)), `"l2"` (v / ||v||) or `None`.
        name: name of the layer.

    Returns:
        Layer from `(..., dim)` to `(..., dim)` float32, whatever the dtype policy:
        distances between embeddings need the digits.

    Raises:
        ValueError: if there is no such normalisation.
    """
    if normalization == "lipschitz":
        return LipschitzNormalization(name=name, dtype="float32")
    if normalization == "l2":
        return keras.layers.UnitNormalization(name=name, dtype="float32")
    if normalization is None:
        return keras.layers.Identity(name=name, dtype="float32")
    raise ValueError(
        '`normalization` must be "lipschitz", "l2" or None. '
        f"Received: normalization={normalization!r}"
    )
