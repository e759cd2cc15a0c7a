"""Contrastive loss on distances ("C2")."""

from typing import Any

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.losses.mining import check_mining, mine_pairs
from keras_ccp.losses.pair_loss import PairLoss
from keras_ccp.losses.pairwise import (
    class_masks,
    mean_over_terms,
    pairwise_distances,
)


def contrastive_loss(
    labels: tf.Tensor,
    embeddings: tf.Tensor,
    reference_labels: tf.Tensor,
    reference_embeddings: tf.Tensor,
    positive_margin: float = 0.0,
    negative_margin: float = 0.5,
    mining: str | None = None,
    exclude_self: bool = False,
) -> tf.Tensor:
    """Contrastive loss with a margin on either side; see `ContrastiveLoss`.

    Args:
        labels: `(batch,)` int32 tensor.
        embeddings: `(batch, dim)` float tensor.
        reference_labels: `(n,)` int32 tensor.
        reference_embeddings: `(n, dim)` float tensor.
        positive_margin: Distance below which a positive pair costs nothing.
        negative_margin: Distance above which a negative pair costs nothing.
        mining: Which pairs count, `None` for all; see `ContrastiveLoss`.
        exclude_self: Whether to drop pair `(i, i)`.

    Returns:
        `(batch,)` tensor; its mean over the batch is the loss.
    """
    pos_mask, neg_mask = class_masks(labels, reference_labels, exclude_self)
    distances = pairwise_distances(embeddings, reference_embeddings)
    pos_mask, neg_mask = mine_pairs(
        mining, distances, pos_mask, neg_mask, embeddings, reference_embeddings
    )
    pos_terms = tf.nn.relu(distances - positive_margin)
    neg_terms = tf.nn.relu(negative_margin - distances)
    return _mean_of_nonzero(pos_terms, pos_mask) + _mean_of_nonzero(neg_terms, neg_mask)


def _mean_of_nonzero(terms, mask):
    """Rows of the mean over the masked terms above zero."""
    terms = tf.where(mask, terms, tf.zeros_like(terms))
    # Whole numbers far below 2^24, exact in float32; count_nonzero takes int64.
    counts = tf.reduce_sum(tf.cast(tf.not_equal(terms, 0), terms.dtype), axis=1)
    return mean_over_terms(tf.reduce_sum(terms, axis=1), counts)


@keras.saving.register_keras_serializable(package="keras_ccp")
class ContrastiveLoss(PairLoss):
    """Contrastive loss with a margin on either side ("C2").

    With `d` the L2 distance (not squared) of a pair:

    `loss = mean over positives with d > positive_margin of (d - positive_margin)
    + mean over negatives with d < negative_margin of (negative_margin - d)`

    Each mean is over its own non-zero terms, counted over all replicas, and 0 if there
    are none. Vectors are taken as they come: normalise them before.

    Sources: "Dimensionality Reduction by Learning an Invariant Mapping" (Hadsell et
    al., CVPR 2006, https://doi.org/10.1109/CVPR.2006.100); with two margins in "Deep
    Metric Learning with Chance Constraints" (https://arxiv.org/abs/2209.09060).

    Args:
        positive_margin: Number, at least 0. Positive pairs nearer than this cost
            nothing. Defaults to `0.0`.
        negative_margin: Number, at least 0. Negative pairs farther than this cost
            nothing. Defaults to `0.5`.
        mining: Which pairs count: `None` for all, or `"hard"`, `"semi_hard"`,
            `"easy_positive"` or `"distance_weighted"`, the functions of
            `keras_ccp.losses.mining`. Defaults to `None`.
        reduction: How Keras reduces the rows. Defaults to their mean.
        name: Name of the loss. Defaults to `"contrastive_loss"`.

    Raises:
        TypeError: If a margin is not a number.
        ValueError: If a margin is negative or not finite, or `mining` is unknown.
    """

    def __init__(
        self,
        positive_margin: float = 0.0,
        negative_margin: float = 0.5,
        mining: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "contrastive_loss",
    ):
        super().__init__(reduction=reduction, name=name)
        check_number("positive_margin", positive_margin, minimum=0)
        check_number("negative_margin", negative_margin, minimum=0)
        check_mining(mining)
        self.positive_margin = positive_margin
        self.negative_margin = negative_margin
        self.mining = mining

    @property
    def reach(self) -> float:
        # Mining may look at all references, and so may the pairs of a subclass.
        is_own = getattr(self.pairs, "__func__", None) is ContrastiveLoss.pairs
        return self.negative_margin if is_own and self.mining is None else super().reach

    def pairs(
        self,
        labels: tf.Tensor,
        embeddings: tf.Tensor,
        reference_labels: tf.Tensor,
        reference_embeddings: tf.Tensor,
        exclude_self: bool = False,
    ) -> tf.Tensor:
        return contrastive_loss(
            labels,
            embeddings,
            reference_labels,
            reference_embeddings,
            positive_margin=self.positive_margin,
            negative_margin=self.negative_margin,
            mining=self.mining,
            exclude_self=exclude_self,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "positive_margin": self.positive_margin,
            "negative_margin": self.negative_margin,
            "mining": self.mining,
        }
