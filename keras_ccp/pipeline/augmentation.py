"""Augmentation of small images, a whole batch at a time."""

import math
from collections.abc import Callable

import tensorflow as tf

from keras_ccp.checks import check_bool, check_number

_GREY_WEIGHTS = (0.299, 0.587, 0.114)  # ITU-R BT.601 luma


def small_image_augmentation(
    min_area: float = 0.4,
    aspect_ratio: float = 4 / 3,
    flip: bool = True,
    brightness: float = 0.2,
    contrast: float = 0.2,
    saturation: float = 0.4,
    tint: float = 0.2,
    grayscale: float = 0.0,
    invert: float = 0.0,
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Makes a random crop, flip and change of colours for `balanced_batches`.

    Each image is cropped to a random box, the box is resized to the size of the image
    (bilinear), and its colours change by random factors.

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
        tint: Multiply each channel by its own factor in 1 ± tint.
        grayscale: Share of the images that lose their colours. Only for 3 channels.
        invert: Share of the images that become negatives.

    Returns:
        A function of `(n, height, width, channels)` images and a `(2,)` int seed
        that returns images of the same shape and type: uint8 is rounded and clipped
        to 0..255, float is taken as 0..1 and not clipped. The same seed, the same
        result.

    Raises:
        ValueError: If an argument is outside its range. The function raises it for
            images that have no rank 4.
        TypeError: If an argument is not a number, or `flip` no boolean. The function
            raises it for images that are neither uint8 nor float.
    """
    check_bool("flip", flip)
    for name, value, low, high in (
        ("min_area", min_area, 0.01, 1),
        ("aspect_ratio", aspect_ratio, 1, 10),
        ("brightness", brightness, 0, 1),
        ("contrast", contrast, 0, 1),
        ("saturation", saturation, 0, 1),
        ("tint", tint, 0, 1),
        ("grayscale", grayscale, 0, 1),
        ("invert", invert, 0, 1),
    ):
        check_number(name, value, low, high)

    @tf.autograph.experimental.do_not_convert
    def augment(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        images = tf.convert_to_tensor(images)
        if images.dtype == tf.string:
            raise TypeError(
                "`images` must be pixels; for a Dataset of paths or bytes take "
                "`mlrc_augmentation()`. Received: images of tf.string"
            )
        if images.dtype != tf.uint8 and not images.dtype.is_floating:
            raise TypeError(
                "`images` must be uint8, or float from 0 to 1; convert them with "
                f"`tf.cast(images, tf.uint8)`. Received: images of {images.dtype!r}"
            )
        if images.shape.rank != 4 or images.shape[-1] is None:
            raise ValueError(
                "`images` must be a batch (n, height, width, channels) with known "
                "channels; make a batch of one image with `images[None]`. "
                f"Received: images of shape {images.shape}"
            )
        n, channels = tf.shape(images)[0], images.shape[-1]
        noise = tf.random.stateless_uniform((10 + channels, n), seed)
        boxes = _random_boxes(noise[:5], min_area, aspect_ratio, flip)
        crops = tf.image.crop_and_resize(
            images, boxes, tf.range(n), tf.shape(images)[1:3]
        )
        strengths = tf.constant([[brightness], [contrast], [saturation]], tf.float32)
        factors = 1 + strengths * (2 * noise[5:8] - 1)
        colourless = tf.where(noise[8] < grayscale, 0.0, factors[2])
        gains = factors[0] * (1 + tint * (2 * noise[10:] - 1))
        colours = _jitter(
            tf.ensure_shape(crops, images.shape), gains, factors[1], colourless
        )
        white = 255.0 if images.dtype == tf.uint8 else 1.0
        inverted = (noise[9] < invert)[:, None, None, None]
        colours = tf.where(inverted, white - colours, colours)
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


def _jitter(
    images: tf.Tensor, gains: tf.Tensor, contrast: tf.Tensor, saturation: tf.Tensor
) -> tf.Tensor:
    """Scales the channels, then the distance to the mean grey and to the own grey.

    Args:
        images: `(n, height, width, channels)` float images.
        gains: `(channels, n)` factors.
        contrast: `(n,)` factors.
        saturation: `(n,)` factors.
    """
    images *= tf.transpose(gains)[:, None, None, :]
    contrast, saturation = (
        contrast[:, None, None, None],
        saturation[:, None, None, None],
    )
    if images.shape[-1] == 3:
        grey = tf.tensordot(images, tf.constant(_GREY_WEIGHTS), 1)[..., None]
        images = grey + saturation * (images - grey)
    else:
        grey = tf.reduce_mean(images, -1, keepdims=True)
    mean = tf.reduce_mean(grey, [1, 2], keepdims=True)
    return mean + contrast * (images - mean)
