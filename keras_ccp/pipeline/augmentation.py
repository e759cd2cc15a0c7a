"""Augmentation of small images, a whole batch at a time."""

import math
import numbers
from collections.abc import Callable

import tensorflow as tf

_GREY_WEIGHTS = (0.299, 0.587, 0.114)  # ITU-R BT.601 luma


def small_image_augmentation(
    min_area: float = 0.4,
    aspect_ratio: float = 4 / 3,
    flip: bool = True,
    brightness: float = 0.2,
    contrast: float = 0.2,
    saturation: float = 0.4,
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Makes a random crop, flip and colour jitter for `balanced_batches`.

    Each image is cropped to a random box, the box is resized to the size of the image
    (bilinear), and the colours are changed by three random factors. Factors only, no
    offsets, so images may be 0..255 or 0..1.

    Args:
        min_area: Smallest area of the box, as a share of the image; 1 and an aspect
            ratio of 1 crop nothing. The area is uniform between it and 1.
        aspect_ratio: Largest ratio of the sides of the box, either way, relative to
            those of the image. The logarithm of the ratio is uniform.
        flip: Mirror half of the images left to right. Not for characters.
        brightness: Multiply the image by a factor in 1 ± brightness.
        contrast: Multiply the difference to the mean grey of the image by a factor
            in 1 ± contrast.
        saturation: Multiply the difference of each pixel to its grey by a factor in
            1 ± saturation. Only for 3 channels.

    Returns:
        A function of `(n, height, width, channels)` images and a `(2,)` int seed
        that returns images of the same shape and type: uint8 is rounded and clipped
        to 0..255, float is not clipped. The same seed, the same result.

    Raises:
        ValueError: If an argument is outside its range.
    """
    for name, value, low, high in (
        ("min_area", min_area, 0.01, 1),
        ("aspect_ratio", aspect_ratio, 1, 10),
        ("brightness", brightness, 0, 1),
        ("contrast", contrast, 0, 1),
        ("saturation", saturation, 0, 1),
    ):
        if not isinstance(value, numbers.Real) or not low <= value <= high:
            raise ValueError(
                f"`{name}` must be a number from {low} to {high}. "
                f"Received: {name}={value!r}"
            )

    def augment(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        images = tf.convert_to_tensor(images)
        noise = tf.random.stateless_uniform((8, tf.shape(images)[0]), seed)
        boxes = _random_boxes(noise[:5], min_area, aspect_ratio, flip)
        crops = tf.image.crop_and_resize(
            images, boxes, tf.range(tf.shape(images)[0]), tf.shape(images)[1:3]
        )
        strengths = tf.constant([[brightness], [contrast], [saturation]], tf.float32)
        factors = 1 + strengths * (2 * noise[5:] - 1)
        colours = _jitter(tf.ensure_shape(crops, images.shape), factors)
        if images.dtype == tf.uint8:
            colours = tf.round(tf.clip_by_value(colours, 0, 255))
        return tf.cast(colours, images.dtype)

    return augment


def _random_boxes(
    noise: tf.Tensor, min_area: float, aspect_ratio: float, flip: bool
) -> tf.Tensor:
    """Boxes (n, 4) of y1, x1, y2, x2 in 0..1 from five uniform numbers (5, n)."""
    area = min_area + (1 - min_area) * noise[0]
    root = tf.exp(0.5 * math.log(aspect_ratio) * (2 * noise[1] - 1))
    height = tf.minimum(tf.sqrt(area) * root, 1)
    width = tf.minimum(tf.sqrt(area) / root, 1)
    top = (1 - height) * noise[2]
    left = (1 - width) * noise[3]
    right = left + width
    if flip:  # A box from right to left is a mirrored crop.
        mirrored = noise[4] < 0.5
        left, right = tf.where(mirrored, right, left), tf.where(mirrored, left, right)
    # The last pixel is at 1: rounding beyond would give a black line.
    return tf.clip_by_value(tf.stack([top, left, top + height, right], 1), 0, 1)


def _jitter(images: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Brightness, contrast and saturation of (n, h, w, c) by factors (3, n).

    All three are linear in the pixels: one scale of the colours, one of their grey
    and a constant for each image.
    """
    brightness, contrast, saturation = tf.unstack(factors[..., None, None, None])
    gain = brightness * contrast
    if images.shape[-1] == 3:
        grey = tf.tensordot(images, tf.constant(_GREY_WEIGHTS), 1)[..., None]
    else:
        grey, saturation = tf.reduce_mean(images, -1, keepdims=True), 1.0
    mean = tf.reduce_mean(grey, [1, 2], keepdims=True)
    offset = gain * (1 - saturation) * grey + brightness * (1 - contrast) * mean
    return gain * saturation * images + offset
