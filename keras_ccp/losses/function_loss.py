"""A function of pairs as a pair loss."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_ccp.losses.pair_loss import PairLoss, check_signature


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
        TypeError: If `function` cannot be called, or takes other arguments.
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
        check_signature("function", function)
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
        _warn_unless_registered(self.function)
        function = keras.saving.serialize_keras_object(self.function)
        return {**super().get_config(), "function": function}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FunctionLoss":
        function = keras.saving.deserialize_keras_object(config["function"])
        return cls(**{**config, "function": function})


def _warn_unless_registered(function: Callable[..., tf.Tensor]) -> None:
    """Says what loading will want. No error: it would cost trained weights."""
    registered = keras.saving.get_registered_name(function)
    if keras.saving.get_registered_object(registered) is function:
        return
    name = getattr(function, "__name__", type(function).__name__)
    warnings.warn(
        f"the loss function {name!r} is not registered, so a model that is saved with "
        "it loads only with compile=False or custom_objects: put "
        "@keras.saving.register_keras_serializable() in front of its `def`, or make "
        "it a registered subclass of keras_ccp.losses.PairLoss",
        stacklevel=3,
    )
