"""What a run wrote down about the training of its models."""

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_ccp.app.fold import SUMMARY_FILE
from keras_ccp.monitor.projection_log import read_lines

LOG_FILE = "log.csv"


class History(NamedTuple):
    """The training of one model.

    Args:
        repeat: int, its repetition, from 0 on.
        fold: int, which model of it, from 0 on.
        directory: folder of the model.
        summary: content of `fold.json`.
        epochs: `(n,)` ints, ascending.
        columns: `(n,)` floats by name of the column in `log.csv`, NaN where a value is
            missing.
        projections: lines of `projections.jsonl`, empty without such a file.
    """

    repeat: int
    fold: int
    directory: Path
    summary: dict[str, Any]
    epochs: np.ndarray
    columns: dict[str, np.ndarray]
    projections: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """Its folder in that of the run, such as `repeat0/fold1`."""
        return f"{self.directory.parent.name}/{self.directory.name}"

    @property
    def rows(self) -> list[tuple[int, list[float]]]:
        """Number of each evaluation, from 1 on, and its values."""
        values = zip(*self.columns.values(), strict=True)
        return [
            (int(epoch) + 1, [float(value) for value in row])
            for epoch, row in zip(self.epochs, values, strict=True)
        ]

    @property
    def switches(self) -> list[int]:
        """Epochs that began with new proxies.

        A switch at the end of the last epoch is none of them: no problem followed.
        """
        if "projection" not in self.columns:
            return []
        is_new = np.diff(self.columns["projection"]) > 0
        return self.epochs[1:][is_new].tolist()

    @property
    def losses(self) -> list[str]:
        """Columns of losses that are not 0 all the time, the total one first."""
        names = [name for name in self.columns if name.endswith("loss")]
        names = [name for name in names if not name.startswith("val_")]
        names = [name for name in names if np.nan_to_num(self.columns[name]).any()]
        return sorted(names, key=lambda name: name != "loss")


def read_histories(run: Path) -> list[History]:
    """Reads the logs of the finished models of a run, in the order of their scores.

    Args:
        run: folder of the run.
    """
    directories = [
        path.parent
        for repeat in sorted(run.glob("repeat*"))
        for path in sorted(repeat.glob(f"fold*/{SUMMARY_FILE}"))
    ]
    return [_read(directory) for directory in directories]


def _read(directory: Path) -> History:
    epochs, columns = _read_log(directory / LOG_FILE)
    return History(
        repeat=int(directory.parent.name.removeprefix("repeat")),
        fold=int(directory.name.removeprefix("fold")),
        directory=directory,
        summary=json.loads((directory / SUMMARY_FILE).read_text("utf-8")),
        epochs=epochs,
        columns=columns,
        projections=read_lines(directory),
    )


def _read_log(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    if not path.exists():
        return np.array([], np.int64), {}
    with path.open(newline="", encoding="utf-8") as file:
        # An epoch that was run again after an interruption is there twice.
        rows = {int(row["epoch"]): row for row in csv.DictReader(file)}
    epochs = sorted(rows)
    names = [name for name in next(iter(rows.values()), {}) if name != "epoch"]
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
