"""The listing of images, the readers of folders, tables and .npz files, and verify."""

import io
import os
import re
import sys
import warnings
import zipfile
from pathlib import Path

import look_alikes
import numpy as np
import pytest

from keras_ccp import datasets
from keras_ccp.datasets import Dataset, list_images, verify
from keras_ccp.datasets.readers import HIDDEN


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


# ==== The listing ====


def listed(root):
    """The listing with paths relative to the folder."""
    images, passed_over = list_images(root)
    return (
        [Path(path).relative_to(root).as_posix() for path in images],
        {Path(path).relative_to(root).as_posix(): why for path, why in passed_over},
    )


def test_images_of_all_folders_are_listed(tmp_path):
    touch(
        tmp_path, "b/UPPER.JPG", "b/s/t/in.png", "b c/x.webp", "a/10.gif", "loose.bmp"
    )
    touch(tmp_path, "a/z.jpg/9.jpeg")  # a folder, by its name an image
    images, passed_over = listed(tmp_path)
    # By folder: "b" comes before "b c", though " " comes before "/".
    assert images == [
        *("a/10.gif", "a/z.jpg/9.jpeg", "b/UPPER.JPG", "b/s/t/in.png"),
        *("b c/x.webp", "loose.bmp"),
    ]
    assert passed_over == {}


def test_what_is_passed_over_has_a_reason(tmp_path):
    touch(
        tmp_path, "a/0.jpg", "a/1.tiff", "a/2.HEIC", "a/3.avif", "notes.txt", "README"
    )
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe.png")
    (tmp_path / "a" / "gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "a" / "self.jpg").symlink_to("self.jpg")
    images, passed_over = listed(tmp_path)
    assert images == ["a/0.jpg"]
    unread = "images, which cannot be read (convert them to JPEG or PNG)"
    assert passed_over == {
        "a/1.tiff": f".tiff {unread}",
        "a/2.HEIC": f".heic {unread}",
        "a/3.avif": f".avif {unread}",
        "a/gone.jpg": "links to nothing",
        "a/pipe.png": "special files",
        "a/self.jpg": "links (Too many levels of symbolic links)",
        "README": "files without a suffix",
        "empty": "folders without images",
        "notes.txt": ".txt files",
    }
    notes = list_images(tmp_path).notes(tmp_path)
    assert f"passed over 1 .heic {unread}: a/2.HEIC" in notes


HIDDEN_FILES = [
    *(".DS_Store", ".cache/x.jpg", "a/._0.jpg", "a/.hidden.jpg", "a/Thumbs.db"),
    *("__MACOSX/a/._0.jpg", "desktop.ini", "a/__MACOSX/x.jpg"),
    *("a/@eaDir/0.jpg/SYNOPHOTO_THUMB_M.jpg", "#recycle/a/9.jpg"),
]


def test_what_systems_leave_is_hidden(tmp_path):
    touch(tmp_path, "a/0.jpg", *HIDDEN_FILES)
    images, passed_over = listed(tmp_path)
    assert images == ["a/0.jpg"]
    assert set(passed_over.values()) == {HIDDEN}
    assert {"a/@eaDir", "#recycle", ".cache", "a/._0.jpg"} < set(passed_over)
    assert list_images(tmp_path).notes(tmp_path) == []


def test_links_are_followed_and_loops_are_not(tmp_path):
    touch(tmp_path, "store/robin/0.jpg", "root/wren/1.jpg", "root/z/2.jpg")
    root = tmp_path / "root"
    (root / "robin").symlink_to("../store/robin")
    (root / "wren" / "linked.jpg").symlink_to(tmp_path / "store" / "robin" / "0.jpg")
    (root / "wren" / "loop").symlink_to("..")
    (root / "also z").symlink_to("z")  # the folder itself is listed, not the link
    images, passed_over = listed(root)
    assert images == ["robin/0.jpg", "wren/1.jpg", "wren/linked.jpg", "z/2.jpg"]
    assert passed_over == dict.fromkeys(
        ("also z", "wren/loop"), "links to folders that are listed already"
    )
    # Its place may be a link itself.
    (tmp_path / "link").symlink_to("root")
    assert listed(tmp_path / "link")[0] == images


def test_many_links_to_one_another_end(tmp_path):
    for name in map(str, range(30)):
        touch(tmp_path, f"{name}/x.jpg")
        for other in ("a", "b"):
            (tmp_path / name / other).symlink_to(f"../{int(name) + 1}")
    assert len(list_images(tmp_path / "0").images) == 30


def test_folders_that_cannot_be_read(tmp_path, monkeypatch):
    touch(tmp_path, "a/0.jpg", "b/1.jpg")
    scandir = os.scandir

    def refuse(place):
        if Path(place).name == "b":
            raise PermissionError(13, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read what others may not
    assert listed(tmp_path) == (["a/0.jpg"], {"b": "folders (Permission denied)"})
    with pytest.raises(PermissionError):
        list_images(tmp_path / "b")


# ==== A folder of class folders ====


def test_image_folder(tmp_path, caplog):
    root = tmp_path / "my däta"
    look_alikes.write_class_folders(root, {"zwei b": 2, "ärger": 1, "Eins": 11})
    touch(root, *HIDDEN_FILES)
    (root / "a").rename(tmp_path / "a")
    dataset = datasets.image_folder(root)
    # By code point: capitals, small letters, then those with marks.
    assert dataset.class_names == ("Eins", "zwei b", "ärger")
    assert dataset.class_sizes.tolist() == [11, 2, 1]
    assert dataset.labels.tolist() == [0] * 11 + [1] * 2 + [2]
    assert dataset.images[2] == str(root / "Eins" / "10.jpg")
    assert dataset.images[-1] == str(root / "ärger" / "0.jpg")
    assert caplog.text == ""


def test_image_folder_tells_what_it_passes_over(tmp_path, caplog):
    look_alikes.write_class_folders(tmp_path, {"a": 2, "b": 1, "empty": 0})
    touch(tmp_path, "b/z.jpg/in.gif", "b/s/t/in.png", "loose.png", "b/s/README")
    touch(tmp_path, *(f"a/{i}.txt" for i in range(1005)))
    dataset = datasets.image_folder(str(tmp_path))
    assert [Path(path).name for path in dataset.images] == ["0.jpg", "1.jpg", "0.jpg"]
    assert dataset.class_names == ("a", "b")  # a class needs an image
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: passed over {rest}"
        for rest in (
            "1,005 .txt files: a/0.txt, a/1.txt, a/10.txt, ...",
            "1 files without a suffix: b/s/README",
            "1 folders without images: empty",
            "2 images in folders inside the class folders: b/s/t/in.png, "
            "b/z.jpg/in.gif",
            "1 images beside the class folders: loose.png",
        )
    ]


def test_image_folder_refuses(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        datasets.image_folder(tmp_path / "nowhere")
    touch(tmp_path, "1.jpg", "train/a/2.png", "lime/1.tiff")
    message = (
        f"Received: {tmp_path}, passed over 1 folders without images: lime; passed "
        "over 1 .tiff images, which cannot be read (convert them to JPEG or PNG): lime/"
        "1.tiff; passed over 1 images beside the class folders: 1.jpg; passed over 1 "
        "images in folders inside the class folders: train/a/2.png\nGive the folder "
    )
    with pytest.raises(ValueError, match=re.escape(message)):
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
    assert "t.csv: 2 rows list an image again; it is taken once" in caplog.text


def test_csv_cells_may_hold_line_breaks(images):
    text = 'path,note,label\na/0.jpg,"two\nlines \u2028 or three",x\na/1.jpg,,y\n'
    dataset = datasets.table(write_csv(images / "t.csv", text))
    assert dataset.class_names == ("x", "y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\na/0.jpg,1\n", "Received: ValueError: line 1: 'path' is not in"),
        ("path,Label\na/0.jpg,1\n", "line 1: 'label' is not in list"),
        ("", "line 0: 'path' is not in list"),
        ("path,label\n", "Received: float64, shape (0,)"),
        ("path,label\na/0.jpg,1\nb, c/0.jpg,1\n", "line 3: 3 cells for 2 columns"),
        ("path,label\na/0.jpg\n", "line 2: 1 cells for 2 columns"),
        ("path,label\na/0.jpg,1\na/1.jpg,  \n", "Received: '' in row 1"),
        ("path,label\na/0.jpg,1\na/1.jpg,-1\n", "Received: -1 in row 1"),
        # Without strictness the first of these is one image, the second two.
        ('path,label\na/0.jpg,"x\na/1.jpg,y\n', "line 3: unexpected end of data"),
        (
            'path,label\na/0.jpg,"6 pipe\na/1.jpg,7 pipe\na/0.jpg,"8 pipe\n',
            "line 4: ',' expected after '\"'",
        ),
        (
            "path,label\na/0.jpg,x\na/1.jpg,y\n./a/0.jpg,z\n",
            "a/0.jpg with two labels, 'x' and 'z'",
        ),
    ],
)
def test_csv_refuses(images, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        datasets.table(write_csv(images / "t.csv", text))


def test_table_names_what_is_missing(images):
    path = images / "t.csv"
    with pytest.raises(FileNotFoundError, match=f"No such file.*: {str(path)!r}"):
        datasets.table(path)
    write_csv(path, "path,label\na/0.jpg,1\na/7.jpg,2\n")
    message = (
        f"1 of 2 images are missing: {images / 'a' / '7.jpg'}\nPaths start at {images};"
    )
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        datasets.table(path)
    with pytest.raises(FileNotFoundError, match=f"Paths start at {images / 'b, c'};"):
        datasets.table(path, root=images / "b, c")
    os.mkfifo(images / "a" / "7.jpg")  # is no image, and would be waited for
    with pytest.raises(FileNotFoundError, match="1 of 2 images are missing"):
        datasets.table(path)
    path.write_bytes("path,label\nä,1\n".encode("latin-1"))
    with pytest.raises(ValueError, match=f"{path} must be a CSV .UTF-8.*can't decode"):
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


def test_table_in_memory(images, monkeypatch):
    # A DataFrame gives its columns in the same way.
    columns = {"path": ["b, c/0.jpg", Path("a/0.jpg")], "label": ["x", " 7"]}
    dataset = datasets.table(columns, images)
    assert dataset.images.tolist() == [str(images / path) for path in columns["path"]]
    assert dataset.class_names == ("7", "x")
    monkeypatch.chdir(images)
    assert list(map(Path, datasets.table(columns).images)) == list(
        map(Path, columns["path"])
    )
    with pytest.raises(ValueError, match="`source` must be.*KeyError: 'label'"):
        datasets.table({"path": columns["path"]})
    with pytest.raises(FileNotFoundError, match="no.jpg"):
        datasets.table({"path": ["no.jpg"], "label": [1]})


def test_parquet_refuses(images, pyarrow, monkeypatch):
    from pyarrow import parquet

    path = images / "t.parquet"
    parquet.write_table(pyarrow.table({"path": ["a/0.jpg"], "class": [1]}), path)
    with pytest.raises(ValueError, match="Received: KeyError: .*label"):
        datasets.table(path)
    columns = {"path": ["a/0.jpg", "a/1.jpg"], "label": [1, None]}
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(ValueError, match="Received: None in row 1"):
        datasets.table(path)
    path.write_bytes(b"path,label\n")
    with pytest.raises(ValueError, match=f"{path} must be a CSV .* or Parquet table"):
        datasets.table(path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install .keras-ccp\[parquet\]"):
        datasets.table(path)


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
        ({"labels": None}, "Received: KeyError: 'labels is not a file in the archive"),
        ({"offsets": None}, "KeyError: 'offsets is not"),
        ({"offsets": [0, 4, 10]}, "not ascending inside of it"),
        ({"offsets": [0, 5, 4]}, "not ascending"),
        ({"offsets": [-1, 4, 9]}, "not ascending"),
        ({"offsets": [0.0, 4.0, 9.0]}, "Received: TypeError"),
        ({"offsets": [0]}, r"Received: float64, shape \(0,\)"),
        ({"data": np.zeros(9, np.int8)}, "`data` not uint8"),
        ({"labels": [0]}, "Received: 1 labels for 2 rows"),
        ({"labels": [0, -1]}, "Received: -1 in row 1"),
        ({"class_names": ["a"]}, "IndexError: index 1 is out of bounds"),
        (
            {"class_names": np.array(["a", None])},
            "x.npz must be an .npz .*without Python objects.*allow_pickle",
        ),
        ({"class_names": ["a", "a"]}, "`class_names` must be different"),
    ],
)
def test_npz_refuses(tmp_path, changes, message):
    arrays = {k: v for k, v in (GOOD | changes).items() if v is not None}
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        datasets.npz(tmp_path / "x.npz")


def test_npz_refuses_other_files(tmp_path):
    path = tmp_path / "x.npz"
    with pytest.raises(FileNotFoundError, match=f"No such file.*{path}"):
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
        file.writestr("labels", "0 1")
        file.writestr("images", "0 1")
    with pytest.raises(ValueError, match="must be an .npz file of plain arrays"):
        datasets.npz(path)


# ==== Verification ====


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
    # The last 12 bytes of a PNG say that it ends, 8 before them that all is right.
    last = -24 if kind == "PNG" else -12
    for end in (len(contents) // 4, len(contents) * 3 // 4, last):
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
    message, remedy = str(error.value).split("\n")
    paths = [broken.images[row] for row in (3, 64, 65, 199)]
    assert "Received: 4 of 200 that fail: " in message
    at = [message.index(f"{path} (") for path in paths[:3]]
    assert at == sorted(at)
    assert message.endswith(", ...")
    assert "no JPEG, PNG, GIF, BMP or WebP file" in message
    assert "{{" not in message
    assert "[Op:" not in message
    assert remedy == 'Fix them, or pass on_error="skip" (`data.unreadable: skip`)'
    with pytest.raises(ValueError, match=r"/b/99.jpg \(No such file or directory\)\n"):
        verify(broken.select_classes([1]))


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


def test_a_class_is_not_lost_quietly():
    dataset = Dataset([look_alikes.jpeg(1, 0), b"x", b"y"], ["a", "b", "a"])
    message = r"2 of 3 that fail: image 1 \([^)]*\), image 2 .*\nLeave out class b, w"
    with pytest.raises(ValueError, match=message):
        verify(dataset, on_error="skip")


def test_arrays_are_not_verified():
    dataset = datasets.emoji()
    assert verify(dataset) is dataset
