"""Random crops and flips of encoded images, an image at a time."""

import math
from collections.abc import Callable

import tensorflow as tf

from keras_ccp.checks import check_int
from keras_ccp.pipeline.decoding import as_uint8, decode_crop

ImageAugmentation = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

_ATTEMPTS = 10
_ASPECT_RATIO = 4 / 3


def mlrc_augmentation(size: int = 227, short_side: int = 256) -> ImageAugmentation:
    """Makes the training crop and flip of the MLRC protocol for `balanced_batches`.

    The protocol (Musgrave et al., A Metric Learning Reality Check, ECCV 2020) resizes
    the short side to 256 pixels, crops a box of 16 % to 100 % of the area and aspect
    ratio 3/4 to 4/3, resizes it to 227 x 227 and mirrors half of the images. Here the
    box has the same distribution, but is cut out of the file's own pixels, decoded
    with it, and resized once (bilinear): the same picture up to interpolation, sharper
    where the file has more than `short_side` pixels.

    Args:
        size: Side of the result in pixels.
        short_side: Resolution that is enough. A JPEG whose short side is 2, 4 or 8
            times this or more is decoded at 1/2, 1/4 or 1/8 of its size.

    Returns:
        A function of a scalar string, the bytes of an image file, and a `(2,)` int seed
        that returns a `(size, size, 3)` uint8 image. The same seed, the same result.

    Raises:
        ValueError: If a number is not positive.
        TypeError: If a number is not an int. The function raises it for what is not one
            encoded image.
    """
    return _random_resized_crop(size, short_side, min_area=0.16)


def conventional_augmentation(
    size: int = 224, short_side: int = 256
) -> ImageAugmentation:
    """Makes the training crop and flip of the conventional protocol.

    A box of 8 % to 100 % of the area and aspect ratio 3/4 to 4/3 (Szegedy et al., Going
    Deeper with Convolutions, CVPR 2015, section 6), resized to 224 x 224 (bilinear),
    and half of the images mirrored: how the BN-Inception and ResNet50 rows of the
    published comparisons are trained, for example by Kim et al., Proxy Anchor Loss for
    Deep Metric Learning, CVPR 2020.

    Args:
        size: Side of the result in pixels.
        short_side: Resolution that is enough. A JPEG whose short side is 2, 4 or 8
            times this or more is decoded at 1/2, 1/4 or 1/8 of its size.

    Returns:
        A function as that of `mlrc_augmentation`.

    Raises:
        ValueError: If a number is not positive.
        TypeError: If a number is not an int.
    """
    return _random_resized_crop(size, short_side, min_area=0.08)


def _random_resized_crop(
    size: int, short_side: int, min_area: float
) -> ImageAugmentation:
    check_int("size", size, minimum=1)
    check_int("short_side", short_side, minimum=1)

    @tf.autograph.experimental.do_not_convert
    def augment(encoded: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        encoded = tf.convert_to_tensor(encoded)
        if encoded.dtype != tf.string or encoded.shape.rank != 0:
            raise TypeError(
                "`encoded` must be the bytes of one image file; for a Dataset of "
                "arrays take `small_image_augmentation()`. "
                f"Received: {encoded.dtype!r} of shape {encoded.shape}"
            )
        noise = tf.random.stateless_uniform((2 * _ATTEMPTS + 3,), seed)
        crop = decode_crop(
            encoded, lambda shape: random_box(noise[1:], shape, min_area), short_side
        )
        # As floats: TensorFlow resizes uint8 at two thirds of the speed.
        crop = tf.cast(crop, tf.float32)
        image = as_uint8(tf.image.resize(crop, (size, size)))
        return tf.cond(
            noise[0] < 0.5, lambda: tf.reverse(image, [1]), lambda: tf.identity(image)
        )

    return augment


def random_box(noise: tf.Tensor, shape: tf.Tensor, min_area: float) -> tf.Tensor:
    """Draws the box of a random crop.

    Area (uniform) and aspect ratio (its logarithm is uniform) are drawn up to ten times
    until the box fits into the image. Failing that it is the largest central box of an
    allowed aspect ratio. These are the rules of torchvision's RandomResizedCrop.

    Args:
        noise: `(22,)` float32 uniform numbers from 0 to 1.
        shape: `(2,)` int32 height and width of the image.
        min_area: Smallest area, as a share of the image; the largest is 1.

    Returns:
        `(4,)` int32 top, left, height and width; the aspect ratio is width / height.
    """
    # Few operations: on a small image they cost as much as its pixels.
    sides = tf.cast(shape, tf.float32)
    width = math.log(_ASPECT_RATIO)
    root = tf.exp(width * noise[2 : 2 + _ATTEMPTS] - width / 2)
    area = (1 - min_area) * noise[2 + _ATTEMPTS :] + min_area
    mean_side = tf.sqrt(area * tf.reduce_prod(sides))
    drawn = tf.round(tf.stack([mean_side / root, mean_side * root], 1))
    largest = tf.minimum(sides, tf.round(_ASPECT_RATIO * sides[::-1]))
    candidates = tf.concat([drawn, largest[None]], 0)
    fits = tf.reduce_all((candidates >= 1) & (candidates <= sides), 1)
    chosen = tf.argmax(fits)
    box_sides = candidates[chosen]
    free = sides - box_sides
    # Of free + 1 places; a number close to 1 may be rounded up to the next one.
    places = tf.where(chosen < _ATTEMPTS, noise[:2] * (free + 1), free / 2)
    corner = tf.minimum(tf.floor(places), free)
    return tf.cast(tf.concat([corner, box_sides], 0), tf.int32)
