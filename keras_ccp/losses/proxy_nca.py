"""ProxyNCA++ loss."""

import keras
import tensorflow as tf

from keras_ccp.losses.pair_loss import PairLoss, check_positive
from keras_ccp.losses.pairs import (
    class_masks,
    log_one_plus_sum_exp,
    log_sum_exp,
    pairwise_similarities,
)


@keras.saving.register_keras_serializable(package="keras_ccp")
class ProxyNCALoss(PairLoss):
    """ProxyNCA++ loss: the probability of the own class among all proxies.

    With `d` the distance of a unit sample and a unit proxy (a reference):

    `r_i = -log(sum over positives of exp(-d^2 / temperature)
    / sum over all of exp(-d^2 / temperature))`

    As `d^2 = 2 - 2 s` with the cosine similarity `s`, this is a softmax over
    `2 s / temperature`: other code that divides the cosine by its temperature agrees
    at half of this one. A sample without a positive has the row 0.

    Source: "ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component
    Analysis" (Teh et al., ECCV 2020, https://arxiv.org/abs/2004.01113), which has one
    proxy a class and a temperature of 1/9.

    ```python
    loss = keras_ccp.losses.ProxyNCALoss()
    loss.pairs([0], [[1.0, 0.0]], [0, 1], [[1.0, 0.0], [1.0, 0.0]])  # log(2)
    ```

    Args:
        temperature: Number above 0 that divides squared distances. Defaults to `0.1`.
        similarity: `"cosine"` (default), or `"dot"` for vectors as they come, with
            `-2 x.p` in place of `d^2`: the same on unit vectors.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        temperature: float = 0.1,
        similarity: str = "cosine",
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "proxy_nca_loss",
    ):
        check_positive(temperature=temperature)
        arguments = {"temperature": temperature, "similarity": similarity}
        super().__init__(_proxy_nca, reduction, name, **arguments)


def _proxy_nca(labels, x, reference_labels, r, exclude_self, temperature, similarity):
    positive, negative = class_masks(labels, reference_labels, exclude_self)
    similarities = pairwise_similarities(x, r, similarity)
    # ||x - p||^2 = 2 - 2 x.p for unit vectors; the softmax does not see the 2.
    logits = similarities * (2.0 / temperature)
    # -log(P / (P + N)) = log(1 + N / P)
    own = log_sum_exp(logits, positive)
    rows = log_one_plus_sum_exp(logits - own[:, tf.newaxis], negative)
    return tf.where(tf.reduce_any(positive, axis=1), rows, tf.zeros_like(rows))
