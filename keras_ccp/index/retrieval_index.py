"""A set of embeddings that is searched, extended, written and read."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_ccp import retrieval
from keras_ccp.checks import as_array, check_int
from keras_ccp.index.entries import (
    Entries,
    check_backend,
    check_fingerprint,
    check_queries,
    checked_metadata,
    make_entries,
)
from keras_ccp.index.index_file import read_index, write_index
from keras_ccp.index.scann_backend import (
    ScannSearcher,
    Tuning,
    load_scann,
    sampled_recall,
)


class RetrievalIndex:
    """Embeddings with ids and labels, searched by Euclidean distance.

    `RetrievalIndex.build` makes one and `RetrievalIndex.load` reads one; the
    constructor is theirs.

    Args:
        entries: checked rows.
        backend: `"exact"` or `"scann"`.
        fingerprint: of the embedder, or `None`.
        metadata: values that JSON can hold, by name.
        stored: what an earlier index of these rows measured, or `None`.

    Attributes:
        embeddings: `(n, dim)` float32 or float64.
        ids: `(n,)` int64, or objects that are `str`.
        labels: likewise, or `None`.
        backend: str, what searches: `"exact"` also where ScaNN was asked for and is
            not installed.
        fingerprint: str, of the embedder that made the embeddings, or `None`.
        metadata: dict, kept with the index.
        recall: dict of `k`, `num_queries` and `recall`, as last measured, or `None`.
    """

    def __init__(
        self,
        entries: Entries,
        backend: str,
        fingerprint: str | None,
        metadata: dict[str, Any],
        stored: dict[str, Any] | None = None,
    ):
        self._set_entries(entries)
        self.fingerprint = fingerprint
        self.metadata = metadata
        # What was asked for is kept: another machine may have ScaNN.
        self._wanted = backend
        self._scann = load_scann() if backend == "scann" else None
        self.backend = "exact" if self._scann is None else "scann"
        self._start_searcher(stored or {})

    def _set_entries(self, entries: Entries) -> None:
        self._entries = entries
        self.embeddings, self.ids, self.labels = entries
        self._row_of = {value: i for i, value in enumerate(self.ids.tolist())}

    def _start_searcher(self, stored: dict[str, Any]) -> None:
        self._searcher = self.recall = None
        if self._scann is None:
            return
        tuning = stored.get("tuning")
        tuning = None if tuning is None else Tuning(*tuning)
        self._searcher = ScannSearcher(self._scann, self.embeddings, tuning)
        self.recall = stored.get("recall")
        if self.recall is None:
            self.measured_recall()

    @classmethod
    def build(
        cls,
        embeddings: np.ndarray,
        ids: Sequence | None = None,
        labels: Sequence | None = None,
        backend: str = "exact",
        fingerprint: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> "RetrievalIndex":
        """Makes an index.

        Args:
            embeddings: `(n, dim)` finite numbers.
            ids: `(n,)` strings or integers, each once. Defaults to `None`: 0 to n - 1.
            labels: `(n,)` strings or integers. Defaults to `None`: no labels.
            backend: `"exact"` compares with every row; `"scann"` is faster and misses
                some (see `recall`), and needs the extra `scann`. Without it the index
                is exact and a warning is logged. Defaults to `"exact"`.
            fingerprint: of the embedder, by `keras_ccp.index.fingerprint`. Defaults to
                `None`: not known, nothing is refused.
            metadata: values that JSON can hold, kept with the index. Defaults to
                `None`: nothing.

        Raises:
            ValueError: For a wrong shape or length, no rows, values that are not
                finite, an id that occurs twice, or an unknown backend.
            TypeError: For an argument of another type.
        """
        check_backend(backend)
        check_fingerprint(fingerprint)
        metadata = checked_metadata(metadata)
        entries = make_entries(embeddings, ids, labels)
        return cls(entries, backend, fingerprint, metadata)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_exact(self) -> bool:
        """Whether a search finds the nearest without fail."""
        return self.backend == "exact"

    @property
    def parameters(self) -> dict[str, int]:
        """What a ScaNN search looks at, empty if exact: see `Tuning`."""
        return {} if self._searcher is None else self._searcher.tuning._asdict()

    def add(
        self, embeddings: np.ndarray, ids: Sequence, labels: Sequence | None = None
    ) -> None:
        """Appends rows. With ScaNN its structures are built anew.

        Args:
            embeddings: `(m, dim)` finite numbers, of the embedder of the index.
            ids: `(m,)` strings or integers as those of the index, none of them in it.
            labels: `(m,)` labels, where the index has labels.

        Raises:
            ValueError: As for `build`, or if an id is in the index already; the index
                is then as it was.
            TypeError: As for `build`, or if ids or labels are of the other kind.
        """
        added = make_entries(embeddings, ids, labels)
        self._set_entries(self._entries.joined(added))
        self._start_searcher({})

    def search(
        self, queries: np.ndarray, k: int, fingerprint: str | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Finds the nearest rows of each query.

        Equally near rows come in the order in which they were added.

        Args:
            queries: `(q, dim)` finite numbers.
            k: int, neighbours of each, at most the rows of the index.
            fingerprint: of the embedder of the queries. Defaults to `None`: trusted.

        Returns:
            Distances `(q, k)` float32 (L2, not squared), nearest first, and their ids
            `(q, k)`. `labels_of(ids)` has the labels.

        Raises:
            ValueError: For a wrong shape, values that are not finite, `k` out of range,
                or queries of another embedder.
            TypeError: For queries, a `k` or a fingerprint of another type.
        """
        check_fingerprint(fingerprint)
        if fingerprint and self.fingerprint and fingerprint != self.fingerprint:
            raise ValueError(
                "`queries` must come from the embedder of the index; embed the images "
                "anew with the one or make the index anew with the other. Received: "
                f"fingerprint={fingerprint!r}, the index has {self.fingerprint!r}"
            )
        queries = check_queries(queries, self.embeddings.shape[1])
        check_int("k", k, minimum=1)
        if k > len(self):
            raise ValueError(
                f"`k` must be at most {len(self)}, the rows of the index. "
                f"Received: k={k}"
            )
        if self._searcher is None:
            distances, rows = retrieval.search(queries, self.embeddings, int(k))
        else:
            distances, rows = self._searcher.search(queries, int(k))
        return distances, self.ids[rows]

    def labels_of(self, ids: Any) -> np.ndarray:
        """Labels of rows.

        Args:
            ids: array of ids, of any shape.

        Returns:
            Array of labels, of the same shape.

        Raises:
            ValueError: If the index has no labels, or not one of the ids.
        """
        if self.labels is None:
            raise ValueError(
                "`labels` were not given when the index was built. "
                "Received: a call of `labels_of`"
            )
        ids = as_array("ids", ids)
        rows = [self._row_of.get(value) for value in ids.ravel().tolist()]
        if None in rows:
            raise ValueError(
                "`ids` must be ids of the index, as `search` returns them, such as "
                f"{self.ids.tolist()[0]!r}. Received: "
                f"{ids.ravel().tolist()[rows.index(None)]!r}, which is none"
            )
        return self.labels[np.array(rows, np.int64)].reshape(ids.shape)

    def measured_recall(self, k: int = 10, num_queries: int = 1000) -> float:
        """Searches rows of the index in the others, against exact search.

        Args:
            k: int, neighbours. Defaults to 10.
            num_queries: int, rows that are tried, drawn at random, all of them if there
                are fewer. Defaults to 1000.

        Returns:
            Mean share of the true `k` nearest that are found; 1.0 if exact. Kept as
            `recall`.

        Raises:
            ValueError: If `k` or `num_queries` is out of range.
            TypeError: If one is no integer.
        """
        check_int("k", k, minimum=1)
        check_int("num_queries", num_queries, minimum=1)
        recall = 1.0
        if self._searcher is not None:
            search, seed = self._searcher.search, 1  # other rows than were tuned on
            recall = sampled_recall(search, self.embeddings, k, num_queries, seed)
        self.recall = {"k": int(k), "num_queries": int(num_queries), "recall": recall}
        return recall

    # ==== Files ====

    def save(self, path: str | os.PathLike) -> None:
        """Writes the index: all of it, or none if the process dies.

        An index that is in the folder is replaced once the new one is on the disk.
        ScaNN's own structures are not written; `load` builds them anew.

        Args:
            path: folder, made if it is missing.

        Raises:
            ValueError: If the folder holds other files and no index, or is a file.
            OSError: If it cannot be written.
        """
        header = {
            "backend": self._wanted,
            "fingerprint": self.fingerprint,
            "metadata": self.metadata,
            "tuning": self._searcher and self._searcher.tuning,
            "recall": self.recall,
        }
        write_index(path, header, self._entries)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "RetrievalIndex":
        """Reads an index. Nothing in the file is executed.

        Args:
            path: folder that `save` wrote to.

        Raises:
            FileNotFoundError: If there is no index.
            ValueError: If it is damaged (by its checksum), or is none of these.
        """
        header, entries = read_index(path)
        rest = header["backend"], header["fingerprint"], header["metadata"]
        return cls(entries, *rest, stored=header)
