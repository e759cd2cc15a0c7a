"""`diagnose`: every check of a configuration and its data."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from keras_ccp.app.config import Config
from keras_ccp.app.doctor.copies import copy_findings
from keras_ccp.app.doctor.estimate import estimate
from keras_ccp.app.doctor.findings import COLOURS, Finding, error, has_errors, note
from keras_ccp.app.doctor.images import Part, image_findings
from keras_ccp.app.doctor.labels import label_findings
from keras_ccp.app.splits import Splits, load_splits
from keras_ccp.datasets import Dataset, list_images
from keras_ccp.datasets.readers import HIDDEN


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
    findings = _missing_weights(config, root)
    # Broken images are looked for below, where all of them are named.
    trusting = config.data.model_copy(update={"unreadable": None})
    try:
        splits = load_splits(trusting, root)
    except (ValueError, TypeError, OSError, ImportError) as reason:
        what = "the data cannot be loaded; nothing else was checked"
        return [*findings, Finding("error", "data", what, str(reason))]
    skips = config.data.unreadable == "skip"
    parts = [
        Part(name, dataset, root, progress)
        for name, dataset in vars(splits).items()
        if dataset is not None
    ]
    findings += [*image_findings(parts, skips), *copy_findings(parts)]
    if config.data.name == "folder":
        findings += _other_files(parts, root / (config.data.file or ""))
    if skips and not has_errors(findings):
        splits = Splits(**{part.name: _readable(part) for part in parts})
    findings += label_findings(config, splits)
    if not has_errors(findings):
        findings += estimate(config, splits, root)
    order = list(COLOURS)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _missing_weights(config: Config, root: Path) -> list[Finding]:
    weights = config.embedder.weights
    if weights in (None, "imagenet") or (root / weights).is_file():
        return []
    return error(
        "weights",
        [weights],
        f"the file of `embedder.weights` is not below the data root {root.absolute()}",
        "put it there, name another, or use random weights: `embedder.weights: null`",
    )


def _readable(part: Part) -> Dataset:
    """The images that a run keeps, which has an image of each class left."""
    dataset, kept = part.dataset, part.is_readable
    left = Dataset(dataset.images[kept], dataset.labels[kept], dataset.class_names)
    if not dataset.is_encoded:
        return left
    return left.with_size(dataset.size, dataset.short_side)


def _other_files(parts: Sequence[Part], folder: Path) -> list[Finding]:
    """Files of a folder that are no images of the dataset, by their type or place."""
    # Of one spelling: a root may be given as "." or with a slash too many.
    known = {Path(path) for part in parts for path in part.dataset.images}
    others = sorted(path for path in _files(folder.expanduser()) if path not in known)
    endings = Counter(path.suffix.lower() or "no ending" for path in others)
    counts = ", ".join(f"{count:,} {name}" for name, count in endings.most_common())
    return note(
        "other files",
        [os.path.relpath(path, parts[0].root) for path in others],
        f"files of other types or outside of class folders are not read: {counts}",
        "none if they are no images; convert .tif, .heic and the like to JPEG or PNG, "
        "and move images out of deeper folders into the folder of their class",
    )


def _files(folder: Path) -> Iterator[Path]:
    """All files but hidden ones, as the loader sees them."""
    listing = list_images(folder)
    yield from map(Path, listing.images)
    for path, reason in listing.passed_over:
        if reason != HIDDEN and not os.path.isdir(path):
            yield Path(path)
