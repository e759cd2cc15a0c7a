"""Labelled image sets and their class-disjoint splits."""

from keras_ccp.datasets.dataset import Dataset
from keras_ccp.datasets.emoji_data import emoji
from keras_ccp.datasets.labels import check_ids, check_labels, map_labels
from keras_ccp.datasets.splits import split_class_ids

__all__ = [
    "Dataset",
    "check_ids",
    "check_labels",
    "emoji",
    "map_labels",
    "split_class_ids",
]
