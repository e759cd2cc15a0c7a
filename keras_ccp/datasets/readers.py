"""Folders, tables and .npz files of images, and whether the images can be read."""

import csv
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_ccp.checks import require
from keras_ccp.datasets.dataset import Dataset
from keras_ccp.files import reading
from keras_ccp.images import UNREADABLE, decode_image, failure, read_file

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
_UNREADABLE = (
    *(".heic", ".heif", ".avif", ".jxl", ".jp2", ".tif", ".tiff", ".svg", ".psd"),
    *(".tga", ".ico", ".dng", ".arw", ".cr2", ".cr3", ".nef", ".orf", ".raf", ".rw2"),
)
HIDDEN = "hidden, or made by the system"
# What zip files of a Mac, Windows and network drives leave, beside names with a dot.
_SYSTEM = {
    *("__MACOSX", "Thumbs.db", "desktop.ini", "$RECYCLE.BIN", "lost+found"),
    *("System Volume Information", "@eaDir", "#recycle", "#snapshot", "@Recycle"),
    "@Recently-Snapshot",
}
_COLUMNS = "path", "label"
_SHOWN = 3
_CHUNK = 64
_log = logging.getLogger(__name__)


class Listing(NamedTuple):
    """What `list_images` finds.

    Args:
        images: Paths of the image files, sorted by folder and name.
        passed_over: `(path, reason)` of all else, sorted.
    """

    images: list[str]
    passed_over: list[tuple[str, str]]

    def notes(self, folder: str | os.PathLike) -> list[str]:
        """A line for each reason but `HIDDEN`, with paths relative to the folder."""
        paths: dict[str, list[str]] = {}
        for path, reason in self.passed_over:
            if reason != HIDDEN:
                paths.setdefault(reason, []).append(os.path.relpath(path, folder))
        return [
            f"passed over {len(given):,} {reason}: {_shown(given)}"
            for reason, given in paths.items()
        ]


def list_images(folder: str | os.PathLike) -> Listing:
    """Lists the images of a folder and of all folders in it: the one such listing.

    Images are regular files whose names end in `IMAGE_SUFFIXES`, in small or capital
    letters. Links are followed; a folder that is reached twice, as in a loop, is
    listed once, at its own place if that is inside. Hidden files and what systems make
    are passed over for the reason `HIDDEN`.

    Args:
        folder: The folder, which may be a link itself.

    Raises:
        OSError: If the folder cannot be read; folders in it are passed over then.
    """
    root = os.fspath(Path(folder).expanduser())
    images, passed_over, seen = [], [], set()
    folders, links = [root], []
    while folders or links:
        place = folders.pop() if folders else links.pop()  # links after all folders
        if os.path.realpath(place) in seen:
            passed_over.append((place, "links to folders that are listed already"))
            continue
        seen.add(os.path.realpath(place))
        try:
            with os.scandir(place) as entries:
                entries = list(entries)
        except OSError as error:
            if place == root:
                raise
            passed_over.append((place, f"folders ({error.strerror})"))
            continue
        reasons = [_reason(entry) for entry in entries]
        for entry, reason in zip(entries, reasons, strict=True):
            if reason == "folder":
                (links if entry.is_symlink() else folders).append(entry.path)
            elif reason == "image":
                images.append(entry.path)
            else:
                passed_over.append((entry.path, reason))
        if not {"folder", "image"} & set(reasons):
            passed_over.append((place, "folders without images"))
    images.sort(key=lambda path: path.split(os.sep))
    return Listing(images, sorted(passed_over))


def _reason(entry: os.DirEntry) -> str:
    """ "folder", "image", or what else it is that is passed over."""
    suffix = os.path.splitext(entry.name)[1].lower()
    try:
        if entry.name.startswith(".") or entry.name in _SYSTEM:
            return HIDDEN
        if entry.is_dir():
            return "folder"
        if not entry.is_file():
            return "links to nothing" if entry.is_symlink() else "special files"
    except OSError as error:  # such as a link to itself
        return f"links ({error.strerror})"
    if suffix in IMAGE_SUFFIXES:
        return "image"
    if suffix in _UNREADABLE:
        return f"{suffix} images, which cannot be read (convert them to JPEG or PNG)"
    return f"{suffix} files" if suffix else "files without a suffix"


def image_folder(root: str | os.PathLike) -> Dataset:
    """Loads a folder of class folders, each of which holds the images of one class.

    `list_images` says what counts as an image. A logged warning tells what is passed
    over, such as class folders without images, and images beside or deeper than them.

    Args:
        root: The folder; the names of its folders are the class names.

    Returns:
        A dataset of paths, sorted by class and file name.

    Raises:
        ValueError: If no folder in it has images; OSError if it cannot be read.
    """
    root = Path(root).expanduser()
    listing = list_images(root)
    paths, classes = [], []
    for path in listing.images:
        parts = path[len(os.path.join(root, "")) :].split(os.sep)
        if len(parts) == 2:
            paths.append(path)
            classes.append(parts[0])
        else:
            where = "beside" if len(parts) == 1 else "in folders inside"
            listing.passed_over.append((path, f"images {where} the class folders"))
    notes = listing.notes(root)
    if not paths:
        raise ValueError(
            f"`root` (--data) must hold a folder of images for each class. Received: "
            f"{root}, {'; '.join(notes)}\nGive the folder that holds the class folders"
        )
    for note in notes:
        _log.warning("%s: %s", root, note)
    return Dataset(paths, classes)


def table(source: Any, root: str | os.PathLike | None = None) -> Dataset:
    """Loads the images that a table lists in its columns `path` and `label`.

    Labels that are all integers are sorted as numbers, others as text. Blanks around
    them do not count. An image that is listed twice is taken once, which is logged.

    Args:
        source: A `.parquet` file (needs PyArrow), CSV in UTF-8 with header and commas,
            a pandas DataFrame, or a dict of columns.
        root: Folder that relative paths start from. Defaults to the folder of the
            file, and of a DataFrame to the current one.

    Returns:
        A dataset of paths in the order of the table; `class_names` are the labels.

    Raises:
        ValueError: If the table is damaged, lacks a column or a label, or gives an
            image two labels; FileNotFoundError if it or an image is missing.
    """
    is_file = isinstance(source, (str, os.PathLike))
    name, base = "`source`", Path()
    if is_file:
        name = Path(source).expanduser()
        base = name.parent
    base = base if root is None else Path(root).expanduser()
    label_of: dict[str, tuple[str, Any]] = {}
    with reading(
        f"{name} must be a CSV (UTF-8, commas) or Parquet table of `path` and `label`",
        f"Paths start at {base}; cells with a comma are quoted, and each quote closed",
    ):
        if is_file:
            is_parquet = name.suffix.lower() == ".parquet"
            rows = (_read_parquet if is_parquet else _read_csv)(name)
        else:
            rows = list(zip(*(list(source[c]) for c in _COLUMNS), strict=True))
        for file, label in rows:
            file = os.path.join(base, file)
            label = label.strip() if isinstance(label, str) else label
            _, known = label_of.setdefault(os.path.normpath(file), (file, label))
            if label != known:
                raise ValueError(f"{file} with two labels, {known!r} and {label!r}")
        paths = [file for file, _ in label_of.values()]
        find_files(paths)
    if again := len(rows) - len(paths):
        _log.warning("%s: %d rows list an image again; it is taken once", name, again)
    return Dataset(paths, _numbers([label for _, label in label_of.values()]))


def _read_csv(path: Path) -> list[tuple[str, str]]:
    # "utf-8-sig" drops the mark that spreadsheets put before the first name.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            columns = [header.index(name) for name in _COLUMNS]
            rows = []
            for row in filter(None, reader):
                if len(row) != len(header):
                    raise ValueError(f"{len(row)} cells for {len(header)} columns")
                rows.append(tuple(row[column] for column in columns))
            return rows
        except (csv.Error, ValueError) as error:
            raise ValueError(f"line {reader.line_num}: {error}") from error


def _read_parquet(path: Path) -> list[tuple[Any, Any]]:
    with require("pyarrow.parquet", "parquet").ParquetFile(path) as file:
        columns = file.read(columns=list(_COLUMNS))
    cells = [columns.column(name).to_pylist() for name in _COLUMNS]
    return list(zip(*cells, strict=True))


def _numbers(labels: list[Any]) -> list[Any]:
    """Texts that are all integers as integers: 2 comes before 10, "007" is a name."""
    try:
        numbers = [int(label) for label in labels]
    except (TypeError, ValueError):
        return labels
    return numbers if [str(number) for number in numbers] == labels else labels


def npz(path: str | os.PathLike) -> Dataset:
    """Loads an `.npz` file of images and labels.

    It holds `labels` `(n,)`, may hold `class_names`, in which integer labels count, and
    holds the images in one of two forms:

    - `images`: `(n, height, width, channels)` or `(n, height, width)` uint8 or float.
    - `data` and `offsets`: the bytes of n encoded images one after the other, uint8;
      image i is `data[offsets[i]:offsets[i + 1]]`, `offsets` is `(n + 1,)`.

    Args:
        path: The file. It is read without pickle, so it cannot run code.

    Raises:
        ValueError: If it is not of this form; FileNotFoundError if it is missing.
    """
    path = Path(path).expanduser()
    what = "an .npz file of plain arrays, without Python objects: `labels` and either"
    with (
        reading(
            f"{path} must be {what} `images` or `data` and `offsets`",
            "Save it again with np.savez, names as strings",
        ),
        path.open("rb") as file,
    ):
        arrays = np.load(file, allow_pickle=False)
        if "images" in arrays:
            images = arrays["images"]
            images = images[..., None] if images.ndim == 3 else images
        else:
            images = _cut(arrays["data"], arrays["offsets"])
        labels = arrays["labels"]
        names = arrays["class_names"] if "class_names" in arrays else None
        if names is not None and labels.dtype.kind in "iu":
            names = names[np.unique(labels)]
    return Dataset(images, labels, names)


def _cut(data: np.ndarray, offsets: np.ndarray) -> list[bytes]:
    ends = [0, *offsets.tolist(), len(data)]
    if data.dtype != np.uint8 or ends != sorted(ends):
        raise ValueError("`data` not uint8, or `offsets` not ascending inside of it")
    view = memoryview(np.ascontiguousarray(data))
    return [bytes(view[a:b]) for a, b in zip(ends[1:-2], ends[2:-1], strict=True)]


def find_files(paths: Sequence[str]) -> None:
    """Raises FileNotFoundError if some are no regular files.

    Each folder is listed once, which takes less than asking for every file.
    """
    listed: dict[str, set[str]] = {}
    missing = []
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in listed:
            listed[folder] = _regular_files(folder)
        # A file system may spell a name in another case or Unicode form than it lists.
        if name not in listed[folder] and not os.path.isfile(path):
            missing.append(path)
    if missing:
        count = f"{len(missing):,} of {len(paths):,} images are missing"
        raise FileNotFoundError(f"{count}: {_shown(missing)}")


def _regular_files(folder: str) -> set[str]:
    try:
        with os.scandir(folder or ".") as entries:
            return {e.name for e in entries if e.is_file(follow_symlinks=False)}
    except OSError:
        return set()


def verify(dataset: Dataset, on_error: str = "raise") -> Dataset:
    """Reads and decodes every encoded image once, and names those that fail.

    A truncated file fails, also where a viewer would show what there is of it. Grey,
    CMYK, palette, 16-bit and rotated images pass. It works on all cores and keeps no
    image. A dataset of arrays is returned as it is.

    Args:
        dataset: The dataset.
        on_error: "raise" raises an error if images fail; "skip" leaves them out and
            logs a warning that names each. Defaults to "raise".

    Returns:
        The dataset, without the images that fail; its classes stay the same.

    Raises:
        ValueError: If images fail, with "skip" only if a class would lose all of them.
    """
    if not dataset.is_encoded:
        return dataset

    def chunk_errors(start: int) -> list[str | None]:
        return [decoding_error(i) for i in dataset.images[start : start + _CHUNK]]

    # A thread for each core: TensorFlow lets go of the interpreter while it decodes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        chunks = pool.map(chunk_errors, range(0, len(dataset), _CHUNK))
        errors = [error for chunk in chunks for error in chunk]
    failed = [
        f"{image if isinstance(image, str) else f'image {row}'} ({errors[row]})"
        for row, image in enumerate(dataset.images)
        if errors[row] is not None
    ]
    if not failed:
        return dataset
    kept = dataset.select_images(np.flatnonzero([error is None for error in errors]))
    # Without one of its classes query and gallery would number theirs differently.
    lost = [dataset.class_names[i] for i in np.flatnonzero(kept.class_sizes == 0)]
    if lost or on_error != "skip":
        way = f"Leave out class {_shown(lost)}, which has no others" if lost else ""
        raise ValueError(
            "`dataset` must hold images that can be decoded. Received: "
            f"{len(failed)} of {len(dataset)} that fail: {_shown(failed)}\n"
            + (way or 'Fix them, or pass on_error="skip" (`data.unreadable: skip`)')
        )
    for name in failed:
        _log.warning("left out, cannot be decoded: %s", name)
    return kept


def decoding_error(image: str | bytes) -> str | None:
    """Why an image, a path or the bytes of a file, cannot be decoded, or None."""
    try:
        with tf.device("CPU:0"):
            _decode(read_file(image) if isinstance(image, str) else image)
    except UNREADABLE as error:
        return failure(error)
    return None


_decode = tf.function(
    decode_image, input_signature=[tf.TensorSpec((), tf.string)], autograph=False
)


def _shown(items: Sequence[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (", ..." if len(items) > _SHOWN else "")
