"""Circle loss."""

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.losses.pair_loss import PairLoss, check_positive
from keras_ccp.losses.pairs import (
    class_masks,
    log_sum_exp,
    mean_over_terms,
    pairwise_similarities,
)


@keras.saving.register_keras_serializable(package="keras_ccp")
class CircleLoss(PairLoss):
    """Circle loss: pairs weigh the more, the farther they are from where they belong.

    With `s` the similarity of a pair, `[.]` the positive part, and weights `a` that are
    constant for the gradient:

    `r_i = log(1 + sum over positives of exp(-gamma a_p (s_p - 1 + margin))
    * sum over negatives of exp(gamma a_n (s_n - margin)))`,
    `a_p = [1 + margin - s_p]`, `a_n = [s_n + margin]`

    The loss is the mean over the rows that are not 0, on all replicas. A sample without
    a positive or without a negative has the row 0.

    Source: "Circle Loss: A Unified Perspective of Pair Similarity Optimization" (Sun et
    al., CVPR 2020, equation 6, https://arxiv.org/abs/2002.10857).

    ```python
    loss = keras_ccp.losses.CircleLoss(margin=0.5, gamma=1.0)
    loss.pairs([0], [[1.0, 0.0]], [0, 1], [[1.0, 0.0], [0.0, 1.0]])  # 0.4741
    ```

    Args:
        margin: Number, how far from 1 positives and from 0 negatives may be. Defaults
            to `0.4`.
        gamma: Number above 0, scale of the similarities. Defaults to `80.0`.
        similarity: `"cosine"` (default), or `"dot"` for vectors as they come.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        margin: float = 0.4,
        gamma: float = 80.0,
        similarity: str = "cosine",
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "circle_loss",
    ):
        check_number("margin", margin)
        check_positive(gamma=gamma)
        arguments = {"margin": margin, "gamma": gamma, "similarity": similarity}
        super().__init__(_circle, reduction, name, **arguments)


def _circle(labels, x, reference_labels, r, exclude_self, margin, gamma, similarity):
    positive, negative = class_masks(labels, reference_labels, exclude_self)
    s = pairwise_similarities(x, r, similarity)
    pos_weights = tf.stop_gradient(tf.nn.relu(1.0 + margin - s))
    neg_weights = tf.stop_gradient(tf.nn.relu(s + margin))
    pull = log_sum_exp(-gamma * pos_weights * (s - 1.0 + margin), positive)
    push = log_sum_exp(gamma * neg_weights * (s - margin), negative)
    has_both = tf.reduce_any(positive, axis=1) & tf.reduce_any(negative, axis=1)
    rows = tf.math.softplus(pull + push)
    rows = tf.where(has_both, rows, tf.zeros_like(rows))
    return mean_over_terms(rows, rows > 0)
