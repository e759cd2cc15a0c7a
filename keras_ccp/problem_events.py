"""The event that a proxy problem has ended, for any callback of the `fit`."""

import contextlib
from collections.abc import Iterator

import keras

from keras_ccp.best_weights import BestWeights
from keras_ccp.model import CCPModel


class ProblemEvents(keras.callbacks.Callback):
    """A callback that tells the others when a proxy problem has ended.

    Each callback of the `fit` that has the method is called as
    `on_problem_end(best, is_last)`: with the best weights and proxies of the problem
    (`BestWeights`), and whether the training ends with it. Where it does not, the model
    has the proxies of the next problem by then, and `model.num_projections` counts the
    switch. `at_best(model, best)` goes back for the length of a `with` block.
    """

    _listeners: list[keras.callbacks.Callback] = []

    def set_callbacks(self, callbacks: list[keras.callbacks.Callback]) -> None:
        """Takes those that listen; `CCPModel.fit` calls it.

        Args:
            callbacks: all callbacks of the `fit`.
        """
        self._listeners = [c for c in callbacks if hasattr(c, "on_problem_end")]

    def tell_problem_end(self, best: BestWeights, is_last: bool) -> None:
        """Calls the callbacks that listen, if the problem was evaluated at all.

        Args:
            best: the best weights of the problem.
            is_last: bool, whether no problem follows.
        """
        if best.embedder_weights is not None:
            for listener in self._listeners:
                listener.on_problem_end(best, is_last)


@contextlib.contextmanager
def at_best(model: CCPModel, best: BestWeights) -> Iterator[None]:
    """Gives a model other weights and proxies for the length of a `with` block.

    Args:
        model: model the weights were taken from.
        best: weights to have inside of the block.
    """
    current = BestWeights.of(model)
    best.restore(model)
    try:
        yield
    finally:
        current.restore(model)
