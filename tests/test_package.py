"""The package as it is imported."""

import os
import subprocess
import sys

import pytest

CHANGED = "import keras; keras.backend.backend = lambda: 'jax'; import keras_ccp"


@pytest.mark.parametrize(
    ("backend", "code"),
    # Keras itself stops at a backend that is not installed.
    [("jax", "import keras_ccp"), ("tensorflow", CHANGED)],
    ids=["not installed", "installed"],
)
def test_another_backend_is_refused_at_import(backend, code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.endswith(
        "ImportError: keras_ccp needs the TensorFlow backend of Keras. Received: jax\n"
        "Set KERAS_BACKEND=tensorflow before Keras is imported\n"
    )
