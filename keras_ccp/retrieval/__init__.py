"""Exact nearest-neighbour search and the retrieval metrics that rest on it."""

from keras_ccp.retrieval.exact_search import ExactSearch, search
from keras_ccp.retrieval.metrics import covering_radius, evaluate, score_queries

__all__ = ["ExactSearch", "covering_radius", "evaluate", "score_queries", "search"]
