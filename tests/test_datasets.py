"""Datasets, labels, class splits and the bundled emoji."""

import importlib.util
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from keras_ccp import datasets
from keras_ccp.datasets import (
    Dataset,
    ablation_split,
    check_ids,
    check_labels,
    emoji_data,
    map_labels,
    mlrc_folds,
    split_class_ids,
)

ROOT = Path(__file__).parents[1]


def images(n):
    """Image i holds the number i only, so a test sees where it went."""
    return np.tile(np.arange(n, dtype=np.uint8)[:, None, None, None], (1, 2, 3, 1))


@pytest.mark.parametrize(
    ("labels", "ids", "originals"),
    [
        ([0, 1, 2, 1], [0, 1, 2, 1], [0, 1, 2]),
        ([7, 3, 7, 100], [1, 0, 1, 2], [3, 7, 100]),
        ([[1], [0], [1]], [1, 0, 1], [0, 1]),
        (["cat", "ant", "cat"], [1, 0, 1], ["ant", "cat"]),
        (np.array([b"cat", b"ant"]), [1, 0], ["ant", "cat"]),
        (np.array(["cat", "ant"], object), [1, 0], ["ant", "cat"]),
        (np.array([2.0, 1.0]), [1, 0], [1, 2]),
        (np.array([2, 1], np.uint8), [1, 0], [1, 2]),
        (np.array([2**40, 0]), [1, 0], [0, 2**40]),
        (np.array([True, False]), [1, 0], [0, 1]),
    ],
)
def test_map_labels(labels, ids, originals):
    got, names = map_labels(labels)
    assert got.dtype == np.int32
    assert got.tolist() == ids
    assert names.tolist() == originals


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ([0, -1, 1, -1], ValueError, "`y` must not be negative; leave those images"),
        ([0, -1, 1, -1], ValueError, "Received: -1 in row 1 (2 in total)"),
        ([0.0, np.nan], ValueError, "`y` must not be NaN or infinite"),
        ([0.0, np.inf], ValueError, "Received: inf in row 1 (1 in total)"),
        ([0.0, 1.5], ValueError, "`y` must be whole numbers"),
        (["a", None], ValueError, "Received: None in row 1 (1 in total)"),
        (["a", float("nan")], ValueError, "Received: nan in row 1 (1 in total)"),
        (["a", 1], TypeError, "Received: y of type int, str"),
        ([{}, {}], TypeError, "Received: y of type dict"),
        ([], ValueError, "`y` must hold at least one label"),
        (3, TypeError, "`y` must be an array or a list of labels. Received: y of type"),
        (None, TypeError, "Received: y of type NoneType"),
        ({0, 1}, TypeError, "Received: y of type set"),
        ({0: 1}, TypeError, "Received: y of type dict"),
        ((i for i in (0, 1)), TypeError, "Received: y of type generator"),
        ("ab", TypeError, "Received: y of type str"),
        ([b"a", b"\xff"], ValueError, "`y` must be UTF-8 where they are bytes"),
        (np.array([0, 1e300]), ValueError, "`y` must be below 2**53 to be exact as fl"),
        (np.array([0, 2.0**53]), ValueError, "Received: 9007199254740992.0 in row 1"),
        (np.float32([0, 2**24]), ValueError, "below 2**24 to be exact as float32"),
        (np.float16([0, 2**11]), ValueError, "below 2**11 to be exact as float16"),
        ([0, 2**70], ValueError, "`y` must fit 64 bits"),
        (np.eye(3), ValueError, "np.argmax(..., axis=1)"),
    ],
)
def test_map_labels_refuses(labels, error, message):
    with pytest.raises(error, match=re.escape(message)):
        map_labels(labels, "y")


def test_check_labels_keeps_gaps():
    got = check_labels(np.array([[7], [3]], np.int64))
    assert got.dtype == np.int32
    assert got.tolist() == [7, 3]


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ([3, -1], ValueError, "`y` must not be negative"),
        ([3.0, np.nan], ValueError, "`y` must not be NaN"),
        ([3.0, 0.5], ValueError, "`y` must be whole numbers"),
        ([3.0, 1.0], ValueError, "`y` must be integers; convert them with"),
        (["a"], TypeError, "Received: y=['a']"),
        ([2**31], ValueError, "`y` must fit int32"),
        ([], ValueError, "`y` must hold at least one label"),
    ],
)
def test_check_labels_refuses(labels, error, message):
    with pytest.raises(error, match=re.escape(message)):
        check_labels(labels, "y")


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([0, 3], ValueError, "`rows` must be from 0 to 2. Received: 3 at position 1"),
        ([-1], ValueError, "Received: -1 at position 0"),
        ([], ValueError, "Received: rows of shape (0,)"),
        ([[0]], ValueError, "Received: rows of shape (1, 1)"),
        ([True], TypeError, "np.flatnonzero"),
        ([0.0], TypeError, "Received: rows of dtype float64"),
    ],
)
def test_check_ids_refuses(ids, error, message):
    with pytest.raises(error, match=re.escape(message)):
        check_ids(ids, 3, "rows")


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
    named = Dataset(source, labels, class_names=np.array(["five", "nine"]))
    assert named.class_names == ("five", "nine")
    assert type(named.class_names[0]) is str


def test_dataset_accepts_a_list_of_equal_images():
    assert Dataset(list(images(2)), [0, 1]).images.shape == (2, 2, 3, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ([np.zeros((2, 2, 3)), np.zeros((4, 2, 3))], [0, 1]),
            ValueError,
            "`images` must have one size; resize them first. "
            "Received: images of shapes (2, 2, 3), (4, 2, 3)",
        ),
        ((np.array([None, None]), [0, 1]), TypeError, "Received: images of dtype obj"),
        ((np.zeros((2, 2, 2, 3), int), [0, 1]), TypeError, "dtype int64"),
        ((np.zeros((2, 8, 8)), [0, 1]), ValueError, "images[..., None]"),
        ((np.zeros((0, 8, 8, 3)), []), ValueError, "must be a non-empty array"),
        ((images(2), [0, 1, 1]), ValueError, "Received: 2 images and 3 labels"),
        ((images(2), [0, -1]), ValueError, "`labels` must not be negative"),
        ((images(2), [0, 1], ["a"]), ValueError, "Received: 1 names for 2 classes"),
        ((images(2), [0, 1], ["a", "a"]), ValueError, "Received: 'a' 2 times"),
        ((images(2), [0, 1], [1, "1"]), ValueError, "`class_names` must differ"),
        ((images(2), [0, 1], {"a", "b"}), TypeError, "class_names of type set"),
        ((images(2), [0, 1], {"a": 0, "b": 1}), TypeError, "class_names of type dict"),
        ((images(2), [0, 1], "ab"), TypeError, "`class_names` must be a list of names"),
        ((images(2), [0, 1], iter("ab")), TypeError, "class_names of type str_"),
        ((images(2), [0, 1], 5), TypeError, "class_names of type int"),
        ((images(2), None), TypeError, "`labels` must be an array or a list"),
        ((images(2), np.array([0, 1e300])), ValueError, "`labels` must be below 2**53"),
        (
            (np.float32([1, np.nan, 2, -np.inf]).reshape(4, 1, 1, 1), [0, 0, 1, 1]),
            ValueError,
            "`images` must be finite; leave out or mend what is not. "
            "Received: NaN or infinity in 2 of 4 images, the first at 1",
        ),
    ],
)
def test_dataset_refuses(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Dataset(*arguments)


def test_select_classes_relabels_in_the_given_order():
    dataset = Dataset(images(5), [0, 1, 2, 1, 0], ["a", "b", "c"])
    chosen = dataset.select_classes([2, 0])
    assert chosen.images[:, 0, 0, 0].tolist() == [0, 2, 4]
    assert chosen.labels.tolist() == [1, 0, 1]
    assert chosen.class_names == ("c", "a")
    assert dataset.labels.tolist() == [0, 1, 2, 1, 0]


@pytest.mark.parametrize("class_ids", [[0, 0], [3], [-1], []])
def test_select_classes_refuses(class_ids):
    with pytest.raises(ValueError, match="`class_ids` must"):
        Dataset(images(3), [0, 1, 2]).select_classes(class_ids)


def test_split_classes_by_id():
    first, second = Dataset(images(6), [2, 1, 0, 3, 4, 2]).split_classes(2)
    assert first.class_names == ("0", "1")
    assert second.class_names == ("2", "3", "4")
    assert first.images[:, 0, 0, 0].tolist() == [1, 2]
    assert first.labels.tolist() == [1, 0]
    assert second.images[:, 0, 0, 0].tolist() == [0, 3, 4, 5]
    assert second.labels.tolist() == [0, 1, 2, 0]


def test_split_class_ids_with_a_seed():
    # np.random.default_rng(0).permutation(6) is [3 2 5 4 0 1] (numpy 2.4.6).
    first, second = split_class_ids(6, 0.5, seed=0)
    assert first.tolist() == [2, 3, 5]
    assert second.tolist() == [0, 1, 4]


@pytest.mark.parametrize(
    ("size", "count"),
    # round(0.5 * 5) = round(2.5) = 2, to the even number.
    [(0.5, 2), (0.3, 2), (0.9, 4), (1, 1), (4, 4), (np.int64(3), 3)],
)
def test_split_class_ids_sizes(size, count):
    first, second = split_class_ids(5, size)
    assert first.tolist() == list(range(count))
    assert second.tolist() == list(range(count, 5))


@pytest.mark.parametrize("size", [0, 5, -1, 0.0, 1.0, 0.05, 0.95, 1.5, np.nan])
def test_split_class_ids_refuses_an_empty_side(size):
    message = f"Received: fraction_or_count={size}"
    with pytest.raises(ValueError, match=re.escape(message)):
        split_class_ids(5, size)


@pytest.mark.parametrize(
    # A share takes round(share * n) classes: 0.5 / n gives 0, 1 - 0.5 / n gives n.
    ("num_classes", "size", "shares"),
    [(2, 0.8, "above 0.25 and below 0.75"), (5, 0.95, "above 0.1 and below 0.9")],
)
def test_split_class_ids_says_which_shares_work(num_classes, size, shares):
    with pytest.raises(ValueError, match=f"a float {shares}, or an int from 1 to"):
        split_class_ids(num_classes, size)
    low, high = (float(word) for word in shares.split() if word[0] == "0")
    for share in (low + 1e-6, high - 1e-6):
        assert all(len(part) for part in split_class_ids(num_classes, share))


def test_large_finite_images_are_accepted():
    large = np.full((9, 2, 2, 1), 6e4, np.float16)  # their sum is not finite
    assert len(Dataset(large, np.arange(9))) == 9


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), ("a", TypeError), (1.5, TypeError)]
)
def test_split_refuses_a_seed(seed, error):
    with pytest.raises(error, match=f"`seed` must be .*Received: seed={seed!r}"):
        Dataset(images(3), [0, 1, 2]).split_classes(1, seed)


@pytest.mark.parametrize("size", [1, 0.5])
def test_a_single_class_cannot_be_split(size):
    with pytest.raises(ValueError, match="a single class cannot be split"):
        Dataset(images(3), [0, 0, 0]).split_classes(size)


@pytest.mark.parametrize("size", ["0.5", None, True])
def test_split_class_ids_refuses_types(size):
    with pytest.raises(TypeError, match="`fraction_or_count` must be a float"):
        split_class_ids(5, size)


@pytest.mark.parametrize(
    ("num_classes", "validation"),
    [
        # The paper's rows: first and last class id of each fold, Cars196 and CUB.
        (98, [(74, 97), (0, 23), (25, 48), (49, 72)]),
        (100, [(75, 99), (0, 24), (25, 49), (50, 74)]),
        # In-shop by the rule: 3997 // 4 = 999 validate; the folds begin at
        # k * 3997 // 4 = 0, 999, 1998, 2997, and validate from 2998 classes later.
        (3997, [(2998, 3996), (0, 998), (999, 1997), (1998, 2996)]),
        (4, [(3, 3), (0, 0), (1, 1), (2, 2)]),
    ],
)
def test_mlrc_folds(num_classes, validation):
    folds = mlrc_folds(num_classes)
    assert len(folds) == 4
    for (train, held_out), (first, last) in zip(folds, validation, strict=True):
        assert held_out.tolist() == list(range(first, last + 1))
        others = set(range(num_classes)) - set(range(first, last + 1))
        assert train.tolist() == sorted(others)


def test_mlrc_folds_of_another_number():
    # 7 // 3 = 2 validate; folds begin at 0, 7 // 3 = 2, 14 // 3 = 4, plus 5 on a ring.
    folds = mlrc_folds(7, num_folds=3)
    assert [held_out.tolist() for _, held_out in folds] == [[5, 6], [0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), ValueError, "Received: num_classes=3, num_folds=4"),
        ((8, 1), ValueError, "`num_folds` must be at least 2"),
        ((8.0,), TypeError, "`num_classes` must be an integer"),
    ],
)
def test_mlrc_folds_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        mlrc_folds(*arguments)


@pytest.mark.parametrize(("num_classes", "count"), [(100, 67), (98, 65), (2, 1)])
def test_ablation_split(num_classes, count):
    # 200 / 3 = 66.7, 196 / 3 = 65.3, 4 / 3 = 1.3
    train, validation = ablation_split(num_classes)
    assert train.tolist() == list(range(count))
    assert validation.tolist() == list(range(count, num_classes))


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


@pytest.fixture(scope="module")
def build_emoji():
    pytest.importorskip("PIL", reason="building the bundled file needs Pillow")
    path = ROOT / "tools" / "build_emoji.py"
    if not path.exists():
        pytest.skip("tools/ is not beside an installed package")
    spec = importlib.util.spec_from_file_location("build_emoji", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_build_emoji_writes_what_emoji_reads(build_emoji, tmp_path):
    rng = np.random.default_rng(0)
    shape = (12, 32, 32, 3)  # two classes, six vendors
    # Fewer colours than the palette holds, so none is lost.
    colours = rng.integers(0, 256, (9, 3), dtype=np.uint8)
    source = colours[rng.integers(0, 9, shape[:3])]
    np.savez(tmp_path / "in.npz", images=source, class_names=["ant", "bee"])
    for name in ("once", "twice"):
        build_emoji.main([str(tmp_path / "in.npz"), str(tmp_path / name)])
    dataset = emoji_data._load(tmp_path / "once")
    assert (dataset.images == source).all()
    assert dataset.labels.tolist() == [0] * 6 + [1] * 6
    assert dataset.class_names == ("ant", "bee")
    once = (tmp_path / "once" / "emoji.xz").read_bytes()
    assert once == (tmp_path / "twice" / "emoji.xz").read_bytes()
