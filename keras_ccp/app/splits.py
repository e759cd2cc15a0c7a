"""The images of an experiment: what trains, what validates, what is searched."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from keras_ccp import datasets
from keras_ccp.app.config import Config, DataConfig
from keras_ccp.datasets import Dataset

PARTS = ("training", "query", "gallery")
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Splits:
    """Class-disjoint images; `gallery` is `None` where the queries are searched."""

    training: Dataset
    query: Dataset
    gallery: Dataset | None = None


def load_splits(data: DataConfig, root: str | os.PathLike) -> Splits:
    """Images for training and test, ready for their size."""
    return load_recorded(data, root, {})[0]


def load_recorded(
    data: DataConfig,
    root: str | os.PathLike,
    recorded: Mapping[str, Iterable[str]],
) -> tuple[Splits, tuple[str, ...]]:
    """The classes that are recorded for each part, if any, and names of the others."""
    root = Path(root)
    try:
        parts = _load(data, root)
    except (FileNotFoundError, ValueError) as error:
        # Not its own type: that of bytes which are not text takes other arguments.
        kind = ValueError if isinstance(error, ValueError) else FileNotFoundError
        what, _, fix = str(error).partition("\n")
        raise kind(
            f"`data.name: {data.name}` cannot be loaded from {root.absolute()}. "
            f"{what}\n{fix}. If the data are elsewhere, say where by `--data ROOT`"
        ) from error
    others: tuple[str, ...] = ()
    if recorded:
        parts, others = _as_recorded(parts, recorded, root)
    elif isinstance(parts, Dataset):
        share, count = data.train_classes, parts.num_classes
        num_training = share if isinstance(share, int) else round(share * count)
        if not 0 < num_training < count:
            raise ValueError(
                "`data.train_classes` must leave classes to train and others to test. "
                f"Received: {share} of the {count} classes of the data"
            )
        parts = parts.split_classes(data.train_classes, data.split_seed)
    return Splits(*(_prepare(part, data) for part in parts)), others


def _as_recorded(
    parts: Dataset | tuple[Dataset, ...],
    recorded: Mapping[str, Iterable[str]],
    root: Path,
) -> tuple[list[Dataset], tuple[str, ...]]:
    """The recorded classes of each part, and the names of the others."""
    if isinstance(parts, Dataset):
        parts = parts, parts
    known = {name for part in PARTS for name in recorded.get(part, ())}
    found = dict.fromkeys(name for part in parts for name in part.class_names)
    others = tuple(name for name in found if name not in known)
    chosen = []
    for name, part in zip(PARTS, parts, strict=False):
        ids = {class_name: i for i, class_name in enumerate(part.class_names)}
        if missing := [name for name in recorded[name] if name not in ids]:
            raise ValueError(
                f"{root.absolute()} must hold the classes of the run. Received: no "
                f"{shown(missing)}; {shown(others) or 'nothing'} beside the others\n"
                "Name and place the classes as they were, or begin another run"
            )
        chosen.append(part.select_classes([ids[c] for c in recorded[name]]))
    return chosen, others


def _load(data: DataConfig, root: Path) -> Dataset | tuple[Dataset, ...]:
    if data.name == "emoji":
        return datasets.emoji()
    name = {"folder": "image_folder"}.get(data.name, data.name)
    options = {} if data.is_unsplit else {"check_counts": data.check_counts}
    return getattr(datasets, name)(root / (data.file or ""), **options)


def shown(names: Sequence[str]) -> str:
    """The first few of many names, and how many there are."""
    more = f", ... ({len(names):,})" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _prepare(dataset: Dataset, data: DataConfig) -> Dataset:
    if not dataset.is_encoded:
        return dataset
    if data.unreadable is not None:
        dataset = datasets.verify(dataset, on_error=data.unreadable)
    return dataset.with_size(data.size, data.short_side)


def fold_splits(data: DataConfig, training: Dataset) -> list[tuple[Dataset, Dataset]]:
    """For each model the images it trains on and those it validates on."""
    num_classes = training.num_classes
    if data.split == "ablation":
        ids = [datasets.ablation_split(num_classes)]
    elif data.split == "conventional":
        # Nothing is held out, by definition; the classes of the first fold tell when
        # a problem has converged.
        _, validation = datasets.mlrc_folds(num_classes)[0]
        ids = [(list(range(num_classes)), validation)]
    else:
        ids = datasets.mlrc_folds(num_classes, data.folds)
    return [
        (training.select_classes(first), training.select_classes(second))
        for first, second in ids
    ]


def check_classes(config: Config, training: Dataset) -> None:
    """Refuses training classes that are too few for the folds or for a batch."""
    split, count = config.data.split, training.num_classes
    least = config.data.folds if split == "mlrc" else 2
    if count < least:
        raise ValueError(
            f"`data.split: {split}` needs at least {least} training classes. Received: "
            f"{count}\nGive more, or change `data.folds` or `data.train_classes`"
        )
    size, per_class = config.training.batch_size, config.training.samples_per_class
    for number, (fold, validation) in enumerate(fold_splits(config.data, training), 1):
        model, most = f"model {number} of `data.split: {split}`", fold.num_classes
        if most * per_class < size:
            raise ValueError(
                f"`training.batch_size` must be at most {most * per_class}: {model} "
                f"trains on {most} of the {count} training classes. Received: {size}\n"
                f"Lower it, or raise `training.samples_per_class` {per_class}"
            )
        if validation.class_sizes.max() < 2:
            raise ValueError(
                f"{model} validates on {len(validation)} images, each of its own class"
                "\nAdd images, or leave classes of one image out"
            )
