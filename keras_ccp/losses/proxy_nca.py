"""ProxyNCA++ loss."""

from typing import Any

import keras
import tensorflow as tf

from keras_ccp.losses.pair_loss import (
    PairLoss,
    check_positive,
    check_similarity,
)
from keras_ccp.losses.pairwise import (
    class_masks,
    log_one_plus_sum_exp,
    pairwise_similarities,
)


def proxy_nca_loss(
    labels: tf.Tensor,
    embeddings: tf.Tensor,
    reference_labels: tf.Tensor,
    reference_embeddings: tf.Tensor,
    temperature: float = 0.1,
    similarity: str = "cosine",
    exclude_self: bool = False,
) -> tf.Tensor:
    """ProxyNCA++ loss; see `ProxyNCALoss`.

    Args:
        labels: `(batch,)` int32 tensor.
        embeddings: `(batch, dim)` float tensor.
        reference_labels: `(n,)` int32 tensor.
        reference_embeddings: `(n, dim)` float tensor.
        temperature: What the squared distances are divided by.
        similarity: `"cosine"` or `"dot"`.
        exclude_self: Whether to drop pair `(i, i)`.

    Returns:
        `(batch,)` tensor; its mean over the batch is the loss.
    """
    pos_mask, neg_mask = class_masks(labels, reference_labels, exclude_self)
    similarities = pairwise_similarities(embeddings, reference_embeddings, similarity)
    # ||x - p||^2 = 2 - 2 x.p for unit vectors; the softmax does not see the 2.
    logits = similarities * (2.0 / temperature)
    # -log(P / (P + N)) = log(1 + N / P)
    own = _log_sum_exp(logits, pos_mask)
    rows = log_one_plus_sum_exp(logits - own[:, tf.newaxis], neg_mask)
    return tf.where(tf.reduce_any(pos_mask, axis=1), rows, tf.zeros_like(rows))


def _log_sum_exp(exponents, mask):
    """`log(sum of exp)` over the masked entries of each row; 0 for none."""
    some = tf.reduce_any(mask, axis=1)
    masked = tf.where(mask, exponents, tf.cast(-float("inf"), exponents.dtype))
    largest = tf.stop_gradient(tf.reduce_max(masked, axis=1))
    largest = tf.where(some, largest, tf.zeros_like(largest))
    shifted = tf.reduce_sum(tf.exp(masked - largest[:, tf.newaxis]), axis=1)
    # Without entries the sum is 0, where the logarithm has no gradient.
    return largest + tf.math.log(tf.where(some, shifted, tf.ones_like(shifted)))


@keras.saving.register_keras_serializable(package="keras_ccp")
class ProxyNCALoss(PairLoss):
    """ProxyNCA++ loss: the probability of the own class among all proxies.

    With `d` the L2 distance of the unit vectors of a sample and a proxy (a reference):

    `r_i = -log(sum over positives of exp(-d^2 / temperature)
    / sum over all of exp(-d^2 / temperature))`

    As `d^2 = 2 - 2 s` with the cosine similarity `s`, this is a softmax over
    `2 s / temperature`: other code that divides the cosine by its temperature agrees
    at half of this one. A sample without a positive has the row 0.

    Source: "ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component
    Analysis" (Teh et al., ECCV 2020, https://arxiv.org/abs/2004.01113), which has one
    proxy a class and a temperature of 1/9.

    Args:
        temperature: Number above 0 that divides squared distances. Defaults to `0.1`.
        similarity: `"cosine"` normalises for itself; `"dot"` takes the vectors as they
            come, with `-2 x.p` in place of `d^2`: the same on unit vectors. Defaults
            to `"cosine"`.
        reduction: How Keras reduces the rows. Defaults to their mean.
        name: Name of the loss. Defaults to `"proxy_nca_loss"`.

    Raises:
        TypeError: If `temperature` is not a number.
        ValueError: If it is out of range or `similarity` is unknown.
    """

    def __init__(
        self,
        temperature: float = 0.1,
        similarity: str = "cosine",
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "proxy_nca_loss",
    ):
        super().__init__(reduction=reduction, name=name)
        check_positive("temperature", temperature)
        check_similarity(similarity)
        self.temperature = temperature
        self.similarity = similarity

    def pairs(
        self,
        labels: tf.Tensor,
        embeddings: tf.Tensor,
        reference_labels: tf.Tensor,
        reference_embeddings: tf.Tensor,
        exclude_self: bool = False,
    ) -> tf.Tensor:
        return proxy_nca_loss(
            labels,
            embeddings,
            reference_labels,
            reference_embeddings,
            temperature=self.temperature,
            similarity=self.similarity,
            exclude_self=exclude_self,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "temperature": self.temperature,
            "similarity": self.similarity,
        }
