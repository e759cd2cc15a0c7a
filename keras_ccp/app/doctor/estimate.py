"""What a run takes: time by a few measured steps, memory by arithmetic."""

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_ccp import retrieval
from keras_ccp.app.config import Config
from keras_ccp.app.doctor.findings import Finding
from keras_ccp.app.fold import Fold, make_model, training_batches
from keras_ccp.app.splits import Splits, fold_splits
from keras_ccp.model import CCPModel
from keras_ccp.pipeline import EvaluationData

# Steps that are measured after the one that compiles: 20, or fewer if 5 s have passed.
_MOST_STEPS, _LEAST_STEPS, _SECONDS = 20, 3, 5.0
_BATCHES, _BATCH = 8, 32  # embedded to measure
_SEARCHED = 2000


class Speed(NamedTuple):
    """Seconds on this machine: of a training step with its reading and augmentation, to
    embed an image, and to compare a query with an image that is searched."""

    step: float
    image: float
    pair: float


def estimate(config: Config, splits: Splits, root: Path) -> list[Finding]:
    """Notes of time and memory by a few steps of the first model; or the error of one.

    Weights are relative to `root`.
    """
    policy = keras.config.dtype_policy()
    training, validation = fold_splits(config.data, splits.training)[0]
    fold = Fold(training, validation, Path(), config.seed)
    try:
        keras.config.set_dtype_policy(config.training.policy)
        model = make_model(config, training, root)
        speed = _measure(config, fold, model)
    # Whatever stops a step here would stop the run, and is told rather than raised.
    except Exception as error:
        what = "a training step fails, as it would in the run"
        reason = f"{type(error).__name__}: {error}"
        return [Finding("error", "first step", what, reason)]
    finally:
        keras.config.set_dtype_policy(policy)
    return [time_note(config, splits, speed), _memory_note(config, splits, model)]


def _measure(config: Config, fold: Fold, model: CCPModel) -> Speed:
    """Takes training steps, embeds images and searches; the weights change."""
    if model.samples is not None:  # a run fills it with images of the pool
        model.samples.assign(np.ones(model.samples.shape))
    steps, embedding = _Clock(), _Clock()
    batches = training_batches(config, fold)
    model.fit(batches, steps_per_epoch=_MOST_STEPS + 1, verbose=0, callbacks=[steps])
    rows = np.resize(np.arange(len(fold.validation)), _BATCHES * _BATCH)
    images = EvaluationData(fold.validation).batches(rows, _BATCH)
    model.predict(images, verbose=0, callbacks=[embedding])
    dim = model.embedder.output_shape[-1]
    vectors = np.random.default_rng(0).normal(size=(_SEARCHED, dim))
    start = time.perf_counter()
    retrieval.evaluate(vectors.astype(np.float32), np.arange(_SEARCHED) // 4)
    searched = time.perf_counter() - start
    return Speed(steps.median(), embedding.median() / _BATCH, searched / _SEARCHED**2)


class _Clock(keras.callbacks.Callback):
    """Times of steps and batches; ends a training when they are enough."""

    def __init__(self):
        super().__init__()
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())
        is_long = self.ends[-1] - self.ends[0] > _SECONDS
        self.model.stop_training = is_long and len(self.ends) > _LEAST_STEPS

    def on_predict_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())

    def median(self) -> float:
        # Of the later ones: the first find batches that waited while it compiled.
        steps = np.diff(self.ends)
        return float(np.median(steps[len(steps) // 2 :]))


def time_note(config: Config, splits: Splits, speed: Speed) -> Finding:
    """From measured seconds to those of the whole run.

    A run of `n` evaluations takes `n * (steps * step + validation)` for each model, and
    the embedding of the pool once a projection. At most `n` is `max_evaluations`, with
    a projection each `patience`; at least it is `stop_patience + 1`, without one.
    """
    training, callback = config.training, config.callback
    folds = fold_splits(config.data, splits.training)
    most = training.max_evaluations
    least = min(most, callback.stop_patience + 1)
    pool = sum(np.minimum(f.class_sizes, callback.pool_size).sum() for f, _ in folds)
    sizes = np.array([len(validation) for _, validation in folds])
    evaluation = (sizes * speed.image + sizes**2 * speed.pair).sum()
    evaluation += len(folds) * training.steps_per_evaluation * speed.step
    # Each model embeds and searches the test alone, and then all of them together.
    query, gallery = len(splits.query), len(splits.gallery or ())
    test = len(folds) * (query + gallery) * speed.image
    test += 2 * len(folds) * query * (gallery or query) * speed.pair
    bounds = []
    limit = math.inf if callback.max_projections is None else callback.max_projections
    for count, projections in ((least, 0), (most, most // callback.patience)):
        pools = bool(config.model.proxies_per_class) * (1 + min(projections, limit))
        bounds.append(count * evaluation + pools * pool * speed.image + test)
    strategy = config.distribution.strategy
    elsewhere = "" if strategy == "none" else f" on one device, not by {strategy!r}"
    return Finding(
        "note",
        "time",
        f"about {_span(*map(_duration, bounds))} on this machine, for {len(folds)} "
        f"model(s) of {_span(f'{least:,}', f'{most:,}')} evaluations, one each "
        f"{training.steps_per_evaluation} steps. Measured{elsewhere}: "
        f"{1000 * speed.step:.0f} ms a step, {1 / speed.image:,.0f} images a second "
        "embedded; compilation comes on top",
        "if too long: a smaller `training.max_evaluations`, `callback.stop_patience` "
        "or `data.size`, or a GPU",
    )


def _memory_note(config: Config, splits: Splits, model: CCPModel) -> Finding:
    sizes = memory_bytes(config, splits, model)
    total = sum(sizes.values())
    parts = ", ".join(f"{name} {_size(value)}" for name, value in sizes.items())
    available = math.inf
    if hasattr(os, "sysconf"):  # Windows does not tell
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    exceeds = not tf.config.list_physical_devices("GPU") and total > available
    return Finding(
        "warning" if exceeds else "note",
        "memory",
        f"up to about {_size(total)}: {parts}"
        + (f". This machine has {_size(available)}" if exceeds else "")
        + ". By shapes, not measured; about 0.5 GB of TensorFlow's own comes on top",
        "if too much: a smaller `training.batch_size` or `data.size`, or "
        "`training.policy: mixed_float16` on a GPU",
    )


def memory_bytes(config: Config, splits: Splits, model: CCPModel) -> dict[str, int]:
    """Bytes of what training holds at once.

    - activations: outputs of all layers of the embedder for a batch, and as many
      gradients; not all of them are there at once.
    - weights: of the embedder, times 7: gradient, two moments of Adam, the snapshot,
      and those of the best of the problem and of the run.
    - proxies: the same, and the distances of a batch to all of them, twice.
    - images: those that are in memory, decoded or not, training and test.
    - embeddings: of all test images by all models.
    """
    batch = images = config.training.batch_size
    width = 2 if config.training.policy in ("mixed_float16", "mixed_bfloat16") else 4
    num_proxies = model.num_classes * config.model.proxies_per_class
    if config.model.references == "samples":
        images += num_proxies  # are embedded with each batch
    dim = model.embedder.output_shape[-1]
    parts = [part for part in vars(splits).values() if part is not None]
    num_models = len(fold_splits(config.data, splits.training))
    outputs = sum(
        math.prod(tensor.shape[1:])
        for layer in _layers(model.embedder)
        for tensor in keras.tree.flatten(layer.output)
    )
    return {
        "activations": 2 * images * width * outputs,
        "weights": 7 * 4 * sum(math.prod(w.shape) for w in model.embedder.weights),
        "proxies": 4 * num_proxies * (7 * dim + 2 * batch),
        "images": sum(_held_bytes(part.images) for part in parts),
        "embeddings": 4 * dim * num_models * sum(len(part) for part in parts[1:]),
    }


def _layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """The layers that compute something, those of models inside a model too."""
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _layers(layer)
        elif not isinstance(layer, keras.layers.InputLayer):
            yield layer


def _held_bytes(images: np.ndarray) -> int:
    return images.nbytes if images.ndim > 1 else sum(map(len, images))


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _size(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e8 else f"{value / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
