"""Loaders of published archives, on look-alikes in their file formats."""

import os
import re
import time
from pathlib import Path

import look_alikes
import pytest
import tensorflow as tf

from keras_ccp import datasets

# With a space and beyond ASCII: so is the root of every archive here.
ROOT = "my däta 图"
CUB = {1: 3, 100: 2, 101: 2, 200: 1}
CARS = {2: 3, 98: 2, 99: 3, 196: 2}
SOP = ({1: 2, 3: 1, 11318: 2}, {11319: 2, 22634: 3})
IN_SHOP = ({2: 3, 9: 1}, {5: 2, 40: 1}, {40: 1, 5: 1})


@pytest.fixture
def root(tmp_path):
    return tmp_path / ROOT


def spread(total, class_ids):
    """So many images over these classes, as evenly as it goes."""
    class_ids = list(class_ids)
    size, more = divmod(total, len(class_ids))
    return {c: size + (i < more) for i, c in enumerate(class_ids)}


def check_images(*parts):
    """Every file is there and is an image of the size that was written."""
    for path in (path for part in parts for path in part.images):
        assert tf.io.decode_jpeg(Path(path).read_bytes()).shape == (10, 12, 3)


def edit(path, old, new):
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def rename(root, path, new, lists):
    """Gives an image another name, on disk and in the list."""
    (root / new).parent.mkdir(parents=True, exist_ok=True)
    (root / path).rename(root / new)
    edit(root / lists, path, new)


ITEMS = range(4000, 4000 + 2 * 3985, 2)
# How a look-alike is written, few images, and as many as published.
WRITE = {
    "cub200": (look_alikes.write_cub, [CUB]),
    "cars196": (look_alikes.write_cars_a, [CARS]),
    "sop": (look_alikes.write_sop, SOP),
    "in_shop": (look_alikes.write_in_shop, IN_SHOP),
}
PUBLISHED = {
    "cub200": [spread(5864, range(1, 101)) | spread(5924, range(101, 201))],
    "cars196": [spread(8054, range(1, 99)) | spread(8131, range(99, 197))],
    "sop": [spread(59551, range(1, 11319)), spread(60502, range(11319, 22635))],
    "in_shop": [spread(25882, range(1, 3998))]
    + [spread(count, ITEMS) for count in (14218, 12612)],
}


@pytest.mark.parametrize("name", WRITE)
def test_counts_are_compared_with_the_published_ones(root, name):
    write, few = WRITE[name]
    write(root, *few)
    with pytest.raises(ValueError, match="`root` .--data. must hold the pub") as error:
        getattr(datasets, name)(root)
    received, remedy = str(error.value).split("\n")
    assert re.search(r": \[\([45], .* \(images, classes\) for \[\(\d+,", received)
    assert "check_counts=False (`data.check_counts: false`)" in received
    assert remedy.startswith("Unpack it again, or get it from ")
    write(root, *PUBLISHED[name], image=None)
    total = f"{sum(sum(sizes.values()) for sizes in PUBLISHED[name]):,}"
    start = time.perf_counter()
    # The counts are checked before the files.
    with pytest.raises(FileNotFoundError, match=f"of {total} images are missing"):
        getattr(datasets, name)(root)
    # SOP, measured on one core: 1 s, 3 s where the files are there, 44 MB of memory.
    assert time.perf_counter() - start < 20


# ==== CUB-200-2011 ====


@pytest.mark.parametrize("inside", [False, True])
def test_cub200(root, inside):
    folder = look_alikes.write_cub(root, CUB)
    train, test = datasets.cub200(folder if inside else str(root), check_counts=False)
    assert train.class_names == ("001.Bird_1", "100.Bird_100")
    assert train.labels.tolist() == [0, 0, 0, 1, 1]
    assert test.class_names == ("101.Bird_101", "200.Bird_200")
    assert test.labels.tolist() == [0, 0, 1]
    first = folder / "images" / "001.Bird_1" / "Bird_0000_1.jpg"
    assert train.images[0] == str(first)
    assert (train.size, train.short_side) == (227, 256)
    check_images(train, test)


def test_spaces_inside_of_names(root):
    folder = look_alikes.write_cub(root, CUB)
    new = "001.Bird_1/ein Vögel chen.jpg"
    rename(folder / "images", "001.Bird_1/Bird_0000_1.jpg", new, "../images.txt")
    train, _ = datasets.cub200(root, check_counts=False)
    assert train.images[0] == str(folder / "images" / new)

    folder = look_alikes.write_sop(root, *SOP)
    new = "cabinet_final/a b  c.JPG"
    rename(folder, "cabinet_final/110000000001_0.JPG", new, "Ebay_train.txt")
    train, _ = datasets.sop(root, check_counts=False)
    assert train.images[0] == str(folder / new)

    look_alikes.write_in_shop(root, *IN_SHOP)
    new = "img/WOMEN/Blouses Shirts/1 2.jpg"
    path = "img/WOMEN/Dresses/id_00000002/01_1_front.jpg"
    rename(root, path, new, "Eval/list_eval_partition.txt")
    train, _, _ = datasets.in_shop(root, check_counts=False)
    assert train.images[0] == str(root / new)
    assert train.class_names == ("id_00000002", "id_00000009")


def test_cub200_names_what_is_missing(root):
    folder = look_alikes.write_cub(root, CUB)
    lost = [folder / "images" / "001.Bird_1" / "Bird_0001_1.jpg"]
    lost += [folder / "images" / "200.Bird_200" / "Bird_0000_200.jpg"]
    for path in lost:
        path.unlink()
    lost[1].parent.rmdir()
    os.mkfifo(lost[0])  # is no image either, and would be waited for
    message = f"2 of 8 images are missing: {lost[0]}, {lost[1]}\nUnpack it again, or g"
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        datasets.cub200(root, check_counts=False)
    for name in ("images", "image_class_labels", "classes"):
        (folder / f"{name}.txt").rename(folder / "away")
        with pytest.raises(FileNotFoundError, match=f"{name}.txt'\nUnpack it again, "):
            datasets.cub200(root, check_counts=False)
        (folder / "away").rename(folder / f"{name}.txt")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "images",
            "1 001.Bird_1/Bird_0000_1.jpg",
            "1",
            "Received: .*'1' for 2 columns in ",
        ),
        ("image_class_labels", "8 200\n", "", "Received: KeyError: '8'"),
        ("image_class_labels", "8 200", "8 x", "invalid literal for int.*'x'"),
        ("classes", "100 100.Bird_100\n", "", "Received: KeyError: .*100"),
        ("images", None, "", "Received: .*shape \\(0,\\)"),
    ],
)
def test_cub200_refuses_broken_lists(root, name, old, new, message):
    folder = look_alikes.write_cub(root, CUB)
    path = folder / f"{name}.txt"
    edit(path, path.read_text() if old is None else old, new)
    with pytest.raises(
        ValueError, match=f"here {folder}.*{message}.*\nUnpack it again"
    ):
        datasets.cub200(root, check_counts=False)


# ==== Cars196 ====

WRITE_CARS = {
    "a": look_alikes.write_cars_a,
    "b": look_alikes.write_cars_b,
    "b, labels in the root": lambda *args, **kwargs: look_alikes.write_cars_b(
        *args, labels_in="root", **kwargs
    ),
}


@pytest.mark.parametrize("form", WRITE_CARS)
def test_cars196(root, form):
    WRITE_CARS[form](root, CARS)
    train, test = datasets.cars196(root, check_counts=False)
    names = [f"Maker Model {c} Coupé 2012" for c in (2, 98, 99, 196)]
    assert [*train.class_names, *test.class_names] == names
    assert train.class_sizes.tolist() == [3, 2]
    assert test.class_sizes.tolist() == [3, 2]
    names = [Path(path).relative_to(root).as_posix() for path in train.images]
    if form == "a":
        assert names == [f"car_ims/00000{k}.jpg" for k in range(1, 6)]
        assert train.labels.tolist() == [0, 0, 0, 1, 1]
    else:  # images 0, 2, 4 of 2, 2, 2, 98, 98 lie in cars_train, 1 and 3 in cars_test
        places = [("train", 1), ("train", 2), ("train", 3), ("test", 1), ("test", 2)]
        assert names == [f"cars_{part}/0000{k}.jpg" for part, k in places]
        assert train.labels.tolist() == [0, 0, 1, 0, 1]
    check_images(train, test)
    for half in (train, test):
        for path, label in zip(half.images, half.labels, strict=True):
            class_id = int(half.class_names[label].split()[2])
            assert Path(path).read_bytes() == look_alikes.jpeg(class_id, 0)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("a", "cars_annos.mat"),
        ("b", "devkit/cars_meta.mat"),
        ("b", "devkit/cars_train_annos.mat"),
        ("b", "devkit/cars_test_annos_withlabels.mat"),
    ],
)
def test_cars196_names_a_missing_or_broken_file(root, form, name):
    path = WRITE_CARS[form](root, CARS) / name
    path.unlink()
    message = f"{path}'\nUnpack it again, or get it from a copy listed at https"
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        datasets.cars196(root, check_counts=False)
    path.write_bytes(b"<html>404</html>" * 99)
    with pytest.raises(ValueError, match=f"{path.name} is damaged.*\nUnpack"):
        datasets.cars196(root, check_counts=False)


def test_cars196_refuses_other_annotations(root):
    folder = look_alikes.write_cars_b(root, CARS) / "devkit"
    (folder / "cars_test_annos.mat").rename(folder / "cars_test_annos_withlabels.mat")
    with pytest.raises(ValueError, match="Received: ValueError: .*name class"):
        datasets.cars196(root, check_counts=False)


def test_cars196_says_what_is_missing(root):
    message = "cars_annos.mat'\n.* or the devkit/ fo"
    with pytest.raises(FileNotFoundError, match=message):
        datasets.cars196(root)


# ==== Stanford Online Products ====


def test_sop(root):
    folder = look_alikes.write_sop(root, *SOP)
    for given in (root, folder):
        train, test = datasets.sop(given, check_counts=False)
    assert train.labels.tolist() == [0, 0, 1, 2, 2]
    assert train.class_names == ("1", "3", "11318")
    assert test.labels.tolist() == [0, 0, 1, 1, 1]
    assert test.class_names == ("11319", "22634")
    # 1 % 3 = 1 is a cabinet; 22634 % 3 = 2 a chair.
    assert train.images[0] == str(folder / "cabinet_final" / "110000000001_0.JPG")
    assert test.images[-1] == str(folder / "chair_final" / "110000022634_2.JPG")
    check_images(train, test)


def test_sop_refuses(root):
    folder = look_alikes.write_sop(root, *SOP)
    (folder / "cabinet_final" / "110000000001_1.JPG").unlink()
    with pytest.raises(FileNotFoundError, match="1 of 10 .*_1.JPG\n.* from ftp:"):
        datasets.sop(root, check_counts=False)
    edit(folder / "Ebay_test.txt", " 22634 ", " 3 ")
    with pytest.raises(ValueError, match="Received: .*class 3 in training and test"):
        datasets.sop(root, check_counts=False)
    (folder / "Ebay_test.txt").unlink()
    with pytest.raises(FileNotFoundError, match="Ebay_test.txt'\n.*get it from ftp:"):
        datasets.sop(root, check_counts=False)
    message = "(?s)`root` .*Stanford_Online_Products/Ebay_train.txt'\n"
    with pytest.raises(FileNotFoundError, match=message):
        datasets.sop(root / "elsewhere")


# ==== In-shop ====


@pytest.mark.parametrize("capital", [False, True])
def test_in_shop(root, capital):
    look_alikes.write_in_shop(root, *IN_SHOP)
    if capital:
        (root / "Img").mkdir()
        (root / "img").rename(root / "Img" / "img")
    train, query, gallery = datasets.in_shop(root, check_counts=False)
    assert train.class_names == ("id_00000002", "id_00000009")
    assert train.labels.tolist() == [0, 0, 0, 1]
    assert query.class_names == gallery.class_names == ("id_00000005", "id_00000040")
    assert query.labels.tolist() == [0, 0, 1]
    assert gallery.labels.tolist() == [1, 0]
    base = root / "Img" if capital else root
    expected = base / "img" / "WOMEN" / "Dresses" / "id_00000002" / "01_1_front.jpg"
    assert train.images[0] == str(expected)
    check_images(train, query, gallery)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (({2: 1}, {5: 1, 7: 1}, {5: 1}), "id_00000007 in one of query and gallery onl"),
        (({5: 1}, {5: 1}, {5: 1}), "class id_00000005 in training and test"),
        (({2: 1}, {}, {5: 1}), r"shape \(0,\)"),
    ],
)
def test_in_shop_refuses(root, sizes, message):
    look_alikes.write_in_shop(root, *sizes)
    with pytest.raises(ValueError, match=message):
        datasets.in_shop(root, check_counts=False)


def test_in_shop_names_what_is_missing_or_broken(root):
    look_alikes.write_in_shop(root, *IN_SHOP)
    image = root / "img/MEN/Denim/id_00000009/01_1_front.jpg"
    image.unlink()
    with pytest.raises(FileNotFoundError, match=f"1 of 9 images are missing: {image}"):
        datasets.in_shop(root, check_counts=False)
    path = root / "Eval" / "list_eval_partition.txt"
    edit(path, "query\n", "probe\n")
    with pytest.raises(ValueError, match="KeyError: 'probe'"):
        datasets.in_shop(root, check_counts=False)
    path.unlink()
    with pytest.raises(
        FileNotFoundError, match="Eval/list_eval_partition.txt'\nUnpack"
    ):
        datasets.in_shop(root)


# ==== Omniglot ====

# The alphabets of the small archives and their numbers of characters.
SMALL_1 = {"Balinese": 24, "Early_Aramaic": 22, "Greek": 24, "Korean": 40, "Latin": 26}
SMALL_2 = {"Greek": 24, "Japanese_(katakana)": 47, "Latin": 26, "Sanskrit": 42}
SMALL_2["Tagalog"] = 17


def test_omniglot_of_the_published_size(root):
    look_alikes.write_omniglot(
        root,
        {"images_background_small1": SMALL_1, "images_background_small2": SMALL_2},
    )
    dataset = datasets.omniglot(root)
    # Greek and Latin are in both: 136 + 156 - 24 - 26 = 242.
    assert len(dataset) == 4840
    assert dataset.class_sizes.tolist() == [20] * 242
    assert dataset.class_names[0] == "Balinese/character01"
    assert dataset.class_names[24] == "Early_Aramaic/character01"
    assert list(dataset.class_names) == sorted(dataset.class_names)
    assert dataset.images[1] == str(
        root / "images_background_small1/Balinese/character01/0001_02.png"
    )
    image = tf.io.decode_image(Path(dataset.images[0]).read_bytes()).numpy()
    assert image.shape == (105, 105, 1)
    assert image[50, 52] == 0  # ink
    assert image[0, 0] == 255


def test_omniglot_refuses(root):
    with pytest.raises(
        FileNotFoundError, match="none of images_background, .*\nUnpack"
    ):
        datasets.omniglot(root)
    folder = root / "images_evaluation"
    look_alikes.write_omniglot(root, {folder.name: {"Atlantean": 2}}, drawers=3)
    message = r"\[2, 3\] for 659 characters of 20 images in images_evaluation; check_co"
    with pytest.raises(ValueError, match=message):
        datasets.omniglot(root)
    (folder / "Atlantean" / "Thumbs.db").touch()
    (folder / "Atlantean" / "character01" / "._0001_01.png").touch()  # of a Mac
    (folder / "readme.txt").touch()
    dataset = datasets.omniglot(root, check_counts=False)
    assert dataset.class_sizes.tolist() == [3, 3]
