"""What `keras-ccp index`, `search`, `embed` and `check` do: from a run to a search."""

from keras_ccp.app.search.commands import embed_images, index_images
from keras_ccp.app.search.page import write_page
from keras_ccp.app.search.results import (
    Neighbour,
    SearchResult,
    results_table,
    to_json,
)
from keras_ccp.app.search.searcher import Searcher

__all__ = [
    "Neighbour",
    "SearchResult",
    "Searcher",
    "embed_images",
    "index_images",
    "results_table",
    "to_json",
    "write_page",
]
