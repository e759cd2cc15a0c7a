"""Multi-similarity loss ("MS")."""

import keras

from keras_ccp.checks import check_number
from keras_ccp.losses.mining import mine_pairs
from keras_ccp.losses.pair_loss import PairLoss, check_positive
from keras_ccp.losses.pairs import (
    class_masks,
    log_one_plus_sum_exp,
    pairwise_similarities,
)


@keras.saving.register_keras_serializable(package="keras_ccp")
class MultiSimilarityLoss(PairLoss):
    """Multi-similarity loss ("MS"), over all pairs unless mined.

    With `s` the similarity of a pair:

    `r_i = log(1 + sum over positives of exp(-alpha (s - base))) / alpha
    + log(1 + sum over negatives of exp(beta (s - base))) / beta`

    Source: "Multi-Similarity Loss with General Pair Weighting for Deep Metric
    Learning" (Wang et al., CVPR 2019, equation 16, https://arxiv.org/abs/1904.06627),
    where `base` is lambda. Its pair mining is not part of this.

    ```python
    loss = keras_ccp.losses.MultiSimilarityLoss()
    loss([0, 0], [[1.0, 0.0], [0.0, 1.0]])  # log(1 + e) / 2 = 0.6566
    ```

    Args:
        alpha: Number above 0, scale of the positives. Defaults to `2.0`.
        beta: Number above 0, scale of the negatives. Defaults to `40.0`.
        base: Number, the similarity between both sides. Defaults to `0.5`.
        similarity: `"cosine"` (default) normalises for itself; `"dot"` takes vectors as
            they come: the paper's form, on Lipschitz-normalised ones.
        mining: Which pairs count, one of `mining.MINERS`. Defaults to `None`, all.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        alpha: float = 2.0,
        beta: float = 40.0,
        base: float = 0.5,
        similarity: str = "cosine",
        mining: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "multi_similarity_loss",
    ):
        check_positive(alpha=alpha, beta=beta)
        check_number("base", base)
        numbers = {"alpha": alpha, "beta": beta, "base": base}
        choices = {"similarity": similarity, "mining": mining}
        super().__init__(_multi_similarity, reduction, name, **numbers, **choices)


def _multi_similarity(
    labels, x, reference_labels, r, exclude_self, alpha, beta, base, similarity, mining
):
    masks = class_masks(labels, reference_labels, exclude_self)
    s = pairwise_similarities(x, r, similarity)
    positive, negative = mine_pairs(mining, -s, *masks, x, r)
    pull = log_one_plus_sum_exp(alpha * (base - s), positive) / alpha
    return pull + log_one_plus_sum_exp(beta * (s - base), negative) / beta
