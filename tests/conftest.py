"""What every test starts from: four CPU devices, fixed seeds, a fresh Keras state."""

import gc
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Tests run in two processes (pyproject.toml), which share the cores.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

from keras_ccp import CCPModel, build_embedder  # noqa: E402
from keras_ccp.datasets import Dataset  # noqa: E402

SEED = 0
GOLDEN = Path(__file__).parent / "golden" / "reference_oracles.npz"

# What is imported stays: collections need not walk it, which takes seconds at times.
gc.freeze()
# Before any op: a started TensorFlow refuses it. Distribution tests use two to four.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 4,
)


@pytest.fixture(autouse=True)
def _fresh_keras_state():
    """No policy, graph state or random number leaks from one test into the next."""
    policy = keras.config.dtype_policy()
    keras.utils.set_random_seed(SEED)
    yield
    keras.config.set_dtype_policy(policy)
    # Without the garbage collection, which takes 0.2 s a test.
    keras.backend.clear_session(free_memory=False)


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    """Inputs `in/...` and outputs `out/...` of the paper's own implementation."""
    with np.load(GOLDEN) as arrays:
        values = {name: arrays[name] for name in arrays.files}
    for value in values.values():
        value.flags.writeable = False  # shared by all tests
    return values


# ==== What tests of several files start from ====


def pair_problem(seed=0):
    """Labels and vectors of 12 samples and 9 references.

    Samples are of classes 0-4, one of them alone and one, 2, without a reference;
    references are of 0-5: 1, 3, 0, 2, 1, 2.
    """
    rng = np.random.default_rng(seed)
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4], "int32")
    references = np.array([5, 1, 3, 1, 0, 5, 3, 4, 1], "int32")
    return labels, rng.normal(size=(12, 3)), references, rng.normal(size=(9, 3))


def with_gradients(loss, labels, x, references, r, **kwargs):
    """Rows of a loss, their mean, and its gradients with respect to `x` and `r`."""
    x, r = (tf.convert_to_tensor(vectors) for vectors in (x, r))
    with tf.GradientTape() as tape:
        tape.watch((x, r))
        rows = loss.pairs(labels, x, references, r, **kwargs)
        mean = tf.reduce_mean(rows)
    # A side that the loss does not depend on has gradient 0.
    gradients = tape.gradient(mean, (x, r), unconnected_gradients="zero")
    return rows, mean, [tf.convert_to_tensor(gradient) for gradient in gradients]


def mirrored():
    """Without collective operations, whose keys two strategies would share."""
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def on_replicas(step, *batch):
    """What a step gives on each of two replicas, which get half of the batch."""
    strategy = mirrored()
    batches = tf.data.Dataset.from_tensor_slices(batch).batch(len(batch[0]))
    parts = next(iter(strategy.experimental_distribute_dataset(batches)))
    results = tf.function(strategy.run)(step, args=parts)
    return tf.nest.map_structure(strategy.experimental_local_results, results)


def color_data(num_classes=4, per_class=4):
    """Images of one random colour a class, with noise."""
    rng = np.random.default_rng(0)
    colors = rng.integers(40, 215, (num_classes, 1, 1, 1, 3))
    noise = rng.integers(-30, 30, (num_classes, per_class, 8, 8, 3))
    images = (colors + noise).astype("uint8").reshape(-1, 8, 8, 3)
    return Dataset(images, np.repeat(np.arange(num_classes), per_class))


def small_model(num_classes=4, **kwargs):
    """A network for `color_data` with a convolution, batch norm and a Dense layer."""
    inputs = keras.Input((8, 8, 3), dtype="uint8")
    x = keras.layers.Rescaling(1 / 255)(inputs)
    x = keras.layers.Conv2D(4, 3, activation="relu")(x)
    x = keras.layers.BatchNormalization()(x)
    embedder = build_embedder(keras.Model(inputs, x), embedding_dim=5)
    return CCPModel(embedder, num_classes, **{"proxies_per_class": 2, **kwargs})
