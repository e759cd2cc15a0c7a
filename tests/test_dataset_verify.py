"""Images that cannot be decoded are found and named."""

import io
import re

import look_alikes
import numpy as np
import pytest

from keras_ccp import datasets
from keras_ccp.datasets import Dataset, verify

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 36, 3), np.uint8)


def encode(kind, mode="RGB", **options):
    Image = pytest.importorskip("PIL.Image", reason="writing images needs Pillow")
    if mode == "I;16":
        image = Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257)
    else:
        image = Image.fromarray(PIXELS).convert(mode)
    if options.pop("rotated", False):
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6  # orientation: turned by 90 degrees
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


# What image sets hold, and whether a file that lacks its end must be found.
FORMATS = [
    ("JPEG", {}),
    ("JPEG", {"mode": "L"}),
    ("JPEG", {"mode": "CMYK"}),
    ("JPEG", {"progressive": True}),
    ("JPEG", {"rotated": True}),
    ("PNG", {}),
    ("PNG", {"mode": "1"}),
    ("PNG", {"mode": "P"}),
    ("PNG", {"mode": "LA"}),
    ("PNG", {"mode": "RGBA"}),
    ("PNG", {"mode": "I;16"}),
    ("BMP", {}),
    ("GIF", {"mode": "P"}),
]


@pytest.mark.parametrize(("kind", "options"), FORMATS)
def test_whole_images_pass_and_truncated_ones_fail(kind, options):
    contents = encode(kind, **options)
    dataset = Dataset([contents, contents], [0, 1])
    assert verify(dataset) is dataset
    for end in (len(contents) // 4, len(contents) * 3 // 4, len(contents) - 12):
        cut = Dataset([contents, contents[:end]], [0, 1])
        with pytest.raises(ValueError, match="1 of 2 that fail: image 1"):
            verify(cut)


@pytest.fixture
def broken(tmp_path):
    """200 files of two classes; 3, 64, 65 and 199 are broken or gone."""
    root = look_alikes.write_class_folders(tmp_path / "ä b", {"a": 100, "b": 100})
    paths = [root / c / f"{i}.jpg" for c in "ab" for i in range(100)]
    whole = paths[3].read_bytes()
    paths[3].write_bytes(whole[: len(whole) // 2])
    paths[64].write_bytes(b"")
    paths[65].write_bytes(b"<html>404</html>")
    paths[199].unlink()
    return Dataset(paths, ["a"] * 100 + ["b"] * 100).with_size(64, 80)


def test_failures_are_raised_together(broken):
    with pytest.raises(ValueError) as error:
        verify(broken)
    message = str(error.value)
    way_out = 'pass on_error="skip" (in a configuration `data.unreadable: skip`)'
    assert f"{way_out}. Received: 4 of 200 that fail: " in message
    paths = [broken.images[row] for row in (3, 64, 65, 199)]
    at = [message.index(f"{path} (") for path in paths]
    assert at == sorted(at)
    assert f"{paths[3]} (No such file or directory)" in message
    assert "Unknown image file format" in message
    assert "{{" not in message
    assert "[Op:" not in message


def test_failures_are_skipped_and_logged(broken, caplog):
    kept = verify(broken, on_error="skip")
    rows = np.delete(np.arange(200), [3, 64, 65, 199])
    assert kept.images.tolist() == broken.images[rows].tolist()
    assert kept.labels.tolist() == broken.labels[rows].tolist()
    assert kept.class_names == ("a", "b")
    assert (kept.size, kept.short_side) == (64, 80)
    assert len(broken) == 200
    for row in (3, 64, 65, 199):
        name = re.escape(broken.images[row])
        assert re.search(rf"left out, cannot be decoded: {name} \(.+\)", caplog.text)
    assert len(caplog.records) == 4


def test_many_failures_are_counted_and_the_first_shown():
    dataset = Dataset([b"x"] * 300, np.arange(300) % 2)
    message = r"300 of 300 that fail: image 0 \(.*image 4 \([^)]*\), \.\.\.$"
    with pytest.raises(ValueError, match=message):
        verify(dataset)


def test_a_class_is_not_lost_quietly():
    dataset = Dataset([look_alikes.jpeg(1, 0), b"x", b"y"], ["a", "b", "a"])
    message = r"images of class 'b' \(1 such classes\): image 1"
    with pytest.raises(ValueError, match=message):
        verify(dataset, on_error="skip")


def test_verify_ends():
    dataset = datasets.emoji()
    assert verify(dataset) is dataset
    with pytest.raises(ValueError, match='"raise" or "skip". Received: on_error=None'):
        verify(dataset, on_error=None)


def test_a_list_of_paths_is_no_dataset():
    with pytest.raises(TypeError, match="`dataset` must be a `keras_ccp.datasets.Da"):
        datasets.verify(["a.png"])
