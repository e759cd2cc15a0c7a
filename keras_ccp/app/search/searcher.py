"""`keras-ccp search`: an index with the embedder that it was made with."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from keras_ccp.app.search.check import check_own_embedder
from keras_ccp.app.search.commands import EMBEDDER_FOLDER
from keras_ccp.app.search.image_files import (
    check_any_read,
    progress_bar,
    reason_of,
)
from keras_ccp.app.search.results import Neighbour, SearchResult
from keras_ccp.checks import check_int
from keras_ccp.index import RetrievalIndex, fingerprint
from keras_ccp.serving import load_checked


class Searcher:
    """Finds the images of an index that are similar to an image.

    Args:
        path: folder that `index_images` wrote.

    Raises:
        FileNotFoundError: If there is no such index.
        ValueError: If a file is damaged, or the embedder is not that of the index.
    """

    def __init__(self, path: str | os.PathLike):
        path = Path(path)
        self.index = RetrievalIndex.load(path)
        if not (path / EMBEDDER_FOLDER).is_dir():
            raise FileNotFoundError(
                "`path` must be an index with its embedder, as `keras-ccp index` "
                "writes it; one without is searched in Python, by `RetrievalIndex`. "
                f"Received: path={str(path)!r}, which has no {EMBEDDER_FOLDER}"
            )
        # Its check runs the model once, which is the slow time.
        self._model, _ = load_checked(path / EMBEDDER_FOLDER)
        self._fingerprint = fingerprint(self._model)
        check_own_embedder(self.index, self._fingerprint, path)

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
        if not images:
            raise ValueError("`images` must hold one at least. Received: nothing")
        results, failures = [], {}
        with progress_bar(progress and len(images) > 1) as bar:
            for image in bar.track(images, description="searching"):
                path = Path(image)
                file = path.expanduser()
                if file.is_dir():
                    failures[path] = f"a folder; give files, such as {path / '*.jpg'}"
                    continue
                try:
                    embeddings = self._embed(file.read_bytes())
                except OSError as error:
                    failures[path] = error.strerror or type(error).__name__
                except tf.errors.OpError:
                    failures[path] = reason_of(file)
                else:
                    results.append(self._result(path, embeddings, k))
        check_any_read(len(results), failures)
        return results, failures

    def _embed(self, encoded: bytes) -> np.ndarray:
        files = tf.constant([encoded])
        return self._model.signatures["embed_bytes"](files)["embeddings"].numpy()

    def _result(self, path: Path, embeddings: np.ndarray, k: int) -> SearchResult:
        k = min(k, len(self.index))
        distances, ids = self.index.search(embeddings, k, self._fingerprint)
        has_labels = self.index.labels is not None
        labels = self.index.labels_of(ids)[0] if has_labels else [None] * k
        root = Path(self.index.metadata["root"])
        found = zip(ids[0], labels, distances[0], strict=True)
        neighbours = [
            Neighbour(name, str(root / name), label, float(distance))
            for name, label, distance in found
        ]
        return SearchResult(str(path), neighbours)
