"""SoftTriple loss."""

from typing import Any

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.layers import l2_normalize
from keras_ccp.losses.pair_loss import (
    PairLoss,
    check_positive,
    check_similarity,
)
from keras_ccp.losses.pairwise import (
    class_masks,
    log_one_plus_sum_exp,
    pairwise_similarities,
)


def soft_triple_loss(
    labels: tf.Tensor,
    embeddings: tf.Tensor,
    reference_labels: tf.Tensor,
    reference_embeddings: tf.Tensor,
    scale: float = 20.0,
    gamma: float = 0.1,
    tau: float = 0.2,
    margin: float = 0.01,
    similarity: str = "cosine",
    exclude_self: bool = False,
) -> tf.Tensor:
    """SoftTriple loss; see `SoftTripleLoss`.

    A class goes by the position of its first reference once they are sorted by class.
    So there are `n` numbers for classes, most of them unused, and no shape depends on
    how many classes there are.

    Args:
        labels: `(batch,)` int32 tensor.
        embeddings: `(batch, dim)` float tensor.
        reference_labels: `(n,)` int32 tensor.
        reference_embeddings: `(n, dim)` float tensor.
        scale: Scale of the similarities to classes.
        gamma: Temperature of the softmax over the references of a class.
        tau: Weight of the regulariser.
        margin: How much more similar the own class should be than others.
        similarity: `"cosine"` or `"dot"`.
        exclude_self: Whether to drop pair `(i, i)`.

    Returns:
        `(batch,)` tensor; its mean over the batch is the loss.
    """
    similarities = pairwise_similarities(embeddings, reference_embeddings, similarity)
    labels = tf.cast(tf.reshape(labels, [-1]), tf.int64)
    reference_labels = tf.cast(tf.reshape(reference_labels, [-1]), tf.int64)
    order = tf.argsort(reference_labels)
    ordered_labels = tf.gather(reference_labels, order)
    to_classes, has_pairs = _class_similarities(
        similarities,
        tf.logical_or(*class_masks(labels, reference_labels, exclude_self)),
        tf.searchsorted(ordered_labels, reference_labels, side="left"),
        gamma,
    )
    own = _own_class(ordered_labels, labels)
    has_own = tf.reduce_any(tf.logical_and(own, has_pairs), axis=1)
    zeros = tf.zeros_like(to_classes)
    to_own = tf.reduce_sum(tf.where(own, to_classes, zeros), axis=1, keepdims=True)
    # -log(e^y / (e^y + sum of e^j)) = log(1 + sum of e^(j - y))
    others = tf.logical_and(has_pairs, tf.logical_not(own))
    rows = log_one_plus_sum_exp(scale * (to_classes - to_own + margin), others)
    rows = tf.where(has_own, rows, tf.zeros_like(rows))
    references = tf.cast(reference_embeddings, similarities.dtype)
    if similarity == "cosine":
        references = l2_normalize(references)
    return rows + tau * _spread_of_classes(references, order, ordered_labels)


def _own_class(ordered_labels, labels):
    """`(batch, n)` mask of the number of each sample's class, if there is one."""
    begin = tf.searchsorted(ordered_labels, labels, side="left")[:, tf.newaxis]
    end = tf.searchsorted(ordered_labels, labels, side="right")[:, tf.newaxis]
    numbers = tf.range(tf.size(ordered_labels))
    return tf.logical_and(tf.equal(numbers, begin), begin < end)


def _class_similarities(similarities, mask, classes, gamma):
    """Similarities to classes, weighted by a softmax over the references of a class.

    Args:
        similarities: `(batch, n)` tensor.
        mask: `(batch, n)` bool tensor of the pairs that take part.
        classes: `(n,)` int32 tensor, number below `n` of each reference's class.
        gamma: Temperature of the softmax.

    Returns:
        `(batch, n)` similarities to the classes and bool mask of the classes that a
        sample has pairs with; a class without has similarity 0.
    """
    columns, mask = tf.transpose(similarities), tf.transpose(mask)
    count = tf.shape(columns)[0]

    def sum_over_classes(values):
        return tf.math.unsorted_segment_sum(values, classes, count)

    masked = tf.where(mask, columns, tf.cast(-float("inf"), columns.dtype))
    largest = tf.math.unsorted_segment_max(masked, classes, count)
    largest = tf.stop_gradient(tf.gather(largest, classes))
    zeros = tf.zeros_like(columns)
    # Masked on either side of exp: a class that is masked out has largest -inf.
    exponents = tf.where(mask, (columns - largest) / gamma, zeros)
    weights = tf.where(mask, tf.exp(exponents), zeros)
    has_pairs = sum_over_classes(tf.cast(mask, columns.dtype)) > 0
    totals = sum_over_classes(weights)
    totals = tf.where(has_pairs, totals, tf.ones_like(totals))
    to_classes = sum_over_classes(weights * columns) / totals
    return tf.transpose(to_classes), tf.transpose(has_pairs)


def _spread_of_classes(references, order, ordered_labels):
    """Mean over classes of the distances between references, over `K (K - 1)`.

    The sum of all distances grows with the references like a distance does with its
    points, so it is the dot product of the references and its own gradient, the sum
    of unit vectors between them. That is taken to be a constant, and is 0 between
    references that coincide. Each round compares every reference with one other of
    its class: no tensor is larger than `(n, dim)`.

    Args:
        references: `(n, dim)` tensor.
        order: `(n,)` references sorted by class.
        ordered_labels: `(n,)` labels in that order.

    Returns:
        Scalar.
    """
    ordered = tf.stop_gradient(tf.gather(references, order))
    begin = tf.searchsorted(ordered_labels, ordered_labels, side="left")
    end = tf.searchsorted(ordered_labels, ordered_labels, side="right")
    rows = tf.range(tf.size(order))
    largest_class = tf.reduce_max(end - begin)

    def is_left(step, _):
        return step < largest_class

    def pull_apart(step, gradient):
        others = tf.roll(ordered, -step, axis=0)
        is_pair = (rows + step < end)[:, tf.newaxis]
        between = tf.where(is_pair, ordered - others, tf.zeros_like(ordered))
        unit = tf.math.divide_no_nan(between, tf.norm(between, axis=1, keepdims=True))
        return step + 1, gradient + unit - tf.roll(unit, step, axis=0)

    _, gradient = tf.while_loop(is_left, pull_apart, (1, tf.zeros_like(ordered)))
    sizes = tf.cast(end - begin, ordered.dtype)
    num_classes = tf.math.count_nonzero(tf.equal(rows, begin), dtype=ordered.dtype)
    pairs = sizes * (sizes - 1.0) * num_classes
    gradient = tf.math.divide_no_nan(gradient, pairs[:, tf.newaxis])
    gradient = tf.stop_gradient(tf.gather(gradient, tf.argsort(order)))
    return tf.reduce_sum(gradient * references)


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

    Args:
        scale: Number above 0, scale of the similarities to classes. Defaults to `20.0`.
        gamma: Number above 0, temperature of the softmax over the proxies of a class.
            Defaults to `0.1`.
        tau: Number, at least 0, weight of the regulariser. Defaults to `0.2`.
        margin: Number. How much more similar the own class should be than the others.
            Defaults to `0.01`.
        similarity: `"cosine"` normalises for itself; `"dot"` takes the vectors as they
            come, in the regulariser too. Defaults to `"cosine"`.
        reduction: How Keras reduces the rows. Defaults to their mean.
        name: Name of the loss. Defaults to `"soft_triple_loss"`.

    Raises:
        TypeError: If `scale`, `gamma`, `tau` or `margin` is not a number.
        ValueError: If one of them is out of range or `similarity` is unknown.
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
        super().__init__(reduction=reduction, name=name)
        check_positive("scale", scale)
        check_positive("gamma", gamma)
        check_number("tau", tau, minimum=0)
        check_number("margin", margin)
        check_similarity(similarity)
        self.scale = scale
        self.gamma = gamma
        self.tau = tau
        self.margin = margin
        self.similarity = similarity

    def pairs(
        self,
        labels: tf.Tensor,
        embeddings: tf.Tensor,
        reference_labels: tf.Tensor,
        reference_embeddings: tf.Tensor,
        exclude_self: bool = False,
    ) -> tf.Tensor:
        return soft_triple_loss(
            labels,
            embeddings,
            reference_labels,
            reference_embeddings,
            scale=self.scale,
            gamma=self.gamma,
            tau=self.tau,
            margin=self.margin,
            similarity=self.similarity,
            exclude_self=exclude_self,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "scale": self.scale,
            "gamma": self.gamma,
            "tau": self.tau,
            "margin": self.margin,
            "similarity": self.similarity,
        }
