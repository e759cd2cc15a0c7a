"""Cars196: photos of 196 models of cars."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from keras_ccp.datasets.archive import (
    check_files,
    class_subset,
    compare_counts,
    find_file,
)
from keras_ccp.datasets.argument_names import ROOT
from keras_ccp.datasets.dataset import Dataset

# The addresses at Stanford are dead; this thread keeps the list of copies.
_SOURCE = (
    "a copy listed at "
    "https://github.com/pytorch/vision/issues/7545#issuecomment-1631441616"
)
_LAST_TRAINING_CLASS = 98


def cars196(
    root: str | os.PathLike, check_counts: bool = True
) -> tuple[Dataset, Dataset]:
    """Loads Cars196: models 1-98 train, 99-196 test.

    Two forms of the archive are in use. Both hold the same 16,185 images, and metric
    learning puts the archive's own training and test images together:

    - A: `cars_annos.mat` and `car_ims/000001.jpg`.
    - B: `cars_train/00001.jpg`, `cars_test/00001.jpg` and `devkit/` with
      `cars_meta.mat`, `cars_train_annos.mat` and `cars_test_annos_withlabels.mat`
      (the last may also lie in `root`; `cars_test_annos.mat` has no classes).

    Needs SciPy: `pip install -e ".[cars]"`.

    Args:
        root: The folder of either form.
        check_counts: Refuse any but the published numbers of images and classes.

    Returns:
        Training and test half as paths, 8,054 and 8,131 images of 98 classes each;
        `class_names` such as "AM General Hummer SUV 2000".

    Raises:
        FileNotFoundError: If a file is missing, with its name and where to get it.
        ValueError: If counts or files are not those of the archive.
        ImportError: If SciPy is not installed.
    """
    root = Path(root).expanduser()
    if (root / "car_ims").is_dir() or (root / "cars_annos.mat").is_file():
        paths, class_ids, names = _form_a(root)
    elif (root / "devkit").is_dir() or (root / "cars_train").is_dir():
        paths, class_ids, names = _form_b(root)
    else:
        raise FileNotFoundError(
            f"{ROOT} must hold Cars196. Missing: {root / 'cars_annos.mat'} and "
            f"{root / 'car_ims'}, or {root / 'devkit'} with {root / 'cars_train'} and "
            f"{root / 'cars_test'}. Get them from {_SOURCE}. "
            f"Received: root={str(root)!r}"
        )
    is_training = class_ids <= _LAST_TRAINING_CLASS
    halves = []
    for name, keep, size in (
        ("Cars196's training half", is_training, 8_054),
        ("Cars196's test half", ~is_training, 8_131),
    ):
        half = class_subset(name, paths, class_ids, names, keep)
        if check_counts:
            compare_counts(name, half, size, 98)
        halves.append(half)
    check_files(paths, _SOURCE)
    return halves[0], halves[1]


def _form_a(root: Path) -> tuple[list[str], np.ndarray, dict[int, str]]:
    contents = _read_mat(root / "cars_annos.mat", "annotations", "class_names")
    annotations = contents["annotations"]
    files, class_ids = _columns(
        annotations, "relative_im_path", root / "cars_annos.mat"
    )
    return (
        [os.path.join(root, *name.split("/")) for name in files],
        class_ids,
        _names(contents["class_names"]),
    )


def _form_b(root: Path) -> tuple[list[str], np.ndarray, dict[int, str]]:
    devkit = root / "devkit"
    test_path = root / "cars_test_annos_withlabels.mat"
    if not test_path.is_file():
        test_path = devkit / test_path.name
    paths, class_ids = [], []
    for folder, path in (
        ("cars_train", devkit / "cars_train_annos.mat"),
        ("cars_test", test_path),
    ):
        annotations = _read_mat(path, "annotations")["annotations"]
        files, ids = _columns(annotations, "fname", path)
        paths += [os.path.join(root, folder, name) for name in files]
        class_ids.append(ids)
    names = _read_mat(devkit / "cars_meta.mat", "class_names")["class_names"]
    return paths, np.concatenate(class_ids), _names(names)


def _read_mat(path: Path, *keys: str) -> dict[str, Any]:
    try:
        import scipy.io
    except ImportError as error:
        raise ImportError(
            "Cars196 comes with MATLAB files, which need SciPy: "
            'pip install -e ".[cars]"'
        ) from error
    find_file(path, _SOURCE)
    try:
        contents = scipy.io.loadmat(path, squeeze_me=True)
    except Exception as error:  # whatever a broken file makes the reader do
        raise ValueError(
            f"{path} must be a MATLAB file; get it again from {_SOURCE}. "
            f"Received: {type(error).__name__}: {error}"
        ) from error
    for key in keys:
        if key not in contents:
            found = sorted(name for name in contents if name[:2] != "__")
            raise ValueError(
                f"{path} must hold `{key}`; get it again from {_SOURCE}. "
                f"Received: {', '.join(found)}"
            )
    return contents


def _columns(annotations: Any, field: str, path: Path) -> tuple[list[str], np.ndarray]:
    """File names and int64 class ids of a struct array."""
    annotations = np.atleast_1d(annotations)
    fields = annotations.dtype.names or ()
    for name in (field, "class"):
        if name not in fields:
            raise ValueError(
                f"{path} must have the field `{name}` in `annotations`; get it again "
                f"from {_SOURCE}. Received: fields {', '.join(fields)}"
            )
    # MATLAB stores each number in the smallest type: arithmetic would wrap at 256.
    class_ids = np.array([int(value) for value in annotations["class"]], np.int64)
    return [str(name) for name in annotations[field]], class_ids


def _names(values: Any) -> dict[int, str]:
    return {i: str(name) for i, name in enumerate(np.atleast_1d(values), 1)}
