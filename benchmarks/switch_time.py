"""What a switch of CCPCallback costs at SOP's size, beyond embedding the pool.

`callback.project()` restores the best weights, freezes a copy, draws pool images,
embeds them, chooses new proxies among them and resets the optimizer's slots. Here the
embedder is BN-Inception, and its forward passes are left out: embeddings that were made
before take their place. What is left must be small beside them.
"""

import argparse
import pathlib
import statistics
import time

import keras
import numpy as np
from measuring import peak_megabytes, report

from keras_ccp import CCPCallback, CCPModel, build_embedder
from keras_ccp.backbones import bn_inception
from keras_ccp.datasets import Dataset

COLUMNS = {
    "classes": "classes:d",
    "pool_size": "b:d",
    "proxies": "proxies:d",
    "switch_seconds": "switch s:.3f",
    "fastest_seconds": "fastest s:.3f",
    "processor_seconds": "processor s:.3f",
    "forward_seconds": "forward passes s:.0f",
    "ratio": "/ forward passes:.4f",
    "peak_megabytes": "peak MB:.0f",
}


def make_callback(
    num_classes: int, pool_size: int, proxies: int, dim: int = 128
) -> CCPCallback:
    """A callback after the first evaluation of its first problem."""
    keras.utils.set_random_seed(0)
    embedder = build_embedder(bn_inception(), embedding_dim=dim)
    model = CCPModel(embedder, num_classes, proxies)
    model.compile(keras.optimizers.Adam(1e-5), "contrastive")
    rng = np.random.default_rng(0)
    made = rng.standard_normal((num_classes * pool_size, dim), np.float32)
    # Of the second problem: the embedder has moved on.
    moved = made + 0.5 * rng.standard_normal(made.shape, np.float32)
    made, moved = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (made, moved))

    def predict(batches, verbose=0):
        # `batches` is set up and not read: its files are not there.
        if int(batches.cardinality()) == 2:  # validation
            return made[:200]
        return (made, moved)[int(model.num_projections.numpy()) % 2]

    model.predict = predict
    labels = np.arange(num_classes * pool_size) // pool_size
    callback = CCPCallback(
        Dataset([f"pool/{i}.jpg" for i in range(len(labels))], labels),
        Dataset([f"validation/{i}.jpg" for i in range(200)], np.arange(200) // 2),
        pool_size,
        seed=0,
    )
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_end(0, {})
    return callback


def forward_seconds(embedder: keras.Model, images: int) -> float:
    """Seconds that the embedder takes for so many images, from a batch of 32."""
    batch = np.zeros((32, *embedder.input_shape[1:]), np.uint8)
    embedder.predict_on_batch(batch)
    start = time.perf_counter()
    embedder.predict_on_batch(batch)
    return (time.perf_counter() - start) / len(batch) * images


def measure(num_classes: int, pool_size: int, proxies: int, rounds: int) -> dict:
    """Seconds of switches, and what the forward passes would take."""
    callback = make_callback(num_classes, pool_size, proxies)
    callback.project()
    seconds, processor = [], []
    for epoch in range(1, rounds + 1):
        callback.on_epoch_end(epoch, {})  # the best of the problem, to be restored
        start, processor_start = time.perf_counter(), time.process_time()
        callback.project()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - processor_start)
    callback.on_epoch_end(rounds + 1, {})
    median = statistics.median(seconds)
    forward = forward_seconds(callback.model.embedder, num_classes * pool_size)
    return {
        "classes": num_classes,
        "pool_size": pool_size,
        "proxies": proxies,
        "switch_seconds": median,
        "fastest_seconds": min(seconds),
        "processor_seconds": statistics.median(processor),
        "forward_seconds": forward,
        "ratio": median / forward,
        "peak_megabytes": peak_megabytes(callback.switch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--classes", type=int, default=11318)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args()
    results = [measure(arguments.classes, 7, 4, arguments.rounds)]
    report("switch_time", results, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
