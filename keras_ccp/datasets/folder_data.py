"""A folder with one folder of images for each class."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from keras_ccp.datasets.argument_names import ROOT
from keras_ccp.datasets.dataset import Dataset

_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
# What operating systems and their zip files leave in folders unseen.
_UNSEEN = ("__MACOSX", "Thumbs.db", "desktop.ini")
_SHOWN = 3
_log = logging.getLogger(__name__)


def image_folder(root: str | os.PathLike) -> Dataset:
    """Loads a folder of class folders, each of which holds the images of one class.

    JPEG, PNG, BMP, GIF and WebP files are taken, by the ending of their names. Names
    that begin with a dot, `__MACOSX`, `Thumbs.db` and `desktop.ini` are passed over.
    Logged warnings tell what else is passed over: images in folders inside a class
    folder, images beside the class folders, and files of other types.

    Args:
        root: The folder; the names of its folders are the class names.

    Returns:
        A dataset of paths, sorted by class and file name.

    Raises:
        FileNotFoundError: If `root` is not a folder.
        ValueError: If it has no folders, or some of them have no images.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(
            f"{ROOT} must be a folder of class folders. Missing: "
            f"{root}. Received: root={str(root)!r}"
        )
    entries = _visible(root)
    classes = [entry for entry in entries if entry.is_dir()]
    beside = [entry.path for entry in entries if not entry.is_dir()]
    if not classes:
        count = sum(map(_is_image, beside))
        raise ValueError(
            f"{ROOT} must hold a folder of images for each class. "
            f"Received: root={str(root)!r} without folders, with {count} images"
        )
    paths, labels, empty, inside, others = [], [], [], [], []
    for label, entry in enumerate(classes):
        files = _visible(entry.path)
        images = [f.path for f in files if _is_image(f.name) and not f.is_dir()]
        if not images:
            empty.append(f"{entry.name} ({_contents(entry.path, root)})")
            continue
        paths += images
        labels += [label] * len(images)
        others += [f.path for f in files if not _is_image(f.name) and not f.is_dir()]
        for folder in files:
            if folder.is_dir():
                inside += _files_below(folder.path)
    if empty:
        raise ValueError(
            f"{root} must hold images ({', '.join(_ENDINGS)}) in each of its folders, "
            "which are the classes: fill or remove those without, or give the folder "
            f"that holds the class folders as {ROOT}. Received: {len(empty)} of "
            f"{len(classes)} folders without images: {', '.join(empty)}"
        )
    _tell_what_is_left(root, beside, inside, others)
    return Dataset(paths, labels, [entry.name for entry in classes])


def _tell_what_is_left(
    root: Path, beside: list[str], inside: list[str], others: list[str]
) -> None:
    """Warns of the files that are passed over.

    Args:
        root: The folder.
        beside: Files beside the class folders.
        inside: Files in folders inside class folders.
        others: Files in class folders that are no images.
    """
    for files, what in (
        (inside, "images in folders inside class folders; move them up to use them"),
        (beside, "images beside the class folders; move them into one to use them"),
    ):
        images = [path for path in files if _is_image(path)]
        if images:
            _log.warning("%s: passed over %s: %s", root, what, _counted(images, root))
    types: dict[str, list[str]] = {}
    for path in (*others, *inside, *beside):
        if not _is_image(path):
            ending = os.path.splitext(path)[1].lower() or "no ending"
            types.setdefault(ending, []).append(path)
    if types:
        most = sorted(types.items(), key=lambda item: -len(item[1]))
        more = ", ..." if len(most) > _SHOWN else ""
        counts = [f"{kind} {_counted(files, root)}" for kind, files in most[:_SHOWN]]
        _log.warning(
            "%s: passed over files of types that are not read (%s are): %s%s",
            *(root, ", ".join(_ENDINGS), "; ".join(counts), more),
        )


def _counted(paths: list[str], root: Path) -> str:
    names = [os.path.relpath(path, root) for path in paths[:_SHOWN]]
    more = ", ..." if len(paths) > _SHOWN else ""
    return f"{len(paths):,} ({', '.join(names)}{more})"


def _contents(folder: str, root: Path) -> str:
    """What a folder without images of its own holds."""
    first = None
    for path in _files_below(folder):
        if _is_image(path):
            return f"images in folders inside it: {os.path.relpath(path, root)}, ..."
        first = first or os.path.relpath(path, root)
    return f"files of other types: {first}, ..." if first else "no files"


def _is_image(name: str) -> bool:
    return name.lower().endswith(_ENDINGS)


def is_visible(name: str) -> bool:
    """Whether a file or folder is neither hidden nor left by an operating system.

    Args:
        name: of the file, without folders.
    """
    return not name.startswith(".") and name not in _UNSEEN


def _visible(folder: str | os.PathLike) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        kept = [entry for entry in entries if is_visible(entry.name)]
    return sorted(kept, key=lambda entry: entry.name)


def _files_below(folder: str) -> Iterator[str]:
    """The files of a folder and of all folders inside it."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(filter(is_visible, folders))
        for name in sorted(filter(is_visible, names)):
            yield os.path.join(place, name)
