"""Exact nearest neighbours: quick scores with an error bound, then exact order.

A matrix product gives the score `x.y - |y|^2 / 2 = (|x|^2 - |x - y|^2) / 2` of every
pair in float32: the nearest has the highest. Rounding makes it wrong by a bounded
amount, so the best scores are only *candidates*: everything that the bound cannot rule
out. What is nearer among them is decided by float64 differences. The answer therefore
does not depend on chunks, threads or the order in which a product is summed.
"""

import collections
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from keras_ccp.arguments import check_bool, check_int
from keras_ccp.retrieval.scores import Scores
from keras_ccp.retrieval.validation import as_embeddings, safe_shift

# Chunks of queries under way at once.
_THREADS = 2
_SMALLEST_CHUNK = 64
# Scores of a chunk when the user names no size: 64 MB of float32.
_CHUNK_SCORES = 2**24
# Float64 differences held at once: few enough to stay in cache.
_BLOCK_VALUES = 2**16
# Queries handled at once when float32 was not enough.
_CAREFUL_ROWS = 64


class Candidates(NamedTuple):
    """Neighbours of some queries, nearest first as far as the scores can tell.

    Args:
        rows: `(n,)` rows of the queries these are for.
        indices: `(n, num_candidates)` gallery rows, the query's own removed. The true
            nearest `k` are among them. -1 fills up the rows that have fewer than most.
        linked: `(n, num_candidates - 1)` booleans: the scores of this candidate and
            the next are too close to be sure of their order.
        distances: `None`, or `(n, num_candidates)` exact squared distances; the order
            is then final and nothing is linked.
    """

    rows: np.ndarray
    indices: np.ndarray
    linked: np.ndarray
    distances: np.ndarray | None

    def take(self, positions: np.ndarray) -> "Candidates":
        """The candidates of some of the queries.

        Args:
            positions: `(count,)` ints, positions in `rows`.
        """
        return Candidates(*(x if x is None else x[positions] for x in self))


def search(
    query_embeddings: np.ndarray,
    gallery_embeddings: np.ndarray,
    k: int,
    exclude_self: bool = False,
    chunk_size: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the `k` nearest gallery rows of every query, exactly.

    The order is that of `||q - g||^2` from float64 differences; equally near rows come
    by their gallery index. Near duplicates and vectors of large norm are told apart
    (see the head of this file), and any `chunk_size` gives the same bits.

    Args:
        query_embeddings: `(num_queries, dim)` floats.
        gallery_embeddings: `(num_gallery, dim)` floats.
        k: int, neighbours per query, at most the number of rows there are to find.
        exclude_self: bool. Query `i` does not find gallery row `i`: for a set that is
            searched in itself. Duplicates of the row under other indices are found.
        chunk_size: int, queries handled at once in each of two threads. Defaults to
            `None`: as many as need about 64 MB.

    Returns:
        Distances `(num_queries, k)` float32 (L2, not squared), nearest first, and
        indices `(num_queries, k)` int64.

    Raises:
        ValueError: for wrong shapes, values that are not finite, `k` out of range, or
            `exclude_self` with two sets that differ.
        TypeError: for embeddings that are no real numbers, a `k` or `chunk_size` that
            is no integer, or an `exclude_self` that is no boolean.
    """
    query = as_embeddings("query_embeddings", query_embeddings)
    gallery = as_embeddings("gallery_embeddings", gallery_embeddings, query.shape[1])
    check_bool("exclude_self", exclude_self)
    if exclude_self and not np.array_equal(query, gallery):
        raise ValueError(
            "`exclude_self` must be False unless query and gallery are one set. "
            f"Received: {len(query)} queries and a gallery of {len(gallery)} that "
            "differ"
        )
    check_int("k", k, minimum=1)
    k, most = int(k), len(gallery) - bool(exclude_self)
    if k > most:
        raise ValueError(
            f"`k` must be at most {most}, the rows there are to find. Received: k={k}"
        )
    if chunk_size is not None:
        check_int("chunk_size", chunk_size, minimum=1)
    distances = np.empty((len(query), k), np.float32)
    indices = np.empty((len(query), k), np.int64)
    searcher = ExactSearcher(query, gallery, exclude_self, chunk_size)
    for found in searcher.candidates(np.arange(len(query)), k):
        found = searcher.refine(found, found.indices >= 0)
        nearest = np.sqrt(found.distances[:, :k])
        with np.errstate(over="ignore"):  # float64 distances beyond float32
            distances[found.rows] = np.ldexp(nearest, -searcher.shift)
        indices[found.rows] = found.indices[:, :k]
    return distances, indices


def _ahead(function, items):
    """Yields `function(item)` in order, the next few under way in threads.

    A product keeps all cores busy, what follows it only one: so they overlap.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = collections.deque()
        for item in items:
            futures.append(pool.submit(function, item))
            if len(futures) > _THREADS:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()


class ExactSearcher:
    """Quick candidates and exact order for one pair of query and gallery.

    Args:
        query: `(num_queries, dim)` float32 or float64, validated.
        gallery: `(num_gallery, dim)` likewise.
        exclude_self: bool, query `i` does not find gallery row `i`.
        chunk_size: int or `None`, queries handled at once.

    Attributes:
        shift: int, the distances here are the true ones times 2 to this power: not 0
            if their squares would leave the range of float64.
    """

    def __init__(
        self,
        query: np.ndarray,
        gallery: np.ndarray,
        exclude_self: bool,
        chunk_size: int | None,
    ):
        self.shift = safe_shift(query, gallery)
        if self.shift:
            is_one_set = query is gallery
            gallery = np.ldexp(gallery.astype(np.float64), self.shift)
            query = (
                gallery
                if is_one_set
                else np.ldexp(query.astype(np.float64), self.shift)
            )
        self.query, self.gallery = query, gallery
        self.exclude_self = exclude_self
        self.chunk_size = chunk_size
        self._scores = Scores(*self._moved(), np.float32)
        self._careful_scores = None

    def _moved(self):
        """Query and gallery near the origin, where rounding errors are smallest."""
        origin = self.gallery.mean(axis=0, dtype=np.float64)
        gallery = self.gallery - origin
        query = gallery if self.query is self.gallery else self.query - origin
        # A power of two is exact, and keeps products from overflow and underflow.
        _, exponent = np.frexp(max(np.abs(query).max(), np.abs(gallery).max()))
        scale = 2.0 ** -max(int(exponent), -1000)
        return query * scale, gallery * scale

    def candidates(self, rows: np.ndarray, k: int) -> Iterator[Candidates]:
        """Yields candidates for the nearest neighbours of queries, in chunks.

        Args:
            rows: `(count,)` ints, the queries.
            k: int, neighbours of each.
        """
        # The query's own row is dropped from k + 1: it is the nearest of all.
        wanted = k + self.exclude_self
        step = self.chunk_size or self._chunk_size(len(rows))
        chunks = [rows[start : start + step] for start in range(0, len(rows), step)]
        found = _ahead(lambda chunk: self._scores.best(chunk, wanted), chunks)
        for chunk, (crowded, scores, indices) in zip(chunks, found, strict=True):
            if crowded.any():
                yield self._careful_candidates(chunk[crowded], k)
                chunk = chunk[~crowded]
            if len(chunk):
                if self.exclude_self:
                    other = indices != chunk[:, None]
                    shape = len(chunk), scores.shape[1] - 1
                    scores = scores[other].reshape(shape)
                    indices = indices[other].reshape(shape)
                error = self._scores.error[chunk, None]
                linked = scores[:, :-1] - scores[:, 1:] <= 2.0 * error
                yield Candidates(chunk, indices, linked, None)

    def _chunk_size(self, num_rows):
        """As many as memory allows, but each thread gets two chunks or more."""
        most = min(_CHUNK_SCORES // len(self.gallery), -(-num_rows // (2 * _THREADS)))
        return max(_SMALLEST_CHUNK, most)

    def refine(self, found: Candidates, undecided: np.ndarray) -> Candidates:
        """Puts undecided candidates into their exact order.

        A run of linked candidates keeps its place, and only what is inside of it moves.

        Args:
            found: the candidates; returned as they are if their order is final.
            undecided: `(n, num_candidates)` booleans, whole runs. Of the others the
                `distances` that are returned are 0.
        """
        if found.distances is not None:
            return found
        distances = np.zeros(found.indices.shape)
        row, column = np.nonzero(undecided)
        distances[row, column] = self.distances(
            found.rows[row], found.indices[row, column]
        )
        run = np.zeros(found.indices.shape, np.int32)
        np.cumsum(~found.linked, axis=1, out=run[:, 1:])
        order = np.lexsort((found.indices, distances, run), axis=1)
        return Candidates(
            found.rows,
            np.take_along_axis(found.indices, order, axis=1),
            np.zeros_like(found.linked),
            np.take_along_axis(distances, order, axis=1),
        )

    def distances(self, query_rows: np.ndarray, gallery_rows: np.ndarray) -> np.ndarray:
        """Squared distances of pairs, from float64 differences.

        Args:
            query_rows: `(n,)` ints.
            gallery_rows: `(n,)` ints.
        """
        result = np.empty(len(query_rows))
        step = max(1, _BLOCK_VALUES // self.query.shape[1])
        for start in range(0, len(query_rows), step):
            block = slice(start, start + step)
            difference = self.query[query_rows[block]].astype(np.float64)
            difference -= self.gallery[gallery_rows[block]]
            np.einsum("nd,nd->n", difference, difference, out=result[block])
        return result

    def _careful_candidates(self, rows, k):
        """The nearest `k` of queries that float32 cannot tell: float64, one by one."""
        if self._careful_scores is None:
            self._careful_scores = Scores(*self._moved(), np.float64)
            # Equal gallery rows are compared once: there are many if a network has
            # collapsed, and then every query comes here. (Adding 0 turns -0 to 0.)
            as_bytes = f"V{self.gallery.itemsize * self.gallery.shape[1]}"
            keys = np.ascontiguousarray(self.gallery + 0.0).view(as_bytes).ravel()
            _, self._first, self._copy_of = np.unique(
                keys, return_index=True, return_inverse=True
            )
        found = np.empty((len(rows), k), np.int64)
        distances = np.empty((len(rows), k))
        for start in range(0, len(rows), _CAREFUL_ROWS):
            block = rows[start : start + _CAREFUL_ROWS]
            scores = np.asarray(self._careful_scores.all(block))
            for position, row in enumerate(block, start):
                near = self._near(row, scores[position - start], k)
                copies = self._copy_of[near]
                distinct = np.flatnonzero(np.bincount(copies))
                exact = np.empty(len(self._first))
                exact[distinct] = self.distances(
                    np.full(len(distinct), row), self._first[distinct]
                )
                exact = exact[copies]
                order = np.argsort(exact, kind="stable")[:k]
                found[position], distances[position] = near[order], exact[order]
        return Candidates(rows, found, np.zeros((len(rows), k - 1), bool), distances)

    def _near(self, row, scores, k):
        """Gallery rows, ascending, that the scores cannot rule out of the `k`."""
        wanted = k + self.exclude_self
        bar = np.partition(scores, -wanted)[-wanted]
        near = np.flatnonzero(scores >= bar - 2.0 * self._careful_scores.error[row])
        return near[near != row] if self.exclude_self else near
