"""Loaders of a folder of class folders, a table and an .npz file."""

import io
import re
import sys
import warnings
import zipfile
from pathlib import Path

import look_alikes
import numpy as np
import pytest

from keras_ccp import datasets

# ==== A folder of class folders ====


def test_image_folder(tmp_path, caplog):
    root = tmp_path / "my däta"
    look_alikes.write_class_folders(root, {"zwei b": 2, "ärger": 1, "Eins": 11})
    dataset = datasets.image_folder(root)
    # By code point: capitals, small letters, then those with marks.
    assert dataset.class_names == ("Eins", "zwei b", "ärger")
    assert dataset.class_sizes.tolist() == [11, 2, 1]
    assert dataset.labels.tolist() == [0] * 11 + [1] * 2 + [2]
    assert dataset.images[2] == str(root / "Eins" / "10.jpg")
    assert dataset.images[-1] == str(root / "ärger" / "0.jpg")
    assert caplog.text == ""


def test_image_folder_passes_over_stray_files(tmp_path, caplog):
    look_alikes.write_class_folders(tmp_path, {"a": 2, "b": 1})
    (tmp_path / ".cache").mkdir()
    strays = ["readme.md", "a/Thumbs.db", "a/.hidden.jpg", "b/notes.txt", ".DS_Store"]
    for name in strays:
        (tmp_path / name).touch()
    (tmp_path / "a" / "more").mkdir()
    (tmp_path / "b" / "UPPER.JPG").touch()
    (tmp_path / "b" / "x.webp").touch()
    dataset = datasets.image_folder(str(tmp_path))
    assert [Path(path).name for path in dataset.images] == [
        *("0.jpg", "1.jpg"),
        *("0.jpg", "UPPER.JPG", "x.webp"),
    ]
    # readme.md, Thumbs.db, notes.txt and the folder `more`: not the hidden ones.
    assert f"{tmp_path}: 4 files that are not images are passed over" in caplog.text


def test_image_folder_refuses(tmp_path):
    with pytest.raises(FileNotFoundError, match="Missing: .*nowhere"):
        datasets.image_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="Received: root=.* without folders"):
        datasets.image_folder(tmp_path)
    look_alikes.write_class_folders(tmp_path / "train", {"a": 1, "b": 1})
    message = r"train must hold images \(.jpg, .*class folders as `root`. Received: 2 "
    with pytest.raises(ValueError, match=message):
        datasets.image_folder(tmp_path)


# ==== A table ====


@pytest.fixture
def images(tmp_path):
    """Three images: `a/0.jpg`, `a/1.jpg` and `b, c/0.jpg`."""
    return look_alikes.write_class_folders(tmp_path / "images", {"a": 2, "b, c": 1})


def write_csv(path, text):
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    "text",
    [
        'path,label\na/0.jpg,10\na/1.jpg,2\n"b, c/0.jpg",10\n',
        'size,label,path\r\n1,10,a/0.jpg\r\n2,2,a/1.jpg\r\n\r\n3,10,"b, c/0.jpg"',
        '\ufeffpath,label\na/0.jpg,10\na/1.jpg,2\n"b, c/0.jpg",10\n',
    ],
)
def test_csv(images, text):
    dataset = datasets.table(write_csv(images / "t.csv", text))
    expected = ["a/0.jpg", "a/1.jpg", "b, c/0.jpg"]
    assert dataset.images.tolist() == [str(images / path) for path in expected]
    assert dataset.class_names == ("2", "10")  # numbers, not text
    assert dataset.labels.tolist() == [1, 0, 1]


def test_csv_with_a_root_and_absolute_paths(images, tmp_path):
    text = f'path,label\n0.jpg,ä 1\n"{images / "b, c" / "0.jpg"}",007\n1.jpg,7\n'
    path = write_csv(tmp_path / "elsewhere.CSV", text)
    dataset = datasets.table(str(path), root=images / "a")
    assert dataset.images[0] == str(images / "a" / "0.jpg")
    assert dataset.images[1] == str(images / "b, c" / "0.jpg")
    assert dataset.class_names == ("007", "7", "ä 1")


def test_csv_labels_with_leading_zeros_are_names(images):
    text = "path,label\na/0.jpg,7\na/1.jpg,007\n"
    dataset = datasets.table(write_csv(images / "t.csv", text))
    assert dataset.class_names == ("007", "7")


def test_csv_cells_may_hold_line_breaks(images):
    text = 'path,note,label\na/0.jpg,"two\nlines \u2028 or three",x\na/1.jpg,,y\n'
    dataset = datasets.table(write_csv(images / "t.csv", text))
    assert dataset.class_names == ("x", "y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\na/0.jpg,1\n", "named `path` and `label`.*columns file, label"),
        ("path,Label\na/0.jpg,1\n", "Received: columns path, Label"),
        ("", "Received: columns none"),
        ("path,label\n", "must list at least one image"),
        ("path,label\na/0.jpg,1\nb, c/0.jpg,1\n", "must have 2 cells.*: 3 in line 3"),
        ("path,label\na/0.jpg\n", "must have 2 cells.*Received: 1 in line 2"),
        ("path,label\na/0.jpg,1\na/1.jpg,\n", "label='' in row 1 "),
        ("path,label\na/0.jpg,1\na/1.jpg,-1\n", "must not be negative.* -1 in row 1"),
        ("path,label\n,1\n", "path='', label='1' in row 0 "),
    ],
)
def test_csv_refuses(images, text, message):
    with pytest.raises(ValueError, match=message):
        datasets.table(write_csv(images / "t.csv", text))


def test_table_names_what_is_missing(images):
    path = images / "t.csv"
    with pytest.raises(FileNotFoundError, match=f"Missing: {re.escape(str(path))}"):
        datasets.table(path)
    write_csv(path, "path,label\na/0.jpg,1\na/7.jpg,2\n")
    message = f"1 of 2 images are missing: {images / 'a' / '7.jpg'}. Get them from "
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        datasets.table(path)
    with pytest.raises(ValueError, match="must end in .csv or .parquet.*t.tsv"):
        datasets.table(images / "t.tsv")
    path.write_bytes("path,label\nä,1\n".encode("latin-1"))
    with pytest.raises(ValueError, match="must be UTF-8"):
        datasets.table(path)


@pytest.fixture(scope="module")
def pyarrow():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its import, under another NumPy
        return pytest.importorskip("pyarrow", reason="Parquet needs PyArrow")


@pytest.mark.parametrize("labels", [[10, 2, 10], ["b", "a", "b"], ["10", "2", "10"]])
def test_parquet(images, pyarrow, labels):
    from pyarrow import parquet

    paths = ["a/0.jpg", "a/1.jpg", "b, c/0.jpg"]
    columns = pyarrow.table({"label": labels, "path": paths, "other": [1, 2, 3]})
    parquet.write_table(columns, images / "t.parquet")
    dataset = datasets.table(images / "t.parquet")
    assert dataset.images.tolist() == [str(images / path) for path in paths]
    assert dataset.labels.tolist() == [1, 0, 1]
    assert dataset.class_names == (str(labels[1]), str(labels[0]))


def test_parquet_refuses(images, pyarrow):
    from pyarrow import parquet

    path = images / "t.parquet"
    parquet.write_table(pyarrow.table({"path": ["a/0.jpg"], "class": [1]}), path)
    with pytest.raises(ValueError, match="Received: columns path, class"):
        datasets.table(path)
    columns = {"path": ["a/0.jpg", "a/1.jpg"], "label": [1, None]}
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(ValueError, match="label=None in row 1"):
        datasets.table(path)
    path.write_bytes(b"path,label\n")
    with pytest.raises(ValueError, match="must be a Parquet file"):
        datasets.table(path)


def test_parquet_says_that_pyarrow_is_missing(tmp_path, monkeypatch):
    (tmp_path / "t.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="pip install pyarrow`, or write the table"):
        datasets.table(tmp_path / "t.parquet")


# ==== An .npz file ====

NAMES = np.array(["ant", "bee", "cat", "dog"])


@pytest.mark.parametrize("shape", [(3, 4, 5, 3), (3, 4, 5, 1), (3, 4, 5)])
def test_npz_of_arrays(tmp_path, shape):
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    labels = np.array([3, 1, 3], np.int16)
    np.savez(tmp_path / "x.npz", images=images, labels=labels, vendor=labels)
    dataset = datasets.npz(tmp_path / "x.npz")
    assert not dataset.is_encoded
    assert (dataset.images.reshape(shape) == images).all()
    assert dataset.images.ndim == 4
    assert dataset.labels.tolist() == [1, 0, 1]
    assert dataset.class_names == ("1", "3")
    np.savez(tmp_path / "y.npz", images=images, labels=labels, class_names=NAMES)
    assert datasets.npz(tmp_path / "y.npz").class_names == ("bee", "dog")


def test_npz_of_encoded_images(tmp_path):
    files = [look_alikes.jpeg(i, 0) for i in range(3)] + [b"\0"]
    np.savez_compressed(
        tmp_path / "x.npz",
        data=np.frombuffer(b"".join(files), np.uint8),
        offsets=np.cumsum([0, *map(len, files)]),
        labels=["b", "a", "b", "a"],
        class_names=["first", "second"],
    )
    dataset = datasets.npz(str(tmp_path / "x.npz"))
    assert dataset.is_encoded
    assert dataset.images.tolist() == files
    assert dataset.labels.tolist() == [1, 0, 1, 0]
    assert dataset.class_names == ("first", "second")


GOOD = {"data": np.zeros(9, np.uint8), "offsets": [0, 4, 9], "labels": [0, 1]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "must hold `labels` and.*Received: data, offsets"),
        ({"offsets": None}, "either `images` or .*Received: data, labels"),
        ({"offsets": [0, 4, 10]}, r"from 0 to its length.*\(3,\), int64, \[0, 4, 10\]"),
        ({"offsets": [0, 5, 4]}, "ascending"),
        ({"offsets": [-1, 4, 9]}, "ascending integers from 0"),
        ({"offsets": [0.0, 4.0, 9.0]}, "offsets of shape .*, float64"),
        ({"offsets": [0]}, "ascending"),
        ({"data": np.zeros(9, np.int8)}, r"data of shape \(9,\), int8"),
        ({"labels": [0]}, "Received: 2 images and 1 labels"),
        ({"labels": [0, -1]}, "`labels` must not be negative"),
        ({"class_names": ["a"]}, r"label 1, class_names of shape \(1,\)"),
        ({"class_names": np.array(["a", None])}, "without Python objects"),
        ({"class_names": ["a", "a"]}, "`class_names` must differ"),
    ],
)
def test_npz_refuses(tmp_path, changes, message):
    arrays = {k: v for k, v in (GOOD | changes).items() if v is not None}
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        datasets.npz(tmp_path / "x.npz")


def test_npz_refuses_other_files(tmp_path):
    path = tmp_path / "x.npz"
    with pytest.raises(FileNotFoundError, match="Missing: .*x.npz"):
        datasets.npz(path)
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    whole = io.BytesIO()
    np.savez(whole, **GOOD)
    for contents in (b"", b"<html>", array.getvalue(), whole.getvalue()[:-40]):
        path.write_bytes(contents)
        with pytest.raises(ValueError, match="must be an .npz file of plain arrays"):
            datasets.npz(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("labels.txt", "0 1")
    with pytest.raises(ValueError, match="Received: none of them"):
        datasets.npz(path)
