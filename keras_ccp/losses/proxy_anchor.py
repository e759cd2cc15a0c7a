"""Proxy Anchor loss."""

from typing import Any

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.distribute import gather_batch
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


def proxy_anchor_loss(
    labels: tf.Tensor,
    embeddings: tf.Tensor,
    reference_labels: tf.Tensor,
    reference_embeddings: tf.Tensor,
    margin: float = 0.1,
    alpha: float = 32.0,
    similarity: str = "cosine",
    exclude_self: bool = False,
) -> tf.Tensor:
    """Proxy Anchor loss; see `ProxyAnchorLoss`.

    Args:
        labels: `(batch,)` int32 tensor.
        embeddings: `(batch, dim)` float tensor.
        reference_labels: `(n,)` int32 tensor.
        reference_embeddings: `(n, dim)` float tensor.
        margin: How far the similarities of both sides are kept from 0.
        alpha: Scale of the similarities.
        similarity: `"cosine"` or `"dot"`.
        exclude_self: Whether to drop pair `(i, i)`.

    Returns:
        `(batch,)` tensor, the loss in every row; its mean over the batch is the loss.
    """
    labels = tf.reshape(labels, [-1])
    # The logarithm of a proxy is over the samples of all replicas: a part of the batch
    # is not a part of the loss. Their gradient flows back to where they came from.
    all_labels = gather_batch(labels)
    all_embeddings = gather_batch(tf.convert_to_tensor(embeddings))
    similarities = pairwise_similarities(
        all_embeddings, reference_embeddings, similarity
    )
    pos_mask, neg_mask = class_masks(all_labels, reference_labels, exclude_self)
    pos_part = _mean_of_proxies(-alpha * (similarities - margin), pos_mask)
    neg_part = _mean_of_proxies(alpha * (similarities + margin), neg_mask)
    return tf.fill(tf.shape(labels), pos_part + neg_part)


def _mean_of_proxies(exponents, mask):
    """Mean of `log(1 + sum of exp)` over the columns that the mask has entries in."""
    exponents, mask = tf.transpose(exponents), tf.transpose(mask)
    takes_part = tf.reduce_any(mask, axis=1)
    count = tf.reduce_sum(tf.cast(takes_part, exponents.dtype))
    total = tf.reduce_sum(log_one_plus_sum_exp(exponents, mask))
    return total / tf.maximum(count, 1.0)


@keras.saving.register_keras_serializable(package="keras_ccp")
class ProxyAnchorLoss(PairLoss):
    """Proxy Anchor loss: each proxy against the whole batch.

    With `s` the similarity of a sample and a proxy (a reference):

    `loss = mean over proxies with a positive in the batch of
    log(1 + sum over its positives of exp(-alpha (s - margin)))
    + mean over proxies with a negative in the batch of
    log(1 + sum over its negatives of exp(alpha (s + margin)))`

    Each mean is 0 if there are no such proxies. The batch is that of all replicas, and
    every row holds the value of the whole, because it is no sum over samples.

    Source: "Proxy Anchor Loss for Deep Metric Learning" (Kim et al., CVPR 2020,
    https://arxiv.org/abs/2003.13911), where `margin` is delta. There the second
    mean is over all proxies: the same unless the batch has one class only.

    Args:
        margin: Number. Positives less similar than this and negatives more similar
            than its opposite weigh most. Defaults to `0.1`.
        alpha: Number above 0, scale of the similarities. Defaults to `32.0`.
        similarity: `"cosine"` normalises for itself; `"dot"` takes the vectors as they
            come. Defaults to `"cosine"`.
        reduction: How Keras reduces the rows. Defaults to their mean.
        name: Name of the loss. Defaults to `"proxy_anchor_loss"`.

    Raises:
        TypeError: If `margin` or `alpha` is not a number.
        ValueError: If one of them is out of range or `similarity` is unknown.
    """

    def __init__(
        self,
        margin: float = 0.1,
        alpha: float = 32.0,
        similarity: str = "cosine",
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "proxy_anchor_loss",
    ):
        super().__init__(reduction=reduction, name=name)
        check_number("margin", margin)
        check_positive("alpha", alpha)
        check_similarity(similarity)
        self.margin = margin
        self.alpha = alpha
        self.similarity = similarity

    def pairs(
        self,
        labels: tf.Tensor,
        embeddings: tf.Tensor,
        reference_labels: tf.Tensor,
        reference_embeddings: tf.Tensor,
        exclude_self: bool = False,
    ) -> tf.Tensor:
        return proxy_anchor_loss(
            labels,
            embeddings,
            reference_labels,
            reference_embeddings,
            margin=self.margin,
            alpha=self.alpha,
            similarity=self.similarity,
            exclude_self=exclude_self,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "margin": self.margin,
            "alpha": self.alpha,
            "similarity": self.similarity,
        }
