"""Which way up a camera says its image is: the EXIF orientation."""

import struct

import numpy as np
import tensorflow as tf

_ORIENTATION_TAG = 0x0112
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# JPEG markers after which no EXIF can come: start of scan, end of image.
_IMAGE_MARKERS = (0xDA, 0xD9)


def exif_orientation(encoded: bytes) -> int:
    """Reads the orientation of a JPEG or PNG file.

    Args:
        encoded: Bytes of the file.

    Returns:
        1 to 8 as in the EXIF standard (CIPA DC-008, tag 274); 1, upright, where the
        file says nothing, is of another kind, or its EXIF is broken.
    """
    try:
        return _orientation_in_tiff(_exif_block(encoded))
    except (struct.error, IndexError):
        return 1


def _exif_block(encoded: bytes) -> bytes:
    """The EXIF data of a file, which have the form of a TIFF file."""
    if encoded.startswith(_PNG_SIGNATURE):
        start = len(_PNG_SIGNATURE)
        while True:
            length, kind = struct.unpack_from(">I4s", encoded, start)
            if kind == b"eXIf":
                return encoded[start + 8 : start + 8 + length]
            start += length + 12
    start = 2
    while encoded[start] == 0xFF and encoded[start + 1] not in _IMAGE_MARKERS:
        marker, length = struct.unpack_from(">xBH", encoded, start)
        if marker == 0xFF:  # a fill byte
            start += 1
            continue
        segment = encoded[start + 4 : start + 2 + length]
        if marker == 0xE1 and segment.startswith(b"Exif\0\0"):
            return segment[6:]
        start += 2 + length
    return b""


def _orientation_in_tiff(tiff: bytes) -> int:
    order = "<" if tiff[:2] == b"II" else ">"
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    (count,) = struct.unpack_from(order + "H", tiff, start)
    for i in range(count):
        tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, start + 2 + 12 * i)
        if tag == _ORIENTATION_TAG:
            return value if 1 <= value <= 8 else 1
    return 1


def is_plain_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    """Whether a file is a JPEG that surely has no EXIF.

    Most files without EXIF have one JFIF header of 18 bytes, then the quantisation
    tables. They never go to Python, which takes 30 us or so.

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
    """`exif_orientation` inside a graph.

    Args:
        encoded: Scalar string, the bytes of a file.

    Returns:
        Scalar int32.
    """
    return tf.cond(
        is_plain_jpeg(encoded), lambda: tf.constant(1), lambda: _in_python(encoded)
    )


def _in_python(encoded: tf.Tensor) -> tf.Tensor:
    found = tf.numpy_function(
        lambda files: np.int32(exif_orientation(files[0])),
        [encoded[None]],
        tf.int32,
        stateful=False,
    )
    return tf.ensure_shape(found, ())


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
