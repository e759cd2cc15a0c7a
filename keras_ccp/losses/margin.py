"""Margin loss."""

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.losses.pair_loss import PairLoss
from keras_ccp.losses.pairs import class_masks, mean_over_terms, pairwise_distances


@keras.saving.register_keras_serializable(package="keras_ccp")
class MarginLoss(PairLoss):
    """Margin loss: positives within, negatives beyond a distance, over all triplets.

    With `d` the L2 distance (not squared) and `[.]` the positive part:

    `loss = sum over triplets of ([d_ap - beta + margin] + [beta - d_an + margin])
    / how many of these terms are above 0`

    so positive and negative pairs of an anchor weigh alike. Terms are counted over all
    replicas; the loss is 0 if there are none. `beta` is a number, since a loss owns no
    variables: the original may learn it. Vectors are taken as they come: normalise
    them before.

    Source: "Sampling Matters in Deep Embedding Learning" (Wu et al., ICCV 2017,
    https://arxiv.org/abs/1706.07567). Its sampling of negatives is
    `mining="distance_weighted"` of the other losses, not part of this.

    ```python
    loss = keras_ccp.losses.MarginLoss()
    loss.pairs([0], [[0.0]], [0, 1], [[2.0], [1.0]])  # (1 + 0.4) / 2 = 0.7
    ```

    Args:
        margin: Number, at least 0, to either side of `beta`. Defaults to `0.2`.
        beta: Number, the distance between positives and negatives. Defaults to `1.2`.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        margin: float = 0.2,
        beta: float = 1.2,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "margin_loss",
    ):
        check_number("margin", margin, minimum=0)
        check_number("beta", beta)
        super().__init__(_margin, reduction, name, margin=margin, beta=beta)


def _margin(labels, x, reference_labels, r, exclude_self, margin, beta):
    masks = class_masks(labels, reference_labels, exclude_self)
    distances = pairwise_distances(x, r)
    positive, negative = (tf.cast(mask, distances.dtype) for mask in masks)
    pull = positive * tf.nn.relu(distances - beta + margin)
    push = negative * tf.nn.relu(beta - distances + margin)
    # A pair takes part in as many triplets as its anchor has pairs of the other kind.
    of_positive = tf.reduce_sum(negative, axis=1)
    of_negative = tf.reduce_sum(positive, axis=1)

    def over_triplets(of_positives, of_negatives):
        sums = of_positive * tf.reduce_sum(of_positives, axis=1)
        return sums + of_negative * tf.reduce_sum(of_negatives, axis=1)

    active = (tf.cast(terms > 0, distances.dtype) for terms in (pull, push))
    return mean_over_terms(over_triplets(pull, push), over_triplets(*active))
