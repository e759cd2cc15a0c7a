"""Strategies: on which devices and machines an experiment trains."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import keras
import tensorflow as tf

from keras_ccp.config_sections import DistributionConfig
from keras_ccp.distribute import has_workers


def make_strategy(config: DistributionConfig) -> tf.distribute.Strategy:
    """Makes what shares each batch out over devices.

    To be called before TensorFlow has begun to compute: it then takes up the devices
    as they are.

    Args:
        config: section `distribution` of a configuration.

    Returns:
        A `tf.distribute.Strategy`, the default one for one device.

    Raises:
        ValueError: if this machine has not as many devices, or several workers are
            wanted and nothing says where they are.
        RuntimeError: if devices have to be made and TensorFlow has begun already.
    """
    if config.strategy == "mirrored":
        return _mirrored(config.devices)
    if config.strategy == "multi_worker":
        return _multi_worker(config.devices)
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
