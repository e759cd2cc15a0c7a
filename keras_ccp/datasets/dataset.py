"""Labelled images in memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_ccp.arguments import check_finite
from keras_ccp.datasets.labels import check_ids, map_labels
from keras_ccp.datasets.splits import split_class_ids


class Dataset:
    """Images of one size with one class each.

    The arrays are kept as they come, without a copy, and are never written to.

    Args:
        images: `(n, height, width, channels)` uint8 or float array.
        labels: `(n,)` or `(n, 1)` labels: strings, integers or integer-valued
            floats. They become int32 0..C-1 by sorted order, so labels that
            already are 0..C-1 stay.
        class_names: C different names, in the order of the sorted labels. Default: the
            original labels as strings.

    Attributes:
        images: `(n, height, width, channels)` array.
        labels: `(n,)` int32 array of 0..C-1.
        class_names: Tuple of C strings.

    Raises:
        ValueError: If images differ in size, are empty, of another rank, NaN or
            infinite; labels are negative, NaN, fractional, too large or not one an
            image; or names are not one a class, each another.
        TypeError: If images, labels or names are of another type.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: Any,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self.images = _check_images(images)
        self.labels, originals = map_labels(labels)
        if len(self.labels) != len(self.images):
            raise ValueError(
                "`labels` must hold one label an image. Received: "
                f"{len(self.images)} images and {len(self.labels)} labels"
            )
        if class_names is None:
            class_names = originals.tolist()
        self.class_names = _check_names(class_names, len(originals))

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape = "x".join(str(size) for size in self.images.shape[1:])
        return f"Dataset({len(self)} images of {shape}, {self.num_classes} classes)"

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)

    @property
    def class_sizes(self) -> np.ndarray:
        """`(C,)` number of images of each class."""
        return np.bincount(self.labels, minlength=self.num_classes)

    def split_classes(
        self, fraction_or_count: float | int, seed: int | None = None
    ) -> tuple["Dataset", "Dataset"]:
        """Splits into two datasets that share no class.

        Within each half the classes keep their order, and so do the images.

        Args:
            fraction_or_count: Size of the first half: a share of the classes, a
                float between 0 and 1, or a number of classes, an int.
            seed: None takes the first classes by id; a seed shuffles them before.

        Returns:
            Two datasets, labels of each 0..C-1.

        Raises:
            ValueError: If one half would be empty, or the seed is negative.
            TypeError: If `fraction_or_count` is not a number, or the seed not an int.
        """
        first, second = split_class_ids(self.num_classes, fraction_or_count, seed)
        return self.select_classes(first), self.select_classes(second)

    def select_classes(self, class_ids: Sequence[int] | np.ndarray) -> "Dataset":
        """Returns the images of some classes, in the order they have here.

        Args:
            class_ids: `(k,)` different class ids; the i-th becomes class i.

        Returns:
            A dataset of k classes.

        Raises:
            ValueError: If a class does not exist or is given twice.
            TypeError: If class ids are not ints.
        """
        ids = check_ids(class_ids, self.num_classes, "class_ids")
        if len(np.unique(ids)) < len(ids):
            raise ValueError(
                "`class_ids` must name each class once. "
                f"Received: class_ids={ids.tolist()}"
            )
        new_labels = np.full(self.num_classes, -1, np.int32)
        new_labels[ids] = np.arange(len(ids))
        rows = np.flatnonzero(np.isin(self.labels, ids))
        return Dataset(
            self.images[rows],
            new_labels[self.labels[rows]],
            [self.class_names[i] for i in ids],
        )


def _check_images(images: Any) -> np.ndarray:
    if isinstance(images, (list, tuple)):
        shapes = list(dict.fromkeys(np.shape(image) for image in images))
        if len(shapes) > 1:
            raise ValueError(
                "`images` must have one size; resize them first. "
                f"Received: images of shapes {', '.join(map(str, shapes[:3]))}"
            )
    images = np.asarray(images)
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise TypeError(
            "`images` must be one uint8 or float array: resize images of different "
            "sizes first, and convert other types with `.astype('uint8')`. "
            f"Received: images of dtype {images.dtype}"
        )
    if images.ndim != 4 or not images.size:
        raise ValueError(
            "`images` must be a non-empty array of shape (n, height, width, "
            "channels); add the channel of grey images with `images[..., None]`. "
            f"Received: images of shape {images.shape}"
        )
    check_finite("images", images, "images")
    return images


def _check_names(names: Any, num_classes: int) -> tuple[str, ...]:
    # A set has no order, a string no names but letters: numpy takes both for one item.
    if np.asarray(names, object).ndim != 1:
        raise TypeError(
            "`class_names` must be a list of names, one for each class. "
            f"Received: class_names of type {type(names).__name__}"
        )
    names = tuple(str(name) for name in names)
    if len(names) != num_classes:
        raise ValueError(
            "`class_names` must hold one name for each class that has images. "
            f"Received: {len(names)} names for {num_classes} classes"
        )
    if len(set(names)) < num_classes:
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            "`class_names` must differ; give classes of one name one label. "
            f"Received: {twice!r} {names.count(twice)} times"
        )
    return names
