"""Losses over pairs: of one batch, or of a batch and proxies, a memory or samples."""

import keras

from keras_ccp.losses.contrastive import ContrastiveLoss, contrastive_loss
from keras_ccp.losses.cosine_contrastive import (
    CosineContrastiveLoss,
    cosine_contrastive_loss,
)
from keras_ccp.losses.function_loss import FunctionLoss
from keras_ccp.losses.multi_similarity import (
    MultiSimilarityLoss,
    multi_similarity_loss,
)
from keras_ccp.losses.pair_loss import PairLoss, check_rows
from keras_ccp.losses.triplet import TripletLoss, triplet_loss

_BY_NAME = {
    "contrastive": ContrastiveLoss,
    "cosine_contrastive": CosineContrastiveLoss,
    "multi_similarity": MultiSimilarityLoss,
    "triplet": TripletLoss,
}


def get(loss: PairLoss | str) -> PairLoss:
    """Returns the pair loss that `loss` stands for.

    Args:
        loss: A `PairLoss` or another object with its `pairs` method, returned as
            it is, or the name of a loss, built with its defaults: `"contrastive"`,
            `"cosine_contrastive"`, `"multi_similarity"` or `"triplet"`.

    Returns:
        A `PairLoss`.

    Raises:
        TypeError: If `loss` is neither a pair loss nor a string, or is a class.
        ValueError: If no loss has that name.
    """
    if isinstance(loss, type):
        raise TypeError(
            f"`loss` must be a loss, not its class: call it, {loss.__name__}(). "
            f"Received: loss={loss!r}"
        )
    if isinstance(loss, PairLoss):
        return loss
    if callable(getattr(loss, "pairs", None)):
        return FunctionLoss(loss.pairs, name=getattr(loss, "name", None))
    if callable(loss) and not isinstance(loss, keras.losses.Loss):
        return FunctionLoss(loss)
    names = ", ".join(f'"{name}"' for name in _BY_NAME)
    if not isinstance(loss, str):
        raise TypeError(
            f"`loss` must be a PairLoss or one of {names}. Received: loss={loss!r}"
        )
    if loss not in _BY_NAME:
        raise ValueError(f"`loss` must be one of {names}. Received: loss={loss!r}")
    return _BY_NAME[loss]()


__all__ = [
    "ContrastiveLoss",
    "CosineContrastiveLoss",
    "FunctionLoss",
    "MultiSimilarityLoss",
    "PairLoss",
    "TripletLoss",
    "check_rows",
    "contrastive_loss",
    "cosine_contrastive_loss",
    "get",
    "multi_similarity_loss",
    "triplet_loss",
]
