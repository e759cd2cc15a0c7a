"""Which pairs of a batch a loss looks at: the miners behind `mining="..."`.

A miner takes the `(batch, n)` masks of positive and negative pairs and returns masks
of fewer of them. It looks at one anchor (row) at a time and at all its references,
so that it works in a batch, against proxies and against a memory alike. The choice is
a constant for the gradient. An anchor without positives, or without negatives, simply
has none to choose from. Of pairs at the same distance the one with the lower reference
index is chosen; a distance that is not a number is always chosen, never hidden.
"""

from typing import Any

import tensorflow as tf

from keras_ccp.losses.pairwise import pairwise_similarities

# Distances on the unit sphere between which distance-weighted mining tells negatives
# apart: nearer ones weigh alike, farther ones are not drawn.
_NEAREST, _FARTHEST = 0.5, 1.4


def check_mining(mining: Any) -> None:
    """Checks the name of a miner.

    Args:
        mining: The `mining` argument of a loss.

    Raises:
        ValueError: If it is neither `None` nor the name of a miner.
    """
    names = [*_BY_DISTANCE, "distance_weighted"]
    if mining is not None and mining not in names:
        known = ", ".join(f'"{name}"' for name in names)
        raise ValueError(
            f"`mining` must be None or one of {known}. Received: mining={mining!r}"
        )


def mine_pairs(
    mining: str | None,
    distances: tf.Tensor,
    pos_mask: tf.Tensor,
    neg_mask: tf.Tensor,
    embeddings: tf.Tensor,
    reference_embeddings: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Applies the miner of that name.

    Args:
        mining: `None` (every pair), `"hard"`, `"semi_hard"`, `"easy_positive"` or
            `"distance_weighted"`; each is a function of this module.
        distances: `(batch, n)` float tensor; negated similarities do as well, because
            only their order counts.
        pos_mask: `(batch, n)` bool tensor of the positive pairs.
        neg_mask: `(batch, n)` bool tensor of the negative pairs.
        embeddings: `(batch, dim)` float tensor.
        reference_embeddings: `(n, dim)` float tensor. Embeddings and references are
            looked at by `"distance_weighted"` only, scaled to unit length.

    Returns:
        The mined `(batch, n)` bool tensors `pos_mask` and `neg_mask`.
    """
    if mining is None:
        return pos_mask, neg_mask
    if mining != "distance_weighted":
        mine = _BY_DISTANCE[mining]
        return mine(tf.stop_gradient(distances), pos_mask, neg_mask)
    embeddings = tf.stop_gradient(embeddings)
    references = tf.stop_gradient(reference_embeddings)
    similarities = pairwise_similarities(embeddings, references, "cosine")
    dim = tf.shape(embeddings)[-1]
    return distance_weighted(similarities, pos_mask, neg_mask, dim)


def hard(
    distances: tf.Tensor, pos_mask: tf.Tensor, neg_mask: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Keeps the farthest positive and the nearest negative of every anchor.

    Source: "In Defense of the Triplet Loss for Person Re-Identification" (Hermans et
    al., 2017, "batch hard", https://arxiv.org/abs/1703.07737).

    Args:
        distances: `(batch, n)` float tensor.
        pos_mask: `(batch, n)` bool tensor of the positive pairs.
        neg_mask: `(batch, n)` bool tensor of the negative pairs.

    Returns:
        The mined `(batch, n)` bool tensors `pos_mask` and `neg_mask`.
    """
    return _nearest(-distances, pos_mask), _nearest(distances, neg_mask)


def semi_hard(
    distances: tf.Tensor, pos_mask: tf.Tensor, neg_mask: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Keeps the negatives farther than the nearest positive; all positives stay.

    A triplet is semi-hard if its negative is farther than its positive, but by less
    than the margin. As pairs, an anchor's negatives are those of all its semi-hard
    triplets: the ones beyond its nearest positive. The upper end is left to the margin
    of the loss. An anchor without positives has no triplet, thus no negatives.

    Source: "FaceNet: A Unified Embedding for Face Recognition and Clustering" (Schroff
    et al., CVPR 2015, https://arxiv.org/abs/1503.03832).

    Args:
        distances: `(batch, n)` float tensor.
        pos_mask: `(batch, n)` bool tensor of the positive pairs.
        neg_mask: `(batch, n)` bool tensor of the negative pairs.

    Returns:
        `pos_mask` and the mined `(batch, n)` bool tensor `neg_mask`.
    """
    infinity = tf.cast(float("inf"), distances.dtype)
    # From the mask of `_nearest` and not a minimum, which a NaN would spoil.
    nearest = tf.where(_nearest(distances, pos_mask), distances, infinity)
    limits = tf.reduce_min(nearest, axis=1, keepdims=True)
    # Not "distances > limits", so that what is not a number stays.
    return pos_mask, tf.logical_and(neg_mask, tf.logical_not(distances <= limits))


def easy_positive(
    distances: tf.Tensor, pos_mask: tf.Tensor, neg_mask: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Keeps the nearest positive and the nearest negative that is farther than it.

    That is the easy positive with the semi-hard negative (EPSHN). A class may stay
    spread out: a sample needs one neighbour of its class, not all of it.

    Source: "Improved Embeddings with Easy Positive Triplet Mining" (Xuan et al., WACV
    2020, https://arxiv.org/abs/1904.04370).

    Args:
        distances: `(batch, n)` float tensor.
        pos_mask: `(batch, n)` bool tensor of the positive pairs.
        neg_mask: `(batch, n)` bool tensor of the negative pairs.

    Returns:
        The mined `(batch, n)` bool tensors `pos_mask` and `neg_mask`.
    """
    _, farther = semi_hard(distances, pos_mask, neg_mask)
    return _nearest(distances, pos_mask), _nearest(distances, farther)


def distance_weighted(
    similarities: tf.Tensor,
    pos_mask: tf.Tensor,
    neg_mask: tf.Tensor,
    dim: int | tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws one negative of every anchor, so that all distances are about as frequent.

    A negative at distance `d` is drawn with a probability in proportion to
    `1 / q(max(d, 0.5))`, where `q(d) = d^(dim - 2) (1 - d^2 / 4)^((dim - 3) / 2)` is
    the density of distances between random points of the unit sphere. Negatives from
    distance 1.4 on, where points hardly related lie, are not drawn, as in the authors'
    own implementation; an anchor may be left without one. All positives stay.

    Draws are new at every call, follow `keras.utils.set_random_seed`, and differ
    from one number of replicas to another.

    Source: "Sampling Matters in Deep Embedding Learning" (Wu et al., ICCV 2017,
    https://arxiv.org/abs/1706.07567).

    Args:
        similarities: `(batch, n)` float tensor of cosine similarities.
        pos_mask: `(batch, n)` bool tensor of the positive pairs.
        neg_mask: `(batch, n)` bool tensor of the negative pairs.
        dim: Width of an embedding.

    Returns:
        `pos_mask` and the mined `(batch, n)` bool tensor `neg_mask`.
    """
    squared = 2.0 - 2.0 * similarities
    is_near = tf.logical_not(squared >= _FARTHEST**2)
    squared = tf.clip_by_value(squared, _NEAREST**2, _FARTHEST**2)
    dim = tf.cast(dim, squared.dtype)
    log_weights = (1.0 - dim / 2.0) * tf.math.log(squared)
    log_weights -= (dim - 3.0) / 2.0 * tf.math.log1p(-squared / 4.0)
    # Gumbel-max: the largest of the log weights, each with its own Gumbel noise, is a
    # draw in proportion to the weights, without a sum over them.
    uniform = tf.random.uniform(tf.shape(squared), dtype=squared.dtype)
    gumbel = -tf.math.log(-tf.math.log(uniform))
    drawn = _nearest(-(log_weights + gumbel), tf.logical_and(neg_mask, is_near))
    return pos_mask, drawn


def _nearest(distances, mask):
    """Keeps of the masked pairs the nearest of every row, the first one of equals."""
    infinity = tf.cast(float("inf"), distances.dtype)
    distances = tf.where(tf.math.is_nan(distances), -infinity, distances)
    distances = tf.where(mask, distances, infinity)
    smallest = tf.reduce_min(distances, axis=1, keepdims=True)
    # argmin does not say which of equal numbers it takes.
    columns = tf.range(tf.shape(distances)[1])
    candidates = tf.logical_and(mask, distances <= smallest)
    candidates = tf.where(candidates, columns, columns.dtype.max)
    return tf.equal(columns, tf.reduce_min(candidates, axis=1, keepdims=True))


_BY_DISTANCE = {"hard": hard, "semi_hard": semi_hard, "easy_positive": easy_positive}
