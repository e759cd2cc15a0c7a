"""What the checks of images need to know of each, from reading it once."""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_ccp.datasets import Dataset
from keras_ccp.datasets.verification import decoding_error
from keras_ccp.pipeline import decode_image, orientation

# One column more than rows: dHash compares neighbours in a row.
THUMBNAIL = (8, 9)
# Of 255, within each channel: an image of one colour has no more, whatever its codec.
MAX_SPREAD = 4
_CHUNK = 512
_FORMATS = (
    ("CMYK", "converted to RGB without a colour profile"),
    ("16-bit", "the upper 8 bits of each channel are taken"),
    ("EXIF orientation", "turned upright"),
    ("GIF", "the first frame is taken"),
)


class ImageFacts(NamedTuple):
    """Facts of n images.

    Args:
        digests: `(n,)` uint64, equal where all pixels are; 0 where there are none.
        thumbnails: `(n, 8, 9, 3)` uint8, means of the pixels.
        sizes: `(n, 2)` ints, height and width in pixels.
        is_uniform: `(n,)` booleans: all pixels have one colour.
        formats: rows of the images that are stored in an unusual way, by that way.
        failures: reason by row, of the images that cannot be read.
    """

    digests: np.ndarray
    thumbnails: np.ndarray
    sizes: np.ndarray
    is_uniform: np.ndarray
    formats: dict[str, list[int]]
    failures: dict[int, str]


class _Look(NamedTuple):
    digest: int
    thumbnail: np.ndarray
    size: tuple[int, int]
    is_uniform: bool
    formats: tuple[str, ...] = ()


def format_note(name: str) -> str:
    """What is done to images of an unusual format.

    Args:
        name: as in `ImageFacts.formats`.
    """
    return dict(_FORMATS)[name]


def read_images(dataset: Dataset, advance: Callable[[], None]) -> ImageFacts:
    """Reads and decodes each image once, on all cores, and keeps none.

    Args:
        dataset: the images.
        advance: called after each of them.
    """
    count = len(dataset)
    digests = np.zeros(count, np.uint64)
    thumbnails = np.zeros((count, *THUMBNAIL, 3), np.uint8)
    sizes, is_uniform = np.zeros((count, 2), np.int64), np.zeros(count, bool)
    formats, failures = {}, {}
    looks = _encoded_looks if dataset.is_encoded else _array_looks
    for row, look in enumerate(looks(dataset.images)):
        advance()
        if isinstance(look, str):
            failures[row] = look
            continue
        digests[row], thumbnails[row] = look.digest, look.thumbnail
        sizes[row], is_uniform[row] = look.size, look.is_uniform
        for name in look.formats:
            formats.setdefault(name, []).append(row)
    return ImageFacts(digests, thumbnails, sizes, is_uniform, formats, failures)


def _encoded_looks(images: np.ndarray) -> Iterator[_Look | str]:
    # A thread for each core: TensorFlow lets go of the interpreter while it decodes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(_look, images)


def _look(image: str | bytes) -> _Look | str:
    """Facts of an encoded image, or why it cannot be read."""
    try:
        content = Path(image).read_bytes() if isinstance(image, str) else image
        with tf.device("CPU:0"):
            pixels, thumbnail, spread, turn, channels = _decode(content)
    except OSError as error:
        return error.strerror or type(error).__name__
    except tf.errors.OpError:
        return decoding_error(image) or "it cannot be decoded"
    is_png = content.startswith(b"\x89PNG")
    is_in = {
        "CMYK": channels == 4,
        "16-bit": is_png and content[24:25] == b"\x10",  # bit depth, in its header
        "EXIF orientation": turn != 1,
        "GIF": content.startswith(b"GIF8"),
    }
    names = tuple(name for name, _ in _FORMATS if is_in[name])
    pixels = pixels.numpy()
    is_uniform = bool(spread <= MAX_SPREAD)
    return _Look(
        _digest(pixels), thumbnail.numpy(), pixels.shape[:2], is_uniform, names
    )


@tf.function(input_signature=[tf.TensorSpec((), tf.string)])
def _decode(content: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Pixels, thumbnail, spread, EXIF orientation, and channels of a JPEG or else 0."""
    pixels = decode_image(content)
    channels = tf.cond(
        tf.io.is_jpeg(content),
        lambda: tf.io.extract_jpeg_shape(content)[2],
        lambda: tf.constant(0),
    )
    thumbnail, spread = _thumbnails(pixels[None])[0], _spreads(pixels[None])[0]
    return pixels, thumbnail, spread, orientation(content), channels


def _array_looks(images: np.ndarray) -> Iterator[_Look]:
    low, span = 0.0, 255.0
    if images.dtype != np.uint8:  # mostly 0..1, -1..1 or 0..255
        low = np.floor(images.min())
        span = max(np.ceil(images.max()) - low, 1.0)
    for start in range(0, len(images), _CHUNK):
        chunk = images[start : start + _CHUNK]
        pixels = (np.asarray(chunk, np.float32) - low) * (255.0 / span)
        if pixels.shape[-1] != 3:
            pixels = np.repeat(pixels.mean(-1, keepdims=True), 3, axis=-1)
        pixels = tf.constant(pixels)
        thumbnails = _thumbnails(pixels).numpy()
        is_uniform = (_spreads(pixels) <= MAX_SPREAD).numpy()
        for image, *facts in zip(chunk, thumbnails, is_uniform, strict=True):
            yield _Look(_digest(image), facts[0], image.shape[:2], bool(facts[1]))


def _thumbnails(pixels: tf.Tensor) -> tf.Tensor:
    means = tf.image.resize(pixels, THUMBNAIL, method="area")
    return tf.cast(tf.round(means), tf.uint8)


def _spreads(pixels: tf.Tensor) -> tf.Tensor:
    """Of each image, by how much the channel varies that varies most."""
    axes = (1, 2)
    return tf.reduce_max(tf.reduce_max(pixels, axes) - tf.reduce_min(pixels, axes), -1)


def _digest(pixels: np.ndarray) -> int:
    # With the shape: one colour has the same bytes upright and lying.
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(pixels))
    return int.from_bytes(digest.digest(), "little") or 1
