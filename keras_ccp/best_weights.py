"""BestWeights: the highest MAP@R so far and the weights that gave it."""

import dataclasses
from typing import Any

import numpy as np

from keras_ccp.model import CCPModel


@dataclasses.dataclass
class BestWeights:
    """Highest MAP@R of a problem or of the run, and the weights that gave it.

    Args:
        map_at_r: float, lower than any without weights.
        embedder_weights: arrays of the embedder, or `None` for nothing kept.
        references: arrays of the reference bank, or `None` without one.
    """

    map_at_r: float = -np.inf
    embedder_weights: list[np.ndarray] | None = None
    references: list[np.ndarray] | None = None

    @classmethod
    def of(cls, model: CCPModel, map_at_r: float = -np.inf) -> "BestWeights":
        """Keeps the weights as they are now.

        Args:
            model: model whose embedder and references are kept.
            map_at_r: float, what the weights reach.
        """
        bank = model.reference_bank
        references = None if bank is None else bank.get_weights()
        return cls(map_at_r, model.embedder.get_weights(), references)

    def restore(self, model: CCPModel) -> None:
        """Gives the weights back, if there are any.

        Args:
            model: model the weights were taken from.
        """
        if self.embedder_weights is not None:
            # As `set_weights`, without its checks of hundreds of shapes.
            weights = model.embedder.weights
            for weight, value in zip(weights, self.embedder_weights, strict=True):
                weight.value.assign(value, read_value=False)
        if self.references is not None:
            model.reference_bank.set_weights(self.references)

    def get_state(self) -> dict[str, Any]:
        """The fields, lists as dicts by position and without those that are `None`."""
        state = {"map_at_r": self.map_at_r}
        for field in ("embedder_weights", "references"):
            if (weights := getattr(self, field)) is not None:
                state[field] = {str(i): weight for i, weight in enumerate(weights)}
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "BestWeights":
        """What `get_state` was called on.

        Args:
            state: what `get_state` returned, `map_at_r` also as an array.
        """
        weights = [
            list(state[field].values()) if field in state else None
            for field in ("embedder_weights", "references")
        ]
        return cls(float(state["map_at_r"]), *weights)
