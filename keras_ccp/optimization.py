"""What is done to gradients before an optimizer and to its updates after it."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from keras_ccp import distribute
from keras_ccp.proxies import ProxyBank


def add_weight_decay(
    gradients: list[tf.Tensor],
    weights: list[keras.Variable],
    weight_decay: float,
    optimizer: keras.optimizers.Optimizer,
) -> list[tf.Tensor]:
    """Adds the gradient of `(weight_decay / 2) * sum ||weight||^2`.

    Args:
        gradients: gradients of this replica's share of the scaled loss.
        weights: their weights.
        weight_decay: float, 0 for none.
        optimizer: the one that scales the loss.

    Returns:
        Gradients of this replica's share with its share of the decay.
    """
    if not weight_decay:
        return gradients
    # Once, though gradients are summed over replicas, and scaled as they are.
    share = tf.constant(weight_decay / distribute.num_replicas())
    share = optimizer.scale_loss(share)
    pairs = zip(gradients, weights, strict=True)
    return [gradient + share * weight for gradient, weight in pairs]


@contextlib.contextmanager
def scale_update(bank: ProxyBank | None, multiplier: float) -> Iterator[None]:
    """Multiplies what the optimizer does to the proxies inside the `with` block.

    The update is scaled, not the gradient: Adam would undo the latter. So it is what
    a learning rate of its own would do.

    Args:
        bank: proxies, or `None` for none.
        multiplier: float, 1 leaves the update as it is.
    """
    if bank is None or multiplier == 1:
        yield
        return
    before = tf.identity(bank.proxies)
    yield
    bank.proxies.assign(before + multiplier * (bank.proxies - before))
