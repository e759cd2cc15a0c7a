"""Replicas, devices and workers: no other file asks how many there are."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import keras
import tensorflow as tf

# ==== Inside a step ====


def sum_over_replicas(tensor: tf.Tensor) -> tf.Tensor:
    """Sums a count over the replicas of the running step; a constant for gradients.

    It is meant for divisors: a gradient that flowed through the exchange would be
    counted once per replica. Whether there is anything to exchange is decided while
    tracing, so a step on one replica holds no exchange and still compiles with XLA.
    """
    context = tf.distribute.get_replica_context()
    tensor = tf.stop_gradient(tensor)
    if context is None or context.num_replicas_in_sync == 1:
        return tensor
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tensor)


def gather_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Rows that all replicas hold together, in the order of the whole batch.

    Replicas may hold different numbers of rows. A gradient flows back to the replica
    that a row came from.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tensor
    return context.all_gather(tensor, axis=0)


def gather_batch(tensor: tf.Tensor) -> tf.Tensor:
    """As `gather_rows`, this replica first, then those after it and those before it.

    Row `i` of the result is row `i` of `tensor`, so pair `(i, i)` stays that of a
    sample with itself.
    """
    rows = gather_rows(tensor)
    if rows is tensor:
        return tensor
    context = tf.distribute.get_replica_context()
    sizes = context.all_gather(tf.shape(tensor)[:1], axis=0)
    before = tf.reduce_sum(sizes[: context.replica_id_in_sync_group])
    return tf.roll(rows, -before, axis=0)


def num_replicas() -> int:
    """Number of replicas that take the running step together.

    Gradients are summed over them, so that each contributes its loss divided by it.
    """
    return tf.distribute.get_strategy().num_replicas_in_sync


# ==== Around the training ====


def has_workers(strategy: tf.distribute.Strategy) -> bool:
    """Whether several processes train together."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    return bool(strategy.cluster_resolver.cluster_spec())


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the one that writes files."""
    return strategy.extended.should_checkpoint


@contextlib.contextmanager
def writable(directory: Path, strategy: tf.distribute.Strategy) -> Iterator[Path]:
    """The directory itself for the chief, one that vanishes for the other workers.

    They have to save what the chief saves, since some weights are averaged over all
    workers when they are read.
    """
    if is_chief(strategy):
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
    else:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)


def wait_for_workers(strategy: tf.distribute.Strategy) -> None:
    """Returns once every worker has called it."""
    if not has_workers(strategy):
        return

    @tf.function
    def meet():
        return strategy.reduce("SUM", strategy.run(lambda: tf.ones(())), axis=None)

    meet()


@contextlib.contextmanager
def lost_workers(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Says in plain words that another worker is gone, by a `ConnectionError`."""
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        if not has_workers(strategy):
            raise
        raise ConnectionError(
            f"Another worker has ended or cannot be reached: {error.message[:200]}\n"
            "Start all workers again with --resume; they go on after the last epoch"
        ) from error


def synchronize_batch_norm(model: keras.Model) -> None:
    """Lets batch norm see the whole batch, not the share of its replica."""
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
        elif isinstance(layer, keras.Model):
            synchronize_batch_norm(layer)


# ==== Strategies ====


def make_strategy(strategy: str, devices: int | None) -> tf.distribute.Strategy:
    """Strategy "none", "mirrored" or "multi_worker", on all GPUs of a machine or fewer.

    To be called before TensorFlow has begun to compute: it then takes up the devices
    as they are. Without a GPU, "mirrored" divides the CPU: its parts stand for GPUs,
    and are no faster.
    """
    if strategy == "none":
        return tf.distribute.get_strategy()
    gpus = tf.config.list_physical_devices("GPU")
    num_devices = devices or max(1, len(gpus))
    if strategy == "multi_worker":
        if "TF_CONFIG" not in os.environ:
            raise ValueError(
                '`strategy` "multi_worker" needs the environment variable TF_CONFIG. '
                "Received: none\nIt says where the workers are: docs/distribution.md"
            )
        tf.config.set_visible_devices(gpus[:num_devices], "GPU")
        return tf.distribute.MultiWorkerMirroredStrategy()
    if gpus:
        names = [f"GPU:{i}" for i in range(num_devices)]
        return tf.distribute.MirroredStrategy(names)
    (cpu,) = tf.config.list_physical_devices("CPU")
    if len(tf.config.get_logical_device_configuration(cpu) or [None]) < num_devices:
        parts = [tf.config.LogicalDeviceConfiguration()] * num_devices
        tf.config.set_logical_device_configuration(cpu, parts)
    # Collective operations are for several GPUs, and two strategies of a process
    # would share their keys.
    to_one = tf.distribute.ReductionToOneDevice()
    names = [f"CPU:{i}" for i in range(num_devices)]
    return tf.distribute.MirroredStrategy(names, cross_device_ops=to_one)
