"""Labelled images, in memory or still encoded."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_ccp.checks import check_finite, check_int
from keras_ccp.datasets.encoded import as_encoded
from keras_ccp.datasets.labels import check_ids, map_labels
from keras_ccp.datasets.splits import split_class_ids

# Evaluation in the paper: short side to 256, then the centre 227 x 227.
_SIZE, _SHORT_SIDE = 227, 256


class Dataset:
    """Images of one size, or image files of any size, with one class each.

    The arrays are kept as they come, without a copy, and are never written to.

    Args:
        images: `(n, height, width, channels)` uint8 or float array, or encoded
            images: `(n,)` paths (`str` or `pathlib.Path`) or `(n,)` `bytes` of JPEG,
            PNG, BMP, GIF or WebP files, which are read when they are used.
        labels: `(n,)` or `(n, 1)` labels: strings, integers or integer-valued
            floats. They become int32 0..C-1 by sorted order, so labels that
            already are 0..C-1 stay.
        class_names: C different names, in the order of the sorted labels. Default: the
            original labels as strings.

    Attributes:
        images: `(n, height, width, channels)` array, or `(n,)` object array of `str`
            or of `bytes`.
        size: Side in pixels of the centre crop that encoded images are evaluated on,
            227 unless `with_size` says otherwise; None for arrays.
        short_side: Length in pixels the short side of an encoded image is resized to
            before that crop, 256 unless `with_size` says otherwise; None for arrays.
        labels: `(n,)` int32 array of 0..C-1.
        class_names: Tuple of C strings.

    Raises:
        ValueError: If images differ in size, are empty, of another rank, NaN or
            infinite; labels are negative, NaN, fractional, too large or not one an
            image; or names are not one a class, each another.
        TypeError: If images, labels or names are of another type, or paths and bytes
            are mixed.
    """

    def __init__(
        self,
        images: np.ndarray | Sequence[Any],
        labels: Any,
        class_names: Sequence[str] | None = None,
    ) -> None:
        encoded = as_encoded(images)
        is_encoded = encoded is not None
        self.images = encoded if is_encoded else _check_images(images)
        self.size = _SIZE if is_encoded else None
        self.short_side = _SHORT_SIDE if is_encoded else None
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
        """Returns the same encoded images, prepared for evaluation at another size.

        The short side is resized to `short_side`, then the centre `size` x `size` is
        cut out.

        Args:
            size: Side of the crop in pixels.
            short_side: Length of the resized short side in pixels. Default: in the
                paper's proportion, `round(size * 256 / 227)`.

        Returns:
            A dataset that shares images and labels with this one.

        Raises:
            ValueError: If the images are arrays, a number is not positive, or the crop
                is larger than the resized image.
            TypeError: If a number is not an int.
        """
        if not self.is_encoded:
            raise ValueError(
                "`with_size` is for images given as paths or bytes; resize an array "
                "before it becomes a Dataset, for example with `tf.image.resize`. "
                f"Received: size={size!r} for {self!r}"
            )
        check_int("size", size, minimum=1)
        if short_side is None:
            short_side = round(size * _SHORT_SIDE / _SIZE)
        check_int("short_side", short_side, minimum=1)
        if short_side < size:
            raise ValueError(
                "`short_side` must not be smaller than `size`, which is cut out of the "
                f"resized image. Received: short_side={short_side}, size={size}"
            )
        sized = copy.copy(self)
        sized.size, sized.short_side = int(size), int(short_side)
        return sized

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
        chosen = Dataset(
            self.images[rows],
            new_labels[self.labels[rows]],
            [self.class_names[i] for i in ids],
        )
        if not self.is_encoded:
            return chosen
        return chosen.with_size(self.size, self.short_side)


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
            "`images` must be one uint8 or float array, or a list of paths or of "
            "encoded bytes: resize images of different sizes first, and convert other "
            "types with `.astype('uint8')`. "
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
