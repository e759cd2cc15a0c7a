"""Masks, distances and similarities between a batch and its references."""

import numpy as np
import tensorflow as tf

from keras_ccp.distribute import sum_over_replicas
from keras_ccp.layers import euclidean_norms, l2_normalize


def class_masks(
    labels: tf.Tensor, reference_labels: tf.Tensor, exclude_self: bool = False
) -> tuple[tf.Tensor, tf.Tensor]:
    """Tells the pairs of one class from those of two.

    ```python
    positive, negative = class_masks([0, 1], [1, 0, 2])  # [[F, T, F], [T, F, F]], ...
    ```

    Args:
        labels: `(batch,)` or `(batch, 1)` tensor of whole numbers, any dtype.
        reference_labels: `(n,)` or `(n, 1)` tensor of whole numbers, any dtype.
        exclude_self: Whether pair `(i, i)` belongs to neither mask.

    Returns:
        `(batch, n)` bool tensors of the positive and of the negative pairs.
    """
    # int64 because TensorFlow compares int32 tensors on the host, not on the GPU.
    rows = tf.cast(tf.reshape(labels, [-1, 1]), tf.int64)
    columns = tf.cast(tf.reshape(reference_labels, [1, -1]), tf.int64)
    same = tf.equal(rows, columns)
    if not exclude_self:
        return same, tf.logical_not(same)
    row_index = tf.range(tf.shape(rows, tf.int64)[0])[:, tf.newaxis]
    column_index = tf.range(tf.shape(columns, tf.int64)[1])
    # A sample always shares its own class, so only the positives need the exclusion.
    return same & tf.not_equal(row_index, column_index), tf.logical_not(same)


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

    They keep their leading digits down to the spacing of float32 itself; where one is
    0, its gradient is 0.

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
    exponents = tf.where(mask, exponents, tf.cast(-np.inf, exponents.dtype))
    # Shifted by the largest exponent, counting the 0 of the 1, no exp overflows:
    # log(1 + S) = m + log(e^-m + S e^-m). log1p keeps the digits of a small sum.
    largest = tf.stop_gradient(tf.nn.relu(tf.reduce_max(exponents, axis=1)))
    shifted = tf.reduce_sum(tf.exp(exponents - largest[:, tf.newaxis]), axis=1)
    return largest + tf.math.log1p(shifted + tf.math.expm1(-largest))


def log_sum_exp(exponents: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Computes `log(sum of exp(exponents))` over the masked entries of each row.

    Args:
        exponents: `(batch, n)` float tensor.
        mask: `(batch, n)` bool tensor of the entries that take part.

    Returns:
        `(batch,)` tensor; 0, not -inf, for a row without entries.
    """
    some = tf.reduce_any(mask, axis=1)
    masked = tf.where(mask, exponents, tf.cast(-np.inf, exponents.dtype))
    largest = tf.stop_gradient(tf.reduce_max(masked, axis=1))
    largest = tf.where(some, largest, tf.zeros_like(largest))
    shifted = tf.reduce_sum(tf.exp(masked - largest[:, tf.newaxis]), axis=1)
    # Without entries the sum is 0, where the logarithm has no gradient.
    return largest + tf.math.log(tf.where(some, shifted, tf.ones_like(shifted)))


def cross_entropies(
    targets: tf.Tensor, logits: tf.Tensor, positive: tf.Tensor, negative: tf.Tensor
) -> tf.Tensor:
    """Computes `-log(e^t / (e^t + sum of e^n))` of each positive pair.

    Args:
        targets: `(batch, n)` float tensor, `t` of the positive pairs.
        logits: `(batch, n)` float tensor, `n` of the negative pairs of the same row.
        positive: `(batch, n)` bool tensor.
        negative: `(batch, n)` bool tensor.

    Returns:
        `(batch, n)` tensor; 0 for what is no positive pair or has no negative.
    """
    others = log_sum_exp(logits, negative)[:, tf.newaxis]
    counts = positive & tf.reduce_any(negative, axis=1, keepdims=True)
    # -log(e^t / (e^t + e^o)) = log(1 + e^(o - t))
    terms = tf.math.softplus(others - targets)
    return tf.where(counts, terms, tf.zeros_like(terms))


def _as_pair(embeddings, reference_embeddings):
    """Brings both sides to the embeddings' dtype, widened to at least float32."""
    embeddings = tf.convert_to_tensor(embeddings)
    dtype = tf.float64 if embeddings.dtype == tf.float64 else tf.float32
    references = tf.convert_to_tensor(reference_embeddings)
    return tf.cast(embeddings, dtype), tf.cast(references, dtype)


@tf.custom_gradient
def _dots_with_directions(rows, columns):
    """Dot products of rows and the columns scaled to unit length; zero stays zero."""
    # The lengths are divided out of the products, not of the columns, so that no tensor
    # of the size of the columns is made before their gradient: 28 ms for 32 rows and
    # 45,272 columns of width 128, where TensorFlow's own gradient takes 41 ms.
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
            return row_grad, column_grad - columns * along[:, tf.newaxis]

    return dots, grad


@tf.custom_gradient
def _distances(rows, columns):
    """Distances in float64, their gradient in float32: 0 where the distance is 0."""
    # A direction (a - b) / d from float32 numbers is off by as much as their own
    # rounding moves it. 42 ms for 32 rows and 45,272 columns of width 128, where
    # TensorFlow's own gradient, in float64, takes 73 ms.
    rows64 = tf.cast(rows, tf.float64)
    row_squares = tf.reduce_sum(tf.square(rows64), axis=1, keepdims=True)
    # ||a||^2 + ||b||^2 - 2 a.b costs one matmul and no (batch, n, dim) tensor, but
    # subtracts numbers that nearly agree, hence float64, where products are exact.
    # Rounding bound of a sum of `dim` products, where both norms are about equal.
    dim = tf.cast(tf.shape(rows)[1], tf.float64)
    noise = 2.0 * np.finfo(np.float64).eps * dim * row_squares

    def distances_to(part):
        part = tf.cast(part, tf.float64)
        squared = tf.matmul(-2.0 * rows64, part, transpose_b=True)
        squared = squared + row_squares + tf.reduce_sum(tf.square(part), axis=1)
        squared = tf.where(squared <= noise, tf.zeros_like(squared), squared)
        return tf.cast(tf.sqrt(squared), rows.dtype)

    # In parts whose float64 copies stay in the cache: 8 ms less.
    starts = range(0, columns.shape[0] or 0, 2048)
    parts = [columns[start : start + 2048] for start in starts] or [columns]
    distances = tf.concat([distances_to(part) for part in parts], axis=1)

    def grad(upstream):
        weights = tf.math.divide_no_nan(upstream, distances)
        row_sums = tf.reduce_sum(weights, axis=1, keepdims=True)
        column_sums = tf.reduce_sum(weights, axis=0)[:, tf.newaxis]
        row_grad = rows * row_sums - tf.matmul(weights, columns)
        column_grad = tf.matmul(weights, rows, transpose_a=True)
        return row_grad, columns * column_sums - column_grad

    return distances, grad
