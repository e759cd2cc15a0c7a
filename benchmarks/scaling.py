"""Step time of BN-Inception: CCP against pairwise, on one device and on several.

Each device gets a batch of its own, so that the images of a step grow with the devices;
perfect scaling keeps the step time. Pairwise and CCP take steps in alternation. Without
GPUs the devices are parts of the CPU, which are no faster together: this shows only
that everything runs. The paper has 105 ms a step against 97 (batches of 32).
"""

import argparse

import keras
import tensorflow as tf
from measuring import alternate, arguments, in_new_process, medians, ratio, report
from step_time import make_step

from keras_ccp.backbones import bn_inception
from keras_ccp.distribute import make_strategy

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


def measure(devices: int, options: argparse.Namespace) -> dict:
    """Milliseconds of steps on so many devices."""
    keras.config.set_dtype_policy(options.policy)
    strategy = tf.distribute.get_strategy()
    if devices > 1:
        strategy = make_strategy("mirrored", devices)
    with strategy.scope():
        steps = {
            name: make_step(
                bn_inception((options.size, options.size, 3)),
                (options.classes, proxies),
                options,
            )
            for name, proxies in (("pairwise", 0), ("ccp", options.proxies))
        }
    times = alternate(steps, options.rounds, warm_up=5)["seconds"]
    seconds = medians(times)
    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    return {
        "devices": devices,
        "kind": details.get("device_name", "GPU" if gpus else "CPU"),
        "batch": options.batch * devices,
        "policy": options.policy,
        "pairwise_ms": 1e3 * seconds["pairwise"],
        "ccp_ms": 1e3 * seconds["ccp"],
        "ratio": ratio(times, "ccp", "pairwise"),
        "images_per_second": options.batch * devices / seconds["ccp"],
    }


def main() -> None:
    options = arguments(
        __doc__,
        devices=[1],
        batch=32,
        size=227,
        classes=98,
        proxies=8,
        loss="contrastive",
        policy="float32",
        jit=False,
        rounds=50,
    )
    # A process each, since devices are divided before TensorFlow begins.
    rows = [in_new_process(measure, devices, options) for devices in options.devices]
    for row in rows:
        rate = row["images_per_second"] / row["devices"]
        row["efficiency"] = rate / (rows[0]["images_per_second"] / rows[0]["devices"])
    report("scaling", rows, COLUMNS, options.out)


if __name__ == "__main__":
    main()
