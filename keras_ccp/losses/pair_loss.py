"""The contract of every loss over pairs."""

from typing import Any

import keras
import tensorflow as tf

from keras_ccp.arguments import check_number
from keras_ccp.distribute import gather_batch


@keras.saving.register_keras_serializable(package="keras_ccp")
class PairLoss(keras.losses.Loss):
    """A loss over pairs of a batch and references of any kind.

    One object serves pairs inside a batch (`call`, so it works in any
    `keras.Model.compile`), a batch against proxies, against a memory, or against
    freshly embedded samples (`pairs`). A subclass implements `pairs`.

    The loss computes in float32 whatever the dtype policy is: Keras casts labels to
    the dtype of the loss, and float16 would turn class 11317 into 11320. It owns no
    variables, because Keras does not track variables inside a loss.

    Args:
        reduction: How Keras reduces the rows. Defaults to `"sum_over_batch_size"`,
            their mean.
        name: Name of the loss. Defaults to the class name in snake case.
    """

    def __init__(
        self, reduction: str | None = "sum_over_batch_size", name: str | None = None
    ):
        super().__init__(name=name, reduction=reduction, dtype="float32")

    @property
    def ignores_length(self) -> bool:
        """Whether only the directions of the vectors have an effect."""
        return getattr(self, "similarity", None) == "cosine"

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Loss of the pairs inside one batch, without pairs of a sample with itself.

        The batch is the global one: each replica pairs the samples it holds with those
        of all replicas, whose gradient flows back to where they came from. Only this
        method decides what the batch is paired with.

        Args:
            y_true: `(batch,)` or `(batch, 1)` tensor of class labels.
            y_pred: `(batch, dim)` float tensor of embeddings.

        Returns:
            `(batch,)` tensor; its mean is the loss.
        """
        references = gather_batch(y_true), gather_batch(y_pred)
        return self.pairs(y_true, y_pred, *references, exclude_self=True)

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
            labels: `(batch,)` int32 tensor.
            embeddings: `(batch, dim)` float tensor.
            reference_labels: `(n,)` int32 tensor.
            reference_embeddings: `(n, dim)` float tensor.
            exclude_self: Whether to drop pair `(i, i)`, for references that are the
                batch itself.

        Returns:
            `(batch,)` float32 tensor (float64 for float64 embeddings); its mean over
            the batch is the loss.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement `pairs(labels, embeddings, "
            "reference_labels, reference_embeddings, exclude_self)`."
        )


def check_positive(name: str, value: Any) -> None:
    """Checks a constructor argument that scales or divides.

    Args:
        name: Name of the argument.
        value: Its value.

    Raises:
        TypeError: If `value` is not a real number.
        ValueError: If `value` is not finite or not above 0.
    """
    check_number(name, value)
    if value <= 0:
        raise ValueError(f"`{name}` must be above 0. Received: {name}={value!r}")


def check_similarity(similarity: Any) -> None:
    """Checks the name of a similarity.

    Args:
        similarity: The `similarity` argument of a loss.

    Raises:
        ValueError: If it is neither `"cosine"` nor `"dot"`.
    """
    if similarity not in ("cosine", "dot"):
        raise ValueError(
            '`similarity` must be "cosine" or "dot". '
            f"Received: similarity={similarity!r}"
        )


def check_rows(loss: PairLoss, embedding_dim: int) -> None:
    """Checks that a loss gives one value an anchor.

    `pairs` is traced, not run, so a loss that keeps a memory is not touched.

    Args:
        loss: Object with the `pairs` method of `PairLoss`.
        embedding_dim: Width of an embedding.

    Raises:
        ValueError: If `loss.pairs` gives another shape than `(batch,)`.
    """
    labels = tf.TensorSpec([2], "int32")
    embeddings = tf.TensorSpec([2, embedding_dim], "float32")
    rows = (
        tf.function(loss.pairs)
        .get_concrete_function(labels, embeddings, labels, embeddings)
        .structured_outputs
    )
    if rows.shape.rank != 1:
        raise ValueError(
            "`loss.pairs` must give one value an anchor, shape (batch,): a scalar is "
            f"scaled wrongly on several replicas. Received: shape {rows.shape} "
            f"from {type(loss).__name__}"
        )
