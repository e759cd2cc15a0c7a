"""Retrieval metrics: P@1, P@R, MAP@R and R@k."""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from keras_ccp.checks import check_bool, check_int
from keras_ccp.retrieval.ahead import ahead
from keras_ccp.retrieval.exact_search import ExactSearcher, by_depth
from keras_ccp.retrieval.validation import as_embeddings, as_labels

_METRICS = ("precision_at_1", "precision_at_r", "map_at_r")
_RECALL = re.compile(r"recall_at_([1-9][0-9]{0,8})")


def evaluate(
    query_embeddings: np.ndarray,
    query_labels: Any,
    gallery_embeddings: np.ndarray | None = None,
    gallery_labels: Any = None,
    metrics: Iterable[str] = _METRICS,
    chunk_size: int | None = None,
    index: Any = None,
    allow_approximate: bool = False,
) -> dict[str, float | int]:
    """Measures how well queries find their class in a gallery, by exact search.

    With `R` the number of gallery rows of the query's class, and `hit_j` 1 if the
    `j`-th nearest gallery row is one of them, the mean over the queries of

    - `precision_at_1`: `hit_1`
    - `precision_at_r`: `(hit_1 + ... + hit_R) / R`
    - `map_at_r`: `(1 / R) * sum_{j <= R} hit_j * (hit_1 + ... + hit_j) / j`
    - `recall_at_<k>`: 1 if any of `hit_1 ... hit_k` is, else 0.

    Source: Musgrave et al., "A Metric Learning Reality Check" (arXiv 2003.08505),
    section 3.2. Hits 1, 0, 1 with R = 3 have MAP@R `(1 + 2/3) / 3 = 0.5556`.

    Equally near rows come by their gallery index. Queries without a single true
    reference are skipped and counted. Any `chunk_size` gives the same bits.

    Args:
        query_embeddings: `(num_queries, dim)` floats.
        query_labels: `(num_queries,)` or `(num_queries, 1)` ints from 0 on.
        gallery_embeddings: `(num_gallery, dim)` floats. Defaults to `None`: the queries
            are searched in themselves, each without its own row (by index: a duplicate
            under another index is found).
        gallery_labels: likewise for the gallery, given with it.
        metrics: names from the list above.
        chunk_size: int, queries handled at once in each of three threads. Defaults to
            `None`: as many as need some 100 MB.
        index: `RetrievalIndex` with integer labels, the gallery in place of
            `gallery_embeddings` and `gallery_labels`. Defaults to `None`.
        allow_approximate: bool, whether the neighbours may be those that an index finds
            which is not exact. Defaults to False: such an index is refused.

    Returns:
        A dict with a float for each name in `metrics`, and the ints `num_queries`
        (those that were scored) and `num_skipped`.

    Raises:
        ValueError: for wrong shapes, embeddings that are not finite, wrong labels
            (floats are), an unknown metric, a gallery without labels or labels without
            a gallery, an index that is not exact, or if no query has a true reference.
        TypeError: for embeddings or labels that are no numbers, a `chunk_size` that is
            no integer, or `metrics` that are no list.
    """
    values = score_queries(
        query_embeddings,
        query_labels,
        gallery_embeddings,
        gallery_labels,
        metrics,
        chunk_size,
        index,
        allow_approximate,
    )
    scored = values.pop("num_references") > 0
    # In the order of the queries, whatever order they were handled in.
    result = {name: float(value[scored].mean()) for name, value in values.items()}
    result["num_queries"] = int(scored.sum())
    result["num_skipped"] = int((~scored).sum())
    return result


def score_queries(
    query_embeddings: np.ndarray,
    query_labels: Any,
    gallery_embeddings: np.ndarray | None = None,
    gallery_labels: Any = None,
    metrics: Iterable[str] = _METRICS,
    chunk_size: int | None = None,
    index: Any = None,
    allow_approximate: bool = False,
) -> dict[str, np.ndarray]:
    """The metrics of each query, of which `evaluate` gives the means.

    Args:
        query_embeddings: as for `evaluate`.
        query_labels: as for `evaluate`.
        gallery_embeddings: as for `evaluate`.
        gallery_labels: as for `evaluate`.
        metrics: as for `evaluate`.
        chunk_size: as for `evaluate`.
        index: as for `evaluate`.
        allow_approximate: as for `evaluate`.

    Returns:
        For each name in `metrics` a `(num_queries,)` float64 array, NaN for a query
        without a true reference; and `num_references`, the `(num_queries,)` int64
        number R of true references.

    Raises:
        ValueError: as `evaluate`.
        TypeError: as `evaluate`.
    """
    metrics = _checked_metrics(metrics)
    matches = {name: _RECALL.fullmatch(name) for name in metrics}
    recalls = {name: int(match[1]) for name, match in matches.items() if match}
    query = as_embeddings("query_embeddings", query_embeddings)
    labels = as_labels("query_labels", query_labels, len(query))
    if index is not None:
        _check_index(index, gallery_embeddings, gallery_labels, allow_approximate)
        gallery_embeddings, gallery_labels = index.embeddings, index.labels
    is_one_set = gallery_embeddings is None and gallery_labels is None
    gallery, known = query, labels
    if not is_one_set:
        gallery, known = _checked_gallery(gallery_embeddings, gallery_labels, query)
    if chunk_size is not None:
        check_int("chunk_size", chunk_size, minimum=1)

    num_references = _count_references(labels, known) - is_one_set
    _check_scored(num_references, labels)
    searcher = ExactSearcher(query, gallery, is_one_set, chunk_size)
    depth = np.ones(len(query), np.int64)
    if "precision_at_r" in metrics or "map_at_r" in metrics:
        depth = num_references
    depth = np.maximum(depth, max(recalls.values(), default=1))
    depth = np.minimum(depth, len(gallery) - is_one_set)
    depth = np.where(num_references > 0, depth, 0)
    values = {name: np.full(len(query), np.nan) for name in metrics}
    if index is None or index.is_exact:
        found = _hits(searcher, labels, known, depth)
    else:
        found = _approximate_hits(index, query, labels, depth)
    for rows, hits in found:
        _score(values, recalls, rows, hits, num_references[rows])
    return {**values, "num_references": num_references}


def _check_scored(num_references, labels):
    """Refuses queries none of which can be scored."""
    if not num_references.any():
        raise ValueError(
            "`query_labels` must have a query with a true reference, but all "
            f"{len(labels)} queries are skipped: no class of theirs has another row "
            f"in the gallery. Received: {len(np.unique(labels))} query classes"
        )


def _check_index(index, gallery_embeddings, gallery_labels, allow_approximate):
    """Refuses an index beside a gallery, and one that is not exact."""
    check_bool("allow_approximate", allow_approximate)
    if gallery_embeddings is not None or gallery_labels is not None:
        raise ValueError(
            "`index` must be given without `gallery_embeddings` and `gallery_labels`, "
            "in whose place it is. Received: both"
        )
    if index.labels is None:
        raise ValueError("`index` must have labels. Received: an index without")
    if not index.is_exact and not allow_approximate:
        raise ValueError(
            "`index` must be exact, since what it misses moves the metrics either way; "
            "evaluate with index.embeddings and index.labels, or pass "
            f"allow_approximate=True. Received: index.backend={index.backend!r}"
        )


def _checked_gallery(embeddings, labels, query):
    """The gallery's embeddings and labels; refuses one without the other."""
    if embeddings is None or labels is None:
        missing = "gallery_labels" if labels is None else "gallery_embeddings"
        raise ValueError(
            f"`{missing}` must come with the other half of the gallery, or neither. "
            f"Received: {missing}=None"
        )
    embeddings = as_embeddings("gallery_embeddings", embeddings, query.shape[1])
    return embeddings, as_labels("gallery_labels", labels, len(embeddings))


def _checked_metrics(metrics):
    """The names asked for as a tuple; refuses unknown ones."""
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        raise TypeError(
            f"`metrics` must be a list of names. Received: metrics={metrics!r}"
        )
    metrics = tuple(metrics)
    for name in metrics:
        known = isinstance(name, str) and (name in _METRICS or _RECALL.fullmatch(name))
        if not known:
            raise ValueError(
                f"`metrics` must be names out of {', '.join(_METRICS)}, recall_at_<k> "
                f"with k from 1 to 999999999. Received: {name!r}"
            )
    return metrics


def _count_references(labels, known):
    """How many gallery rows carry the label of each query."""
    classes, counts = np.unique(known, return_counts=True)
    place = np.minimum(np.searchsorted(classes, labels), len(classes) - 1)
    return np.where(classes[place] == labels, counts[place], 0)


def _hits(searcher, labels, known, depth):
    """Yields rows of queries and their `(n, depth)` hits, nearest first."""

    def hits_of(found):
        most = int(depth[found.rows].max())
        own = labels[found.rows]
        hits = known[found.indices] == own[:, None]
        undecided = _mixed_runs(found.linked, hits)
        unsure = np.flatnonzero(undecided[:, :most].any(axis=1))
        if unsure.size:
            part = searcher.refine(found.take(unsure), undecided[unsure])
            hits[unsure] = known[part.indices] == own[unsure, None]
        return found.rows, hits[:, :most]

    return ahead(hits_of, searcher.candidates(depth))


def _approximate_hits(index, query, labels, depth):
    """As `_hits`, of the neighbours that an index finds."""
    for k, rows in by_depth(depth).items():
        if not k:
            continue
        _, ids = index.search(query[rows], k)
        yield rows, index.labels_of(ids) == labels[rows, None]


def _mixed_runs(linked, hits):
    """Candidates in runs of linked ones that hold hits and misses.

    The order inside of other runs makes no difference to any metric.
    """
    mixed = np.zeros(hits.shape, bool)
    changes = linked & (hits[:, 1:] != hits[:, :-1])
    rows = np.flatnonzero(changes.any(axis=1))
    if rows.size:
        # Runs are numbered through all rows: the first of a row starts a new one.
        starts = np.ones((rows.size, hits.shape[1]), bool)
        starts[:, 1:] = ~linked[rows]
        run = np.cumsum(starts).reshape(starts.shape)
        is_mixed = np.zeros(run[-1, -1] + 1, bool)
        is_mixed[run[:, 1:][changes[rows]]] = True
        mixed[rows] = is_mixed[run]
    return mixed


def _score(values, recalls, rows, hits, num_references):
    """Writes the metrics of the queries `rows` into `values`."""
    place = np.arange(1, hits.shape[1] + 1)
    for name, k in recalls.items():
        values[name][rows] = hits[:, :k].any(axis=1)
    if "precision_at_1" in values:
        values["precision_at_1"][rows] = hits[:, 0]
    if "precision_at_r" in values or "map_at_r" in values:
        within = hits & (place <= num_references[:, None])
        if "precision_at_r" in values:
            values["precision_at_r"][rows] = within.sum(axis=1) / num_references
        if "map_at_r" in values:
            precision = np.cumsum(within, axis=1) / place
            # One after the other: `sum` would group them by how many columns there are.
            total = np.cumsum(np.where(within, precision, 0.0), axis=1)[:, -1]
            values["map_at_r"][rows] = total / num_references
