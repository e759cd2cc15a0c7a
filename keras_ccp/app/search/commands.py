"""`keras-ccp index` and `keras-ccp embed`."""

import io
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_ccp.app.search.image_files import Embedded, embed_files, find_images
from keras_ccp.app.search.results import check_writable_file, write_file
from keras_ccp.files import replaced_folder
from keras_ccp.index import (
    RetrievalIndex,
    check_backend,
    check_index_folder,
    fingerprint,
)
from keras_ccp.serving import (
    export_serving,
    image_size,
    load_embedder,
    read_preparation,
)

CONFIG_FILE = "config.yaml"
EMBEDDER_FOLDER = "embedder"


class Indexed(NamedTuple):
    """What `index_images` did.

    Args:
        index: the index, as it was written.
        failures: reason by file, of the images that are not in it.
    """

    index: RetrievalIndex
    failures: dict[Path, str]


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
    files, out = find_images(images), Path(out)
    root = _common_folder(images)
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / EMBEDDER_FOLDER
        model = _export(run, exported)
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
        with replaced_folder(out / EMBEDDER_FOLDER) as place:
            shutil.copytree(exported, place, dirs_exist_ok=True)
    return Indexed(index, embedded.failures)


def _labels(ids: Sequence[str], root: Path) -> list[str] | None:
    """The folder of each image, `None` if all lie in the root."""
    folders = [Path(name).parent.as_posix() for name in ids]
    if all(folder == "." for folder in folders):
        return None
    # The root of a disk has no name.
    own = root.name or str(root)
    return [own if folder == "." else folder for folder in folders]


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
    if out.suffix != ".npy":
        raise ValueError(f"`out` must end in .npy. Received: out={str(out)!r}")
    check_writable_file("out", out)
    check_writable_file("out", out.with_suffix(".txt"))
    files = find_images(images)
    with tempfile.TemporaryDirectory() as folder:
        model = _export(run, Path(folder) / EMBEDDER_FOLDER)
        embedded = _embed(model, Path(folder) / EMBEDDER_FOLDER, files, progress)
    array = io.BytesIO()
    np.save(array, embedded.embeddings, allow_pickle=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    names = b"".join(os.fsencode(file) + b"\n" for file in embedded.files)
    write_file(out.with_suffix(".txt"), names)
    write_file(out, array.getvalue())
    return embedded


def _export(run: str | os.PathLike, path: Path) -> Any:
    """Writes the embedder of a run with its preparation of images, and loads it."""
    embedder, preparation = run_embedder(run)
    export_serving(embedder, path, **preparation)
    return tf.saved_model.load(path)


def run_embedder(run: str | os.PathLike) -> tuple[Any, dict[str, int]]:
    """The embedder of a run, and how it wants its images.

    Args:
        run: folder of a run, SavedModel, or `.keras` file.

    Returns:
        A Keras model or loaded SavedModel, and arguments for `export_serving`.

    Raises:
        FileNotFoundError: If there is no run, it is not finished, or it is of an
            earlier version.
        ValueError: If the embedder of a run does not take square RGB images.
    """
    run = Path(run)
    if not (run / CONFIG_FILE).exists():
        return load_embedder(run), read_preparation(run)
    folder = run / EMBEDDER_FOLDER
    if not folder.exists():
        raise FileNotFoundError(
            f"`run` must be a run that is finished. Received: {run}, which has no "
            f"{EMBEDDER_FOLDER}; go on with `keras-ccp train ... --resume`"
        )
    embedder, preparation = load_embedder(folder), read_preparation(folder)
    image_size(embedder)  # says what it takes, if it does not take files
    if not preparation:
        raise FileNotFoundError(
            f"{folder} does not say how images are prepared, as those of earlier "
            f"versions: write it anew with `keras-ccp evaluate {run} --data ROOT`"
        )
    return embedder, preparation


def _embed(model: Any, path: Path, files: list[Path], progress: bool) -> Embedded:
    embed = model.signatures["embed"]
    return embed_files(
        lambda images: embed(images=images)["embeddings"],
        files,
        **read_preparation(path),
        progress=progress,
    )


def _common_folder(images: Sequence[str | os.PathLike]) -> Path:
    """The folder below which the files are named."""
    given = [Path(os.path.abspath(Path(path).expanduser())) for path in images]
    folders = [path if path.is_dir() else path.parent for path in given]
    return Path(os.path.commonpath(folders))
