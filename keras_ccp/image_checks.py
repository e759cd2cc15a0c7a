"""Whether images are what an embedder takes, and validation images are others."""

import logging
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_ccp.arguments import check_finite

logger = logging.getLogger("keras_ccp")

# A `Rescaling` by less than this is for pixels of 0..255.
_BYTE_SCALE = 1 / 32
# Pixels of 0..1, or less their mean and divided by their deviation, stay below this;
# of 0..255 no batch is as dark.
_SMALL = 4


class ImageSpec(NamedTuple):
    """What an embedder takes for an image.

    Args:
        shape: `(height, width, channels)`, `None` where free.
        dtype: of its input.
        takes_bytes: whether it brings pixels of 0 to 255 into its own range.
    """

    shape: tuple[int | None, ...]
    dtype: str
    takes_bytes: bool

    @classmethod
    def of(cls, embedder: keras.Model) -> "ImageSpec":
        """What a model takes, by its input and its layers.

        Args:
            embedder: built `keras.Model` of one input.
        """
        dtype = keras.backend.standardize_dtype(embedder.inputs[0].dtype)
        takes_bytes = "int" in dtype or any(
            isinstance(layer, keras.layers.Rescaling)
            and np.max(np.abs(layer.scale)) < _BYTE_SCALE
            for layer in embedder._flatten_layers()
        )
        return cls(embedder.input_shape[1:], dtype, takes_bytes)


def check_images(name: str, images: Any, spec: ImageSpec) -> None:
    """Refuses images that do not fit an embedder.

    Args:
        name: Name of the argument.
        images: `(n, height, width, channels)` array or tensor.
        spec: what the embedder takes.

    Raises:
        TypeError: If they are not one array of numbers.
        ValueError: If the shape differs, or values are not finite or out of range.
    """
    # A list of images of different sizes has no shape, an array of them no number.
    shape = getattr(images, "shape", None)
    if shape is None or str(getattr(images, "dtype", "")) == "object":
        raise TypeError(
            f"`{name}` must be one array of images of the same size; resize them "
            f"first. Received: type({name})={type(images).__name__}"
        )
    check_image_shape(name, tuple(shape)[1:], spec)
    images = np.asarray(images)
    check_finite(name, images)
    check_pixel_range(name, images, spec)


def check_image_shape(name: str, shape: tuple | None, spec: ImageSpec) -> None:
    """Refuses the shape of images that an embedder does not take.

    Args:
        name: Name of the argument.
        shape: shape of one image, `None` where unknown, or `None`.
        spec: what the embedder takes.

    Raises:
        ValueError: If they differ.
    """
    fits = shape is None or (
        len(shape) == len(spec.shape)
        and all(
            None in (expected, given) or expected == given
            for expected, given in zip(spec.shape, shape, strict=True)
        )
    )
    if not fits:
        raise ValueError(
            f"`{name}` must hold images of shape {tuple(spec.shape)}, the embedder's "
            f"input. Received: images of shape {tuple(shape)}"
        )


def check_pixel_range(name: str, images: np.ndarray, spec: ImageSpec) -> None:
    """Refuses images that an integer input cannot hold, and warns of dark ones.

    Args:
        name: Name of the argument.
        images: `(n, height, width, channels)` finite numbers.
        spec: what the embedder takes.

    Raises:
        ValueError: If the embedder's input is of integers and would round floats as
            small as pixels of 0 to 1, or has no room for the values.
    """
    if not spec.takes_bytes or images.dtype == np.uint8 or not images.size:
        return
    low, high = float(images.min()), float(images.max())
    is_float = images.dtype.kind in "fV"  # "V" is bfloat16
    is_small = is_float and 0 < max(-low, high) < _SMALL
    received = f"Received: {images.dtype} images of {low:.4g} to {high:.4g}"
    if "int" in spec.dtype and (is_small or low < 0 or high > 255):
        raise ValueError(
            f"`{name}` must hold pixels of 0 to 255, which is what the embedder's "
            "input of integers takes: bring them there (of 0 to 1 by `images * 255`), "
            f"or build the embedder with an input of floats. {received}"
        )
    if is_small:
        logger.warning(
            "`%s` looks like pixels of 0 to 1, and the embedder's `Rescaling` layer "
            "takes 0 to 255: pass `images * 255`, or build the embedder without the "
            "layer. %s",
            name,
            received,
        )


def check_evaluation_images(data: Any, spec: ImageSpec) -> None:
    """Refuses the images of `EvaluationData` that do not fit an embedder.

    Args:
        data: an `EvaluationData`.
        spec: what the embedder takes.

    Raises:
        ValueError: If shape or range differ.
    """
    check_image_shape(data.name, data.image_shape, spec)
    if data.first_images is not None:
        check_pixel_range(data.name, data.first_images, spec)


def check_has_pairs(data: Any) -> None:
    """Refuses `EvaluationData` among which no image can find one of its class.

    Args:
        data: an `EvaluationData`.

    Raises:
        ValueError: If no class has two images.
    """
    if np.unique_counts(data.labels).counts.max() < 2:
        raise ValueError(
            f"`{data.name}` must have classes of two images or more: a single image "
            "has nothing to be found by. Received: "
            f"{len(data.labels)} images, each of its own class"
        )


def warn_of_shared_images(validation: Any, pool: Any) -> None:
    """Warns where validation images are training images.

    Args:
        validation: an `EvaluationData`.
        pool: an `EvaluationData` of the training classes.
    """
    if validation.shares_images(pool):
        logger.warning(
            "`%s` and `%s` share images: what was trained on does not tell when to "
            "stop. Hold classes out by `Dataset.split_classes(0.75)`",
            validation.name,
            pool.name,
        )
