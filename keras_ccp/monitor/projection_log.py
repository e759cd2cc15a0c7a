"""The numbers of a projection, and the log that writes them down during a training."""

import io
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_ccp import retrieval
from keras_ccp.callback import BestWeights, CCPCallback, at_best, draw_pool
from keras_ccp.files import reading, write_file
from keras_ccp.pipeline import EvaluationData

FILE = "projections.jsonl"
ARRAYS = "projections"
_KEYS = ("projection", "epoch", "val_map_at_r", "is_last", "before", "after")

# ==== The numbers ====


class Projection(NamedTuple):
    """A proxy problem at its best weights, and the proxies of the next one."""

    embeddings: np.ndarray  # (n, dim), normalised, of fixed samples
    labels: np.ndarray  # (n,), 0..C-1, each of them present
    proxies: np.ndarray  # (C, proxies_per_class, dim), normalised
    next_proxies: np.ndarray | None  # the same, or None where the training ended
    map_at_r: float  # of the validation images


def measure(
    embeddings: np.ndarray, labels: Any, proxies: np.ndarray
) -> dict[str, float]:
    """Measures the proxies of a `Projection` against its samples, in L2 (not squared).

    - `mean_covering_radius`, `max_covering_radius`: over the classes, of the largest
      distance from a sample to the nearest proxy of its class.
    - `mean_inter_class_distance`: see that function.
    - `proxy_spread`: mean of `proxy_spreads` over the classes that have one, or 0
      without any; near 0 where proxies have collapsed.
    - `proxy_usage`: share of the proxies that are the nearest of their class to at
      least one sample. Of equal proxies the first counts.
    """
    radii, used = [], []
    for members, own in zip(_by_class(embeddings, labels), proxies, strict=True):
        distances, nearest = retrieval.search(members, own, k=1)
        radii.append(distances.max())
        used.append(len(np.unique(nearest)) / len(own))
    spreads = proxy_spreads(embeddings, labels, proxies)
    spreads = spreads[~np.isnan(spreads)]
    return {
        "mean_covering_radius": float(np.mean(radii)),
        "max_covering_radius": float(np.max(radii)),
        "mean_inter_class_distance": mean_inter_class_distance(embeddings, labels),
        "proxy_spread": float(spreads.mean()) if len(spreads) else 0.0,
        "proxy_usage": float(np.mean(used)),
    }


def mean_inter_class_distance(embeddings: np.ndarray, labels: Any) -> float:
    """Mean over all pairs of classes of the distance between their mean embeddings.

    The paper (https://arxiv.org/abs/2209.09060) gives such a number without its
    definition; this is ours. For C classes evenly on the unit circle it is
    `2 / (C - 1) * cot(pi / (2 C))`: 1.40 for ten. For a single class it is 0.
    """
    means = np.stack([x.mean(axis=0) for x in _by_class(embeddings, labels)])
    distances = [
        np.linalg.norm(means[:i] - means[i], axis=1) for i in range(len(means))
    ]
    distances = np.concatenate(distances)
    return float(distances.mean()) if len(distances) else 0.0


def proxy_spreads(
    embeddings: np.ndarray, labels: Any, proxies: np.ndarray
) -> np.ndarray:
    """`(C,)` spreads of each class' proxies, as a share of its samples' spread.

    For a class with samples `x` and proxies `z` it is
    `mean ||z - mean z|| / mean ||x - mean x||`: 0 for proxies on one point, about 1 for
    proxies that are drawn from the samples, NaN where all samples are the same.
    """
    spreads = []
    for members, own in zip(_by_class(embeddings, labels), proxies, strict=True):
        samples = _spread(members)
        spreads.append(_spread(own) / samples if samples else np.nan)
    return np.array(spreads)


def _by_class(embeddings, labels):
    """The float64 samples of each class in turn."""
    ends = np.cumsum(np.bincount(labels))[:-1]
    order = np.argsort(labels, kind="stable")
    return np.split(np.asarray(embeddings, np.float64)[order], ends)


def _spread(points):
    points = np.asarray(points, np.float64)
    return float(np.linalg.norm(points - points.mean(axis=0), axis=1).mean())


# ==== The log ====


class ProjectionListener(keras.callbacks.Callback):
    """What hears of projections and embeds the same images at each of them."""

    data: EvaluationData
    rows: np.ndarray  # of the data, ascending
    epoch = 0

    def ccp_callback(self) -> CCPCallback:
        """The callback of this `fit` that makes the projections."""
        callbacks = self.model.fit_callbacks
        for callback in callbacks:
            if isinstance(callback, CCPCallback):
                return callback
        raise ValueError(
            f"`callbacks` must hold a CCPCallback beside a {type(self).__name__}. "
            f"Received: {[type(callback).__name__ for callback in callbacks]}\n"
            "Add one; without it there are no projections to hear of"
        )

    def embed(self) -> np.ndarray:
        """`(rows, dim)` embeddings under the weights of now."""
        return self.model.predict(self.data.batches(self.rows), verbose=0)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    # So that a `fit` which is resumed after its last epoch still knows that.

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def set_state(self, state: dict[str, Any]) -> None:
        self.epoch = int(state["epoch"])


class ProjectionLog(ProjectionListener):
    """Measures proxies at each projection and at the end, beside a `CCPCallback`.

    Put it into the callbacks of `CCPModel.fit`, anywhere. It writes
    `projections.jsonl`, a JSON object a line for each proxy problem that ended:

    - `projection`: int, projections before this problem, from 0 on.
    - `epoch`: int, at whose end the problem ended, counted from 0 as in `log.csv`.
    - `val_map_at_r`: float, the best validation MAP@R of the problem.
    - `is_last`: bool, whether the training ended with it.
    - `num_samples`, `num_classes`: ints, what was measured on.
    - `before`: numbers of the converged proxies, at the best weights of the problem.
    - `after`: those of the proxies that take their place, at the weights the next
      problem begins with; `null` in the last line.

    `keras_ccp.monitor.projection_log.measure` says what the numbers are. A resumed run
    replaces the lines from its first one on, and so does a new run. A problem that
    began in the last epoch has no line, nor has a model without proxies.

    Args:
        directory: folder of the run; made if it is missing.
        samples: images of training classes, with the labels of the training, in a form
            that `CCPCallback` takes. Defaults to `None`: of the callback's pool, as
            many of each class as it draws for a projection, the same ones each time.
        max_samples: int, of that default, by leaving out classes. Defaults to 2000.
        save_arrays: bool, also write `projections/<projection>.npz` for
            `load_projections`. Defaults to `False`.

    Raises:
        ValueError: if samples are badly labelled. By `fit`: if there is no
            `CCPCallback`, labels are not those of the training, or `projections.jsonl`
            is damaged.

    Example: `callbacks=[CCPCallback(training, validation), ProjectionLog("run")]`.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        samples: Any = None,
        max_samples: int = 2000,
        save_arrays: bool = False,
    ):
        super().__init__()
        self.directory = Path(directory)
        self.samples = None if samples is None else EvaluationData(samples, "samples")
        self.max_samples = max_samples
        self.save_arrays = save_arrays
        self.lines: list[dict[str, Any]] = []

    def on_train_begin(self, logs=None):
        # Now, so that a damaged file costs no training.
        self.lines = read_lines(self.directory)
        if not self.model.proxies_per_class:
            return
        self.callback = self.ccp_callback()
        self.data, self.rows = self._drawn()
        labels = self.data.labels[self.rows]
        if labels.max() >= self.model.num_classes:
            raise ValueError(
                f"`samples` must have labels from 0 to {self.model.num_classes - 1}. "
                f"Received: label {labels.max()}\nGive them the labels of the training"
            )
        self.classes, self.labels = np.unique(labels, return_inverse=True)

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        if epoch == 0:
            # A new run; one that is resumed begins later.
            self.lines = []
            (self.directory / FILE).unlink(missing_ok=True)

    def on_projection(self, best: BestWeights, is_last: bool) -> None:
        """Measures and writes."""
        if not self.model.proxies_per_class:
            return
        with at_best(self.model, best):
            embeddings, proxies = self.embed(), self._proxies()
        after = next_proxies = None
        if not is_last:
            next_proxies = self._proxies()
            goes_on = (
                embeddings if self.callback.restore_on_projection else self.embed()
            )
            after = measure(goes_on, self.labels, next_proxies)
        # The projection, if there was one, is counted by now.
        number = self.callback.num_projections - (not is_last)
        line = {
            "projection": number,
            "epoch": self.epoch,
            "val_map_at_r": float(best.map_at_r),
            "is_last": is_last,
            "num_samples": len(self.labels),
            "num_classes": len(self.classes),
            "before": measure(embeddings, self.labels, proxies),
            "after": after,
        }
        earlier = [other for other in self.lines if other["projection"] < number]
        self.lines = [*earlier, line]
        text = "".join(f"{json.dumps(line)}\n" for line in self.lines)
        write_file(self.directory / FILE, text)
        if self.save_arrays:
            arrays = {"embeddings": embeddings, "labels": self.labels}
            arrays |= {"proxies": proxies, "map_at_r": best.map_at_r}
            if not is_last:
                arrays["next_proxies"] = next_proxies
            content = io.BytesIO()
            np.savez_compressed(content, **arrays)
            write_file(self.directory / ARRAYS / f"{number}.npz", content.getvalue())

    def _drawn(self) -> tuple[EvaluationData, np.ndarray]:
        """Data and the rows to embed, ascending."""
        if self.samples is not None:
            return self.samples, np.arange(len(self.samples))
        data, size = self.callback.pool, self.callback.pool_size
        rng = np.random.default_rng(0)
        rows, mask = draw_pool(data.labels, self.model.num_classes, size, rng)
        classes = rng.permutation(len(rows))[: max(1, self.max_samples // size)]
        return data, np.sort(rows[classes][mask[classes]])

    def _proxies(self) -> np.ndarray:
        return self.model.proxy_embeddings()[self.classes]


def read_lines(directory: str | os.PathLike) -> list[dict[str, Any]]:
    """A dict for each line of `projections.jsonl`, none where there is no such file."""
    path = Path(directory) / FILE
    if not path.exists():
        return []
    remedy = "Delete it, or take it from a backup"
    with reading(f"{path} must hold an undamaged projection in each line", remedy):
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for line in lines:
            {key: line[key] for key in _KEYS}
        return lines


def load_projections(directory: str | os.PathLike) -> list[Projection]:
    """Reads what `ProjectionLog` wrote into a folder with `save_arrays=True`.

    Args:
        directory: the folder.

    Returns:
        For each line of `projections.jsonl` a named tuple of `embeddings` (n, dim),
        `labels` (n,) from 0 to C-1, `proxies` and `next_proxies` (C, proxies_per_class,
        dim; `None` in the last) and the float `map_at_r`.

    Raises:
        FileNotFoundError: if the arrays of a line are not there.

    Example: `plots.projection_figure(load_projections("run"))`.
    """
    projections = []
    for line in read_lines(directory):
        with np.load(Path(directory) / ARRAYS / f"{line['projection']}.npz") as arrays:
            fields = {name: arrays[name] for name in arrays.files}
        fields["map_at_r"] = float(fields["map_at_r"])
        projections.append(Projection(**{"next_proxies": None, **fields}))
    return projections
