"""Image files of every kind come out as RGB, upright and as evaluation wants them.

The reference is Pillow 13.0.0.
"""

import faulthandler
import io
import os
import re
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import tensorflow as tf

from keras_ccp import images
from keras_ccp.datasets import Dataset, verify
from keras_ccp.datasets.readers import decoding_error
from keras_ccp.images import BrokenImage, decode_crop, read_file
from keras_ccp.pipeline import (
    EvaluationData,
    balanced_batches,
    decode_center_crop,
    decode_image,
    mlrc_augmentation,
    orientation,
)

# Largest difference of libjpeg's fast transform to its accurate one in these pictures.
FAST_DCT = 8


def picture(height=48, width=64, channels=3, seed=0):
    """A smooth picture without any symmetry."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, channels), np.uint8)
    planes = [
        PIL.Image.fromarray(coarse[..., c]).resize((width, height), PIL.Image.BICUBIC)
        for c in range(channels)
    ]
    return PIL.Image.merge({1: "L", 3: "RGB", 4: "RGBA"}[channels], planes)


def encode(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    if kind == "JPEG":
        options = {"quality": 95, **options}
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation):
    data = PIL.Image.Exif()
    data[0x0112] = orientation
    return data


def reference(encoded):
    return np.asarray(PIL.Image.open(io.BytesIO(encoded)).convert("RGB"))


def distance(a, b):
    assert a.shape == b.shape
    return np.abs(np.asarray(a, int) - np.asarray(b, int)).max()


SECOND = {"save_all": True, "append_images": [picture(seed=1)]}
SAME = {
    "jpeg": lambda: encode(picture()),
    "grey jpeg": lambda: encode(picture(channels=1)),
    "progressive jpeg": lambda: encode(picture(), progressive=True),
    "icc jpeg": lambda: encode(picture(), icc_profile=b"profile" * 20_000),
    "png": lambda: encode(picture(), "PNG"),
    "grey png": lambda: encode(picture(channels=1), "PNG"),
    "black-and-white png": lambda: encode(picture().convert("1"), "PNG"),
    "2-colour png": lambda: encode(picture().quantize(2), "PNG"),
    "palette png": lambda: encode(picture().quantize(32), "PNG"),
    "gif": lambda: encode(picture().quantize(32), "GIF"),
    "bmp": lambda: encode(picture(), "BMP"),
    "grey bmp": lambda: encode(picture(channels=1), "BMP"),
    "palette bmp": lambda: encode(picture().quantize(32), "BMP"),
    "webp": lambda: encode(picture(), "WEBP", lossless=True),
    "animated gif": lambda: encode(picture().quantize(32), "GIF", **SECOND),
    "animated webp": lambda: encode(picture(), "WEBP", lossless=True, **SECOND),
}
# Of these the graph shows another picture, as the docstring says, or none at all.
NOT_PORTABLE = {"palette bmp", "animated webp"}


@pytest.mark.parametrize("kind", SAME)
def test_decoded_as_pillow_does(kind):
    encoded = SAME[kind]()
    image = decode_image(encoded)
    assert image.dtype == tf.uint8
    assert distance(image, reference(encoded)) == 0


def test_cmyk_jpeg():
    encoded = encode(picture().convert("CMYK"))
    # Converted one by one, 255 - c scaled by 255 - k, with another rounding.
    assert distance(decode_image(encoded), reference(encoded)) <= 2


@pytest.mark.parametrize("shape", [(6, 7), (6, 7, 3)])
def test_16_bit_png_keeps_the_upper_byte(shape):
    values = np.random.default_rng(0).integers(0, 2**16, shape).astype(np.uint16)
    rgb = np.broadcast_to(values if len(shape) == 3 else values[..., None], (6, 7, 3))
    encoded = tf.io.encode_png(values.reshape(6, 7, -1)).numpy()
    assert distance(decode_image(encoded), rgb >> 8) == 0
    if len(shape) == 2:
        encoded = encode(PIL.Image.fromarray(values), "PNG")
        assert distance(decode_image(encoded), rgb >> 8) == 0


def transparent(mode, kind):
    image = picture(channels=4)
    options = {"lossless": True} if kind == "WEBP" else {}
    if mode == "PA":
        image = image.quantize(32, method=PIL.Image.Quantize.FASTOCTREE)
    elif mode == "LA":
        image = image.convert("LA")
    elif mode == "tRNS":
        image = PIL.Image.new("RGB", (6, 5), "blue")
        image.putpixel((2, 3), (255, 0, 0))
        options = {"transparency": (255, 0, 0)}
    elif mode == "grey tRNS":
        image = PIL.Image.new("L", (6, 5), 7)
        image.putpixel((2, 3), 9)
        options = {"transparency": 9}
    return encode(image, kind, **options)


def is_portable_too(mode, kind):
    return kind == "PNG" and "tRNS" not in mode


TRANSPARENT = [(mode, "PNG") for mode in ("RGBA", "LA", "PA", "tRNS", "grey tRNS")]
TRANSPARENT += [("RGBA", "WEBP")]


@pytest.mark.parametrize(("mode", "kind"), TRANSPARENT)
def test_transparent_pixels_lie_on_white(mode, kind):
    encoded = transparent(mode, kind)
    rgba = PIL.Image.open(io.BytesIO(encoded)).convert("RGBA")
    assert np.asarray(rgba)[..., 3].min() < 200
    white = PIL.Image.new("RGBA", rgba.size, "white")
    expected = PIL.Image.alpha_composite(white, rgba).convert("RGB")
    assert distance(decode_image(encoded), np.asarray(expected)) <= 1
    if is_portable_too(mode, kind):
        assert distance(decode_image(encoded, portable=True), np.asarray(expected)) <= 1


def test_a_large_image_is_converted_in_parts(monkeypatch):
    encoded = transparent("RGBA", "PNG")
    whole = decode_image(encoded).numpy()
    monkeypatch.setattr(images, "_STRIP", 5 * 64)  # five rows of 48, the last three
    assert distance(decode_image(encoded), whole) == 0


@pytest.mark.parametrize("kind", sorted(set(SAME) - NOT_PORTABLE))
def test_portable_decoding_gives_the_same(kind):
    encoded = SAME[kind]()
    assert distance(decode_image(encoded, portable=True), reference(encoded)) == 0


# ==== EXIF ====


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_every_orientation_comes_out_upright(kind, turn):
    options = {"lossless": True} if kind == "WEBP" else {}
    encoded = encode(picture(), kind, exif=exif(turn), **options)
    assert orientation(encoded) == (turn if kind == "JPEG" else 1)
    upright = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(encoded)))
    upright = np.asarray(upright)
    assert distance(decode_image(encoded), upright) == 0

    # The boxes of a turned JPEG lie in the image as it is stored: whole, they agree.
    crop = decode_crop(tf.constant(encoded), lambda shape: [0, 0, *shape], 48)
    assert distance(crop, upright) <= (FAST_DCT if kind == "JPEG" else 0)


def jpeg_with(segment):
    encoded = encode(picture())
    return encoded[:2] + segment + encoded[2:]


def app1(tiff):
    body = b"Exif\0\0" + tiff
    return b"\xff\xe1" + struct.pack(">H", 2 + len(body)) + body


ENTRY = {
    order: struct.pack(order + "HIHHHIHH", 42, 8, 1, 0x0112, 3, 1, 6, 0)
    for order in "<>"
}


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        (jpeg_with(app1(b"II" + ENTRY["<"])), 6),
        (jpeg_with(app1(b"MM" + ENTRY[">"])), 6),
        # XMP has the same marker; fill bytes may come before a marker.
        (jpeg_with(b"\xff\xe1\x00\x08http\0\0\xff\xff" + app1(b"II" + ENTRY["<"])), 6),
        (jpeg_with(app1(b"II" + ENTRY["<"][:10])), 1),
        (jpeg_with(app1(b"II*\0\xff\xff\xff\xff")), 1),
        (jpeg_with(app1(b"")), 1),
        (jpeg_with(app1(b"II" + ENTRY["<"].replace(b"\6\0", b"\11\0"))), 1),
        (encode(picture()), 1),
        (encode(picture(), "PNG"), 1),
        (encode(picture())[:3], 1),
        (b"\xff\xd8", 1),
        (b"", 1),
    ],
)
def test_exif_orientation(encoded, expected):
    assert orientation(encoded) == expected


# ==== Crops ====


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_crop_is_the_part_of_the_image(kind):
    encoded = encode(picture(40, 56), kind)
    crop = decode_crop(tf.constant(encoded), lambda _: [8, 3, 20, 30], short_side=40)
    expected = reference(encoded)[8:28, 3:33]
    assert distance(crop, expected) <= (FAST_DCT if kind == "JPEG" else 0)


@pytest.mark.parametrize(
    ("short", "ratio"), [(31, 1), (32, 2), (63, 2), (64, 4), (127, 4), (150, 8)]
)
def test_large_jpegs_are_decoded_at_a_part_of_their_size(short, ratio):
    image = picture(short, 201)
    seen = []

    def whole(shape):
        seen.extend(shape.numpy().tolist())
        return tf.concat([[0, 0], shape], 0)

    crop = decode_crop(tf.constant(encode(image)), whole, short_side=16)
    # Rounded up, as libjpeg does.
    assert seen == [-(-short // ratio), -(-201 // ratio)]
    small = image.reduce(ratio)
    assert np.abs(np.asarray(small, int) - np.asarray(crop, int)).mean() < 3


# ==== Evaluation ====


@pytest.mark.parametrize(
    ("height", "width"),
    [(64, 64), (50, 91), (91, 50), (25, 40), (17, 120), (33, 32), (400, 500)],
)
def test_evaluation_resize_is_that_of_torchvision(height, width):
    size, short_side = 28, 32
    encoded = encode(picture(height, width), "PNG")
    # Resize(32): the long side is cut to an int. CenterCrop(28): offset rounded.
    scale = short_side / min(height, width)
    resized = [int(scale * width + 1e-9), int(scale * height + 1e-9)]
    image = PIL.Image.open(io.BytesIO(encoded)).resize(resized, PIL.Image.BILINEAR)
    left, top = (round((side - size) / 2) for side in resized)
    expected = np.asarray(image.crop((left, top, left + size, top + size)))
    found = decode_center_crop(tf.constant(encoded), size, short_side)
    assert found.shape == (size, size, 3) and found.dtype == tf.uint8
    # Pillow rounds to 8 bits between rows and columns.
    assert distance(found, expected) <= 1


# ==== Broken files ====


@pytest.mark.parametrize(
    "encoded",
    [
        encode(picture())[:-200],
        encode(picture())[:100],
        encode(picture(), "PNG")[:-200],
        encode(picture(), "BMP")[:-200],
        encode(picture().quantize(8), "BMP")[:60],
        b"",
        b"\xff\xd8\xff",
        b"no image",
    ],
)
def test_broken_files_are_errors(encoded):
    with pytest.raises(tf.errors.InvalidArgumentError):
        decode_image(tf.constant(encoded))
    with pytest.raises(tf.errors.InvalidArgumentError):
        decode_crop(tf.constant(encoded), lambda _: [46, 62, 2, 2], short_side=48)


# ==== Files that are too large, and what is no file ====


def claiming(kind, width, height):
    """A small file whose header says that its picture is large."""
    encoded = bytearray(encode(picture(), kind, lossless=True))
    if kind == "PNG":
        encoded[16:24] = struct.pack(">II", width, height)
        encoded[29:33] = struct.pack(">I", zlib.crc32(encoded[12:29]))
    elif kind == "WEBP":  # two times 14 bits, then a flag and a version of 0
        start = encoded.index(b"VP8L") + 9
        encoded[start : start + 4] = struct.pack("<I", width - 1 | height - 1 << 14)
    elif kind == "BMP":
        encoded[18:26] = struct.pack("<II", width, height)
    elif kind == "GIF":
        encoded[6:10] = struct.pack("<HH", width, height)
    else:
        start = encoded.index(b"\xff\xc0") + 5
        encoded[start : start + 4] = struct.pack(">HH", height, width)
    return bytes(encoded)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "WEBP"])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(16_383, 16_383), (8_661, 8_661)])
def test_bombs_are_refused_before_they_are_decoded(kind, size):
    encoded = claiming(kind, *size)
    reason = decoding_error(encoded)
    assert re.search("1 to 75,000,000 pixels|exceeds limit of 178956970", reason)
    sound = encode(picture())
    dataset = Dataset([sound, sound, sound, encoded], [0, 0, 1, 1])
    for augment in (None, mlrc_augmentation(8)):
        batches = balanced_batches(dataset, 2, 2, seed=0, augment=augment)
        with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(reason)):
            next(iter(batches))
    if kind in ("JPEG", "PNG"):  # whose headers a graph reads before
        with pytest.raises(tf.errors.InvalidArgumentError, match="75,000,000 pixels"):
            decode_image(tf.constant(encoded), portable=True)


def test_only_regular_files_of_limited_size_are_read(tmp_path):
    (tmp_path / "root").mkdir()
    root, good = tmp_path / "root", tmp_path / "good.png"
    good.write_bytes(encode(picture(), "PNG"))
    (root / "link.png").symlink_to(good)
    (root / "good.png").write_bytes(good.read_bytes())
    os.mkfifo(root / "pipe.png")  # reading it would wait
    with (root / "huge.png").open("wb") as file:
        file.truncate(200_000_001)
    assert read_file(good) == read_file(root / "good.png", root) == good.read_bytes()
    for path, message in (
        (root / "link.png", f"outside of {root}"),
        (root / ".." / "good.png", f"outside of {root}"),
        (root / "pipe.png", "a folder, pipe or device, not a file"),
        (root, "a folder, pipe or device, not a file"),
        (root / "huge.png", "200,000,001 bytes, of 200,000,000 at most"),
    ):
        with pytest.raises(BrokenImage, match=re.escape(message) + "\nReplace the "):
            read_file(path, root)
    for path in ("/dev/zero", root / "pipe.png", root / "huge.png"):
        dataset = Dataset([good, good, good, path], [0, 0, 1, 1])
        message = f"{path}: {decoding_error(str(path))}"
        with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
            next(iter(balanced_batches(dataset, 2, 2, seed=0)))
        with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
            list(EvaluationData(dataset).batches())
        with pytest.raises(ValueError, match=re.escape(f"{path} (")):
            verify(dataset)


# ==== Ten thousand broken images ====


def mutated(encoded, rng):
    encoded = bytearray(encoded)
    place = rng.integers(3)
    if place == 2:  # a part is missing
        start, stop = sorted(rng.integers(0, len(encoded), 2))
        del encoded[start:stop]
        return bytes(encoded)
    reach = min(60, len(encoded)) if place else len(encoded)  # the header, or anywhere
    for position in rng.integers(0, reach, rng.integers(1, 6)):
        encoded[position] = rng.choice([0, 1, 128, 255, rng.integers(256)])
    return bytes(encoded)


def read_mutated_images(count=10_000):
    """Runs in a process of its own, which ends if an image takes more than 5 s."""
    spec = [tf.TensorSpec((), tf.string)]
    for_training = tf.function(
        lambda encoded: decode_crop(encoded, lambda s: tf.concat([[0, 0], s], 0), 8),
        input_signature=spec,
    )
    for_evaluation = tf.function(
        lambda encoded: decode_center_crop(encoded, 8, 9), input_signature=spec
    )
    sound = [make() for make in SAME.values()]
    sound += [transparent(*kind) for kind in TRANSPARENT]
    sound += [encode(picture(), exif=exif(6)), encode(picture(), "PNG", exif=exif(5))]
    sound += [claiming(k, 500, 333) for k in ("JPEG", "PNG", "BMP", "GIF", "WEBP")]
    rng = np.random.default_rng(0)
    read = 0
    for number in range(count):
        encoded = mutated(sound[number % len(sound)], rng)
        faulthandler.dump_traceback_later(5, exit=True)
        is_sound = decoding_error(encoded) is None
        read += is_sound
        # What verify accepts, training and evaluation read; what it refuses, neither.
        for decode in (for_training, for_evaluation) if number % 5 == 0 else ():
            try:
                decode(encoded)
            except tf.errors.InvalidArgumentError:
                assert not is_sound
            else:
                assert is_sound
    faulthandler.cancel_dump_traceback_later()
    assert count / 10 < read < count
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert gigabytes < 1, gigabytes


def test_mutated_images_neither_crash_nor_hang_nor_fill_the_memory():
    # A quarter of the 10,000 that are read by hand before a release, in 65 s.
    code = "import test_images; test_images.read_mutated_images(2_500)"
    folders = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
