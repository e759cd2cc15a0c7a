"""Scores of pairs by a matrix product, with a bound on their rounding error."""

import numpy as np
import tensorflow as tf

# Rows that are moved at once: few enough to stay in cache.
_BLOCK_ROWS = 512


class Scores:
    """`-|x - y|^2 / 2` of queries `x` and gallery rows `y`: the highest is the nearest.

    Since this is `x.y - |y|^2 / 2 - |x|^2 / 2`, it is one matrix product of rows with
    two more columns. Where query and gallery are one set, the scores of some of its
    rows with others are also those of the others with them.

    Args:
        query: `(num_queries, dim)` floats.
        gallery: `(num_gallery, dim)` floats; `query` itself for one set. Of two sets
            the scores lack `-|x|^2 / 2`, which orders nothing.
        dtype: of the products: np.float32 or np.float64.

    Attributes:
        error: `(num_queries,)` how far a score of the query may be off.
        padding: int, a row that is no gallery row, and whose score is -inf; of one set
            also a query.
    """

    def __init__(self, query: np.ndarray, gallery: np.ndarray, dtype: type):
        self.padding, dim = gallery.shape
        # Near the origin rounding errors are smallest.
        origin = gallery.mean(axis=0, dtype=np.float64)
        scale = _scale(query, gallery, origin)
        self._gallery, of_gallery = _moved(gallery, origin, scale, dtype)
        if query is gallery:
            self._query, of_query = self._gallery.copy(), of_gallery
            own = of_query
        else:
            self._query, of_query = _moved(query, origin, scale, dtype)
            own = np.zeros(len(query))
        # With u half an ulp of 1: a product of dim + 2 terms is off by (dim + 2) * u
        # of the sum of their sizes at most, the inputs and the added columns by a few
        # u more, so that with some room for terms of second order
        #     |error| <= 1.01 * (dim + 9) * u * (|x||y| + |y|^2 / 2 + |x|^2 / 2),
        # the last for one set alone. The squared norms are float64 sums whatever the
        # dtype; `tiny` is underflow. What is to be ordered are squares of float64
        # differences, which have an error of their own: of a query far away it is more.
        largest = np.sqrt(of_gallery.max())
        sizes = largest * (np.sqrt(of_query) + largest / 2) + own / 2
        limits = np.finfo(dtype)
        relative = 1.01 * ((dim + 9) * limits.eps / 2 + dim * np.finfo(np.float64).eps)
        farthest = np.square(np.sqrt(of_query) + largest) / 2
        of_differences = (dim + 9) * np.finfo(np.float64).eps * farthest
        self.error = relative * sizes + of_differences + 4 * dim * limits.tiny

        for table, ones, halves, squares in (
            (self._query, dim, dim + 1, own),
            (self._gallery, dim + 1, dim, of_gallery),
        ):
            table[:, ones] = 1
            table[:-1, halves] = -0.5 * squares
            table[-1, halves] = -np.inf

    def gallery_rows(self, rows: np.ndarray) -> tf.Tensor:
        """Gallery rows as `product` takes them.

        Args:
            rows: `(count,)` ints, of which some may be `padding`.
        """
        with tf.device("CPU:0"):
            return tf.constant(self._gallery[rows])

    def product(self, rows: np.ndarray, gallery_rows: tf.Tensor) -> np.ndarray:
        """Scores of queries.

        Args:
            rows: `(num_rows,)` ints, the queries.
            gallery_rows: `(count, dim + 2)` what `gallery_rows` returned.

        Returns:
            `(num_rows, count)` array.
        """
        # On the CPU: the error bound would not hold for TensorFloat-32.
        with tf.device("CPU:0"):
            scores = tf.matmul(
                tf.constant(self._query[rows]), gallery_rows, transpose_b=True
            )
        return np.asarray(scores)  # a view; `numpy()` would copy


def _scale(query, gallery, origin):
    """A power of two, which is exact, so that no moved coordinate exceeds 1.

    It keeps products from overflow and underflow.
    """
    sets = [gallery] if query is gallery else [query, gallery]
    size = max(
        max((part.max(axis=0) - origin).max(), (origin - part.min(axis=0)).max())
        for part in sets
    )
    _, exponent = np.frexp(size)
    return 2.0 ** -max(int(exponent), -1000)


def _moved(rows, origin, scale, dtype):
    """Rows moved and scaled, with one more row and two more columns; squared norms."""
    table = np.zeros((len(rows) + 1, rows.shape[1] + 2), dtype)
    squared_norms = np.empty(len(rows))
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = slice(start, min(start + _BLOCK_ROWS, len(rows)))
        moved = (rows[block] - origin) * scale
        np.einsum("nd,nd->n", moved, moved, out=squared_norms[block])
        table[block, :-2] = moved
    return table, squared_norms
