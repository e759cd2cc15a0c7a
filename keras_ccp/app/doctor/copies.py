"""The same image twice: in a class, in two classes, in training and test."""

from collections.abc import Sequence

import numpy as np

from keras_ccp.app.doctor.findings import Finding, warning
from keras_ccp.app.doctor.images import Part

# Of 64 bits, and of 255: half the size, JPEG quality 50 or 5 % more light stay below
# both. The bits alone are as near for line drawings of different things.
_MAX_BITS, _MAX_DIFFERENCE = 6, 20
_CANDIDATES = 16
_LUMA = np.array((0.299, 0.587, 0.114), np.float32)  # ITU-R BT.601

# Images of the same pixels: the part and the row of each.
Group = list[tuple[Part, int]]


def copy_findings(parts: Sequence[Part]) -> list[Finding]:
    """Images of the same pixels, and test images that look like training images."""
    sides = [[part for part in parts if part.is_test == test] for test in (False, True)]
    mislabelled = [
        group
        for side in sides
        for group in _groups(side)
        if len({part.class_of(row) for part, row in group}) > 1
    ]
    shared = [
        group
        for group in _groups(parts)
        if len({part.is_test for part, _ in group}) == 2
    ]
    findings = warning(
        "two labels",
        _shown(mislabelled),
        f"the same image has two labels or more, of which at most one is right: "
        f"{_counted(mislabelled)}",
        "keep the image under its right label only, or merge the classes",
    )
    findings += warning(
        "exact duplicates",
        _shown(shared),
        "the same images are in training and test, so that the metrics are partly of "
        f"images that were trained on: {_counted(shared)}",
        "remove them from one side, or give both one label, which brings both to one "
        "side of the split",
    )
    for side, what in zip(
        sides,
        (
            "training classes hold an image more than once and less to learn from",
            "test classes hold an image more than once: its copy is a sure hit of P@1",
        ),
        strict=True,
    ):
        copies = _copies_in_a_class(side)
        what = f"{what}: {_counted(copies)}"
        findings += warning("copies", _shown(copies), what, "keep one of each")
    return findings + warning(
        "near duplicates",
        _shown(_look_alikes(*sides)),
        "test images look the same as training images: resized or compressed copies, "
        "or different classes that look alike",
        "look at them; remove copies from one side, or give both one label",
    )


def _groups(parts: Sequence[Part]) -> list[Group]:
    """Images of the same pixels, as lists of two or more."""
    groups: dict[int, Group] = {}
    for part in parts:
        for row in np.flatnonzero(part.is_readable).tolist():
            groups.setdefault(int(part.digests[row]), []).append((part, row))
    return [group for group in groups.values() if len(group) > 1]


def _copies_in_a_class(side: Sequence[Part]) -> list[Group]:
    # With a gallery of its own, a query finds copies only there.
    names = {part.name for part in side}
    copies = []
    for same in _groups(side):
        classes: dict[str, Group] = {}
        for part, row in same:
            classes.setdefault(part.class_of(row), []).append((part, row))
        for group in classes.values():
            if len(group) > 1 and {part.name for part, _ in group} == names:
                copies.append(group)
    return copies


def _look_alikes(training: Sequence[Part], test: Sequence[Part]) -> list[Group]:
    (training,) = training
    known = np.flatnonzero(training.is_readable)
    pairs = []
    for part in test:
        # Those that are the same in each pixel have been reported as such.
        is_new = ~np.isin(part.digests, training.digests[known])
        rows = np.flatnonzero(part.is_readable & is_new)
        found = near_duplicates(part.thumbnails[rows], training.thumbnails[known])
        pairs += [[(training, known[j]), (part, rows[i])] for i, j in found]
    return pairs


def _counted(groups: Sequence[Group]) -> str:
    count = sum(map(len, groups))
    return f"{count:,} images in {len(groups):,} group(s) of the same pixels"


def _shown(groups: Sequence[Group]) -> list[str]:
    return [
        "\n= ".join(
            f"{part.place(row)} ({'test' if part.is_test else 'training'})"
            for part, row in group
        )
        for group in groups
    ]


def difference_hash(thumbnails: np.ndarray) -> np.ndarray:
    """dHash, `(n,)` uint64 of `(n, 8, 9, 3)` uint8: is the right pixel brighter?"""
    luma = thumbnails @ _LUMA
    bits = (luma[..., 1:] > luma[..., :-1]).reshape(len(luma), 64)
    return np.packbits(bits, axis=1).view(np.uint64)[:, 0]


def near_duplicates(thumbnails: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Finds images among others, by their hashes and then by their thumbnails.

    A pair has hashes that differ in at most 6 of 64 bits, and thumbnails that differ
    nowhere by more than 20 of 255. Of each image the 16 others with the nearest hashes
    are looked at, so that memory is bounded. Returns `(k, 2)` int rows, of an image and
    of the other that is most like it.
    """
    others_hashes, pairs = difference_hash(others), []
    for row, code in enumerate(difference_hash(thumbnails)):
        bits = np.bitwise_count(code ^ others_hashes)
        near = np.flatnonzero(bits <= _MAX_BITS)
        near = near[np.argsort(bits[near], kind="stable")[:_CANDIDATES]]
        image = thumbnails[row].astype(np.int16)
        differences = np.abs(others[near] - image).max(axis=(1, 2, 3))
        if differences.min(initial=255) <= _MAX_DIFFERENCE:
            pairs.append((row, near[differences.argmin()]))
    return np.array(pairs, np.int64).reshape(-1, 2)
