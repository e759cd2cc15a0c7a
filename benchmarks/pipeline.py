"""Throughput of the training pipeline over image files against a bare tf.data loop.

The bare loop reads the same files, decodes boxes of the same distribution that were
drawn beforehand, resizes them and batches them: no sampling of classes, no random
numbers, no flips, no check of EXIF. Both run in alternation in one process, so that a
change of the machine's speed meets both alike; the ratio is what counts.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

import numpy as np
import tensorflow as tf
from measuring import report

from keras_ccp.datasets import Dataset
from keras_ccp.images import random_box
from keras_ccp.pipeline import balanced_batches, mlrc_augmentation

CLASSES, PER_CLASS = 16, 16
CLASSES_PER_BATCH, SAMPLES_PER_CLASS = 8, 4
SIZE = 227
BATCH = CLASSES_PER_BATCH * SAMPLES_PER_CLASS
COLUMNS = {
    "image": "image:",
    "kilobytes": "kB:.0f",
    "bare_images_per_second": "bare images/s:.0f",
    "balanced_images_per_second": "balanced_batches images/s:.0f",
    "ratio_of_medians": "ratio of medians:.3f",
    "median_of_ratios": "median of ratios:.3f",
}


def write_images(folder: pathlib.Path, width: int, height: int) -> list[str]:
    """JPEG files with edges and grain of about the size of photographs, 60 kB each."""
    rng = np.random.default_rng(0)
    paths = []
    for i in range(CLASSES * PER_CLASS):
        coarse = rng.integers(0, 256, (12, 15, 3)).astype(np.float32)
        pixels = tf.image.resize(coarse, (height, width), "bicubic").numpy()
        pixels += rng.normal(0, 6, (height, width, 3))
        pixels = tf.constant(pixels.clip(0, 255).astype(np.uint8))
        paths.append(str(folder / f"{i:04}.jpg"))
        tf.io.write_file(paths[-1], tf.io.encode_jpeg(pixels, quality=90))
    return paths


def bare_loop(paths: list[str], width: int, height: int) -> tf.data.Dataset:
    """Read, decode a box, resize, batch."""
    noise = np.random.default_rng(0).random((4096, 22), np.float32)
    boxes = np.stack([random_box(row, [height, width], 0.16) for row in noise])
    order = np.random.default_rng(1).permutation(4096) % len(paths)
    pairs = tf.data.Dataset.from_tensor_slices((np.array(paths)[order], boxes))

    def load(path: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
        encoded = tf.io.read_file(path)
        crop = tf.image.decode_and_crop_jpeg(encoded, box, channels=3)
        return tf.image.resize(crop, (SIZE, SIZE))

    return (
        pairs.repeat()
        .map(load, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(BATCH)
        .prefetch(tf.data.AUTOTUNE)
    )


def measure(width: int, height: int, rounds: int, batches: int) -> dict:
    """Times both pipelines in alternation, some batches at a time."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_images(pathlib.Path(folder), width, height)
        labels = np.repeat(np.arange(CLASSES), PER_CLASS)
        pipelines = {
            "bare": bare_loop(paths, width, height),
            "balanced_batches": balanced_batches(
                Dataset(paths, labels),
                CLASSES_PER_BATCH,
                SAMPLES_PER_CLASS,
                seed=0,
                augment=mlrc_augmentation(SIZE),
            ),
        }
        kilobytes = statistics.mean(pathlib.Path(p).stat().st_size for p in paths) / 1e3
        rates = {name: [] for name in pipelines}
        for round_ in range(rounds + 1):
            # The order alternates too, against an advantage of going first.
            for name in sorted(pipelines, reverse=bool(round_ % 2)):
                # An iterator of its own: what the other one has prefetched must not
                # count, nor may it work in the background.
                iterator = iter(pipelines[name])
                for _ in range(10):
                    next(iterator)
                start = time.perf_counter()
                for _ in range(batches):
                    next(iterator)
                seconds = time.perf_counter() - start
                del iterator
                if round_:
                    rates[name].append(batches * BATCH / seconds)
    bare, ours = rates["bare"], rates["balanced_batches"]
    return {
        "image": f"{width}x{height}",
        "kilobytes": kilobytes,
        "batch": BATCH,
        "rounds": rounds,
        "bare_images_per_second": statistics.median(bare),
        "balanced_images_per_second": statistics.median(ours),
        "ratio_of_medians": statistics.median(ours) / statistics.median(bare),
        "median_of_ratios": statistics.median(
            o / b for o, b in zip(ours, bare, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=40, help="batches in a round")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args()
    results = [
        measure(width, height, arguments.rounds, arguments.batches)
        for width, height in ((500, 400), (1200, 900))
    ]
    report("pipeline", results, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
