"""Tells one embedder from another: vectors of two of them are not comparable."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np


def fingerprint(model: Any) -> str:
    """Hashes the weights of a model and what it does with them.

    The names of layers do not count, so a model has the fingerprint of its saved and
    loaded copy. What `export_serving` wrote has that of the embedder inside. Another
    SavedModel is hashed by its weights and operations, which differ from those of the
    Keras model it was exported from.

    Args:
        model: Keras model, or what `tf.saved_model.load` returns.

    Returns:
        SHA-256 in hexadecimal digits.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(model, keras.Layer):
        structure = list(_layers(model))
    elif hasattr(model, "embedder_fingerprint"):
        return model.embedder_fingerprint.numpy().decode()
    elif getattr(model, "signatures", None):
        structure = list(_operations(model))
    else:
        raise TypeError(
            "`model` must be a Keras model or a loaded SavedModel with signatures. "
            f"Received: model={model!r}"
        )
    text = json.dumps(structure, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode())
    for variable in model.variables:
        value = np.asarray(variable.numpy())
        digest.update(f"{value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _layers(model: keras.Layer) -> Iterator[list]:
    """Kind and settings of each layer, those of inner models in their place."""
    for layer in getattr(model, "layers", None) or [model]:
        if layer is not model and getattr(layer, "layers", None):
            yield from _layers(layer)
        else:
            # Names are counted up by Keras and differ from process to process.
            config = {k: v for k, v in layer.get_config().items() if k != "name"}
            yield [type(layer).__name__, config]


def _operations(model: Any) -> Iterator[list]:
    """Kinds of the operations of each signature."""
    for name in sorted(model.signatures):
        graph = model.signatures[name].graph.as_graph_def()
        nodes = [node.op for node in graph.node]
        for function in graph.library.function:
            nodes += [node.op for node in function.node_def]
        yield [name, sorted(nodes)]
