"""A set of embeddings that is searched, extended, written and read."""

import collections
import contextlib
import functools
import io
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_ccp.checks import as_embeddings
from keras_ccp.files import reading, write_file
from keras_ccp.index.digests import (
    digest,
    read_manifest,
    refuse_damaged,
    write_manifest,
)
from keras_ccp.index.scann_backend import ScannSearcher, load_scann, sampled_recall
from keras_ccp.retrieval.exact_search import ExactSearch, check_k

# Its rename decides: it names the files that belong to the index.
_MANIFEST = "index.json"
# The others, by their checksums, and what a process that died has left of them.
_FILES = ("rows-*.npz", "embedder-*.keras", "embedder-*.zip", "partial_*")
_FORMAT = 3


class KeptEmbedder(NamedTuple):
    """The embedder that is kept with an index, and how it wants its images.

    Args:
        file: a `.keras` file, or a zip archive of a SavedModel.
        size: int, side of the images in pixels.
        short_side: int, as for `keras_ccp.serving.export_serving`.
    """

    file: Path
    size: int
    short_side: int


class RetrievalIndex:
    """Embeddings with ids and labels, searched by Euclidean distance.

    `RetrievalIndex.build` makes one and `RetrievalIndex.load` reads one; the
    constructor is theirs.

    Attributes:
        embeddings: `(n, dim)` float32 or float64.
        ids: `(n,)` int64 or strings.
        labels: as for `build`, or `None`.
        backend: str, what searches: `"exact"` also where ScaNN was asked for and is
            not installed.
        fingerprint: str, of the embedder that made the embeddings, or `None`.
        metadata: dict, kept with the index.
        recall: dict of `k`, `num_queries` and `recall`, as last measured, or `None`.
        embedder: `KeptEmbedder`, by which `keras-ccp search` embeds, or `None`.

    Example:

        >>> index = RetrievalIndex.build([[0.0], [2.0], [5.0]], ids=["a", "b", "c"])
        >>> index.search([[1.8]], k=2)[1]
        array([['b', 'a']], dtype='<U1')
    """

    def __init__(
        self,
        embeddings: np.ndarray,
        ids: Sequence | None,
        labels: Sequence | None,
        backend: str,
        fingerprint: str | None,
        metadata: dict[str, Any],
        tuning: Sequence[int] | None = None,
        recall: dict[str, Any] | None = None,
    ):
        self.fingerprint = fingerprint
        self.metadata = dict(metadata)
        self.embedder: KeptEmbedder | None = None
        # What was asked for is kept: another machine may have ScaNN.
        self._wanted = backend
        self._scann = load_scann() if backend == "scann" else None
        self.backend = "exact" if self._scann is None else "scann"
        embeddings = as_embeddings("embeddings", embeddings)
        if ids is None:
            ids = np.arange(len(embeddings))
        self._set_rows(embeddings, ids, labels, tuning, recall)

    def _set_rows(self, embeddings, ids, labels, tuning=None, recall=None) -> None:
        ids = _column("ids", ids, len(embeddings))
        if labels is not None:
            labels = _column("labels", labels, len(embeddings))
        row_of = {value: row for row, value in enumerate(ids.tolist())}
        if len(row_of) < len(ids):
            twice = next(v for i, v in enumerate(ids.tolist()) if row_of[v] != i)
            raise ValueError(
                f"`ids` must be unique. Received: {twice!r} more than once\n"
                "Number the rows, or give file names with their folders"
            )
        self.embeddings, self.ids, self.labels = embeddings, ids, labels
        self._row_of = row_of
        self.__dict__.pop("_exact", None)
        self._searcher, self.recall = None, recall
        if self._scann is not None:
            self._searcher = ScannSearcher(self._scann, embeddings, tuning)
            if recall is None:
                self.measured_recall()

    @functools.cached_property
    def _exact(self) -> ExactSearch:
        return ExactSearch(self.embeddings)

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
            TypeError: For ids or labels that are neither all strings nor all integers.
        """
        check_backend(backend)
        return cls(embeddings, ids, labels, backend, fingerprint, metadata or {})

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
        """Appends rows. With ScaNN its structures are built again.

        Args:
            embeddings: `(m, dim)` finite numbers, of the embedder of the index.
            ids: `(m,)` strings or integers as those of the index, none of them in it.
            labels: `(m,)` labels, where the index has labels.

        Raises:
            ValueError: As for `build`, or if an id is in the index already; the index
                is then as it was.
            TypeError: As for `build`, or if ids or labels are of the other kind.
        """
        added = as_embeddings("embeddings", embeddings, self.embeddings.shape[1])
        columns = []
        for name, old, new in (("ids", self.ids, ids), ("labels", self.labels, labels)):
            if old is None or new is None:
                if old is not new:
                    raise ValueError(
                        f"`{name}` must be given for all rows of an index or for none. "
                        f"Received: {name}={new!r:.40}\nBuild it again with all of them"
                    )
                columns.append(None)
            else:
                new = _column(name, new, len(added))
                # Not in one array: NumPy would turn numbers into strings.
                columns.append([*old.tolist(), *new.tolist()])
        # Of float32 and float64 the result is float64: nothing is lost.
        self._set_rows(np.concatenate([self.embeddings, added]), *columns)

    def remove(self, ids: Sequence) -> None:
        """Removes rows; at least one must be left. With ScaNN all is built again.

        Args:
            ids: `(m,)` ids of the index.

        Raises:
            ValueError: If one is not in the index, which is then as it was.
        """
        kept = np.delete(np.arange(len(self)), self._rows_of(ids))
        labels = None if self.labels is None else self.labels[kept]
        rows = as_embeddings("embeddings", self.embeddings[kept])
        self._set_rows(rows, self.ids[kept], labels)

    def replace(
        self, embeddings: np.ndarray, ids: Sequence, labels: Sequence | None = None
    ) -> None:
        """Gives rows other vectors and labels, in their places.

        Args:
            embeddings: `(m, dim)` finite numbers, of the embedder of the index.
            ids: `(m,)` ids of the index, each once.
            labels: `(m,)` labels. Defaults to `None`: they stay.

        Raises:
            ValueError: As for `add`, or if an id is not in the index; the index is then
                as it was.
        """
        kept = self._rows_of(ids)
        if len(np.unique(kept)) < len(kept) or len(kept) != len(embeddings):
            raise ValueError(
                "`ids` must be one for each row, each once. Received: "
                f"{len(kept)} ids, {len(np.unique(kept))} different, for "
                f"{len(embeddings)} rows\nName each row once"
            )
        changed = as_embeddings("embeddings", embeddings, self.embeddings.shape[1])
        rows = self.embeddings.astype(np.result_type(self.embeddings, changed))
        rows[kept] = changed
        if labels is None:
            return self._set_rows(rows, self.ids, self.labels)
        if self.labels is None:
            raise ValueError(
                "`labels` must be left out of an index without. Received: labels\n"
                "Build it again with all of them"
            )
        all_labels = self.labels.tolist()  # texts may get longer
        new = _column("labels", labels, len(kept)).tolist()
        for row, label in zip(kept, new, strict=True):
            all_labels[row] = label
        self._set_rows(rows, self.ids, all_labels)

    def search(
        self,
        queries: np.ndarray,
        k: int,
        fingerprint: str | None = None,
        max_distance: float | None = None,
        where: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Finds the nearest rows of each query.

        Equally near rows come in the order in which they were added.

        Args:
            queries: `(q, dim)` finite numbers.
            k: int, neighbours of each, at most the rows of the index.
            fingerprint: of the embedder of the queries. Defaults to `None`: trusted.
            max_distance: float. Farther neighbours get an infinite distance; their ids
                are to be ignored. Defaults to `None`: there are none.
            where: `(n,)` bool, the rows to look among, such as `index.labels == "wren"`
                or a condition on your own table in the order of `index.ids`. They are
                searched exactly. Defaults to `None`: all.

        Returns:
            Distances `(q, k)` float32 (L2, not squared), nearest first, and their ids
            `(q, k)`. `labels_of(ids)` has the labels.

        Raises:
            ValueError: For a wrong shape, values that are not finite, `k` out of range,
                or queries of another embedder.
        """
        if fingerprint and self.fingerprint and fingerprint != self.fingerprint:
            raise ValueError(
                "`queries` must come from the embedder of the index. Received: "
                f"fingerprint={fingerprint!r}, the index has {self.fingerprint!r}\n"
                "Embed the images with the one, or make the index with the other"
            )
        queries = as_embeddings("queries", queries, self.embeddings.shape[1])
        if where is None:
            check_k(k, len(self))
            searcher = self._searcher or self._exact
            distances, rows = searcher.search(queries, k)
        else:
            chosen = self._chosen(where)
            check_k(k, len(chosen))
            distances, rows = ExactSearch(self.embeddings[chosen]).search(queries, k)
            rows = chosen[rows]
        if max_distance is not None:
            distances[distances > max_distance] = np.inf
        return distances, self.ids[rows]

    def _chosen(self, where):
        where = np.asarray(where)
        if where.dtype != bool or where.shape != (len(self),) or not where.any():
            raise ValueError(
                f"`where` must be one bool for each of {len(self)} rows, some true. "
                f"Received: {where.dtype} of shape {where.shape}\n"
                'Compare a column: index.labels == "wren"'
            )
        return np.flatnonzero(where)

    def classify(
        self,
        queries: np.ndarray,
        k: int = 5,
        fingerprint: str | None = None,
        max_distance: float | None = None,
    ) -> np.ndarray:
        """Labels of queries, by a vote of their nearest rows.

        Of labels with as many votes the one of the nearest row wins.

        Args:
            queries: `(q, dim)` finite numbers.
            k: int, neighbours that vote, at most the rows of the index. Defaults to 5.
            fingerprint: as for `search`.
            max_distance: float, rows farther away have no vote, as
                `retrieval.calibrate` finds it. Defaults to `None`: all have one.

        Returns:
            `(q,)` objects: labels, and `None` where no row has a vote: unknown.

        Raises:
            ValueError: As for `search`, or if the index has no labels.
        """
        if self.labels is None:
            raise ValueError(
                "`classify` needs an index with labels. Received: one without\n"
                "Build it with `labels`"
            )
        k = min(k, len(self))
        distances, ids = self.search(queries, k, fingerprint, max_distance)
        found = []
        for own, far in zip(ids, np.isinf(distances), strict=True):
            # The first of equals, and they are in order of distance.
            votes = collections.Counter(self.labels_of(own[~far]).tolist())
            votes = votes.most_common(1)
            found.append(votes[0][0] if votes else None)
        return np.array(found, object)

    def labels_of(self, ids: Any) -> np.ndarray:
        """Labels of rows.

        Args:
            ids: array of ids, of any shape.

        Returns:
            Array of labels, of the same shape.

        Raises:
            ValueError: If one of the ids is not in the index.
            TypeError: If the index has no labels.
        """
        return self.labels[self._rows_of(ids)].reshape(np.shape(ids))

    def _rows_of(self, ids: Any) -> np.ndarray:
        values = np.asarray(ids).ravel().tolist()
        missing = [value for value in values if value not in self._row_of]
        if missing:
            raise ValueError(
                f"`ids` must be ids of the index. Received: {missing[0]!r}\n"
                f"They are as `search` returns them, such as {self.ids.tolist()[0]!r}"
            )
        return np.array([self._row_of[value] for value in values], np.int64)

    def measured_recall(self, k: int = 10, num_queries: int = 1000) -> float:
        """Searches rows of the index in the others, against exact search.

        Args:
            k: int, neighbours. Defaults to 10.
            num_queries: int, rows that are tried, drawn at random, all of them if there
                are fewer. Defaults to 1000.

        Returns:
            Mean share of the true `k` nearest that are found; 1.0 if exact. Kept as
            `recall`.
        """
        recall = 1.0
        if self._searcher is not None:
            search, seed = self._searcher.search, 1  # other rows than were tuned on
            recall = sampled_recall(search, self._exact, k, num_queries, seed)
        self.recall = {"k": k, "num_queries": num_queries, "recall": recall}
        return recall

    # ==== Files ====

    def save(self, path: str | os.PathLike) -> None:
        """Writes the index: all of it, or none if the process dies.

        An index that is in the folder is replaced once the new one is on the disk; if
        the new one has no embedder, it takes over that of the same fingerprint.
        ScaNN's own structures are not written; `load` builds them again.

        Args:
            path: folder, made if it is missing.

        Raises:
            ValueError: If the folder holds other files and no index, or is a file.
            TypeError: If JSON cannot hold the metadata.
            OSError: If it cannot be written.
        """
        path = Path(path)
        check_index_folder("path", path)
        if self.embedder is None and self.fingerprint and has_index(path):
            with contextlib.suppress(ValueError):  # it is damaged: nothing to keep
                old = read_manifest(path / _MANIFEST)
                if old["fingerprint"] == self.fingerprint:
                    self.embedder = _read_embedder(path, old)
        arrays = {"embeddings": self.embeddings, "ids": self.ids, "labels": self.labels}
        buffer = io.BytesIO()
        np.savez(buffer, **{k: v for k, v in arrays.items() if v is not None})
        manifest = {
            "format": _FORMAT,
            "rows": _write_part(path, _FILES[0], buffer.getvalue()),
            "embedder": None,
            "backend": self._wanted,
            "fingerprint": self.fingerprint,
            "metadata": self.metadata,
            "tuning": self._searcher and self._searcher.tuning,
            "recall": self.recall,
        }
        kept = {_MANIFEST, manifest["rows"]["name"]}
        if self.embedder is not None:
            file, size, short_side = self.embedder
            part = _write_part(path, f"embedder-*{file.suffix}", file.read_bytes())
            manifest["embedder"] = {**part, "size": size, "short_side": short_side}
            kept.add(part["name"])
            self.embedder = KeptEmbedder(path / part["name"], size, short_side)
        write_manifest(path / _MANIFEST, manifest)
        for old in {old for name in _FILES for old in path.glob(name)}:
            if old.name not in kept:
                old.unlink()

    @classmethod
    def load(cls, path: str | os.PathLike) -> "RetrievalIndex":
        """Reads an index. Nothing in its files is executed.

        Args:
            path: folder that `save` wrote to.

        Raises:
            FileNotFoundError: If there is no index.
            ValueError: If it is damaged (by its checksums), or of another version.
        """
        path = Path(path)
        if not has_index(path):
            raise FileNotFoundError(
                f"`path` must be the folder of an index. Received: {path}\n"
                "`keras-ccp index` and `RetrievalIndex.save` make one"
            )
        kept = read_manifest(path / _MANIFEST)
        names = "backend", "fingerprint", "metadata", "tuning", "recall"
        try:
            if kept.get("format") != _FORMAT:
                refuse_damaged(path, [f"the format is {kept.get('format')!r}"])
            file = _read_part(path, kept["rows"])
            options = {name: kept[name] for name in names}
            embedder = _read_embedder(path, kept)
        except (KeyError, TypeError, AttributeError) as error:
            refuse_damaged(path, [f"what it holds is not that of an index: {error!r}"])
        remedy = "Make the index again, or copy it again from where it is whole"
        with reading(f"{file} must hold the rows of an index", remedy):
            content = io.BytesIO(file.read_bytes())
            with zipfile.ZipFile(content) as archive:
                # What is compressed, which `save` does not do, may have any size.
                if any(
                    m.compress_type != zipfile.ZIP_STORED for m in archive.infolist()
                ):
                    raise ValueError("they are compressed")
            with np.load(content, allow_pickle=False) as arrays:
                columns = [arrays.get(name) for name in ("embeddings", "ids", "labels")]
            index = cls(*columns, **options)
        index.embedder = embedder
        return index


def _write_part(path: Path, pattern: str, content: bytes) -> dict[str, str]:
    """Writes a file that is named by its checksum: name and checksum."""
    checksum = digest(content)
    name = pattern.replace("*", checksum[:16])
    write_file(path / name, content)
    return {"name": name, "sha256": checksum}


def _read_part(path: Path, part: dict[str, Any]) -> Path:
    """The file of an index, if it has its checksum."""
    file = path / Path(part["name"]).name
    if not file.is_file() or digest(file.read_bytes()) != part["sha256"]:
        refuse_damaged(path, [f"{file.name} is changed or missing"])
    return file


def _read_embedder(path: Path, manifest: dict[str, Any]) -> KeptEmbedder | None:
    part = manifest.get("embedder")
    if part is not None:
        return KeptEmbedder(_read_part(path, part), part["size"], part["short_side"])


def has_index(path: str | os.PathLike) -> bool:
    """Whether a folder holds an index, in any state.

    Args:
        path: the folder, which need not exist.
    """
    return (Path(path) / _MANIFEST).is_file()


def check_index_folder(name: str, path: str | os.PathLike) -> None:
    """Refuses a folder in which an index would lie among other files.

    Args:
        name: what the argument is called where it was given.
        path: the folder, which need not exist.
    """
    path = Path(path)
    if has_index(path) or not path.exists():
        return
    # What a process that died has left is no reason.
    left = {file for name in _FILES for file in path.glob(name)}
    others = sorted({*path.iterdir()} - left) if path.is_dir() else [path]
    if others:
        raise ValueError(
            f"`{name}` must be a new or empty folder, or that of an index, which is "
            f"replaced. Received: {path}, where {others[0].name!r} is and no index\n"
            "Choose another"
        )


def check_backend(backend: str) -> None:
    """Refuses what is not the name of a way to search.

    Args:
        backend: `"exact"` or `"scann"`.
    """
    if backend not in ("exact", "scann"):
        raise ValueError(
            f"`backend` must be 'exact' or 'scann'. Received: backend={backend!r}\n"
            "Reported metrics should come from 'exact'"
        )


def _column(name: str, values: Any, length: int) -> np.ndarray:
    """`(length,)` int64 or strings."""
    values = np.asarray(values, object).tolist()
    is_text = all(isinstance(value, str) for value in values)
    column = np.array(values, str if is_text else None)
    is_integer = column.dtype.kind in "iu" and np.can_cast(column.dtype, np.int64)
    if column.shape != (length,) or not (is_text or is_integer):
        raise ValueError(
            f"`{name}` must hold a string or an integer a row, all of one kind. "
            f"Received: {column.dtype} of shape {column.shape} for {length} rows\n"
            "Turn them into a list of strings"
        )
    return column
