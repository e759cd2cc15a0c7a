"""`keras-ccp check`: a model, or the model of a run or an index."""

import os
from pathlib import Path
from typing import Any

from keras_ccp.app.search.commands import EMBEDDER_FOLDER
from keras_ccp.index import RetrievalIndex, has_index
from keras_ccp.serving import check_model


def check_folder(path: str | os.PathLike) -> dict[str, Any]:
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
        return check_model(path)
    report = check_model(path / EMBEDDER_FOLDER)
    if has_index(path):
        index = RetrievalIndex.load(path)
        check_own_embedder(index, report["fingerprint"], path)
        report["num_rows"] = len(index)
    return report


def check_own_embedder(index: RetrievalIndex, fingerprint: str, path: Path) -> None:
    """Refuses an index with the embedder of another.

    Args:
        index: the index.
        fingerprint: that of the embedder beside it.
        path: folder of both.

    Raises:
        ValueError: If the index has another fingerprint.
    """
    if fingerprint != index.fingerprint:
        raise ValueError(
            "`path` must hold an index with its own embedder; make it anew with "
            f"`keras-ccp index`. Received: path={str(path)!r}"
        )
