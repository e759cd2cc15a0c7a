"""The images of an experiment: what trains, what validates, what is searched."""

import dataclasses
import os
from pathlib import Path

from keras_ccp import datasets
from keras_ccp.config import DataConfig
from keras_ccp.datasets import Dataset


@dataclasses.dataclass(frozen=True)
class Splits:
    """Class-disjoint images.

    Args:
        training: images of the training classes.
        query: test images that are searched for.
        gallery: test images that are searched, `None` where they are the queries.
    """

    training: Dataset
    query: Dataset
    gallery: Dataset | None = None


def load_splits(config: DataConfig, root: str | os.PathLike) -> Splits:
    """Loads the images of an experiment.

    Args:
        config: section `data` of a configuration.
        root: folder of the data; not used by the bundled emoji.

    Returns:
        Images for training and test, ready for their size.

    Raises:
        FileNotFoundError: If data are missing; the message says where to get them.
        ValueError: If they are not what the configuration says.
    """
    parts = _load(config, Path(root))
    if isinstance(parts, Dataset):
        parts = parts.split_classes(config.train_classes, config.split_seed)
    return Splits(*(_prepare(part, config) for part in parts))


def fold_splits(config: DataConfig, training: Dataset) -> list[tuple[Dataset, Dataset]]:
    """Divides the training classes.

    Args:
        config: section `data` of a configuration.
        training: images of the training classes.

    Returns:
        For each model to train the images it trains on and those it validates on.
    """
    num_classes = training.num_classes
    if config.split == "ablation":
        ids = [datasets.ablation_split(num_classes)]
    elif config.split == "conventional":
        # Nothing is held out, by definition; the classes of the first fold tell when
        # a problem has converged.
        _, validation = datasets.mlrc_folds(num_classes)[0]
        ids = [(list(range(num_classes)), validation)]
    else:
        ids = datasets.mlrc_folds(num_classes, config.folds)
    return [
        (training.select_classes(first), training.select_classes(second))
        for first, second in ids
    ]


def _load(config: DataConfig, root: Path) -> Dataset | tuple[Dataset, ...]:
    if config.name == "emoji":
        return datasets.emoji()
    if config.name == "omniglot":
        return datasets.omniglot(root, check_counts=config.check_counts)
    general = {
        "folder": datasets.image_folder,
        "npz": datasets.npz,
        "table": datasets.table,
    }
    if config.name in general:
        return general[config.name](root / (config.file or ""))
    published = {
        "cars196": datasets.cars196,
        "cub200": datasets.cub200,
        "in_shop": datasets.in_shop,
        "sop": datasets.sop,
    }
    return published[config.name](root, check_counts=config.check_counts)


def _prepare(dataset: Dataset, config: DataConfig) -> Dataset:
    if not dataset.is_encoded:
        return dataset
    if config.unreadable is not None:
        dataset = datasets.verify(dataset, on_error=config.unreadable)
    return dataset.with_size(config.size, config.short_side)
