"""Which way up a camera says its image is: the EXIF orientation.

All of it is TensorFlow operations: it runs in the threads that decode, and in a
SavedModel, where there is no Python.
"""

from collections.abc import Callable

import tensorflow as tf

_ORIENTATION_TAG = 0x0112
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# JPEG markers.
_FILL, _APP1 = 0xFF, 0xE1
# Those after which no EXIF can come: start of scan, end of image.
_IMAGE_MARKERS = (0xDA, 0xD9)


def exif_orientation(encoded: tf.Tensor) -> tf.Tensor:
    """Reads the orientation of a JPEG or PNG file.

    Args:
        encoded: Scalar string, the bytes of the file.

    Returns:
        Scalar int32, 1 to 8 as in the EXIF standard (CIPA DC-008, tag 274); 1, upright,
        where the file says nothing, is of another kind, or its EXIF is broken.
    """
    is_png = tf.strings.substr(encoded, 0, len(_PNG_SIGNATURE)) == _PNG_SIGNATURE
    start, end = tf.cond(
        is_png, lambda: _exif_in_png(encoded), lambda: _exif_in_jpeg(encoded)
    )
    tiff = tf.strings.substr(encoded, start, tf.maximum(end - start, 0))
    return _orientation_in_tiff(tf.io.decode_raw(tiff, tf.uint8))


def _exif_in_png(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Start and end of the EXIF data, which have the form of a TIFF file."""

    def step(start: tf.Tensor, end: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        chunk = _read(encoded, start, 8)
        is_exif = tf.reduce_all(chunk[4:] == tf.constant(list(b"eXIf"), tf.uint8))
        size = _integer(chunk[:4], False)
        # Past header and checksum, to the next one.
        return (
            tf.where(is_exif, start + 8, start + size + 12),
            tf.where(is_exif, start + 8 + size, end),
        )

    return _first_block(step, len(_PNG_SIGNATURE), 8, encoded)


def _exif_in_jpeg(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Start and end of the EXIF data, which have the form of a TIFF file."""

    def step(start: tf.Tensor, end: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        segment = _read(encoded, start, 10)
        marker = segment[1]
        is_last = (segment[0] != 0xFF) | tf.reduce_any(marker == _IMAGE_MARKERS)
        size = _integer(segment[2:4], False)
        is_exif = tf.reduce_all(segment[4:] == tf.constant(list(b"Exif\0\0"), tf.uint8))
        is_exif &= (marker == _APP1) & (size >= 8) & ~is_last
        after = start + tf.where(marker == _FILL, tf.constant(1, tf.int64), size + 2)
        return (
            tf.where(is_exif, start + 10, tf.where(is_last, _length(encoded), after)),
            tf.where(is_exif, start + 2 + size, end),
        )

    return _first_block(step, 2, 4, encoded)


def _first_block(
    step: Callable[..., tuple[tf.Tensor, tf.Tensor]],
    start: int,
    num_bytes: int,
    encoded: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Goes from block to block until `step` sets an end; (length, 0) without one.

    A block that has not `num_bytes` bytes left for its header is none.
    """
    length = _length(encoded)
    start, end = tf.while_loop(
        lambda start, end: (end == 0) & (start + num_bytes <= length),
        step,
        (tf.constant(start, tf.int64), tf.constant(0, tf.int64)),
    )
    return tf.minimum(start, length), end


def _length(encoded: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.strings.length(encoded), tf.int64)


def _read(encoded: tf.Tensor, start: tf.Tensor, count: int) -> tf.Tensor:
    """`(count,)` uint8 bytes from `start` on, zeros beyond the end."""
    text = tf.strings.substr(encoded, start, count)
    text = tf.strings.substr(text + b"\0" * count, 0, count)
    return tf.ensure_shape(tf.io.decode_raw(text, tf.uint8), (count,))


def _orientation_in_tiff(tiff: tf.Tensor) -> tf.Tensor:
    length = tf.size(tiff, tf.int64)

    def in_directory() -> tf.Tensor:
        is_little = tf.reduce_all(tiff[:2] == tf.constant(list(b"II"), tf.uint8))
        start = _integer(tf.slice(tiff, [4], [4]), is_little) + 2
        return tf.cond(
            start <= length,
            lambda: _orientation_in_directory(tiff, start, is_little),
            lambda: tf.constant(1),
        )

    return tf.cond(length >= 8, in_directory, lambda: tf.constant(1))


def _orientation_in_directory(
    tiff: tf.Tensor, start: tf.Tensor, is_little: tf.Tensor
) -> tf.Tensor:
    """Entries of 12 bytes, of which the first two are the tag, 8 and 9 the value."""
    count = _integer(tf.slice(tiff, [start - 2], [2]), is_little)
    count = tf.minimum(count, (tf.size(tiff, tf.int64) - start) // 12)
    entries = tf.reshape(tiff[start : start + 12 * count], (-1, 12))
    is_wanted = _integer(entries[:, :2], is_little) == _ORIENTATION_TAG
    values = tf.boolean_mask(_integer(entries[:, 8:10], is_little), is_wanted)
    value = tf.concat([values, [1]], 0)[0]
    is_valid = (value >= 1) & (value <= 8)
    return tf.cast(tf.where(is_valid, value, tf.constant(1, tf.int64)), tf.int32)


def _integer(digits: tf.Tensor, is_little: tf.Tensor | bool) -> tf.Tensor:
    """`(..., n)` uint8 digits to the base 256 as int64, the last first if little."""
    digits = tf.cast(digits, tf.int64)
    weights = [256**i for i in range(digits.shape[-1])]
    weights = tf.where(
        is_little, tf.constant(weights, tf.int64), tf.constant(weights[::-1], tf.int64)
    )
    return tf.reduce_sum(digits * weights, -1)


def is_plain_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    """Whether a file is a JPEG that surely has no EXIF.

    Most files without EXIF have one JFIF header of 18 bytes, then the quantisation
    tables. They are spared the search for one.

    Args:
        encoded: Scalar string, the bytes of a file.

    Returns:
        Scalar boolean; False means that it is not known.
    """
    # A position beyond the end would be an error.
    second = tf.minimum(20, tf.strings.length(encoded))
    return tf.logical_and(
        tf.strings.substr(encoded, 0, 6) == b"\xff\xd8\xff\xe0\x00\x10",
        tf.strings.substr(encoded, second, 2) == b"\xff\xdb",
    )


def orientation(encoded: tf.Tensor) -> tf.Tensor:
    """`exif_orientation`, fast for a JPEG without EXIF.

    Args:
        encoded: Scalar string, the bytes of a file.

    Returns:
        Scalar int32.
    """
    return tf.cond(
        is_plain_jpeg(encoded),
        lambda: tf.constant(1),
        lambda: exif_orientation(encoded),
    )


def turn_upright(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turns and mirrors an image as its orientation says.

    Args:
        image: `(height, width, channels)` image as it is stored.
        orientation: Scalar int32 from 1 to 8.

    Returns:
        Upright image; height and width change places from 5 on.
    """
    return tf.cond(orientation == 1, lambda: image, lambda: _turn(image, orientation))


def _turn(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    transposed, flips_rows, flips_columns = _steps(orientation)
    image = tf.cond(
        transposed, lambda: tf.transpose(image, (1, 0, 2)), lambda: tf.identity(image)
    )
    return tf.reverse(image, tf.where(tf.stack([flips_rows, flips_columns]))[:, 0])


def stored_box(box: tf.Tensor, shape: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Where a box of the upright image lies in the image as it is stored.

    Args:
        box: `(4,)` int32 top, left, height, width in the upright image.
        shape: `(2,)` int32 height and width of the upright image.
        orientation: Scalar int32 from 1 to 8.

    Returns:
        `(4,)` int32 top, left, height, width in the stored image.
    """

    def turned() -> tf.Tensor:
        transposed, flips_rows, flips_columns = _steps(orientation)
        corner, size = box[:2], box[2:]
        flips = tf.stack([flips_rows, flips_columns])
        corner = tf.where(flips, shape - corner - size, corner)
        order = tf.where(transposed, [1, 0], [0, 1])
        return tf.concat([tf.gather(corner, order), tf.gather(size, order)], 0)

    return tf.cond(orientation == 1, lambda: box, turned)


def is_transposed(orientation: tf.Tensor) -> tf.Tensor:
    """Whether height and width change places.

    Args:
        orientation: Scalar int32 from 1 to 8.
    """
    return orientation >= 5


def _steps(orientation: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Upright is the stored image transposed, then rows and columns reversed."""

    def is_one_of(*values: int) -> tf.Tensor:
        return tf.reduce_any(orientation == tf.constant(values))

    return is_transposed(orientation), is_one_of(3, 4, 7, 8), is_one_of(2, 3, 6, 7)
