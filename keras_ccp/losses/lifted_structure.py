"""Lifted structure loss."""

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.distribute import gather_batch
from keras_ccp.losses.pair_loss import PairLoss
from keras_ccp.losses.pairs import (
    class_masks,
    log_sum_exp,
    mean_over_terms,
    pairwise_distances,
)


@keras.saving.register_keras_serializable(package="keras_ccp")
class LiftedStructureLoss(PairLoss):
    """Lifted structure loss: each positive pair against all negatives of both ends.

    With `d` the L2 distance (not squared):

    `loss = mean over positive pairs (i, j) of [J_ij]^2 / 2`,
    `J_ij = log(sum over negatives n of i of exp(negative_margin - d_in)
    + sum over negatives n of j of exp(negative_margin - d_nj)) + d_ij
    - positive_margin`

    with `[.]` the positive part. Against references the negatives of a reference are
    the samples of the batch. Pairs are counted over all replicas; one without
    negatives counts 0. Vectors are taken as they come: normalise them before.

    Source: "Deep Metric Learning via Lifted Structured Feature Embedding" (Song et al.,
    CVPR 2016, equation 4, https://arxiv.org/abs/1511.06452).

    ```python
    loss = keras_ccp.losses.LiftedStructureLoss()
    loss([0, 0, 1], [[0.0], [1.0], [2.0]])  # (log(e^-1 + e^0) + 1)^2 / 2 = 0.8624
    ```

    Args:
        positive_margin: Number, the distance that positives may have. Defaults
            to `0.0`.
        negative_margin: Number, the distance that negatives should have. Defaults
            to `1.0`.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        positive_margin: float = 0.0,
        negative_margin: float = 1.0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "lifted_structure_loss",
    ):
        check_number("positive_margin", positive_margin)
        check_number("negative_margin", negative_margin)
        margins = {
            "positive_margin": positive_margin,
            "negative_margin": negative_margin,
        }
        super().__init__(_lifted_structure, reduction, name, **margins)


def _lifted_structure(
    labels, x, reference_labels, r, exclude_self, positive_margin, negative_margin
):
    positive, negative = class_masks(labels, reference_labels, exclude_self)
    distances = pairwise_distances(x, r)
    of_sample = log_sum_exp(negative_margin - distances, negative)
    # The negatives of a reference are on all replicas.
    _, negative_of = class_masks(reference_labels, gather_batch(labels))
    to_batch = pairwise_distances(tf.cast(r, x.dtype), gather_batch(x))
    of_reference = log_sum_exp(negative_margin - to_batch, negative_of)
    # A positive pair is of one class: either both ends have negatives, or none does.
    counts = positive & tf.reduce_any(negative, axis=1, keepdims=True)
    counts &= tf.reduce_any(negative_of, axis=1)
    difference = of_reference - of_sample[:, tf.newaxis]
    both = of_sample[:, tf.newaxis] + tf.math.softplus(difference)
    terms = tf.square(tf.nn.relu(both + distances - positive_margin)) / 2.0
    sums = tf.reduce_sum(tf.where(counts, terms, tf.zeros_like(terms)), axis=1)
    return mean_over_terms(sums, tf.math.count_nonzero(positive, axis=1))
