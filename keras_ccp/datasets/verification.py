"""Finds the images that cannot be decoded, before they stop a training run."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorflow as tf

from keras_ccp.datasets.argument_names import SKIP
from keras_ccp.datasets.dataset import Dataset

_SHOWN = 5
_CHUNK = 64
_log = logging.getLogger(__name__)


def verify(dataset: Dataset, on_error: str = "raise") -> Dataset:
    """Reads and decodes every encoded image once, and names those that fail.

    A truncated file fails, also where a viewer would show what there is of it. Grey,
    CMYK, palette, 16-bit and rotated images pass. It works on all cores and keeps no
    image. A dataset of arrays is returned as it is.

    Args:
        dataset: The dataset.
        on_error: "raise" raises an error if images fail; "skip" leaves them out and
            logs a warning that names each.

    Returns:
        The dataset, without the images that fail; its classes stay the same.

    Raises:
        ValueError: If images fail and `on_error` is "raise", a class would lose all of
            its images, or `on_error` is something else.
        TypeError: If `dataset` is no `Dataset`.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(
            "`dataset` must be a `keras_ccp.datasets.Dataset`; make one of paths by "
            f"`Dataset(paths, labels)`. Received: dataset of type {type(dataset)}"
        )
    if on_error not in ("raise", "skip"):
        raise ValueError(
            f'`on_error` must be "raise" or "skip". Received: on_error={on_error!r}'
        )
    if not dataset.is_encoded:
        return dataset
    failures = _failures(dataset.images)
    if not failures:
        return dataset
    named = [f"{_name(dataset, row)} ({why})" for row, why in failures.items()]
    received = f"{len(failures)} of {len(dataset)} that fail"
    if on_error == "raise":
        more = ", ..." if len(named) > _SHOWN else ""
        raise ValueError(
            "`dataset` must hold images that can be decoded; mend or remove those "
            f"that cannot, or {SKIP}. "
            f"Received: {received}: {', '.join(named[:_SHOWN])}{more}"
        )
    kept = np.setdiff1d(np.arange(len(dataset)), list(failures))
    lost = np.setdiff1d(dataset.labels, dataset.labels[kept])
    if len(lost):
        # Dropped quietly it would shift the labels, and query and gallery apart.
        raise ValueError(
            "`dataset` must keep an image of each class; mend the images, or leave "
            "such classes out of the files or with `select_classes`, out of query and "
            "gallery alike. "
            f"Received: {received}, and with them all images of class "
            f"{dataset.class_names[lost[0]]!r} ({len(lost)} such classes): "
            f"{', '.join(named[:_SHOWN])}"
        )
    for name in named:
        _log.warning("left out, cannot be decoded: %s", name)
    return Dataset(
        dataset.images[kept], dataset.labels[kept], dataset.class_names
    ).with_size(dataset.size, dataset.short_side)


def _failures(images: np.ndarray) -> dict[int, str]:
    """Row and reason of each image that fails."""

    def check(start: int) -> dict[int, str]:
        chunk = enumerate(images[start : start + _CHUNK], start)
        reasons = {row: decoding_error(image) for row, image in chunk}
        return {row: reason for row, reason in reasons.items() if reason}

    failures = {}
    # A thread for each core: TensorFlow lets go of the interpreter while it decodes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(check, range(0, len(images), _CHUNK)):
            failures |= found
    return failures


def decoding_error(image: str | bytes) -> str | None:
    """Says why an image cannot be decoded.

    Args:
        image: path or contents of an image file.

    Returns:
        str, or `None` where it can be decoded.
    """
    try:
        contents = Path(image).read_bytes() if isinstance(image, str) else image
        with tf.device("CPU:0"):
            tf.io.decode_image(contents, channels=3, expand_animations=False)
    except OSError as error:
        return error.strerror or type(error).__name__
    except tf.errors.OpError as error:
        return _plain(error.message)
    return None


def _plain(message: str) -> str:
    """What TensorFlow says of the image, without the name of the op."""
    message = message.split("}} ", 1)[-1].split(" [Op:", 1)[0]
    return message.split("\n", 1)[0].strip()


def _name(dataset: Dataset, row: int) -> str:
    image = dataset.images[row]
    return image if isinstance(image, str) else f"image {row}"
