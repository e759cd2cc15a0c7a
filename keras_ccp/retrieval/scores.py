"""Scores of all pairs by one matrix product, with a bound on their rounding error."""

import numpy as np
import tensorflow as tf

_LARGEST_GROUP = 64
# Candidates beyond 2 k that are still listed.
_EXTRA = 32
# Sorts last, and reads as a score of NaN.
_NO_KEY = np.int64(2**63 - 1)


class Scores:
    """`x.y - |y|^2 / 2` of every query `x` and gallery row `y`: highest is nearest.

    Since this is `(|x|^2 - |x - y|^2) / 2`, it orders a query's gallery as the distance
    does. `-|y|^2 / 2` rides along as one more column of the product.

    Args:
        query: `(num_queries, dim)` float64, moved near to the origin and scaled so
            that no coordinate exceeds 1.
        gallery: `(num_gallery, dim)` float64, likewise.
        dtype: of the products: np.float32 or np.float64.

    Attributes:
        error: `(num_queries,)` how far a score of the query may be off.
    """

    def __init__(self, query: np.ndarray, gallery: np.ndarray, dtype: type):
        self.num_gallery, dim = gallery.shape
        squared_norms = np.einsum("nd,nd->n", gallery, gallery)
        # With u half an ulp of 1: a product of dim + 1 terms is off by (dim + 1) * u
        # of the sum of their sizes at most, the inputs and the added column by a few u
        # more, so that with some room for terms of second order
        #     |error| <= 1.01 * (dim + 8) * u * (|x||y| + |y|^2 / 2).
        # The squared norms are float64 sums whatever the dtype; `tiny` is underflow.
        largest = np.sqrt(squared_norms.max())
        norms = np.sqrt(np.einsum("nd,nd->n", query, query))
        limits = np.finfo(dtype)
        relative = 1.01 * ((dim + 8) * limits.eps / 2 + dim * np.finfo(np.float64).eps)
        self.error = relative * largest * (norms + largest / 2) + 4 * dim * limits.tiny

        self._query = np.ones((len(query), dim + 1), dtype)
        self._query[:, :dim] = query
        # Columns up to a multiple of the group size, which no query ever prefers.
        num_columns = -(-self.num_gallery // _LARGEST_GROUP) * _LARGEST_GROUP
        columns = np.zeros((dim + 1, num_columns), dtype)
        columns[:dim, : self.num_gallery] = gallery.T
        columns[dim, : self.num_gallery] = -0.5 * squared_norms
        columns[dim, self.num_gallery :] = -np.inf
        with tf.device("CPU:0"):
            self._gallery = tf.constant(columns)

    def all(self, rows: np.ndarray) -> tf.Tensor:
        """Scores of queries with every gallery row, then -inf for padding.

        Args:
            rows: `(count,)` ints, the queries.
        """
        # On the CPU: the error bound would not hold for TensorFloat-32.
        with tf.device("CPU:0"):
            return tf.matmul(tf.constant(self._query[rows]), self._gallery)

    def best(
        self, rows: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All that may be truly among the `k` highest scores of queries.

        If the `k`-th highest score is at least `s`, then so is, up to one `error`, the
        true one, and what scores less than `s - 2 * error` is truly lower than that.

        Args:
            rows: `(count,)` ints, the queries.
            k: int, at most the size of the gallery.

        Returns:
            `(count,)` booleans: the query has so many that they are not listed.
            Of the others, `(others, width)` scores, highest first, and gallery rows;
            `width >= k`, and what a row has not is NaN and index -1.
        """
        # The k-th highest maximum of groups is a good `s`: k different scores reach it.
        # Few groups are quickly sorted out, small ones quickly searched.
        group = int(np.sqrt(self.num_gallery / k))
        group = 1 << max(0, min(group, _LARGEST_GROUP).bit_length() - 1)
        with tf.device("CPU:0"):
            scores = self.all(rows)
            # A group is strided: neighbouring rows, often of one class, fall in
            # different groups, and the maximum runs along contiguous memory.
            stride = scores.shape[1] // group
            maxima = tf.reshape(scores, (len(rows), group, stride))
            maxima = np.asarray(tf.reduce_max(maxima, axis=1))
        scores = np.asarray(scores)  # a view; `numpy()` would copy
        bar = np.partition(maxima, stride - k, axis=1)[:, stride - k]
        bar = bar - 2.0 * self.error[rows]
        bar = np.nextafter(bar.astype(scores.dtype), -np.inf, dtype=scores.dtype)

        limit = 2 * k + _EXTRA
        reached = maxima >= bar[:, None]
        crowded = np.count_nonzero(reached, axis=1) > limit
        reached[crowded] = False
        row, first = np.nonzero(reached)
        num_columns = scores.shape[1]
        places = (row * num_columns + first)[:, None] + stride * np.arange(group)
        values = scores.reshape(-1).take(places)
        inside = values >= bar[row, None]
        values = values[inside]
        row, members = np.divmod(places[inside], num_columns)
        count = np.bincount(row, minlength=len(rows))
        if count.max(initial=0) > limit:
            crowded |= count > limit
            listed = ~crowded[row]
            row, members, values = row[listed], members[listed], values[listed]
            count[crowded] = 0
        place = np.arange(len(row)) - (np.cumsum(count) - count)[row]
        keys = np.full((len(rows), count.max(initial=0)), _NO_KEY)
        keys[row, place] = _pack(values, members)
        keys = keys[~crowded]
        keys.sort(axis=1)
        return crowded, *_unpack(keys)


def _pack(scores, indices):
    """Keys that sort by score, highest first: numpy sorts int64 many times faster
    than it sorts one array by another."""
    bits = scores.view(np.int32)
    # Negative floats are ordered backwards if read as integers.
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (~ascending).astype(np.int64) << 32 | indices


def _unpack(keys):
    ascending = ~(keys >> 32).astype(np.int32)
    bits = ascending ^ ((ascending >> 31) & 0x7FFFFFFF)
    indices = np.where(keys == _NO_KEY, -1, keys & 0xFFFFFFFF)
    return bits.view(np.float32), indices
