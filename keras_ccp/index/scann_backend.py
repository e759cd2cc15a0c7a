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
import importlib
import logging
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_ccp import retrieval

logger = logging.getLogger("keras_ccp")

_BRUTE_FORCE_ROWS = 10_000
_THRESHOLD = 0.2  # of the anisotropic quantization, as its authors use it
_SAMPLE = 512
# Shares of the partitions, then rows: in the order of their cost. With more partitions
# than these, hashing alone is as fast.
_SHARES = (0.05, 0.1, 0.2, 0.3)
_REORDERED = (50, 100, 150, 200, 300, 400, 800)
# Float64 differences held at once: few enough to stay in cache.
_BLOCK_VALUES = 2**17
Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
_SAMPLE_K = 10
# Above 0.99 by three standard errors of 512 x 10 neighbours that are found or not.
_WANTED_RECALL = 0.994


class Tuning(NamedTuple):
    """How much ScaNN looks at.

    Args:
        reorder: int, rows whose distance is computed in full, for the nearest 10; 0
            for all.
        leaves: int, partitions that are searched; 0 where there are none.
    """

    reorder: int
    leaves: int


def require_scann() -> ModuleType:
    """The package.

    Raises:
        ImportError: If it is not installed, or is of another TensorFlow.
    """
    try:
        return importlib.import_module("scann")
    # TensorFlow's own error where the operations are those of another version.
    except (ImportError, tf.errors.NotFoundError) as error:
        raise ImportError(
            'ScaNN cannot be loaded; `pip install -e ".[scann]"` brings it on '
            f"Linux, with TensorFlow 2.20. Received: {error}"
        ) from error


def load_scann() -> ModuleType | None:
    """The package, or `None` with a logged message where it is not installed."""
    try:
        return require_scann()
    except ImportError as error:
        logger.warning("The index searches exactly, which is slower: %s", error)
    return None


def make_builder(embeddings: np.ndarray, builder: Any, tuning: Tuning) -> Any:
    """Sets the parameters.

    Args:
        embeddings: `(n, dim)` float32.
        builder: `scann.scann_ops.builder` or `scann.scann_ops_pybind.builder`.
        tuning: what a search looks at.

    Returns:
        A ScaNN builder, ready for `build`.
    """
    count = len(embeddings)
    built = builder(embeddings, min(_SAMPLE_K, count), "squared_l2")
    if not tuning.reorder:
        return built.score_brute_force()
    if tuning.leaves:
        # About 100 rows a partition fix its centre well enough.
        centres = _num_partitions(count)
        sample = min(count, 100 * centres)
        built = built.tree(centres, tuning.leaves, training_sample_size=sample)
    return built.score_ah(2, anisotropic_quantization_threshold=_THRESHOLD).reorder(
        tuning.reorder
    )


def _num_partitions(count: int) -> int:
    return round(math.sqrt(count))


class ScannSearcher:
    """Rows that are probably the nearest, in their exact order.

    Args:
        scann: the package.
        embeddings: `(n, dim)` floats.
        tuning: that of an earlier index of these rows. Defaults to `None`: found by
            searching a sample.

    Attributes:
        tuning: the one in use.

    Raises:
        ValueError: If values leave the range of float32.
    """

    def __init__(
        self, scann: ModuleType, embeddings: np.ndarray, tuning: Tuning | None = None
    ):
        # Squares of a distance of float32 vectors must not overflow.
        if not np.abs(embeddings).max() < 1e18:
            raise ValueError(
                '`embeddings` must be below 1e18 with backend="scann"; use '
                f'backend="exact". Received: a value of {np.abs(embeddings).max():g}'
            )
        self._embeddings = embeddings
        self._builder = scann.scann_ops_pybind.builder
        self.tuning = self._tune() if tuning is None else tuning
        if tuning is not None:
            self._build(tuning)

    def _build(self, tuning: Tuning) -> None:
        vectors = np.ascontiguousarray(self._embeddings, np.float32)
        self._searcher = make_builder(vectors, self._builder, tuning).build()

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Finds neighbours and puts them into their exact order.

        Args:
            queries: `(q, dim)` floats.
            k: int, at most the number of rows.

        Returns:
            Distances `(q, k)` float32 and rows `(q, k)` int64, as `retrieval.search`
            has them.
        """
        return self._search(queries, k, self.tuning)

    def _search(
        self, queries: np.ndarray, k: int, tuning: Tuning
    ) -> tuple[np.ndarray, np.ndarray]:
        options = {}
        if tuning.reorder:
            options["pre_reorder_num_neighbors"] = num_reordered(
                tuning, k, len(self._embeddings)
            )
        if tuning.leaves:
            options["leaves_to_search"] = tuning.leaves
        with np.errstate(over="ignore"):  # its scores are then not finite
            vectors = np.ascontiguousarray(queries, np.float32)
        rows, scores = self._searcher.search_batched_parallel(
            vectors, final_num_neighbors=k, **options
        )
        distances, rows = exact_order(queries, self._embeddings, rows.astype(np.int64))
        # The partitions that were searched may hold fewer than k.
        short = ~np.isfinite(scores).all(axis=1)
        if short.any():
            exact = retrieval.search(queries[short], self._embeddings, k)
            distances[short], rows[short] = exact
        return distances, rows

    def _tune(self) -> Tuning:
        """Builds, and finds the least work that finds what is wanted in a sample."""
        count = len(self._embeddings)
        if count <= _BRUTE_FORCE_ROWS:
            self._build(Tuning(0, 0))
            return Tuning(0, 0)
        leaves = [math.ceil(share * _num_partitions(count)) for share in _SHARES]
        partitioned = [Tuning(rows, n) for n in leaves for rows in _REORDERED[1:4]]
        flat = [Tuning(rows, 0) for rows in _REORDERED]
        for steps in (partitioned, flat):
            self._build(steps[0])
            for tuning in steps:
                search = functools.partial(self._search, tuning=tuning)
                recall = sampled_recall(search, self._embeddings, _SAMPLE_K, _SAMPLE)
                if recall >= _WANTED_RECALL:
                    return tuning
        return tuning


def num_reordered(tuning: Tuning, k: Any, count: Any) -> Any:
    """Rows whose distance is computed in full.

    Args:
        tuning: of the index.
        k: int or int32 scalar, neighbours that are wanted.
        count: int or int32 scalar, rows of the index.
    """
    # A sample is searched for one more, since it finds itself.
    least = _SAMPLE_K + 1
    if tf.is_tensor(k):
        return tf.minimum(count, tuning.reorder * tf.maximum(k, least) // least)
    return min(count, tuning.reorder * max(k, least) // least)


def exact_order(
    queries: np.ndarray, embeddings: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sorts candidates by float64 differences, equally near ones by row.

    Args:
        queries: `(q, dim)` floats.
        embeddings: `(n, dim)` floats.
        rows: `(q, k)` int64, the candidates of each query.

    Returns:
        Distances `(q, k)` float32 and rows `(q, k)` int64, nearest first.
    """
    squares = np.empty(rows.shape)
    step = max(1, _BLOCK_VALUES // (rows.shape[1] * queries.shape[1]))
    for start in range(0, len(rows), step):
        block = slice(start, start + step)
        difference = embeddings[rows[block]].astype(np.float64)
        difference -= queries[block, None]
        np.einsum("qkd,qkd->qk", difference, difference, out=squares[block])
    order = np.lexsort((rows, squares), axis=1)
    distances = np.sqrt(np.take_along_axis(squares, order, axis=1))
    return distances.astype(np.float32), np.take_along_axis(rows, order, axis=1)


def sampled_recall(
    search: Search, embeddings: np.ndarray, k: int, num_queries: int, seed: int = 0
) -> float:
    """Searches some rows of a set in the others, against exact search.

    Args:
        search: maps queries and k to distances and rows.
        embeddings: `(n, dim)` floats, the rows that `search` searches.
        k: int, neighbours.
        num_queries: int, rows that are drawn; all of them if there are fewer.
        seed: int, of the draw. Defaults to 0.

    Returns:
        Mean share of the true `k` nearest that are found.
    """
    count = len(embeddings)
    if count == 1:
        return 1.0
    rng = np.random.default_rng(seed)
    queries = embeddings[rng.choice(count, min(num_queries, count), replace=False)]
    # The row itself is found, which says nothing: one more, and it is left out.
    k = min(k + 1, count)
    true, _ = retrieval.search(queries, embeddings, k)
    found, _ = search(queries, k)
    # By distance: of equally near rows any is right.
    return float(((found <= true[:, -1:]).sum(axis=1) - 1).mean() / (k - 1))
