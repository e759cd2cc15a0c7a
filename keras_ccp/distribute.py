"""What depends on the number of replicas; no other file asks for it."""

import tensorflow as tf


def sum_over_replicas(tensor: tf.Tensor) -> tf.Tensor:
    """Sums a count over the replicas of the running step.

    The result is a constant for differentiation: it is meant for divisors, and a
    gradient that flowed through the exchange would be counted once per replica.
    Whether there is anything to exchange is decided while tracing, so a step on one
    replica holds no exchange and still compiles with XLA.

    Args:
        tensor: Float tensor of any shape, the same shape on every replica.

    Returns:
        The sum over all replicas, on every replica. `tensor` itself with a single
        replica, or outside the replicas (while a model is being built).
    """
    context = tf.distribute.get_replica_context()
    tensor = tf.stop_gradient(tensor)
    if context is None or context.num_replicas_in_sync == 1:
        return tensor
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tensor)


def num_replicas() -> int:
    """Number of replicas that take the running step together.

    Gradients are summed over them, so that each contributes its loss divided by it.
    """
    return tf.distribute.get_strategy().num_replicas_in_sync
