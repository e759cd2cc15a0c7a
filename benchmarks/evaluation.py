"""Exact P@1, P@R and MAP@R against the search alone of ScaNN and faiss.

`evaluate` finds the neighbours, in exact order, and makes metrics of them. The peers
only search: ScaNN by brute force, faiss by IndexFlatL2, and a matrix product with
top-k, each for as many neighbours as the largest class needs. All run in alternation in
one process; the ratio counts. The metrics are compared with those of
pytorch-metric-learning's AccuracyCalculator, on neighbours in the order of float64.

The peers come with `pip install -e ".[bench]"`; one that is missing has a dash.
"""

import argparse
import importlib.util
import multiprocessing
import pathlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from measuring import alternate, medians, peak_megabytes, ratio, report

from keras_ccp import retrieval

# name: (queries, gallery or None where the queries are searched in themselves, classes)
# of the test sets.
SETS = {
    "cub": (5924, None, 100),
    "cars": (8131, None, 98),
    "in_shop": (14218, 12612, 3985),
    "sop": (60502, None, 11316),
}
NAMES = {
    "precision_at_1": "precision_at_1",
    "precision_at_r": "r_precision",
    "map_at_r": "mean_average_precision_at_r",
}
COLUMNS = {
    "set": "set:",
    "k": "neighbours:d",
    "evaluate_seconds": "evaluate s:.2f",
    "scann_seconds": "ScaNN s:.2f",
    "faiss_seconds": "faiss s:.2f",
    "top_k_seconds": "top-k s:.2f",
    "scann_ratio": "/ ScaNN:.2f",
    "faiss_ratio": "/ faiss:.2f",
    "top_k_ratio": "/ top-k:.2f",
    "peak_megabytes": "peak MB:.0f",
    "largest_difference": "largest difference:.1e",
}


def make_set(
    num_queries: int, num_gallery: int | None, num_classes: int, dim: int = 128
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Unit vectors in classes of about equal size, sorted by class as the sets are."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((num_classes, dim))

    def half(size):
        labels = np.arange(size) * num_classes // size
        embeddings = centers[labels] + 1.2 * rng.standard_normal((size, dim))
        embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
        return embeddings.astype(np.float32), labels

    gallery = (None, None) if num_gallery is None else half(num_gallery)
    return *half(num_queries), *gallery


def searches(
    query: np.ndarray, gallery: np.ndarray, k: int
) -> dict[str, Callable[[], object]]:
    """The peers that are installed; their indexes are built here, untimed."""
    found = {}
    if importlib.util.find_spec("scann"):
        import scann

        # Of unit vectors: the order of the distances.
        builder = scann.scann_ops_pybind.builder(gallery, k, "dot_product")
        searcher = builder.score_brute_force().build()
        found["scann"] = lambda: searcher.search_batched_parallel(query)
    if importlib.util.find_spec("faiss"):
        import faiss

        index = faiss.IndexFlatL2(gallery.shape[1])
        index.add(gallery)
        found["faiss"] = lambda: index.search(query, k)
    found["top_k"] = lambda: top_k(query, gallery, k)
    return found


def top_k(query: np.ndarray, gallery: np.ndarray, k: int) -> None:
    """Matrix product and top-k, in chunks."""
    gallery = tf.constant(gallery)
    step = 2**25 // len(gallery)
    for start in range(0, len(query), step):
        part = tf.constant(query[start : start + step])
        similarities = tf.matmul(part, gallery, transpose_b=True)
        np.asarray(tf.math.top_k(similarities, k).indices)


def calculator_metrics(query, labels, gallery, gallery_labels) -> dict[str, float]:
    """The metrics of pytorch-metric-learning, by the names they have here."""
    import torch
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    def exact_neighbours(query, k, reference, ref_includes_query):
        """float64 scores: float32 would swap a few neighbours of 60,502."""
        indices = np.empty((len(query), k), np.int64)
        distances = np.empty((len(query), k))
        reference = reference.numpy().astype(np.float64)
        norms = np.square(reference).sum(axis=1)
        step = 2**25 // len(reference)
        for start in range(0, len(query), step):
            part = query[start : start + step].numpy().astype(np.float64)
            scores = norms - 2 * part @ reference.T
            if ref_includes_query:
                rows = np.arange(len(part))
                scores[rows, start + rows] = np.inf
            near = np.argpartition(scores, k - 1, axis=1)[:, :k]
            values = np.take_along_axis(scores, near, axis=1)
            order = np.argsort(values, axis=1)
            block = slice(start, start + step)
            indices[block] = np.take_along_axis(near, order, axis=1)
            distances[block] = np.take_along_axis(values, order, axis=1)
        return torch.from_numpy(distances), torch.from_numpy(indices)

    calculator = AccuracyCalculator(
        include=tuple(NAMES.values()),
        k="max_bin_count",
        device=torch.device("cpu"),
        knn_func=exact_neighbours,
    )
    data = [query, labels]
    if gallery is not None:
        data += [gallery, gallery_labels]
    result = calculator.get_accuracy(*(torch.from_numpy(x) for x in data))
    return {name: result[theirs] for name, theirs in NAMES.items()}


def measure(name: str, rounds: int, scale: float) -> dict:
    """Seconds and ratios, megabytes above the inputs, and the difference of metrics."""
    sizes = [None if n is None else max(8, int(scale * n)) for n in SETS[name]]
    query, labels, gallery, gallery_labels = data = make_set(*sizes)
    is_one_set = gallery is None
    known = labels if is_one_set else gallery_labels
    # Of one set the query itself is among them.
    k = int(np.bincount(known).max())
    retrieval.evaluate(query[:500], labels[:500])
    result = {"set": name, "queries": len(query), "gallery": len(known), "k": k}
    result["peak_megabytes"] = peak_megabytes(lambda: retrieval.evaluate(*data))
    calls = {"evaluate": lambda: retrieval.evaluate(*data)}
    calls |= searches(query, query if is_one_set else gallery, k)
    times = alternate(calls, rounds, warm_up=0)
    for kind, seconds in times.items():
        result |= {f"{key}_{kind}": value for key, value in medians(seconds).items()}
    for peer in list(calls)[1:]:
        result[f"{peer}_ratio"] = ratio(times["seconds"], "evaluate", peer)
    if importlib.util.find_spec("pytorch_metric_learning"):
        ours = retrieval.evaluate(*data)
        theirs = calculator_metrics(*data)
        result["largest_difference"] = max(abs(ours[n] - theirs[n]) for n in NAMES)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args()
    results = []
    for name in arguments.sets:
        # A process each: memory that one set has used would hide what the next needs.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            settings = name, arguments.rounds, arguments.scale
            results.append(pool.apply(measure, settings))
    report("evaluation", results, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
