"""Recall and time of a ScaNN index against exact search, on sets of the size of SOP.

Both kinds of search run in alternation in one process; the ratio of the medians is what
counts. Every row is a query. `grouped` has products that look alike, as SOP has: twelve
categories, kinds of products in each, and classes of about five images in each kind.
`independent` has classes that have nothing to do with each other, the hardest case:
neighbours of other classes are then all over the space.
"""

import argparse
import pathlib
import time

import numpy as np
from measuring import alternate, medians, ratio, report

from keras_ccp import retrieval
from keras_ccp.index import RetrievalIndex

SETS = {"grouped": (12, 300), "independent": (1, 1)}
COLUMNS = {
    "set": "set:",
    "rows": "rows:d",
    "k": "k:d",
    "exact_seconds": "exact s:.2f",
    "scann_seconds": "ScaNN s:.2f",
    "ratio": "ratio:.2f",
    "recall": "recall:.4f",
    "scann_build_seconds": "ScaNN build s:.2f",
    "parameters": "parameters:",
}


def make_set(name, size, num_classes, dim=128):
    """Unit vectors; each level of the hierarchy halves the variance that is left."""
    rng = np.random.default_rng(0)
    num_categories, num_kinds = SETS[name]
    labels = np.arange(size) * num_classes // size
    kind_of = rng.integers(0, num_kinds, num_classes)
    category_of = rng.integers(0, num_categories, num_kinds)
    centres = np.zeros((num_kinds, dim))
    if num_kinds > 1:
        centres += rng.standard_normal((num_categories, dim))[category_of]
        centres += np.sqrt(0.5) * rng.standard_normal((num_kinds, dim))
    classes = centres[kind_of] + 0.5 * rng.standard_normal((num_classes, dim))
    embeddings = classes[labels] + 0.35 * rng.standard_normal((size, dim))
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings.astype(np.float32)


def measure(name, rows, k, rounds):
    """Seconds of both searches, and the share of the true neighbours that is found."""
    embeddings = make_set(name, rows, max(1, rows * 11316 // 60502))
    start = time.perf_counter()
    indexes = {"exact": RetrievalIndex.build(embeddings)}
    exact_build = time.perf_counter() - start
    start = time.perf_counter()
    indexes["scann"] = RetrievalIndex.build(embeddings, backend="scann")
    result = {"set": name, "rows": rows, "k": k, "exact_build_seconds": exact_build}
    result["scann_build_seconds"] = time.perf_counter() - start
    parameters = indexes["scann"].parameters.items()
    result["parameters"] = ", ".join(f"{key} {value}" for key, value in parameters)
    found = {}

    def search(key):
        found[key] = indexes[key].search(embeddings, k)[1]

    retrieval.search(embeddings[:500], embeddings, k)
    calls = {key: lambda key=key: search(key) for key in indexes}
    times = alternate(calls, rounds, warm_up=0)
    for kind, seconds in times.items():
        result |= {f"{key}_{kind}": value for key, value in medians(seconds).items()}
    result["ratio"] = ratio(times["seconds"], "scann", "exact")
    pairs = zip(found["exact"], found["scann"], strict=True)
    result["recall"] = float(
        np.mean([len(np.intersect1d(*pair)) / k for pair in pairs])
    )
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--rows", type=int, default=60502)
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args()
    results = [
        measure(name, arguments.rows, arguments.k, arguments.rounds)
        for name in arguments.sets
    ]
    report("index", results, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
