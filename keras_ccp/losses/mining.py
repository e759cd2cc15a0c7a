"""Which pairs of a batch a loss looks at: the miners behind `mining="..."`.

A miner takes the `(batch, n)` masks of positive and negative pairs and returns masks
of fewer of them, row by row. The choice is a constant for the gradient. Of pairs at the
same distance the one with the lower reference index is chosen; a distance that is not a
number is always chosen, never hidden.
"""

import tensorflow as tf

from keras_ccp.losses.pairs import pairwise_similarities

MINERS = ("hard", "semi_hard", "easy_positive", "distance_weighted")

# Distances on the unit sphere between which distance-weighted mining tells negatives
# apart: nearer ones weigh alike, farther ones are not drawn.
_NEAREST, _FARTHEST = 0.5, 1.4


def mine_pairs(
    mining: str | None,
    distances: tf.Tensor,
    pos_mask: tf.Tensor,
    neg_mask: tf.Tensor,
    embeddings: tf.Tensor,
    references: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Masks of the mined pairs; negated similarities do as distances."""
    if mining is None:
        return pos_mask, neg_mask
    if mining == "distance_weighted":
        cosines = pairwise_similarities(embeddings, references, "cosine")
        dim = tf.shape(embeddings)[-1]
        return _distance_weighted(tf.stop_gradient(cosines), pos_mask, neg_mask, dim)
    return _BY_DISTANCE[mining](tf.stop_gradient(distances), pos_mask, neg_mask)


def _hard(distances, pos_mask, neg_mask):
    """Keeps the farthest positive and the nearest negative of every anchor."""
    # "Batch hard" of Hermans et al., 2017, https://arxiv.org/abs/1703.07737
    return _nearest(-distances, pos_mask), _nearest(distances, neg_mask)


def _semi_hard(distances, pos_mask, neg_mask):
    """Keeps the negatives farther than the nearest positive; all positives stay."""
    # Schroff et al., CVPR 2015, https://arxiv.org/abs/1503.03832, as pairs: an anchor's
    # negatives are those of all its semi-hard triplets. The upper end is left to the
    # margin of the loss. An anchor without positives has no triplet, so no negatives.
    infinity = tf.cast(float("inf"), distances.dtype)
    # From the mask of `_nearest` and not a minimum, which a NaN would spoil.
    nearest = tf.where(_nearest(distances, pos_mask), distances, infinity)
    limits = tf.reduce_min(nearest, axis=1, keepdims=True)
    # Not "distances > limits", so that what is not a number stays.
    return pos_mask, neg_mask & tf.logical_not(distances <= limits)


def _easy_positive(distances, pos_mask, neg_mask):
    """Keeps the nearest positive and the nearest negative that is farther than it."""
    # EPSHN of Xuan et al., WACV 2020, https://arxiv.org/abs/1904.04370. A class may
    # stay spread out: a sample needs one neighbour of its class, not all of it.
    _, farther = _semi_hard(distances, pos_mask, neg_mask)
    return _nearest(distances, pos_mask), _nearest(distances, farther)


def _distance_weighted(cosines, pos_mask, neg_mask, dim):
    """Draws one negative of an anchor, so that all distances are about as frequent."""
    # Wu et al., ICCV 2017, https://arxiv.org/abs/1706.07567. A negative at distance d
    # is drawn with a probability in proportion to 1 / q(max(d, 0.5)), where
    # q(d) = d^(dim - 2) (1 - d^2 / 4)^((dim - 3) / 2) is the density of distances
    # between random points of the unit sphere. Negatives from distance 1.4 on, where
    # points hardly related lie, are not drawn, as in the authors' implementation.
    squared = 2.0 - 2.0 * cosines
    is_near = tf.logical_not(squared >= _FARTHEST**2)
    squared = tf.clip_by_value(squared, _NEAREST**2, _FARTHEST**2)
    dim = tf.cast(dim, squared.dtype)
    log_weights = (1.0 - dim / 2.0) * tf.math.log(squared)
    log_weights -= (dim - 3.0) / 2.0 * tf.math.log1p(-squared / 4.0)
    # Gumbel-max: the largest of the log weights, each with its own Gumbel noise, is a
    # draw in proportion to the weights, without a sum over them.
    uniform = tf.random.uniform(tf.shape(squared), dtype=squared.dtype)
    gumbel = -tf.math.log(-tf.math.log(uniform))
    return pos_mask, _nearest(-(log_weights + gumbel), neg_mask & is_near)


def _nearest(distances, mask):
    """Keeps of the masked pairs the nearest of every row, the first one of equals."""
    infinity = tf.cast(float("inf"), distances.dtype)
    distances = tf.where(tf.math.is_nan(distances), -infinity, distances)
    distances = tf.where(mask, distances, infinity)
    smallest = tf.reduce_min(distances, axis=1, keepdims=True)
    # argmin does not say which of equal numbers it takes.
    columns = tf.range(tf.shape(distances)[1])
    candidates = tf.where(mask & (distances <= smallest), columns, columns.dtype.max)
    return tf.equal(columns, tf.reduce_min(candidates, axis=1, keepdims=True))


_BY_DISTANCE = {"hard": _hard, "semi_hard": _semi_hard, "easy_positive": _easy_positive}
