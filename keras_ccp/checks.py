"""Checks of plain arguments, with one form of error for all of them."""

import contextlib
import importlib
import math
import numbers
from types import ModuleType
from typing import Any

import numpy as np


def check_int(name: str, value: Any, minimum: int) -> None:
    """Refuses what is not an integer from `minimum` on.

    Args:
        name: Name of the argument.
        value: Its value.
        minimum: Smallest value allowed.

    Raises:
        TypeError: If the value is not an integer.
        ValueError: If it is below the minimum.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}")
    if value < minimum:
        raise ValueError(
            f"`{name}` must be at least {minimum}. Received: {name}={value!r}"
        )


def check_number(
    name: str, value: Any, minimum: float = -math.inf, maximum: float = math.inf
) -> None:
    """Refuses what is not a finite number from `minimum` to `maximum`.

    Args:
        name: Name of the argument.
        value: Its value.
        minimum: Smallest value allowed. Defaults to no bound.
        maximum: Largest value allowed. Defaults to no bound.

    Raises:
        TypeError: If the value is not a real number.
        ValueError: If it is not finite or is out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number. Received: {name}={value!r}")
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite. Received: {name}={value!r}")
    if value < minimum:
        raise ValueError(
            f"`{name}` must be at least {minimum:g}. Received: {name}={value!r}"
        )
    if value > maximum:
        raise ValueError(
            f"`{name}` must be at most {maximum:g}. Received: {name}={value!r}"
        )


def refuse_sample_weight(weight: Any, argument: str = "sample_weight") -> None:
    """Raises if sample weights are given.

    Args:
        weight: what was passed; only `None` is right.
        argument: name of the argument, for the message.

    Raises:
        ValueError: if `weight` is not `None`.
    """
    if weight is not None:
        raise ValueError(
            f"`{argument}` is not supported: the loss compares pairs, so a sample has "
            f"no loss of its own. Received: type({argument})={type(weight).__name__}; "
            "draw samples more often instead"
        )


def check_bool(name: str, value: Any) -> None:
    """Refuses what is not a boolean.

    Args:
        name: Name of the argument.
        value: Its value.

    Raises:
        TypeError: If the value is not True or False.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be True or False. Received: {name}={value!r}")


def as_array(name: str, values: Any) -> np.ndarray:
    """Returns values as a numpy array, or says that they do not form one.

    Args:
        name: Name of the argument.
        values: An array, a tensor or nested lists.

    Raises:
        ValueError: If the parts of a list differ in size.
    """
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(
            f"`{name}` must be one array; bring its parts to one size first. "
            f"Received: a {type(values).__name__} whose parts differ in size"
        ) from error


def as_floats(name: str, values: Any) -> np.ndarray:
    """Returns numbers as float32 or float64, whichever holds them exactly.

    Args:
        name: Name of the argument.
        values: An array, a tensor or nested lists of real numbers.

    Raises:
        ValueError: If the parts of a list differ in size.
        TypeError: If the values are not real numbers.
    """
    values = as_array(name, values)
    if values.dtype in (np.float32, np.float64):
        return values
    # "V" is bfloat16, which numpy does not know, but also records.
    if values.dtype.kind in "biufV" and values.dtype.names is None:
        is_small = values.dtype.kind not in "iu" and values.dtype.itemsize <= 2
        with contextlib.suppress(TypeError, ValueError):
            return values.astype(np.float32 if is_small else np.float64)
    raise TypeError(
        f"`{name}` must be real numbers; convert them with `.astype('float32')`. "
        f"Received: {name} of dtype {values.dtype}"
    )


def check_finite(name: str, values: np.ndarray, unit: str = "rows") -> None:
    """Refuses floats that are NaN or infinite; other types pass.

    Args:
        name: Name of the argument.
        values: `(n, ...)` array.
        unit: What its rows are, in the plural.

    Raises:
        ValueError: If a row has such a value, with the number of those rows.
    """
    if values.dtype.kind != "f":
        return
    # The sum takes no memory. It is finite unless a value is not, or it overflows.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):
            return
    bad = [row for row, value in enumerate(values) if not np.isfinite(value).all()]
    if bad:
        raise ValueError(
            f"`{name}` must be finite; leave out or mend what is not. Received: NaN or "
            f"infinity in {len(bad)} of {len(values)} {unit}, the first at {bad[0]}"
        )


# ==== Added for the new house: one place for labels and embeddings ====


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
