"""Contrastive softmax losses: NT-Xent (InfoNCE), N-pairs and SupCon."""

import keras
import tensorflow as tf

from keras_ccp.losses.pair_loss import PairLoss, check_positive
from keras_ccp.losses.pairs import (
    class_masks,
    cross_entropies,
    log_sum_exp,
    mean_over_terms,
    pairwise_similarities,
)


@keras.saving.register_keras_serializable(package="keras_ccp")
class NTXentLoss(PairLoss):
    """NT-Xent ("InfoNCE"): each positive against the negatives of its anchor.

    With `s` the similarity of a pair:

    `loss = mean over positive pairs (i, p) of -log(e_ip / (e_ip + sum over negatives n
    of e_in))`, `e_ij = exp(s_ij / temperature)`

    The pairs are counted over all replicas; the loss is 0 if there are none.

    Source: "A Simple Framework for Contrastive Learning of Visual Representations"
    (Chen et al., ICML 2020, https://arxiv.org/abs/2002.05709), where the class of an
    image is the image; "Representation Learning with Contrastive Predictive Coding"
    (van den Oord et al., 2018, https://arxiv.org/abs/1807.03748).

    ```python
    loss = keras_ccp.losses.NTXentLoss()
    loss.pairs([0], [[1.0, 0.0]], [0, 1], [[1.0, 0.0], [1.0, 0.0]])  # log(2)
    ```

    Args:
        temperature: Number above 0 that divides similarities. Defaults to `0.07`.
        similarity: `"cosine"` (default), or `"dot"` for vectors as they come.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        temperature: float = 0.07,
        similarity: str = "cosine",
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "nt_xent_loss",
    ):
        check_positive(temperature=temperature)
        arguments = {"temperature": temperature, "similarity": similarity}
        super().__init__(_nt_xent, reduction, name, **arguments)


@keras.saving.register_keras_serializable(package="keras_ccp")
class NPairsLoss(PairLoss):
    """N-pairs loss: each positive against the negatives of its anchor.

    With `s` the similarity of a pair:

    `loss = mean over positive pairs (i, p) of
    log(1 + sum over negatives n of exp(s_in - s_ip))`

    It is `NTXentLoss` with a temperature of 1. The original has one anchor and one
    positive of each class, and compares anchors with positives: that is
    `loss.pairs(labels, anchors, labels, positives)`. Inside a batch every sample is an
    anchor here. Its penalty on the length of embeddings is not part of this.

    Source: "Improved Deep Metric Learning with Multi-class N-pair Loss Objective"
    (Sohn, NeurIPS 2016).

    ```python
    loss = keras_ccp.losses.NPairsLoss()
    loss.pairs([0], [[1.0, 0.0]], [0, 1], [[1.0, 0.0], [1.0, 0.0]])  # log(2)
    ```

    Args:
        similarity: `"cosine"` (default), or `"dot"` for vectors as they come.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        similarity: str = "cosine",
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "n_pairs_loss",
    ):
        super().__init__(_nt_xent, reduction, name, similarity=similarity)


@keras.saving.register_keras_serializable(package="keras_ccp")
class SupConLoss(PairLoss):
    """Supervised contrastive loss ("SupCon"): positives among all of the others.

    With `s` the similarity of a pair:

    `r_i = mean over positives p of -log(exp(s_ip / temperature)
    / sum over positives and negatives j of exp(s_ij / temperature))`

    The loss is the mean over the samples that have a positive, on all replicas; 0 if
    there are none.

    Source: "Supervised Contrastive Learning" (Khosla et al., NeurIPS 2020, equation 2,
    https://arxiv.org/abs/2004.11362).

    ```python
    loss = keras_ccp.losses.SupConLoss()
    loss.pairs([0], [[1.0, 0.0]], [0, 0], [[1.0, 0.0], [1.0, 0.0]])  # log(2)
    ```

    Args:
        temperature: Number above 0 that divides similarities. Defaults to `0.1`.
        similarity: `"cosine"` (default), or `"dot"` for vectors as they come.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        temperature: float = 0.1,
        similarity: str = "cosine",
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "sup_con_loss",
    ):
        check_positive(temperature=temperature)
        arguments = {"temperature": temperature, "similarity": similarity}
        super().__init__(_sup_con, reduction, name, **arguments)


def _nt_xent(labels, x, reference_labels, r, exclude_self, similarity, temperature=1.0):
    positive, negative = class_masks(labels, reference_labels, exclude_self)
    logits = pairwise_similarities(x, r, similarity) / temperature
    sums = tf.reduce_sum(cross_entropies(logits, logits, positive, negative), axis=1)
    return mean_over_terms(sums, tf.math.count_nonzero(positive, axis=1))


def _sup_con(labels, x, reference_labels, r, exclude_self, temperature, similarity):
    positive, negative = class_masks(labels, reference_labels, exclude_self)
    logits = pairwise_similarities(x, r, similarity) / temperature
    own = tf.cast(positive, logits.dtype)
    number = tf.reduce_sum(own, axis=1)
    mean = tf.reduce_sum(own * logits, axis=1) / tf.maximum(number, 1.0)
    rows = log_sum_exp(logits, positive | negative) - mean
    rows = tf.where(number > 0, rows, tf.zeros_like(rows))
    return mean_over_terms(rows, number > 0)
