"""Losses of tensorflow-similarity as pair losses."""

import importlib
import inspect
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

from keras_ccp.losses.pair_loss import PairLoss


def from_similarity(loss: keras.losses.Loss) -> PairLoss:
    """Makes a pair loss of a loss of tensorflow-similarity (0.17.1).

    Args:
        loss: `MultiSimilarityLoss`, `TripletLoss`, `CircleLoss`, `PNLoss` or
            `SoftNearestNeighborLoss`, made with `reduction="sum_over_batch_size"`:
            Keras 3 refuses that library's default.

    Returns:
        `SimilarityLoss`, with the values that the library's own function gives.

    Raises:
        ImportError: If tensorflow-similarity is not installed.
        TypeError: If `loss` is none of these.
    """
    return SimilarityLoss(loss)


@keras.saving.register_keras_serializable(package="keras_ccp")
class SimilarityLoss(PairLoss):
    """A loss of tensorflow-similarity, for pairs with references of any kind.

    The library's losses call a function of queries and keys with the batch on both
    sides; here the keys are the references. The function is the library's own, and
    so is what an anchor without a positive or a negative costs. In one thing it is
    better off: `SoftNearestNeighborLoss` of far points or of one sample is finite.
    The cosine distance expects embeddings of length 1.

    Time and memory grow with the number of references. For `PNLoss`, which also needs
    the distances among the references, and `SoftNearestNeighborLoss`, which is
    written for square matrices, they grow with its square.

    Args:
        loss: The library's loss; see `from_similarity`. Its `reduction` is not used.
        reduction: How Keras reduces the rows. Defaults to their mean.
        name: Name of the loss. Defaults to that of `loss`.

    Raises:
        ImportError: If tensorflow-similarity is not installed.
        TypeError: If `loss` is not a loss of that library with queries and keys.
    """

    def __init__(
        self,
        loss: keras.losses.Loss,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
    ):
        _check_loss(loss, _import_losses())
        super().__init__(reduction=reduction, name=name or loss.name)
        self.loss = loss
        # Keras 3 does not pass a loss through AutoGraph, which these rely on: they
        # branch on tensors with a Python `if`.
        self._function = tf.autograph.to_graph(loss.fn)

    def pairs(
        self,
        labels: tf.Tensor,
        embeddings: tf.Tensor,
        reference_labels: tf.Tensor,
        reference_embeddings: tf.Tensor,
        exclude_self: bool = False,
    ) -> tf.Tensor:
        rows = _ROWS.get(self.loss.fn.__name__, _rows)(
            self._function,
            {**self.loss._fn_kwargs, "remove_diagonal": exclude_self},
            _as_side(labels, embeddings),
            _as_side(reference_labels, reference_embeddings),
        )
        return tf.reshape(rows, [-1])

    def get_config(self) -> dict[str, Any]:
        loss = _describe(self.loss)
        loss["config"]["distance"] = _describe(self.loss.distance)
        return {**super().get_config(), "loss": loss}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SimilarityLoss":
        _import_losses()  # registers the classes
        distance = _revive(config["loss"]["config"]["distance"])
        return cls(**{**config, "loss": _revive(config["loss"], distance=distance)})


# ==== Which rows and columns the function sees ====


def _as_side(labels, embeddings):
    """`(n, 1)` int32 labels and float32 embeddings.

    The functions accept labels of rank 1 as well, but reshape them in a branch whose
    two ends then differ in rank, which XLA does not compile.
    """
    labels = tf.cast(tf.reshape(labels, [-1, 1]), tf.int32)
    return labels, tf.cast(embeddings, tf.float32)


def _rows(function, arguments, queries, keys):
    return function(*queries, *keys, **arguments)


def _pn_rows(function, arguments, queries, keys):
    """Rows of `pn_loss`, which also needs the distance of positive and negative.

    It looks it up in its own matrix, where it takes row `i` for key `i`. So the keys
    have to be the first queries.
    """
    count = tf.shape(queries[0])[0]
    if arguments["remove_diagonal"]:  # the batch begins the keys
        keys_first, rows = (queries, [key[count:] for key in keys]), slice(count)
    else:
        keys_first, rows = (keys, queries), slice(tf.shape(keys[0])[0], None)
    labels, embeddings = (
        tf.concat(parts, axis=0) for parts in zip(*keys_first, strict=True)
    )
    return function(labels, embeddings, *keys, **arguments)[rows]


def _soft_nn_rows(function, arguments, queries, keys):
    """Rows of `soft_nn_loss`, which divides sums over a square without its diagonal.

    Unless the diagonal holds the pairs to leave out, as many keys as queries are put
    in front, and it lies in there; queries without a meaning complete the square.
    The quotient does not change with a constant added to the distances of a row.
    Measured from the nearest key, they do not all underflow to 0 / 0.
    """
    distances = nearest = arguments["distance"](queries[1], keys[1])
    # exp(-80) is above 0 in float32, and lost in a sum with exp(0).
    far = 80.0 * arguments["temperature"]
    before = tf.shape(distances)[0]
    if arguments["remove_diagonal"]:
        nearest = tf.linalg.set_diag(nearest, tf.fill([before], float("inf")))
        before = 0
    nearest = tf.stop_gradient(tf.reduce_min(nearest, axis=1, keepdims=True))
    distances -= tf.where(tf.math.is_finite(nearest), nearest, 0.0)
    size = before + tf.shape(distances)[1] + 1
    count = tf.shape(distances)[0]
    padding = [[0, size - count], [before, 1]]
    square = tf.pad(distances, padding, constant_values=far)
    arguments = {**arguments, "distance": lambda *_: square}
    labels = tf.pad(queries[0], [[0, size - count], [0, 0]], constant_values=-1)
    key_labels = tf.pad(keys[0], [[before, 1], [0, 0]], constant_values=-1)
    return function(labels, queries[1], key_labels, keys[1], **arguments)[:count]


_ROWS = {"pn_loss": _pn_rows, "soft_nn_loss": _soft_nn_rows}


# ==== The library and its objects ====


def _import_losses() -> ModuleType:
    try:
        return importlib.import_module("tensorflow_similarity.losses")
    except ModuleNotFoundError as error:
        raise ImportError(
            "Losses of tensorflow-similarity need that package: "
            f'pip install -e ".[similarity]". No module named {error.name!r}'
        ) from error


def _check_loss(loss: Any, library: ModuleType) -> None:
    is_metric_loss = isinstance(loss, library.MetricLoss)
    if not is_metric_loss or not {"key_embeddings", "remove_diagonal"} <= set(
        inspect.signature(loss.fn).parameters
    ):
        raise TypeError(
            "`loss` must be a MultiSimilarityLoss, TripletLoss, CircleLoss, PNLoss or "
            "SoftNearestNeighborLoss of tensorflow_similarity.losses, made with "
            f'reduction="sum_over_batch_size". Received: loss={loss!r}'
        )


def _describe(target):
    """What it takes to make an object of the library again.

    Its distances have no `from_config`, so Keras would not read them back.
    """
    name = keras.saving.get_registered_name(type(target))
    return {"registered_name": name, "config": target.get_config()}


def _revive(description, **replacements):
    cls = keras.saving.get_registered_object(description["registered_name"])
    return cls(**{**description["config"], **replacements})
