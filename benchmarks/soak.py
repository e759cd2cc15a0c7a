"""Whether memory stays flat over 200 projections of a training.

A small embedder is trained for real; each evaluation ends in a projection, whatever
MAP@R says. The resident memory after 20 of them (`--settled`), when TensorFlow has
taken what it needs, is compared with that at the end.
"""

import gc
import time

import keras
import numpy as np
from measuring import arguments, report, resident_megabytes

from keras_ccp import CCPCallback, CCPModel, balanced_batches, build_embedder
from keras_ccp.backbones import small_cnn
from keras_ccp.datasets import Dataset

COLUMNS = {
    "projections": "projections:d",
    "early_megabytes": "RSS after 20 MB:.1f",
    "late_megabytes": "RSS at the end MB:.1f",
    "growth_megabytes": "growth MB:.1f",
    "kilobytes_per_projection": "kB a projection:.1f",
    "seconds_per_projection": "s a projection:.2f",
}


def measure(projections: int, settled: int) -> dict:
    """Resident memory over a training with a projection in each epoch."""
    keras.utils.set_random_seed(0)
    labels = np.arange(800) // 10
    images = np.random.default_rng(0).integers(0, 256, (800, 32, 32, 3), np.uint8)
    training, validation = Dataset(images, labels).split_classes(60)
    embedder = build_embedder(small_cnn(), embedding_dim=64)
    model = CCPModel(embedder, training.num_classes, 4)
    model.compile(keras.optimizers.Adam(1e-4), "contrastive")
    callback = CCPCallback(
        training, validation, patience=10**6, stop_patience=10**6, seed=0
    )
    megabytes = []

    def project(epoch, logs):
        callback.project()
        gc.collect()
        megabytes.append(resident_megabytes())

    start = time.perf_counter()
    model.fit(
        balanced_batches(training, 8, 4, seed=0),
        steps_per_epoch=2,
        epochs=projections,
        callbacks=[callback, keras.callbacks.LambdaCallback(on_epoch_end=project)],
        verbose=0,
    )
    growth = megabytes[-1] - megabytes[settled - 1]
    return {
        "projections": callback.num_projections,
        "early_megabytes": megabytes[settled - 1],
        "late_megabytes": megabytes[-1],
        "growth_megabytes": growth,
        "kilobytes_per_projection": 1024 * growth / (projections - settled),
        "seconds_per_projection": (time.perf_counter() - start) / projections,
        "megabytes": megabytes,
    }


def main() -> None:
    options = arguments(__doc__, projections=200, settled=20)
    results = [measure(options.projections, options.settled)]
    report("soak", results, COLUMNS, options.out)


if __name__ == "__main__":
    main()
