"""What choosing new proxies costs at SOP's size, against a Python loop over classes.

Both run in alternation in one process; the ratio of the medians is what counts.
"""

import argparse
import pathlib

import numpy as np
from measuring import alternate, medians, peak_megabytes, ratio, report

from keras_ccp import k_center_greedy

COLUMNS = {
    "classes": "classes:d",
    "pool_size": "b:d",
    "covered": "proxies:d",
    "seconds": "k_center_greedy s:.3f",
    "fastest_seconds": "fastest s:.3f",
    "loop_seconds": "loop s:.3f",
    "ratio": "ratio:.3f",
    "peak_megabytes": "peak MB:.0f",
    "same_picks": "same picks:",
}


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
    picks = {}
    calls = {
        name: lambda name=name, function=function: picks.update({name: function(*data)})
        for name, function in (("ours", k_center_greedy), ("loop", loop_over_classes))
    }
    seconds = alternate(calls, rounds)["seconds"]
    median = medians(seconds)
    return {
        "classes": num_classes,
        "pool_size": pool_size,
        "covered": num_covered,
        "centers": num_centers,
        "dim": dim,
        "seconds": median["ours"],
        "fastest_seconds": min(seconds["ours"]),
        "loop_seconds": median["loop"],
        "ratio": ratio(seconds, "ours", "loop"),
        "peak_megabytes": megabytes,
        "same_picks": bool(np.array_equal(picks["ours"], picks["loop"])),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args()
    results = [measure(11318, 7, 4, 4, 128, arguments.rounds)]
    report("k_center", results, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
