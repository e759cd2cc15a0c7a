"""A table of image paths and labels: CSV or Parquet."""

import csv
import io
import logging
import os
from pathlib import Path
from typing import Any

from keras_ccp.datasets.archive import check_files
from keras_ccp.datasets.argument_names import PATH
from keras_ccp.datasets.dataset import Dataset

_COLUMNS = ("path", "label")
_log = logging.getLogger(__name__)


def table(path: str | os.PathLike, root: str | os.PathLike | None = None) -> Dataset:
    """Loads the images that a table lists in its columns `path` and `label`.

    Labels that are all integers are sorted as numbers, others as text. Blanks around
    them do not count. An image that is listed twice is taken once, which is logged.
    Parquet needs PyArrow: `pip install pyarrow`.

    Args:
        path: A `.csv` file in UTF-8 with a header and commas, or a `.parquet` file.
        root: Folder that relative paths start from. Default: the folder of the table.

    Returns:
        A dataset of paths in the order of the table; `class_names` are the labels.

    Raises:
        FileNotFoundError: If the table or an image is missing.
        ValueError: If the file is of another kind, lacks a column, has empty cells or
            gives an image two labels.
        ImportError: If the table is Parquet and PyArrow is not installed.
    """
    path = Path(path).expanduser()
    readers = {".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        raise ValueError(
            f"{PATH} must end in .csv or .parquet; write the table as one of them. "
            f"Received: path={str(path)!r}"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"{PATH} must be a table of images. Missing: {path}. "
            f"Received: path={str(path)!r}"
        )
    rows = [
        (file, label.strip() if isinstance(label, str) else label)
        for file, label in readers[path.suffix.lower()](path)
    ]
    if not rows:
        raise ValueError(f"{path} must list at least one image. Received: no rows")
    for number, row in enumerate(rows):
        if any(cell is None or cell == "" for cell in row):
            raise ValueError(
                f"{path} must give each image a path and a label; leave out the row or "
                f"fill it in. Received: path={row[0]!r}, label={row[1]!r} in row "
                f"{number} (from 0, without the header)"
            )
    base = path.parent if root is None else Path(root).expanduser()
    rows = _once(path, [(os.path.join(base, file), label) for file, label in rows])
    paths = [file for file, _ in rows]
    start = "the folder of the table" if root is None else "`root`"
    check_files(
        paths,
        "a copy of the data, or correct the table: paths that are not absolute start "
        f"from {start}, {base.absolute()} (to start from another folder move the "
        "table there, or in Python pass it as `root`)",
    )
    return Dataset(paths, _as_numbers([label for _, label in rows]))


def _once(path: Path, rows: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The rows without those that list an image again."""
    label_of: dict[str, Any] = {}
    kept, differ = [], {}
    for file, label in rows:
        key = os.path.normpath(file)
        if key not in label_of:
            label_of[key] = label
            kept.append((file, label))
        elif label != label_of[key]:
            differ.setdefault(file, (label_of[key], label))
    if differ:
        file, labels = next(iter(differ.items()))
        raise ValueError(
            f"{path} must give each image one label; leave out the row that is wrong. "
            f"Received: {file} with labels {labels[0]!r} and {labels[1]!r} "
            f"({len(differ)} such images)"
        )
    if len(kept) < len(rows):
        again = len(rows) - len(kept)
        _log.warning(
            "%s: %d rows list an image again, which is taken once", path, again
        )
    return kept


def _read_csv(path: Path) -> list[tuple[str, str]]:
    try:
        # The mark that spreadsheets put first would belong to the first column's name.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be UTF-8; save it so. Received: {error}"
        ) from error
    reader = csv.reader(io.StringIO(text, newline=""))
    header = [name.strip() for name in next(reader, [])]
    _check_columns(path, header)
    at = [header.index(column) for column in _COLUMNS]
    rows = []
    for row in reader:
        if row and len(row) != len(header):
            raise ValueError(
                f"{path} must have {len(header)} cells in each row, as its header has; "
                "quote cells that hold a comma. "
                f"Received: {len(row)} in line {reader.line_num}"
            )
        if row:
            rows.append((row[at[0]], row[at[1]]))
    return rows


def _read_parquet(path: Path) -> list[tuple[Any, Any]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ImportError(
            "a Parquet table needs PyArrow: `pip install pyarrow`, or write the table "
            "as CSV"
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path} must be a Parquet file. Received: {error}") from error
    with file:
        _check_columns(path, file.schema_arrow.names)
        columns = file.read(columns=list(_COLUMNS))
    cells = [columns.column(name).to_pylist() for name in _COLUMNS]
    return list(zip(*cells, strict=True))


def _check_columns(path: Path, found: list[str]) -> None:
    missing = [column for column in _COLUMNS if column not in found]
    if missing:
        raise ValueError(
            f"{path} must have columns named `path` and `label`; rename those that "
            f"hold them. Received: columns {', '.join(found) or 'none'}"
        )


def _as_numbers(labels: list[Any]) -> list[Any]:
    """Text labels as integers if that is what all of them are: 2 comes before 10."""
    for label in labels:
        is_number = isinstance(label, str) and label.removeprefix("-").isdecimal()
        if not is_number or str(int(label)) != label:  # "007" is a name
            return labels
    return [int(label) for label in labels]
