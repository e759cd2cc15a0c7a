"""The contract of every loss over pairs."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.distribute import gather_batch
from keras_ccp.losses.pair_shapes import check_sides, check_widths

# What Keras calls the mean; the weights that the last one divides by are refused.
_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@keras.saving.register_keras_serializable(package="keras_ccp")
class PairLoss(keras.losses.Loss):
    """A loss over pairs of a batch and references of any kind.

    One object serves pairs inside a batch (`call`, so it works in any
    `keras.Model.compile`), a batch against proxies, against a memory, or against
    freshly embedded samples (`pairs`). A subclass implements `pairs`. Shapes that are
    known and do not fit together are refused before it is called.

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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "pairs" in vars(cls):
            cls.pairs = _checked(cls.pairs)

    def __call__(self, y_true, y_pred, sample_weight=None):
        # Keras would first make float32 tensors of them.
        check_sides("labels", y_true, "embeddings", y_pred)
        return super().__call__(y_true, y_pred, sample_weight)

    @property
    def ignores_length(self) -> bool:
        """Whether only the directions of the vectors have an effect."""
        return getattr(self, "similarity", None) == "cosine"

    @property
    def reach(self) -> float:
        """Distance beyond which references of other classes have no effect."""
        return math.inf

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
    """Checks that a loss gives one value an anchor, the mean of which is the loss.

    `pairs` is traced, not run, so a loss that keeps a memory is not touched.

    Args:
        loss: Object with the `pairs` method of `PairLoss`.
        embedding_dim: Width of an embedding.

    Raises:
        TypeError: If `loss.pairs` takes other arguments.
        ValueError: If `loss.pairs` gives another shape than `(batch,)`, or another
            reduction than the mean is asked for.
    """
    check_mean(loss)
    check_signature("loss.pairs", loss.pairs)
    labels = tf.TensorSpec([2], "int32")
    embeddings = tf.TensorSpec([2, embedding_dim], "float32")
    # Another number than that of anchors, to tell their values from those of columns.
    reference_labels = tf.TensorSpec([3], "int32")
    references = tf.TensorSpec([3, embedding_dim], "float32")
    rows = (
        tf.function(loss.pairs)
        .get_concrete_function(labels, embeddings, reference_labels, references)
        .structured_outputs
    )
    shape = rows.shape if tf.is_tensor(rows) else None
    if shape is None or shape.rank != 1 or shape[0] not in (2, None):
        received = f"{rows!r:.100}" if shape is None else f"shape {shape}"
        raise ValueError(
            "`loss.pairs` must give one value an anchor, shape (batch,): a scalar is "
            f"scaled wrongly on several replicas. Received: {received} for 2 anchors "
            f"and 3 references from {type(loss).__name__}"
        )


def check_mean(loss: PairLoss) -> None:
    """Checks that a loss does not ask for another reduction than the mean.

    Args:
        loss: Object with the `pairs` method of `PairLoss`.

    Raises:
        ValueError: If its `reduction` is not the mean.
    """
    reduction = getattr(loss, "reduction", _MEANS[0])
    if reduction not in _MEANS:
        raise ValueError(
            f'`reduction` must be "{_MEANS[0]}", the mean over the anchors, which is '
            "what is minimised here; for another scale change the learning rate. "
            f"Received: reduction={reduction!r} of {type(loss).__name__}"
        )


def check_signature(name: str, function: Callable) -> None:
    """Checks that a function takes the arguments of `PairLoss.pairs`.

    Args:
        name: Name of the argument.
        function: The function.

    Raises:
        TypeError: If it takes others.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(None, None, None, None, exclude_self=False)
    except TypeError as error:
        raise TypeError(
            f"`{name}` must take the arguments of PairLoss.pairs: (labels, embeddings, "
            "reference_labels, reference_embeddings, exclude_self=False). "
            f"Received: a function of {signature}: {error}"
        ) from error


def _checked(pairs: Callable) -> Callable:
    """A method `pairs` that looks at the shapes of its arguments first."""

    @functools.wraps(pairs)
    def checked(
        self,
        labels,
        embeddings,
        reference_labels,
        reference_embeddings,
        *args,
        **kwargs,
    ):
        sides = "embeddings", embeddings, "reference_embeddings", reference_embeddings
        check_sides("labels", labels, *sides[:2])
        check_sides("reference_labels", reference_labels, *sides[2:])
        check_widths(*sides)
        return pairs(
            self,
            labels,
            embeddings,
            reference_labels,
            reference_embeddings,
            *args,
            **kwargs,
        )

    return checked
