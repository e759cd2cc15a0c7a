"""Retrieval metrics: P@1, P@R, MAP@R and R@k."""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from keras_ccp.checks import as_embeddings, as_floats, as_labels, check_int
from keras_ccp.k_center import exponents, squared_distances
from keras_ccp.retrieval.exact_search import ExactSearch, in_chunks

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
        gallery_labels: `(num_gallery,)` integers, given with the gallery.
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
    return mean_scores(values)


def mean_scores(scores: dict[str, np.ndarray]) -> dict[str, float | int]:
    """What `evaluate` gives, of what `score_queries` gives."""
    scored = scores["num_references"] > 0
    # In the order of the queries, whatever order they were handled in.
    result = {k: float(v[scored].mean()) for k, v in scores.items()}
    del result["num_references"]
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
    metrics = tuple(metrics)
    recalls = {name: int(name[10:]) for name in metrics if _RECALL.fullmatch(name)}
    for name in metrics:
        if name not in _METRICS and name not in recalls:
            raise ValueError(
                f"`metrics` must be names out of {', '.join(_METRICS)}, recall_at_<k>. "
                f"Received: {name!r}\nPass a list of such names"
            )
    query = as_embeddings("query_embeddings", query_embeddings)
    labels = as_labels("query_labels", query_labels, len(query))
    if index is not None:
        gallery_embeddings, gallery_labels = index.embeddings, index.labels
        if not (index.is_exact or allow_approximate):
            raise ValueError(
                "`index` must be exact, since what it misses moves the metrics either "
                f"way. Received: index.backend={index.backend!r}\n"
                "Pass index.embeddings and index.labels, or allow_approximate=True"
            )
    is_one_set = gallery_embeddings is None and gallery_labels is None
    gallery, known = query, labels
    if not is_one_set:
        gallery = as_embeddings(
            "gallery_embeddings", gallery_embeddings, query.shape[1]
        )
        known = as_labels("gallery_labels", gallery_labels, len(gallery))
    if chunk_size is not None:
        check_int("chunk_size", chunk_size, minimum=1)

    classes, counts = np.unique(known, return_counts=True)
    place = np.minimum(np.searchsorted(classes, labels), len(classes) - 1)
    num_references = np.where(classes[place] == labels, counts[place], 0) - is_one_set
    if not num_references.any():
        raise ValueError(
            "`query_labels` must have a query with a true reference. Received: all "
            f"{len(labels)} queries are skipped\n"
            "Use a gallery that has other images of their classes"
        )
    depth = np.full(len(query), max(recalls.values(), default=1))
    if "precision_at_r" in metrics or "map_at_r" in metrics:
        depth = np.maximum(depth, num_references)
    depth = np.minimum(depth, len(gallery) - is_one_set)
    depth[num_references == 0] = 0
    values = {name: np.full(len(query), np.nan) for name in metrics}
    searcher = ExactSearch(gallery) if index is None or index.is_exact else None

    def score(rows: np.ndarray, k: int) -> None:
        own = labels[rows]
        if searcher is not None:
            _, found = searcher.nearest(
                query[rows],
                k,
                rows if is_one_set else None,
                alike=lambda row, column: known[column] == own[row],
            )
            hits = known[found] == own[:, None]
        else:
            _, ids = index.search(query[rows], k)
            hits = index.labels_of(ids) == own[:, None]
        for name, value in score_hits(hits, num_references[rows], recalls).items():
            if name in values:
                values[name][rows] = value

    in_chunks(score, depth, len(gallery), chunk_size)
    return {**values, "num_references": num_references}


def score_hits(
    hits: np.ndarray, num_references: np.ndarray, recalls: dict[str, int] | None = None
) -> dict[str, np.ndarray]:
    """All metrics of queries by their `(n, depth)` hits, nearest first."""
    place = np.arange(1, hits.shape[1] + 1)
    within = hits & (place <= num_references[:, None])
    precision = np.cumsum(within, axis=1) / place
    # One after the other: `sum` would group them by how many columns there are.
    total = np.cumsum(np.where(within, precision, 0.0), axis=1)[:, -1]
    return {
        "precision_at_1": hits[:, 0],
        "precision_at_r": within.sum(axis=1) / num_references,
        "map_at_r": total / num_references,
        **{name: hits[:, :k].any(axis=1) for name, k in (recalls or {}).items()},
    }


def covering_radius(
    embeddings: np.ndarray, labels: Any, centers: np.ndarray | None = None
) -> float:
    """Mean over the classes of the largest distance from a sample to its center.

    For class `c` with samples `x` and centers `z` the radius is
    `max_x min_z ||x - z||`, L2 and not squared. Classes without a sample have none.

    Source: arXiv 2209.09060, where it bounds what proxies miss of their class.

    Args:
        embeddings: `(n, dim)` floats.
        labels: `(n,)` or `(n, 1)` ints from 0 on.
        centers: `(num_classes, centers_per_class, dim)` floats, row `c` for label `c`,
            for example the proxies. Defaults to `None`: the mean of each class is its
            only center.

    Returns:
        The mean radius, a float.

    Raises:
        ValueError: for wrong shapes, values that are not finite, labels that are no
            integers from 0 on, or a label without a row in `centers`.

    Example:

        >>> covering_radius(np.array([[-1.0], [1.0], [3.0]]), [0, 0, 1])
        0.5
    """
    embeddings = as_embeddings("embeddings", embeddings)
    labels = as_labels("labels", labels, len(embeddings))
    exponent = exponents(embeddings).item()
    if centers is not None:
        centers = as_floats("centers", centers)
        if centers.ndim != 3 or len(centers) <= labels.max():
            raise ValueError(
                "`centers` must have shape (num_classes, centers_per_class, dim). "
                f"Received: shape {centers.shape}, and labels up to {labels.max()}\n"
                "Give each label its row"
            )
        flat = centers.reshape(-1, centers.shape[-1])
        flat = as_embeddings("centers", flat, embeddings.shape[1])
        exponent = max(exponent, exponents(flat).item())
        centers = np.ldexp(centers.astype(np.float64), -exponent)
    order = np.argsort(labels, kind="stable")
    classes, starts = np.unique(labels[order], return_index=True)
    radii = []
    for label, members in zip(classes, np.split(order, starts[1:]), strict=True):
        samples = np.ldexp(embeddings[members].astype(np.float64), -exponent)
        own = [samples.mean(axis=0)] if centers is None else centers[label]
        nearest = np.min([squared_distances(samples, center) for center in own], axis=0)
        radii.append(np.sqrt(nearest.max()))
    return float(np.ldexp(np.mean(radii), exponent))
