"""The bundled emoji and the published archives, with their published counts.

A loader raises ValueError where lists or counts are not those of the archive, and
FileNotFoundError where a file is missing, and says where to get it.
"""

import contextlib
import glob
import lzma
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import scipy.io

from keras_ccp.datasets.archive import download_folder
from keras_ccp.datasets.dataset import Dataset
from keras_ccp.datasets.readers import find_files
from keras_ccp.files import reading

_CUB = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
_CUB_SHA256 = "0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081"
_SOP = "ftp://cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip"
_IN_SHOP = (
    "http://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html "
    "(list_eval_partition.txt and img.zip, unpacked)"
)
# The addresses at Stanford are dead; this thread keeps the list of copies.
_CARS = (
    "a copy listed at "
    "https://github.com/pytorch/vision/issues/7545#issuecomment-1631441616"
)
_OMNIGLOT = "https://github.com/brendenlake/omniglot/raw/master/python"
# Characters of each folder. The small ones are parts of the background set, and share
# the Greek and the Latin alphabet.
_CHARACTERS = {
    "images_background": 964,
    "images_evaluation": 659,
    "images_background_small1": 136,
    "images_background_small2": 156,
}
_OMNIGLOT_SHA256 = {
    "images_background_small1": (
        "f38eb80f801274ac2b4dff5b24289016bfaba4a7d5bb50deebf27104ad6cb8a4"
    ),
    "images_background_small2": (
        "3ccaa407515a8778e5d0861875af38b17e418f301ad5bb3b5a6b65d901a41c7f"
    ),
}

_OTHER = "check_counts=False (`data.check_counts: false`) takes others of the same form"


def emoji() -> Dataset:
    """Loads 461 emoji as drawn by six vendors: no download, about 0.2 s.

    Images are sorted by class; within a class the vendors are Noto, Noto v1,
    Twemoji, Fluent flat, EmojiOne, FxEmoji, in this order. One palette of 160 colours
    costs 3.19 of 255 in mean absolute difference. Authors and licences are in
    `bundled/ATTRIBUTION.txt`; `tools/build_emoji.py` says how the images were made.

    Returns:
        A dataset of 2,766 images `(2766, 32, 32, 3)` uint8 on white, six for each
        class; `class_names` such as "alarm-clock".
    """
    return _load_emoji(Path(__file__).parent / "bundled")


def _load_emoji(folder: Path) -> Dataset:
    names = (folder / "emoji_classes.txt").read_text(encoding="utf-8").split()
    raw = np.frombuffer(lzma.decompress((folder / "emoji.xz").read_bytes()), np.uint8)
    palette = raw[:768].reshape(256, 3)
    # Stored vendor by vendor and column by column: that packs smaller.
    columns = raw[768:].reshape(6, len(names), 32, 32)
    rows = columns.transpose(1, 0, 3, 2).reshape(-1, 32, 32)
    return Dataset(palette[rows], np.repeat(np.arange(len(names)), 6), names)


def cub200(
    root: str | os.PathLike, download: bool = False, check_counts: bool = True
) -> tuple[Dataset, Dataset]:
    """Loads CUB-200-2011: species 1-100 train, 101-200 test.

    The archive's `train_test_split.txt` is another split, and is not read.

    Args:
        root: The folder `CUB_200_2011`, or the one that holds it.
        download: Download the archive and unpack it into `root`, unless it is there.
        check_counts: Refuse any but the published numbers of images and classes.

    Returns:
        Training and test half as paths, 5,864 and 5,924 images of 100 classes each;
        `class_names` such as "001.Black_footed_Albatross".
    """
    folder = _folder(root, "CUB_200_2011", "images.txt")
    if download and not folder.exists():
        download_folder(_CUB, _CUB_SHA256, folder)
    with _reading(folder, f"{_CUB}, or remove it and in Python pass download=True"):
        images, class_of, names = (
            dict(_rows(folder / f"{name}.txt", 2))
            for name in ("images", "image_class_labels", "classes")
        )
        halves = _halves(
            [os.path.join(folder, "images", name) for name in images.values()],
            [int(class_of[image]) for image in images],
            {int(class_id): name for class_id, name in names.items()},
            last_training_class=100,
        )
        return _published(halves, check_counts, (5_864, 100), (5_924, 100))


def cars196(
    root: str | os.PathLike, check_counts: bool = True
) -> tuple[Dataset, Dataset]:
    """Loads Cars196: models 1-98 train, 99-196 test.

    Two forms of the archive are in use, with the same 16,185 images: `cars_annos.mat`
    and `car_ims/`; or `cars_train/`, `cars_test/` and `devkit/` with `cars_meta.mat`,
    `cars_train_annos.mat` and `cars_test_annos_withlabels.mat` (which may also lie in
    `root`).

    Args:
        root: The folder of either form.
        check_counts: Refuse any but the published numbers of images and classes.

    Returns:
        Training and test half as paths, 8,054 and 8,131 images of 98 classes each;
        `class_names` such as "AM General Hummer SUV 2000".
    """
    root = Path(root).expanduser()

    def read(path: Path, key: str) -> np.ndarray:
        with path.open("rb") as file, reading(f"{path} is damaged", ""):
            return np.atleast_1d(scipy.io.loadmat(file, squeeze_me=True)[key])

    with _reading(root, f"{_CARS}, cars_annos.mat and car_ims/ or the devkit/ form"):
        if (root / "devkit").is_dir():
            names = read(root / "devkit" / "cars_meta.mat", "class_names")
            test = root / "cars_test_annos_withlabels.mat"
            test = test if test.is_file() else root / "devkit" / test.name
            parts = [
                ("cars_train", root / "devkit" / "cars_train_annos.mat", "fname"),
                ("cars_test", test, "fname"),
            ]
        else:
            names = read(root / "cars_annos.mat", "class_names")
            parts = [("", root / "cars_annos.mat", "relative_im_path")]
        paths, class_ids = [], []
        for folder, path, field in parts:
            images = read(path, "annotations")
            paths += [
                os.path.join(root, folder, *name.split("/")) for name in images[field]
            ]
            # MATLAB stores each in the smallest type: arithmetic would wrap at 256.
            class_ids += [int(class_id) for class_id in images["class"]]
        names = {class_id: str(name) for class_id, name in enumerate(names, 1)}
        halves = _halves(paths, class_ids, names, last_training_class=98)
        return _published(halves, check_counts, (8_054, 98), (8_131, 98))


def sop(root: str | os.PathLike, check_counts: bool = True) -> tuple[Dataset, Dataset]:
    """Loads Stanford Online Products, split as published.

    Args:
        root: The folder `Stanford_Online_Products`, or the one that holds it.
        check_counts: Refuse any but the published numbers of images and classes.

    Returns:
        Training and test half as paths, 59,551 images of 11,318 classes and 60,502 of
        11,316; `class_names` are the archive's class ids, "1" to "22634".
    """
    folder = _folder(root, "Stanford_Online_Products", "Ebay_train.txt")
    halves = []
    with _reading(folder, _SOP):
        for name in ("Ebay_train.txt", "Ebay_test.txt"):
            # Under a header: image id, class id, super-class id, path.
            rows = _rows(folder / name, 4, skip=1)
            paths = [os.path.join(folder, *row[3].split("/")) for row in rows]
            halves.append(Dataset(paths, [int(row[1]) for row in rows]))
        return _published(halves, check_counts, (59_551, 11_318), (60_502, 11_316))


def in_shop(
    root: str | os.PathLike, check_counts: bool = True
) -> tuple[Dataset, Dataset, Dataset]:
    """Loads the In-shop Clothes Retrieval Benchmark of DeepFashion.

    Query and gallery hold the same items, and number them the same.

    Args:
        root: The folder with `Eval/list_eval_partition.txt` and `img/` (or `Img/img/`),
            or the one that holds it as "In-shop Clothes Retrieval Benchmark".
        check_counts: Refuse any but the published numbers of images and items.

    Returns:
        Training, query and gallery images as paths: 25,882 of 3,997 items, 14,218 and
        12,612 of 3,985 others; `class_names` such as "id_00000001".
    """
    partition = os.path.join("Eval", "list_eval_partition.txt")
    folder = _folder(root, "In-shop Clothes Retrieval Benchmark", partition)
    base = folder if (folder / "img").is_dir() else folder / "Img"
    lists = {part: ([], []) for part in ("train", "query", "gallery")}
    with _reading(folder, _IN_SHOP):
        # Two lines of header: the number of images, the names of the columns.
        for name, item, part in _rows(folder / partition, 3, skip=2, from_right=True):
            paths, items = lists[part]
            paths.append(os.path.join(base, *name.split("/")))
            items.append(item)
        parts = train, query, gallery = [Dataset(*part) for part in lists.values()]
        if lone := set(query.class_names) ^ set(gallery.class_names):
            raise ValueError(f"{min(lone)} in one of query and gallery only")
        counts = (25_882, 3_997), (14_218, 3_985), (12_612, 3_985)
        return _published(parts, check_counts, *counts)


def omniglot(
    root: str | os.PathLike, download: bool = False, check_counts: bool = True
) -> Dataset:
    """Loads Omniglot: every character is a class, 20 images of 105 x 105 each.

    Reads those of the folders `images_background`, `images_evaluation` (together 1,623
    characters of fifty alphabets), `images_background_small1` and
    `images_background_small2` (242 of eight) that are in `root`. A character that is
    in two of them is taken once.

    Args:
        root: The folder that holds the folders above.
        download: Download the two small archives and unpack them into `root`, unless
            they or the background set, whose parts they are, are there.
        check_counts: Refuse any but the published numbers of images and characters.

    Returns:
        A dataset of paths, by alphabet; `class_names` such as "Greek/character01".
    """
    root = Path(root).expanduser()
    if download and not (root / "images_background").exists():
        for name, sha256 in _OMNIGLOT_SHA256.items():
            if not (root / name).exists():
                download_folder(f"{_OMNIGLOT}/{name}.zip", sha256, root / name)
    images: dict[str, list[str]] = {}
    with _reading(root, f"{_OMNIGLOT}/<folder>.zip, or in Python pass download=True"):
        present = [name for name in _CHARACTERS if (root / name).is_dir()]
        if not present:
            raise FileNotFoundError(f"none of {', '.join(_CHARACTERS)}")
        for folder in present:
            found: dict[str, list[str]] = {}
            # Passes over hidden files: a Mac puts ._0001_01.png beside 0001_01.png.
            for path in glob.glob("*/character*/*.png", root_dir=root / folder):
                character = Path(path).parent.as_posix()
                found.setdefault(character, []).append(os.path.join(root, folder, path))
            counts = [len(found), *set(map(len, found.values()))]
            if check_counts and counts != [_CHARACTERS[folder], 20]:
                published = f"{_CHARACTERS[folder]} characters of 20 images in {folder}"
                raise ValueError(f"{counts} for {published}; {_OTHER}")
            images = found | images
        names = [name for name in sorted(images) for _ in images[name]]
        paths = [path for name in sorted(images) for path in sorted(images[name])]
        return Dataset(paths, names)


def _folder(root: str | os.PathLike, name: str, file: str) -> Path:
    """The folder of an archive: `root` itself if the file is in it, or `name` in it."""
    root = Path(root).expanduser()
    return root if (root / file).is_file() else root / name


def _reading(folder: Path, source: str) -> contextlib.AbstractContextManager:
    return reading(
        f"`root` (--data) must hold the published archive, here {folder}",
        f"Unpack it again, or get it from {source}",
    )


def _rows(
    path: Path, num_columns: int, skip: int = 0, from_right: bool = False
) -> list[list[str]]:
    """Columns of a text file: the last, or with `from_right` the first, has spaces."""
    rows = []
    for line in filter(str.strip, path.read_text("utf-8").split("\n")[skip:]):
        split = line.strip().rsplit if from_right else line.strip().split
        rows.append(split(None, num_columns - 1))
        if len(rows[-1]) < num_columns:
            raise ValueError(f"{line!r} for {num_columns} columns in {path}")
    return rows


def _halves(
    paths: Sequence[str],
    class_ids: Sequence[int],
    names: dict[int, str],
    last_training_class: int,
) -> list[Dataset]:
    ids, paths = np.array(class_ids), np.array(paths, object)
    is_training = ids <= last_training_class
    return [
        Dataset(paths[keep], ids[keep], [names[i] for i in np.unique(ids[keep])])
        for keep in (is_training, ~is_training)
    ]


def _published(
    parts: Sequence[Dataset], check_counts: bool, *published: tuple[int, int]
) -> tuple[Dataset, ...]:
    """The parts, of which the first shares no class with the others."""
    counts = [(len(part), part.num_classes) for part in parts]
    if check_counts and counts != list(published):
        raise ValueError(f"{counts} (images, classes) for {list(published)}; {_OTHER}")
    test_names = {name for part in parts[1:] for name in part.class_names}
    if shared := test_names.intersection(parts[0].class_names):
        raise ValueError(f"class {min(shared)} in training and test")
    find_files([path for part in parts for path in part.images])
    return tuple(parts)
