"""A folder with one folder of images for each class."""

import logging
import os
from pathlib import Path

from keras_ccp.datasets.dataset import Dataset

_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
_log = logging.getLogger(__name__)


def image_folder(root: str | os.PathLike) -> Dataset:
    """Loads a folder of class folders, each of which holds the images of one class.

    JPEG, PNG, BMP, GIF and WebP files are taken, by the ending of their names. Names
    that begin with a dot are passed over, other files are counted in a logged warning.

    Args:
        root: The folder; the names of its folders are the class names.

    Returns:
        A dataset of paths, sorted by class and file name.

    Raises:
        FileNotFoundError: If `root` is not a folder.
        ValueError: If it has no folders, or one of them has no images.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(
            "`root` must be a folder of class folders. Missing: "
            f"{root}. Received: root={str(root)!r}"
        )
    paths, labels, names = [], [], []
    others = 0
    for entry in _visible(root):
        if not entry.is_dir():
            others += 1
            continue
        files = _visible(entry.path)
        images = [f.path for f in files if f.name.lower().endswith(_ENDINGS)]
        if not images:
            raise ValueError(
                f"{entry.path} must hold images ({', '.join(_ENDINGS)}), which make a "
                "class: keep other folders elsewhere, or give the folder that holds "
                "the class folders as `root`. "
                f"Received: {len(files)} other files or folders"
            )
        others += len(files) - len(images)
        paths += images
        labels += [len(names)] * len(images)
        names.append(entry.name)
    if not names:
        raise ValueError(
            "`root` must hold a folder of images for each class. "
            f"Received: root={str(root)!r} without folders"
        )
    if others:
        _log.warning("%s: %d files that are not images are passed over", root, others)
    return Dataset(paths, labels, names)


def _visible(folder: str | os.PathLike) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        kept = [entry for entry in entries if not entry.name.startswith(".")]
    return sorted(kept, key=lambda entry: entry.name)
