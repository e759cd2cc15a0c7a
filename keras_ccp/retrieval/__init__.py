"""Exact nearest-neighbour search and the retrieval metrics that rest on it."""

from keras_ccp.retrieval.covering_radius import covering_radius
from keras_ccp.retrieval.exact_search import search
from keras_ccp.retrieval.metrics import evaluate, score_queries

__all__ = ["covering_radius", "evaluate", "score_queries", "search"]
