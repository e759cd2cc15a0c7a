"""ONNX, by the exporter of Keras."""

import importlib
import os
from typing import Any

import keras
import numpy as np

from keras_ccp.serving.export import image_size, load_embedder


def export_onnx(embedder: Any, path: str | os.PathLike) -> None:
    """Writes an embedder in the ONNX format, without decoding and search.

    It takes uint8 or float images as the embedder does, `(batch, size, size, 3)`. Needs
    the packages `onnx` and `tf2onnx`.

    Args:
        embedder: Keras model, `CCPModel`, or the path of a `.keras` file.
        path: file to write.

    Raises:
        ImportError: If a package is missing.
        TypeError: If the embedder is a SavedModel, from which Keras cannot export.
        ValueError: If it does not take square RGB images.
    """
    for package in ("onnx", "tf2onnx"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ImportError(
                "ONNX export needs two more packages: `pip install --no-deps onnx "
                "tf2onnx` (tf2onnx 1.17 asks for an older NumPy than it needs)"
            ) from error
    model = load_embedder(embedder)
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`embedder` must be a Keras model or a .keras file; of a run that is "
            f"`repeat0/fold0/embedder.keras`. Received: embedder={embedder!r}"
        )
    size = image_size(model) or 32
    # The exporter takes the shapes of a call.
    model(np.zeros((1, size, size, 3), model.inputs[0].dtype))
    model.export(path, format="onnx", verbose=False)
