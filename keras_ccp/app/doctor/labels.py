"""Labels and class sizes, against the split, the batch and the pool."""

import re
from collections.abc import Sequence

import numpy as np

from keras_ccp.app.config import Config
from keras_ccp.app.doctor.findings import Finding, error, note, warning
from keras_ccp.app.splits import Splits, check_classes, fold_splits
from keras_ccp.datasets import Dataset

# What exports of tables, and people, write where there is no label.
_NO_LABEL = {"", "-1", "?", "n/a", "nan", "none", "null", "unknown"}
_NO_LABEL |= {"unlabeled", "unlabelled"}
# Of fewer classes a metric says more of these classes than of the model.
_LEAST_SCORED = 5


def label_findings(config: Config, splits: Splits) -> list[Finding]:
    """What is wrong with labels and the sizes of classes."""
    parts = [part for part in vars(splits).values() if part is not None]
    return [
        *_placeholders(parts),
        *_gaps(parts),
        *_same_names(splits),
        *_few_classes(config, splits),
        *_unscored(splits),
        *_small_classes(config, splits.training),
    ]


def _placeholders(parts: Sequence[Dataset]) -> list[Finding]:
    sizes: dict[str, int] = {}
    for part in parts:
        for name, size in zip(part.class_names, part.class_sizes, strict=True):
            if name.strip().lower() in _NO_LABEL:
                sizes[name] = sizes.get(name, 0) + int(size)
    return warning(
        "missing labels",
        [_sized(name, size) for name, size in sizes.items()],
        "classes are named as if their images had no label, but count as one thing",
        "leave these images out, or give each of them its class",
    )


def _gaps(parts: Sequence[Dataset]) -> list[Finding]:
    """Numbers that no image has, where labels are numbers that lie close together."""
    names = {name for part in parts for name in part.class_names}
    if not all(re.fullmatch("[0-9]{1,9}", name) for name in names):
        return []
    present = set(map(int, names))
    low, high = min(present), max(present)
    # Sparse ones are ids, of which nobody expects that all are there.
    if high - low + 1 > 2 * len(present):
        return []
    return warning(
        "label gaps",
        [f"label {label}" for label in range(low, high) if label not in present],
        f"labels go from {low} to {high}, but some of them have no images",
        "add the images of these classes if they were lost; none if there never were",
    )


def _same_names(splits: Splits) -> list[Finding]:
    def spelled(part: Dataset) -> dict[str, str]:
        return {re.sub(r"[\s_-]+", " ", n).strip().lower(): n for n in part.class_names}

    training, query = spelled(splits.training), spelled(splits.query)
    shared = sorted(training.keys() & query.keys())
    return warning(
        "class overlap",
        [f"{training[name]!r} trains, {query[name]!r} tests" for name in shared],
        "training and test have classes of the same name but for case and separators; "
        "if they are one class, the test is not of unseen classes",
        "give one class one name, so that all of its images fall on one side",
    )


def _few_classes(config: Config, splits: Splits) -> list[Finding]:
    training = splits.training
    scored = int(_is_scored(splits.query, splits.gallery).sum())
    findings = warning(
        "few classes",
        [f"{scored} in the test"] if 0 < scored < _LEAST_SCORED else [],
        "too few classes can be scored for metrics that mean something",
        "add test classes of two images or more, or give the test more classes by a "
        "smaller `data.train_classes`",
    )
    try:
        check_classes(config, training)
    except ValueError as reason:
        what = f"{training.num_classes} training classes are too few"
        return [*findings, Finding("error", "too few classes", what, str(reason))]
    held_out = [validation for _, validation in fold_splits(config.data, training)]
    scored = min(int(_is_scored(validation).sum()) for validation in held_out)
    return findings + warning(
        "few classes",
        [f"{scored} where a model validates"] if scored < _LEAST_SCORED else [],
        "too few classes can be scored to decide when proxies are projected, when "
        "training ends and which weights are kept",
        "add training classes of two images or more, or hold out more of them: by "
        "fewer `data.folds`, or by `data.split: ablation`, a third of them",
    )


def _unscored(splits: Splits) -> list[Finding]:
    """Test images of whose class there is no other image to be found."""
    query, gallery = splits.query, splits.gallery
    is_scored = _is_scored(query, gallery)
    unscored = int(query.class_sizes[~is_scored].sum())
    return (warning if is_scored.any() else error)(
        "singletons",
        [repr(query.class_names[label]) for label in np.flatnonzero(~is_scored)],
        f"{unscored:,} of {len(query):,} test images have no other image of their "
        "class to find, and are left out of the metrics",
        "add images to these test classes, or leave them out"
        + ("" if gallery is None else "; it is the gallery that lacks them"),
    )


def _small_classes(config: Config, training: Dataset) -> list[Finding]:
    """Training classes that are smaller than what is drawn of each."""
    per_class, pool_size = config.model.proxies_per_class, config.callback.pool_size
    sizes = training.class_sizes

    def of_size(low: int, below: int) -> list[str]:
        labels = np.flatnonzero((sizes >= low) & (sizes < below))
        return [_sized(training.class_names[i], sizes[i]) for i in labels]

    findings = warning(
        "singletons",
        of_size(1, 2),
        "training classes have a single image, which has no positive but itself",
        "add images to these classes, or leave them out",
    )
    for key, wanted, harm in (
        ("training.samples_per_class", config.training.samples_per_class, "a batch"),
        ("model.proxies_per_class", per_class, "their proxies"),
    ):
        findings += warning(
            "class sizes",
            of_size(2, wanted),
            f"training classes have fewer images than `{key}: {wanted}`: images come "
            f"more than once in {harm}",
            "add images to these classes or leave them out, or lower "
            f"`{key}` to {min(sizes[sizes > 1], default=1)}",
        )
    return findings + note(
        "class sizes",
        of_size(max(per_class, 2), pool_size) if per_class else [],
        f"training classes have fewer images than `callback.pool_size: {pool_size}`: "
        "all of them are candidates for proxies",
        "none",
    )


def _is_scored(query: Dataset, gallery: Dataset | None = None) -> np.ndarray:
    """`(C,)` booleans: a query of the class has another image to find."""
    if gallery is None:
        return query.class_sizes > 1
    return np.isin(query.class_names, gallery.class_names)


def _sized(name: str, size: int) -> str:
    return f"{name!r}: {size} image{'s' if size > 1 else ''}"
