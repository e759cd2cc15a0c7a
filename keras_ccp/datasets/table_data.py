"""A table of image paths and labels: CSV or Parquet."""

import csv
import io
import os
from pathlib import Path
from typing import Any

from keras_ccp.datasets.archive import check_files
from keras_ccp.datasets.dataset import Dataset

_COLUMNS = ("path", "label")


def table(path: str | os.PathLike, root: str | os.PathLike | None = None) -> Dataset:
    """Loads the images that a table lists in its columns `path` and `label`.

    Labels that are all integers are sorted as numbers, others as text. Parquet needs
    PyArrow: `pip install pyarrow`.

    Args:
        path: A `.csv` file in UTF-8 with a header and commas, or a `.parquet` file.
        root: Folder that relative paths start from. Default: the folder of the table.

    Returns:
        A dataset of paths in the order of the table; `class_names` are the labels.

    Raises:
        FileNotFoundError: If the table or an image is missing.
        ValueError: If the file is of another kind, lacks a column or has empty cells.
        ImportError: If the table is Parquet and PyArrow is not installed.
    """
    path = Path(path).expanduser()
    readers = {".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        raise ValueError(
            "`path` must end in .csv or .parquet; write the table as one of them. "
            f"Received: path={str(path)!r}"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"`path` must be a table of images. Missing: {path}. "
            f"Received: path={str(path)!r}"
        )
    rows = readers[path.suffix.lower()](path)
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
    paths = [os.path.join(base, file) for file, _ in rows]
    check_files(paths, f"the folder they are in, as `root`; it was {base}")
    return Dataset(paths, _as_numbers([label for _, label in rows]))


def _read_csv(path: Path) -> list[tuple[str, str]]:
    try:
        # The mark that spreadsheets put first would belong to the first column's name.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be UTF-8; save it so. Received: {error}"
        ) from error
    reader = csv.reader(io.StringIO(text, newline=""))
    header = next(reader, [])
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
