"""ScaNN, with parameters by size and measured recall.

Up to `_BRUTE_FORCE_ROWS` rows ScaNN compares all. Beyond, the rows are partitioned
around `sqrt(n)` centres. Of the partitions nearest to a query, asymmetric hashing (two
dimensions a code) orders the rows roughly, and the best of these by their distance. How
many partitions and rows that must be depends on the data, so it is found by searching a
sample. Where neighbours are all over the partitions, there are none: hashing alone.

Source: Guo et al., "Accelerating Large-Scale Inference with Anisotropic Vector
Quantization" (ICML 2020), https://github.com/google-research/google-research/tree/master/scann.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_ccp.checks import require
from keras_ccp.k_center import BLOCK_VALUES, squared_distances
from keras_ccp.retrieval.exact_search import ExactSearch

logger = logging.getLogger("keras_ccp")

_BRUTE_FORCE_ROWS = 10_000
_THRESHOLD = 0.2  # of the anisotropic quantization, as its authors use it
_SAMPLE = 512
_SAMPLE_K = 10
# Shares of the partitions, then rows: in the order of their cost. With more partitions
# than these, hashing alone is as fast.
_SHARES = (0.05, 0.1, 0.2, 0.3)
_REORDERED = (50, 100, 150, 200, 300, 400, 800)
# Above 0.99 by three standard errors of 512 x 10 neighbours that are found or not.
_WANTED_RECALL = 0.994

Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


class Tuning(NamedTuple):
    """How much ScaNN looks at.

    Args:
        reorder: int, rows whose distance is computed in full, for the nearest 10; 0
            for all.
        leaves: int, partitions that are searched; 0 where there are none.
    """

    reorder: int
    leaves: int

    def options(self, k: Any, count: Any, minimum: Any, maximum: Any) -> dict[str, Any]:
        """Arguments of a search for k of count rows, as numbers or in a graph."""
        options = {}
        if self.reorder:
            # A sample is searched for one more, since it finds itself.
            least = _SAMPLE_K + 1
            wanted = self.reorder * maximum(k, least) // least
            options["pre_reorder_num_neighbors"] = minimum(count, wanted)
        if self.leaves:
            options["leaves_to_search"] = self.leaves
        return options


def load_scann() -> ModuleType | None:
    """The package, or `None` with a logged message where it cannot be loaded."""
    try:
        return require("scann", "scann")
    # TensorFlow's own error where the operations are those of another version.
    except (ImportError, tf.errors.NotFoundError) as error:
        logger.warning(
            "The index searches exactly, which is slower: ScaNN needs Linux and "
            "TensorFlow 2.20. %s",
            error,
        )
    return None


def make_builder(embeddings: np.ndarray, builder: Any, tuning: Tuning) -> Any:
    """A `scann_ops.builder` or `scann_ops_pybind.builder` with its parameters set."""
    count = len(embeddings)
    built = builder(embeddings, min(_SAMPLE_K, count), "squared_l2")
    if not tuning.reorder:
        return built.score_brute_force()
    if tuning.leaves:
        # About 100 rows a partition fix its centre well enough.
        centres = round(math.sqrt(count))
        sample = min(count, 100 * centres)
        built = built.tree(centres, tuning.leaves, training_sample_size=sample)
    return built.score_ah(2, anisotropic_quantization_threshold=_THRESHOLD).reorder(
        tuning.reorder
    )


class ScannSearcher:
    """Rows that are probably the nearest, in their exact order.

    Args:
        scann: the package.
        embeddings: `(n, dim)` floats.
        tuning: that of an earlier index of these rows, or `None`: it is found by
            searching a sample.
    """

    def __init__(
        self, scann: ModuleType, embeddings: np.ndarray, tuning: Sequence[int] | None
    ):
        # Squares of a distance of float32 vectors must not overflow.
        if not np.abs(embeddings).max() < 1e18:
            raise ValueError(
                "`embeddings` must be below 1e18 with backend='scann'. Received: a "
                f"value of {np.abs(embeddings).max():g}\nUse backend='exact'"
            )
        self._embeddings = embeddings
        self._exact = ExactSearch(embeddings)
        self._builder = scann.scann_ops_pybind.builder
        if tuning is None:
            self.tuning = self._tune()
        else:
            self.tuning = Tuning(*tuning)
            self._build(self.tuning)

    def _build(self, tuning: Tuning) -> None:
        vectors = np.ascontiguousarray(self._embeddings, np.float32)
        self._searcher = make_builder(vectors, self._builder, tuning).build()

    def search(
        self, queries: np.ndarray, k: int, tuning: Tuning | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `ExactSearch.search`, with the neighbours that are found."""
        options = (tuning or self.tuning).options(k, len(self._embeddings), min, max)
        with np.errstate(over="ignore"):  # its scores are then not finite
            vectors = np.ascontiguousarray(queries, np.float32)
        rows, scores = self._searcher.search_batched_parallel(
            vectors, final_num_neighbors=k, **options
        )
        distances, rows = exact_order(queries, self._embeddings, rows.astype(np.int64))
        # The partitions that were searched may hold fewer than k.
        short = ~np.isfinite(scores).all(axis=1)
        if short.any():
            distances[short], rows[short] = self._exact.search(queries[short], k)
        return distances, rows

    def _tune(self) -> Tuning:
        """Builds, and finds the least work that finds what is wanted in a sample."""
        count = len(self._embeddings)
        if count <= _BRUTE_FORCE_ROWS:
            self._build(Tuning(0, 0))
            return Tuning(0, 0)
        leaves = [math.ceil(share * round(math.sqrt(count))) for share in _SHARES]
        partitioned = [Tuning(rows, n) for n in leaves for rows in _REORDERED[1:4]]
        flat = [Tuning(rows, 0) for rows in _REORDERED]
        for steps in (partitioned, flat):
            self._build(steps[0])
            for tuning in steps:
                search = functools.partial(self.search, tuning=tuning)
                recall = sampled_recall(search, self._exact, _SAMPLE_K, _SAMPLE)
                if recall >= _WANTED_RECALL:
                    return tuning
        return tuning


def exact_order(
    queries: np.ndarray, embeddings: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sorts `(q, k)` candidate rows by distance, equally near ones by row."""
    squares = np.empty(rows.shape)
    step = max(1, BLOCK_VALUES // (rows.shape[1] * queries.shape[1]))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        squares[part] = squared_distances(embeddings[rows[part]], queries[part, None])
    order = np.lexsort((rows, squares), axis=1)
    distances = np.sqrt(np.take_along_axis(squares, order, axis=1))
    return distances.astype(np.float32), np.take_along_axis(rows, order, axis=1)


def sampled_recall(
    search: Search, exact: ExactSearch, k: int, num_queries: int, seed: int = 0
) -> float:
    """Mean share of the true `k` nearest that a search of random rows finds."""
    embeddings = exact.gallery
    count = len(embeddings)
    if count == 1:
        return 1.0
    rng = np.random.default_rng(seed)
    queries = embeddings[rng.choice(count, min(num_queries, count), replace=False)]
    # The row itself is found, which says nothing: one more, and it is left out.
    k = min(k + 1, count)
    true, _ = exact.search(queries, k)
    found, _ = search(queries, k)
    # By distance: of equally near rows any is right.
    return float(((found <= true[:, -1:]).sum(axis=1) - 1).mean() / (k - 1))
