"""A NumPy archive of images, as arrays or as encoded files, and labels."""

import os
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np

from keras_ccp.datasets.argument_names import PATH
from keras_ccp.datasets.dataset import Dataset
from keras_ccp.datasets.labels import map_labels

# What reading a damaged file raises.
_DAMAGE = (
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
_SHOWN = 20


def npz(path: str | os.PathLike) -> Dataset:
    """Loads an `.npz` file of images and labels.

    It holds `labels` `(n,)`, may hold `class_names`, and holds the images in one of two
    forms; other arrays are not read:

    - `images`: `(n, height, width, channels)` or `(n, height, width)` uint8 or float.
    - `data` and `offsets`: the bytes of n encoded images one after the other, uint8;
      image i is `data[offsets[i]:offsets[i + 1]]`, `offsets` is `(n + 1,)`.

    Args:
        path: The file. It is read without pickle, so it cannot run code.

    Returns:
        A dataset of arrays or of bytes. Integer labels count in `class_names`; where
        the file has none, the labels themselves are the names.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not of this form.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"{PATH} must be an .npz file. Missing: {path}. "
            f"Received: path={str(path)!r}"
        )
    arrays, in_file = _read(path)
    names = set(arrays)
    if "labels" not in names or not ("images" in names or {"data", "offsets"} <= names):
        raise ValueError(
            f"{path} must hold `labels` and either `images` or `data` and `offsets`. "
            f"Received: {_shown(in_file)}"
        )
    if "images" in names:
        images = arrays["images"]
        if images.ndim == 3:
            images = images[..., None]
    else:
        images = _cut(path, arrays["data"], arrays["offsets"])
    labels = arrays["labels"]
    if "class_names" not in names:
        return Dataset(images, labels)
    return Dataset(images, labels, _present_names(path, labels, arrays["class_names"]))


def _read(path: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays that are of use, and the names of all."""
    wanted = ("images", "data", "offsets", "labels", "class_names")
    try:
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            found = {name: arrays[name] for name in wanted if name in arrays}
            for name, values in found.items():
                if not isinstance(values, np.ndarray):  # of another file, as bytes
                    raise ValueError(f"{name} is not an array")
            return found, arrays.files
    except _DAMAGE as error:
        raise ValueError(
            f"{path} must be an .npz file of plain arrays, without Python objects; "
            f"store names as strings. Received: {error}"
        ) from error


def _shown(names: list[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return (", ".join(sorted(names)[:_SHOWN]) or "no arrays") + more


def _cut(path: Path, data: np.ndarray, offsets: np.ndarray) -> list[bytes]:
    fits = (
        (data.dtype, data.ndim, offsets.ndim) == (np.uint8, 1, 1)
        and offsets.dtype.kind in "iu"
        and len(offsets) > 1
    )
    if fits:
        offsets = offsets.astype(np.int64)
        inside = 0 <= offsets[0] and offsets[-1] <= len(data)
        fits = inside and (np.diff(offsets) >= 0).all()
    if not fits:
        raise ValueError(
            f"{path} must hold `data`, (bytes,) uint8, and `offsets`, (n + 1,) "
            "ascending integers from 0 to its length. Received: data of shape "
            f"{data.shape}, {data.dtype}, offsets of shape {offsets.shape}, "
            f"{offsets.dtype}, {offsets.ravel()[:3].tolist()} ..."
        )
    ends = offsets.tolist()
    view = memoryview(np.ascontiguousarray(data))
    return [bytes(view[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def _present_names(path: Path, labels: np.ndarray, names: np.ndarray) -> list[str]:
    """The names of the classes that have images: integer labels count in all names."""
    _, originals = map_labels(labels)
    if originals.dtype.kind == "U":
        return names.tolist()
    if names.ndim != 1 or originals[-1] >= len(names):
        raise ValueError(
            f"{path} must name each label in `class_names`. Received: label "
            f"{originals[-1]}, class_names of shape {names.shape}"
        )
    return names[originals].tolist()
