"""Models for servers: from the bytes of image files to embeddings and neighbours.

They need TensorFlow, and nothing of this package.
"""

from keras_ccp.serving.export import export_serving, load_embedder
from keras_ccp.serving.golden import check_model

__all__ = ["check_model", "export_serving", "load_embedder"]
