"""Image files as RGB pixels: read, decoded, upright, cropped, augmented."""

import contextlib
import functools
import io
import math
import os
import stat
from collections.abc import Callable, Sequence

import numpy as np
import PIL.Image
import PIL.ImageOps
import tensorflow as tf

from keras_ccp.checks import check_int, check_number

Augmentation = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

_GREY_WEIGHTS = (0.299, 0.587, 0.114)  # ITU-R BT.601 luma
_ATTEMPTS = 10
_ASPECT_RATIO = 4 / 3
# Its EXIF is a camera's first segment or close behind.
_HEAD = 2**18
# Beyond them a file is refused: decoding it would take most of a gigabyte.
MAX_PIXELS = 75_000_000
MAX_BYTES = 200_000_000
_TOO_LARGE = f"an image must have 1 to {MAX_PIXELS:,} pixels"
# Converted at a time, so that a large image takes little more than its RGB pixels.
_STRIP = 2**20
# Beside JPEG. Others that Pillow knows run programs or have no one picture.
_FORMATS = ("PNG", "GIF", "BMP", "WEBP")
# TensorFlow says of a broken JPEG only at which operation it met it.
_HINT = "broken_image__keras_ccp.datasets.verify_names_it"

# To be traced without reading its source for loops and branches: that takes a second.
_as_it_is = tf.autograph.experimental.do_not_convert


# ==== From files to bytes ====


class BrokenImage(tf.errors.InvalidArgumentError, ValueError):
    """An image that cannot be read: TensorFlow's error of a broken JPEG."""

    def __init__(self, reason: str) -> None:
        remedy = "Replace the file; keras_ccp.datasets.verify names all such files"
        super().__init__(None, None, f"{reason}\n{remedy}")


# What reading and decoding raise of a file, with a path that is none among it.
UNREADABLE = (OSError, tf.errors.OpError, ValueError)


def failure(error: Exception) -> str:
    """An error of a file in one line, without the names of files and operations."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    message = str(getattr(error, "message", error))
    if "BrokenImage: " in message:
        message = message.split("BrokenImage: ", 1)[1]
    elif message.startswith("Graph execution error"):  # where it was traced, then what
        message = message.split("\n\t [[", 1)[0].rsplit("\n\n", 1)[-1]
    for before in ("}} ", "assertion failed: "):
        message = message.split(before, 1)[-1]
    message = message.split(" [Op:", 1)[0].split("\n", 1)[0]
    return message.strip() or type(error).__name__


def read_file(path: str | os.PathLike, root: str | os.PathLike | None = None) -> bytes:
    """Opens an image file; with `root` only one below it, where links lead counts."""
    path = os.path.expanduser(path)
    if root is not None:
        real, base = os.path.realpath(path), os.path.realpath(root)
        if os.path.commonpath([real, base]) != base:
            raise BrokenImage(f"outside of {base}")
    if why := refusal(path):
        raise BrokenImage(why)
    with open(path, "rb") as file:
        return file.read()


def refusal(path: str | bytes) -> str | None:
    """Why a file is not opened: a pipe would wait, a device never end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        return "a folder, pipe or device, not a file"
    if status.st_size > MAX_BYTES:
        return f"{status.st_size:,} bytes, of {MAX_BYTES:,} at most"
    return None


def check_files(paths: Sequence[bytes]) -> None:
    """Names a file that must not be opened; TensorFlow names those it cannot open."""
    for path in paths:
        with contextlib.suppress(OSError):
            if why := refusal(path):
                raise BrokenImage(f"{os.fsdecode(path)}: {why}")


# ==== From bytes to pixels ====


@_as_it_is
def decode_image(encoded: tf.Tensor, portable: bool = False) -> tf.Tensor:
    """Decodes a JPEG, PNG, GIF, BMP or WebP file.

    Grey, CMYK, palette and 16-bit images become 8-bit RGB (the upper 8 of 16 bits);
    what is transparent lies on white; of an animation it is the first frame. All are
    turned upright as their EXIF says.

    Args:
        encoded: Scalar string, the bytes of the file.
        portable: Take operations of TensorFlow alone, as a SavedModel must; otherwise
            Pillow decodes what is not a JPEG. These files then come out otherwise:
            PNG and WebP with EXIF are not turned, a transparent colour of a PNG (tRNS
            of grey or RGB) is not white, a BMP with a palette shows its indices, and
            WebP with alpha is an error. Of GIF and WebP the size is not limited, since
            a graph cannot read it beforehand. Defaults to `False`.

    Returns:
        `(height, width, 3)` uint8 image.

    Raises:
        tf.errors.InvalidArgumentError: If the file is truncated, no image, or one of
            more than 75,000,000 pixels.
    """
    encoded = tf.convert_to_tensor(encoded)

    def of_jpeg() -> tf.Tensor:
        with tf.name_scope(_HINT), tf.control_dependencies([_jpeg_shape(encoded)]):
            # As other libraries do by default. TensorFlow's faster default is up to 7
            # of 255 away, which does not matter where crops are random.
            image = tf.io.decode_jpeg(
                encoded, channels=3, dct_method="INTEGER_ACCURATE"
            )
        return _turn_upright(image, orientation(encoded))

    of_other = _decode_portable if portable else _decode_other
    image = tf.cond(tf.io.is_jpeg(encoded), of_jpeg, lambda: of_other(encoded))
    return tf.ensure_shape(image, (None, None, 3))


@_as_it_is
def decode_center_crop(
    encoded: tf.Tensor, size: int, short_side: int, portable: bool = False
) -> tf.Tensor:
    """Prepares an image for evaluation.

    The short side is resized, keeping the aspect, and the centre is cut out. Sizes and
    offsets are those of torchvision's Resize and CenterCrop, the filter is the
    antialiased triangle (Pillow's BILINEAR). Only the pixels of the crop are computed.

    Args:
        encoded: Scalar string, the bytes of the file.
        size: Side of the crop in pixels.
        short_side: Short side after resizing in pixels, at least `size`.
        portable: As for `decode_image`. Defaults to `False`.

    Returns:
        `(size, size, 3)` uint8 image.

    Raises:
        tf.errors.InvalidArgumentError: If the file is truncated or no image.
    """
    image = decode_image(encoded, portable)
    shape = tf.shape(image, tf.int64)[:2]  # of a long image times 256
    resized = short_side * shape // tf.reduce_min(shape)
    # Rounds halves to even numbers, as Python does.
    corner = tf.round(tf.cast(resized - size, tf.float32) / 2)
    pixels = tf.raw_ops.ScaleAndTranslate(
        images=image[None],
        size=[size, size],
        scale=tf.cast(resized, tf.float32) / tf.cast(shape, tf.float32),
        translation=-corner,
        kernel_type="triangle",
        antialias=True,
    )
    return _as_uint8(tf.ensure_shape(pixels[0], (size, size, 3)))


@_as_it_is
def decode_crop(
    encoded: tf.Tensor, choose_box: Callable[[tf.Tensor], tf.Tensor], short_side: int
) -> tf.Tensor:
    """Decodes a box of an image, of a JPEG little more than the box.

    A JPEG whose short side is 2, 4 or 8 times `short_side` or more is decoded at 1/2,
    1/4 or 1/8 of its size, which averages its pixels and saves time. `choose_box` maps
    height and width (2,) as decoded to top, left, height and width (4,), int32; of a
    JPEG before it is turned upright.
    """

    def of_jpeg() -> tf.Tensor:
        with tf.name_scope(_HINT):
            shape = _jpeg_shape(encoded)
            enough = short_side * tf.constant((2, 4, 8))
            is_enough = tf.reduce_min(shape) >= enough
            power = tf.math.count_nonzero(is_enough, dtype=tf.int32)
            box = choose_box(-(-shape // tf.bitwise.left_shift(1, power)))

            def at(ratio: int) -> tf.Tensor:
                with tf.name_scope(_HINT):
                    return tf.image.decode_and_crop_jpeg(
                        encoded, box, channels=3, ratio=ratio
                    )

            ratios = [functools.partial(at, ratio) for ratio in (1, 2, 4, 8)]
            crop = tf.switch_case(power, ratios)
        return _turn_upright(crop, orientation(encoded))

    def of_other() -> tf.Tensor:
        image = _decode_other(encoded)
        top, left, height, width = tf.unstack(choose_box(tf.shape(image)[:2]))
        return image[top : top + height, left : left + width]

    crop = tf.cond(tf.io.is_jpeg(encoded), of_jpeg, of_other)
    return tf.ensure_shape(crop, (None, None, 3))


@tf.function(input_signature=[tf.TensorSpec((), tf.string)], autograph=False)
def _jpeg_shape(encoded: tf.Tensor) -> tf.Tensor:
    """Height and width (2,) of a JPEG that is not too large."""
    with tf.name_scope(_HINT):
        shape = tf.io.extract_jpeg_shape(encoded)[:2]
    with tf.control_dependencies([_is_small(shape)]):
        return tf.identity(shape)


def _is_small(shape: tf.Tensor) -> tf.Operation:
    """Asserts that an image of some height and width may be decoded."""
    with tf.name_scope(_HINT):
        size = tf.reduce_prod(tf.cast(shape, tf.int64))
        return tf.debugging.Assert(size <= MAX_PIXELS, [_TOO_LARGE, size])


def _decode_other(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes what is not a JPEG, with Pillow."""
    # Of rank 1: a scalar string comes as bytes in a graph, as an array outside.
    image = tf.numpy_function(
        lambda files: _pillow_pixels(files[0]),
        [encoded[None]],
        tf.uint8,
        stateful=False,
    )
    return tf.ensure_shape(image, (None, None, 3))


def _pillow_pixels(encoded: bytes) -> np.ndarray:
    try:
        with PIL.Image.open(io.BytesIO(encoded), formats=_FORMATS) as image:
            if not 0 < image.width * image.height <= MAX_PIXELS:
                raise ValueError(f"{_TOO_LARGE}: {image.width} x {image.height}")
            PIL.ImageOps.exif_transpose(image, in_place=True)
            pixels = np.empty((image.height, image.width, 3), np.uint8)
            step = max(1, _STRIP // image.width)
            for top in range(0, image.height, step):
                box = (0, top, image.width, min(top + step, image.height))
                pixels[top : top + step] = _on_white(image.crop(box))
            return pixels
    except PIL.UnidentifiedImageError as error:
        raise BrokenImage("no JPEG, PNG, GIF, BMP or WebP file") from error
    except Exception as error:  # Pillow raises all sorts on damaged files
        raise BrokenImage(str(error) or type(error).__name__) from error


def _on_white(image: PIL.Image.Image) -> PIL.Image.Image:
    """As RGB, of 8 bits."""
    if image.mode.startswith("I"):  # 16 bits
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(white, image)
    return image.convert("RGB")


def _decode_portable(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes what is not a JPEG, in the graph."""

    def of_png() -> tf.Tensor:
        sides = tf.strings.substr(encoded, 16, 8)
        sides = tf.io.decode_raw(sides, tf.int32, little_endian=False)
        with tf.control_dependencies([_is_small(sides)]):
            # Not channels=4: of a 1-bit image that makes an alpha of 1.
            image = tf.io.decode_png(encoded)
        shape = tf.shape(image)

        def on_white() -> tf.Tensor:
            opacity = tf.cast(image[..., -1:], tf.float32) / 255
            colours = tf.cast(image[..., :-1], tf.float32)
            return _as_uint8(255 + opacity * (colours - 255))

        pixels = tf.cond(shape[2] % 2 == 0, on_white, lambda: image)
        return tf.broadcast_to(pixels, (shape[0], shape[1], 3))

    return tf.cond(
        tf.strings.substr(encoded, 0, 4) == b"\x89PNG",
        of_png,
        lambda: tf.io.decode_image(encoded, channels=3, expand_animations=False),
    )


def _as_uint8(pixels: tf.Tensor) -> tf.Tensor:
    """Rounds pixels that are 0 to 255 but for rounding errors."""
    return tf.cast(pixels + 0.5, tf.uint8)


# ==== Which way up: the EXIF orientation ====


@_as_it_is
def orientation(encoded: tf.Tensor) -> tf.Tensor:
    """Reads which way up a camera says its JPEG is.

    Args:
        encoded: Scalar string, the bytes of the file.

    Returns:
        Scalar int32, 1 to 8 as in the EXIF standard (CIPA DC-008, tag 274); 1, upright,
        where the file says nothing, is of another kind, or its EXIF is broken.
    """
    # Most files without EXIF have one JFIF header of 18 bytes, then the quantisation
    # tables. They are spared the search.
    second = tf.minimum(20, tf.strings.length(encoded))
    is_plain = tf.logical_and(
        tf.strings.substr(encoded, 0, 6) == b"\xff\xd8\xff\xe0\x00\x10",
        tf.strings.substr(encoded, second, 2) == b"\xff\xdb",
    )
    return tf.cond(
        is_plain, lambda: tf.constant(1), lambda: _orientation_in_exif(encoded)
    )


# Not inlined: TensorFlow would pass by each of its operations for every plain JPEG,
# which takes a fifth of the time that a file costs beside its pixels.
@tf.function(
    input_signature=[tf.TensorSpec((), tf.string)],
    autograph=False,
    experimental_attributes={"_noinline": True},
)
def _orientation_in_exif(encoded: tf.Tensor) -> tf.Tensor:
    """Goes from segment to segment of a JPEG, then through the tags of its EXIF."""
    data = tf.io.decode_raw(tf.strings.substr(encoded, 0, _HEAD), tf.uint8)
    data = tf.concat([data, [0]], 0)  # what is beyond the end

    def number(start: tf.Tensor, count: int, is_little: tf.Tensor = False) -> tf.Tensor:
        places = tf.minimum(
            start[..., None] + range(count), tf.size(data, tf.int64) - 1
        )
        weights = tf.constant([256**i for i in range(count)], tf.int64)
        weights = tf.where(is_little, weights, weights[::-1])
        return tf.reduce_sum(tf.cast(tf.gather(data, places), tf.int64) * weights, -1)

    def is_exif(start: tf.Tensor) -> tf.Tensor:
        title = int.from_bytes(b"Exif\0\0", "big")
        return (number(start, 2) == 0xFFE1) & (number(start + 4, 6) == title)

    def is_before_it(start: tf.Tensor) -> tf.Tensor:
        marker = number(start, 2)
        is_image = (marker == 0xFFDA) | (marker == 0xFFD9)
        return (marker >= 0xFF00) & ~is_image & ~is_exif(start)

    def step(start: tf.Tensor) -> list[tf.Tensor]:
        is_fill = number(start, 2) == 0xFFFF
        return [tf.where(is_fill, start + 1, start + 2 + number(start + 2, 2))]

    (start,) = tf.while_loop(is_before_it, step, [tf.constant(2, tf.int64)])
    tiff, end = start + 10, start + 2 + number(start + 2, 2)
    is_little = number(tiff, 2) == 0x4949
    first = tiff + number(tiff + 4, 4, is_little) + 2
    # An entry has 12 bytes: the first two are the tag, 8 and 9 the value.
    count = tf.minimum(number(first - 2, 2, is_little), (end - first) // 12)
    entries = first + 12 * tf.range(tf.maximum(count, 0))
    is_wanted = number(entries, 2, is_little) == 0x0112
    values = tf.boolean_mask(number(entries + 8, 2, is_little), is_wanted)
    value = tf.concat([values, [1]], 0)[0]
    is_valid = is_exif(start) & (value >= 1) & (value <= 8)
    return tf.cast(tf.where(is_valid, value, tf.ones_like(value)), tf.int32)


def _turn_upright(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Transposes from orientation 5 on, then reverses rows and columns."""

    def turn() -> tf.Tensor:
        turned = tf.cond(
            orientation >= 5,
            lambda: tf.transpose(image, (1, 0, 2)),
            lambda: tf.identity(image),
        )
        rows = tf.reduce_any(orientation == (3, 4, 7, 8))
        columns = tf.reduce_any(orientation == (2, 3, 6, 7))
        return tf.reverse(turned, tf.where([rows, columns])[:, 0])

    return tf.cond(orientation == 1, lambda: image, turn)


# ==== Augmentation of encoded images, an image at a time ====


def mlrc_augmentation(size: int = 227, short_side: int = 256) -> Augmentation:
    """Makes the training crop and flip of the MLRC protocol for `balanced_batches`.

    A box of 16 % to 100 % of the area and aspect ratio 3/4 to 4/3, resized to 227 x 227
    (bilinear), and half of the images mirrored (Musgrave et al., A Metric Learning
    Reality Check, ECCV 2020). It is cut out of the file's own pixels, where the
    protocol resizes the short side to 256 first.

    Args:
        size: Side of the result in pixels. Defaults to 227.
        short_side: Resolution that is enough. A JPEG whose short side is 2, 4 or 8
            times this or more is decoded at 1/2, 1/4 or 1/8 of its size. Defaults
            to 256.

    Returns:
        A function of a scalar string, the bytes of an image file, and a `(2,)` int seed
        that returns a `(size, size, 3)` uint8 image. The same seed, the same result.
    """
    return _random_resized_crop(size, short_side, min_area=0.16)


def conventional_augmentation(size: int = 224, short_side: int = 256) -> Augmentation:
    """Makes the training crop and flip of the conventional protocol.

    A box of 8 % to 100 % of the area and aspect ratio 3/4 to 4/3 (Szegedy et al., Going
    Deeper with Convolutions, CVPR 2015, section 6), resized to 224 x 224 (bilinear),
    and half of the images mirrored: how the BN-Inception and ResNet50 rows of the
    published comparisons are trained, for example by Kim et al., Proxy Anchor Loss for
    Deep Metric Learning, CVPR 2020.

    Args:
        size: Side of the result in pixels. Defaults to 224.
        short_side: As for `mlrc_augmentation`. Defaults to 256.

    Returns:
        A function as that of `mlrc_augmentation`.
    """
    return _random_resized_crop(size, short_side, min_area=0.08)


def _random_resized_crop(size: int, short_side: int, min_area: float) -> Augmentation:
    check_int("size", size, minimum=1)
    check_int("short_side", short_side, minimum=1)

    @_as_it_is
    def augment(encoded: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        noise = tf.random.stateless_uniform((2 * _ATTEMPTS + 3,), seed)
        crop = decode_crop(
            encoded, lambda shape: random_box(noise[1:], shape, min_area), short_side
        )
        # As floats: TensorFlow resizes uint8 at two thirds of the speed.
        crop = tf.cast(crop, tf.float32)
        image = _as_uint8(tf.image.resize(crop, (size, size)))
        return tf.cond(
            noise[0] < 0.5, lambda: tf.reverse(image, [1]), lambda: tf.identity(image)
        )

    return augment


def random_box(noise: tf.Tensor, shape: tf.Tensor, min_area: float) -> tf.Tensor:
    """Draws top, left, height and width (4,) int32 of a box of `min_area` to all.

    Area (uniform) and aspect ratio (its logarithm is uniform) are drawn up to ten times
    until the box fits into the image of this height and width (2,). Failing that it is
    the largest central box of an allowed aspect ratio. These are the rules of
    torchvision's RandomResizedCrop. `noise` is (22,) uniform numbers from 0 to 1.
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


# ==== Augmentation of small images, a batch at a time ====


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
) -> Augmentation:
    """Makes a random crop, flip and change of colours for `balanced_batches`.

    Each image is cropped to a random box, the box is resized to the size of the image
    (bilinear), and its colours change by random factors.

    Args:
        min_area: Smallest area of the box, as a share of the image. Defaults to 0.4.
        aspect_ratio: Largest ratio of its sides to those of the image. Defaults to 4/3.
        flip: Mirror half of the images; not for characters. Defaults to `True`.
        brightness: Factor of the image, 1 ± brightness. Defaults to 0.2.
        contrast: Factor of the difference to its mean grey, 1 ± contrast. Defaults to
            0.2.
        saturation: Factor of the difference of a pixel to its grey, 1 ± saturation,
            with 3 channels. Defaults to 0.4.
        tint: Factor of each channel, 1 ± tint. Defaults to 0.2.
        grayscale: Share of the images that lose their colours. Defaults to 0.
        invert: Share of the images that become negatives. Defaults to 0.

    Returns:
        A function of `(n, height, width, channels)` images and a `(2,)` int seed
        that returns images of the same shape and type: uint8 is rounded and clipped
        to 0..255, float is taken as 0..1 and not clipped. The same seed, the same
        result.

    Raises:
        ValueError: If an argument but `aspect_ratio` is not from 0 to 1.
    """
    shares = {"min_area": min_area, "brightness": brightness, "contrast": contrast}
    shares |= {"saturation": saturation, "tint": tint}
    for name, value in (shares | {"grayscale": grayscale, "invert": invert}).items():
        check_number(name, value, 0, 1)

    @_as_it_is
    def augment(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        images = tf.convert_to_tensor(images)
        if images.dtype != tf.uint8 and not images.dtype.is_floating:
            raise TypeError(
                "`images` must be uint8, or float from 0 to 1. "
                f"Received: images of {images.dtype!r}\n"
                "For a Dataset of paths or bytes take `mlrc_augmentation()`"
            )
        n, channels = tf.shape(images)[0], images.shape[-1]
        noise = tf.random.stateless_uniform((10 + channels, n), seed)
        boxes = _small_boxes(noise[:5], min_area, aspect_ratio, flip)
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


def _small_boxes(
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
    """Scales channels by (channels, n), then the distance to own and to mean grey."""
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
