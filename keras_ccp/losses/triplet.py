"""Triplet loss over all triplets."""

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.losses.mining import mine_pairs
from keras_ccp.losses.pair_loss import PairLoss
from keras_ccp.losses.pairs import class_masks, mean_over_terms, pairwise_distances


@keras.saving.register_keras_serializable(package="keras_ccp")
class TripletLoss(PairLoss):
    """Triplet loss over triplets of an anchor, a positive and a negative.

    With `d` the L2 distance (not squared):

    `loss = mean of (d_ap - d_an + margin) over the triplets where it is above 0`

    The triplets are counted over all replicas; the loss is 0 if there are none. Against
    references the anchor is the sample, its positives and negatives are references.
    Vectors are taken as they come: normalise them before.

    Source: "FaceNet: A Unified Embedding for Face Recognition and Clustering" (Schroff
    et al., CVPR 2015, https://arxiv.org/abs/1503.03832), here without the square.

    ```python
    loss = keras_ccp.losses.TripletLoss(margin=0.5)
    loss.pairs([0], [[0.0]], [0, 1, 1], [[1.0], [1.25], [2.0]])  # 1 - 1.25 + .5 = .25
    ```

    Args:
        margin: Number, at least 0. How much farther a negative should be than a
            positive. Defaults to `0.1`.
        mining: Which triplets count: `None` for all; `"semi_hard"` for those with
            `d_ap < d_an < d_ap + margin`; `"hard"`, `"easy_positive"` or
            `"distance_weighted"` for those of the mined pairs. Defaults to `None`.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        margin: float = 0.1,
        mining: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "triplet_loss",
    ):
        check_number("margin", margin, minimum=0)
        super().__init__(_triplet, reduction, name, margin=margin, mining=mining)


def _triplet(labels, x, reference_labels, r, exclude_self, margin, mining):
    # A triplet that costs something adds `d_ap + margin` and subtracts `d_an`. So the
    # sum over all of them is a weighted sum of distances, where a distance weighs as
    # many triplets as it takes part in. The weights are counts, constant for the
    # gradient, and no tensor is larger than `(batch, n)`.
    masks = class_masks(labels, reference_labels, exclude_self)
    distances = pairwise_distances(x, r)
    is_semi_hard = mining == "semi_hard"
    if not is_semi_hard:  # a matter of the triplet here, of the anchor in `mine_pairs`
        masks = mine_pairs(mining, distances, *masks, x, r)
    pos_counts, neg_counts = _count_triplets(
        tf.stop_gradient(distances), *masks, margin, is_semi_hard
    )
    sums = tf.reduce_sum(pos_counts * (distances + margin) - neg_counts * distances, 1)
    return mean_over_terms(sums, tf.reduce_sum(pos_counts, axis=1))


def _count_triplets(distances, pos_mask, neg_mask, margin, is_semi_hard):
    """`(batch, n)` numbers of active triplets of each positive and each negative."""
    # Each round compares one positive of every row with all its negatives; there are as
    # many rounds as a row has positives, which are few.
    turns = tf.cumsum(tf.cast(pos_mask, tf.int32), axis=1) * tf.cast(pos_mask, tf.int32)
    infinity = tf.cast(float("inf"), distances.dtype)

    def count_one_positive(turn, pos_counts, neg_counts):
        # A row that is through with its positives is left with -inf: nothing counts.
        is_turn = tf.equal(turns, turn)
        positive = tf.where(is_turn, distances, -infinity)
        positive = tf.reduce_max(positive, axis=1, keepdims=True)
        active = neg_mask & (distances < positive + margin)
        if is_semi_hard:
            active &= distances > positive
        active = tf.cast(active, distances.dtype)
        counts = tf.reduce_sum(active, axis=1, keepdims=True)
        pos_counts += counts * tf.cast(is_turn, distances.dtype)
        return turn + 1, pos_counts, neg_counts + active

    zeros = tf.zeros_like(distances)
    _, pos_counts, neg_counts = tf.while_loop(
        lambda turn, *_: turn <= tf.reduce_max(turns),
        count_one_positive,
        (1, zeros, zeros),
    )
    return tf.stop_gradient(pos_counts), tf.stop_gradient(neg_counts)
