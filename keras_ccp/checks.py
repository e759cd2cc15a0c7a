"""Checks of numbers, labels and embeddings, and of optional packages."""

import importlib
import math
import numbers
from types import ModuleType
from typing import Any

import numpy as np


def check_int(name: str, value: Any, minimum: int) -> None:
    """Refuses what is not an integer from `minimum` on."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}")
    if value < minimum:
        raise ValueError(
            f"`{name}` must be at least {minimum}. Received: {name}={value!r}"
        )


def check_number(
    name: str, value: Any, minimum: float = -math.inf, maximum: float = math.inf
) -> None:
    """Refuses what is not a finite number from `minimum` to `maximum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number. Received: {name}={value!r}")
    if not (math.isfinite(value) and minimum <= value <= maximum):
        raise ValueError(
            f"`{name}` must be a finite number from {minimum:g} to {maximum:g}. "
            f"Received: {name}={value!r}"
        )


def as_floats(name: str, values: Any) -> np.ndarray:
    """Numbers as float32 or float64, whichever holds them exactly."""
    values = np.asarray(values)
    if values.dtype in (np.float32, np.float64):
        return values
    # "V" is bfloat16, which NumPy does not know.
    if values.dtype.kind not in "biufV":
        raise TypeError(
            f"`{name}` must be real numbers. Received: dtype {values.dtype}\n"
            "Convert them with .astype('float32')"
        )
    is_small = values.dtype.kind not in "iu" and values.dtype.itemsize <= 2
    return values.astype(np.float32 if is_small else np.float64)


def check_finite(name: str, values: np.ndarray, unit: str = "rows") -> None:
    """Refuses floats that are NaN or infinite; other types pass."""
    if values.dtype.kind != "f":
        return
    # The sum takes no memory. It is finite unless a value is not, or it overflows.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):
            return
    bad = [row for row, value in enumerate(values) if not np.isfinite(value).all()]
    if bad:
        raise ValueError(
            f"`{name}` must be finite. Received: NaN or infinity in {len(bad)} of "
            f"{len(values)} {unit}, the first at {bad[0]}\nFix them or leave them out"
        )


def as_labels(name: str, labels: Any, length: int | None = None) -> np.ndarray:
    """`(n,)` int32 labels from `(n,)` or `(n, 1)` integers of 0 or more."""
    values = np.asarray(labels)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or not values.size:
        raise ValueError(
            f"`{name}` must hold one label a row, shape (n,). Received: shape "
            f"{values.shape}\nTurn one-hot rows into labels with np.argmax(..., axis=1)"
        )
    if values.dtype.kind not in "iu":
        raise TypeError(
            f"`{name}` must be integers. Received: dtype {values.dtype}\n"
            "keras_ccp.datasets.Dataset numbers labels of any kind 0..C-1"
        )
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > np.iinfo(np.int32).max:
        raise ValueError(
            f"`{name}` must be 0 or more and fit int32. Received: {low} to {high}\n"
            "Leave images without a class out; datasets.Dataset renumbers the others"
        )
    if length is not None and len(values) != length:
        raise ValueError(
            f"`{name}` must hold one label a row. Received: {len(values)} labels for "
            f"{length} rows\nPass labels and rows in the same order"
        )
    return values.astype(np.int32)


def as_embeddings(name: str, embeddings: Any, dim: int | None = None) -> np.ndarray:
    """Finite, contiguous `(n, dim)` float32, or float64 if it came so."""
    embeddings = as_floats(name, embeddings)
    expected = "dim" if dim is None else dim
    if (
        embeddings.ndim != 2
        or 0 in embeddings.shape
        or (dim is not None and embeddings.shape[1] != dim)
    ):
        raise ValueError(
            f"`{name}` must have shape (n, {expected}), n at least 1. Received: shape "
            f"{embeddings.shape}\nPass one row an image, as model.embed gives them"
        )
    check_finite(name, embeddings)
    return np.ascontiguousarray(embeddings)


def require(module: str, extra: str) -> ModuleType:
    """Imports an optional package, or says which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"This needs {module}, which cannot be imported: {error}\n"
            f'pip install "keras-ccp[{extra}]"'
        ) from error
