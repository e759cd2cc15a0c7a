"""Similar images: what `keras-ccp index`, `search`, `embed` and `check` do."""

import io
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import rich.table
import rich.text
import tensorflow as tf

from keras_ccp import serving
from keras_ccp.app.console import printable
from keras_ccp.app.fold import SUMMARY_FILE
from keras_ccp.app.images import find_images, look_at
from keras_ccp.app.page import render, thumbnail
from keras_ccp.app.run import CONFIG_FILE, check_files, join_embedders
from keras_ccp.checks import check_int
from keras_ccp.files import check_folder, write_file
from keras_ccp.images import UNREADABLE, decode_center_crop, decode_image, read_file
from keras_ccp.index import (
    KeptEmbedder,
    RetrievalIndex,
    check_backend,
    check_index_folder,
    fingerprint,
    has_index,
)

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
        path: where it was when it was indexed, `None` if its id is no path there.
        label: `None` in an index without labels.
        distance: Euclidean, to the query.
    """

    id: str | int
    path: str | None
    label: str | int | None
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
    trust: bool = False,
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
        trust: whether a SavedModel, which is a program, may run. Defaults to False.

    Raises:
        FileNotFoundError: If there is no run, or a path does not exist.
        ValueError: If no image can be read, the embedder does not take RGB images or
            is a SavedModel that is not trusted, or `out` holds other files and no
            index.
        OSError: If `out` cannot be written.
    """
    out = Path(out)
    check_backend(backend)
    check_index_folder("out", out)
    check_folder("out", out)
    files, root = find_images(images), _common_folder(images)
    embedder, sizes = run_embedder(run, trust)
    embedded = _embed(_graph(embedder), sizes, files, progress)
    ids = [file.relative_to(root).as_posix() for file in embedded.files]
    index = RetrievalIndex.build(
        embedded.embeddings,
        ids,
        _labels(ids, root),
        backend=backend,
        fingerprint=fingerprint(embedder),
        metadata={"root": str(root)},
    )
    # In the folder itself, where the next one removes it if this one dies.
    out.mkdir(parents=True, exist_ok=True)
    partial = out / "partial_embedder.keras"
    if isinstance(embedder, keras.Model):
        embedder.save(partial)
    else:
        partial = Path(shutil.make_archive(partial.with_suffix(""), "zip", run))
    index.embedder = KeptEmbedder(partial, **sizes)
    index.save(out)
    return Indexed(index, embedded.failures)


def embed_images(
    run: str | os.PathLike,
    images: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    progress: bool = True,
    trust: bool = False,
) -> Embedded:
    """Writes the embeddings of images.

    Writes `out`, a `(n, dim)` float32 array, and beside it the n absolute paths, each
    a line of JSON, in a `.jsonl` file of the same name. Images that cannot be read are
    left out.

    Args:
        run: folder of a run, SavedModel, or `.keras` file.
        images: files and folders.
        out: `.npy` file.
        progress: whether a bar is shown. Defaults to True.
        trust: whether a SavedModel, which is a program, may run. Defaults to False.

    Raises:
        FileNotFoundError: If there is no run, or a path does not exist.
        ValueError: If `out` does not end in `.npy` or is a folder, no image can be
            read, or the embedder does not take RGB images or is a SavedModel that is
            not trusted.
        OSError: If `out` cannot be written.
    """
    out = Path(out)
    names = out.with_suffix(".jsonl")
    if out.suffix != ".npy":
        raise ValueError(f"`out` must end in .npy. Received: {out}\nRename it")
    check_file("out", out)
    check_file("out", names)
    files = find_images(images)
    embedder, sizes = run_embedder(run, trust)
    embedded = _embed(_graph(embedder), sizes, files, progress)
    array = io.BytesIO()
    np.save(array, embedded.embeddings, allow_pickle=False)
    # Whenever this one dies: never the names of other vectors.
    names.unlink(missing_ok=True)
    write_file(out, array.getvalue())
    lines = [json.dumps(str(file)) + "\n" for file in embedded.files]
    write_file(names, "".join(lines))
    return embedded


def check_file(name: str, path: str | os.PathLike) -> None:
    """Refuses a place where no file can be written, before time is spent."""
    if Path(path).is_dir():
        raise ValueError(
            f"`{name}` must be a file to write. Received: {path}, which is a folder\n"
            "Name a file in it"
        )
    check_folder(name, Path(path).parent)


def run_embedder(
    run: str | os.PathLike, trust: bool = False
) -> tuple[Any, dict[str, int]]:
    """The embedder of a run, `.keras` file or SavedModel, and how it wants its images.

    The second are arguments of `decode_center_crop`. Of a run the models are read, and
    no SavedModel.
    """
    run = Path(run)
    if not (run / CONFIG_FILE).exists():
        embedder = serving.load_embedder(run, trust)
        given = serving.read_preparation(run)
        return embedder, serving.prepare_as(embedder, **given)
    check_files(run)
    folder = run / EMBEDDER_FOLDER
    if not folder.exists():
        raise FileNotFoundError(
            f"`run` must be a run that is finished. Received: {run}, which has no "
            f"{EMBEDDER_FOLDER}\nGo on with `keras-ccp train ... --resume`"
        )
    finished = sorted(run.glob(f"repeat0/fold*/{SUMMARY_FILE}"))
    embedder = join_embedders([path.parent for path in finished])
    serving.image_size(embedder)  # says what it takes, if it does not take files
    preparation = serving.read_preparation(folder)
    if not preparation:
        raise FileNotFoundError(
            f"{folder} does not say how images are prepared, like those of earlier "
            f"versions\n`keras-ccp train --out {run} --resume` writes it again"
        )
    return embedder, preparation


def _graph(embedder: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    """What maps a batch of uint8 images to float32 embeddings."""
    call, given = serving.call_of(embedder)

    def embed(images: tf.Tensor) -> tf.Tensor:
        return tf.cast(call(tf.cast(images, given.dtype)), tf.float32)

    return tf.function(embed, reduce_retracing=True, autograph=False)


def _embed(
    embed: Callable[[tf.Tensor], tf.Tensor],
    sizes: dict[str, int],
    files: Sequence[Path],
    progress: bool,
) -> Embedded:
    """Embeds image files, prepared as in evaluation."""
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
        embeddings.append(embed(tf.stack(batch)).numpy())
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
        trust: whether an embedder that is a SavedModel may run. Defaults to False.

    Raises:
        FileNotFoundError: If there is no such index.
        ValueError: If a file is damaged, or the embedder is not that of the index or
            is a SavedModel that is not trusted.
    """

    def __init__(self, path: str | os.PathLike, trust: bool = False):
        self.index = RetrievalIndex.load(path)
        if self.index.embedder is None:
            raise FileNotFoundError(
                "`path` must be an index with its embedder, as `keras-ccp index` makes "
                f"it. Received: {path}, which has none\n"
                "Search one without it in Python, by `RetrievalIndex`"
            )
        self._embed = _graph(_own_embedder(self.index, path, trust))

    def search(
        self,
        images: Sequence[str | os.PathLike],
        k: int = 10,
        progress: bool = True,
        max_distance: float | None = None,
    ) -> tuple[list[SearchResult], dict[Path, str]]:
        """Finds the nearest images of each image.

        Args:
            images: files; folders are not searched through.
            k: int, neighbours of each; all there are if they are fewer. Defaults to 10.
            progress: whether a bar is shown with more than one image. Defaults to True.
            max_distance: float, leaves out what is farther. Defaults to `None`.

        Returns:
            A result for each image that can be read, and the reasons for the others.

        Raises:
            ValueError: If `k` is below 1, or no image is given or can be read.
            TypeError: If `k` is no integer.
        """
        check_int("k", k, minimum=1)
        files = [Path(image) for image in images]
        progress = progress and len(files) > 1
        _, *sizes = self.index.embedder
        sizes = dict(zip(("size", "short_side"), sizes, strict=True))
        vectors, files, failures = _embed(self._embed, sizes, files, progress)
        distances, ids = self.index.search(
            vectors, min(k, len(self.index)), max_distance=max_distance
        )
        labels = np.full(ids.shape, None)
        if self.index.labels is not None:
            labels = self.index.labels_of(ids)
        root, results = self.index.metadata.get("root"), []
        columns = (array.tolist() for array in (ids, labels, distances))
        for file, *found in zip(files, *columns, strict=True):
            neighbours = [
                Neighbour(name, _path_of(name, root), label, distance)
                for name, label, distance in zip(*found, strict=True)
                if distance < np.inf
            ]
            results.append(SearchResult(str(file), neighbours))
        return results, failures


def _own_embedder(index: RetrievalIndex, path: str | os.PathLike, trust: bool) -> Any:
    embedder = serving.load_embedder(index.embedder.file, trust)
    if fingerprint(embedder) != index.fingerprint:
        raise ValueError(
            f"`path` must hold an index with its own embedder. Received: {path}\n"
            "Make it again with `keras-ccp index`"
        )
    return embedder


def _path_of(name: str | int, root: str | None) -> str | None:
    """Where an image of an index was, if that is below the folder of its images."""
    if root is not None:
        path = os.path.normpath(os.path.join(root, str(name)))
        return path if Path(path).is_relative_to(root) else None


def about_model(path: str | os.PathLike, trust: bool = False) -> dict[str, Any]:
    """Checks an exported model, the embedder of a run, or an index with its embedder.

    Args:
        path: folder of the model, run or index.
        trust: whether a SavedModel, which is a program, may run. Defaults to False: of
            a model or run the files are compared with their checksums, and no more.

    Returns:
        What `keras_ccp.serving.check_model` does; of an index `num_rows` is its own,
        and no `difference`.

    Raises:
        FileNotFoundError: If there is no such model.
        ValueError: If the model or the index is damaged, or the index is of another
            embedder, or its embedder is a SavedModel that is not trusted.
    """
    path = Path(path)
    if not has_index(path):
        folder = path / EMBEDDER_FOLDER
        folder = folder if folder.is_dir() else path
        if trust:
            return serving.check_model(folder)
        about = serving.read_undamaged(folder)["about"]
        return about | {"difference": "not computed without --trust"}
    index = RetrievalIndex.load(path)
    about = {"fingerprint": index.fingerprint}
    if index.embedder is not None:
        _own_embedder(index, path, trust)
        _, about["size"], about["short_side"] = index.embedder
    return about | {"embedding_dim": index.embeddings.shape[1], "num_rows": len(index)}


# ==== What was found, as a table, as JSON and as a page ====


def results_table(results: Sequence[SearchResult]) -> rich.table.Table:
    """A table with a row a neighbour.

    Args:
        results: what was found.
    """
    right = [rich.table.Column(name, justify="right") for name in ("rank", "distance")]
    table = rich.table.Table("query", *right, "label", "image")
    for result in results:
        if not result.neighbours:
            table.add_row(rich.text.Text(printable(result.query)), "", "", "", "none")
        for rank, found in enumerate(result.neighbours, 1):
            query = result.query if rank == 1 else ""
            distance = f"{found.distance:.4f}"
            label = "" if found.label is None else found.label
            cells = (query, rank, distance, label, found.id)
            # Text, since file names may look like markup.
            table.add_row(*(rich.text.Text(printable(str(cell))) for cell in cells))
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

    Images are in the file itself, at most 192 pixels wide and high, upright, with a
    link to their files. One that is not where it was indexed is shown as missing.

    Args:
        results: what was found.
        path: HTML file.
    """
    values = {"results": results, "picture": _picture, "name": os.path.basename}
    values["link"] = lambda path: Path(path).expanduser().absolute().as_uri()
    write_file(path, render("app/search.html.j2", **values))


def _picture(path: str) -> str | None:
    """The image as a data URI, or `None` if it cannot be read."""
    try:
        return thumbnail(decode_image(read_file(os.path.expanduser(path))))
    except UNREADABLE:
        return None
