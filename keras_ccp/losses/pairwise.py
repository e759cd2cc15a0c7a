"""Masks, distances and similarities between a batch and its references."""

import numpy as np
import tensorflow as tf

from keras_ccp.distribute import sum_over_replicas
from keras_ccp.layers import euclidean_norms, l2_normalize

_PART_SIZE = 2048


def class_masks(
    labels: tf.Tensor, reference_labels: tf.Tensor, exclude_self: bool = False
) -> tuple[tf.Tensor, tf.Tensor]:
    """Tells the pairs of one class from those of two.

    Args:
        labels: `(batch,)` or `(batch, 1)` tensor of whole numbers, any dtype.
        reference_labels: `(n,)` or `(n, 1)` tensor of whole numbers, any dtype.
        exclude_self: Whether pair `(i, i)` belongs to neither mask.

    Returns:
        `(batch, n)` bool tensors `pos_mask` and `neg_mask`.
    """
    # int64 because TensorFlow compares int32 tensors on the host, not on the GPU.
    rows = tf.cast(tf.reshape(labels, [-1, 1]), tf.int64)
    columns = tf.cast(tf.reshape(reference_labels, [1, -1]), tf.int64)
    same = tf.equal(rows, columns)
    if not exclude_self:
        return same, tf.logical_not(same)
    row_index = tf.range(tf.shape(rows, tf.int64)[0])[:, tf.newaxis]
    column_index = tf.range(tf.shape(columns, tf.int64)[1])[tf.newaxis, :]
    other = tf.not_equal(row_index, column_index)
    # A sample always shares its own class, so only the positives need the exclusion.
    return tf.logical_and(same, other), tf.logical_not(same)


def pairwise_similarities(
    embeddings: tf.Tensor, reference_embeddings: tf.Tensor, similarity: str
) -> tf.Tensor:
    """Similarities of every embedding to every reference.

    Args:
        embeddings: `(batch, dim)` float tensor.
        reference_embeddings: `(n, dim)` float tensor.
        similarity: `"cosine"`, or `"dot"` for the vectors as they come.

    Returns:
        `(batch, n)` tensor, float32 or float64 if `embeddings` is.
    """
    embeddings, references = _as_pair(embeddings, reference_embeddings)
    if similarity == "cosine":
        return _dots_with_directions(l2_normalize(embeddings), references)
    return tf.matmul(embeddings, references, transpose_b=True)


def pairwise_distances(
    embeddings: tf.Tensor, reference_embeddings: tf.Tensor
) -> tf.Tensor:
    """L2 distances (not squared) of every embedding to every reference.

    The expansion `||a||^2 + ||b||^2 - 2 a.b` costs one matmul and no
    `(batch, n, dim)` tensor, but subtracts numbers that nearly agree. It is carried
    out in float64, where the products of float32 numbers are exact and the
    distance keeps its leading digits down to the spacing of float32 itself. Pairs
    nearer than the rounding error of the sum have distance 0 and gradient 0.

    Args:
        embeddings: `(batch, dim)` float tensor.
        reference_embeddings: `(n, dim)` float tensor.

    Returns:
        `(batch, n)` tensor, float32 or float64 if `embeddings` is.
    """
    return _distances(*_as_pair(embeddings, reference_embeddings))


def mean_over_terms(term_sums: tf.Tensor, term_counts: tf.Tensor) -> tf.Tensor:
    """Rows whose mean over the batch is the mean over all counted terms.

    `r_i = B * sum_i / max(1, sum_j count_j)` with the batch size `B` and the counts
    taken over all replicas, so the mean of the rows is the same on any number of them.

    Args:
        term_sums: `(batch,)` float tensor, the sum of each row's terms.
        term_counts: `(batch,)` float tensor, how many terms each row counts.

    Returns:
        `(batch,)` tensor of the dtype of `term_sums`; zeros if nothing is counted.
    """
    dtype = term_sums.dtype
    batch_size = tf.cast(tf.size(term_sums), dtype)
    num_terms = tf.reduce_sum(tf.cast(term_counts, dtype))
    totals = sum_over_replicas(tf.stack([batch_size, num_terms]))
    return term_sums * (totals[0] / tf.maximum(totals[1], 1.0))


def log_one_plus_sum_exp(exponents: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Computes `log(1 + sum of exp(exponents))` over the masked entries of each row.

    Args:
        exponents: `(batch, n)` float tensor.
        mask: `(batch, n)` bool tensor of the entries that take part.

    Returns:
        `(batch,)` tensor; 0 for a row without entries.
    """
    return _log_one_plus_sum_exp(exponents, mask)


@tf.custom_gradient
def _log_one_plus_sum_exp(exponents, mask):
    exponents = tf.where(mask, exponents, tf.cast(-np.inf, exponents.dtype))
    # Shifted by the largest exponent, counting the 0 of the 1, no exp overflows:
    # log(1 + S) = m + log(e^-m + S e^-m). log1p keeps the digits of a small sum.
    largest = tf.nn.relu(tf.reduce_max(exponents, axis=1))
    terms = tf.exp(exponents - largest[:, tf.newaxis])
    shifted = tf.reduce_sum(terms, axis=1)

    def grad(upstream):
        # Of each exponent its share of the sum: one pass, where TensorFlow's own
        # gradient takes five.
        shares = upstream / (tf.exp(-largest) + shifted)
        return terms * shares[:, tf.newaxis], None

    return largest + tf.math.log1p(shifted + tf.math.expm1(-largest)), grad


def _as_pair(embeddings, reference_embeddings):
    """Brings both sides to the embeddings' dtype, widened to at least float32."""
    embeddings = tf.convert_to_tensor(embeddings)
    dtype = tf.float64 if embeddings.dtype == tf.float64 else tf.float32
    references = tf.convert_to_tensor(reference_embeddings)
    return tf.cast(embeddings, dtype), tf.cast(references, dtype)


@tf.custom_gradient
def _dots_with_directions(rows, columns):
    """Dot products of rows and the columns scaled to unit length; zero stays zero.

    The lengths are divided out of the products, not of the columns, so that no tensor
    of the size of the columns is made before their gradient. With many proxies such
    tensors are what a step costs.
    """
    norms = tf.squeeze(euclidean_norms(columns), axis=1)
    is_zero = norms <= 1e-12
    scales = tf.where(is_zero, tf.ones_like(norms), 1.0 / norms)
    # Columns first: a third less time on a CPU than the product the other way round.
    dots = tf.transpose(tf.matmul(columns, rows, transpose_b=True)) * scales

    def grad(upstream):
        scaled = upstream * scales
        row_grad = tf.matmul(scaled, columns)
        # d(row . column/||column||) lacks its part along the column, which is the
        # dot product itself.
        along = tf.reduce_sum(upstream * dots, axis=0) * scales
        along = tf.where(is_zero, tf.zeros_like(along), along * scales)
        # The gradient of the columns comes last, so that nobody reads them any more
        # when the optimizer writes: it would have to write to a copy.
        with tf.control_dependencies([row_grad]):
            column_grad = tf.matmul(scaled, rows, transpose_a=True)
            column_grad -= columns * along[:, tf.newaxis]
        return row_grad, column_grad

    return dots, grad


@tf.custom_gradient
def _distances(rows, columns):
    """Distances and their exact gradient, which is 0 where the distance is 0."""
    rows64 = tf.cast(rows, tf.float64)
    row_squares = tf.reduce_sum(tf.square(rows64), axis=1, keepdims=True)
    # Rounding bound of a sum of `dim` products, where both norms are about equal.
    dim = tf.cast(tf.shape(rows)[1], tf.float64)
    noise = 2.0 * np.finfo(np.float64).eps * dim * row_squares
    parts = _parts(columns, axis=0)

    def distances_to(part):
        part64 = tf.cast(part, tf.float64)
        squared = tf.matmul(-2.0 * rows64, part64, transpose_b=True)
        squared = squared + row_squares + tf.reduce_sum(tf.square(part64), axis=1)
        squared = tf.where(squared <= noise, tf.zeros_like(squared), squared)
        return tf.cast(tf.sqrt(squared), rows.dtype)

    distances = tf.concat([distances_to(part) for part in parts], axis=1)

    def grad(upstream):
        # d(a, b) changes by (a - b) / d: summed over references this is again the
        # difference of two large numbers when d is small, hence float64.
        weights = tf.math.divide_no_nan(upstream, distances)
        row_grad = rows64 * tf.reduce_sum(
            tf.cast(weights, tf.float64), axis=1, keepdims=True
        )
        column_grads = []
        for part, part_weights in zip(parts, _parts(weights, axis=1), strict=True):
            part64 = tf.cast(part, tf.float64)
            part_weights = tf.cast(part_weights, tf.float64)
            row_grad -= tf.matmul(part_weights, part64)
            part_grad = part64 * tf.reduce_sum(part_weights, axis=0)[:, tf.newaxis]
            part_grad -= tf.matmul(part_weights, rows64, transpose_a=True)
            column_grads.append(tf.cast(part_grad, columns.dtype))
        return tf.cast(row_grad, rows.dtype), tf.concat(column_grads, axis=0)

    return distances, grad


def _parts(tensor, axis):
    """Splits the references so that their float64 copies stay in the cache."""
    size = tensor.shape[axis]
    if size is None or size <= _PART_SIZE:
        return [tensor]
    sizes = [_PART_SIZE] * (size // _PART_SIZE)
    if size % _PART_SIZE:
        sizes.append(size % _PART_SIZE)
    return tf.split(tensor, sizes, axis=axis)
