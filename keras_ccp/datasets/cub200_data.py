"""CUB-200-2011: photos of birds of 200 species."""

import os

from keras_ccp.datasets.archive import (
    as_ids,
    check_files,
    class_subset,
    compare_counts,
    find_file,
    find_folder,
    read_rows,
)
from keras_ccp.datasets.argument_names import DOWNLOAD
from keras_ccp.datasets.dataset import Dataset
from keras_ccp.datasets.download import download_folder

_NAME = "CUB_200_2011"
_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
_SHA256 = "0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081"
_SOURCE = f"{_URL}, or {DOWNLOAD}"
_LAST_TRAINING_CLASS = 100


def cub200(
    root: str | os.PathLike, download: bool = False, check_counts: bool = True
) -> tuple[Dataset, Dataset]:
    """Loads CUB-200-2011: species 1-100 train, 101-200 test.

    That is the split of metric learning; the archive's `train_test_split.txt` is
    another one, and is not read.

    Args:
        root: The folder `CUB_200_2011`, or the one that holds it.
        download: Download the archive and unpack it into `root`, unless it is there.
        check_counts: Refuse any but the published numbers of images and classes.

    Returns:
        Training and test half as paths, 5,864 and 5,924 images of 100 classes each;
        `class_names` such as "001.Black_footed_Albatross".

    Raises:
        FileNotFoundError: If a file is missing, with its name and where to get it.
        ValueError: If counts or files are not those of the archive.
    """
    if download:
        download_folder(_URL, _SHA256, root, _NAME, "images.txt")
    folder = find_folder(root, _NAME, "images.txt", _SOURCE)
    lists = {
        name: read_rows(find_file(folder / f"{name}.txt", _SOURCE), 2)
        for name in ("images", "image_class_labels", "classes")
    }
    class_of = dict(lists["image_class_labels"])
    unlabelled = [image for image, _ in lists["images"] if image not in class_of]
    if unlabelled:
        raise ValueError(
            f"{folder / 'image_class_labels.txt'} must give each image a class; unpack "
            f"the archive again. Received: none for image {unlabelled[0]} "
            f"({len(unlabelled)} in total)"
        )
    class_ids = as_ids(
        [class_of[image] for image, _ in lists["images"]],
        folder / "image_class_labels.txt",
    )
    paths = [os.path.join(folder, "images", name) for _, name in lists["images"]]
    numbers = as_ids([number for number, _ in lists["classes"]], folder / "classes.txt")
    names = dict(
        zip(numbers.tolist(), (name for _, name in lists["classes"]), strict=True)
    )
    is_training = class_ids <= _LAST_TRAINING_CLASS
    train = class_subset("CUB's training half", paths, class_ids, names, is_training)
    test = class_subset("CUB's test half", paths, class_ids, names, ~is_training)
    if check_counts:
        compare_counts("CUB's training half", train, 5_864, 100)
        compare_counts("CUB's test half", test, 5_924, 100)
    check_files(paths, _SOURCE)
    return train, test
