"""Checks of labels and class sizes: against the split, the batch and the pool."""

import re
from collections.abc import Iterable, Iterator

import numpy as np

from keras_ccp.app.config import Config
from keras_ccp.app.doctor.findings import Finding
from keras_ccp.app.splits import Splits, check_classes, fold_splits
from keras_ccp.datasets import Dataset

# What exports of tables, and people, write where there is no label.
_NO_LABEL = {"", "-1", "?", "n/a", "nan", "none", "null", "unknown"}
_NO_LABEL |= {"unlabeled", "unlabelled"}
# Of fewer classes a metric says more of these classes than of the model.
_LEAST_SCORED = 5


def check_labels_and_sizes(config: Config, splits: Splits) -> list[Finding]:
    """All checks of this file.

    Args:
        config: the experiment.
        splits: its images.
    """
    return [
        *placeholder_labels(splits),
        *label_gaps(splits),
        *same_names(splits),
        *too_few_classes(config, splits.training),
        *training_singletons(splits.training),
        *unscored_queries(splits),
        *few_scored_classes(config, splits),
        *small_for_batch(config, splits.training),
        *small_for_proxies(config, splits.training),
    ]


def placeholder_labels(splits: Splits) -> Iterator[Finding]:
    """Classes whose name says that there is no label.

    Args:
        splits: the images.
    """
    sizes = {}
    for part in _parts(splits):
        for name, size in zip(part.class_names, part.class_sizes, strict=True):
            if name.strip().lower() in _NO_LABEL:
                sizes[name] = sizes.get(name, 0) + int(size)
    if sizes:
        yield Finding(
            "warning",
            "missing labels",
            "classes are named as if their images had no label: they would be taken "
            "for images of one thing",
            "leave these images out, or give each of them its class",
            _listed(sizes.items()),
        )


def label_gaps(splits: Splits) -> Iterator[Finding]:
    """Numbers that no image has, where labels are numbers that lie close together.

    Args:
        splits: the images.
    """
    names = {name for part in _parts(splits) for name in part.class_names}
    if not all(re.fullmatch("[0-9]{1,9}", name) for name in names):
        return
    present = {int(name) for name in names}
    low, high = min(present), max(present)
    # Sparse ones are ids, of which nobody expects that all are there.
    if high - low + 1 in range(len(present) + 1, 2 * len(present) + 1):
        missing = sorted(set(range(low, high)) - present)
        yield Finding(
            "warning",
            "label gaps",
            f"labels go from {low} to {high}, but some of them have no images",
            "add the images of these classes if they were lost on the way; if there "
            "never were any, nothing is to be done, since classes are numbered anew",
            tuple(f"label {label}" for label in missing),
        )


def same_names(splits: Splits) -> Iterator[Finding]:
    """Names of training classes that test classes have too, but for their spelling.

    Args:
        splits: the images.
    """

    def spelled(part: Dataset) -> dict[str, str]:
        return {re.sub(r"[\s_-]+", " ", n).strip().lower(): n for n in part.class_names}

    training, query = spelled(splits.training), spelled(splits.query)
    shared = sorted(training.keys() & query.keys())
    if shared:
        yield Finding(
            "warning",
            "class overlap",
            "training and test have classes of the same name, but for case and "
            "separators: if they are one class, the test is not of unseen classes",
            "give one class one name, so that all of its images fall on one side",
            tuple(
                f"{training[name]!r} trains, {query[name]!r} tests" for name in shared
            ),
        )


def too_few_classes(config: Config, training: Dataset) -> Iterator[Finding]:
    """Too few training classes for the folds or for a batch.

    Args:
        config: the experiment.
        training: images of the training classes.
    """
    try:
        check_classes(config, training)
    except ValueError as error:
        yield Finding(
            "error",
            "too few classes",
            f"{training.num_classes} training classes do not suffice for the folds, "
            "or for a batch",
            str(error),
        )


def training_singletons(training: Dataset) -> Iterator[Finding]:
    """Training classes of one image.

    Args:
        training: images of the training classes.
    """
    names = _of_size(training, 1, 1)
    if names:
        yield Finding(
            "warning",
            "singletons",
            "training classes have a single image, which has no positive but itself",
            "add images to these classes, or leave them out",
            names,
        )


def unscored_queries(splits: Splits) -> Iterator[Finding]:
    """Test images of whose class there is no other image to be found.

    Args:
        splits: the images.
    """
    query, gallery = splits.query, splits.gallery
    found = _scored(query, gallery)
    if found.all():
        return
    unscored = int(query.class_sizes[~found].sum())
    yield Finding(
        "warning" if found.any() else "error",
        "singletons",
        f"{unscored:,} of {len(query):,} test images have no other image of their "
        "class to find: they cannot be scored, and are left out of the metrics",
        "add images to these test classes, or leave them out"
        + ("" if gallery is None else "; it is the gallery that lacks them"),
        tuple(f"{query.class_names[i]!r}" for i in np.flatnonzero(~found)),
    )


def few_scored_classes(config: Config, splits: Splits) -> Iterator[Finding]:
    """Fewer than five classes to test or to validate on.

    Args:
        config: the experiment.
        splits: its images.
    """
    scored = int(_scored(splits.query, splits.gallery).sum())
    if 0 < scored < _LEAST_SCORED:  # without any it is an error, and told as such
        yield Finding(
            "warning",
            "few classes",
            f"{scored} test class(es) can be scored: the metrics hardly tell how "
            "classes are found that were not trained on",
            "add test classes of two images or more, or leave more classes to the test "
            "by a smaller `data.train_classes`",
        )
    try:
        check_classes(config, splits.training)
    except ValueError:  # likewise
        return
    counts = [
        int(_scored(validation).sum())
        for _, validation in fold_splits(config.data, splits.training)
    ]
    if min(counts) < _LEAST_SCORED:
        yield Finding(
            "warning",
            "few classes",
            f"models validate on {min(counts)} class(es) that can be scored: when "
            "proxies are switched, training ends and which weights are kept hangs on "
            "these few",
            "add training classes of two images or more, or hold out more of them: "
            "by fewer `data.folds`, or by `data.split: ablation`, a third of them",
        )


def small_for_batch(config: Config, training: Dataset) -> Iterator[Finding]:
    """Classes with fewer images than a batch takes of each.

    Args:
        config: the experiment.
        training: images of the training classes.
    """
    wanted = config.training.samples_per_class
    names = _of_size(training, 2, wanted - 1)
    if names:
        least = _least_size(training)
        yield Finding(
            "warning",
            "class sizes",
            f"training classes have fewer than the {wanted} images that "
            "`training.samples_per_class` puts into a batch: images come twice in it",
            "add images to these classes or leave them out, or lower "
            f"`training.samples_per_class` to {least}",
            names,
        )


def small_for_proxies(config: Config, training: Dataset) -> Iterator[Finding]:
    """Classes with fewer images than they get proxies, or than the pool draws.

    Args:
        config: the experiment.
        training: images of the training classes.
    """
    per_class, pool_size = config.model.proxies_per_class, config.callback.pool_size
    if not per_class:
        return
    names = _of_size(training, 2, per_class - 1)
    if names:
        least = _least_size(training)
        yield Finding(
            "warning",
            "class sizes",
            f"training classes have fewer images than the {per_class} proxies of "
            "`model.proxies_per_class`, which are chosen among them: proxies repeat",
            "add images to these classes or leave them out, or lower "
            f"`model.proxies_per_class` to {least}",
            names,
        )
    names = _of_size(training, max(per_class, 2), pool_size - 1)
    if names:
        yield Finding(
            "note",
            "class sizes",
            f"training classes have fewer images than the {pool_size} that "
            "`callback.pool_size` draws: all of their images are candidates",
            "nothing is to be done; `callback.pool_size` may be lowered",
            names,
        )


def _parts(splits: Splits) -> list[Dataset]:
    parts = (splits.training, splits.query, splits.gallery)
    return [part for part in parts if part is not None]


def _scored(query: Dataset, gallery: Dataset | None = None) -> np.ndarray:
    """`(C,)` booleans: a query of the class has another image to find."""
    if gallery is None:
        return query.class_sizes > 1
    return np.isin(query.class_names, gallery.class_names)


def _of_size(dataset: Dataset, low: int, high: int) -> tuple[str, ...]:
    """The classes with `low` to `high` images."""
    sizes = dataset.class_sizes
    chosen = np.flatnonzero((sizes >= low) & (sizes <= high))
    return _listed((dataset.class_names[i], sizes[i]) for i in chosen)


def _least_size(dataset: Dataset) -> int:
    """Size of the smallest class that is not a single image."""
    sizes = dataset.class_sizes
    return int(sizes[sizes > 1].min())


def _listed(sizes: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    return tuple(
        f"{name!r}: {size} image{'s' if size > 1 else ''}" for name, size in sizes
    )
