"""Training and evaluation batches as tf.data, and embeddings."""

from keras_ccp.images import (
    conventional_augmentation,
    decode_center_crop,
    decode_image,
    mlrc_augmentation,
    orientation,
    small_image_augmentation,
)
from keras_ccp.pipeline.batches import balanced_batches, balanced_indices
from keras_ccp.pipeline.evaluation import EvaluationData, embed

__all__ = [
    "EvaluationData",
    "balanced_batches",
    "balanced_indices",
    "conventional_augmentation",
    "decode_center_crop",
    "decode_image",
    "embed",
    "mlrc_augmentation",
    "orientation",
    "small_image_augmentation",
]
