"""Check of a folder of images: what lies in it and is not read."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from keras_ccp.app.doctor.findings import Finding
from keras_ccp.app.doctor.part import Part
from keras_ccp.datasets import list_images
from keras_ccp.datasets.readers import HIDDEN


def other_files(parts: Sequence[Part], folder: Path) -> Iterator[Finding]:
    """Files that are no images of the dataset, by their type or their place.

    Hidden files and folders are passed over, as by the loader.

    Args:
        parts: all images, given as paths.
        folder: the folder with a folder of each class.
    """
    # Of one spelling: a root may be given as "." or with a slash too many.
    known = {Path(path) for part in parts for path in part.dataset.images}
    others = sorted(path for path in _files(folder) if path not in known)
    if not others:
        return
    endings = Counter(path.suffix.lower() or "no ending" for path in others)
    counts = ", ".join(f"{count:,} {name}" for name, count in endings.most_common())
    yield Finding(
        "note",
        "other files",
        "files are not read, by their type or since they do not lie right in the "
        f"folder of a class: {counts}",
        "nothing is to be done if they are no images; convert others, such as .tif "
        "and .heic, to JPEG or PNG, and move those of deeper folders into the folder "
        "of their class",
        tuple(os.path.relpath(path, parts[0].root) for path in others),
    )


def _files(folder: Path) -> Iterator[Path]:
    listing = list_images(folder)
    yield from map(Path, listing.images)
    for path, reason in listing.passed_over:
        if reason != HIDDEN and not os.path.isdir(path):
            yield Path(path)
