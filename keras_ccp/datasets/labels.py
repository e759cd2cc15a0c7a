"""Class labels: what is a label, and from any labels to int32 0..C-1."""

import numbers
from typing import Any

import numpy as np

_MAX_LABEL = np.iinfo(np.int32).max


def map_labels(labels: Any, name: str = "labels") -> tuple[np.ndarray, np.ndarray]:
    """Numbers the classes 0..C-1 by the sorted order of their labels.

    Integers that already are 0..C-1 stay what they are.

    Args:
        labels: `(n,)` or `(n, 1)` strings, integers or integer-valued floats.
        name: What the labels are called in error messages.

    Returns:
        `(n,)` int32 class ids and `(C,)` the original label of each class.

    Raises:
        ValueError: If labels are empty, of another rank, negative, NaN, fractional,
            floats too large to be exact, or bytes that are not UTF-8.
        TypeError: If labels are of another type, of mixed types, or no array or list.
    """
    values = _flat(labels, name)
    if values.dtype.kind != "U":
        values = _whole_numbers(values, name)
    originals, class_ids = np.unique(values, return_inverse=True)
    return class_ids.astype(np.int32), originals


def check_labels(labels: Any, name: str = "labels") -> np.ndarray:
    """Returns integer labels as int32, or says what is wrong with them.

    Unlike `map_labels` nothing is renumbered: gaps stay, strings and floats are
    refused.

    Args:
        labels: `(n,)` or `(n, 1)` integers from 0.
        name: What the labels are called in error messages.

    Returns:
        `(n,)` int32 labels.

    Raises:
        ValueError: If labels are empty, of another rank, negative, too large for
            int32, NaN, or floats.
        TypeError: If labels are not numbers, or no array or list.
    """
    values = _flat(labels, name)
    if values.dtype.kind == "U":
        raise TypeError(
            f"`{name}` must be integers; number strings with "
            f"`keras_ccp.datasets.Dataset(images, labels)`. "
            f"Received: {name}={values[:5].tolist()}"
        )
    whole = _whole_numbers(values, name)
    if values.dtype.kind == "f":
        raise ValueError(
            f"`{name}` must be integers; convert them with `.astype('int32')`. "
            f"Received: {name} of dtype {values.dtype}"
        )
    if whole.max() > _MAX_LABEL:
        raise ValueError(
            f"`{name}` must fit int32; renumber the classes with "
            f"`keras_ccp.datasets.Dataset(images, labels)`. "
            f"Received: a label of {whole.max()}"
        )
    return whole.astype(np.int32)


def check_ids(ids: Any, size: int, name: str) -> np.ndarray:
    """Returns indices below a size as int64, or says what is wrong with them.

    Args:
        ids: `(k,)` ints from 0 to `size - 1`, at least one.
        size: Number of things the ids number.
        name: What the ids are called in error messages.

    Returns:
        `(k,)` int64 array.

    Raises:
        ValueError: If ids are empty, of another rank or outside the range.
        TypeError: If ids are not ints.
    """
    values = np.asarray(ids)
    if values.ndim != 1 or not len(values):
        raise ValueError(
            f"`{name}` must be a non-empty list of ids. "
            f"Received: {name} of shape {values.shape}"
        )
    if values.dtype.kind not in "iu":
        raise TypeError(
            f"`{name}` must be ints; turn a mask into ids with `np.flatnonzero`. "
            f"Received: {name} of dtype {values.dtype}"
        )
    wrong = (values < 0) | (values >= size)
    if wrong.any():
        raise ValueError(
            f"`{name}` must be from 0 to {size - 1}. "
            f"Received: {values[wrong][0]} at position {int(np.argmax(wrong))}"
        )
    return values.astype(np.int64)


def _flat(labels: Any, name: str) -> np.ndarray:
    """Any labels as a non-empty (n,) array of strings, integers or floats."""
    try:
        # A plain list goes through object: numpy would make "nan" of a missing name.
        values = np.asarray(labels, None if hasattr(labels, "dtype") else object)
    except ValueError as error:
        raise ValueError(
            f"`{name}` must hold one label an image. Received: {name}={labels!r:.200}"
        ) from error
    if values.ndim == 0:
        raise TypeError(
            f"`{name}` must be an array or a list of labels. "
            f"Received: {name} of type {type(labels).__name__}"
        )
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise ValueError(
            f"`{name}` must have shape (n,) or (n, 1); turn one-hot rows into "
            f"labels with `np.argmax(..., axis=1)`. "
            f"Received: {name} of shape {values.shape}"
        )
    if not len(values):
        raise ValueError(
            f"`{name}` must hold at least one label. Received: {name} of shape (0,)"
        )
    if values.dtype.kind in "biuf":
        return values
    return _of_one_type(values, name)


def _of_one_type(values: np.ndarray, name: str) -> np.ndarray:
    """Python objects or numpy strings (n,) as an array of one numpy type."""
    items = values.tolist()
    if all(isinstance(item, numbers.Real) for item in items):
        numeric = np.array(items)
        if numeric.dtype.kind in "biuf":
            return numeric
        if all(isinstance(item, numbers.Integral) for item in items):
            raise ValueError(
                f"`{name}` must fit 64 bits; number the classes, or pass strings. "
                f"Received: a label of {max(items, key=abs)}"
            )
    missing = [i for i, item in enumerate(items) if item is None or item != item]
    if missing:
        raise ValueError(
            f"`{name}` must not be None or NaN; leave those images out. "
            f"Received: {items[missing[0]]} in row {missing[0]} "
            f"({len(missing)} in total)"
        )
    if all(isinstance(item, (str, bytes)) for item in items):
        texts = [_text(item, name) for item in items]
        return np.array(texts, dtype=str)
    types = sorted({type(item).__name__ for item in items})
    raise TypeError(
        f"`{name}` must be all strings or all integers. "
        f"Received: {name} of type {', '.join(types)}"
    )


def _text(item: str | bytes, name: str) -> str:
    try:
        return item.decode() if isinstance(item, bytes) else item
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`{name}` must be UTF-8 where they are bytes; decode them first, for "
            f"example with `.decode('latin-1')`. Received: {item!r}"
        ) from error


def _whole_numbers(values: np.ndarray, name: str) -> np.ndarray:
    """Numbers (n,) as integers from 0."""
    if values.dtype.kind == "f":
        wrong, expected = ~np.isfinite(values), "must not be NaN or infinite"
        if not wrong.any():
            wrong, expected = values != np.floor(values), "must be whole numbers"
        if not wrong.any():
            # From here on neighbours fall together.
            bits = min(np.finfo(values.dtype).nmant + 1, 53)
            wrong, expected = (
                abs(values) >= 2**bits,
                f"must be below 2**{bits} to be exact as {values.dtype}: pass integers",
            )
    else:
        wrong = np.zeros(values.shape, bool)
    if not wrong.any():
        wrong, expected = values < 0, "must not be negative"
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"`{name}` {expected}; leave those images out or give them a class of "
            f"their own. Received: {values[row]} in row {row} "
            f"({int(wrong.sum())} in total)"
        )
    return values if values.dtype.kind in "iu" else values.astype(np.int64)
