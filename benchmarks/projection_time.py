"""What a projection of CCPCallback costs at SOP's size, beyond embedding the pool.

`callback.project()` restores the best weights, takes a snapshot, draws pool images,
embeds them, chooses new proxies among them and resets the optimizer's slots. Here the
embedder is BN-Inception, and its forward passes are left out: embeddings that were made
before take their place. What is left must be small beside them.
"""

import statistics
import tempfile

import keras
import numpy as np
import tensorflow as tf
from measuring import arguments, peak_megabytes, report, timed

from keras_ccp import CCPCallback, CCPModel, build_embedder
from keras_ccp.backbones import bn_inception
from keras_ccp.datasets import Dataset

DIM, POOL_SIZE, PROXIES = 128, 7, 4
COLUMNS = {
    "classes": "classes:d",
    "pool_size": "b:d",
    "proxies": "proxies:d",
    "projection_seconds": "projection s:.3f",
    "fastest_seconds": "fastest s:.3f",
    "processor_seconds": "processor s:.3f",
    "forward_seconds": "forward passes s:.0f",
    "ratio": "/ forward passes:.4f",
    "peak_megabytes": "peak MB:.0f",
}


def make_callback(num_classes: int) -> CCPCallback:
    """A callback in its first problem, with a model that looks up what it embeds."""
    keras.utils.set_random_seed(0)
    embedder = build_embedder(bn_inception(), embedding_dim=DIM)
    model = CCPModel(embedder, num_classes, PROXIES)
    model.compile(keras.optimizers.Adam(1e-5), "contrastive")
    rng = np.random.default_rng(0)
    made = rng.standard_normal((num_classes * POOL_SIZE, DIM), np.float32)
    # Of the second problem: the embedder has moved on.
    moved = made + 0.5 * rng.standard_normal(made.shape, np.float32)
    made, moved = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (made, moved))

    def predict(batches, verbose=0):
        # `batches` is set up and not read.
        if int(batches.cardinality()) == 2:  # validation
            return made[:200]
        return (made, moved)[int(model.num_projections.numpy()) % 2]

    model.predict = predict
    with tempfile.TemporaryDirectory() as folder:
        pool, validation = f"{folder}/pool.jpg", f"{folder}/validation.jpg"
        for path in (pool, validation):
            image = np.zeros(embedder.input_shape[1:], np.uint8)
            tf.io.write_file(path, tf.io.encode_jpeg(image))
        callback = CCPCallback(
            Dataset([pool] * len(made), np.arange(len(made)) // POOL_SIZE),
            Dataset([validation] * 200, np.arange(200) // 2),
            POOL_SIZE,
            seed=0,
        )
        callback.set_model(model)
        callback.on_train_begin()
    return callback


def measure(num_classes: int, rounds: int) -> dict:
    """Seconds of projections, and what the forward passes would take."""
    callback = make_callback(num_classes)
    callback.project()
    times = []
    for epoch in range(rounds):
        callback.on_epoch_end(epoch, {})  # the best of the problem, to be restored
        times.append(timed(callback.project))
    seconds, processor = zip(*times, strict=True)
    embedder = callback.model.embedder
    batch = np.zeros((32, *embedder.input_shape[1:]), np.uint8)
    embedder.predict_on_batch(batch)
    forward, _ = timed(lambda: embedder.predict_on_batch(batch))
    forward *= num_classes * POOL_SIZE / len(batch)
    callback.on_epoch_end(rounds, {})
    return {
        "classes": num_classes,
        "pool_size": POOL_SIZE,
        "proxies": PROXIES,
        "projection_seconds": statistics.median(seconds),
        "fastest_seconds": min(seconds),
        "processor_seconds": statistics.median(processor),
        "forward_seconds": forward,
        "ratio": statistics.median(seconds) / forward,
        "peak_megabytes": peak_megabytes(callback.project),
    }


def main() -> None:
    options = arguments(__doc__, rounds=10, classes=11318)
    results = [measure(options.classes, options.rounds)]
    report("projection_time", results, COLUMNS, options.out)


if __name__ == "__main__":
    main()
