"""Checks of what users hand to the retrieval functions."""

import numpy as np


def as_embeddings(
    name: str, embeddings: np.ndarray, dim: int | None = None
) -> np.ndarray:
    """Returns a finite `(n, dim)` array of float32, or of float64 if it came so.

    Args:
        name: of the argument, for the message.
        embeddings: `(n, dim)` numbers.
        dim: int, columns to insist on. Defaults to `None`: any.
    """
    embeddings = np.asarray(embeddings)
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        raise ValueError(
            f"{name}: expected shape (n, dim) with at least one row and one column. "
            f"Received: {name}.shape={embeddings.shape}"
        )
    if dim is not None and embeddings.shape[1] != dim:
        raise ValueError(
            f"{name}: expected {dim} columns, as the other embeddings have. "
            f"Received: {name}.shape={embeddings.shape}"
        )
    if embeddings.dtype.kind in "iu":
        embeddings = embeddings.astype(np.float64)
    elif embeddings.dtype not in (np.float32, np.float64):
        try:
            embeddings = embeddings.astype(np.float32)
        except (TypeError, ValueError):
            raise TypeError(
                f"{name}: expected floats. Received: {name}.dtype={embeddings.dtype}"
            ) from None
    num_bad = len(embeddings) - np.count_nonzero(np.isfinite(embeddings).all(axis=1))
    if num_bad:
        raise ValueError(
            f"{name}: expected finite values. Received: values that are not finite in "
            f"{num_bad} of {len(embeddings)} rows"
        )
    return np.ascontiguousarray(embeddings)


def as_labels(name: str, labels: np.ndarray, length: int) -> np.ndarray:
    """Returns `(length,)` int64 labels, none of them negative.

    Args:
        name: of the argument, for the message.
        labels: `(length,)` numbers.
        length: int, how many there must be.
    """
    labels = np.asarray(labels)
    if labels.shape != (length,):
        raise ValueError(
            f"{name}: expected shape ({length},), one label an embedding. "
            f"Received: {name}.shape={labels.shape}"
        )
    if labels.dtype.kind not in "iuf":
        raise TypeError(
            f"{name}: expected integers. Received: {name}.dtype={labels.dtype}"
        )
    bad = ~(labels >= 0)  # catches NaN too
    if labels.dtype.kind == "f":
        bad |= labels != np.floor(labels)
        bad |= np.isinf(labels)
    if bad.any():
        raise ValueError(
            f"{name}: expected integers from 0 on. Received: {labels[bad][0]} at "
            f"position {np.flatnonzero(bad)[0]} ({bad.sum()} of {length} are wrong)"
        )
    return labels.astype(np.int64)


def as_count(name: str, value: int, maximum: int | None = None) -> int:
    """Returns a value as an int, after a check of its range.

    Args:
        name: of the argument, for the message.
        value: int, at least 1.
        maximum: int, the largest allowed. Defaults to `None`: no limit.
    """
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer:
        raise TypeError(f"{name}: expected an integer. Received: {name}={value!r}")
    if value < 1 or (maximum is not None and value > maximum):
        upper = "" if maximum is None else f" and at most {maximum}"
        raise ValueError(
            f"{name}: expected at least 1{upper}. Received: {name}={value}"
        )
    return int(value)
