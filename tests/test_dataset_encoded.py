"""Datasets of paths and of encoded bytes."""

import re
from pathlib import Path

import numpy as np
import pytest

from keras_ccp.datasets import Dataset

PATHS = ["a b/ä.jpg", "c.jpg", "d.jpg", "c.jpg"]


@pytest.mark.parametrize(
    "images",
    [
        PATHS,
        tuple(PATHS),
        np.array(PATHS),
        np.array(PATHS, object),
        [Path(path) for path in PATHS],
        [Path(PATHS[0]), *PATHS[1:]],
        [np.str_(PATHS[0]), *PATHS[1:]],
    ],
)
def test_paths_become_strings(images):
    dataset = Dataset(images, ["y", "x", "y", "z"])
    assert dataset.is_encoded
    assert dataset.images.shape == (4,)
    assert dataset.images.dtype == object
    assert dataset.images.tolist() == PATHS
    assert {type(path) for path in dataset.images} == {str}
    assert dataset.labels.tolist() == [1, 0, 1, 2]
    assert repr(dataset) == "Dataset(4 images as paths, size 227, 3 classes)"


def test_bytes_are_kept_to_the_last_zero():
    contents = [b"\xff\0", b"", b"\0\0"]
    for images in (contents, np.array(contents, object)):
        dataset = Dataset(images, [0, 1, 1])
        assert dataset.is_encoded
        assert dataset.images.dtype == object
        assert dataset.images.tolist() == contents
    assert repr(dataset) == "Dataset(3 images as bytes, size 227, 2 classes)"


def test_arrays_are_not_encoded():
    dataset = Dataset(np.zeros((2, 4, 4, 1)), [0, 1])
    assert not dataset.is_encoded
    assert dataset.size is None
    assert dataset.short_side is None
    with pytest.raises(ValueError, match="paths or bytes; resize .* size=64 for Data"):
        dataset.with_size(64)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (["a.jpg", b"a"], "all paths or all bytes .* of type bytes, str"),
        ([Path("a.jpg"), None], "of type NoneType, .*Path"),
        (["a.jpg", np.zeros((2, 2, 3))], "of type ndarray, str"),
        (np.array([b"a\0", b"b\0"]), "has lost the zeros .* dtype |S1"),
        (np.array([["a", "b"]]), "or a list of paths or of encoded bytes"),
        ("folder", "or a list of paths or of encoded bytes"),
    ],
)
def test_mixed_images_are_refused(images, message):
    with pytest.raises(TypeError, match=message):
        Dataset(images, [0, 1])


def test_labels_are_counted():
    with pytest.raises(ValueError, match="Received: 2 images and 1 labels"):
        Dataset(["a.jpg", "b.jpg"], [0])


def test_size_defaults_to_the_paper_and_changes_in_its_proportion():
    dataset = Dataset(PATHS, [0, 1, 0, 2])
    assert (dataset.size, dataset.short_side) == (227, 256)
    # 128 * 256 / 227 = 144.35, 64 * 256 / 227 = 72.18, 1 * 256 / 227 = 1.13
    for size, short_side in ((227, 256), (128, 144), (64, 72), (1, 1)):
        sized = dataset.with_size(np.int64(size))
        assert (sized.size, sized.short_side) == (size, short_side)
    assert (dataset.size, dataset.short_side) == (227, 256)
    sized = dataset.with_size(112, short_side=112)
    assert (sized.size, sized.short_side) == (112, 112)
    assert sized.images is dataset.images
    assert repr(sized) == "Dataset(4 images as paths, size 112, 3 classes)"


def test_parts_keep_the_size():
    sized = Dataset(PATHS, list("xyxz")).with_size(32, 50)
    parts = [sized.select_classes([2, 0]), *sized.split_classes(1)]
    assert [(part.size, part.short_side) for part in parts] == [(32, 50)] * 3
    assert parts[0].images.tolist() == [PATHS[0], PATHS[2], PATHS[3]]
    assert parts[0].labels.tolist() == [1, 1, 0]
    assert parts[0].class_names == ("z", "x")
    assert parts[2].images.tolist() == [PATHS[1], PATHS[3]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "`size` must be at least 1. Received: size=0"),
        ((64.0,), TypeError, "`size` must be an integer. Received: size=64.0"),
        ((64, 0), ValueError, "`short_side` must be at least 1"),
        ((64, 72.5), TypeError, "`short_side` must be an integer"),
        ((64, 63), ValueError, "Received: short_side=63, size=64"),
    ],
)
def test_with_size_refuses(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Dataset(PATHS, [0, 1, 0, 2]).with_size(*arguments)
