"""Labelled image sets and their class-disjoint splits."""

from keras_ccp.datasets.benchmarks import cars196, cub200, emoji, in_shop, omniglot, sop
from keras_ccp.datasets.dataset import Dataset, check_ids, map_labels
from keras_ccp.datasets.readers import (
    Listing,
    image_folder,
    list_images,
    npz,
    table,
    verify,
)
from keras_ccp.datasets.splits import ablation_split, mlrc_folds, split_class_ids

__all__ = [
    "Dataset",
    "Listing",
    "ablation_split",
    "cars196",
    "check_ids",
    "cub200",
    "emoji",
    "image_folder",
    "in_shop",
    "list_images",
    "map_labels",
    "mlrc_folds",
    "npz",
    "omniglot",
    "sop",
    "split_class_ids",
    "table",
    "verify",
]
