"""What a run takes: time by a few measured steps, memory by arithmetic."""

import math
import os
import time
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
_HALF = ("mixed_float16", "mixed_bfloat16")


class Speed(NamedTuple):
    """What was measured on this machine.

    Args:
        step: seconds of a training step, reading and augmentation included.
        image: seconds to embed an image.
        pair: seconds to compare a query with an image that is searched.
    """

    step: float
    image: float
    pair: float


def estimate(config: Config, splits: Splits, root: Path) -> list[Finding]:
    """Takes a few steps of the first model, and says what the whole run takes.

    Args:
        config: the experiment.
        splits: its images.
        root: folder to which files of weights are relative.

    Returns:
        Notes of time and memory; an error where no step can be taken.
    """
    policy = keras.config.dtype_policy()
    training, validation = fold_splits(config.data, splits.training)[0]
    fold = Fold(training, validation, Path(), config.seed)
    try:
        keras.config.set_dtype_policy(config.training.policy)
        model = make_model(config, training, root)
        speed = measure(config, fold, model)
    # Whatever stops a step here would stop the run, and is told rather than raised.
    except Exception as error:
        what = "a training step fails, as it would in the run"
        reason = f"{type(error).__name__}: {error}"
        return [Finding("error", "first step", what, reason)]
    finally:
        keras.config.set_dtype_policy(policy)
    return [time_note(config, splits, speed), memory_note(config, splits, model)]


def measure(config: Config, fold: Fold, model: CCPModel) -> Speed:
    """Takes training steps, embeds images and searches among vectors.

    Args:
        config: the experiment.
        fold: images of the model.
        model: compiled model; its weights change.
    """
    if model.sample_bank is not None:  # a run fills it with images of the pool
        images = model.sample_bank.images
        model.sample_bank.assign(np.ones(images.shape))
    clock = _Clock()
    batches = training_batches(config, fold)
    model.fit(batches, steps_per_epoch=_MOST_STEPS + 1, verbose=0, callbacks=[clock])
    rows = np.resize(np.arange(len(fold.validation)), _BATCHES * _BATCH)
    images = EvaluationData(fold.validation).batches(rows, _BATCH)
    embedding = _Clock()
    model.predict(images, verbose=0, callbacks=[embedding])
    dim = model.embedder.output_shape[-1]
    vectors = np.random.default_rng(0).normal(size=(_SEARCHED, dim))
    start = time.perf_counter()
    retrieval.evaluate(vectors.astype(np.float32), np.arange(_SEARCHED) // 4)
    searched = time.perf_counter() - start
    image = embedding.median() / _BATCH
    return Speed(clock.median(), image, searched / _SEARCHED**2)


def time_note(config: Config, splits: Splits, speed: Speed) -> Finding:
    """From measured seconds to those of the whole run.

    A run of `n` evaluations takes `n * (steps * step + validation)` for each model,
    and the embedding of the pool once a switch. At most `n` is `max_evaluations`, with
    a switch each `patience`; at least it is `stop_patience + 1`, without a switch.

    Args:
        config: the experiment.
        splits: its images.
        speed: what was measured.
    """
    training, callback = config.training, config.callback
    folds = fold_splits(config.data, splits.training)
    most = training.max_evaluations
    least = min(most, callback.stop_patience + 1)
    bounds = []
    for count, switches in ((least, 0), (most, most // callback.patience)):
        if callback.max_projections is not None:
            switches = min(switches, callback.max_projections)
        pools = (
            bool(config.model.proxies_per_class)
            * (1 + switches)
            * sum(
                np.minimum(fold.class_sizes, callback.pool_size).sum()
                for fold, _ in folds
            )
        )
        steps = len(folds) * count * training.steps_per_evaluation
        searches = [len(validation) for _, validation in folds]
        seconds = steps * speed.step + pools * speed.image
        for size in searches:
            seconds += count * (size * speed.image + size**2 * speed.pair)
        bounds.append(seconds + _test_seconds(splits, len(folds), speed))
    strategy = config.distribution.strategy
    elsewhere = "" if strategy == "none" else f" on one device, not by {strategy!r}"
    return Finding(
        "note",
        "time",
        f"about {_span(*map(_duration, bounds))} on this machine, for {len(folds)} "
        f"model(s) of {_span(f'{least:,}', f'{most:,}')} evaluations, one each "
        f"{training.steps_per_evaluation} steps. Measured{elsewhere}: "
        f"{1000 * speed.step:.0f} ms a step, {1 / speed.image:,.0f} images a second "
        "embedded; what is compiled once is not counted",
        "where that is too long: fewer `training.max_evaluations` or a smaller "
        "`callback.stop_patience`, smaller images by `data.size`, or a GPU",
    )


def memory_note(config: Config, splits: Splits, model: CCPModel) -> Finding:
    """What training holds in memory at once, by the shapes of its tensors.

    Args:
        config: the experiment.
        splits: its images.
        model: the model.
    """
    sizes = memory_bytes(config, splits, model)
    total = sum(sizes.values())
    parts = ", ".join(f"{name} {_size(value)}" for name, value in sizes.items())
    available = _machine_bytes()
    exceeds = not tf.config.list_physical_devices("GPU") and total > available
    return Finding(
        "warning" if exceeds else "note",
        "memory",
        f"up to about {_size(total)}: {parts}"
        + (f". This machine has {_size(available)}" if exceeds else "")
        + ". By shapes, not measured: what TensorFlow needs beside it (about 0.5 GB) "
        "and keeps in reserve comes on top",
        "where that is too much: a smaller `training.batch_size` or `data.size`, or "
        "`training.policy: mixed_float16` on a GPU",
    )


def memory_bytes(config: Config, splits: Splits, model: CCPModel) -> dict[str, int]:
    """Bytes of what training holds at once.

    - activations: outputs of all layers of the embedder for a batch, and as many
      gradients; not all of them are there at once.
    - weights: of the embedder, times 7: gradient, two moments of Adam, the frozen copy,
      and those of the best of the problem and of the run.
    - proxies: likewise, and the distances of a batch to all of them, twice.
    - images: those that are in memory, decoded or not, training and test.
    - embeddings: of all test images by all models.

    Args:
        config: the experiment.
        splits: its images.
        model: the model.
    """
    batch = config.training.batch_size
    width = 2 if config.training.policy in _HALF else 4
    bank = model.reference_bank
    num_proxies = 0 if bank is None else model.num_classes * model.proxies_per_class
    images = batch
    if model.sample_bank is not None:
        images += num_proxies  # are embedded with each batch
    dim = model.embedder.output_shape[-1]
    weights = sum(math.prod(w.shape) for w in model.embedder.weights)
    parts = [splits.training, splits.query, splits.gallery]
    parts = [part for part in parts if part is not None]
    num_models = len(fold_splits(config.data, splits.training))
    return {
        "activations": 2 * images * width * _activations(model.embedder),
        "weights": 7 * 4 * weights,
        "proxies": 4 * num_proxies * (7 * dim + 2 * batch),
        "images": sum(_held_bytes(part.images) for part in parts),
        "embeddings": 4 * dim * num_models * sum(len(part) for part in parts[1:]),
    }


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


def _test_seconds(splits: Splits, num_models: int, speed: Speed) -> float:
    """Each model embeds and searches alone, and then all of them together."""
    query = len(splits.query)
    gallery = 0 if splits.gallery is None else len(splits.gallery)
    pairs = query * (gallery or query) * (num_models + num_models)
    return num_models * (query + gallery) * speed.image + pairs * speed.pair


def _activations(embedder: keras.Model) -> int:
    """Numbers that the layers give for one image."""
    count = 0
    for layer in embedder._flatten_layers():
        if isinstance(layer, (keras.Model, keras.layers.InputLayer)):
            continue
        for tensor in keras.tree.flatten(layer.output):
            count += math.prod(tensor.shape[1:])
    return count


def _held_bytes(images: np.ndarray) -> int:
    if images.ndim > 1:
        return images.nbytes
    return sum(len(image) for image in images)


def _machine_bytes() -> float:
    if not hasattr(os, "sysconf"):  # Windows does not tell
        return math.inf
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
