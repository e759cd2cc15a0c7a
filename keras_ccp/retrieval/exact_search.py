"""Exact nearest neighbours: quick scores with an error bound, then exact distances.

For a query x and a gallery row y the score `x.y - |y|^2 / 2`, which is
`(|x|^2 - |x - y|^2) / 2`, is highest for the nearest y. A float32 matrix product gives
all scores of many queries, each off by a bounded amount. So the k-th highest of them
says what cannot be among the k nearest, and the few rows that are left are put in order
by float64 differences. The answer does not depend on chunks, threads or the order in
which a product is summed.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from keras_ccp.checks import as_embeddings, check_int
from keras_ccp.k_center import BLOCK_VALUES, exponents, squared_distances

# A product keeps all cores busy, what follows it only one: so they overlap.
_THREADS = 3
# Of a chunk: scores, 64 MB of float32, and neighbours that are put in order, each some
# 60 bytes.
_MOST_SCORES = 2**24
_MOST_FOUND = 2**20
_FLOAT32, _FLOAT64 = np.finfo(np.float32), np.finfo(np.float64)


def search(
    query_embeddings: np.ndarray,
    gallery_embeddings: np.ndarray,
    k: int,
    exclude_self: bool = False,
    chunk_size: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the `k` nearest gallery rows of every query, exactly.

    The order is that of `||q - g||^2` from float64 differences; equally near rows come
    by their gallery index. Near duplicates and vectors of large norm are told apart,
    and any `chunk_size` gives the same bits.

    Args:
        query_embeddings: `(num_queries, dim)` floats.
        gallery_embeddings: `(num_gallery, dim)` floats.
        k: int, neighbours per query, at most the number of rows there are to find.
        exclude_self: bool. Query `i` does not find gallery row `i`: for a set that is
            searched in itself. Duplicates of the row under other indices are found.
            Defaults to False.
        chunk_size: int, queries handled at once in each of three threads. Defaults to
            `None`: as many as need some 100 MB.

    Returns:
        Distances `(num_queries, k)` float32 (L2, not squared), nearest first, and
        indices `(num_queries, k)` int64.

    Raises:
        ValueError: for wrong shapes, values that are not finite, `k` out of range, or
            `exclude_self` with two sets that differ.

    Example:

        >>> points = np.array([[0.0], [1.0], [3.0]])
        >>> search(points, points, k=1, exclude_self=True)[1].tolist()
        [[1], [0], [1]]
    """
    query = as_embeddings("query_embeddings", query_embeddings)
    gallery = as_embeddings("gallery_embeddings", gallery_embeddings, query.shape[1])
    if exclude_self and not np.array_equal(query, gallery):
        raise ValueError(
            "`exclude_self` must be False unless query and gallery are one set. "
            f"Received: {len(query)} queries and a gallery of {len(gallery)} that "
            "differ\nPass the same embeddings twice"
        )
    return ExactSearch(gallery).search(query, k, exclude_self, chunk_size)


class ExactSearch:
    """A gallery that is prepared once and searched exactly, also by later queries.

    Args:
        gallery: `(num_gallery, dim)` finite float32 or float64.
    """

    def __init__(self, gallery: np.ndarray):
        self.gallery = gallery
        self._exponent = exponents(gallery).item()
        # Near the origin rounding errors are smallest. Unlike the mean, the median
        # stays with the rows when one of them lies far out.
        sample = gallery[:: max(1, len(gallery) // 1000)]
        self._origin = np.median(sample, axis=0).astype(np.float64)
        columns = np.empty((gallery.shape[1] + 2, len(gallery)), np.float32)
        # Half an ulp of 1 is the error of one operation. A product of dim + 2 terms
        # makes as many, what is summed and added has a few more, and 1.01 is room for
        # what is of second order.
        self._error = 1.01 * (len(columns) + 9) * _FLOAT32.eps / 2
        # A power of two, which is exact, keeps products from overflow and underflow.
        extremes = np.stack([gallery.min(axis=0), gallery.max(axis=0)])
        with np.errstate(over="ignore", invalid="ignore"):
            self._scale = -exponents(extremes - self._origin)
            step = max(1, BLOCK_VALUES // gallery.shape[1])
            for start in range(0, len(gallery), step):
                part = slice(start, start + step)
                moved, norms = self._moved(gallery[part])
                columns[:-2, part] = moved.T
                # With these two the product is no score, but its upper bound.
                columns[-2, part] = self._error * norms
                columns[-1, part] = (self._error - 1) * np.square(norms) / 2
        with tf.device("CPU:0"):
            self._columns = tf.constant(columns)

    def _moved(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows as seen from the origin, scaled, and their norms."""
        moved = np.ldexp(rows - self._origin, self._scale)
        return moved, np.sqrt(np.einsum("nd,nd->n", moved, moved))

    def search(
        self,
        query: np.ndarray,
        k: int,
        exclude_self: bool = False,
        chunk_size: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `retrieval.search`, of queries that are finite and of the right width."""
        check_k(k, len(self.gallery) - exclude_self)
        distances = np.empty((len(query), k), np.float32)
        indices = np.empty((len(query), k), np.int64)

        def find(rows: np.ndarray, k: int) -> None:
            own = rows if exclude_self else None
            squared, indices[rows] = self.nearest(query[rows], k, own)
            shift = self._shift(query[rows])
            with np.errstate(over="ignore"):  # float64 distances beyond float32
                distances[rows] = np.ldexp(np.sqrt(squared), -shift)

        in_chunks(find, np.full(len(query), k), len(self.gallery), chunk_size)
        return distances, indices

    def nearest(
        self,
        query: np.ndarray,
        k: int,
        own: np.ndarray | None = None,
        alike: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """The nearest gallery rows of a few queries.

        Args:
            query: `(n, dim)` floats.
            k: int, neighbours of each.
            own: `(n,)` ints, a gallery row for each query that it must not find.
            alike: maps places in `query` and gallery rows, two `(m,)` arrays, to `(m,)`
                values. The order of neighbours with equal values then does not matter,
                and distances are not computed for it.

        Returns:
            `(n, k)` float64 squared distances, scaled by `_shift`, or `None` with
            `alike`, and `(n, k)` int64 gallery rows.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # of queries far out
            scores, bar, error = self._upper_bounds(query, k, own)
            # As float32, which is compared in a quarter of the time, and not above it.
            lowest = np.nextafter(bar.astype(np.float32), np.float32(-np.inf))
            reach = scores < lowest[:, None]
        np.logical_not(reach, out=reach)  # also what is not a number
        if own is not None:
            reach[np.arange(len(query)), own] = False
        if len(query) > 1 and np.count_nonzero(reach) > 4 * _MOST_FOUND:
            del scores, reach
            parts = [
                self.nearest(
                    query[half],
                    k,
                    None if own is None else own[half],
                    alike and (lambda row, column, half=half: alike(half[row], column)),
                )
                for half in np.array_split(np.arange(len(query)), 2)
            ]
            squared, found = zip(*parts, strict=True)
            return None if alike else np.concatenate(squared), np.concatenate(found)
        row, column = np.divmod(np.flatnonzero(reach), len(self.gallery))
        if alike is None:
            squared = self._squared_distances(query, row, column)
        else:
            squared = -scores[row, column].astype(np.float64)  # orders as well
        # Equally near ones stay by their index, and come by it where they matter.
        order = np.argsort(squared, kind=None if alike else "stable")
        # Of short integers this sort is linear; lexsort takes up to three times that.
        short = row[order].astype(np.min_scalar_type(len(query)))
        order = order[np.argsort(short, kind="stable")]
        row, column, squared = row[order], column[order], squared[order]
        if alike is not None:
            value = alike(row, column)
            matters = (row[1:] == row[:-1]) & (value[1:] != value[:-1])
            close = matters & ~(squared[1:] - squared[:-1] > 2 * error[row[1:]])
            is_unsure = np.zeros(len(query), bool)
            is_unsure[row[1:][close]] = True
            unsure = np.flatnonzero(is_unsure[row])
            squared = self._squared_distances(query, row[unsure], column[unsure])
            order = np.lexsort((column[unsure], squared, row[unsure]))
            column[unsure] = column[unsure[order]]
        first = np.searchsorted(row, np.arange(len(query)))
        nearest = first[:, None] + np.arange(k)
        return None if alike else squared[nearest], column[nearest]

    def _upper_bounds(
        self, query: np.ndarray, k: int, own: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores that are not too low, what the `k` nearest reach, and half the error.

        The true score lies at most `2 * error` below its bound, where that is reached.
        """
        moved, norms = self._moved(query)
        rows = np.ones((len(query), len(moved[0]) + 2), np.float32)
        rows[:, :-2], rows[:, -2] = moved, norms
        with tf.device("CPU:0"):  # the bound would not hold for TensorFloat-32
            scores = np.asarray(tf.matmul(rows, self._columns))
        k += own is not None  # which is the nearest of all
        # The k-th highest maximum of groups is reached by k rows or more. It is found
        # much sooner than the k-th highest score, and nearly as high.
        count = len(self.gallery)
        groups = min(count, max(4 * k, count // 64))
        maxima = scores[:, :groups].copy()
        for start in range(groups, count, groups):
            part = scores[:, start : start + groups]
            best = maxima[:, : part.shape[1]]
            np.maximum(best, part, out=best)
        kth = np.partition(maxima, groups - k, axis=1)[:, groups - k].astype(np.float64)
        bar = kth - 2 * self._error_from(kth, norms)
        return scores, bar, self._error_from(bar, norms)

    def _error_from(self, score: np.ndarray, norms: np.ndarray) -> np.ndarray:
        """Half of how far bounds may lie above the scores, where they reach `score`.

        A row far out has a large error, but a low score. What scores s or more lies at
        most `sqrt(|x|^2 - 2 s)` from the query x, or a little more for the error, and
        so at most `largest` from the origin.
        """
        squares, dim = np.square(norms), self.gallery.shape[1] + 2
        from_query = np.maximum(squares - 2 * score, 0) + 10 * self._error * squares
        largest = norms + 1.1 * np.sqrt(from_query)
        of_product = self._error * (norms * largest + np.square(largest) / 2)
        # Float64 differences, which decide the order, have an error of their own.
        of_differences = dim * _FLOAT64.eps * np.square(norms + largest)
        return of_product + of_differences + 4 * dim * _FLOAT32.tiny * (1 + norms)

    def _shift(self, query: np.ndarray) -> np.ndarray:
        """Powers of two for each query that keep squares in the range of float64."""
        exponent = np.maximum(exponents(query, axis=1), self._exponent)
        return np.where(np.abs(exponent) < 400, 0, -exponent)

    def _squared_distances(
        self, query: np.ndarray, row: np.ndarray, column: np.ndarray
    ) -> np.ndarray:
        """Exact ones of pairs, times 4 to the power of the query's `_shift`."""
        if len(row) > 2 * _MOST_FOUND:
            # Many are candidates where a network has collapsed: equal rows count once.
            count = len(self.gallery)
            key = row * count + self._first_copy[column]
            table = np.zeros(len(query) * count)
            table[key] = 1
            place = np.flatnonzero(table)
            table[place] = self._direct(query, *np.divmod(place, count))
            return table[key]
        return self._direct(query, row, column)

    def _direct(
        self, query: np.ndarray, row: np.ndarray, column: np.ndarray
    ) -> np.ndarray:
        shift = self._shift(query)
        squared = np.empty(len(row))
        step = max(1, BLOCK_VALUES // self.gallery.shape[1])
        for start in range(0, len(row), step):
            part = slice(start, start + step)
            x, y = query[row[part]], self.gallery[column[part]]
            if shift.any():
                power = shift[row[part]]
                x, y = np.ldexp(x, power), np.ldexp(y.astype(np.float64), power)
            squared[part] = squared_distances(x, y)
        return squared

    @functools.cached_property
    def _first_copy(self) -> np.ndarray:
        """For each gallery row the first one that is equal to it."""
        rows = self.gallery + 0.0  # -0 becomes 0
        rows = rows.view(f"V{rows.itemsize * rows.shape[1]}").ravel()
        _, first, copy = np.unique(rows, return_index=True, return_inverse=True)
        return first[copy]


def in_chunks(
    function: Callable[[np.ndarray, int], None],
    depth: np.ndarray,
    num_gallery: int,
    chunk_size: int | None,
) -> None:
    """Calls `function(rows, k)` in threads, on queries that need about equally many.

    So that one that needs many neighbours does not make all others pay for it.

    Args:
        function: takes rows of queries and the largest of their depths.
        depth: `(num_queries,)` ints, neighbours that each query needs, 0 for none.
        num_gallery: int, rows that each query is compared with.
        chunk_size: int, the most rows of a call, or `None`.
    """
    chunks = []
    group = np.ceil(np.log2(np.maximum(depth, 1)))  # 1; 2; 3, 4; 5 to 8; ...
    for number in np.unique(group[depth > 0]):
        rows = np.flatnonzero((group == number) & (depth > 0))
        k = int(depth[rows].max())
        most = min(_MOST_SCORES // num_gallery, _MOST_FOUND // k)
        # Two chunks a thread at least, for a product to overlap with what follows one.
        step = chunk_size or max(1, min(most, -(-len(rows) // (2 * _THREADS))))
        chunks += [(rows[i : i + step], k) for i in range(0, len(rows), step)]
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda chunk: function(*chunk), chunks):
            pass


def check_k(k: int, most: int) -> None:
    """Refuses more neighbours than there are rows to find."""
    check_int("k", k, minimum=1)
    if k > most:
        raise ValueError(
            f"`k` must be at most {most}, the rows there are to find. Received: k={k}\n"
            "Ask for fewer"
        )
