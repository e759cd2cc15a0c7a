"""What depends on the number of replicas; no other file asks for it."""

from typing import Any

import keras
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


def gather_batch(tensor: tf.Tensor) -> tf.Tensor:
    """Rows that all replicas hold together, those of this replica first.

    Row `i` of the result is row `i` of `tensor`, so pair `(i, i)` stays that of a
    sample with itself. A gradient flows back to the replica that a row came from.

    Args:
        tensor: `(batch, ...)` tensor. Replicas may hold different numbers of rows.

    Returns:
        `(rows of all replicas, ...)` tensor: this replica's rows, those of the
        replicas after it, then those of the replicas before it. `tensor` itself
        with a single replica, or outside the replicas.
    """
    rows = gather_rows(tensor)
    if rows is tensor:
        return tensor
    return tf.roll(rows, -_rows_before(tensor), axis=0)


def gather_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Rows that all replicas hold together, in the order of the whole batch.

    Args:
        tensor: `(batch, ...)` tensor. Replicas may hold different numbers of rows.

    Returns:
        `(rows of all replicas, ...)` tensor, equal on every replica. `tensor` itself
        with a single replica, or outside the replicas. A gradient flows back to the
        replica that a row came from.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tensor
    return context.all_gather(tensor, axis=0)


def _rows_before(tensor):
    """Number of rows on the replicas before this one."""
    context = tf.distribute.get_replica_context()
    sizes = context.all_gather(tf.shape(tensor)[:1], axis=0)
    return tf.reduce_sum(sizes[: context.replica_id_in_sync_group])


def num_replicas() -> int:
    """Number of replicas that take the running step together.

    Gradients are summed over them, so that each contributes its loss divided by it.
    """
    return tf.distribute.get_strategy().num_replicas_in_sync


def has_workers(strategy: tf.distribute.Strategy) -> bool:
    """Whether several processes train together.

    Args:
        strategy: what trains.
    """
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and strategy.extended._in_multi_worker_mode()
    )


def local_share(batch: Any, strategy: tf.distribute.Strategy) -> Any:
    """What the first replica of this process gets of a batch.

    Args:
        batch: nested tensors or values of all replicas.
        strategy: what shared the batch out.
    """
    return keras.tree.map_structure(
        lambda value: strategy.experimental_local_results(value)[0], batch
    )
