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


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_image_folder_tells_what_it_passes_over(tmp_path, caplog):
    look_alikes.write_class_folders(tmp_path, {"a": 2, "b": 1})
    touch(tmp_path, "b/UPPER.JPG", "b/x.webp", "b/z.jpg/in.gif", "b/s/t/in.png")
    touch(tmp_path, "loose.png", "notes.txt", "a/1.tiff", "b/2.TIFF", "b/s/README")
    dataset = datasets.image_folder(str(tmp_path))
    assert [Path(path).name for path in dataset.images] == [
        *("0.jpg", "1.jpg"),
        *("0.jpg", "UPPER.JPG", "x.webp"),
    ]
    # Most files first; of as many, in the order of class folders, then beside them.
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: passed over images in folders inside class folders; move them "
        "up to use them: 2 (b/s/t/in.png, b/z.jpg/in.gif)",
        f"{tmp_path}: passed over images beside the class folders; move them into one "
        "to use them: 1 (loose.png)",
        f"{tmp_path}: passed over files of types that are not read (.jpg, .jpeg, .png, "
        ".bmp, .gif, .webp are): .tiff 2 (a/1.tiff, b/2.TIFF); no ending 1 "
        "(b/s/README); .txt 1 (notes.txt)",
    ]


def test_image_folder_names_a_few_of_many(tmp_path, caplog):
    look_alikes.write_class_folders(tmp_path, {"a": 1})
    touch(tmp_path, *(f"a/{i}.tif" for i in range(1005)), "x.b", "x.c", "x.d")
    datasets.image_folder(tmp_path)
    (record,) = caplog.records
    few = ".tif 1,005 (a/0.tif, a/1.tif, a/10.tif, ...); .b 1 (x.b); .c 1 (x.c), ..."
    assert record.getMessage().endswith(few)


def test_image_folder_does_not_see_what_systems_leave(tmp_path, caplog):
    look_alikes.write_class_folders(tmp_path, {"a": 1})
    touch(tmp_path, ".DS_Store", ".cache/x.jpg", "a/._0.jpg", "a/.hidden.jpg")
    touch(tmp_path, "__MACOSX/a/._0.jpg", "a/Thumbs.db", "desktop.ini")
    touch(tmp_path, "a/__MACOSX/x.jpg")
    dataset = datasets.image_folder(tmp_path)
    assert dataset.images.tolist() == [str(tmp_path / "a" / "0.jpg")]
    assert caplog.text == ""


BOTH = re.escape("`root` (on the command line `--data`)")


def test_image_folder_refuses(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{BOTH} must be.*Missing: .*nowhere"):
        datasets.image_folder(tmp_path / "nowhere")
    touch(tmp_path, "1.jpg", "2.png", "notes.txt")
    with pytest.raises(ValueError, match=f"{BOTH}.* without folders, with 2 images"):
        datasets.image_folder(tmp_path)


def test_image_folder_names_all_folders_without_images(tmp_path):
    look_alikes.write_class_folders(tmp_path, {"fig": 1, "kiwi": 0, "train/a": 2})
    touch(tmp_path, "plum/.DS_Store", "lime/1.tiff", "lime/2.tiff")
    (tmp_path / "pear" / "a.jpg").mkdir(parents=True)  # a folder, by its name an image
    message = (
        f"class folders as {BOTH}. Received: 5 of 6 folders without images: "
        r"kiwi \(no files\), lime \(files of other types: lime/1.tiff, ...\), "
        r"pear \(no files\), plum \(no files\), "
        r"train \(images in folders inside it: train/a/0.jpg, ...\)$"
    )
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


def test_csv_blanks_around_labels_and_columns_do_not_count(images):
    text = 'path , label\na/0.jpg,robin \na/1.jpg, robin\n"b, c/0.jpg",a wren\n'
    dataset = datasets.table(write_csv(images / "t.csv", text))
    assert dataset.class_names == ("a wren", "robin")
    assert dataset.labels.tolist() == [1, 1, 0]


def test_csv_takes_an_image_once(images, caplog):
    # Rows 2 and 3 are row 0 again, with another spelling of path and of label.
    text = "path,label\na/0.jpg,x\na/1.jpg,y\na/0.jpg,x\n./a/0.jpg,x \n"
    dataset = datasets.table(write_csv(images / "t.csv", text))
    assert dataset.images.tolist() == [str(images / "a" / f"{i}.jpg") for i in (0, 1)]
    assert dataset.labels.tolist() == [0, 1]
    assert "t.csv: 2 rows list an image again, which is taken once" in caplog.text


def test_csv_refuses_two_labels_of_an_image(images):
    text = "path,label\na/0.jpg,x\na/1.jpg,y\na/0.jpg,x\na/1.jpg,z\n"
    message = f"{images / 'a' / '1.jpg'} with labels 'y' and 'z' (1 such images)"
    with pytest.raises(ValueError, match=re.escape(message)):
        datasets.table(write_csv(images / "t.csv", text))


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
        ("path,label\na/0.jpg,1\na/1.jpg,  \n", "label='' in row 1 "),
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
    message = (
        f"1 of 2 images are missing: {images / 'a' / '7.jpg'}. Get them from a copy of "
        "the data, or correct the table: paths that are not absolute start from "
        f"the folder of the table, {images} (to start from another folder move the "
        "table there, or in Python pass it as `root`)"
    )
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        datasets.table(path)
    with pytest.raises(FileNotFoundError, match=f"from `root`, {images / 'b, c'} "):
        datasets.table(path, root=images / "b, c")
    message = r"`data.file`, below `--data`\) must end in .csv or .parquet.*t.tsv"
    with pytest.raises(ValueError, match=message):
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
        ({"labels": None}, "must hold `labels` and.*Received: data, offsets$"),
        ({"labels": None, "y": [0, 1]}, "Received: data, offsets, y$"),
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
    with pytest.raises(FileNotFoundError, match="below `--data`.*Missing: .*x.npz"):
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
    with pytest.raises(ValueError, match="Received: labels.txt$"):
        datasets.npz(path)
    np.savez(path, **{f"array{i:02d}": i for i in range(21)})
    with pytest.raises(ValueError, match=r"array18, array19, \.\.\.$"):
        datasets.npz(path)
    np.savez(path)
    with pytest.raises(ValueError, match="Received: no arrays$"):
        datasets.npz(path)
