"""The frozen copy of the embedder, and the term that keeps the embedder near it."""

import keras
import tensorflow as tf


class Snapshot(keras.layers.Layer):
    """Frozen copy of a model's trainable weights, where the last problem converged.

    All weights that can be trained are covered, also those of layers that are frozen
    for a while; statistics such as those of batch normalisation are not.

    Args:
        model: built `keras.Model`.
        proximal_weight: float, lambda.
        **kwargs: `name` and the other arguments of a Keras layer.
    """

    def __init__(self, model: keras.Model, proximal_weight: float, **kwargs):
        super().__init__(dtype="float32", trainable=False, **kwargs)
        self.proximal_weight = proximal_weight
        weights = _trainable_by_nature(model)
        self.frozen_weights = [
            self.add_weight(shape=weight.shape, initializer="zeros", trainable=False)
            for weight in weights
        ]
        # A variable, since a Python number would be baked into the traced step.
        self.active_weight = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="active_weight"
        )
        # In a function, since Keras would count variables in an attribute as this
        # layer's own and save them twice.
        self._model_weights = lambda: weights
        self.built = True

    def take(self) -> None:
        """Copies the weights and switches lambda on."""
        for weight, frozen in self._pairs():
            # Of hundreds of weights, the checks of Keras' `assign` take most of it.
            value = tf.cast(weight.value, frozen.dtype)
            frozen.value.assign(value, read_value=False)
        self.active_weight.assign(self.proximal_weight)

    def drop(self) -> None:
        """Switches lambda off, as before the first snapshot."""
        self.active_weight.assign(0.0)

    def proximal_loss(self) -> tf.Tensor:
        """Scalar (lambda / 2) * sum ||weight - frozen||^2, 0 while lambda is off."""
        if not self.proximal_weight or not self.frozen_weights:
            return tf.zeros(())
        half_squares = [
            tf.nn.l2_loss(weight - frozen) for weight, frozen in self._pairs()
        ]
        return self.active_weight * tf.add_n(half_squares)

    def _pairs(self):
        return zip(self._model_weights(), self.frozen_weights, strict=True)


def _trainable_by_nature(model: keras.Model) -> list[keras.Variable]:
    """The model's `trainable_weights` as if no layer were frozen.

    Keras has no public name for it: `trainable_weights` follows the layers' current
    `trainable`, and a copy that did would not load again after a layer was unfrozen.
    """
    by_nature = {
        id(weight)
        for layer in model._flatten_layers()
        for weight in layer._trainable_variables
    }
    return [weight for weight in model.weights if id(weight) in by_nature]
