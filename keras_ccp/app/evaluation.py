"""The scores of an experiment: each model alone, and their embeddings together."""

import math
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from keras_ccp import retrieval
from keras_ccp.app.fold import EMBEDDER_FILE
from keras_ccp.app.splits import Splits
from keras_ccp.datasets import Dataset
from keras_ccp.pipeline import EvaluationData

METRICS = ("precision_at_1", "precision_at_r", "map_at_r")


def score_folds(
    directories: Sequence[Path], splits: Splits, strategy: tf.distribute.Strategy
) -> dict[str, list[dict]]:
    """Scores the models of one repetition on the test classes.

    Args:
        directories: folders of the trained models.
        splits: the images of the experiment.
        strategy: the devices that share the images out.

    Returns:
        `"separated"`: the metrics of each model; `"concatenated"`: those of their
        embeddings side by side, one entry.
    """
    query, gallery, separated = [], [], []
    for directory in directories:
        with strategy.scope():
            embedder = keras.models.load_model(directory / EMBEDDER_FILE)
        query.append(_embed(embedder, splits.query))
        if splits.gallery is not None:
            gallery.append(_embed(embedder, splits.gallery))
        separated.append(_score(query[-1:], gallery[-1:], splits))
    return {
        "separated": separated,
        "concatenated": [_score(query, gallery, splits)],
    }


def summarize(scores: Sequence[dict]) -> dict[str, dict[str, float | None]]:
    """Means of metrics and their 95 % intervals.

    Args:
        scores: metrics of each model or repetition.

    Returns:
        For each metric `mean` and `interval`, half the width of the 95 % confidence
        interval by Student's t, `None` for a single score.
    """
    summary = {}
    for name in METRICS:
        values = np.array([score[name] for score in scores], np.float64)
        count = len(values)
        interval = None
        if count > 1:
            error = values.std(ddof=1) / math.sqrt(count)
            interval = float(student_t_quantile(0.975, count - 1) * error)
        summary[name] = {"mean": float(values.mean()), "interval": interval}
    return summary


def student_t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution, by bisection of its distribution function.

    Args:
        probability: above 0.5 and below 1.
        degrees: degrees of freedom, at least 1.
    """

    def above(t):
        # P(T > t) = I_x(degrees / 2, 1 / 2) / 2 with x = degrees / (degrees + t^2).
        x = degrees / (degrees + t * t)
        args = [tf.constant(value, tf.float64) for value in (degrees / 2, 0.5, x)]
        return float(tf.math.betainc(*args)) / 2

    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) < 1 - probability else (middle, high)
    return middle


def join_embedders(directories: Sequence[Path]) -> keras.Model:
    """One model of several: images -> their embeddings side by side.

    Args:
        directories: folders of the trained models.
    """
    embedders = [keras.models.load_model(d / EMBEDDER_FILE) for d in directories]
    if len(embedders) == 1:
        return embedders[0]
    given = embedders[0].inputs[0]
    images = keras.Input(batch_shape=given.shape, dtype=given.dtype)
    for number, embedder in enumerate(embedders):
        embedder.name = f"fold{number}"
    parts = [embedder(images) for embedder in embedders]
    return keras.Model(images, keras.layers.Concatenate()(parts), name="embedder")


def _embed(embedder: keras.Model, dataset: Dataset) -> np.ndarray:
    data = EvaluationData(dataset, "test images")
    return embedder.predict(data.batches(), verbose=0)


def _score(query: list, gallery: list, splits: Splits) -> dict:
    arguments = [np.concatenate(query, axis=1), splits.query.labels]
    if gallery:
        arguments += [np.concatenate(gallery, axis=1), splits.gallery.labels]
    return retrieval.evaluate(*arguments)
