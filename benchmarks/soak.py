"""Whether memory stays flat over 200 switches of a training.

A small embedder is trained for real; after each evaluation a switch is made, whatever
MAP@R says. The resident memory after 20 switches, when TensorFlow has taken what it
needs, is compared with that at the end.
"""

import argparse
import gc
import pathlib
import time

import keras
import numpy as np
from measuring import report, resident_megabytes

from keras_ccp import CCPCallback, CCPModel, balanced_batches, build_embedder
from keras_ccp.backbones import small_cnn
from keras_ccp.datasets import Dataset

COLUMNS = {
    "switches": "switches:d",
    "early_megabytes": "RSS after 20 MB:.1f",
    "late_megabytes": "RSS at the end MB:.1f",
    "growth_megabytes": "growth MB:.1f",
    "kilobytes_per_switch": "kB a switch:.1f",
    "seconds_per_switch": "s a switch:.2f",
}


class SwitchAtEachEpoch(keras.callbacks.Callback):
    """Switches after each evaluation and notes the memory."""

    def __init__(self, callback: CCPCallback):
        super().__init__()
        self.callback = callback
        self.megabytes = []

    def on_epoch_end(self, epoch, logs=None):
        self.callback.project()
        gc.collect()
        self.megabytes.append(resident_megabytes())


def measure(switches: int, settled: int) -> dict:
    """Resident memory over a training with a switch in each epoch."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    labels = np.arange(800) // 10
    images = rng.integers(0, 256, (800, 32, 32, 3), np.uint8)
    data = Dataset(images, labels)
    training, validation = data.split_classes(60)
    model = CCPModel(
        build_embedder(small_cnn(), embedding_dim=64), training.num_classes, 4
    )
    model.compile(keras.optimizers.Adam(1e-4), "contrastive")
    callback = CCPCallback(
        training, validation, patience=10**6, stop_patience=10**6, seed=0
    )
    notes = SwitchAtEachEpoch(callback)
    start = time.perf_counter()
    model.fit(
        balanced_batches(training, 8, 4, seed=0),
        steps_per_epoch=2,
        epochs=switches,
        callbacks=[callback, notes],
        verbose=0,
    )
    early, late = notes.megabytes[settled - 1], notes.megabytes[-1]
    return {
        "switches": callback.num_projections,
        "early_megabytes": early,
        "late_megabytes": late,
        "growth_megabytes": late - early,
        "kilobytes_per_switch": 1024 * (late - early) / (switches - settled),
        "seconds_per_switch": (time.perf_counter() - start) / switches,
        "megabytes": notes.megabytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--switches", type=int, default=200)
    parser.add_argument("--settled", type=int, default=20, help="switches before")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args()
    results = [measure(arguments.switches, arguments.settled)]
    report("soak", results, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
