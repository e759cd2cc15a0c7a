"""Proxy Anchor loss."""

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.distribute import gather_batch
from keras_ccp.losses.pair_loss import PairLoss, check_positive
from keras_ccp.losses.pairs import (
    class_masks,
    log_one_plus_sum_exp,
    pairwise_similarities,
)


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

    ```python
    loss = keras_ccp.losses.ProxyAnchorLoss()
    loss.pairs([0], [[1.0, 0.0]], [0, 1], [[1.0, 0.0], [0.0, 1.0]])  # log(1 + e^3.2)
    ```

    Args:
        margin: Number. Positives less similar than this and negatives more similar
            than its opposite weigh most. Defaults to `0.1`.
        alpha: Number above 0, scale of the similarities. Defaults to `32.0`.
        similarity: `"cosine"` (default), or `"dot"` for vectors as they come.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        margin: float = 0.1,
        alpha: float = 32.0,
        similarity: str = "cosine",
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "proxy_anchor_loss",
    ):
        check_number("margin", margin)
        check_positive(alpha=alpha)
        arguments = {"margin": margin, "alpha": alpha, "similarity": similarity}
        super().__init__(_proxy_anchor, reduction, name, **arguments)


def _proxy_anchor(
    labels, x, reference_labels, r, exclude_self, margin, alpha, similarity
):
    # The logarithm of a proxy is over the samples of all replicas: a part of the batch
    # is not a part of the loss. Their gradient flows back to where they came from.
    all_labels, all_embeddings = gather_batch(labels), gather_batch(x)
    s = tf.transpose(pairwise_similarities(all_embeddings, r, similarity))
    masks = class_masks(all_labels, reference_labels, exclude_self)
    positive, negative = map(tf.transpose, masks)
    pull = _mean_of_proxies(alpha * (margin - s), positive)
    push = _mean_of_proxies(alpha * (margin + s), negative)
    return tf.fill(tf.shape(labels), pull + push)


def _mean_of_proxies(exponents, mask):
    """Mean of `log(1 + sum of exp)` over the rows that the mask has entries in."""
    takes_part = tf.reduce_any(mask, axis=1)
    count = tf.reduce_sum(tf.cast(takes_part, exponents.dtype))
    total = tf.reduce_sum(log_one_plus_sum_exp(exponents, mask))
    return total / tf.maximum(count, 1.0)
