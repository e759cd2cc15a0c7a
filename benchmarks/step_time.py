"""What a training step with CCP costs beyond the same step with the pairwise loss.

Both models take steps in alternation in one process, so that a change of the
machine's speed meets both alike; the ratio of the medians is what counts.
"""

import argparse
import json
import pathlib
import platform
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

from keras_ccp import CCPModel, build_embedder, losses
from keras_ccp.backbones import resnet20_v2


def make_model(num_classes: int, proxies_per_class: int, jit_compile: bool) -> CCPModel:
    """A compiled model, with lambda active where it has proxies."""
    keras.utils.set_random_seed(0)
    embedder = build_embedder(resnet20_v2(), embedding_dim=128)
    model = CCPModel(embedder, num_classes, proxies_per_class)
    model.compile(
        keras.optimizers.Adam(1e-3),
        losses.MultiSimilarityLoss(),
        jit_compile=jit_compile,
    )
    if proxies_per_class:
        model.take_snapshot()
    return model


def measure(num_classes: int, proxies: int, batch: int, rounds: int, jit: bool) -> dict:
    """Times steps of a CCP model and of a pairwise one in alternation."""
    rng = np.random.default_rng(0)
    images = tf.constant(rng.integers(0, 256, (batch, 32, 32, 3), np.uint8))
    labels = tf.constant(np.arange(batch, dtype="int32") // 4 % num_classes)
    steps = {}
    for name, count in (("pairwise", 0), ("ccp", proxies)):
        model = make_model(num_classes, count, jit)
        model.make_train_function()
        data = tf.data.Dataset.from_tensors((images, labels)).repeat().prefetch(2)
        steps[name] = (model.train_function, iter(data))
    seconds = {name: [] for name in steps}
    for round_ in range(rounds + 5):
        # The order alternates too, against an advantage of going first.
        for name in sorted(steps, reverse=bool(round_ % 2)):
            step, iterator = steps[name]
            start = time.perf_counter()
            logs = step(iterator)
            float(logs["loss"])
            if round_ >= 5:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    pairs = zip(seconds["ccp"], seconds["pairwise"], strict=True)
    return {
        "classes": num_classes,
        "proxies_per_class": proxies,
        "batch": batch,
        "jit_compile": jit,
        "pairwise_ms": 1e3 * medians["pairwise"],
        "ccp_ms": 1e3 * medians["ccp"],
        "ratio_of_medians": medians["ccp"] / medians["pairwise"],
        "median_of_ratios": statistics.median(c / p for c, p in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args()
    results = [
        measure(classes, proxies, arguments.batch, arguments.rounds, jit)
        for classes, proxies, jit in ((10, 4, False), (100, 8, False))
    ]
    print(
        f"{platform.machine()}, TensorFlow {tf.__version__}, Keras {keras.__version__}"
    )
    print(
        "classes x proxies   pairwise ms   CCP ms   ratio of medians   median of ratios"
    )
    for r in results:
        print(
            f"{r['classes']:>7} x {r['proxies_per_class']:<9}{r['pairwise_ms']:>10.2f}"
            f"{r['ccp_ms']:>10.2f}{r['ratio_of_medians']:>16.3f}"
            f"{r['median_of_ratios']:>19.3f}"
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
