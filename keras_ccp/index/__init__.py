"""A searchable set of embeddings, and whose embeddings they are."""

from keras_ccp.index.fingerprint import fingerprint
from keras_ccp.index.retrieval_index import RetrievalIndex

__all__ = ["RetrievalIndex", "fingerprint"]
