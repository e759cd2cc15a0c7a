"""Images that are not decoded yet: paths of files, or the bytes of files."""

import os
from typing import Any

import numpy as np


def as_encoded(images: Any) -> np.ndarray | None:
    """Returns paths or encoded bytes as one array, None for anything else.

    Args:
        images: `(n,)` list or array of paths (`str` or `pathlib.Path`) or of `bytes`.

    Returns:
        `(n,)` object array of `str` or of `bytes`, or None for images in memory.

    Raises:
        TypeError: If only some items are paths or only some are bytes, or if they come
            as a numpy array of type "S", which loses zeros at the end of an item.
    """
    if not isinstance(images, (list, tuple)):
        kind = getattr(getattr(images, "dtype", None), "kind", "O")
        if kind not in "OSU" or np.ndim(images) != 1:
            return None
        if kind == "S":
            raise TypeError(
                "`images` as bytes must be a list or an object array: a numpy array "
                "of type 'S' has lost the zeros at the end of each image. "
                f"Received: images of dtype {images.dtype}"
            )
        images = np.asarray(images).tolist()
    if not any(isinstance(item, (str, bytes, os.PathLike)) for item in images):
        return None
    items = [_plain(item) for item in images]
    if len({type(item) for item in items}) > 1:
        types = sorted({type(item).__name__ for item in images})
        raise TypeError(
            "`images` must be all paths or all bytes of encoded images. "
            f"Received: images of type {', '.join(types)}"
        )
    array = np.empty(len(items), object)
    array[:] = items
    return array


def _plain(item: Any) -> Any:
    """Paths, and the strings of numpy, as plain `str`."""
    if isinstance(item, os.PathLike):
        return os.fspath(item)
    return str(item) if isinstance(item, str) else item
