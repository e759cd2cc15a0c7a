"""What a training step with CCP costs beyond a cheaper one.

Two models take steps in alternation in one process, so that a change of the machine's
speed meets both alike; the ratio of the medians is what counts. Peak memory is that of
a process of its own for each model.
"""

import argparse
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from measuring import (
    alternate,
    arguments,
    in_new_process,
    medians,
    ratio,
    report,
    resident_megabytes,
)

from keras_ccp import CCPModel, build_embedder
from keras_ccp.backbones import resnet20_v2

# Classes and proxies of each: of CCP and of what it is compared with.
SIZES = [((10, 4), (10, 0)), ((100, 8), (100, 0)), ((11_318, 4), (100, 8))]
COLUMNS = {
    "ccp": "classes x proxies:",
    "base": "against:",
    "ccp_ms": "ms:.1f",
    "base_ms": "against ms:.1f",
    "ratio_of_medians": "ratio of medians:.3f",
    "median_of_ratios": "median of ratios:.3f",
    "peak_megabytes": "peak above the other MB:.0f",
    "peak_over_proxies": "/ its proxies:.1f",
}


def make_step(
    backbone: keras.Model, size: tuple[int, int], options: argparse.Namespace
) -> Callable[[], None]:
    """A function that takes one step, with lambda active, and waits for its end.

    It runs on all devices of the strategy in whose scope it is made, `options.batch`
    images on each.
    """
    keras.utils.set_random_seed(0)
    model = CCPModel(build_embedder(backbone, embedding_dim=128), *size)
    optimizer = keras.optimizers.Adam(1e-3)
    model.compile(optimizer, options.loss, jit_compile=options.jit)
    if model.proxies_per_class:
        model.take_snapshot()
    strategy = tf.distribute.get_strategy()
    batch = options.batch * strategy.num_replicas_in_sync
    shape = (batch, *backbone.input_shape[1:])
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    labels = np.arange(batch, dtype="int32") // 4 % model.num_classes
    batches = tf.data.Dataset.from_tensors((images, labels)).repeat().prefetch(2)
    data = iter(strategy.experimental_distribute_dataset(batches))
    model.make_train_function()
    return lambda: np.asarray(model.train_function(data)["loss"])


def measure(
    ccp: tuple[int, int], base: tuple[int, int], options: argparse.Namespace
) -> dict:
    """Times steps of two models, of (classes, proxies of each), in alternation."""
    steps = {
        name: make_step(resnet20_v2(), size, options)
        for name, size in (("ccp", ccp), ("base", base))
    }
    times = alternate(steps, options.rounds, warm_up=5)["seconds"]
    seconds = medians(times)
    row = {
        "ccp": "{} x {}".format(*ccp),
        "base": "{} x {}".format(*base),
        "ccp_ms": 1e3 * seconds["ccp"],
        "base_ms": 1e3 * seconds["base"],
        "ratio_of_medians": seconds["ccp"] / seconds["base"],
        "median_of_ratios": ratio(times, "ccp", "base"),
    }
    if base[1]:
        peaks = [in_new_process(peak_memory, size, options) for size in (ccp, base)]
        row["peak_megabytes"] = peaks[0] - peaks[1]
        proxies = ccp[0] * ccp[1] * 128 * 4 / 2**20
        row["peak_over_proxies"] = row["peak_megabytes"] / proxies
    return row


def peak_memory(size: tuple[int, int], options: argparse.Namespace) -> float:
    """Peak resident MB of this process once it has taken ten steps."""
    step = make_step(resnet20_v2(), size, options)
    for _ in range(10):
        step()
    return resident_megabytes("VmHWM")


def main() -> None:
    options = arguments(
        __doc__, rounds=200, batch=32, loss="multi_similarity", jit=False
    )
    rows = [measure(ccp, base, options) for ccp, base in SIZES]
    name = f"step_time, {options.loss}, XLA {'on' if options.jit else 'off'}"
    report(name, rows, COLUMNS, options.out)


if __name__ == "__main__":
    main()
