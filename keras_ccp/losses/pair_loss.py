"""The contract of every loss over pairs."""

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.distribute import gather_batch
from keras_ccp.losses.mining import MINERS

# Arguments that mean the same in every loss.
_CHOICES = {"similarity": ("cosine", "dot"), "mining": (None, *MINERS)}


@keras.saving.register_keras_serializable(package="keras_ccp")
class PairLoss(keras.losses.Loss):
    """A loss over pairs of a batch and references of any kind.

    One object serves pairs inside a batch (`call`, so it works in any
    `keras.Model.compile`), a batch against proxies, against a memory, or against
    freshly embedded samples (`pairs`). It computes in float32 or better whatever the
    dtype policy is, labels stay integers, and it owns no variables, because Keras does
    not track variables inside a loss.

    A subclass is a formula and its arguments, which become attributes and the config:

    ```python
    class CircleLoss(keras_ccp.losses.PairLoss):
        def __init__(self, gamma=32.0, **kwargs):
            super().__init__(circle_loss, gamma=gamma, **kwargs)
    ```

    Args:
        formula: `formula(labels, embeddings, reference_labels, reference_embeddings,
            exclude_self, **arguments)` -> `(batch,)`. `None` for a subclass that
            overrides `pairs`.
        reduction: How Keras reduces the rows. Defaults to `"sum_over_batch_size"`,
            their mean.
        name: Name of the loss. Defaults to the class name in snake case.
        **arguments: Arguments of the formula.

    Raises:
        ValueError: If `arguments` have a `similarity` or `mining` that there is not.
    """

    def __init__(
        self,
        formula: Callable[..., tf.Tensor] | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        **arguments: Any,
    ):
        super().__init__(name=name, reduction=reduction, dtype="float32")
        for argument, choices in _CHOICES.items():
            value = arguments.get(argument, choices[0])
            if value not in choices:
                raise ValueError(
                    f"`{argument}` must be one of {choices}. "
                    f"Received: {argument}={value!r}"
                )
        self.formula = formula
        self._arguments = tuple(arguments)
        vars(self).update(arguments)

    @property
    def ignores_length(self) -> bool:
        """Whether only the directions of the vectors have an effect."""
        return getattr(self, "similarity", None) == "cosine"

    @property
    def reach(self) -> float:
        """Distance beyond which references of other classes have no effect."""
        return math.inf

    def __call__(self, y_true, y_pred, sample_weight=None):
        # Keras' own would make float32 of the labels, which has no 2^24 + 1.
        rows = self.call(y_true, y_pred)
        reduce = _Rows(name=self.name, reduction=self.reduction, dtype=self.dtype)
        return reduce(rows, rows, sample_weight)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Loss of the pairs inside one batch, without pairs of a sample with itself.

        The batch is the global one: each replica pairs the samples it holds with those
        of all replicas, whose gradient flows back to where they came from.

        Args:
            y_true: `(batch,)` or `(batch, 1)` class labels.
            y_pred: `(batch, dim)` float tensor of embeddings.

        Returns:
            `(batch,)` tensor; its mean is the loss.
        """
        labels, embeddings = as_side("y_true", y_true, y_pred)
        references = gather_batch(labels), gather_batch(embeddings)
        return as_rows(self.pairs(labels, embeddings, *references, True), labels)

    def pairs(
        self,
        labels: tf.Tensor,
        embeddings: tf.Tensor,
        reference_labels: tf.Tensor,
        reference_embeddings: tf.Tensor,
        exclude_self: bool = False,
    ) -> tf.Tensor:
        """Loss of a batch against references.

        Args:
            labels: `(batch,)` or `(batch, 1)` whole numbers; the formula gets int64.
            embeddings: `(batch, dim)` float tensor.
            reference_labels: `(n,)` or `(n, 1)` whole numbers.
            reference_embeddings: `(n, dim)` float tensor.
            exclude_self: Whether to drop pair `(i, i)`, for references that are the
                batch itself.

        Returns:
            `(batch,)` float32 tensor (float64 for float64 embeddings); its mean over
            the batch is the loss.

        Raises:
            ValueError: If a side has not one label a row, or the formula gives other
                than one value a sample.
        """
        labels, embeddings = as_side("labels", labels, embeddings)
        references = as_side("reference_labels", reference_labels, reference_embeddings)
        arguments = {name: getattr(self, name) for name in self._arguments}
        rows = self.formula(
            labels, embeddings, *references, exclude_self=exclude_self, **arguments
        )
        return as_rows(rows, labels)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in self._arguments:
            config[name] = keras.saving.serialize_keras_object(getattr(self, name))
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PairLoss":
        read = keras.saving.deserialize_keras_object
        return cls(**{name: read(value) for name, value in config.items()})


@keras.saving.register_keras_serializable(package="keras_ccp")
class FunctionLoss(PairLoss):
    """Pair loss made of a function with the arguments of `PairLoss.pairs`.

    ```python
    loss = keras_ccp.losses.FunctionLoss(my_loss, temperature=0.1)
    ```

    Args:
        function: `function(labels, embeddings, reference_labels,
            reference_embeddings, exclude_self=False, **arguments)` -> `(batch,)`. For a
            saved model to find it again it must be registered:
            `@keras.saving.register_keras_serializable()`.
        reduction: How Keras reduces the rows. Defaults to their mean.
        name: Name of the loss. Defaults to that of the function.
        **arguments: Further arguments of the function, saved with the loss.
    """

    def __init__(
        self,
        function: Callable[..., tf.Tensor],
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        **arguments: Any,
    ):
        name = name or getattr(function, "__name__", None)
        super().__init__(_call, reduction, name, function=function, **arguments)


def _call(labels, x, reference_labels, r, exclude_self, function, **arguments):
    sides = labels, x, reference_labels, r
    return function(*sides, exclude_self=exclude_self, **arguments)


class _Rows(keras.losses.Loss):
    """Keras' reduction of rows that are there already."""

    def call(self, y_true, y_pred):
        return y_pred


def as_side(
    name: str, labels: tf.Tensor, embeddings: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """`(n,)` int64 labels and `(n, dim)` embeddings in float32 or better."""
    labels, embeddings = map(tf.convert_to_tensor, (labels, embeddings))
    if (
        not (labels.shape.rank == 1 or labels.shape[1:].is_compatible_with([1]))
        or embeddings.shape.rank not in (2, None)
        or not labels.shape[:1].is_compatible_with(embeddings.shape[:1])
    ):
        raise ValueError(
            f"`{name}` must hold one label for each row of embeddings (n, dim). "
            f"Received: shapes {labels.shape} and {embeddings.shape}\n"
            "Turn one-hot rows into labels with tf.argmax(labels, axis=1)"
        )
    dtype = tf.float64 if embeddings.dtype == tf.float64 else tf.float32
    # Every label of any type, which TensorFlow compares on the GPU, unlike int32.
    labels = tf.reshape(tf.cast(labels, tf.int64), [-1])
    return labels, tf.cast(embeddings, dtype)


def as_rows(rows: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """What a loss gives, if it is one value a sample."""
    rows = tf.convert_to_tensor(rows)
    if rows.shape.rank == 0 or not rows.shape.is_compatible_with(labels.shape):
        raise ValueError(
            "`pairs` of a loss must give one value a sample, shape (batch,). Received: "
            f"shape {rows.shape} for labels of shape {labels.shape}\nReduce over the "
            "references only: Keras scales a scalar wrongly on several replicas"
        )
    return rows


def check_positive(**numbers: Any) -> None:
    """Refuses what does not scale: it would turn the loss around."""
    for name, value in numbers.items():
        check_number(name, value)
        if value <= 0:
            raise ValueError(f"`{name}` must be above 0. Received: {name}={value!r}")
