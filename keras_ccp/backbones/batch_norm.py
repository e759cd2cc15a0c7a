"""Batch norm whose statistics stay what they are while its scale is trained."""

import keras

from keras_ccp.layers import FrozenBatchNormalization


def freeze_batch_norm(model: keras.Model) -> keras.Model:
    """Copies a model with the statistics of its batch norms frozen.

    The copy has the same layer names, weights and outputs at inference. Fine-tuning
    with small or class-balanced batches, whose statistics are not those of the images
    to come, is the reason to do so; the paper's runs do.

    Args:
        model: Built Functional or Sequential model.

    Returns:
        `keras.Model` with a `FrozenBatchNormalization` for each batch norm.
    """

    def clone(layer):
        kind = type(layer)
        if kind is keras.layers.BatchNormalization:
            kind = FrozenBatchNormalization
        return kind.from_config(layer.get_config())

    frozen = keras.models.clone_model(model, clone_function=clone)
    frozen.set_weights(model.get_weights())
    return frozen
