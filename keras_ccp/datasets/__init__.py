"""Labelled image sets and their class-disjoint splits."""

from keras_ccp.datasets.cars196_data import cars196
from keras_ccp.datasets.cub200_data import cub200
from keras_ccp.datasets.dataset import Dataset
from keras_ccp.datasets.emoji_data import emoji
from keras_ccp.datasets.folder_data import image_folder
from keras_ccp.datasets.in_shop_data import in_shop
from keras_ccp.datasets.labels import check_ids, check_labels, map_labels
from keras_ccp.datasets.npz_data import npz
from keras_ccp.datasets.omniglot_data import omniglot
from keras_ccp.datasets.sop_data import sop
from keras_ccp.datasets.splits import ablation_split, mlrc_folds, split_class_ids
from keras_ccp.datasets.table_data import table
from keras_ccp.datasets.verification import verify

__all__ = [
    "Dataset",
    "ablation_split",
    "cars196",
    "check_ids",
    "check_labels",
    "cub200",
    "emoji",
    "image_folder",
    "in_shop",
    "map_labels",
    "mlrc_folds",
    "npz",
    "omniglot",
    "sop",
    "split_class_ids",
    "table",
    "verify",
]
