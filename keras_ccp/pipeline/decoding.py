"""From the bytes of an image file to RGB pixels, upright, inside a graph."""

from collections.abc import Callable

import tensorflow as tf

from keras_ccp.pipeline.exif import (
    is_plain_jpeg,
    is_transposed,
    orientation,
    stored_box,
    turn_upright,
)

ChooseBox = Callable[[tf.Tensor], tf.Tensor]

# To be traced without reading its source for loops and branches: that takes a second.
_as_it_is = tf.autograph.experimental.do_not_convert


@_as_it_is
def decode_image(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes a JPEG, PNG, GIF, BMP or WebP file.

    Grey, CMYK, palette and 16-bit images become 8-bit RGB (the upper 8 of 16 bits);
    what is transparent in a PNG lies on white; of a GIF it is the first frame. JPEG
    and PNG are turned upright as their EXIF says.

    Args:
        encoded: Scalar string, the bytes of the file.

    Returns:
        `(height, width, 3)` uint8 image.

    Raises:
        tf.errors.InvalidArgumentError: If the file is truncated or no image.
    """
    encoded = tf.convert_to_tensor(encoded)
    image = tf.cond(
        tf.io.is_jpeg(encoded),
        lambda: turn_upright(_decode_jpeg(encoded), orientation(encoded)),
        lambda: _decode_other(encoded),
    )
    return tf.ensure_shape(image, (None, None, 3))


@_as_it_is
def decode_crop(
    encoded: tf.Tensor, choose_box: ChooseBox, short_side: int
) -> tf.Tensor:
    """Decodes a box of an image; of a JPEG little more than the box.

    A JPEG whose short side is 2, 4 or 8 times `short_side` or more is decoded at 1/2,
    1/4 or 1/8 of its size, which averages its pixels and saves time.

    Args:
        encoded: Scalar string, the bytes of the file.
        choose_box: Maps the `(2,)` int32 height and width of the upright image, at the
            size it is decoded, to a `(4,)` int32 top, left, height, width.
        short_side: Short side in pixels below which no JPEG is scaled.

    Returns:
        `(height, width, 3)` uint8 image of the box, as `decode_image` has it.

    Raises:
        tf.errors.InvalidArgumentError: If the file is truncated or no image.
    """
    encoded = tf.convert_to_tensor(encoded)
    crop = tf.cond(
        is_plain_jpeg(encoded),
        lambda: _plain_jpeg_crop(encoded, choose_box, short_side),
        _apart(lambda: _other_crop(encoded, choose_box, short_side)),
    )
    return tf.ensure_shape(crop, (None, None, 3))


@_as_it_is
def decode_center_crop(encoded: tf.Tensor, size: int, short_side: int) -> tf.Tensor:
    """Prepares an image for evaluation.

    The short side is resized, keeping the aspect, and the centre is cut out. Sizes and
    offsets are those of torchvision's Resize and CenterCrop, the filter is the
    antialiased triangle (Pillow's BILINEAR). Only the pixels of the crop are computed.

    Args:
        encoded: Scalar string, the bytes of the file.
        size: Side of the crop in pixels.
        short_side: Short side after resizing in pixels, at least `size`.

    Returns:
        `(size, size, 3)` uint8 image.

    Raises:
        tf.errors.InvalidArgumentError: If the file is truncated or no image.
    """
    image = decode_image(encoded)
    shape = tf.shape(image)[:2]
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
    return as_uint8(tf.ensure_shape(pixels[0], (size, size, 3)))


def _apart(branch: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
    """A branch that costs one operation where it is not taken.

    TensorFlow puts the operations of both branches into one graph, and passes by each
    of those that are not taken: hundreds, for files of every kind.
    """
    if not tf.inside_function():
        return branch
    return tf.function(
        branch, autograph=False, experimental_attributes={"_noinline": True}
    )


def as_uint8(pixels: tf.Tensor) -> tf.Tensor:
    """Rounds pixels that are 0 to 255 but for rounding errors.

    Args:
        pixels: Float tensor.

    Returns:
        uint8 tensor of the same shape.
    """
    return tf.cast(pixels + 0.5, tf.uint8)


def _decode_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    # What other libraries do by default. TensorFlow's faster default is up to 7 of 255
    # away from it, which does not matter where crops are random.
    return tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")


def _plain_jpeg_crop(
    encoded: tf.Tensor, choose_box: ChooseBox, short_side: int
) -> tf.Tensor:
    # Apart from the turned ones: an operation costs about 1 us, a branch several.
    shape, power = _decoded_size(encoded, short_side)
    return _decode_box(encoded, choose_box(shape), power)


def _other_crop(
    encoded: tf.Tensor, choose_box: ChooseBox, short_side: int
) -> tf.Tensor:
    return tf.cond(
        tf.io.is_jpeg(encoded),
        lambda: _turned_jpeg_crop(encoded, choose_box, short_side),
        lambda: _crop(_decode_other(encoded), choose_box),
    )


def _turned_jpeg_crop(
    encoded: tf.Tensor, choose_box: ChooseBox, short_side: int
) -> tf.Tensor:
    shape, power = _decoded_size(encoded, short_side)
    turn = orientation(encoded)
    shape = tf.cond(is_transposed(turn), lambda: shape[::-1], lambda: shape)
    box = stored_box(choose_box(shape), shape, turn)
    return turn_upright(_decode_box(encoded, box, power), turn)


def _decoded_size(encoded: tf.Tensor, short_side: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Height and width (2,) of a JPEG, decoded at 1 / 2**power; and the power."""
    shape = tf.io.extract_jpeg_shape(encoded)[:2]
    enough = short_side * tf.constant((2, 4, 8))
    power = tf.math.count_nonzero(tf.reduce_min(shape) >= enough, dtype=tf.int32)
    return -(-shape // tf.bitwise.left_shift(1, power)), power


def _decode_box(encoded: tf.Tensor, box: tf.Tensor, power: tf.Tensor) -> tf.Tensor:
    def at(ratio: int) -> Callable[[], tf.Tensor]:
        return lambda: tf.image.decode_and_crop_jpeg(
            encoded, box, channels=3, ratio=ratio
        )

    return tf.switch_case(power, [at(1), at(2), at(4), at(8)])


def _crop(image: tf.Tensor, choose_box: ChooseBox) -> tf.Tensor:
    box = choose_box(tf.shape(image)[:2])
    return tf.slice(image, tf.concat([box[:2], [0]], 0), tf.concat([box[2:], [3]], 0))


def _decode_other(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes what is not a JPEG."""

    def starts_with(signature: bytes) -> tf.Tensor:
        return tf.strings.substr(encoded, 0, len(signature)) == signature

    return tf.case(
        [
            (starts_with(b"\x89PNG"), lambda: _decode_png(encoded)),
            (starts_with(b"BM"), lambda: _decode_bmp(encoded)),
        ],
        default=lambda: tf.io.decode_image(
            encoded, channels=3, expand_animations=False
        ),
    )


def _decode_png(encoded: tf.Tensor) -> tf.Tensor:
    # Not channels=4: of a 1-bit image that makes an alpha of 1.
    image = tf.io.decode_png(encoded)
    shape = tf.shape(image)
    has_alpha = shape[2] % 2 == 0

    def on_white() -> tf.Tensor:
        opacity = tf.cast(image[..., -1:], tf.float32) / 255
        colours = tf.cast(image[..., :-1], tf.float32)
        return as_uint8(255 + opacity * (colours - 255))

    pixels = tf.cond(has_alpha, on_white, lambda: image)
    pixels = tf.broadcast_to(pixels, (shape[0], shape[1], 3))
    return turn_upright(pixels, orientation(encoded))


def _decode_bmp(encoded: tf.Tensor) -> tf.Tensor:
    image = tf.io.decode_bmp(encoded)

    def with_palette() -> tf.Tensor:
        # TensorFlow gives the indices. The palette lies between headers and pixels.
        starts = tf.io.decode_raw(tf.strings.substr(encoded, 10, 8), tf.int32)
        start = 14 + starts[1]
        colours = tf.strings.substr(encoded, start, starts[0] - start)
        palette = tf.reshape(tf.io.decode_raw(colours, tf.uint8), (-1, 4))
        return tf.gather(palette[:, 2::-1], tf.cast(image[..., 0], tf.int32))

    # The fourth channel is mostly not set, and then it is 0.
    return tf.cond(tf.shape(image)[2] == 1, with_palette, lambda: image[..., :3])
