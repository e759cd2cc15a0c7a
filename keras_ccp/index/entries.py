"""The rows of an index: embeddings, ids and labels, checked, and as plain arrays."""

import json
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_ccp.checks import as_array, as_floats, check_finite

# File names that are no UTF-8 come from Python with such characters, and go back.
_UNDECODABLE = "surrogateescape"


class Entries(NamedTuple):
    """What an index holds, row by row.

    Args:
        embeddings: `(n, dim)` float32 or float64, finite.
        ids: `(n,)` int64, or objects that are `str`; each once.
        labels: likewise without being unique, or `None`.
    """

    embeddings: np.ndarray
    ids: np.ndarray
    labels: np.ndarray | None

    def joined(self, other: "Entries") -> "Entries":
        """These rows, then the other's.

        Args:
            other: entries of the same width.

        Raises:
            ValueError: If an id is in both, the widths differ, or only one has labels.
            TypeError: If ids or labels are strings in one and integers in the other.
        """
        dims = self.embeddings.shape[1], other.embeddings.shape[1]
        if dims[0] != dims[1]:
            raise ValueError(
                f"`embeddings` must have {dims[0]} columns, as the index has. "
                f"Received: embeddings.shape={other.embeddings.shape}"
            )
        if (self.labels is None) != (other.labels is None):
            raise ValueError(
                "`labels` must be given for all rows of an index or for none. "
                f"Received: labels {'for' if self.labels is None else 'missing for'} "
                "the rows that are added"
            )
        labels = None
        if self.labels is not None:
            labels = _joined("labels", self.labels, other.labels)
        ids = _joined("ids", self.ids, other.ids)
        _check_unique(ids)
        # Of float32 and float64 the result is float64: nothing is lost.
        return Entries(np.concatenate([self.embeddings, other.embeddings]), ids, labels)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Plain arrays by name, which `from_arrays` takes back."""
        arrays = {"embeddings": self.embeddings, **_packed("ids", self.ids)}
        if self.labels is not None:
            arrays |= _packed("labels", self.labels)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> "Entries":
        """Entries from plain arrays.

        Args:
            arrays: what `to_arrays` made, and possibly more.

        Raises:
            ValueError: If they do not fit together.
        """
        labels = _unpacked("labels", arrays)
        # Copied: arrays of a file are not aligned in memory.
        embeddings = np.array(arrays["embeddings"])
        return make_entries(embeddings, _unpacked("ids", arrays), labels)


def make_entries(
    embeddings: Any, ids: Sequence | None, labels: Sequence | None
) -> Entries:
    """Checks what is to be indexed.

    Args:
        embeddings: `(n, dim)` numbers.
        ids: `(n,)` strings or integers, each once; `None` numbers the rows from 0.
        labels: `(n,)` strings or integers, or `None`.

    Raises:
        ValueError: For a wrong shape or length, no rows, values that are not finite,
            or an id that occurs twice.
        TypeError: For embeddings that are no numbers, or ids or labels that are
            neither all strings nor all integers.
    """
    embeddings = as_floats("embeddings", embeddings)
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        raise ValueError(
            "`embeddings` must have shape (n, dim) with at least one row and one "
            f"column. Received: embeddings.shape={embeddings.shape}"
        )
    check_finite("embeddings", embeddings)
    count = len(embeddings)
    ids = np.arange(count) if ids is None else _column("ids", ids, count)
    _check_unique(ids)
    if labels is not None:
        labels = _column("labels", labels, count)
    return Entries(np.ascontiguousarray(embeddings), ids, labels)


def check_queries(queries: Any, dim: int) -> np.ndarray:
    """Returns queries as float32 or float64.

    Args:
        queries: `(q, dim)` numbers.
        dim: int, the width of the index.

    Raises:
        ValueError: For a wrong shape, no rows or values that are not finite.
        TypeError: If they are no numbers.
    """
    queries = as_floats("queries", queries)
    if queries.ndim != 2 or queries.shape[1] != dim or not len(queries):
        raise ValueError(
            f"`queries` must have shape (q, {dim}), as wide as the index and with at "
            f"least one row. Received: queries.shape={queries.shape}"
        )
    check_finite("queries", queries)
    return queries


def check_fingerprint(fingerprint: Any) -> None:
    """Refuses what is not the fingerprint of an embedder.

    Args:
        fingerprint: str, or `None` where it is not known.

    Raises:
        TypeError: If it is neither.
    """
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise TypeError(
            "`fingerprint` must be a string: that of a model is "
            f"keras_ccp.index.fingerprint(model). Received: fingerprint={fingerprint!r}"
        )


def check_backend(backend: Any) -> None:
    """Refuses what is not the name of a way to search.

    Args:
        backend: `"exact"` or `"scann"`.

    Raises:
        ValueError: If it is neither.
    """
    if backend not in ("exact", "scann"):
        raise ValueError(
            f'`backend` must be "exact" or "scann". Received: backend={backend!r}'
        )


def checked_metadata(metadata: Any) -> dict[str, Any]:
    """Returns metadata as they come back from a file.

    Args:
        metadata: values that JSON can hold, by name, or `None` for none.

    Raises:
        TypeError: If JSON cannot hold them, or they are not a dict.
    """
    try:
        kept = json.loads(json.dumps({} if metadata is None else metadata))
    except (TypeError, ValueError):
        kept = None
    if not isinstance(kept, dict):
        raise TypeError(
            "`metadata` must be a dict of strings, numbers, lists and dicts, which "
            f"JSON can hold. Received: metadata={metadata!r:.200}"
        )
    return kept


def _column(name: str, values: Any, length: int) -> np.ndarray:
    """`(length,)` int64, or objects that are str."""
    shape = as_array(name, values).shape
    if len(shape) != 1:
        raise ValueError(
            f"`{name}` must be a list of one entry an embedding. "
            f"Received: {name} of shape {shape}"
        )
    values = np.asarray(values, object).tolist()
    if len(values) != length:
        raise ValueError(
            f"`{name}` must hold one entry an embedding. "
            f"Received: {length} embeddings and {len(values)} {name}"
        )
    if all(isinstance(value, str) for value in values):
        column = np.empty(length, object)
        column[:] = values
        return column
    wrong = [value for value in values if not _is_int(value)]
    if wrong:
        raise TypeError(
            f"`{name}` must be all strings or all integers of 64 bits. "
            f"Received: {wrong[0]!r} of type {type(wrong[0]).__name__} among them"
        )
    return np.array(values, np.int64)


def _is_int(value: Any) -> bool:
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_int and -(2**63) <= value < 2**63


def _check_unique(ids: np.ndarray) -> None:
    seen = set()
    for value in ids.tolist():
        if value in seen:
            raise ValueError(
                "`ids` must be unique; number the rows, or give file names with their "
                f"folders. Received: {value!r} more than once"
            )
        seen.add(value)


def _joined(name: str, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    if first.dtype != second.dtype:
        kinds = {True: "strings", False: "integers"}
        raise TypeError(
            f"`{name}` must be {kinds[first.dtype == object]}, as those of the index "
            f"are. Received: {kinds[second.dtype == object]}"
        )
    return np.concatenate([first, second])


def _packed(name: str, column: np.ndarray) -> dict[str, np.ndarray]:
    if column.dtype != object:
        return {name: column}
    encoded = [text.encode("utf-8", _UNDECODABLE) for text in column]
    return {
        f"{name}/bytes": np.frombuffer(b"".join(encoded), np.uint8),
        f"{name}/lengths": np.array([len(text) for text in encoded], np.int64),
    }


def _unpacked(name: str, arrays: dict[str, np.ndarray]) -> np.ndarray | None:
    if name in arrays:
        return np.array(arrays[name])
    if f"{name}/bytes" not in arrays:
        return None
    text, ends = arrays[f"{name}/bytes"].tobytes(), np.cumsum(arrays[f"{name}/lengths"])
    column = np.empty(len(ends), object)
    starts = [0, *ends[:-1].tolist()]
    column[:] = [
        text[start:end].decode("utf-8", _UNDECODABLE)
        for start, end in zip(starts, ends.tolist(), strict=True)
    ]
    return column


def as_bytes(column: np.ndarray) -> list[bytes]:
    """Strings as TensorFlow holds them.

    Args:
        column: `(n,)` objects that are `str`.
    """
    return [text.encode("utf-8", _UNDECODABLE) for text in column]
