"""Multi-similarity loss ("MS")."""

from typing import Any

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.losses.mining import check_mining, mine_pairs
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


def multi_similarity_loss(
    labels: tf.Tensor,
    embeddings: tf.Tensor,
    reference_labels: tf.Tensor,
    reference_embeddings: tf.Tensor,
    alpha: float = 2.0,
    beta: float = 40.0,
    base: float = 0.5,
    similarity: str = "cosine",
    mining: str | None = None,
    exclude_self: bool = False,
) -> tf.Tensor:
    """Multi-similarity loss; see `MultiSimilarityLoss`.

    Args:
        labels: `(batch,)` int32 tensor.
        embeddings: `(batch, dim)` float tensor.
        reference_labels: `(n,)` int32 tensor.
        reference_embeddings: `(n, dim)` float tensor.
        alpha: Scale of the positives.
        beta: Scale of the negatives.
        base: Similarity at which both sides weigh the same.
        similarity: `"cosine"` or `"dot"`.
        mining: Which pairs count, `None` for all; see `MultiSimilarityLoss`.
        exclude_self: Whether to drop pair `(i, i)`.

    Returns:
        `(batch,)` tensor; its mean over the batch is the loss.
    """
    pos_mask, neg_mask = class_masks(labels, reference_labels, exclude_self)
    similarities = pairwise_similarities(embeddings, reference_embeddings, similarity)
    pos_mask, neg_mask = mine_pairs(
        mining, -similarities, pos_mask, neg_mask, embeddings, reference_embeddings
    )
    pos_part = log_one_plus_sum_exp(alpha * (base - similarities), pos_mask)
    neg_part = log_one_plus_sum_exp(beta * (similarities - base), neg_mask)
    return pos_part / alpha + neg_part / beta


@keras.saving.register_keras_serializable(package="keras_ccp")
class MultiSimilarityLoss(PairLoss):
    """Multi-similarity loss ("MS"), over all pairs unless mined.

    With `s` the similarity of a pair:

    `r_i = log(1 + sum over positives of exp(-alpha (s - base))) / alpha
    + log(1 + sum over negatives of exp(beta (s - base))) / beta`

    Source: "Multi-Similarity Loss with General Pair Weighting for Deep Metric
    Learning" (Wang et al., CVPR 2019, equation 16, https://arxiv.org/abs/1904.06627),
    where `base` is lambda. Its pair mining is not part of this.

    Args:
        alpha: Number above 0, scale of the positives. Defaults to `2.0`.
        beta: Number above 0, scale of the negatives. Defaults to `40.0`.
        base: Number, the similarity between both sides. Defaults to `0.5`.
        similarity: `"cosine"` normalises for itself; `"dot"` takes the vectors as they
            come, which is the paper's form on Lipschitz-normalised vectors. Defaults to
            `"cosine"`.
        mining: Which pairs count: `None` for all, or `"hard"`, `"semi_hard"`,
            `"easy_positive"` or `"distance_weighted"`, the functions of
            `keras_ccp.losses.mining`. Defaults to `None`.
        reduction: How Keras reduces the rows. Defaults to their mean.
        name: Name of the loss. Defaults to `"multi_similarity_loss"`.

    Raises:
        TypeError: If `alpha`, `beta` or `base` is not a number.
        ValueError: If one of them is out of range, or `similarity` or `mining` is
            unknown.
    """

    def __init__(
        self,
        alpha: float = 2.0,
        beta: float = 40.0,
        base: float = 0.5,
        similarity: str = "cosine",
        mining: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "multi_similarity_loss",
    ):
        super().__init__(reduction=reduction, name=name)
        check_positive("alpha", alpha)
        check_positive("beta", beta)
        check_number("base", base)
        check_similarity(similarity)
        check_mining(mining)
        self.alpha = alpha
        self.beta = beta
        self.base = base
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
        return multi_similarity_loss(
            labels,
            embeddings,
            reference_labels,
            reference_embeddings,
            alpha=self.alpha,
            beta=self.beta,
            base=self.base,
            similarity=self.similarity,
            mining=self.mining,
            exclude_self=exclude_self,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "alpha": self.alpha,
            "beta": self.beta,
            "base": self.base,
            "similarity": self.similarity,
            "mining": self.mining,
        }
