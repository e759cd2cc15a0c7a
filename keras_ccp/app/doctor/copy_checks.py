"""Checks for the same image twice: in a class, in two classes, in training and test."""

from collections.abc import Iterator, Sequence

import numpy as np

from keras_ccp.app.doctor.findings import Finding
from keras_ccp.app.doctor.near_duplicates import near_duplicates
from keras_ccp.app.doctor.part import Part

# Images of the same pixels: the part and the row of each.
Group = list[tuple[Part, int]]


def check_copies(parts: Sequence[Part]) -> list[Finding]:
    """All checks of this file.

    Args:
        parts: all images.
    """
    return [
        *two_labels(parts),
        *exact_duplicates(parts),
        *copies_in_a_class(parts),
        *near_duplicates_across(parts),
    ]


def two_labels(parts: Sequence[Part]) -> Iterator[Finding]:
    """Images that are there twice, on one side of the split, under two labels.

    Args:
        parts: all images.
    """
    groups = [
        group
        for is_test in (False, True)
        for group in _groups([part for part in parts if part.is_test == is_test])
        if len({part.class_of(row) for part, row in group}) > 1
    ]
    if groups:
        yield Finding(
            "warning",
            "two labels",
            f"the same image is there under two labels or more: {_counted(groups)}. "
            "At most one of the labels is right, and all of them count against a model "
            "that sees that the images are the same",
            "keep the image under its right label only, or merge the classes",
            tuple(map(_same, groups)),
        )


def exact_duplicates(parts: Sequence[Part]) -> Iterator[Finding]:
    """Images of which all pixels are the same in training and test.

    Args:
        parts: all images.
    """
    groups = [
        group
        for group in _groups(parts)
        if len({part.is_test for part, _ in group}) == 2
    ]
    if groups:
        yield Finding(
            "warning",
            "exact duplicates",
            f"the same images are in training and test: {_counted(groups)}. The "
            "metrics are partly of images that were trained on",
            "remove them from one side, or give both one label, so that they fall on "
            "the same side of the split",
            tuple(map(_same, groups)),
        )


def copies_in_a_class(parts: Sequence[Part]) -> Iterator[Finding]:
    """Images that are there twice in one class.

    Args:
        parts: all images.
    """
    for is_test, harm in (
        (False, "the class has less to learn from than its size says"),
        (True, "each finds its copy first, so that P@1 is right whatever was learned"),
    ):
        side = [part for part in parts if part.is_test == is_test]
        # With a gallery of its own, a query finds copies only there.
        names = {part.name for part in side}
        groups = [
            group
            for same in _groups(side)
            for group in _by_class(same)
            if len(group) > 1 and {part.name for part, _ in group} == names
        ]
        if groups:
            yield Finding(
                "warning",
                "copies",
                f"{'test' if is_test else 'training'} classes hold the same image "
                f"more than once: {_counted(groups)}; {harm}",
                "keep one of each",
                tuple(map(_same, groups)),
            )


def near_duplicates_across(parts: Sequence[Part]) -> Iterator[Finding]:
    """Images of the test that look as one of training does, pixels apart.

    Args:
        parts: all images.
    """
    training = next(part for part in parts if not part.is_test)
    known = np.flatnonzero(training.is_readable)
    pairs = []
    for part in (part for part in parts if part.is_test):
        # Those that are the same in each pixel have been reported as such.
        is_new = ~np.isin(part.facts.digests, training.facts.digests)
        rows = np.flatnonzero(part.is_readable & is_new)
        if not len(rows) or not len(known):
            continue
        found = near_duplicates(
            part.facts.thumbnails[rows], training.facts.thumbnails[known]
        )
        pairs += [_same([(training, known[j]), (part, rows[i])]) for i, j in found]
    if pairs:
        yield Finding(
            "warning",
            "near duplicates",
            "test images look the same as training images: copies that were resized "
            "or compressed once more, or different classes that look alike",
            "look at them; remove copies from one side, or give both one label",
            tuple(pairs),
        )


def _groups(parts: Sequence[Part]) -> list[Group]:
    """Images of the same pixels, as lists of two or more."""
    groups: dict[int, Group] = {}
    for part in parts:
        for row in np.flatnonzero(part.is_readable).tolist():
            groups.setdefault(int(part.facts.digests[row]), []).append((part, row))
    return [group for group in groups.values() if len(group) > 1]


def _by_class(group: Group) -> list[Group]:
    classes: dict[str, Group] = {}
    for part, row in group:
        classes.setdefault(part.class_of(row), []).append((part, row))
    return list(classes.values())


def _counted(groups: Sequence[Group]) -> str:
    count = sum(map(len, groups))
    return f"{count:,} images in {len(groups):,} group(s) of the same pixels"


def _same(group: Group) -> str:
    return "\n= ".join(
        f"{part.place(row)} ({'test' if part.is_test else 'training'})"
        for part, row in group
    )
