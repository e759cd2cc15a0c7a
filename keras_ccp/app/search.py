"""Similar images: what `keras-ccp index`, `search`, `embed` and `check` do."""

import contextlib
import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rich.table
import rich.text
import tensorflow as tf

from keras_ccp import serving
from keras_ccp.app.images import find_images, look_at
from keras_ccp.app.page import render, thumbnail
from keras_ccp.checks import check_int
from keras_ccp.files import check_folder, replaced_folder, write_file
from keras_ccp.images import UNREADABLE, decode_center_crop, decode_image, read_file
from keras_ccp.index import (
    RetrievalIndex,
    check_backend,
    check_index_folder,
    fingerprint,
    has_index,
)

CONFIG_FILE = "config.yaml"
EMBEDDER_FOLDER = "embedder"
_BATCH = 64
_SHOWN = 20


class Embedded(NamedTuple):
    """Embeddings of image files.

    Args:
        embeddings: `(n, dim)` float32.
        files: the n files that could be read.
        failures: reason by file, of those that could not.
    """

    embeddings: np.ndarray
    files: list[Path]
    failures: dict[Path, str]


class Indexed(NamedTuple):
    """What `index_images` did.

    Args:
        index: the index, as it was written.
        failures: reason by file, of the images that are not in it.
    """

    index: RetrievalIndex
    failures: dict[Path, str]


class Neighbour(NamedTuple):
    """An image of the index.

    Args:
        id: its path below the folder that was indexed.
        path: where it was when it was indexed.
        label: str, or `None` in an index without labels.
        distance: Euclidean, to the query.
    """

    id: str
    path: str
    label: str | None
    distance: float


class SearchResult(NamedTuple):
    """What was found for a query.

    Args:
        query: path of the image.
        neighbours: nearest first.
    """

    query: str
    neighbours: list[Neighbour]


# ==== index and embed ====


def index_images(
    run: str | os.PathLike,
    images: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    backend: str = "exact",
    progress: bool = True,
) -> Indexed:
    """Embeds images and writes an index that `Searcher` searches, without the run.

    The ids are paths below the folder of the images, the labels the folders that they
    are in there; those that lie in it directly have its own name. If all do, there are
    no labels. Images that cannot be read are left out.

    Args:
        run: folder of a run, SavedModel, or `.keras` file.
        images: files and folders.
        out: folder of the index. One that is there is replaced, once all is embedded.
        backend: `"exact"` or `"scann"`. Defaults to `"exact"`.
        progress: whether a bar is shown. Defaults to True.

    Raises:
        FileNotFoundError: If there is no run, or a path does not exist.
        ValueError: If no image can be read, the embedder does not take RGB images, or
            `out` holds other files and no index.
    """
    check_backend(backend)
    check_index_folder("out", out)
    files, root = find_images(images), _common_folder(images)
    with _exported(run) as exported:
        model = tf.saved_model.load(exported)
        embedded = _embed(model, exported, files, progress)
        ids = [file.relative_to(root).as_posix() for file in embedded.files]
        index = RetrievalIndex.build(
            embedded.embeddings,
            ids,
            _labels(ids, root),
            backend=backend,
            fingerprint=fingerprint(model),
            metadata={"root": str(root)},
        )
        index.save(out)
        with replaced_folder(Path(out) / EMBEDDER_FOLDER) as place:
            shutil.copytree(exported, place, dirs_exist_ok=True)
    return Indexed(index, embedded.failures)


def embed_images(
    run: str | os.PathLike,
    images: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    progress: bool = True,
) -> Embedded:
    """Writes the embeddings of images.

    Writes `out`, a `(n, dim)` float32 array, and beside it the n absolute paths, one a
    line, in a `.txt` file of the same name. Images that cannot be read are left out.

    Args:
        run: folder of a run, SavedModel, or `.keras` file.
        images: files and folders.
        out: `.npy` file.
        progress: whether a bar is shown. Defaults to True.

    Raises:
        FileNotFoundError: If there is no run, or a path does not exist.
        ValueError: If `out` does not end in `.npy` or is a folder, no image can be
            read, or the embedder does not take RGB images.
    """
    out = Path(out)
    names = out.with_suffix(".txt")
    if out.suffix != ".npy":
        raise ValueError(f"`out` must end in .npy. Received: {out}\nRename it")
    check_file("out", out)
    check_file("out", names)
    files = find_images(images)
    with _exported(run) as exported:
        model = tf.saved_model.load(exported)
        embedded = _embed(model, exported, files, progress)
    array = io.BytesIO()
    np.save(array, embedded.embeddings, allow_pickle=False)
    write_file(names, b"".join(os.fsencode(file) + b"\n" for file in embedded.files))
    write_file(out, array.getvalue())
    return embedded


def check_file(name: str, path: str | os.PathLike) -> None:
    """Refuses a place where no file can be written, before time is spent."""
    if Path(path).is_dir():
        raise ValueError(
            f"`{name}` must be a file to write. Received: {path}, which is a folder\n"
            "Name a file in it"
        )
    check_folder(name, Path(path).parent)


def run_embedder(run: str | os.PathLike) -> tuple[Any, dict[str, int]]:
    """The embedder of a run, `.keras` file or SavedModel, and how it wants its images.

    Of a run it is the SavedModel, and the second are arguments for `export_serving`.
    """
    run = Path(run)
    if not (run / CONFIG_FILE).exists():
        return serving.load_embedder(run), serving.read_preparation(run)
    folder = run / EMBEDDER_FOLDER
    if not folder.exists():
        raise FileNotFoundError(
            f"`run` must be a run that is finished. Received: {run}, which has no "
            f"{EMBEDDER_FOLDER}\nGo on with `keras-ccp train ... --resume`"
        )
    embedder, preparation = (
        serving.load_embedder(folder),
        serving.read_preparation(folder),
    )
    serving.image_size(embedder)  # says what it takes, if it does not take files
    if not preparation:
        raise FileNotFoundError(
            f"{folder} does not say how images are prepared, like those of earlier "
            f"versions\nWrite it again with `keras-ccp evaluate {run} --data ROOT`"
        )
    return embedder, preparation


@contextlib.contextmanager
def _exported(run: str | os.PathLike) -> Iterator[Path]:
    """The embedder of a run with its preparation of images, as a SavedModel."""
    embedder, preparation = run_embedder(run)
    with tempfile.TemporaryDirectory() as folder:
        yield serving.export_serving(
            embedder, Path(folder) / EMBEDDER_FOLDER, **preparation
        )


def _embed(model: Any, folder: Path, files: Sequence[Path], progress: bool) -> Embedded:
    """Embeds image files by an exported model and the preparation in its folder."""
    sizes, embed = serving.read_preparation(folder), model.signatures["embed"]
    read, failures = [], {}

    def look(file: Path) -> tf.Tensor:
        return decode_center_crop(read_file(os.path.expanduser(file)), **sizes)

    def readable() -> Iterator[tf.Tensor]:
        looks = look_at(look, files, "reading images", progress)
        for file, (image, why) in zip(files, looks, strict=True):
            if why:
                failures[file] = why
            else:
                read.append(file)
                yield image

    images, embeddings = readable(), []
    while batch := list(itertools.islice(images, _BATCH)):
        embeddings.append(embed(images=tf.stack(batch))["embeddings"].numpy())
    if not read:
        lines = [f"{file}: {why}" for file, why in failures.items()]
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise ValueError(
            "`images` must hold at least one image that can be read. "
            f"Received: {len(lines)} that cannot\n" + "\n".join(lines[:_SHOWN] + more)
        )
    return Embedded(np.concatenate(embeddings), read, failures)


def _labels(ids: Sequence[str], root: Path) -> list[str] | None:
    """The folder of each image, `None` if all lie in the root."""
    folders = [Path(name).parent.as_posix() for name in ids]
    if all(folder == "." for folder in folders):
        return None
    # The root of a disk has no name.
    own = root.name or str(root)
    return [own if folder == "." else folder for folder in folders]


def _common_folder(images: Sequence[str | os.PathLike]) -> Path:
    """The folder below which the files are named."""
    given = [Path(os.path.abspath(os.path.expanduser(path))) for path in images]
    folders = [path if path.is_dir() else path.parent for path in given]
    return Path(os.path.commonpath(folders))


# ==== search and check ====


class Searcher:
    """Finds the images of an index that are similar to an image.

    ```python
    searcher = Searcher("photos.index")
    results, failures = searcher.search(["query.jpg"], k=5)
    print(results[0].neighbours[0].path)
    ```

    Args:
        path: folder that `index_images` wrote.

    Raises:
        FileNotFoundError: If there is no such index.
        ValueError: If a file is damaged, or the embedder is not that of the index.
    """

    def __init__(self, path: str | os.PathLike):
        self.index = RetrievalIndex.load(path)
        self._folder = Path(path) / EMBEDDER_FOLDER
        if not self._folder.is_dir():
            raise FileNotFoundError(
                "`path` must be an index with its embedder, as `keras-ccp index` makes "
                f"it. Received: {path}, which has no {EMBEDDER_FOLDER}\n"
                "Search one without it in Python, by `RetrievalIndex`"
            )
        # Its check runs the model once, which is the slow time.
        self._model, _ = serving.load_checked(self._folder)
        self._fingerprint = fingerprint(self._model)
        _check_own_embedder(self.index, self._fingerprint, Path(path))

    def search(
        self, images: Sequence[str | os.PathLike], k: int = 10, progress: bool = True
    ) -> tuple[list[SearchResult], dict[Path, str]]:
        """Finds the nearest images of each image.

        Args:
            images: files; folders are not searched through.
            k: int, neighbours of each; all there are if they are fewer. Defaults to 10.
            progress: whether a bar is shown with more than one image. Defaults to True.

        Returns:
            A result for each image that can be read, and the reasons for the others.

        Raises:
            ValueError: If `k` is below 1, or no image is given or can be read.
            TypeError: If `k` is no integer.
        """
        check_int("k", k, minimum=1)
        files = [Path(image) for image in images]
        progress = progress and len(files) > 1
        vectors, files, failures = _embed(self._model, self._folder, files, progress)
        distances, ids = self.index.search(
            vectors, min(k, len(self.index)), self._fingerprint
        )
        labels = np.full(ids.shape, None)
        if self.index.labels is not None:
            labels = self.index.labels_of(ids)
        root = Path(self.index.metadata["root"])
        results = []
        for file, *found in zip(files, ids, labels, distances.tolist(), strict=True):
            neighbours = [
                Neighbour(name, str(root / name), label, distance)
                for name, label, distance in zip(*found, strict=True)
            ]
            results.append(SearchResult(str(file), neighbours))
        return results, failures


def about_model(path: str | os.PathLike) -> dict[str, Any]:
    """Checks an exported model, the embedder of a run, or an index with its embedder.

    Args:
        path: folder of the model, run or index.

    Returns:
        What `keras_ccp.serving.check_model` does; of an index, `num_rows` is its own.

    Raises:
        FileNotFoundError: If there is no such model.
        ValueError: If the model or the index is damaged, or the index is of another
            embedder.
    """
    path = Path(path)
    if not (path / EMBEDDER_FOLDER).is_dir():
        return serving.check_model(path)
    about = serving.check_model(path / EMBEDDER_FOLDER)
    if has_index(path):
        index = RetrievalIndex.load(path)
        _check_own_embedder(index, about["fingerprint"], path)
        about["num_rows"] = len(index)
    return about


def _check_own_embedder(index: RetrievalIndex, own: str, path: Path) -> None:
    if own != index.fingerprint:
        raise ValueError(
            f"`path` must hold an index with its own embedder. Received: {path}\n"
            "Make it again with `keras-ccp index`"
        )


# ==== What was found, as a table, as JSON and as a page ====


def results_table(results: Sequence[SearchResult]) -> rich.table.Table:
    """A table with a row a neighbour.

    Args:
        results: what was found.
    """
    right = [rich.table.Column(name, justify="right") for name in ("rank", "distance")]
    table = rich.table.Table("query", *right, "label", "image")
    for result in results:
        for rank, found in enumerate(result.neighbours, 1):
            query = result.query if rank == 1 else ""
            distance = f"{found.distance:.4f}"
            cells = (query, str(rank), distance, found.label or "", found.id)
            # Text, since file names may look like markup.
            table.add_row(*map(rich.text.Text, cells))
        table.add_section()
    return table


def to_json(results: Sequence[SearchResult]) -> str:
    """A JSON list of `{"query": ..., "neighbours": [{"rank": 1, "id": ...}, ...]}`.

    Args:
        results: what was found.
    """
    values = [
        {
            "query": result.query,
            "neighbours": [
                {"rank": rank, **found._asdict()}
                for rank, found in enumerate(result.neighbours, 1)
            ],
        }
        for result in results
    ]
    return json.dumps(values, indent=2)


def write_page(results: Sequence[SearchResult], path: str | os.PathLike) -> None:
    """Writes a page with a row of images a query, the query framed.

    Images are in the file itself, at most 192 pixels wide and high, upright. One that
    is not where it was indexed is shown as missing.

    Args:
        results: what was found.
        path: HTML file.
    """
    values = {"results": results, "picture": _picture, "name": os.path.basename}
    write_file(path, render("app/search.html.j2", **values))


def _picture(path: str) -> str | None:
    """The image as a data URI, or `None` if it cannot be read."""
    try:
        return thumbnail(decode_image(read_file(os.path.expanduser(path))))
    except UNREADABLE:
        return None
