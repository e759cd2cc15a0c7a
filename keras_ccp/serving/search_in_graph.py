"""Search as TensorFlow operations, in the order of `retrieval.search`."""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_ccp.index import RetrievalIndex
from keras_ccp.index.entries import as_bytes
from keras_ccp.index.scann_backend import (
    Tuning,
    make_builder,
    num_reordered,
    require_scann,
)

# Candidates beyond k, for float32 scores that are in the wrong order or tied.
_SPARE = 32


class SearchInGraph(tf.Module):
    """An index as variables, so that no limit on the size of a graph is met.

    Quick float32 scores (or ScaNN) choose candidates, float64 differences order them;
    equally near rows come by their row.

    Args:
        index: the index.
    """

    def __init__(self, index: RetrievalIndex):
        super().__init__()
        embeddings = index.embeddings.astype(np.float32)
        # The nearest has the highest x.y - |y|^2 / 2. With x from the mean of all y,
        # which changes all scores by the same, rounding errors are smaller.
        exact = embeddings.astype(np.float64)
        offsets = exact @ exact.mean(axis=0) - np.square(exact).sum(axis=1) / 2
        self.embeddings = _fixed(embeddings)
        self.origin = _fixed(exact.mean(axis=0).astype(np.float32))
        self.offsets = _fixed(offsets.astype(np.float32))
        self.ids = _fixed(_column(index.ids))
        self.labels = None if index.labels is None else _fixed(_column(index.labels))
        self.scann_state = self._tuning = None
        if not index.is_exact:
            self._tuning = Tuning(**index.parameters)
            # A module of ScaNN's own, in which TensorFlow keeps its structures.
            scann = require_scann()
            builder = make_builder(embeddings, scann.scann_ops.builder, self._tuning)
            self.scann_state = builder.build().serialize_to_module()
            self._scann_ops = scann.scann_ops

    def search(self, queries: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        """Finds the nearest rows.

        Args:
            queries: `(batch, dim)` float32.
            k: `(batch,)` or `(1,)` int32, neighbours of each query.

        Returns:
            `(batch, max k)` `ids`, float32 `distances` and, if there are any, `labels`.
            Beyond the `k` of a row its distances are infinite.
        """
        count, batch = tf.shape(self.embeddings)[0], tf.shape(queries)[0]
        is_fit = (tf.size(k) == 1) | (tf.size(k) == batch)
        message = (
            "`k` must hold one number, or one for each image. Received (k, images)"
        )
        checks = [
            tf.debugging.Assert(is_fit, [message, tf.size(k), batch]),
            tf.debugging.assert_positive(k, "`k` must be at least 1"),
            tf.debugging.assert_less_equal(
                k, count, "`k` must be at most the number of rows of the index"
            ),
        ]
        with tf.control_dependencies(checks):
            k = tf.identity(k)
        most = tf.reduce_max(k)
        if self.scann_state is None:
            rows = self._candidates(queries, most)
        else:
            rows = self._scann_candidates(queries, most)
        distances, rows = self._ordered(queries, rows, most)
        is_wanted = tf.range(most)[None] < k[:, None]
        result = {
            "ids": tf.gather(self.ids, rows),
            "distances": tf.where(is_wanted, distances, np.inf),
        }
        if self.labels is not None:
            result["labels"] = tf.gather(self.labels, rows)
        return result

    def _candidates(self, queries: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
        centred = queries - self.origin
        scores = tf.matmul(centred, self.embeddings, transpose_b=True) + self.offsets
        wanted = tf.minimum(tf.shape(scores)[1], 2 * k + _SPARE)
        return tf.math.top_k(scores, wanted).indices

    def _scann_candidates(self, queries: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
        searcher = self._scann_ops.searcher_from_module(self.scann_state)
        tuning, options = self._tuning, {}
        if tuning.reorder:
            count = tf.shape(self.embeddings)[0]
            options["pre_reorder_num_neighbors"] = num_reordered(tuning, k, count)
        if tuning.leaves:
            options["leaves_to_search"] = tuning.leaves
        rows, scores = searcher.search_batched_parallel(queries, k, **options)
        # The partitions that were searched may hold fewer than k: columns or rows of
        # columns are then missing.
        is_full = tf.reduce_all(tf.math.is_finite(scores))
        is_full &= tf.shape(rows)[1] == k
        return tf.cond(
            is_full,
            lambda: tf.cast(rows, tf.int32),
            lambda: self._candidates(queries, k),
        )

    def _ordered(
        self, queries: tf.Tensor, rows: tf.Tensor, k: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        rows = tf.sort(rows, axis=1)  # a stable sort by distance keeps this order
        near = tf.cast(tf.gather(self.embeddings, rows), tf.float64)
        squares = tf.reduce_sum(
            tf.square(near - tf.cast(queries, tf.float64)[:, None]), axis=2
        )
        order = tf.argsort(squares, axis=1, stable=True)[:, :k]
        squares = tf.gather(squares, order, batch_dims=1)
        rows = tf.gather(rows, order, batch_dims=1)
        return tf.cast(tf.sqrt(squares), tf.float32), rows


def _fixed(value: Any) -> tf.Variable:
    return tf.Variable(value, trainable=False)


def _column(values: np.ndarray) -> Any:
    return as_bytes(values) if values.dtype == object else values
