"""Checksums: of an embedder, and of the files of an index or model."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_ccp.files import write_file


def fingerprint(model: Any) -> str:
    """Hashes the weights of a model and what it does with them.

    Vectors of two embedders are not comparable; this tells one from another. The names
    of layers do not count, so a model has the fingerprint of its saved and loaded copy.
    What `export_serving` wrote has that of the embedder inside. Another SavedModel is
    hashed by its weights and operations, which differ from those of the Keras model it
    was exported from.

    Args:
        model: Keras model, or what `tf.saved_model.load` returns.

    Returns:
        SHA-256 in hexadecimal digits.
    """
    if hasattr(model, "embedder_fingerprint"):
        return model.embedder_fingerprint.numpy().decode()
    is_keras = isinstance(model, keras.Layer)
    structure = list((_layers if is_keras else _operations)(model))
    text = json.dumps(structure, sort_keys=True, default=str)
    hashed = hashlib.sha256(text.encode())
    # Not the seeds of layers of augmentation, which change with use.
    for variable in model.weights if is_keras else _variables(model):
        value = np.asarray(variable.numpy())
        hashed.update(f"{value.dtype} {value.shape}".encode())
        hashed.update(np.ascontiguousarray(value).tobytes())
    return hashed.hexdigest()


def _layers(model: keras.Layer) -> Iterator[list]:
    """Kind and settings of each layer, those of inner models in their place."""
    for layer in getattr(model, "layers", None) or [model]:
        if layer is not model and getattr(layer, "layers", None):
            yield from _layers(layer)
        else:
            # Names are counted up by Keras and differ from process to process.
            config = {k: v for k, v in layer.get_config().items() if k != "name"}
            yield [type(layer).__name__, config]


def _variables(model: Any) -> Iterator[tf.Variable]:
    """Variables of the signatures; only some SavedModels list all of theirs."""
    for name in sorted(model.signatures):
        yield from model.signatures[name].variables


def _operations(model: Any) -> Iterator[list]:
    """Kinds of the operations of each signature."""
    for name in sorted(model.signatures):
        graph = model.signatures[name].graph.as_graph_def()
        nodes = [node.op for node in graph.node]
        for function in graph.library.function:
            nodes += [node.op for node in function.node_def]
        yield [name, sorted(nodes)]


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Writes values as JSON, with their checksum."""
    content = json.dumps(manifest)
    write_file(path, json.dumps({"sha256": digest(content.encode()), "json": content}))


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads what `write_manifest` wrote, or raises a ValueError that names the file."""
    try:
        written = json.loads(path.read_text("utf-8"))
        if digest(written["json"].encode()) == written["sha256"]:
            return json.loads(written["json"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    refuse_damaged(path.parent, [f"{path.name} is changed"])


def refuse_damaged(path: Path, reasons: list[str]) -> None:
    """Raises, with what is wrong in a folder."""
    raise ValueError(
        f"`path` must be undamaged. Received: {path}, where {'; '.join(reasons)}\n"
        "Make it again, or copy it again from where it is whole"
    )
