"""What depends on the number of replicas; no other file asks for it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
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


def make_strategy(strategy: str, devices: int | None = None) -> tf.distribute.Strategy:
    """Makes what shares each batch out over devices.

    To be called before TensorFlow has begun to compute: it then takes up the devices
    as they are.

    Args:
        strategy: `"none"`, `"mirrored"` or `"multi_worker"`.
        devices: number of each machine's, `None` for all GPUs.

    Returns:
        A `tf.distribute.Strategy`, the default one for one device.

    Raises:
        ValueError: if this machine has not as many devices, or several workers are
            wanted and nothing says where they are.
        RuntimeError: if devices have to be made and TensorFlow has begun already.
    """
    if strategy == "mirrored":
        return _mirrored(devices)
    if strategy == "multi_worker":
        return _multi_worker(devices)
    return tf.distribute.get_strategy()


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the one that writes files.

    Args:
        strategy: what trains.
    """
    return strategy.extended.should_checkpoint


@contextlib.contextmanager
def writable(directory: Path, strategy: tf.distribute.Strategy) -> Iterator[Path]:
    """The directory itself for the chief, one that vanishes for the other workers.

    They have to save what the chief saves, since some weights are averaged over all
    workers when they are read.

    Args:
        directory: where the chief writes; made if it is missing.
        strategy: what trains.
    """
    if is_chief(strategy):
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
    else:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)


def wait_for_workers(strategy: tf.distribute.Strategy) -> None:
    """Returns once every worker has called it.

    Args:
        strategy: what trains.
    """

    @tf.function
    def meet():
        return strategy.reduce("SUM", strategy.run(lambda: tf.ones(())), axis=None)

    meet()


@contextlib.contextmanager
def lost_workers(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Says in plain words that another worker is gone.

    Args:
        strategy: what trains.

    Raises:
        ConnectionError: if TensorFlow reports that workers cannot be reached.
    """
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        if not has_workers(strategy):
            raise
        raise ConnectionError(
            "Another worker has ended or cannot be reached. Start all workers again, "
            "with resume=True or --resume: they go on from the last evaluation. "
            f"Received: {str(error).splitlines()[0]}"
        ) from error


def synchronize_batch_norm(model: keras.Model) -> None:
    """Lets batch norm see the whole batch, not the share of its replica.

    Args:
        model: model whose layers are changed, before its first step.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True


def _mirrored(devices: int | None) -> tf.distribute.Strategy:
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    if num_gpus and (devices or 1) > num_gpus:
        raise ValueError(
            "`distribution.devices` must not be more than the GPUs of this machine. "
            f"Received: devices={devices}, with {num_gpus} GPUs"
        )
    if num_gpus:
        return tf.distribute.MirroredStrategy(
            [f"GPU:{i}" for i in range(devices or num_gpus)]
        )
    devices = devices or 1
    _divide_cpu(devices)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(devices)],
        # Collective operations are for several GPUs, and two strategies of a process
        # would share their keys.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def _divide_cpu(devices: int) -> None:
    """Makes logical devices of the CPU: they stand for GPUs, and are no faster."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    made = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(made) >= devices:
        return
    parts = [tf.config.LogicalDeviceConfiguration()] * devices
    try:
        tf.config.set_logical_device_configuration(cpu, parts)
    except RuntimeError:
        raise RuntimeError(
            "The CPU must be divided before TensorFlow has begun to compute: train in "
            "a new process, or call tf.config.set_logical_device_configuration at its "
            f"start. Received: devices={devices}, where TensorFlow has begun with "
            f"{len(made)}"
        ) from None


def _multi_worker(devices: int | None) -> tf.distribute.Strategy:
    if "TF_CONFIG" not in os.environ:
        raise ValueError(
            '`distribution.strategy` "multi_worker" needs the environment variable '
            "TF_CONFIG, which says where the workers are; see docs/distribution.md. "
            "Received: none"
        )
    gpus = tf.config.list_physical_devices("GPU")
    if devices is not None and devices > max(1, len(gpus)):
        raise ValueError(
            "`distribution.devices` must not be more than the GPUs of each machine. "
            f"Received: devices={devices}, with {len(gpus)} GPUs"
        )
    if devices is not None and gpus:
        tf.config.set_visible_devices(gpus[:devices], "GPU")
    return tf.distribute.MultiWorkerMirroredStrategy()
