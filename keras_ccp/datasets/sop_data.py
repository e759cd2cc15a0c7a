"""Stanford Online Products: photos of 22,634 products on eBay."""

import os

from keras_ccp.datasets.archive import (
    as_ids,
    check_files,
    compare_counts,
    find_file,
    find_folder,
    read_rows,
)
from keras_ccp.datasets.dataset import Dataset

_NAME = "Stanford_Online_Products"
_SOURCE = "ftp://cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip"


def sop(root: str | os.PathLike, check_counts: bool = True) -> tuple[Dataset, Dataset]:
    """Loads Stanford Online Products, split as published.

    Args:
        root: The folder `Stanford_Online_Products`, or the one that holds it.
        check_counts: Refuse any but the published numbers of images and classes.

    Returns:
        Training and test half as paths, 59,551 images of 11,318 classes and 60,502 of
        11,316; `class_names` are the archive's class ids, "1" to "22634".

    Raises:
        FileNotFoundError: If a file is missing, with its name and where to get it.
        ValueError: If counts or files are not those of the archive, or the halves share
            a class.
    """
    folder = find_folder(root, _NAME, "Ebay_train.txt", _SOURCE)
    halves = []
    for name in ("Ebay_train.txt", "Ebay_test.txt"):
        path = find_file(folder / name, _SOURCE)
        # Under a header: image id, class id, super-class id, path.
        rows = read_rows(path, 4, skip=1)
        paths = [os.path.join(folder, *row[3].split("/")) for row in rows]
        halves.append(Dataset(paths, as_ids([row[1] for row in rows], path)))
    train, test = halves
    shared = sorted(set(train.class_names) & set(test.class_names), key=int)
    if shared:
        raise ValueError(
            "Ebay_train.txt and Ebay_test.txt must not share classes; unpack the "
            f"archive again. Received: class {shared[0]} in both "
            f"({len(shared)} in total)"
        )
    if check_counts:
        compare_counts("SOP's training half", train, 59_551, 11_318)
        compare_counts("SOP's test half", test, 60_502, 11_316)
    check_files([*train.images, *test.images], _SOURCE)
    return train, test
