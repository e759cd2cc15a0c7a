"""What exact evaluation costs, against a plain matrix product and top-k.

The plain search finds as many neighbours as the largest class needs, but neither
orders them exactly nor makes metrics of them. Both run in alternation in one process;
the ratio of the medians is what counts.
"""

import argparse
import json
import multiprocessing
import pathlib
import statistics
import time

import numpy as np
import tensorflow as tf

from keras_ccp import retrieval

# name: (images, classes) of the test halves.
SETS = {"cub": (5924, 100), "cars": (8131, 98), "sop": (60502, 11316)}


def peak_megabytes(function) -> float:
    """Peak resident memory during a call above what there was before (Linux)."""

    def status(key):
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith(key)) / 1024

    before = status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    function()
    return status("VmHWM") - before


def make_set(size, num_classes, dim=128):
    """Unit vectors in classes of about equal size, sorted by class as the sets are."""
    rng = np.random.default_rng(0)
    labels = np.arange(size) * num_classes // size
    embeddings = rng.standard_normal((num_classes, dim))[labels]
    embeddings += 1.2 * rng.standard_normal((size, dim))
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings.astype(np.float32), labels


def plain_search(embeddings, k):
    """Matrix product and top-k, in chunks."""
    gallery = tf.constant(embeddings)
    step = 2**25 // len(embeddings)
    for start in range(0, len(embeddings), step):
        query = gallery[start : start + step]
        similarities = tf.matmul(query, gallery, transpose_b=True)
        np.asarray(tf.math.top_k(similarities, k).indices)


def measure(name, rounds) -> dict:
    """Seconds and processor seconds of both, and megabytes above the inputs."""
    embeddings, labels = make_set(*SETS[name])
    k = int(np.bincount(labels).max())
    calls = {
        "evaluate": lambda: retrieval.evaluate(embeddings, labels),
        "plain": lambda: plain_search(embeddings, k),
    }
    retrieval.evaluate(embeddings[:500], labels[:500])
    result = {"set": name, "rows": len(embeddings), "k": k}
    result["peak_megabytes"] = peak_megabytes(calls["evaluate"])
    seconds = {key: [] for key in calls}
    processor = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            start, processor_start = time.perf_counter(), time.process_time()
            call()
            seconds[key].append(time.perf_counter() - start)
            processor[key].append(time.process_time() - processor_start)
    for key in calls:
        result[f"{key}_seconds"] = statistics.median(seconds[key])
        result[f"{key}_processor_seconds"] = statistics.median(processor[key])
    result["ratio"] = result["evaluate_seconds"] / result["plain_seconds"]
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    results = []
    print(f"{'set':6}{'evaluate s':>12}{'plain s':>10}{'ratio':>8}{'peak MB':>9}")
    for name in arguments.sets:
        # A process each: memory that one set has used would hide what the next needs.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(measure, (name, arguments.rounds))
        results.append(row)
        print(
            f"{name:6}{row['evaluate_seconds']:12.2f}{row['plain_seconds']:10.2f}"
            f"{row['ratio']:8.2f}{row['peak_megabytes']:9.0f}"
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
