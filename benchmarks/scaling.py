"""Step time of BN-Inception: CCP against pairwise, on one device and on several.

Each device gets a batch of its own, so that the images of a step grow with the devices;
perfect scaling keeps the step time. Pairwise and CCP take steps in alternation. Without
GPUs the devices are parts of the CPU, which are no faster together: this shows only
that everything runs. The paper has 105 ms a step against 97 (batches of 32).
"""

import argparse
import multiprocessing
import pathlib
from collections.abc import Callable

from measuring import alternate, medians, ratio, report

COLUMNS = {
    "devices": "devices:d",
    "kind": "kind:",
    "batch": "images a step:d",
    "pairwise_ms": "pairwise ms:.1f",
    "ccp_ms": "CCP ms:.1f",
    "ratio": "CCP / pairwise:.3f",
    "images_per_second": "CCP images/s:.0f",
    "efficiency": "efficiency:.2f",
}


def make_step(
    strategy, proxies: int, arguments: argparse.Namespace
) -> Callable[[], None]:
    """A function that takes one training step on all devices and waits for its end."""
    import keras
    import numpy as np
    import tensorflow as tf

    from keras_ccp import CCPModel, build_embedder
    from keras_ccp.backbones import bn_inception

    keras.utils.set_random_seed(0)
    shape = (arguments.size, arguments.size, 3)
    with strategy.scope():
        embedder = build_embedder(bn_inception(shape), embedding_dim=128)
        model = CCPModel(embedder, arguments.classes, proxies)
        model.compile(
            keras.optimizers.Adam(1e-5), arguments.loss, jit_compile=arguments.jit
        )
        if proxies:
            model.take_snapshot()
    batch = arguments.batch * strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)
    images = tf.constant(rng.integers(0, 256, (batch, *shape), np.uint8))
    labels = tf.constant(np.arange(batch, dtype="int32") // 4 % arguments.classes)
    batches = tf.data.Dataset.from_tensors((images, labels)).repeat().prefetch(2)
    data = iter(strategy.experimental_distribute_dataset(batches))
    model.make_train_function()
    return lambda: np.asarray(model.train_function(data)["loss"])


def measure(devices: int, arguments: argparse.Namespace) -> dict:
    """Milliseconds of steps on so many devices, in a process that has begun nothing."""
    import keras
    import tensorflow as tf

    from keras_ccp.distribute import make_strategy

    keras.config.set_dtype_policy(arguments.policy)
    kind = "mirrored" if devices > 1 else "none"
    strategy = make_strategy(kind, devices if devices > 1 else None)
    calls = {
        "pairwise": make_step(strategy, 0, arguments),
        "ccp": make_step(strategy, arguments.proxies, arguments),
    }
    times = alternate(calls, arguments.rounds, warm_up=5)["seconds"]
    seconds = medians(times)
    batch = arguments.batch * devices
    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    return {
        "devices": devices,
        "kind": details.get("device_name", "GPU" if gpus else "CPU"),
        "batch": batch,
        "policy": arguments.policy,
        "pairwise_ms": 1e3 * seconds["pairwise"],
        "ccp_ms": 1e3 * seconds["ccp"],
        "ratio": ratio(times, "ccp", "pairwise"),
        "images_per_second": batch / seconds["ccp"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1])
    parser.add_argument("--batch", type=int, default=32, help="images a device")
    parser.add_argument("--size", type=int, default=227, help="side of an image")
    parser.add_argument("--classes", type=int, default=98)
    parser.add_argument("--proxies", type=int, default=8, help="of each class")
    parser.add_argument("--loss", default="contrastive")
    parser.add_argument("--policy", default="float32", help="of Keras, for dtypes")
    parser.add_argument("--jit", action="store_true", help="compile steps by XLA")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args()
    results = []
    for devices in arguments.devices:
        # A process each, since devices are divided before TensorFlow begins.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results.append(pool.apply(measure, (devices, arguments)))
    rates = [row["images_per_second"] / row["devices"] for row in results]
    for row, rate in zip(results, rates, strict=True):
        row["efficiency"] = rate / rates[0]
    report("scaling", results, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
