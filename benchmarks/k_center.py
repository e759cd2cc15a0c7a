"""What choosing new proxies costs at SOP's size, against a Python loop over classes.

Both run in alternation in one process; the ratio of the medians is what counts.
"""

import argparse
import json
import pathlib
import statistics
import time

import numpy as np
from evaluation import peak_megabytes

from keras_ccp import k_center_greedy


def loop_over_classes(candidates, covered, num_centers):
    """The plain form: a class at a time, float64 differences."""
    picks = np.empty((len(candidates), num_centers), np.int64)
    for row, (points, known) in enumerate(zip(candidates, covered, strict=True)):
        points = points.astype(np.float64)
        difference = points[:, None] - known
        nearest = np.square(difference).sum(axis=2).min(axis=1)
        for turn in range(num_centers):
            picks[row, turn] = pick = nearest.argmax()
            distances = np.square(points - points[pick]).sum(axis=1)
            nearest = np.minimum(nearest, distances)
            nearest[pick] = -np.inf
    return picks


def measure(num_classes, pool_size, num_covered, num_centers, dim, rounds) -> dict:
    """Seconds, megabytes above the inputs, and whether the picks agree."""
    rng = np.random.default_rng(0)
    candidates = rng.standard_normal((num_classes, pool_size, dim), np.float32)
    covered = rng.standard_normal((num_classes, num_covered, dim), np.float32)
    data = candidates, covered, num_centers
    k_center_greedy(candidates[:100], covered[:100], num_centers)
    megabytes = peak_megabytes(lambda: k_center_greedy(*data))
    seconds = {k_center_greedy: [], loop_over_classes: []}
    picks = {}
    for _ in range(rounds):
        for function, times in seconds.items():
            start = time.perf_counter()
            picks[function] = function(*data)
            times.append(time.perf_counter() - start)
    ours, loop = (statistics.median(times) for times in seconds.values())
    return {
        "classes": num_classes,
        "pool_size": pool_size,
        "covered": num_covered,
        "centers": num_centers,
        "dim": dim,
        "seconds": ours,
        "fastest_seconds": min(seconds[k_center_greedy]),
        "loop_seconds": loop,
        "speedup": loop / ours,
        "peak_megabytes": megabytes,
        "same_picks": bool(np.array_equal(*picks.values())),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    result = measure(11318, 7, 4, 4, 128, arguments.rounds)
    for name, value in result.items():
        print(f"{name:16} {value:.4g}" if name != "same_picks" else f"{name} {value}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
