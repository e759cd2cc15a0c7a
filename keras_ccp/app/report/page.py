"""`write_report`: evaluates a run once more and writes the page."""

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_ccp import retrieval
from keras_ccp.app.config import Config, dump_config, published_row
from keras_ccp.app.html_page import render, thumbnail
from keras_ccp.app.report.distances import distance_histogram
from keras_ccp.app.report.figures import (
    MEASURES,
    distance_figure,
    projection_figures,
    training_figures,
)
from keras_ccp.app.report.history import History, read_histories
from keras_ccp.app.report.scores import (
    Neighbors,
    choose_queries,
    class_scores,
    confused_pairs,
    confusions,
    most_confused_with,
)
from keras_ccp.app.run import (
    METRICS_FILE,
    evaluate_run,
    join_embedders,
    load_run_config,
    unfinished,
)
from keras_ccp.app.search.results import write_file
from keras_ccp.app.splits import Splits, load_splits
from keras_ccp.pipeline import EvaluationData

REPORT_FILE = "report.html"
_SHOWN = 5
_QUERIES, _PAIRS = 6, 12
# Neighbours that are looked at where classes are confused.
_MOST_NEIGHBORS = 100
_log = logging.getLogger(__name__)


class Picture(NamedTuple):
    """An image of the data on the page.

    Args:
        uri: the image, small.
        file: its path, relative to the data where it is below; empty if it has none.
    """

    uri: str
    file: str


def write_report(
    run: str | os.PathLike,
    root: str | os.PathLike,
    out: str | os.PathLike | None = None,
) -> Path:
    """Writes what a run has learned as one HTML file that needs nothing else.

    Scores are those of `metrics.json`, made where they are missing of the models that
    are finished; if some are not, the page and a logged warning say so. Pictures,
    classes and distances are of the test images, embedded by all models of the first
    repetition side by side.

    Args:
        run: folder of the run.
        root: folder of the data.
        out: HTML file. Defaults to `None`: `report.html` in the run's folder.

    Returns:
        Path of the file.

    Raises:
        FileNotFoundError: If there is no run, or none of its models is finished.
    """
    run = Path(run)
    out = run / REPORT_FILE if out is None else Path(out)
    config = load_run_config(run)
    histories = read_histories(run)
    metrics = _metrics(run, root, histories)
    if warning := unfinished(run, config):
        _log.warning("%s: %s", run, warning)
    splits = load_splits(config.data, root)
    first = [h.directory for h in histories if h.repeat == histories[0].repeat]
    page = render(
        "app/report/report.html.j2",
        unfinished=warning,
        title=f"{config.method} on {_data_name(config)}",
        num_classes=splits.query.num_classes,
        num_images=len(splits.query) + len(splits.gallery or ()),
        metrics=metrics,
        published=published_row(metrics["dataset"], metrics["method"]) or {},
        models=list(zip(histories, metrics["models"], strict=True)),
        repetitions=_training(histories),
        has_projections=any(history.projections for history in histories),
        measures=MEASURES,
        config=dump_config(config),
        versions=_versions(run),
        num_joined=len(first),
        **_results(splits, join_embedders(first), Path(root)),
    )
    write_file(out, page)
    return out


def _metrics(run: Path, root: str | os.PathLike, histories: list[History]) -> dict:
    path = run / METRICS_FILE
    if path.exists():
        metrics = json.loads(path.read_text("utf-8"))
        if len(metrics["models"]) == len(histories):
            return metrics
    return evaluate_run(run, root)


def _data_name(config: Config) -> str:
    return Path(config.data.file).stem if config.data.file else config.data.name


def _versions(run: Path) -> dict[str, str]:
    path = run / "run.json"
    return json.loads(path.read_text("utf-8"))["versions"] if path.exists() else {}


def _training(histories: list[History]) -> list[dict[str, Any]]:
    """Charts of the models of each repetition."""
    repetitions = []
    for repeat in sorted({history.repeat for history in histories}):
        models = [
            {
                "history": history,
                "figures": training_figures(history, histories),
                "projections": projection_figures(history, histories)
                if history.projections
                else [],
            }
            for history in histories
            if history.repeat == repeat
        ]
        repetitions.append({"number": repeat + 1, "models": models})
    return repetitions


def _results(splits: Splits, embedder: Any, root: Path) -> dict[str, Any]:
    """What the test images show, for the template."""
    query, gallery = splits.query, splits.gallery
    arguments = [_embed(embedder, query), query.labels]
    if gallery is not None:
        arguments += [_embed(embedder, gallery), gallery.labels]
    scores = retrieval.score_queries(*arguments, metrics=("precision_at_1", "map_at_r"))
    neighbors = _neighbors(*arguments, num_references=scores["num_references"])
    shares = confusions(query.labels, neighbors)
    pairs = confused_pairs(shares, query.labels, neighbors, _PAIRS)
    chosen = choose_queries(
        query.labels, scores["map_at_r"], neighbors.distances[:, 0], _QUERIES
    )
    rows = [row for kind in chosen.values() for row in kind]
    found = neighbors.indices[rows, :_SHOWN].ravel()
    histogram = distance_histogram(*arguments)
    return {
        "classes": class_scores(query.labels, scores, query.num_classes),
        "class_names": query.class_names,
        "most_confused": most_confused_with(shares),
        "pairs": pairs,
        "chosen": chosen,
        "num_shown": min(_SHOWN, neighbors.indices.shape[1]),
        "num_queries": len(query),
        "is_one_set": gallery is None,
        "most_neighbors": _MOST_NEIGHBORS
        if scores["num_references"].max() > _MOST_NEIGHBORS
        else None,
        "neighbors": neighbors,
        "labels": query.labels,
        "map_at_r": scores["map_at_r"],
        "queries": _pictures(query, [*rows, *(pair.query for pair in pairs)], root),
        "found": _pictures(
            query if gallery is None else gallery,
            [*found, *(pair.neighbour for pair in pairs)],
            root,
        ),
        "histogram": histogram,
        "distances": distance_figure(histogram),
    }


def _embed(embedder: Any, dataset: Any) -> np.ndarray:
    data = EvaluationData(dataset, "test images")
    return embedder.predict(data.batches(), verbose=0)


def _neighbors(
    query: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
    *,
    num_references: np.ndarray,
) -> Neighbors:
    is_one_set = gallery is None
    if is_one_set:
        gallery, gallery_labels = query, labels
    k = max(_SHOWN, min(_MOST_NEIGHBORS, int(num_references.max())))
    k = min(k, len(gallery) - is_one_set)
    distances, indices = retrieval.search(query, gallery, k, exclude_self=is_one_set)
    return Neighbors(distances, indices, gallery_labels[indices], num_references)


def _pictures(dataset: Any, rows: Iterable[int], root: Path) -> dict[int, Picture]:
    """Images as the embedder sees them, by their row."""
    rows = sorted({int(row) for row in rows})
    if not rows:
        return {}
    batches = EvaluationData(dataset, "test images").batches(rows)
    images = (image for batch in batches for image in batch.numpy())
    return {
        row: Picture(thumbnail(image), _file(dataset.images[row], root))
        for row, image in zip(rows, images, strict=True)
    }


def _file(image: Any, root: Path) -> str:
    if not isinstance(image, str):
        return ""
    is_below = Path(image).is_relative_to(root)
    return os.path.relpath(image, root) if is_below else image
