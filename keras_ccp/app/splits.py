"""The images of an experiment: what trains, what validates, what is searched."""

import dataclasses
import os
from pathlib import Path

import numpy as np

from keras_ccp import datasets
from keras_ccp.app.config import Config, DataConfig
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
    parts = _load_at(config, Path(root))
    if isinstance(parts, Dataset):
        _check_train_classes(config, parts)
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


def check_classes(config: Config, training: Dataset) -> None:
    """Refuses training classes that are too few for the folds or for a batch.

    Args:
        config: the experiment.
        training: images of the training classes.

    Raises:
        ValueError: If they are; the message names the keys of the configuration.
    """
    count = training.num_classes
    least = config.data.folds if config.data.split == "mlrc" else 2
    if count < least:
        raise ValueError(
            f"`data.split: {config.data.split}` needs at least {least} training "
            "classes; give more, or change `data.folds`, `data.train_classes` or "
            f"`data.split`. Received: {count} training classes"
        )
    per_class = config.training.samples_per_class
    wanted = config.training.batch_size // per_class
    folds = fold_splits(config.data, training)
    for number, (fold, validation) in enumerate(folds, 1):
        if fold.num_classes < wanted:
            raise ValueError(
                f"`training.batch_size` {config.training.batch_size} with "
                f"`training.samples_per_class` {per_class} takes images of {wanted} "
                f"classes, but model {number} of `data.split: {config.data.split}` "
                f"trains on {fold.num_classes} of the {count} training classes: "
                "lower `training.batch_size` to "
                f"{fold.num_classes * per_class} or less, or raise "
                "`training.samples_per_class`"
            )
        if np.max(validation.class_sizes) < 2:
            raise ValueError(
                "each model needs validation classes of two images or more, by which "
                f"it is chosen: add images, or leave such classes out. Received: model "
                f"{number} validates on {len(validation)} images, each of its own class"
            )


def _load_at(config: DataConfig, root: Path) -> Dataset | tuple[Dataset, ...]:
    place = (
        f"`data.name: {config.name}` cannot be loaded from {root.absolute()}; if the "
        "data are elsewhere, say where by `--data ROOT`. "
    )
    try:
        return _load(config, root)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{place}{error}") from error
    except ValueError as error:
        raise ValueError(f"{place}{error}") from error


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


def _check_train_classes(config: DataConfig, dataset: Dataset) -> None:
    share, count = config.train_classes, dataset.num_classes
    num_training = share if isinstance(share, int) else round(share * count)
    if count < 2:
        raise ValueError(
            "The data must have at least 2 classes, some to train and others to test: "
            f"add classes. Received: {count} class"
        )
    if not 0 < num_training < count:
        raise ValueError(
            "`data.train_classes` must leave classes to train and others to test: a "
            f"share above {0.5 / count:.3g} and below {1 - 0.5 / count:.3g}, or a "
            f"number from 1 to {count - 1}. Received: {share} of the {count} classes "
            "of the data"
        )


def _prepare(dataset: Dataset, config: DataConfig) -> Dataset:
    if not dataset.is_encoded:
        return dataset
    if config.unreadable is not None:
        dataset = datasets.verify(dataset, on_error=config.unreadable)
    return dataset.with_size(config.size, config.short_side)
