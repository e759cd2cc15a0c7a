"""What every test starts from: four CPU devices, fixed seeds, a fresh Keras state."""

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

SEED = 0
GOLDEN = Path(__file__).parent / "golden" / "reference_oracles.npz"

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
