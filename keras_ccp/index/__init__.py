"""A searchable set of embeddings, and whose embeddings they are."""

from keras_ccp.index.digests import fingerprint
from keras_ccp.index.retrieval_index import (
    KeptEmbedder,
    RetrievalIndex,
    check_backend,
    check_index_folder,
    has_index,
)

__all__ = [
    "KeptEmbedder",
    "RetrievalIndex",
    "check_backend",
    "check_index_folder",
    "fingerprint",
    "has_index",
]
