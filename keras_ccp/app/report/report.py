"""`write_report`: evaluates a run once more and writes the page."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from keras_ccp import retrieval
from keras_ccp.app.config import published_row
from keras_ccp.app.images import relative
from keras_ccp.app.page import render, thumbnail
from keras_ccp.app.report import charts, scores
from keras_ccp.app.report.distances import distance_histogram
from keras_ccp.app.report.history import History, read_histories
from keras_ccp.app.run import (
    METRICS_FILE,
    join_embedders,
    load_run_config,
    load_run_splits,
    read_about,
    score_run,
    unfinished,
)
from keras_ccp.app.splits import Splits
from keras_ccp.files import read_json, write_file
from keras_ccp.pipeline import EvaluationData, embed

_SHOWN = 5
_QUERIES, _PAIRS = 6, 12
# Neighbours that are looked at where classes are confused.
_MOST_NEIGHBORS = 100
_log = logging.getLogger(__name__)


class Picture(NamedTuple):
    """An image of the data on the page: small, as a URI, and its file if it has one."""

    uri: str
    file: str


def write_report(
    run: str | os.PathLike,
    root: str | os.PathLike | None = None,
    out: str | os.PathLike | None = None,
) -> Path:
    """Writes what a run has learned as one HTML file that needs nothing else.

    Scores are those of `metrics.json`; where it is missing, of the models that are
    finished. If some are not, or the data changed since, the page and a logged warning
    say so. Pictures, classes and distances are of the run's test classes, embedded by
    all models of the first repetition side by side.

    Args:
        run: folder of the run.
        root: folder of the data. Defaults to `None`: that of the training.
        out: HTML file. Defaults to `None`: `report.html` in the run's folder.

    Returns:
        Path of the file.

    Raises:
        FileNotFoundError: If there is no run, or none of its models is finished.
    """
    run = Path(run)
    out = run / "report.html" if out is None else Path(out)
    config = load_run_config(run)
    splits, root, changed = load_run_splits(run, root)
    histories = read_histories(run)
    metrics = _metrics(run, splits, histories)
    if missing := unfinished(run):
        _log.warning("%s: %s", run, missing)
    first = [h.directory for h in histories if h.repeat == histories[0].repeat]
    page = render(
        "app/report/report.html.j2",
        unfinished=". ".join(filter(None, (missing, changed))),
        title=f"{config.method} on {config.data.title}",
        num_classes=splits.query.num_classes,
        num_images=len(splits.query) + len(splits.gallery or ()),
        metrics=metrics,
        published=published_row(metrics["dataset"], metrics["method"]) or {},
        histories=histories,
        charts=charts,
        config=config.to_yaml(),
        versions=read_about(run).get("versions", {}),
        num_joined=len(first),
        **_results(splits, join_embedders(first), root),
    )
    write_file(out, page)
    return out


def _metrics(run: Path, splits: Splits, histories: list[History]) -> dict:
    path = run / METRICS_FILE
    if path.exists():
        keys = "dataset", "method", "separated", "concatenated", "models"
        metrics = read_json(path, *keys)
        if len(metrics["models"]) == len(histories):
            return metrics
    return score_run(run, splits)


def _results(splits: Splits, embedder: Any, root: Path) -> dict[str, Any]:
    """What the test images show, for the template."""
    query, gallery = splits.query, splits.gallery
    is_one_set = gallery is None
    parts = [query] if is_one_set else [query, gallery]
    arguments = [x for part in parts for x in (embed(embedder, part), part.labels)]
    of_queries = retrieval.score_queries(*arguments)
    references = of_queries["num_references"]
    vectors, known = arguments[-2:]
    k = max(_SHOWN, min(_MOST_NEIGHBORS, int(references.max())))
    k = min(k, len(known) - is_one_set)
    found = retrieval.search(arguments[0], vectors, k, exclude_self=is_one_set)
    neighbors = scores.Neighbors(query.labels, *found, known[found[1]], references)
    shares = scores.confusions(neighbors)
    pairs = scores.confused_pairs(shares, neighbors, _PAIRS)
    map_at_r, near = of_queries["map_at_r"], neighbors.distances[:, 0]
    chosen = scores.choose_queries(query.labels, map_at_r, near, _QUERIES)
    rows = [row for kind in chosen.values() for row in kind]
    shown = neighbors.indices[rows, :_SHOWN].ravel()
    histogram = distance_histogram(*arguments)
    return {
        "classes": scores.class_scores(query.labels, of_queries),
        "class_names": query.class_names,
        "most_confused": scores.most_confused_with(shares),
        "pairs": pairs,
        "chosen": chosen,
        "num_shown": min(_SHOWN, k),
        "num_queries": len(query),
        "is_one_set": is_one_set,
        "most_neighbors": k if references.max() > k else None,
        "neighbors": neighbors,
        "labels": query.labels,
        "map_at_r": map_at_r,
        "queries": _pictures(query, [*rows, *(pair.query for pair in pairs)], root),
        "found": _pictures(
            parts[-1], [*shown, *(pair.neighbour for pair in pairs)], root
        ),
        "histogram": histogram,
        "distances": charts.distance_chart(histogram),
    }


def _pictures(dataset: Any, rows: Iterable[int], root: Path) -> dict[int, Picture]:
    """Images as the embedder sees them, by their row."""
    rows = sorted({int(row) for row in rows})
    data, pictures = EvaluationData(dataset, "test images"), {}
    images = data.batches(rows).unbatch().as_numpy_iterator() if rows else ()
    for row, pixels in zip(rows, images, strict=True):
        image = dataset.images[row]
        file = relative(image, root) if isinstance(image, str) else ""
        pictures[row] = Picture(thumbnail(pixels), file)
    return pictures
