"""Training and evaluation batches as tf.data, and embeddings."""

from keras_ccp.pipeline.batches import balanced_batches, balanced_indices
from keras_ccp.pipeline.evaluation import EvaluationData, embed
from keras_ccp.pipeline.images import (
    conventional_augmentation,
    decode_center_crop,
    decode_image,
    mlrc_augmentation,
    orientation,
    small_image_augmentation,
)

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
