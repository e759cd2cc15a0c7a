"""ProjectionLog: writes down what each projection did to the proxies."""

import json
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_ccp.callback import BestWeights, CCPCallback, at_best, draw_pool
from keras_ccp.checks import check_bool, check_int
from keras_ccp.monitor.projections import Projection, measure, reference_embeddings
from keras_ccp.pipeline import EvaluationData

FILE = "projections.jsonl"
ARRAYS = "projections"


class ProjectionLog(keras.callbacks.Callback):
    """Measures proxies at each switch and at the end, beside a `CCPCallback`.

    Put it into the callbacks of `CCPModel.fit`, anywhere. It writes
    `projections.jsonl`, a JSON object a line for each proxy problem that ended:

    - `projection`: int, switches before this problem, from 0 on.
    - `epoch`: int, at whose end the problem ended, counted from 0 as in `log.csv`.
    - `val_map_at_r`: float, the best validation MAP@R of the problem.
    - `is_last`: bool, whether the training ended with it.
    - `num_samples`, `num_classes`: ints, what was measured on.
    - `before`: the converged proxies, at the best weights of the problem.
    - `after`: the proxies that the switch put in their place, at the weights the next
      problem begins with; `null` in the last line.

    `before` and `after` are objects of `mean_covering_radius`, `max_covering_radius`,
    `mean_inter_class_distance`, `proxy_spread` and `proxy_usage`: see
    `keras_ccp.monitor.projections.measure`.

    A resumed run replaces the lines from its first one on, and so does a new run. A
    problem that began in the last epoch has no line, nor has a model without proxies.

    Args:
        directory: folder of the run; made if it is missing.
        samples: images of training classes, with the labels of the training, in a form
            that `CCPCallback` takes. Defaults to `None`: of the callback's pool, as
            many of each class as it draws at a switch, the same ones each time.
        max_samples: int, of that default, by leaving out classes. Defaults to 2000.
        save_arrays: bool, also write `projections/<projection>.npz` with `embeddings`,
            `labels`, `proxies`, `next_proxies` and `map_at_r`, which `load_projections`
            reads. Defaults to `False`.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if `max_samples` is below 1, or samples are badly labelled. By
            `fit`: if there is no `CCPCallback`, or labels are not those of the
            training.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        samples: Any = None,
        max_samples: int = 2000,
        save_arrays: bool = False,
    ):
        super().__init__()
        check_int("max_samples", max_samples, minimum=1)
        check_bool("save_arrays", save_arrays)
        self.directory = Path(directory)
        self.max_samples = max_samples
        self.save_arrays = save_arrays
        self.lines: list[dict[str, Any]] = []
        self._samples = None if samples is None else EvaluationData(samples, "samples")
        self._epoch = 0

    def _find_callback(self):
        callbacks = self.model.fit_callbacks
        found = [c for c in callbacks if isinstance(c, CCPCallback)]
        if not found:
            raise ValueError(
                "`callbacks` must hold a CCPCallback beside a ProjectionLog: without "
                "one there are no projections. Received: "
                f"callbacks={[type(c).__name__ for c in callbacks]}"
            )
        self._callback = found[0]

    # ==== Events ====

    def on_train_begin(self, logs=None):
        self.lines = []
        self._find_callback()
        if not self.model.proxies_per_class:
            return
        self._data, self._rows = self._drawn()
        labels = self._data.labels[self._rows]
        if labels.max() >= self.model.num_classes:
            raise ValueError(
                f"`samples` must have labels from 0 to {self.model.num_classes - 1}, "
                f"those of the training. Received: label {labels.max()}"
            )
        self._classes, self._labels = np.unique(labels, return_inverse=True)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        if epoch == 0:
            # A new run; one that is resumed begins later.
            (self.directory / FILE).unlink(missing_ok=True)

    def on_projection(self, best: BestWeights, is_last: bool) -> None:
        """Measures and writes; see `CCPCallback`.

        Args:
            best: the best weights of the problem.
            is_last: bool, whether no problem follows.
        """
        if not self.model.proxies_per_class:
            return
        with at_best(self.model, best):
            embeddings, proxies = self._embed(), self._proxies()
        before = measure(embeddings, self._labels, proxies)
        after = next_proxies = None
        if not is_last:
            next_proxies = self._proxies()
            began_with = embeddings
            if not _same(best.embedder_weights, self.model.embedder.get_weights()):
                began_with = self._embed()
            after = measure(began_with, self._labels, next_proxies)
        # The switch, if there was one, is counted by now.
        number = int(self.model.num_projections.numpy()) - (not is_last)
        line = {
            "projection": number,
            "epoch": int(self._epoch),
            "val_map_at_r": float(best.map_at_r),
            "is_last": bool(is_last),
            "num_samples": len(self._labels),
            "num_classes": len(self._classes),
            "before": before,
            "after": after,
        }
        self._write(line)
        if self.save_arrays:
            record = Projection(
                embeddings, self._labels, proxies, next_proxies, float(best.map_at_r)
            )
            _save(record, self.directory / ARRAYS / f"{number}.npz")

    # ==== Parts ====

    def _drawn(self) -> tuple[EvaluationData, np.ndarray]:
        """Data and the rows to embed, ascending."""
        if self._samples is not None:
            return self._samples, np.arange(len(self._samples))
        data, size = self._callback.pool, self._callback.pool_size
        rng = np.random.default_rng(0)
        rows, mask = draw_pool(data.labels, self.model.num_classes, size, rng)
        classes = rng.permutation(len(rows))[: max(1, self.max_samples // size)]
        return data, np.sort(rows[classes][mask[classes]])

    def _embed(self) -> np.ndarray:
        return self.model.predict(self._data.batches(self._rows), verbose=0)

    def _proxies(self) -> np.ndarray:
        return reference_embeddings(self.model)[self._classes]

    def _write(self, line: dict[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        earlier = [
            other
            for other in read_lines(self.directory)
            if other["projection"] < line["projection"]
        ]
        self.lines = [*earlier, line]
        partial = self.directory / f"partial_{FILE}"
        lines = (_with_spread(line, np.inf, None) for line in self.lines)
        text = "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in lines)
        partial.write_text(text)
        partial.replace(self.directory / FILE)


def read_lines(directory: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads `projections.jsonl`.

    Args:
        directory: folder of the run.

    Returns:
        A dict for each proxy problem, in their order; see `ProjectionLog`. Empty where
        there is no such file.
    """
    path = Path(directory) / FILE
    if not path.exists():
        return []
    lines = map(json.loads, path.read_text("utf-8").splitlines())
    return [_with_spread(line, None, np.inf) for line in lines]


def load_projections(directory: str | os.PathLike) -> list[Projection]:
    """Reads what `ProjectionLog` wrote with `save_arrays=True`.

    Args:
        directory: folder of the run.

    Returns:
        A `Projection` for each line of `projections.jsonl`.

    Raises:
        FileNotFoundError: if the arrays of a line are not there.
    """
    projections = []
    for line in read_lines(directory):
        with np.load(Path(directory) / ARRAYS / f"{line['projection']}.npz") as arrays:
            fields = {name: arrays[name] for name in arrays.files}
        fields["map_at_r"] = float(fields["map_at_r"])
        projections.append(Projection(**{"next_proxies": None, **fields}))
    return projections


def _with_spread(line: dict[str, Any], value: Any, replacement: Any) -> dict[str, Any]:
    """A line whose spreads of this value are replaced: JSON has no infinity."""
    line = dict(line)
    for moment in ("before", "after"):
        if line.get(moment) and line[moment]["proxy_spread"] == value:
            line[moment] = {**line[moment], "proxy_spread": replacement}
    return line


def _save(record: Projection, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {n: v for n, v in vars(record).items() if v is not None}
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _same(weights: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, weights, others))
