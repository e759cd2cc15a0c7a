"""A function of pairs as a pair loss."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_ccp.losses.pair_loss import PairLoss


@keras.saving.register_keras_serializable(package="keras_ccp")
class FunctionLoss(PairLoss):
    """Pair loss made of a function with the signature of `PairLoss.pairs`.

    Args:
        function: `function(labels, embeddings, reference_labels,
            reference_embeddings, exclude_self=False)` -> `(batch,)`. To be saved with
            a model it must be registered:
            `@keras.saving.register_keras_serializable()`.
        reduction: How Keras reduces the rows. Defaults to their mean.
        name: Name of the loss. Defaults to that of the function.

    Raises:
        TypeError: If `function` cannot be called.
    """

    def __init__(
        self,
        function: Callable[..., tf.Tensor],
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
    ):
        if not callable(function):
            raise TypeError(
                "`function` must be a function with the arguments of PairLoss.pairs. "
                f"Received: function={function!r}"
            )
        name = name or getattr(function, "__name__", None)
        super().__init__(reduction=reduction, name=name)
        self.function = function

    def pairs(
        self,
        labels: tf.Tensor,
        embeddings: tf.Tensor,
        reference_labels: tf.Tensor,
        reference_embeddings: tf.Tensor,
        exclude_self: bool = False,
    ) -> tf.Tensor:
        return self.function(
            labels,
            embeddings,
            reference_labels,
            reference_embeddings,
            exclude_self=exclude_self,
        )

    def get_config(self) -> dict[str, Any]:
        function = keras.saving.serialize_keras_object(self.function)
        return {**super().get_config(), "function": function}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FunctionLoss":
        function = keras.saving.deserialize_keras_object(config["function"])
        return cls(**{**config, "function": function})
