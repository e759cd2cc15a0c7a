"""Image files of every kind come out as RGB, upright and as evaluation wants them.

The reference is Pillow 13.0.0.
"""

import io
import struct

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import tensorflow as tf

from keras_ccp.images import decode_crop
from keras_ccp.pipeline import decode_center_crop, decode_image, orientation

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
}


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


@pytest.mark.parametrize(
    ("mode", "kind"),
    [(mode, "PNG") for mode in ("RGBA", "LA", "PA", "tRNS", "grey tRNS")]
    + [("RGBA", "WEBP")],
)
def test_transparent_pixels_lie_on_white(mode, kind):
    encoded = transparent(mode, kind)
    rgba = PIL.Image.open(io.BytesIO(encoded)).convert("RGBA")
    assert np.asarray(rgba)[..., 3].min() < 200
    white = PIL.Image.new("RGBA", rgba.size, "white")
    expected = PIL.Image.alpha_composite(white, rgba).convert("RGB")
    assert distance(decode_image(encoded), np.asarray(expected)) <= 1
    if is_portable_too(mode, kind):
        assert distance(decode_image(encoded, portable=True), np.asarray(expected)) <= 1


@pytest.mark.parametrize("kind", sorted(set(SAME) - {"palette bmp"}))
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
