"""Exact nearest-neighbour search and the retrieval metrics that rest on it."""

from keras_ccp.retrieval.exact_search import search
from keras_ccp.retrieval.metrics import covering_radius, evaluate

__all__ = ["covering_radius", "evaluate", "search"]
