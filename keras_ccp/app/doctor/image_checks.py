"""Checks of images one by one: unreadable, tiny, of one colour, unusually stored."""

from collections.abc import Iterator, Sequence

import numpy as np

from keras_ccp.app.doctor.findings import Finding
from keras_ccp.app.doctor.image_facts import MAX_SPREAD, format_note
from keras_ccp.app.doctor.part import Part

# Of the side to which images are brought: below it most pixels are made up.
_LEAST_SIDE = 1 / 4


def check_images(parts: Sequence[Part], skips: bool) -> list[Finding]:
    """All checks of this file.

    Args:
        parts: all images.
        skips: whether the run leaves out images that cannot be read.
    """
    return [
        *unreadable(parts, skips),
        *unusual_formats(parts),
        *tiny(parts),
        *uniform(parts),
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
        if not part.is_readable[part.dataset.labels == label].any()
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


def tiny(parts: Sequence[Part]) -> Iterator[Finding]:
    """Encoded images that are enlarged more than four times.

    Args:
        parts: all images.
    """
    places = []
    for part in (part for part in parts if part.dataset.is_encoded):
        sides = part.facts.sizes.min(axis=1)
        is_tiny = part.is_readable & (sides < _LEAST_SIDE * part.dataset.size)
        for row in np.flatnonzero(is_tiny):
            height, width = part.facts.sizes[row]
            places.append(f"{part.place(row)}: {width} x {height} pixels")
    if places:
        yield Finding(
            "warning",
            "tiny images",
            "a side is below a quarter of the "
            f"{parts[0].dataset.size} pixels of `data.size`: they are enlarged, and "
            "show next to nothing of what others show",
            "get the images in full size, leave them out, or lower `data.size` if most "
            "are that small",
            tuple(places),
        )


def uniform(parts: Sequence[Part]) -> Iterator[Finding]:
    """Images of one colour.

    Args:
        parts: all images.
    """
    places = [
        part.place(row)
        for part in parts
        for row in np.flatnonzero(part.is_readable & part.facts.is_uniform)
    ]
    if places:
        yield Finding(
            "warning",
            "uniform images",
            "images are of one colour, so that nothing tells their class: no channel "
            f"varies by more than {MAX_SPREAD} of 255",
            "leave them out, or replace them if they were damaged on the way",
            tuple(places),
        )
