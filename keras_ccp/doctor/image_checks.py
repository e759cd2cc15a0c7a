"""Checks of images: unreadable ones, unusual formats, the same image twice."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keras_ccp.datasets import Dataset
from keras_ccp.doctor.findings import Finding
from keras_ccp.doctor.image_facts import ImageFacts, format_note
from keras_ccp.doctor.near_duplicates import near_duplicates


class Part(NamedTuple):
    """Images of one side of the split.

    Args:
        name: `"training"`, or `"query"` or `"gallery"` of the test.
        dataset: the images.
        facts: what is known of each.
        root: folder that paths are shown relative to.
    """

    name: str
    dataset: Dataset
    facts: ImageFacts
    root: Path

    @property
    def is_test(self) -> bool:
        """Whether it is not trained on."""
        return self.name != "training"

    def class_of(self, row: int) -> str:
        """Name of the class of an image.

        Args:
            row: of the image.
        """
        return self.dataset.class_names[self.dataset.labels[row]]

    def place(self, row: int) -> str:
        """Where an image is: its path, or its number within its class.

        Args:
            row: of the image.
        """
        image = self.dataset.images[row]
        if isinstance(image, str):
            is_below = Path(image).is_relative_to(self.root)
            return os.path.relpath(image, self.root) if is_below else image
        labels = self.dataset.labels
        number = int((labels[:row] == labels[row]).sum())
        return f"image {number} (from 0) of class {self.class_of(row)!r}"


def check_images(parts: Sequence[Part], skips: bool) -> list[Finding]:
    """All checks of this file.

    Args:
        parts: all images.
        skips: whether the run leaves out images that cannot be read.
    """
    return [
        *unreadable(parts, skips),
        *unusual_formats(parts),
        *two_labels(parts),
        *exact_duplicates(parts),
        *near_duplicates_across(parts),
    ]


def unreadable(parts: Sequence[Part], skips: bool) -> Iterator[Finding]:
    """Images that are missing, truncated, or no images.

    Args:
        parts: all images.
        skips: whether the run leaves them out.
    """
    failures = [
        f"{part.place(row)}: {reason}"
        for part in parts
        for row, reason in part.facts.failures.items()
    ]
    if failures:
        yield Finding(
            "warning" if skips else "error",
            "unreadable",
            "images cannot be read"
            + (": the run leaves them out" if skips else ": the run would stop there"),
            "mend or replace them"
            + ("" if skips else ", or leave them out by `data.unreadable: skip`"),
            tuple(failures),
        )
    lost = [
        f"{name!r}"
        for part in parts
        for label, name in enumerate(part.dataset.class_names)
        if not _readable(part)[part.dataset.labels == label].any()
    ]
    if lost:
        yield Finding(
            "error",
            "unreadable",
            "classes have no image that can be read, with which the run would stop "
            "also where it leaves such images out",
            "mend or replace their images, or take these classes out of the data",
            tuple(lost),
        )


def unusual_formats(parts: Sequence[Part]) -> Iterator[Finding]:
    """Images that are decoded, though perhaps not as expected.

    Args:
        parts: all images.
    """
    found: dict[str, list[str]] = {}
    for part in parts:
        for name, rows in part.facts.formats.items():
            found.setdefault(name, []).extend(part.place(row) for row in rows)
    for name, places in found.items():
        yield Finding(
            "note",
            "formats",
            f"{name} images: {format_note(name)}",
            "nothing is to be done, unless that is not what you want: then convert "
            "them before",
            tuple(places),
        )


def two_labels(parts: Sequence[Part]) -> Iterator[Finding]:
    """Images that are there twice, on one side of the split, under two labels.

    Args:
        parts: all images.
    """
    pairs = []
    for is_test in (False, True):
        side = [part for part in parts if part.is_test == is_test]
        for group in _groups(side):
            first, row = group[0]
            for part, other in group[1:]:
                if part.class_of(other) != first.class_of(row):
                    pairs.append(_same(first, row, part, other))
                    break
    if pairs:
        yield Finding(
            "warning",
            "two labels",
            "the same image is there under two labels: one of them is wrong, and both "
            "count against a model that sees that they are the same",
            "keep the image under its right label only, or merge the classes",
            tuple(pairs),
        )


def exact_duplicates(parts: Sequence[Part]) -> Iterator[Finding]:
    """Images of which all pixels are the same in training and test.

    Args:
        parts: all images.
    """
    pairs = []
    for group in _groups(parts):
        training = [(part, row) for part, row in group if not part.is_test]
        test = [(part, row) for part, row in group if part.is_test]
        if training and test:
            pairs.append(_same(*training[0], *test[0]))
    if pairs:
        yield Finding(
            "warning",
            "exact duplicates",
            "the same images are in training and test: the metrics are partly of "
            "images that were trained on",
            "remove them from one side, or give both one label, so that they fall on "
            "the same side of the split",
            tuple(pairs),
        )


def near_duplicates_across(parts: Sequence[Part]) -> Iterator[Finding]:
    """Images of the test that look as one of training does, pixels apart.

    Args:
        parts: all images.
    """
    training = next(part for part in parts if not part.is_test)
    known = np.flatnonzero(_readable(training))
    pairs = []
    for part in (part for part in parts if part.is_test):
        # Those that are the same in each pixel have been reported as such.
        is_new = ~np.isin(part.facts.digests, training.facts.digests)
        rows = np.flatnonzero(_readable(part) & is_new)
        if not len(rows) or not len(known):
            continue
        found = near_duplicates(
            part.facts.thumbnails[rows], training.facts.thumbnails[known]
        )
        pairs += [_same(training, known[j], part, rows[i]) for i, j in found]
    if pairs:
        yield Finding(
            "warning",
            "near duplicates",
            "test images look the same as training images: copies that were resized "
            "or compressed once more, or different classes that look alike",
            "look at them; remove copies from one side, or give both one label",
            tuple(pairs),
        )


def _readable(part: Part) -> np.ndarray:
    mask = np.ones(len(part.dataset), bool)
    mask[list(part.facts.failures)] = False
    return mask


def _groups(parts: Sequence[Part]) -> list[list[tuple[Part, int]]]:
    """Images of the same pixels, as lists of two or more."""
    groups: dict[int, list[tuple[Part, int]]] = {}
    for part in parts:
        for row in np.flatnonzero(_readable(part)).tolist():
            groups.setdefault(int(part.facts.digests[row]), []).append((part, row))
    return [group for group in groups.values() if len(group) > 1]


def _same(part: Part, row: int, other: Part, other_row: int) -> str:
    first, second = (
        f"{side.place(at)} ({'test' if side.is_test else 'training'})"
        for side, at in ((part, row), (other, other_row))
    )
    return f"{first} = {second}"
