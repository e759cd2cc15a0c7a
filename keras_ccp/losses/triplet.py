"""Triplet loss over all triplets."""

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


def triplet_loss(
    labels: tf.Tensor,
    embeddings: tf.Tensor,
    reference_labels: tf.Tensor,
    reference_embeddings: tf.Tensor,
    margin: float = 0.1,
    mining: str | None = None,
    exclude_self: bool = False,
) -> tf.Tensor:
    """Triplet loss over all triplets, or mined ones; see `TripletLoss`.

    A triplet that costs something adds `d_ap + margin` and subtracts `d_an`. So the
    sum over all of them is a weighted sum of distances, where a distance weighs as
    many triplets as it takes part in. The weights are counts, constant for the
    gradient, and no tensor is larger than `(batch, n)`.

    Args:
        labels: `(batch,)` int32 tensor.
        embeddings: `(batch, dim)` float tensor.
        reference_labels: `(n,)` int32 tensor.
        reference_embeddings: `(n, dim)` float tensor.
        margin: How much farther a negative should be than a positive.
        mining: Which triplets count, `None` for all; see `TripletLoss`.
        exclude_self: Whether to drop pair `(i, i)`.

    Returns:
        `(batch,)` tensor; its mean over the batch is the loss.
    """
    pos_mask, neg_mask = class_masks(labels, reference_labels, exclude_self)
    distances = pairwise_distances(embeddings, reference_embeddings)
    infinity = tf.cast(float("inf"), distances.dtype)
    # Semi-hard is a matter of the triplet here, of the anchor in `mine_pairs`.
    floors = tf.stop_gradient(distances) if mining == "semi_hard" else None
    if floors is None:
        pos_mask, neg_mask = mine_pairs(
            mining, distances, pos_mask, neg_mask, embeddings, reference_embeddings
        )
    limits = distances + margin
    pos_counts, neg_counts = _count_triplets(
        *_class_runs(labels, reference_labels),
        floors,
        tf.stop_gradient(tf.where(pos_mask, limits, -infinity)),
        tf.stop_gradient(tf.where(neg_mask, distances, infinity)),
    )
    sums = tf.reduce_sum(pos_counts * limits - neg_counts * distances, axis=1)
    return mean_over_terms(sums, tf.reduce_sum(pos_counts, axis=1))


def _class_runs(labels, reference_labels):
    """Sorts the references by class, so that a class is one run of them.

    Returns:
        `(n,)` int32 order of the references, and for every label the `(batch,)` int32
        positions in that order where its class begins and ends (exclusive).
    """
    labels = tf.cast(tf.reshape(labels, [-1]), tf.int64)
    reference_labels = tf.cast(tf.reshape(reference_labels, [-1]), tf.int64)
    order = tf.argsort(reference_labels)
    ordered = tf.gather(reference_labels, order)
    begin = tf.searchsorted(ordered, labels, side="left")
    end = tf.searchsorted(ordered, labels, side="right")
    return order, begin, end


def _count_triplets(order, begin, end, floors, limits, neg_distances):
    """Counts for every distance the triplets with `floor < d_an < d_ap + margin`.

    Each round compares one positive of every row with all its negatives; there are as
    many rounds as the largest class has references, which are few.

    Args:
        order: `(n,)` references sorted by class.
        begin: `(batch,)` where a row's class begins in `order`.
        end: `(batch,)` where it ends.
        floors: `(batch, n)`, at positives what `d_an` must be above, or `None`.
        limits: `(batch, n)`, `d_ap + margin` at positives, -inf elsewhere.
        neg_distances: `(batch, n)`, `d_an` at negatives, inf elsewhere.

    Returns:
        `(batch, n)` counts at the positives and at the negatives, 0 elsewhere.
    """
    rows = tf.range(tf.size(begin))
    last = tf.size(order) - 1
    infinity = tf.cast(float("inf"), limits.dtype)

    def is_left(step, *_):
        return step < tf.reduce_max(end - begin)

    def count_one_positive(step, pos_counts, neg_counts):
        columns = tf.gather(order, tf.minimum(begin + step, last))
        index = tf.stack([rows, columns], axis=1)
        # A row that is through with its class has no limit left: nothing counts.
        limit = tf.where(begin + step < end, tf.gather_nd(limits, index), -infinity)
        active = neg_distances < limit[:, tf.newaxis]
        if floors is not None:
            floor = tf.gather_nd(floors, index)[:, tf.newaxis]
            active = tf.logical_and(active, neg_distances > floor)
        active = tf.cast(active, limits.dtype)
        counts = tf.reduce_sum(active, axis=1)
        pos_counts = tf.tensor_scatter_nd_add(pos_counts, index, counts)
        return step + 1, pos_counts, neg_counts + active

    zeros = tf.zeros_like(limits)
    _, pos_counts, neg_counts = tf.while_loop(
        is_left, count_one_positive, (0, zeros, zeros)
    )
    return tf.stop_gradient(pos_counts), tf.stop_gradient(neg_counts)


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

    Args:
        margin: Number, at least 0. How much farther a negative should be than a
            positive. Defaults to `0.1`.
        mining: Which triplets count: `None` for all; `"semi_hard"` for those with
            `d_ap < d_an < d_ap + margin`; `"hard"`, `"easy_positive"` or
            `"distance_weighted"` for those of the pairs that the functions of
            `keras_ccp.losses.mining` choose. Defaults to `None`.
        reduction: How Keras reduces the rows. Defaults to their mean.
        name: Name of the loss. Defaults to `"triplet_loss"`.

    Raises:
        TypeError: If `margin` is not a number.
        ValueError: If `margin` is negative or not finite, or `mining` is unknown.
    """

    def __init__(
        self,
        margin: float = 0.1,
        mining: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "triplet_loss",
    ):
        super().__init__(reduction=reduction, name=name)
        check_number("margin", margin, minimum=0)
        check_mining(mining)
        self.margin = margin
        self.mining = mining

    def pairs(
        self,
        labels: tf.Tensor,
        embeddings: tf.Tensor,
        reference_labels: tf.Tensor,
        reference_embeddings: tf.Tensor,
        exclude_self: bool = False,
    ) -> tf.Tensor:
        return triplet_loss(
            labels,
            embeddings,
            reference_labels,
            reference_embeddings,
            margin=self.margin,
            mining=self.mining,
            exclude_self=exclude_self,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "margin": self.margin,
            "mining": self.mining,
        }
