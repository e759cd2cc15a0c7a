"""Checks of what users hand to the retrieval functions."""

from typing import Any

import numpy as np

from keras_ccp.checks import as_floats, check_finite
from keras_ccp.checks import as_labels as checked_labels


def as_embeddings(name: str, embeddings: Any, dim: int | None = None) -> np.ndarray:
    """Returns a finite `(n, dim)` array of float32, or of float64 if it came so.

    Args:
        name: of the argument, for the message.
        embeddings: `(n, dim)` numbers.
        dim: int, columns to insist on. Defaults to `None`: any.
    """
    embeddings = as_floats(name, embeddings)
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        raise ValueError(
            f"`{name}` must have shape (n, dim) with at least one row and one column. "
            f"Received: {name}.shape={embeddings.shape}"
        )
    if dim is not None and embeddings.shape[1] != dim:
        raise ValueError(
            f"`{name}` must have {dim} columns, as the other embeddings have. "
            f"Received: {name}.shape={embeddings.shape}"
        )
    check_finite(name, embeddings)
    return np.ascontiguousarray(embeddings)


def as_labels(name: str, labels: Any, length: int) -> np.ndarray:
    """Returns `(length,)` int32 labels.

    Args:
        name: of the argument, for the message.
        labels: `(length,)` or `(length, 1)` integers from 0 on.
        length: int, how many there must be.
    """
    labels = checked_labels(name, labels)
    if len(labels) != length:
        raise ValueError(
            f"`{name}` must hold one label an embedding. "
            f"Received: {length} embeddings and {len(labels)} labels"
        )
    return labels


def safe_shift(*arrays: np.ndarray) -> int:
    """Power of two that keeps squares from overflow and underflow, 0 if none is needed.

    Args:
        *arrays: finite floats that are to be moved by `np.ldexp(array, shift)`.
    """
    _, exponent = np.frexp(max(max(x.max(), -x.min()) for x in arrays))
    return 0 if abs(exponent) < 400 else -int(exponent)
