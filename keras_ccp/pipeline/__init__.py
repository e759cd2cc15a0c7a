"""Training and evaluation batches as tf.data."""

from keras_ccp.pipeline.augmentation import small_image_augmentation
from keras_ccp.pipeline.balanced import balanced_batches
from keras_ccp.pipeline.balanced_indices import balanced_indices
from keras_ccp.pipeline.decoding import decode_center_crop, decode_image
from keras_ccp.pipeline.evaluation import EvaluationData
from keras_ccp.pipeline.image_augmentation import (
    conventional_augmentation,
    mlrc_augmentation,
)

__all__ = [
    "EvaluationData",
    "balanced_batches",
    "balanced_indices",
    "conventional_augmentation",
    "decode_center_crop",
    "decode_image",
    "mlrc_augmentation",
    "small_image_augmentation",
]
