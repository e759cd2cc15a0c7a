"""Datasets in memory and encoded, labels, and the bundled emoji."""

import importlib.util
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from keras_ccp import datasets
from keras_ccp.datasets import Dataset, check_ids, map_labels
from keras_ccp.datasets.benchmarks import _load_emoji

ROOT = Path(__file__).parents[1]
PATHS = ["a b/ä.jpg", "c.jpg", "d.jpg", "c.jpg"]


def images(n):
    """Image i holds the number i only, so a test sees where it went."""
    return np.tile(np.arange(n, dtype=np.uint8)[:, None, None, None], (1, 2, 3, 1))


# ==== Labels ====


@pytest.mark.parametrize(
    ("labels", "ids", "originals"),
    [
        ([0, 1, 2, 1], [0, 1, 2, 1], [0, 1, 2]),
        ([7, 3, 7, 100], [1, 0, 1, 2], [3, 7, 100]),
        ([[1], [0], [1]], [1, 0, 1], [0, 1]),
        (["cat", "ant", "cat"], [1, 0, 1], ["ant", "cat"]),
        (np.array(["cät".encode(), b"ant"]), [1, 0], ["ant", "cät"]),
        ([b"cat", b"ant"], [1, 0], ["ant", "cat"]),
        (np.array(["cat", "ant"], object), [1, 0], ["ant", "cat"]),
        (np.array([2.0, 1.0]), [1, 0], [1, 2]),
        (np.array([2, 1], np.uint8), [1, 0], [1, 2]),
        (np.array([2**40, 0]), [1, 0], [0, 2**40]),
        ([2**70, 0], [1, 0], [0, 2**70]),
        (np.array([True, False]), [1, 0], [0, 1]),
        (np.array([2**24 - 1, 2**24], np.float64), [0, 1], [2**24 - 1, 2**24]),
    ],
)
def test_map_labels(labels, ids, originals):
    got, names = map_labels(labels)
    assert got.dtype == np.int32
    assert got.tolist() == ids
    assert names.tolist() == originals


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, -1, 1, -1], "Received: -1 in row 1 (2 in total)\nLeave images without"),
        (np.array([0.0, -1.0]), "-1.0 in row 1 (1 in total)"),
        ([0.0, np.nan], "Received: nan in row 1 (1 in total)"),
        ([0.0, np.inf], "inf in row 1 (1 in total)"),
        ([0.0, 1.5], "`y` must be all names, or all whole numbers of 0 or more"),
        (["a", None], "Received: None in row 1 (1 in total)"),
        (["a", float("nan")], "Received: nan in row 1 (1 in total)"),
        (["a", ""], "Received: '' in row 1 (1 in total)"),
        (["a", 1], "Received: 1 in row 1 (1 in total)"),
        ([], "`y` must hold one label a row, shape (n,). Received: shape (0,)"),
        (None, "Received: shape ()"),
        ({0, 1}, "Received: shape ()"),
        ("ab", "Received: shape ()"),
        ([b"a", b"\xff"], "'utf-8' codec can't decode"),
        (np.array([0, 2.0**53]), "9007199254740992.0 in row 1"),
        (np.float32([0, 2**24]), "16777216.0 in row 1"),
        (np.float16([0, 2**11]), "2048.0 in row 1"),
        (np.eye(3), "np.argmax(..., axis=1)"),
    ],
)
def test_map_labels_refuses(labels, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        map_labels(labels, "y")


@pytest.mark.parametrize("ids", [[0, 3], [-1], [], [[0]], [True], [0.0]])
def test_check_ids_refuses(ids):
    message = "`rows` must be a list of integers from 0 to 2. Received: array("
    with pytest.raises(ValueError, match=re.escape(message)):
        check_ids(ids, 3, "rows")


# ==== Images in memory ====


def test_dataset_attributes():
    source, labels = images(4), np.array([9, 5, 9, 9])
    dataset = Dataset(source, labels)
    assert np.shares_memory(dataset.images, source)
    assert dataset.labels.dtype == np.int32
    assert dataset.labels.tolist() == [1, 0, 1, 1]
    assert labels.tolist() == [9, 5, 9, 9]
    assert dataset.class_names == ("5", "9")
    assert dataset.num_classes == 2
    assert dataset.class_sizes.tolist() == [1, 3]
    assert len(dataset) == 4
    assert repr(dataset) == "Dataset(4 images of 2x3x1, 2 classes)"
    assert not dataset.is_encoded
    assert dataset.size is dataset.short_side is None
    with pytest.raises(ValueError, match="Received: 64 for Dataset.*\n.*arrays before"):
        dataset.with_size(64)
    named = Dataset(source, labels, class_names=np.array(["five", "nine"]))
    assert named.class_names == ("five", "nine")
    assert type(named.class_names[0]) is str


def test_other_images_that_are_taken():
    assert Dataset(list(images(2)), [0, 1]).images.shape == (2, 2, 3, 1)
    large = np.full((9, 2, 2, 1), 6e4, np.float16)  # finite, but not their sum
    assert len(Dataset(large, np.arange(9))) == 9


NOT_FINITE = np.float32([1, np.nan, 2, -np.inf]).reshape(4, 1, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.array([None, None]), [0, 1]), "Received: object, shape (2,)"),
        ((np.zeros((2, 2, 2, 3), int), [0, 1]), "Received: int64, shape"),
        ((np.zeros((2, 8, 8), "uint8"), [0, 1]), "images[..., None]"),
        ((np.zeros((0, 8, 8, 3)), []), "Received: float64, shape (0, 8, 8, 3)"),
        ((["a.jpg", b"a"], [0, 1]), "or all paths, or all bytes. Received: <U5"),
        (([Path("a.jpg"), None], [0, 1]), "Received: object, shape (2,)"),
        # It has lost the zeros at the end of each image.
        ((np.array([b"a\0", b"b\0"]), [0, 1]), "Received: |S2, shape (2,)"),
        ((np.array([["a", "b"]]), [0, 1]), "Received: <U1, shape (1, 2)"),
        (("folder", [0, 1]), "Received: <U6, shape ()"),
        ((images(2), [0, 1, 1]), "Received: 3 labels for 2 rows"),
        ((["a.jpg", "b.jpg"], [0]), "Received: 1 labels for 2 rows"),
        ((images(2), [0, -1]), "Received: -1 in row 1"),
        ((images(2), [0, 1], ["a"]), "Received: ['a'] for 2 classes"),
        ((images(2), [0, 1], ["a", "a"]), "`class_names` must be different"),
        ((images(2), [0, 1], [1, "1"]), "`class_names` must be different"),
        ((images(2), [0, 1], {"a", "b"}), "`class_names` must be different"),
        ((images(2), [0, 1], "ab"), "Received: 'ab' for 2 classes"),
        ((NOT_FINITE, [0, 0, 1, 1]), "NaN or infinity in 2 of 4 images, the first at"),
    ],
)
def test_dataset_refuses(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Dataset(*arguments)


# ==== Paths and bytes ====


@pytest.mark.parametrize(
    "given",
    [
        tuple(PATHS),
        np.array(PATHS),
        np.array(PATHS, object),
        [Path(PATHS[0]), *PATHS[1:]],
        [np.str_(PATHS[0]), *PATHS[1:]],
    ],
)
def test_paths_become_strings(given):
    dataset = Dataset(given, ["y", "x", "y", "z"])
    assert dataset.is_encoded
    assert dataset.images.dtype == object
    assert dataset.images.tolist() == PATHS
    assert {type(path) for path in dataset.images} == {str}
    assert dataset.labels.tolist() == [1, 0, 1, 2]
    assert repr(dataset) == "Dataset(4 images as paths, size 227, 3 classes)"


def test_bytes_are_kept_to_the_last_zero():
    contents = [b"\xff\0", b"", b"\0\0"]
    for given in (contents, np.array(contents, object)):
        dataset = Dataset(given, [0, 1, 1])
        assert dataset.is_encoded
        assert dataset.images.tolist() == contents
    assert repr(dataset) == "Dataset(3 images as bytes, size 227, 2 classes)"


def test_size_defaults_to_the_paper_and_changes_in_its_proportion():
    dataset = Dataset(PATHS, [0, 1, 0, 2])
    # 128 * 256 / 227 = 144.35, 64 * 256 / 227 = 72.18, 1 * 256 / 227 = 1.13
    for size, short_side in ((227, 256), (128, 144), (64, 72), (1, 1)):
        sized = dataset.with_size(np.int64(size))
        assert (sized.size, sized.short_side) == (size, short_side)
    assert (dataset.size, dataset.short_side) == (227, 256)
    sized = dataset.with_size(112, short_side=112)
    assert (sized.size, sized.short_side) == (112, 112)
    assert sized.images is dataset.images
    for wrong in ((0,), (64, 0), (64, 63)):
        with pytest.raises(ValueError, match="`size` must be 1 to short_side="):
            dataset.with_size(*wrong)


# ==== Parts ====


def test_select_classes_relabels_in_the_given_order():
    dataset = Dataset(images(5), [0, 1, 2, 1, 0], ["a", "b", "c"])
    chosen = dataset.select_classes([2, 0])
    assert chosen.images[:, 0, 0, 0].tolist() == [0, 2, 4]
    assert chosen.labels.tolist() == [1, 0, 1]
    assert chosen.labels.dtype == np.int32
    assert chosen.class_names == ("c", "a")
    assert dataset.labels.tolist() == [0, 1, 2, 1, 0]
    for wrong in ([0, 0], [3], [-1], []):
        with pytest.raises(ValueError, match="`class_ids` must"):
            dataset.select_classes(wrong)


def test_split_classes_by_id():
    first, second = Dataset(images(6), [2, 1, 0, 3, 4, 2]).split_classes(2)
    assert first.class_names == ("0", "1")
    assert second.class_names == ("2", "3", "4")
    assert first.images[:, 0, 0, 0].tolist() == [1, 2]
    assert first.labels.tolist() == [1, 0]
    assert second.images[:, 0, 0, 0].tolist() == [0, 3, 4, 5]
    assert second.labels.tolist() == [0, 1, 2, 0]


def test_parts_keep_the_size():
    sized = Dataset(PATHS, list("xyxz")).with_size(32, 50)
    parts = [sized.select_classes([2, 0]), *sized.split_classes(1)]
    assert [(part.size, part.short_side) for part in parts] == [(32, 50)] * 3
    assert parts[0].images.tolist() == [PATHS[0], PATHS[2], PATHS[3]]
    assert parts[0].labels.tolist() == [1, 1, 0]
    assert parts[0].class_names == ("z", "x")


# ==== Emoji ====


def test_emoji():
    dataset = datasets.emoji()
    assert dataset.images.shape == (2766, 32, 32, 3)
    assert dataset.images.dtype == np.uint8
    assert dataset.class_sizes.tolist() == [6] * 461
    assert dataset.labels[:7].tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert len(set(dataset.class_names)) == 461
    assert dataset.class_names[3] == "alarm-clock"
    # The colours tools/build_emoji.py asks for; corners of most drawings are white.
    assert len(np.unique(dataset.images.astype(int) @ [65536, 256, 1])) == 160
    assert (np.median(dataset.images[:, 0, 0], axis=0) == 255).all()


def test_emoji_authors_are_in_the_package_and_in_the_notice():
    folder = resources.files("keras_ccp.datasets") / "bundled"
    text = (folder / "ATTRIBUTION.txt").read_text(encoding="utf-8")
    for author in ("Google", "Mozilla", "Twitter", "jdecked", "EmojiTwo", "Microsoft"):
        assert author in text
    notice = ROOT / "NOTICE"
    if notice.exists():  # not beside an installed package
        assert text in notice.read_text(encoding="utf-8")


def test_build_emoji_writes_what_emoji_reads(tmp_path):
    pytest.importorskip("PIL", reason="building the bundled file needs Pillow")
    path = ROOT / "tools" / "build_emoji.py"
    if not path.exists():
        pytest.skip("tools/ is not beside an installed package")
    spec = importlib.util.spec_from_file_location("build_emoji", path)
    build_emoji = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_emoji)
    rng = np.random.default_rng(0)
    shape = (12, 32, 32, 3)  # two classes, six vendors
    # Fewer colours than the palette holds, so none is lost.
    colours = rng.integers(0, 256, (9, 3), dtype=np.uint8)
    source = colours[rng.integers(0, 9, shape[:3])]
    np.savez(tmp_path / "in.npz", images=source, class_names=["ant", "bee"])
    for name in ("once", "twice"):
        build_emoji.main([str(tmp_path / "in.npz"), str(tmp_path / name)])
    dataset = _load_emoji(tmp_path / "once")
    assert (dataset.images == source).all()
    assert dataset.labels.tolist() == [0] * 6 + [1] * 6
    assert dataset.class_names == ("ant", "bee")
    once = (tmp_path / "once" / "emoji.xz").read_bytes()
    assert once == (tmp_path / "twice" / "emoji.xz").read_bytes()
