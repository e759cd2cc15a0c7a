"""What a training step with CCP costs beyond a cheaper one.

Two models take steps in alternation in one process, so that a change of the machine's
speed meets both alike; the ratio of the medians is what counts. Peak memory is that of
a process of its own for each model.
"""

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from keras_ccp import CCPModel, build_embedder
from keras_ccp.backbones import resnet20_v2


def make_model(
    num_classes: int, proxies_per_class: int, loss: str, jit_compile: bool
) -> CCPModel:
    """A compiled model, with lambda active where it has proxies."""
    keras.utils.set_random_seed(0)
    embedder = build_embedder(resnet20_v2(), embedding_dim=128)
    model = CCPModel(embedder, num_classes, proxies_per_class)
    model.compile(
        keras.optimizers.Adam(1e-3),
        loss,
        jit_compile=jit_compile,
    )
    if proxies_per_class:
        model.take_snapshot()
    return model


def make_step(model: CCPModel, num_classes: int, batch: int) -> Callable[[], None]:
    """A function that takes one training step and waits for its end."""
    rng = np.random.default_rng(0)
    images = tf.constant(rng.integers(0, 256, (batch, 32, 32, 3), np.uint8))
    labels = tf.constant(np.arange(batch, dtype="int32") // 4 % num_classes)
    model.make_train_function()
    data = iter(tf.data.Dataset.from_tensors((images, labels)).repeat().prefetch(2))
    return lambda: float(model.train_function(data)["loss"])


def measure(sizes: dict[str, tuple[int, int]], arguments: argparse.Namespace) -> dict:
    """Times steps of two models, of (classes, proxies of each), in alternation."""
    steps = {}
    for name, (num_classes, proxies) in sizes.items():
        model = make_model(num_classes, proxies, arguments.loss, arguments.jit)
        steps[name] = make_step(model, num_classes, arguments.batch)
    seconds = {name: [] for name in steps}
    for round_ in range(arguments.rounds + 5):
        # The order alternates too, against an advantage of going first.
        for name in sorted(steps, reverse=bool(round_ % 2)):
            start = time.perf_counter()
            steps[name]()
            if round_ >= 5:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    pairs = zip(seconds["ccp"], seconds["base"], strict=True)
    return {
        **{f"{name}_classes_x_proxies": size for name, size in sizes.items()},
        **{f"{name}_ms": 1e3 * median for name, median in medians.items()},
        "ratio_of_medians": medians["ccp"] / medians["base"],
        "median_of_ratios": statistics.median(c / p for c, p in pairs),
    }


def peak_memory(num_classes: int, proxies: int, arguments: argparse.Namespace) -> float:
    """Peak resident MB of a process that builds one model and takes ten steps."""
    command = [sys.executable, __file__, "--batch", str(arguments.batch)]
    command += ["--loss", arguments.loss, "--peak-of", str(num_classes), str(proxies)]
    if arguments.jit:
        command.append("--jit")
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.split()[-1])


def print_peak(arguments: argparse.Namespace) -> None:
    num_classes, proxies = arguments.peak_of
    model = make_model(num_classes, proxies, arguments.loss, arguments.jit)
    step = make_step(model, num_classes, arguments.batch)
    for _ in range(10):
        step()
    # Not ru_maxrss, which starts at what the parent process had.
    status = pathlib.Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--loss", default="multi_similarity")
    parser.add_argument("--jit", action="store_true", help="compile steps by XLA")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    parser.add_argument("--peak-of", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        print_peak(arguments)
        return
    results = [
        measure({"base": base, "ccp": ccp}, arguments)
        for base, ccp in (
            ((10, 0), (10, 4)),
            ((100, 0), (100, 8)),
            ((100, 8), (11_318, 4)),
        )
    ]
    megabytes = 11_318 * 4 * 128 * 4 / 2**20
    extra = peak_memory(11_318, 4, arguments) - peak_memory(100, 8, arguments)
    print(
        f"{platform.machine()}, TensorFlow {tf.__version__}, Keras "
        f"{keras.__version__}, {arguments.loss}, XLA {'on' if arguments.jit else 'off'}"
    )
    print("classes x proxies          ms          ratio of medians   median of ratios")
    for r in results:
        sides = [
            f"{r[f'{side}_classes_x_proxies'][0]} x {r[f'{side}_classes_x_proxies'][1]}"
            for side in ("ccp", "base")
        ]
        print(
            f"{' / '.join(sides):<24}{r['ccp_ms']:>8.1f} /{r['base_ms']:>7.1f}"
            f"{r['ratio_of_medians']:>12.3f}{r['median_of_ratios']:>19.3f}"
        )
    print(
        f"peak memory of 11318 x 4 above 100 x 8: {extra:.0f} MB, "
        f"{extra / megabytes:.1f} times its proxies ({megabytes:.1f} MB)"
    )
    if arguments.out:
        report = {"steps": results, "peak_over_proxies": extra / megabytes}
        arguments.out.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
