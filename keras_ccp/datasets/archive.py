"""What the loaders of published archives share: find, read and check their files."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keras_ccp.datasets.argument_names import OTHER_COUNTS, ROOT
from keras_ccp.datasets.dataset import Dataset

_SHOWN = 3


def find_folder(root: str | os.PathLike, name: str, marker: str, source: str) -> Path:
    """Returns the folder of an unpacked archive: `root` itself, or `name` in it.

    Args:
        root: The folder, or the one that holds it.
        name: Name of the folder in the archive.
        marker: Path of a file below the folder that tells it.
        source: Where to get the archive, for the error message.

    Raises:
        FileNotFoundError: If the file is in neither.
    """
    root = Path(root).expanduser()
    for folder in (root, root / name):
        if (folder / marker).is_file():
            return folder
    raise FileNotFoundError(
        f"{ROOT} must hold {name}/{marker}. Missing: {root / name / marker}. "
        f"Get it from {source}. Received: root={str(root)!r}"
    )


def find_file(path: Path, source: str) -> Path:
    """Returns the path of a file of an archive, or says that it is missing.

    Args:
        path: The file.
        source: Where to get the archive, for the error message.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"Missing: {path}. Get it from {source}")
    return path


def read_rows(
    path: Path, num_columns: int, skip: int = 0, from_right: bool = False
) -> list[list[str]]:
    """Reads a UTF-8 text file of columns that are separated by spaces.

    Args:
        path: The file.
        num_columns: Columns of each line.
        skip: Number of lines of the header.
        from_right: Whether spaces inside a line belong to its first column; else they
            belong to its last.

    Returns:
        The columns of each line that is not empty.

    Raises:
        ValueError: If a line has too few columns or the file has no lines.
    """
    rows = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[skip:], skip + 1):
        line = line.strip()
        split = line.rsplit if from_right else line.split
        row = split(None, num_columns - 1)
        if row and len(row) < num_columns:
            raise ValueError(
                f"{path} must have {num_columns} columns; unpack the archive again. "
                f"Received: {line!r} in line {number}"
            )
        if row:
            rows.append(row)
    if not rows:
        raise ValueError(
            f"{path} must list at least one image; unpack the archive again. "
            f"Received: {len(lines)} lines"
        )
    return rows


def as_ids(values: Sequence[str], path: Path) -> np.ndarray:
    """Returns a column of integers as `(n,)` int64.

    Args:
        values: The column.
        path: The file it is from, for the error message.

    Raises:
        ValueError: If one of them is not an integer.
    """
    for value in values:
        if not value.isdecimal():
            raise ValueError(
                f"{path} must number images and classes; unpack the archive again. "
                f"Received: {value!r}"
            )
    return np.array(values, np.int64)


def class_subset(
    what: str,
    paths: Sequence[str],
    class_ids: np.ndarray,
    names: dict[int, str],
    keep: np.ndarray,
) -> Dataset:
    """Returns the images of some classes of an archive.

    Args:
        what: What the dataset is called in error messages.
        paths: `(n,)` paths of all images.
        class_ids: `(n,)` class ids as the archive numbers them.
        names: The name of each class.
        keep: `(n,)` booleans, which images to take.

    Raises:
        ValueError: If no image is to be taken, or a class has no name.
    """
    rows = np.flatnonzero(keep)
    if not len(rows):
        raise ValueError(
            f"{what} must have images; unpack the archive again. "
            f"Received: only images of classes {class_ids.min()} to {class_ids.max()}"
        )
    present = np.unique(class_ids[rows]).tolist()
    unnamed = [class_id for class_id in present if class_id not in names]
    if unnamed:
        raise ValueError(
            f"{what} must name each class; unpack the archive again. "
            f"Received: no name for class {unnamed[0]} ({len(unnamed)} in total)"
        )
    return Dataset(
        [paths[row] for row in rows], class_ids[rows], [names[i] for i in present]
    )


def compare_counts(
    what: str, dataset: Dataset, num_images: int, num_classes: int
) -> None:
    """Refuses a dataset of another size than the published one.

    Args:
        what: What the dataset is called in the error message.
        dataset: The dataset.
        num_images: Published number of images.
        num_classes: Published number of classes.

    Raises:
        ValueError: If a number differs.
    """
    if (len(dataset), dataset.num_classes) != (num_images, num_classes):
        raise ValueError(
            f"{what} must have {num_images:,} images of {num_classes:,} classes, as "
            f"published: unpack the archive again, or {OTHER_COUNTS} to use another "
            f"one of the same form. Received: {len(dataset):,} images of "
            f"{dataset.num_classes:,} classes"
        )


def check_files(paths: Sequence[str], source: str) -> None:
    """Refuses a list of files of which some are missing.

    Each folder is listed once, which takes less than asking for every file.

    Args:
        paths: `(n,)` paths.
        source: Where to get them, for the error message.

    Raises:
        FileNotFoundError: If files are missing; it names the first of them.
    """
    listed: dict[str, set[str]] = {}
    missing = []
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in listed:
            listed[folder] = _file_names(folder)
        # A file system may spell a name in another case or Unicode form than it lists.
        if name not in listed[folder] and not os.path.isfile(path):
            missing.append(path)
    if missing:
        more = ", ..." if len(missing) > _SHOWN else ""
        raise FileNotFoundError(
            f"{len(missing):,} of {len(paths):,} images are missing: "
            f"{', '.join(missing[:_SHOWN])}{more}. Get them from {source}"
        )


def _file_names(folder: str) -> set[str]:
    try:
        return set(os.listdir(folder or "."))
    except (FileNotFoundError, NotADirectoryError):
        return set()
