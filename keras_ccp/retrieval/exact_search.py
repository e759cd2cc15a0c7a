"""Exact nearest neighbours: quick scores with an error bound, then exact order.

A matrix product gives the score `x.y - |y|^2 / 2 = (|x|^2 - |x - y|^2) / 2` of every
pair in float32: the nearest has the highest. Rounding makes it wrong by a bounded
amount, so the best scores are only *candidates*: everything that the bound cannot rule
out. What is nearer among them is decided by float64 differences. The answer therefore
does not depend on chunks, threads or the order in which a product is summed.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from keras_ccp.checks import check_bool, check_int
from keras_ccp.retrieval.ahead import ahead
from keras_ccp.retrieval.scores import Scores
from keras_ccp.retrieval.sweep import SMALLEST_BLOCK, in_pairs, in_rows
from keras_ccp.retrieval.validation import as_embeddings, safe_shift

# Neighbours that are listed while the blocks of one set meet, some 50 bytes each.
_LISTED_AT_ONCE = 2**22
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
        chunk_size: int, queries handled at once in each of three threads. Defaults to
            `None`: as many as need some 100 MB.

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
    if exclude_self:
        if not np.array_equal(query, gallery):
            raise ValueError(
                "`exclude_self` must be False unless query and gallery are one set. "
                f"Received: {len(query)} queries and a gallery of {len(gallery)} that "
                "differ"
            )
        gallery = query
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
    for found in searcher.candidates(np.full(len(query), k)):
        found = searcher.refine(found, found.indices >= 0)
        nearest = np.sqrt(found.distances[:, :k])
        with np.errstate(over="ignore"):  # float64 distances beyond float32
            distances[found.rows] = np.ldexp(nearest, -searcher.shift)
        indices[found.rows] = found.indices[:, :k]
    return distances, indices


def by_depth(depth: np.ndarray) -> dict[int, np.ndarray]:
    """Groups queries that need about equally many neighbours.

    So that one that needs many does not make all others pay for it.

    Args:
        depth: `(num_queries,)` ints, neighbours of each, 0 for none.

    Returns:
        Rows of queries by the largest of their depths, which is less than twice that
        of any of them.
    """
    # 0; 1; 2; 3, 4; 5 to 8; ...
    size = np.ceil(np.log2(np.maximum(depth, 0.5)))
    groups = [np.flatnonzero(size == value) for value in np.unique(size)]
    return {int(depth[rows].max()): rows for rows in groups}


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
        self._scores = Scores(query, gallery, np.float32)
        self._careful_scores = None

    def candidates(self, depth: np.ndarray) -> Iterator[Candidates]:
        """Yields candidates for the nearest neighbours of all queries, part by part.

        Args:
            depth: `(num_queries,)` ints, neighbours of each, 0 for none.
        """
        # The query's own row is dropped from one more: it is the nearest of all.
        groups = {
            k + self.exclude_self if k else 0: rows
            for k, rows in by_depth(depth).items()
        }
        listed = sum(k * len(rows) for k, rows in groups.items())
        size = self.chunk_size or SMALLEST_BLOCK
        in_blocks = (
            self.exclude_self and listed <= _LISTED_AT_ONCE and size >= SMALLEST_BLOCK
        )
        sweep = in_pairs if in_blocks else in_rows
        shortlists = sweep(self._scores, groups, self.chunk_size)
        for crowded, k, listed in ahead(self._finished, shortlists):
            if len(crowded):
                yield self._careful_candidates(crowded, k)
            if listed is not None:
                yield listed

    def _finished(self, item):
        """Queries without a list, the neighbours they need, and the others if any."""
        rows, shortlist = item
        crowded, scores, indices = shortlist.finish()
        listed = None
        if not crowded.all():
            listed = self._listed(rows[~crowded], scores, indices)
        return rows[crowded], shortlist.wanted - self.exclude_self, listed

    def _listed(self, rows, scores, indices):
        """Candidates of queries by their shortlists."""
        if self.exclude_self:
            other = indices != rows[:, None]
            shape = len(rows), scores.shape[1] - 1
            scores, indices = (
                scores[other].reshape(shape),
                indices[other].reshape(shape),
            )
        error = self._scores.error[rows, None]
        linked = scores[:, :-1] - scores[:, 1:] <= 2.0 * error
        return Candidates(rows, indices, linked, None)

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
            self._careful_scores = Scores(self.query, self.gallery, np.float64)
            every = np.arange(len(self.gallery))
            self._careful_gallery = self._careful_scores.gallery_rows(every)
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
            scores = self._careful_scores.product(block, self._careful_gallery)
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
