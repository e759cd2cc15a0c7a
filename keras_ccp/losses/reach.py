"""Which of many references can have any effect on a loss of limited reach."""

import math
from collections.abc import Callable

import tensorflow as tf

from keras_ccp.layers import euclidean_norms

# References from which on it pays to leave some out.
_MANY = 4096
_SLACK = 2.0**-7


def within_reach(
    reach: float | tf.Tensor,
    labels: tf.Tensor,
    embeddings: tf.Tensor,
    reference_labels: tf.Tensor,
    references: tf.Tensor,
    normalize: Callable[[tf.Tensor], tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Normalises references, without those that have no effect where there are many.

    What is neither of an anchor's class nor within reach of an anchor is left out.
    Normalisation of many references, and distances that are right to the last digits,
    are most of what a step costs. Here the distances are those of one matrix product,
    which may be off by rounding: what lies beyond `reach` by no more than that stays.
    """
    has_reach = not (isinstance(reach, float) and math.isinf(reach))
    if has_reach and len(reference_labels) >= _MANY:
        is_near = _is_near(embeddings, tf.stop_gradient(references), normalize, reach)
        is_own = tf.reduce_any(reference_labels[:, tf.newaxis] == labels, axis=1)
        rows = tf.squeeze(tf.where(is_near | is_own), axis=1)
        reference_labels = tf.gather(reference_labels, rows)
        references = tf.gather(references, rows)
    return reference_labels, normalize(references)


def _is_near(embeddings, references, normalize, reach):
    embeddings = tf.stop_gradient(tf.cast(embeddings, tf.float32))
    lengths = euclidean_norms(references)
    normalized = tf.cast(normalize(lengths), tf.float32)
    scales = tf.math.divide_no_nan(normalized, lengths)
    # ||a||^2 + ||b||^2 - 2 a.b, of which ||b||^2 is the same for all a.
    squares = tf.reduce_sum(tf.square(embeddings), axis=1)
    products = tf.matmul(references, -2.0 * embeddings, transpose_b=True)
    nearest = tf.reduce_min(products * scales + squares, axis=1)
    lengths = tf.squeeze(normalized, axis=1)
    # GPUs and TPUs may round the factors to bfloat16, 2^-8 each. That moves -2 a.b by
    # 2^-6 ||a|| ||b|| or 2^-8 (||a|| + ||b||)^2; as much again is for all other errors.
    longest = tf.sqrt(tf.reduce_max(squares))
    slack = _SLACK * tf.square(lengths + longest)
    is_far = nearest + tf.square(lengths) > reach**2 + slack
    # Far for certain: not with NaN, nor by a scale that is too small for a number.
    return tf.logical_not(is_far & (tf.squeeze(scales, axis=1) > 1e-30))
