"""Softmax over classes with a margin: ArcFace, CosFace and sub-center ArcFace."""

import math

import keras
import tensorflow as tf

from keras_ccp.checks import check_number
from keras_ccp.losses.pair_loss import PairLoss, check_positive
from keras_ccp.losses.pairs import class_masks, cross_entropies, pairwise_similarities


@keras.saving.register_keras_serializable(package="keras_ccp")
class ArcFaceLoss(PairLoss):
    """ArcFace: a softmax over proxies, with a margin between angles.

    With `theta` the angle between a sample and a proxy (a reference):

    `r_i = mean over positives p of -log(e_p / (e_p + sum over negatives n of
    exp(scale cos theta_n)))`, `e_p = exp(scale cos(theta_p + margin))`

    Beyond `theta + margin = pi`, where the cosine would rise again, it is
    `cos(theta) - margin sin(margin)`. With one proxy a class, the class weights of the
    original, this is its formula; a sample without a positive has the row 0.

    Source: "ArcFace: Additive Angular Margin Loss for Deep Face Recognition" (Deng et
    al., CVPR 2019, https://arxiv.org/abs/1801.07698).

    ```python
    loss = keras_ccp.losses.ArcFaceLoss(margin=0.0, scale=1.0)
    loss.pairs([0], [[1.0, 0.0]], [0, 1], [[1.0, 0.0], [1.0, 0.0]])  # log(2)
    ```

    Args:
        margin: Number from 0 to below pi, in radians. Defaults to 28.6 degrees (0.499).
        scale: Number above 0, scale of the cosines. Defaults to `64.0`.
        reduction, name: As for `PairLoss`.
    """

    similarity = "cosine"

    def __init__(
        self,
        margin: float = math.radians(28.6),
        scale: float = 64.0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "arc_face_loss",
    ):
        _check_angle(margin)
        check_positive(scale=scale)
        super().__init__(_arc_face, reduction, name, margin=margin, scale=scale)


@keras.saving.register_keras_serializable(package="keras_ccp")
class SubCenterArcFaceLoss(PairLoss):
    """ArcFace where the nearest proxy of each class stands for it.

    The formula of `ArcFaceLoss` over classes, the cosine to a class being the largest
    one to its proxies (references). With one proxy a class the two are the same.

    Source: "Sub-center ArcFace: Boosting Face Recognition by Large-scale Noisy Web
    Faces" (Deng et al., ECCV 2020).

    ```python
    loss = keras_ccp.losses.SubCenterArcFaceLoss(margin=0.0, scale=1.0)
    two_of_class_0 = [[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]
    loss.pairs([0], [[1.0, 0.0]], [0, 0, 1], two_of_class_0)  # log(2)
    ```

    Args:
        margin: Number from 0 to below pi, in radians. Defaults to 28.6 degrees (0.499).
        scale: Number above 0, scale of the cosines. Defaults to `64.0`.
        reduction, name: As for `PairLoss`.
    """

    similarity = "cosine"

    def __init__(
        self,
        margin: float = math.radians(28.6),
        scale: float = 64.0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "sub_center_arc_face_loss",
    ):
        _check_angle(margin)
        check_positive(scale=scale)
        arguments = {"margin": margin, "scale": scale}
        super().__init__(_sub_center_arc_face, reduction, name, **arguments)


@keras.saving.register_keras_serializable(package="keras_ccp")
class CosFaceLoss(PairLoss):
    """CosFace: a softmax over proxies, with a margin between cosines.

    With `s` the cosine of a sample and a proxy (a reference):

    `r_i = mean over positives p of -log(e_p / (e_p + sum over negatives n of
    exp(scale s_n)))`, `e_p = exp(scale (s_p - margin))`

    A sample without a positive has the row 0.

    Source: "CosFace: Large Margin Cosine Loss for Deep Face Recognition" (Wang et al.,
    CVPR 2018, https://arxiv.org/abs/1801.09414).

    ```python
    loss = keras_ccp.losses.CosFaceLoss(margin=0.0, scale=1.0)
    loss.pairs([0], [[1.0, 0.0]], [0, 1], [[1.0, 0.0], [1.0, 0.0]])  # log(2)
    ```

    Args:
        margin: Number, at least 0, between cosines. Defaults to `0.35`.
        scale: Number above 0, scale of the cosines. Defaults to `64.0`.
        reduction, name: As for `PairLoss`.
    """

    similarity = "cosine"

    def __init__(
        self,
        margin: float = 0.35,
        scale: float = 64.0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "cos_face_loss",
    ):
        check_number("margin", margin, minimum=0)
        check_positive(scale=scale)
        super().__init__(_cos_face, reduction, name, margin=margin, scale=scale)


def _check_angle(margin):
    check_number("margin", margin, minimum=0)
    if margin >= math.pi:
        raise ValueError(
            "`margin` must be an angle below pi, in radians. Received: "
            f"margin={margin!r}\nTurn degrees into radians with math.radians"
        )


def _arc_face(labels, x, reference_labels, r, exclude_self, margin, scale):
    masks = class_masks(labels, reference_labels, exclude_self)
    cosines = _exact_cosines(x, r)
    targets = _cosines_beyond(cosines, margin)
    return tf.cast(_cross_entropy(cosines, targets, *masks, scale), x.dtype)


def _sub_center_arc_face(labels, x, reference_labels, r, exclude_self, margin, scale):
    # A class goes by the place of its first reference once they are sorted by class.
    ordered = tf.sort(reference_labels)
    classes = tf.searchsorted(ordered, reference_labels)
    masks = class_masks(labels, reference_labels, exclude_self)
    columns = tf.transpose(_exact_cosines(x, r))
    lowest = tf.cast(-2.0, columns.dtype)
    columns = tf.where(tf.transpose(tf.logical_or(*masks)), columns, lowest)
    nearest = tf.math.unsorted_segment_max(columns, classes, tf.size(classes))
    nearest = tf.transpose(nearest)
    has_pairs = tf.logical_not(nearest <= lowest)  # "not <=", so that NaN stays
    is_own = tf.equal(labels[:, tf.newaxis], ordered)
    masks = is_own & has_pairs, has_pairs & tf.logical_not(is_own)
    cosines = tf.where(has_pairs, nearest, tf.zeros_like(nearest))
    targets = _cosines_beyond(cosines, margin)
    return tf.cast(_cross_entropy(cosines, targets, *masks, scale), x.dtype)


def _cos_face(labels, x, reference_labels, r, exclude_self, margin, scale):
    masks = class_masks(labels, reference_labels, exclude_self)
    cosines = pairwise_similarities(x, r, "cosine")
    return _cross_entropy(cosines, cosines - margin, *masks, scale)


def _exact_cosines(x, r):
    # Near 0 and pi the sine is off by many times the rounding of the cosine.
    return pairwise_similarities(tf.cast(x, tf.float64), r, "cosine")


def _cosines_beyond(cosines, margin):
    """`cos(theta + margin)`, and what goes on falling beyond pi."""
    squared = 1.0 - tf.square(cosines)
    # At 0 and pi the sine has no slope: its gradient is taken to be 0.
    has_slope = squared > 1e-12
    sines = tf.sqrt(tf.where(has_slope, squared, tf.ones_like(squared)))
    sines = tf.where(has_slope, sines, tf.zeros_like(sines))
    beyond = cosines * math.cos(margin) - sines * math.sin(margin)
    is_below_pi = cosines >= -math.cos(margin)
    return tf.where(is_below_pi, beyond, cosines - margin * math.sin(margin))


def _cross_entropy(cosines, targets, positive, negative, scale):
    """Mean over the positives of a row of `-log(e_p / (e_p + sum of e_n))`."""
    terms = cross_entropies(scale * targets, scale * cosines, positive, negative)
    number = tf.reduce_sum(tf.cast(positive, terms.dtype), axis=1)
    return tf.reduce_sum(terms, axis=1) / tf.maximum(number, 1.0)
