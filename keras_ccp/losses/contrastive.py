"""Contrastive losses: on distances ("C2") and on similarities ("C1")."""

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.losses.mining import mine_pairs
from keras_ccp.losses.pair_loss import PairLoss
from keras_ccp.losses.pairs import (
    class_masks,
    mean_over_terms,
    pairwise_distances,
    pairwise_similarities,
)

# Positives this near to similarity 1 cost nothing: rounding, not error.
_POSITIVE_SLACK = 1e-5


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

    ```python
    loss = keras_ccp.losses.ContrastiveLoss(negative_margin=1.0)
    loss([0, 0, 1], [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])  # sqrt(2) + 1 = 2.414
    ```

    Args:
        positive_margin: Number, at least 0. Positive pairs nearer than this cost
            nothing. Defaults to `0.0`.
        negative_margin: Number, at least 0. Negative pairs farther than this cost
            nothing. Defaults to `0.5`.
        mining: Which pairs count, one of `mining.MINERS`. Defaults to `None`, all.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        positive_margin: float = 0.0,
        negative_margin: float = 0.5,
        mining: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "contrastive_loss",
    ):
        check_number("positive_margin", positive_margin, minimum=0)
        check_number("negative_margin", negative_margin, minimum=0)
        margins = {
            "positive_margin": positive_margin,
            "negative_margin": negative_margin,
        }
        super().__init__(_contrastive, reduction, name, mining=mining, **margins)

    @property
    def reach(self) -> float:
        # Mining may look at all references, and so may the pairs of a subclass.
        is_own = getattr(self.pairs, "__func__", None) is PairLoss.pairs
        is_all = is_own and self.formula is _contrastive and self.mining is None
        return self.negative_margin if is_all else super().reach


def _contrastive(
    labels,
    x,
    reference_labels,
    r,
    exclude_self,
    positive_margin,
    negative_margin,
    mining,
):
    masks = class_masks(labels, reference_labels, exclude_self)
    distances = pairwise_distances(x, r)
    positive, negative = mine_pairs(mining, distances, *masks, x, r)
    pull = _mean_of_nonzero(tf.nn.relu(distances - positive_margin), positive)
    return pull + _mean_of_nonzero(tf.nn.relu(negative_margin - distances), negative)


def _mean_of_nonzero(terms, mask):
    """Rows of the mean over the masked terms above zero."""
    terms = tf.where(mask, terms, tf.zeros_like(terms))
    # Whole numbers far below 2^24, exact in float32; count_nonzero takes int64.
    counts = tf.reduce_sum(tf.cast(tf.not_equal(terms, 0), terms.dtype), axis=1)
    return mean_over_terms(tf.reduce_sum(terms, axis=1), counts)


@keras.saving.register_keras_serializable(package="keras_ccp")
class CosineContrastiveLoss(PairLoss):
    """Contrastive loss on similarities, as cross-batch memory uses it ("C1").

    With `s` the similarity of a pair:

    `r_i = sum over positives of max(0, 1 - s - 1e-5)
    + sum over negatives of max(0, s - margin)`

    A sum over the references, not a mean: it grows with their number.

    Source: "Cross-Batch Memory for Embedding Learning" (Wang et al., CVPR 2020,
    https://arxiv.org/abs/1912.06798).

    ```python
    loss = keras_ccp.losses.CosineContrastiveLoss()
    loss.pairs([0], [[1.0, 0.0]], [0, 1], [[0.0, 1.0], [1.0, 0.0]])  # 1 + .5 - 1e-5
    ```

    Args:
        margin: Number. Negative pairs less similar than this cost nothing. Defaults to
            `0.5`.
        similarity: `"cosine"` (default) normalises for itself; `"dot"` takes vectors as
            they come: the paper's form, on Lipschitz-normalised ones.
        mining: Which pairs count, one of `mining.MINERS`. Defaults to `None`, all.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        margin: float = 0.5,
        similarity: str = "cosine",
        mining: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "cosine_contrastive_loss",
    ):
        check_number("margin", margin)
        arguments = {"margin": margin, "similarity": similarity, "mining": mining}
        super().__init__(_cosine_contrastive, reduction, name, **arguments)


def _cosine_contrastive(
    labels, x, reference_labels, r, exclude_self, margin, similarity, mining
):
    masks = class_masks(labels, reference_labels, exclude_self)
    s = pairwise_similarities(x, r, similarity)
    positive, negative = mine_pairs(mining, -s, *masks, x, r)
    pull = tf.where(positive, tf.nn.relu(1.0 - _POSITIVE_SLACK - s), tf.zeros_like(s))
    push = tf.where(negative, tf.nn.relu(s - margin), tf.zeros_like(s))
    return tf.reduce_sum(pull + push, axis=1)
