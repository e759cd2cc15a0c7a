"""`diagnose`: every check of a configuration and its data."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from keras_ccp.app.config import Config, EmbedderConfig
from keras_ccp.app.doctor.copy_checks import check_copies
from keras_ccp.app.doctor.estimate import estimate
from keras_ccp.app.doctor.findings import Finding, by_severity, has_errors
from keras_ccp.app.doctor.image_checks import check_images
from keras_ccp.app.doctor.image_facts import read_images
from keras_ccp.app.doctor.label_checks import check_labels_and_sizes
from keras_ccp.app.doctor.other_files import other_files
from keras_ccp.app.doctor.part import Part
from keras_ccp.app.search.image_files import progress_bar
from keras_ccp.app.splits import Splits, load_splits
from keras_ccp.datasets import Dataset


def diagnose(
    config: Config, root: str | os.PathLike, progress: bool = True
) -> list[Finding]:
    """Looks for what would stop a run or spoil its result, before time is spent on it.

    Every image is read once. A few training steps are taken, unless errors are found
    before.

    Args:
        config: the experiment.
        root: folder of the data.
        progress: whether a bar is shown, on the standard error stream. Defaults to
            True.

    Returns:
        What was found, errors first. Notes of time and memory are always there if no
        other error is.
    """
    root = Path(root)
    findings = list(missing_weights(config.embedder, root))
    # Broken images are looked for below, where all of them are named.
    trusting = config.data.model_copy(update={"unreadable": None})
    try:
        splits = load_splits(trusting, root)
    except (ValueError, TypeError, OSError, ImportError) as error:
        what = "the data cannot be loaded; nothing else was checked"
        return [*findings, Finding("error", "data", what, str(error))]
    skips = config.data.unreadable == "skip"
    parts = _read(splits, root, progress)
    findings += [*check_images(parts, skips), *check_copies(parts)]
    if config.data.name == "folder":
        findings += other_files(parts, root / (config.data.file or ""))
    if skips and not has_errors(findings):
        splits = Splits(**{part.name: _without_failures(part) for part in parts})
    findings += check_labels_and_sizes(config, splits)
    if not has_errors(findings):
        findings += estimate(config, splits, root)
    return by_severity(findings)


def missing_weights(config: EmbedderConfig, root: Path) -> Iterator[Finding]:
    """The file of weights, where it is not there.

    Args:
        config: section `embedder` of a configuration.
        root: folder to which it is relative.
    """
    if config.weights in (None, "imagenet") or (root / config.weights).is_file():
        return
    yield Finding(
        "error",
        "weights",
        f"the file of `embedder.weights` is not below the data root {root.absolute()}",
        "put it there, name another by `embedder.weights`, or begin with random "
        "weights by `embedder.weights: null`",
        (config.weights,),
    )


def _read(splits: Splits, root: Path, progress: bool) -> list[Part]:
    datasets = {
        "training": splits.training,
        "query": splits.query,
        "gallery": splits.gallery,
    }
    datasets = {name: part for name, part in datasets.items() if part is not None}
    with progress_bar(progress) as bar:
        total = sum(len(part) for part in datasets.values())
        task = bar.add_task("reading images", total=total)
        return [
            Part(name, part, read_images(part, lambda: bar.advance(task)), root)
            for name, part in datasets.items()
        ]


def _without_failures(part: Part) -> Dataset:
    """The images that a run keeps, which has an image of each class left."""
    dataset = part.dataset
    if not part.facts.failures:
        return dataset
    kept = np.setdiff1d(np.arange(len(dataset)), list(part.facts.failures))
    left = Dataset(dataset.images[kept], dataset.labels[kept], dataset.class_names)
    return left.with_size(dataset.size, dataset.short_side)
