"""What is done to gradients before an optimizer, to its updates and after them."""

import contextlib
import functools
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


def fuse_adam(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets Keras' Adam and AdamW update a weight by one kernel of TensorFlow.

    The formula is the same and so are the moments; Keras writes it as a dozen
    operations, each a pass over the weight and some with a temporary of its size.
    With many proxies those were a tenth of a step. Other optimizers stay as they are.

    Args:
        optimizer: built Keras optimizer; a scaler of the loss is looked through.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # Not a subclass with an update of its own, and the kernel has no AMSGrad.
    is_adam = type(inner).update_step is keras.optimizers.Adam.update_step
    if is_adam and not inner.amsgrad:
        inner.update_step = functools.partial(_fused_adam_step, inner)


def _fused_adam_step(adam, gradient, variable, learning_rate):
    dtype = variable.dtype
    index = adam._get_variable_index(variable)
    beta_1, beta_2 = tf.constant(adam.beta_1, dtype), tf.constant(adam.beta_2, dtype)
    step = tf.cast(adam.iterations + 1, dtype)
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=adam._momentums[index].value.handle,
        v=adam._velocities[index].value.handle,
        beta1_power=beta_1**step,
        beta2_power=beta_2**step,
        lr=tf.cast(learning_rate, dtype),
        beta1=beta_1,
        beta2=beta_2,
        epsilon=tf.constant(adam.epsilon, dtype),
        grad=tf.cast(gradient, dtype),
    )
