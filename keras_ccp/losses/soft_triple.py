"""SoftTriple loss."""

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.layers import l2_normalize
from keras_ccp.losses.pair_loss import PairLoss, check_positive
from keras_ccp.losses.pairs import (
    class_masks,
    log_one_plus_sum_exp,
    pairwise_similarities,
)


@keras.saving.register_keras_serializable(package="keras_ccp")
class SoftTripleLoss(PairLoss):
    """SoftTriple loss: classes of several proxies, drawn together where they can be.

    With `s_ik` the similarity of sample `i` and proxy (reference) `k`, the similarity
    to a class `c` is the softmax-weighted mean over its proxies, and the loss is a
    softmax over classes plus a regulariser that merges proxies of a class:

    `S_ic = sum over k in c of softmax_k(s_ik / gamma) s_ik`

    `r_i = -log(exp(scale (S_iy - margin))
    / (exp(scale (S_iy - margin)) + sum over c != y of exp(scale S_ic)))
    + tau * mean over classes of (sum over pairs of its proxies of ||p - q||)
    / (K (K - 1))`

    with the own class `y` and the number `K` of proxies of a class; one of a single
    proxy has no pairs and counts 0. A sample whose class has no proxy has a row of the
    regulariser alone. Proxies that coincide have distance 0 and gradient 0.

    Source: "SoftTriple Loss: Deep Metric Learning Without Triplet Sampling" (Qian et
    al., ICCV 2019, https://arxiv.org/abs/1909.05235), where `scale` is lambda, `margin`
    delta, and `||p - q||` is written `sqrt(2 - 2 p.q)`.

    ```python
    loss = keras_ccp.losses.SoftTripleLoss(margin=0.0)
    loss.pairs([0], [[1.0, 0.0]], [0, 1], [[1.0, 0.0], [1.0, 0.0]])  # log(2)
    ```

    Args:
        scale: Number above 0, scale of the similarities to classes. Defaults to `20.0`.
        gamma: Number above 0, temperature of the softmax over the proxies of a class.
            Defaults to `0.1`.
        tau: Number, at least 0, weight of the regulariser. Defaults to `0.2`.
        margin: Number. How much more similar the own class should be than the others.
            Defaults to `0.01`.
        similarity: `"cosine"` (default), or `"dot"` for vectors as they come, in the
            regulariser too.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        scale: float = 20.0,
        gamma: float = 0.1,
        tau: float = 0.2,
        margin: float = 0.01,
        similarity: str = "cosine",
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "soft_triple_loss",
    ):
        check_positive(scale=scale, gamma=gamma)
        check_number("tau", tau, minimum=0)
        check_number("margin", margin)
        arguments = {"scale": scale, "gamma": gamma, "tau": tau, "margin": margin}
        super().__init__(
            _soft_triple, reduction, name, similarity=similarity, **arguments
        )


def _soft_triple(
    labels, x, reference_labels, r, exclude_self, scale, gamma, tau, margin, similarity
):
    # A class goes by the place of its first reference once they are sorted by class.
    # So there are `n` numbers for classes, most of them unused, and no shape depends on
    # how many classes there are.
    order = tf.argsort(reference_labels)
    ordered = tf.gather(reference_labels, order)
    classes = tf.searchsorted(ordered, reference_labels)
    mask = tf.logical_or(*class_masks(labels, reference_labels, exclude_self))
    similarities = pairwise_similarities(x, r, similarity)
    to_classes, has_pairs = _class_similarities(similarities, mask, classes, gamma)
    own = tf.equal(labels[:, tf.newaxis], ordered) & has_pairs
    to_own = tf.where(own, to_classes, tf.zeros_like(to_classes))
    to_own = tf.reduce_sum(to_own, axis=1, keepdims=True)
    # -log(e^y / (e^y + sum of e^j)) = log(1 + sum of e^(j - y))
    exponents = scale * (to_classes - to_own + margin)
    rows = log_one_plus_sum_exp(exponents, has_pairs & tf.logical_not(own))
    rows = tf.where(tf.reduce_any(own, axis=1), rows, tf.zeros_like(rows))
    r = tf.cast(r, rows.dtype)
    if similarity == "cosine":
        r = l2_normalize(r)
    return rows + tau * _spread_of_classes(r, order, ordered)


def _class_similarities(similarities, mask, classes, gamma):
    """`(batch, n)` similarities to classes and mask of those with pairs, 0 without."""
    columns, mask = tf.transpose(similarities), tf.transpose(mask)
    zeros, count = tf.zeros_like(columns), tf.size(classes)
    masked = tf.where(mask, columns, tf.cast(-float("inf"), columns.dtype))
    largest = tf.math.unsorted_segment_max(masked, classes, count)
    largest = tf.stop_gradient(tf.gather(largest, classes))
    # Masked on either side of exp: a class that is masked out has largest -inf.
    weights = tf.exp(tf.where(mask, (columns - largest) / gamma, zeros))
    weights = tf.where(mask, weights, zeros)
    totals = tf.math.unsorted_segment_sum(weights, classes, count)
    sums = tf.math.unsorted_segment_sum(weights * columns, classes, count)
    # The nearest reference weighs 1. "not <=", so that NaN stays.
    has_pairs = tf.logical_not(totals <= 0)
    to_classes = sums / tf.where(has_pairs, totals, tf.ones_like(totals))
    return tf.transpose(to_classes), tf.transpose(has_pairs)


def _spread_of_classes(references, order, ordered_labels):
    """Mean over classes of the distances between references, over `K (K - 1)`."""
    # The sum of all distances grows with the references like a distance does with its
    # points, so it is the dot product of the references and its own gradient, the sum
    # of unit vectors between them. That is taken to be a constant, and is 0 between
    # references that coincide. Each round compares every reference with one other of
    # its class: no tensor is larger than `(n, dim)`.
    ordered = tf.stop_gradient(tf.gather(references, order))
    begin = tf.searchsorted(ordered_labels, ordered_labels)
    end = tf.searchsorted(ordered_labels, ordered_labels, side="right")
    rows = tf.range(tf.size(order))

    def pull_apart(step, gradient):
        is_pair = (rows + step < end)[:, tf.newaxis]
        between = ordered - tf.roll(ordered, -step, axis=0)
        between = tf.where(is_pair, between, tf.zeros_like(between))
        unit = tf.math.divide_no_nan(between, tf.norm(between, axis=1, keepdims=True))
        return step + 1, gradient + unit - tf.roll(unit, step, axis=0)

    _, gradient = tf.while_loop(
        lambda step, _: step < tf.reduce_max(end - begin),
        pull_apart,
        (1, tf.zeros_like(ordered)),
    )
    sizes = tf.cast(end - begin, ordered.dtype)
    num_classes = tf.math.count_nonzero(tf.equal(rows, begin), dtype=ordered.dtype)
    pairs = sizes * (sizes - 1.0) * num_classes
    gradient = tf.math.divide_no_nan(gradient, pairs[:, tf.newaxis])
    gradient = tf.stop_gradient(tf.gather(gradient, tf.argsort(order)))
    return tf.reduce_sum(gradient * references)
