"""Image files of a user: found, opened, and looked at on all cores."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_ccp.app.console import progress
from keras_ccp.datasets import list_images
from keras_ccp.datasets.readers import IMAGE_SUFFIXES
from keras_ccp.images import UNREADABLE, failure

logger = logging.getLogger(__name__)

# Looked at before the ones in front of them are taken; more would fill the memory.
_AHEAD = 128


def find_images(images: Sequence[str | os.PathLike]) -> list[Path]:
    """Absolute paths of files, and of the images in folders, sorted; each once."""
    found = []
    for path in images:
        path = Path(os.path.abspath(os.path.expanduser(path)))
        if not path.exists():
            raise FileNotFoundError(
                f"`images` must be files or folders that exist. Received: {path}\n"
                "Correct the path"
            )
        if path.is_dir():
            listing = list_images(path)
            for line in listing.notes(path):
                logger.warning("%s: %s", path, line)
            found += map(Path, listing.images)
        else:
            found.append(path)
    if not found:
        raise ValueError(
            f"`images` must hold images. Received: {', '.join(map(str, images))}\n"
            f"Name files, or folders of files that end in {', '.join(IMAGE_SUFFIXES)}"
        )
    return list(dict.fromkeys(found))


def look_at(
    look: Callable[[Any], Any], images: Sequence[Any], title: str, has_bar: bool
) -> Iterator[tuple[Any, str]]:
    """What `look` returns for each image, in order; or `None` and why it failed."""

    def try_to(image: Any) -> tuple[Any, str]:
        try:
            with tf.device("CPU:0"):
                return look(image), ""
        except UNREADABLE as error:
            return None, failure(error)

    def in_order() -> Iterator[tuple[Any, str]]:
        # TensorFlow lets go of the interpreter while it decodes.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ahead = iter(())
            for start in range(0, len(images), _AHEAD):
                chunk = pool.map(try_to, images[start : start + _AHEAD])
                yield from ahead
                ahead = chunk
            yield from ahead

    return progress(in_order(), title, len(images)) if has_bar else in_order()


def relative(path: str, root: Path) -> str:
    """A path below the root as it is named there, others as they are."""
    is_below = Path(path).is_relative_to(root)
    return os.path.relpath(path, root) if is_below else path
