"""Training and evaluation batches as tf.data."""

from keras_ccp.pipeline.augmentation import small_image_augmentation
from keras_ccp.pipeline.balanced import balanced_batches, balanced_indices
from keras_ccp.pipeline.evaluation import EvaluationData

__all__ = [
    "EvaluationData",
    "balanced_batches",
    "balanced_indices",
    "small_image_augmentation",
]
