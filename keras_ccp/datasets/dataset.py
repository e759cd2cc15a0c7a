"""Labelled images or other inputs, in memory or still encoded."""

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_ccp.checks import as_labels, check_finite
from keras_ccp.datasets.splits import split_class_ids

# Evaluation in the paper: short side to 256, then the centre 227 x 227.
_SIZE, _SHORT_SIDE = 227, 256


class Dataset:
    """Images of one size, image files of any size, or other inputs, with their classes.

    Arrays are kept as they come, without a copy, and are never written to.

    Example:
        >>> dataset = Dataset(["a.jpg", "b.jpg", "c.jpg"], ["wren", "robin", "wren"])
        >>> dataset.labels, dataset.class_names
        (array([1, 0, 1], dtype=int32), ('robin', 'wren'))

    Args:
        images: `(n, height, width, channels)` uint8 or float array, or encoded
            images: `(n,)` paths (`str` or `pathlib.Path`) or `(n,)` `bytes` of JPEG,
            PNG, BMP, GIF or WebP files, which are read when they are used. Or what
            another network takes: an `(n, ...)` array of vectors, sequences or token
            ids, or a dict of such arrays and of `(n,)` strings, by the names of its
            inputs: `{"text": texts}`.
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
        self.images = (
            as_inputs("images", images)
            if isinstance(images, Mapping)
            else _paths_bytes_or_numbers(images)
        )
        self.size = _SIZE if self.is_encoded else None
        self.short_side = _SHORT_SIDE if self.is_encoded else None
        class_ids, originals = map_labels(labels)
        self.labels = as_labels("labels", class_ids, length=num_rows(self.images))
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
            shapes = keras.tree.map_structure(_shown_shape, self.images)
            what = f"of {shapes}".replace("'", "")
        kind = "images" if self._are_images else "rows"
        return f"Dataset({len(self)} {kind} {what}, {self.num_classes} classes)"

    @property
    def _are_images(self) -> bool:
        is_one = not isinstance(self.images, dict)
        return self.is_encoded or (is_one and self.images.ndim == 4)

    @property
    def is_encoded(self) -> bool:
        """Whether images are paths or bytes of files rather than pixels."""
        return not isinstance(self.images, dict) and self.images.ndim == 1

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
        chosen.images = keras.tree.map_structure(lambda a: a[rows], self.images)
        chosen.labels = self.labels[rows]
        return chosen


def _shown_shape(array: np.ndarray) -> str:
    return "x".join(map(str, array.shape[1:])) or "texts"


def _paths_bytes_or_numbers(images: Any) -> np.ndarray:
    """An object array of `str` or of `bytes`, or an array of numbers."""
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
    is_image = images.ndim == 4 or images.dtype == np.uint8
    if (
        images.dtype.kind not in "uif"
        or not images.size
        or images.ndim < 2
        or (is_image and not (is_pixels and images.ndim == 4))
    ):
        raise ValueError(
            "`images` must be (n, height, width, channels) uint8 or floats, (n, ...) "
            "other numbers, a dict of arrays, or all paths, or all bytes. Received: "
            f"{images.dtype}, shape {images.shape}\n"
            "Resize images to one size; give grey ones a channel: images[..., None]"
        )
    check_finite("images", images, "images")
    return images


def as_inputs(name: str, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of one length by the names of inputs; texts become objects.

    Args:
        name: What the inputs are called in error messages.
        inputs: Arrays `(n, ...)` of numbers, or `(n,)` strings.
    """
    arrays = {}
    for key, values in inputs.items():
        array = np.asarray(values)
        if array.dtype.kind in "US":
            array = array.astype(object)
        is_text = array.dtype == object and all(
            isinstance(value, (str, bytes)) for value in array.flat
        )
        if not array.ndim or not (is_text or array.dtype.kind in "uifb"):
            raise ValueError(
                f"`{name}[{key!r}]` must be an array of numbers or strings. Received: "
                f"{array.dtype}, shape {array.shape}\nPad sequences to one length"
            )
        if not is_text:
            check_finite(f"{name}[{key!r}]", array, "rows")
        arrays[key] = array
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"`{name}` must hold arrays of one length. Received: {lengths}\n"
            "Give each input a value for each row"
        )
    return arrays


def num_rows(inputs: Any) -> int:
    """Rows of an array or a list, or of a dict of them."""
    return len(next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs)


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
