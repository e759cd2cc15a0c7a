"""Models for servers: from the bytes of image files to embeddings and neighbours.

They need TensorFlow, and nothing of this package.
"""

from keras_ccp.serving.export import (
    export_serving,
    export_trained,
    image_size,
    load_embedder,
)
from keras_ccp.serving.golden import check_model, load_checked, read_preparation
from keras_ccp.serving.onnx import export_onnx

__all__ = [
    "check_model",
    "export_onnx",
    "export_serving",
    "export_trained",
    "image_size",
    "load_checked",
    "load_embedder",
    "read_preparation",
]
