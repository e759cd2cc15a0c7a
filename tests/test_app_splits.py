"""Data with too few classes are refused, in the words of the configuration."""

import numpy as np
import pytest

from keras_ccp.app.config import check_config
from keras_ccp.app.splits import check_classes, load_splits
from keras_ccp.datasets import Dataset


def config(batch_size=32, samples_per_class=4, **data):
    return check_config(
        {
            "method": "C2",
            "data": {"name": "folder", "folds": 4, **data},
            "loss": {"name": "contrastive"},
            "training": {
                "batch_size": batch_size,
                "samples_per_class": samples_per_class,
            },
        }
    )


def dataset(num_classes, size=2):
    labels = np.repeat(np.arange(num_classes), size)
    return Dataset([b"image"] * len(labels), labels)


def test_too_few_classes_for_a_batch():
    # Of ten classes a fold trains on 10 - 10 // 4 = 8: as many as 32 / 4.
    check_classes(config(), dataset(10))
    message = (
        "`training.batch_size` must be at most 28: model 1 of `data.split: mlrc` "
        "trains on 7 of the 9 training classes. Received: 32\n"
    )
    with pytest.raises(ValueError, match=message):
        check_classes(config(), dataset(9))
    check_classes(config(28), dataset(9))
    check_classes(config(split="conventional"), dataset(8))
    with pytest.raises(ValueError, match="`data.split: ablation` trains on 6 of the 9"):
        check_classes(config(split="ablation"), dataset(9))


@pytest.mark.parametrize(
    ("split", "num_classes", "least"), [("mlrc", 3, 4), ("ablation", 1, 2)]
)
def test_too_few_classes_for_the_split(split, num_classes, least):
    message = f"`data.split: {split}` needs at least {least} training classes"
    with pytest.raises(ValueError, match=message):
        check_classes(config(4, 2, split=split), dataset(num_classes))


def test_validation_classes_of_single_images():
    with pytest.raises(ValueError, match="validates on 4 images, each of its own cl"):
        check_classes(config(4, 1), dataset(16, size=1))


@pytest.mark.parametrize("train_classes", [3, 7, 0.9, 0.1])
def test_classes_to_train_and_to_test(tmp_path, train_classes):
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(b"")
    with pytest.raises(ValueError, match="`data.train_classes` must leave .* the 3"):
        load_splits(config(train_classes=train_classes).data, tmp_path)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"name": "folder"}, ValueError),  # a folder of something else
        ({"name": "folder", "file": "gone"}, FileNotFoundError),
        ({"name": "table", "file": "gone.csv"}, FileNotFoundError),
        ({"name": "npz", "file": "empty.npz"}, ValueError),
        ({"name": "cub200"}, FileNotFoundError),
    ],
)
def test_another_root_than_that_of_the_data_is_said(tmp_path, data, error):
    (tmp_path / "runs").mkdir()
    (tmp_path / "empty.npz").write_bytes(b"")
    with pytest.raises(error, match=rf"from {tmp_path}\. .+\n.* by `--data ROOT`"):
        load_splits(config(**data).data, tmp_path)
