"""Labelled images, in memory or still encoded."""

import copy
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_ccp.checks import as_labels, check_finite
from keras_ccp.datasets.splits import split_class_ids

# Evaluation in the paper: short side to 256, then the centre 227 x 227.
_SIZE, _SHORT_SIDE = 227, 256


class Dataset:
    """Images of one size, or image files of any size, with one class each.

    Arrays are kept as they come, without a copy, and are never written to.

    Example:
        >>> dataset = Dataset(["a.jpg", "b.jpg", "c.jpg"], ["wren", "robin", "wren"])
        >>> dataset.labels, dataset.class_names
        (array([1, 0, 1], dtype=int32), ('robin', 'wren'))

    Args:
        images: `(n, height, width, channels)` uint8 or float array, or encoded
            images: `(n,)` paths (`str` or `pathlib.Path`) or `(n,)` `bytes` of JPEG,
            PNG, BMP, GIF or WebP files, which are read when they are used.
        labels: `(n,)` or `(n, 1)` labels, which become 0..C-1 as by `map_labels`.
        class_names: C different names, in the order of the sorted labels. Defaults to
            the original labels as strings.

    Attributes:
        images: `(n, height, width, channels)` array, or `(n,)` object array of `str`
            or of `bytes`.
        labels: `(n,)` int32 array of 0..C-1.
        class_names: Tuple of C strings.
        size: Side in pixels of the centre crop that encoded images are evaluated on,
            227 or as `with_size` says; None for arrays.
        short_side: Length in pixels the short side is resized to before that crop, 256
            or as `with_size` says; None for arrays.

    Raises:
        ValueError: If images are of another kind or not finite, labels are missing or
            not one an image, or names are not one a class.
    """

    def __init__(
        self,
        images: np.ndarray | Sequence[Any],
        labels: Any,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self.images = _paths_bytes_or_pixels(images)
        self.size = _SIZE if self.is_encoded else None
        self.short_side = _SHORT_SIDE if self.is_encoded else None
        class_ids, originals = map_labels(labels)
        self.labels = as_labels("labels", class_ids, length=len(self.images))
        # Of a set or a text NumPy makes one item: neither is a list of names.
        names = np.asarray(originals if class_names is None else class_names, object)
        names = names.astype(str)
        if not names.shape == np.unique(names).shape == originals.shape:
            raise ValueError(
                "`class_names` must be different, one for each class with images. "
                f"Received: {class_names!r:.200} for {len(originals)} classes\n"
                "Give classes of one name one label"
            )
        self.class_names = tuple(names.tolist())

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        if self.is_encoded:
            kind = "paths" if isinstance(self.images[0], str) else "bytes"
            what = f"as {kind}, size {self.size}"
        else:
            what = "of " + "x".join(str(size) for size in self.images.shape[1:])
        return f"Dataset({len(self)} images {what}, {self.num_classes} classes)"

    @property
    def is_encoded(self) -> bool:
        """Whether images are paths or bytes of files rather than pixels."""
        return self.images.ndim == 1

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)

    @property
    def class_sizes(self) -> np.ndarray:
        """`(C,)` number of images of each class."""
        return np.bincount(self.labels, minlength=self.num_classes)

    def with_size(self, size: int, short_side: int | None = None) -> "Dataset":
        """The same encoded images, prepared for evaluation at another size.

        Args:
            size: Side of the crop in pixels.
            short_side: Length of the resized short side in pixels. Defaults to the
                paper's proportion, `round(size * 256 / 227)`.
        """
        if short_side is None:
            short_side = round(size * _SHORT_SIDE / _SIZE)
        if not self.is_encoded or not 1 <= size <= short_side:
            raise ValueError(
                f"`size` must be 1 to {short_side=}. Received: {size} for {self}\n"
                "Resize arrays before they become a Dataset: `tf.image.resize`"
            )
        sized = copy.copy(self)
        sized.size, sized.short_side = int(size), int(short_side)
        return sized

    def split_classes(
        self, fraction_or_count: float | int, seed: int | None = None
    ) -> tuple["Dataset", "Dataset"]:
        """Two datasets that share no class; classes and images keep their order.

        Args:
            fraction_or_count: Size of the first half: a share of the classes, a
                float between 0 and 1, or a number of classes, an int.
            seed: None takes the first classes by id; a seed shuffles them before.
        """
        first, second = split_class_ids(self.num_classes, fraction_or_count, seed)
        return self.select_classes(first), self.select_classes(second)

    def select_classes(self, class_ids: Sequence[int] | np.ndarray) -> "Dataset":
        """The images of some classes, in the order they have here.

        Args:
            class_ids: `(k,)` different class ids; the i-th becomes class i.

        Raises:
            ValueError: If a class does not exist or is given twice.
        """
        ids = check_ids(class_ids, self.num_classes, "class_ids")
        if len(np.unique(ids)) < len(ids):
            raise ValueError(
                f"`class_ids` must differ. Received: {ids}\nName each class once"
            )
        new_labels = np.full(self.num_classes, -1, np.int32)
        new_labels[ids] = np.arange(len(ids))
        chosen = self.select_images(np.flatnonzero(new_labels[self.labels] >= 0))
        chosen.labels = new_labels[chosen.labels]
        chosen.class_names = tuple(self.class_names[i] for i in ids)
        return chosen

    def select_images(self, rows: np.ndarray) -> "Dataset":
        """Some images, with labels and class names as they are here."""
        chosen = copy.copy(self)
        chosen.images, chosen.labels = self.images[rows], self.labels[rows]
        return chosen


def _paths_bytes_or_pixels(images: Any) -> np.ndarray:
    """An object array of `str` or of `bytes`, or an array of pixels."""
    if not isinstance(images, (list, tuple)):
        images = np.asarray(images)
        if images.dtype.kind in "OU" and images.ndim == 1:
            images = images.tolist()
    if isinstance(images, (list, tuple)):
        items = [os.fspath(i) if isinstance(i, os.PathLike) else i for i in images]
        for kind in (str, bytes):
            if items and all(isinstance(item, kind) for item in items):
                return np.array([kind(item) for item in items], object)
    images = np.asarray(images)
    is_pixels = images.dtype == np.uint8 or images.dtype.kind == "f"
    if not is_pixels or images.ndim != 4 or not images.size:
        raise ValueError(
            "`images` must be (n, height, width, channels) uint8 or floats, or all "
            f"paths, or all bytes. Received: {images.dtype}, shape {images.shape}\n"
            "Resize images to one size; give grey ones a channel: images[..., None]"
        )
    check_finite("images", images, "images")
    return images


def map_labels(labels: Any, name: str = "labels") -> tuple[np.ndarray, np.ndarray]:
    """Numbers classes 0..C-1 by the order of their labels, so 0..C-1 stay as they are.

    Args:
        labels: `(n,)` or `(n, 1)` strings, integers or integer-valued floats.
        name: What the labels are called in error messages. Defaults to "labels".

    Returns:
        `(n,)` int32 class ids and `(C,)` the original label of each class.

    Raises:
        ValueError: If labels are of another shape, missing (-1, NaN, None, ""), of
            mixed types, fractional, or floats too large to be exact.
    """
    # A list goes through object: NumPy would make the name "nan" of a missing one.
    values = np.asarray(labels, None if hasattr(labels, "dtype") else object)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or not values.size:
        return as_labels(name, values), values  # which refuses the shape
    wrong = np.zeros(len(values), bool)
    if values.dtype.kind == "O":
        items = values.tolist()
        texts = np.array([isinstance(item, (str, bytes)) for item in items])
        missing = np.array([item is None or item != item for item in items])
        wrong = missing if missing.any() else texts != texts[0]
        if not wrong.any():
            values = np.array(items)
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8")
    if values.dtype.kind == "U":
        wrong |= values == ""
    elif values.dtype.kind in "fcV":
        # From 2 / eps on neighbours fall together. NaN is in no range.
        exact = (values >= 0) & (values < 2 / np.finfo(values.dtype).eps)
        wrong = ~exact | (values != np.floor(values))
    elif values.dtype.kind == "i":
        wrong = values < 0
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"`{name}` must be all names, or all whole numbers of 0 or more. Received: "
            f"{values.tolist()[row]!r} in row {row} ({wrong.sum()} in total)\n"
            "Leave images without a class out"
        )
    if values.dtype.kind == "f":
        values = values.astype(np.int64)
    originals, class_ids = np.unique(values, return_inverse=True)
    return class_ids.astype(np.int32), originals


def check_ids(ids: Any, size: int, name: str) -> np.ndarray:
    """Refuses ids that are not k integers of 0 to `size - 1`; gives `(k,)` int64.

    Args:
        ids: `(k,)` integers, k at least 1.
        size: Number of things that the ids number.
        name: What the ids are called in error messages.
    """
    ids = np.asarray(ids)
    is_list = ids.ndim == 1 and ids.size and ids.dtype.kind in "iu"
    if not is_list or ids.min() < 0 or ids.max() >= size:
        raise ValueError(
            f"`{name}` must be a list of integers from 0 to {size - 1}. "
            f"Received: {ids!r:.200}\nTurn a mask into integers with np.flatnonzero"
        )
    return ids.astype(np.int64)
