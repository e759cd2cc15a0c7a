"""Losses over pairs: of one batch, or of a batch and proxies, a memory or samples."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_ccp.losses import pairs
from keras_ccp.losses.circle import CircleLoss
from keras_ccp.losses.contrastive import ContrastiveLoss, CosineContrastiveLoss
from keras_ccp.losses.info_nce import NPairsLoss, NTXentLoss, SupConLoss
from keras_ccp.losses.lifted_structure import LiftedStructureLoss
from keras_ccp.losses.margin import MarginLoss
from keras_ccp.losses.margin_softmax import (
    ArcFaceLoss,
    CosFaceLoss,
    SubCenterArcFaceLoss,
)
from keras_ccp.losses.memory import CrossBatchMemory, EmbeddingMemory
from keras_ccp.losses.multi_similarity import MultiSimilarityLoss
from keras_ccp.losses.other_libraries import (
    AddonsLoss,
    SimilarityLoss,
    from_addons,
    from_similarity,
)
from keras_ccp.losses.pair_loss import FunctionLoss, PairLoss
from keras_ccp.losses.proxy_anchor import ProxyAnchorLoss
from keras_ccp.losses.proxy_nca import ProxyNCALoss
from keras_ccp.losses.soft_triple import SoftTripleLoss
from keras_ccp.losses.triplet import TripletLoss

_BY_NAME = {
    "arc_face": ArcFaceLoss,
    "circle": CircleLoss,
    "contrastive": ContrastiveLoss,
    "cos_face": CosFaceLoss,
    "cosine_contrastive": CosineContrastiveLoss,
    "lifted_structure": LiftedStructureLoss,
    "margin": MarginLoss,
    "multi_similarity": MultiSimilarityLoss,
    "n_pairs": NPairsLoss,
    "nt_xent": NTXentLoss,
    "proxy_anchor": ProxyAnchorLoss,
    "proxy_nca": ProxyNCALoss,
    "soft_triple": SoftTripleLoss,
    "sub_center_arc_face": SubCenterArcFaceLoss,
    "sup_con": SupConLoss,
    "triplet": TripletLoss,
}
_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def get(loss: PairLoss | Callable[..., tf.Tensor] | str, **arguments: Any) -> PairLoss:
    """Returns the pair loss that `loss` stands for, to take the mean of its rows.

    Args:
        loss: A `PairLoss`, returned as it is; a function with the arguments of
            `PairLoss.pairs`, or another object with such a method; or the name of a
            loss, its class in snake case without the last word: `"arc_face"`.
        **arguments: Arguments of the loss that a name stands for, or of the function.

    Returns:
        A `PairLoss`.

    Raises:
        TypeError: If `loss` is none of these, or is a class.
        ValueError: If no loss has that name, or its `reduction` is not the mean.
    """
    is_name = isinstance(loss, str)
    if is_name and loss in _BY_NAME:
        found = _BY_NAME[loss](**arguments)
    elif isinstance(loss, PairLoss) and not arguments:
        found = loss
    elif hasattr(loss, "pairs") and not isinstance(loss, (type, PairLoss)):
        reduction = getattr(loss, "reduction", _MEANS[0])
        found = FunctionLoss(loss.pairs, reduction, getattr(loss, "name", None))
    elif callable(loss) and not isinstance(loss, (type, keras.losses.Loss)):
        found = FunctionLoss(loss, **arguments)
    else:
        names = ", ".join(f'"{name}"' for name in _BY_NAME)
        raise (ValueError if is_name else TypeError)(
            f"`loss` must be a PairLoss or one of {names}. Received: loss={loss!r}\n"
            "Make a loss of its class by calling it, and of one of another library by "
            "from_similarity or from_addons"
        )
    if found.reduction not in _MEANS:
        raise ValueError(
            f"`reduction` must be {_MEANS[0]!r}, the mean over the batch. Received: "
            f"reduction={found.reduction!r} of {type(found).__name__}\n"
            "Change the learning rate for another scale"
        )
    return found


__all__ = [
    "AddonsLoss",
    "ArcFaceLoss",
    "CircleLoss",
    "ContrastiveLoss",
    "CosFaceLoss",
    "CosineContrastiveLoss",
    "CrossBatchMemory",
    "EmbeddingMemory",
    "FunctionLoss",
    "LiftedStructureLoss",
    "MarginLoss",
    "MultiSimilarityLoss",
    "NPairsLoss",
    "NTXentLoss",
    "PairLoss",
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "SimilarityLoss",
    "SoftTripleLoss",
    "SubCenterArcFaceLoss",
    "SupConLoss",
    "TripletLoss",
    "from_addons",
    "from_similarity",
    "get",
    "pairs",
]
