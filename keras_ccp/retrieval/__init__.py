"""Exact nearest-neighbour search and the retrieval metrics that rest on it."""

from keras_ccp.retrieval.calibration import Calibration, calibrate
from keras_ccp.retrieval.doubtful_labels import DoubtfulLabel, doubtful_labels
from keras_ccp.retrieval.exact_search import ExactSearch, search
from keras_ccp.retrieval.metrics import covering_radius, evaluate, score_queries
from keras_ccp.retrieval.statistics import compare, interval, ties

__all__ = [
    "Calibration",
    "DoubtfulLabel",
    "ExactSearch",
    "calibrate",
    "compare",
    "covering_radius",
    "doubtful_labels",
    "evaluate",
    "interval",
    "score_queries",
    "search",
    "ties",
]
