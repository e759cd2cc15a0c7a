"""What a run wrote down about the training of its models."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_ccp.app.fold import LOG_FILE, SUMMARY_FILE
from keras_ccp.files import read_json
from keras_ccp.monitor.projection_log import read_lines


class History(NamedTuple):
    """The training of one model.

    Args:
        directory: folder of the model, such as `repeat0/fold1` in that of the run.
        summary: content of `fold.json`.
        epochs: `(n,)` ints, ascending.
        columns: `(n,)` floats by name of the column in `log.csv`, NaN where a value is
            missing.
        projections: lines of `projections.jsonl`, empty without such a file.
    """

    directory: Path
    summary: dict[str, Any]
    epochs: np.ndarray
    columns: dict[str, np.ndarray]
    projections: list[dict[str, Any]]

    @property
    def repeat(self) -> int:
        """Its repetition, from 0 on."""
        return int(self.directory.parent.name.removeprefix("repeat"))

    @property
    def fold(self) -> int:
        """Which model of its repetition it is, from 0 on."""
        return int(self.directory.name.removeprefix("fold"))

    @property
    def name(self) -> str:
        """Its folder in that of the run, such as `repeat0/fold1`."""
        return f"{self.directory.parent.name}/{self.directory.name}"

    @property
    def title(self) -> str:
        """The model as readers count, from 1 on."""
        return f"repetition {self.repeat + 1}, model {self.fold + 1}"

    @property
    def projection_epochs(self) -> list[int]:
        """Epochs that began with new proxies, which follow no matter what came before.

        A projection at the end of the last epoch is not one: no problem followed.
        """
        is_new = np.diff(self.columns.get("projection", self.epochs * 0)) > 0
        return self.epochs[1:][is_new].tolist()

    @property
    def losses(self) -> list[str]:
        """Columns of losses that are not 0 all the time, the total one first."""
        names = [
            name
            for name, values in self.columns.items()
            if name.endswith("loss") and np.nan_to_num(values).any()
        ]
        names = [name for name in names if not name.startswith("val_")]
        return sorted(names, key=lambda name: name != "loss")


def read_histories(run: Path) -> list[History]:
    """Reads the logs of the finished models of a run, in the order of their scores."""
    histories = []
    for path in sorted(run.glob(f"repeat*/fold*/{SUMMARY_FILE}")):
        directory, summary = path.parent, read_json(path, "num_projections")
        log, lines = _read_log(directory / LOG_FILE), read_lines(directory)
        histories.append(History(directory, summary, *log, lines))
    return histories


def _read_log(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    if not path.exists():
        return np.array([], np.int64), {}
    with path.open(newline="", encoding="utf-8") as file:
        # An epoch that was run again after an interruption is there twice.
        rows = {int(row.pop("epoch")): row for row in csv.DictReader(file)}
    epochs = sorted(rows)
    names = next(iter(rows.values()), {})
    columns = {
        name: np.array([_number(rows[epoch][name]) for epoch in epochs])
        for name in names
    }
    return np.array(epochs, np.int64), columns


def _number(text: str | None) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return np.nan
