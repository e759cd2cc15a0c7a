"""Contrastive loss on similarities ("C1")."""

from typing import Any

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.losses.mining import check_mining, mine_pairs
from keras_ccp.losses.pair_loss import PairLoss, check_similarity
from keras_ccp.losses.pairwise import class_masks, pairwise_similarities

# Positives this near to similarity 1 cost nothing: rounding, not error.
_POSITIVE_SLACK = 1e-5


def cosine_contrastive_loss(
    labels: tf.Tensor,
    embeddings: tf.Tensor,
    reference_labels: tf.Tensor,
    reference_embeddings: tf.Tensor,
    margin: float = 0.5,
    similarity: str = "cosine",
    mining: str | None = None,
    exclude_self: bool = False,
) -> tf.Tensor:
    """Contrastive loss on similarities; see `CosineContrastiveLoss`.

    Args:
        labels: `(batch,)` int32 tensor.
        embeddings: `(batch, dim)` float tensor.
        reference_labels: `(n,)` int32 tensor.
        reference_embeddings: `(n, dim)` float tensor.
        margin: Similarity below which a negative pair costs nothing.
        similarity: `"cosine"` or `"dot"`.
        mining: Which pairs count, `None` for all; see `CosineContrastiveLoss`.
        exclude_self: Whether to drop pair `(i, i)`.

    Returns:
        `(batch,)` tensor; its mean over the batch is the loss.
    """
    pos_mask, neg_mask = class_masks(labels, reference_labels, exclude_self)
    similarities = pairwise_similarities(embeddings, reference_embeddings, similarity)
    pos_mask, neg_mask = mine_pairs(
        mining, -similarities, pos_mask, neg_mask, embeddings, reference_embeddings
    )
    pos_terms = tf.nn.relu(1.0 - _POSITIVE_SLACK - similarities)
    neg_terms = tf.nn.relu(similarities - margin)
    zeros = tf.zeros_like(similarities)
    terms = tf.where(pos_mask, pos_terms, tf.where(neg_mask, neg_terms, zeros))
    return tf.reduce_sum(terms, axis=1)


@keras.saving.register_keras_serializable(package="keras_ccp")
class CosineContrastiveLoss(PairLoss):
    """Contrastive loss on similarities, as cross-batch memory uses it ("C1").

    With `s` the similarity of a pair:

    `r_i = sum over positives of max(0, 1 - s - 1e-5)
    + sum over negatives of max(0, s - margin)`

    A sum over the references, not a mean: it grows with their number.

    Source: "Cross-Batch Memory for Embedding Learning" (Wang et al., CVPR 2020,
    https://arxiv.org/abs/1912.06798).

    Args:
        margin: Number. Negative pairs less similar than this cost nothing. Defaults to
            `0.5`.
        similarity: `"cosine"` normalises for itself; `"dot"` takes the vectors as they
            come, which is the paper's form on Lipschitz-normalised vectors. Defaults to
            `"cosine"`.
        mining: Which pairs count: `None` for all, or `"hard"`, `"semi_hard"`,
            `"easy_positive"` or `"distance_weighted"`, the functions of
            `keras_ccp.losses.mining`. Defaults to `None`.
        reduction: How Keras reduces the rows. Defaults to their mean.
        name: Name of the loss. Defaults to `"cosine_contrastive_loss"`.

    Raises:
        TypeError: If `margin` is not a number.
        ValueError: If `margin` is not finite, or `similarity` or `mining` is unknown.
    """

    def __init__(
        self,
        margin: float = 0.5,
        similarity: str = "cosine",
        mining: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "cosine_contrastive_loss",
    ):
        super().__init__(reduction=reduction, name=name)
        check_number("margin", margin)
        check_similarity(similarity)
        check_mining(mining)
        self.margin = margin
        self.similarity = similarity
        self.mining = mining

    def pairs(
        self,
        labels: tf.Tensor,
        embeddings: tf.Tensor,
        reference_labels: tf.Tensor,
        reference_embeddings: tf.Tensor,
        exclude_self: bool = False,
    ) -> tf.Tensor:
        return cosine_contrastive_loss(
            labels,
            embeddings,
            reference_labels,
            reference_embeddings,
            margin=self.margin,
            similarity=self.similarity,
            mining=self.mining,
            exclude_self=exclude_self,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "margin": self.margin,
            "similarity": self.similarity,
            "mining": self.mining,
        }
