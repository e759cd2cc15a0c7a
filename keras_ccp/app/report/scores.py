"""What queries find, by query, by class and by pair of classes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class ClassScore(NamedTuple):
    """Means over the queries of a class.

    Args:
        label: int, its class.
        num_queries: those with a true reference.
        num_references: true references of each of them.
        precision_at_1: NaN without such a query.
        map_at_r: likewise.
    """

    label: int
    num_queries: int
    num_references: int
    precision_at_1: float
    map_at_r: float


class ConfusedPair(NamedTuple):
    """Two classes that are taken for each other.

    Args:
        labels: the two classes, the smaller label first.
        shares: of the first taken for the second, and of the second for the first.
        query: row of a query of one of them whose neighbour of the other is nearest.
        neighbour: row of that neighbour in the gallery.
    """

    labels: tuple[int, int]
    shares: tuple[float, float]
    query: int
    neighbour: int


class Neighbors(NamedTuple):
    """What the queries find, nearest first.

    Args:
        distances: `(n, k)` floats.
        indices: `(n, k)` ints, rows of the gallery.
        labels: `(n, k)` ints, their classes.
        num_references: `(n,)` ints, true references R of each query. Its nearest
            `min(R, k)` neighbours count where classes are confused.
    """

    distances: np.ndarray
    indices: np.ndarray
    labels: np.ndarray
    num_references: np.ndarray

    @property
    def counted(self) -> np.ndarray:
        """`(n, k)` booleans: the neighbour counts."""
        return np.arange(self.labels.shape[1]) < self.num_references[:, None]


def class_scores(
    labels: np.ndarray, scores: dict[str, np.ndarray], num_classes: int
) -> list[ClassScore]:
    """Averages the scores of the queries of each class.

    Args:
        labels: `(n,)` ints, the classes of the queries.
        scores: of each query, as `retrieval.score_queries` gives them.
        num_classes: int, labels are below it.

    Returns:
        One entry for each class that has queries, by label.
    """
    entries = []
    order = np.argsort(labels, kind="stable")
    bounds = np.searchsorted(labels[order], np.arange(num_classes + 1))
    for label in range(num_classes):
        rows = order[bounds[label] : bounds[label + 1]]
        if not len(rows):
            continue
        num_references = int(scores["num_references"][rows[0]])
        if num_references:
            values = [scores[k][rows].mean() for k in ("precision_at_1", "map_at_r")]
            entry = ClassScore(label, len(rows), num_references, *map(float, values))
        else:
            entry = ClassScore(label, 0, 0, np.nan, np.nan)
        entries.append(entry)
    return entries


def confusions(
    labels: np.ndarray, neighbors: Neighbors
) -> dict[tuple[int, int], float]:
    """How often neighbours are of which other class.

    The share of a class `a` that is taken for `b` is the number of neighbours of class
    `b` that queries of `a` have, over the number of all neighbours they have. Only the
    neighbours that count are meant.

    Args:
        labels: `(n,)` ints, the classes of the queries.
        neighbors: what they find.

    Returns:
        The shares above 0 by `(a, b)`, without `a` taken for itself.
    """
    totals = np.bincount(labels, weights=neighbors.counted.sum(axis=1))
    wrong = neighbors.counted & (neighbors.labels != labels[:, None])
    rows, columns = np.nonzero(wrong)
    pairs = np.stack([labels[rows], neighbors.labels[rows, columns]], axis=1)
    pairs, counts = np.unique(pairs, axis=0, return_counts=True)
    return {
        (int(a), int(b)): float(count / totals[a])
        for (a, b), count in zip(pairs, counts, strict=True)
    }


def most_confused_with(
    shares: dict[tuple[int, int], float],
) -> dict[int, tuple[int, float]]:
    """The class that a class is most often taken for.

    Args:
        shares: as `confusions` gives them.

    Returns:
        The other class and its share by class; of equal shares the smaller label.
    """
    most = {}
    for (a, b), share in sorted(shares.items()):
        if share > most.get(a, (b, 0.0))[1]:
            most[a] = b, share
    return most


def confused_pairs(
    shares: dict[tuple[int, int], float],
    labels: np.ndarray,
    neighbors: Neighbors,
    count: int,
) -> list[ConfusedPair]:
    """The pairs of classes that are taken for each other most.

    Pairs are ordered by the mean of their two shares, equal ones by their labels.

    Args:
        shares: as `confusions` gives them.
        labels: `(n,)` ints, the classes of the queries.
        neighbors: what they find.
        count: int, pairs at most.
    """

    def of(a: int, b: int) -> tuple[float, float]:
        return shares.get((a, b), 0.0), shares.get((b, a), 0.0)

    both = {tuple(sorted(pair)) for pair in shares}
    chosen = sorted(both, key=lambda pair: (-sum(of(*pair)), pair))[:count]
    pairs = []
    for a, b in chosen:
        rows = np.flatnonzero((labels == a) | (labels == b))
        hits = neighbors.labels[rows] == (a + b - labels[rows, None])
        hits &= neighbors.counted[rows]
        reached = np.where(hits, neighbors.distances[rows], np.inf)
        row, column = np.unravel_index(np.argmin(reached), reached.shape)
        query = int(rows[row])
        found = int(neighbors.indices[query, column])
        pairs.append(ConfusedPair((a, b), of(a, b), query, found))
    return pairs


def choose_queries(
    labels: np.ndarray,
    map_at_r: np.ndarray,
    first_distances: np.ndarray,
    count: int,
    seed: int = 0,
) -> dict[str, list[int]]:
    """Chooses queries to show.

    - `best`: highest MAP@R, at most one of a class, of at most half of the classes;
      `worst`: lowest, one of each of the other classes. Among equals the one whose
      nearest neighbour is nearest, then the first row.
    - `random`: drawn from all queries alike.

    Args:
        labels: `(n,)` ints, the classes of the queries.
        map_at_r: `(n,)` floats, NaN for queries that are not to be shown.
        first_distances: `(n,)` floats, to the nearest neighbour.
        count: int, queries of each kind at most.
        seed: int, of the random ones. Defaults to 0.

    Returns:
        Rows of queries by kind; no `worst` if there is only one class.
    """
    scored = np.flatnonzero(~np.isnan(map_at_r))
    near = first_distances[scored]
    downward = scored[np.lexsort((scored, near, -map_at_r[scored]))]
    upward = scored[np.lexsort((scored, near, map_at_r[scored]))]
    half = -(-len(np.unique(labels[scored])) // 2)
    best = _one_of_a_class(downward, labels, min(count, half))
    others = upward[~np.isin(labels[upward], labels[best])]
    worst = _one_of_a_class(others, labels, count)
    rng = np.random.default_rng(seed)
    drawn = rng.choice(scored, min(count, len(scored)), replace=False)
    return {"best": best, "worst": worst, "random": drawn.tolist()}


def _one_of_a_class(rows: Sequence[int], labels: np.ndarray, count: int) -> list[int]:
    _, first = np.unique(labels[rows], return_index=True)
    return [int(rows[place]) for place in np.sort(first)[:count]]
