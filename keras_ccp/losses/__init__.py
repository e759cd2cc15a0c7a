"""Losses over pairs: of one batch, or of a batch and proxies, a memory or samples."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_ccp.losses.addons_interop import AddonsLoss, from_addons
from keras_ccp.losses.contrastive import ContrastiveLoss, contrastive_loss
from keras_ccp.losses.cosine_contrastive import (
    CosineContrastiveLoss,
    cosine_contrastive_loss,
)
from keras_ccp.losses.cross_batch_memory import CrossBatchMemory, EmbeddingMemory
from keras_ccp.losses.function_loss import FunctionLoss
from keras_ccp.losses.multi_similarity import (
    MultiSimilarityLoss,
    multi_similarity_loss,
)
from keras_ccp.losses.pair_loss import PairLoss, check_rows
from keras_ccp.losses.proxy_anchor import ProxyAnchorLoss, proxy_anchor_loss
from keras_ccp.losses.proxy_nca import ProxyNCALoss, proxy_nca_loss
from keras_ccp.losses.reach import within_reach
from keras_ccp.losses.similarity_interop import SimilarityLoss, from_similarity
from keras_ccp.losses.soft_triple import SoftTripleLoss, soft_triple_loss
from keras_ccp.losses.triplet import TripletLoss, triplet_loss

_BY_NAME = {
    "contrastive": ContrastiveLoss,
    "cosine_contrastive": CosineContrastiveLoss,
    "multi_similarity": MultiSimilarityLoss,
    "proxy_anchor": ProxyAnchorLoss,
    "proxy_nca": ProxyNCALoss,
    "soft_triple": SoftTripleLoss,
    "triplet": TripletLoss,
}


def get(loss: PairLoss | Callable[..., tf.Tensor] | str, **arguments: Any) -> PairLoss:
    """Returns the pair loss that `loss` stands for.

    Args:
        loss: A `PairLoss`, returned as it is; a function with the arguments of
            `PairLoss.pairs`, or another object with such a method; or the name of a
            loss: `"contrastive"`, `"cosine_contrastive"`, `"multi_similarity"`,
            `"proxy_anchor"`, `"proxy_nca"`, `"soft_triple"` or `"triplet"`.
        **arguments: Arguments of the loss that a name stands for, where they differ
            from its defaults.

    Returns:
        A `PairLoss`.

    Raises:
        TypeError: If `loss` is none of these, is a class or a function of other
            arguments, or arguments are given that it does not have.
        ValueError: If no loss has that name.
    """
    if isinstance(loss, type):
        raise TypeError(
            f"`loss` must be a loss, not its class: call it, {loss.__name__}(). "
            f"Received: loss={loss!r}"
        )
    if arguments and not isinstance(loss, str):
        raise TypeError(
            "`arguments` are for the name of a loss; pass them to the loss itself. "
            f"Received: {', '.join(arguments)} with loss={loss!r}"
        )
    if isinstance(loss, PairLoss):
        return loss
    if callable(getattr(loss, "pairs", None)):
        given = {
            name: getattr(loss, name)
            for name in ("name", "reduction")
            if hasattr(loss, name)
        }
        return FunctionLoss(loss.pairs, **given)
    if callable(loss) and not isinstance(loss, keras.losses.Loss):
        return FunctionLoss(loss)
    names = ", ".join(f'"{name}"' for name in _BY_NAME)
    if not isinstance(loss, str):
        raise TypeError(
            f"`loss` must be a PairLoss or one of {names}. Received: loss={loss!r}"
        )
    if loss not in _BY_NAME:
        raise ValueError(f"`loss` must be one of {names}. Received: loss={loss!r}")
    return _BY_NAME[loss](**arguments)


__all__ = [
    "AddonsLoss",
    "ContrastiveLoss",
    "CosineContrastiveLoss",
    "CrossBatchMemory",
    "EmbeddingMemory",
    "FunctionLoss",
    "MultiSimilarityLoss",
    "PairLoss",
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "SimilarityLoss",
    "SoftTripleLoss",
    "TripletLoss",
    "check_rows",
    "contrastive_loss",
    "cosine_contrastive_loss",
    "from_addons",
    "from_similarity",
    "get",
    "multi_similarity_loss",
    "proxy_anchor_loss",
    "proxy_nca_loss",
    "soft_triple_loss",
    "triplet_loss",
    "within_reach",
]
