"""The images of each side of the split, read once, and what is wrong with them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from keras_ccp.app.doctor.findings import Finding, error, note, warning
from keras_ccp.app.images import look_at, relative
from keras_ccp.datasets import Dataset
from keras_ccp.images import decode_image, orientation, read_file

# One column more than rows: dHash compares neighbours in a row.
_THUMBNAIL = (8, 9)
# Of 255, within each channel: an image of one colour has no more, whatever its codec.
_MAX_SPREAD = 4
# Of the side to which images are brought: below it most pixels are made up.
_LEAST_SIDE = 1 / 4
_FORMATS = {
    "CMYK": "converted to RGB without a colour profile",
    "16-bit": "the upper 8 bits of each channel are taken",
    "EXIF orientation": "turned upright",
    "GIF": "the first frame is taken",
}
# Digest of the pixels, thumbnail, height and width, of one colour, unusual formats.
_Look = tuple[int, np.ndarray, tuple[int, int], bool, list[str]]


class Part:
    """The n images of one side of the split, and what reading each once has shown.

    Attributes:
        digests: `(n,)` uint64, equal where all pixels are.
        thumbnails: `(n, 8, 9, 3)` uint8, means of the pixels.
        sizes: `(n, 2)` ints, height and width in pixels.
        is_uniform: `(n,)` booleans: all pixels have one colour.
        is_readable: `(n,)` booleans.
        formats: rows of the images that are stored in an unusual way, by that way.
        failures: reason by row, of the images that cannot be read.
    """

    def __init__(self, name: str, dataset: Dataset, root: Path, progress: bool = False):
        self.name, self.dataset, self.root = name, dataset, root
        self.is_test = name != "training"
        count = len(dataset)
        self.digests = np.zeros(count, np.uint64)
        self.thumbnails = np.zeros((count, *_THUMBNAIL, 3), np.uint8)
        self.sizes, self.is_uniform = np.zeros((count, 2), int), np.zeros(count, bool)
        self.is_readable = np.ones(count, bool)
        self.formats, self.failures = {}, {}
        scale = (0.0, 255.0)
        if not dataset.is_encoded and dataset.images.dtype != np.uint8:
            # Mostly 0..1, -1..1 or 0..255.
            low = np.floor(dataset.images.min())
            scale = low, max(np.ceil(dataset.images.max()) - low, 1.0)
        looks = look_at(
            lambda image: _look(image, *scale),
            dataset.images,
            f"reading {name} images",
            progress,
        )
        for row, (look, why) in enumerate(looks):
            if why:
                self.failures[row], self.is_readable[row] = why, False
                continue
            self.digests[row], self.thumbnails[row], self.sizes[row] = look[:3]
            self.is_uniform[row] = look[3]
            for format_name in look[4]:
                self.formats.setdefault(format_name, []).append(row)

    def class_of(self, row: int) -> str:
        """Name of the class of an image."""
        return self.dataset.class_names[self.dataset.labels[row]]

    def place(self, row: int) -> str:
        """Where an image is: its path, or its number within its class."""
        image = self.dataset.images[row]
        if isinstance(image, str):
            return relative(image, self.root)
        labels = self.dataset.labels
        number = int((labels[:row] == labels[row]).sum())
        return f"image {number} (from 0) of class {self.class_of(row)!r}"


def _look(image: str | bytes | np.ndarray, low: float, span: float) -> _Look:
    pixels, formats = image, []
    if not isinstance(image, np.ndarray):
        content = read_file(image) if isinstance(image, str) else image
        pixels, turn = (tensor.numpy() for tensor in _decode(content))
        formats = _formats(content, turn)
    colours = pixels
    if pixels.dtype != np.uint8:
        colours = (pixels.astype(np.float32) - low) * (255.0 / span)
    if pixels.shape[-1] != 3:
        colours = np.repeat(colours.mean(-1, keepdims=True), 3, axis=-1)
    thumbnail = tf.round(tf.image.resize(colours, _THUMBNAIL, method="area")).numpy()
    is_uniform = bool(np.ptp(colours, axis=(0, 1)).max() <= _MAX_SPREAD)
    return _digest(pixels), thumbnail, pixels.shape[:2], is_uniform, formats


@tf.function(input_signature=[tf.TensorSpec((), tf.string)])
def _decode(content: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return decode_image(content), orientation(content)


def _formats(content: bytes, turn: int) -> list[str]:
    is_jpeg, is_png = content[:2] == b"\xff\xd8", content[:4] == b"\x89PNG"
    is_in = {
        "CMYK": is_jpeg and tf.io.extract_jpeg_shape(content)[2] == 4,
        "16-bit": is_png and content[24:25] == b"\x10",  # bit depth, in its header
        "EXIF orientation": turn != 1,
        "GIF": content[:4] == b"GIF8",
    }
    return [name for name in _FORMATS if is_in[name]]


def _digest(pixels: np.ndarray) -> int:
    # With the shape: one colour has the same bytes upright and lying.
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(pixels))
    return int.from_bytes(digest.digest(), "little")


def image_findings(parts: Sequence[Part], skips: bool) -> list[Finding]:
    """Images that are unreadable, unusually stored, tiny or of one colour.

    `skips` tells whether the run leaves out images that cannot be read.
    """
    failures, lost, formats, tiny, uniform = [], [], {}, [], []
    for part in parts:
        dataset = part.dataset
        failures += [f"{part.place(row)}: {why}" for row, why in part.failures.items()]
        sizes = np.bincount(dataset.labels[part.is_readable], None, dataset.num_classes)
        lost += [
            repr(dataset.class_names[label]) for label in np.flatnonzero(sizes == 0)
        ]
        for name, rows in part.formats.items():
            formats.setdefault(name, []).extend(map(part.place, rows))
        if dataset.is_encoded:
            is_tiny = part.sizes.min(axis=1) < _LEAST_SIDE * dataset.size
            for row in np.flatnonzero(part.is_readable & is_tiny):
                height, width = part.sizes[row]
                tiny.append(f"{part.place(row)}: {width} x {height} pixels")
        uniform += map(part.place, np.flatnonzero(part.is_readable & part.is_uniform))
    findings = (warning if skips else error)(
        "unreadable",
        failures,
        "images cannot be read: the run "
        + ("leaves them out" if skips else "would stop there"),
        "replace them"
        + ("" if skips else ", or leave them out by `data.unreadable: skip`"),
    )
    findings += error(
        "unreadable",
        lost,
        "classes have no image that can be read, with or without `data.unreadable`",
        "replace their images, or take these classes out of the data",
    )
    for name, places in formats.items():
        what = f"{name} images: {_FORMATS[name]}"
        findings += note("formats", places, what, "none; or convert them yourself")
    findings += warning(
        "tiny images",
        tiny,
        f"a side is below a quarter of the {parts[0].dataset.size} pixels of "
        "`data.size`: most of what the model sees is made up",
        "get them in full size, leave them out, or lower `data.size`",
    )
    return findings + warning(
        "uniform images",
        uniform,
        f"images of one colour: no channel varies by more than {_MAX_SPREAD} of 255",
        "leave them out, or replace them if they were damaged on the way",
    )
