"""One model of a fold, from random or pretrained weights to its best ones."""

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import keras
import tensorflow as tf

from keras_ccp import backbones, losses, pipeline
from keras_ccp.app.config import Config, EmbedderConfig
from keras_ccp.backup import Backup
from keras_ccp.callback import CCPCallback, WarmUp
from keras_ccp.datasets import Dataset, verify
from keras_ccp.distribute import is_chief, writable
from keras_ccp.files import write_file
from keras_ccp.layers import build_embedder
from keras_ccp.model import CCPModel
from keras_ccp.monitor.projection_log import ProjectionLog
from keras_ccp.monitor.tensorboard import CCPTensorBoard

EMBEDDER_FILE = "embedder.keras"
SUMMARY_FILE = "fold.json"
LOG_FILE = "log.csv"


@dataclasses.dataclass(frozen=True)
class Fold:
    """What one model is trained on, its folder, and the seed of all its chance."""

    training: Dataset
    validation: Dataset
    directory: Path
    seed: int

    @property
    def is_finished(self) -> bool:
        """Whether the model is trained and its best weights are there."""
        return (self.directory / SUMMARY_FILE).exists()


def train_fold(
    config: Config,
    fold: Fold,
    root: str | os.PathLike,
    strategy: tf.distribute.Strategy,
    verbose: int | str = "auto",
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> None:
    """Trains one model, or goes on where it was stopped.

    Leaves in the fold's directory `embedder.keras` (images -> normalised embeddings,
    best weights of the run), `log.csv`, `projections.jsonl`, TensorBoard events and
    `fold.json`. Further callbacks find each evaluation in their logs.
    """
    training = config.training
    keras.backend.clear_session()
    keras.utils.set_random_seed(fold.seed)
    keras.config.set_dtype_policy(training.policy)
    start = time.perf_counter()
    with strategy.scope():
        model = make_model(config, fold.training, Path(root))
    callback = CCPCallback(
        fold.training, fold.validation, seed=fold.seed, **config.callback
    )
    backup = Backup(fold.directory / "backup")
    first_batch = backup.num_epochs * training.steps_per_evaluation
    with writable(fold.directory, strategy) as directory:
        _cut_log(directory / LOG_FILE, backup.num_epochs)
        logs = [
            keras.callbacks.CSVLogger(directory / LOG_FILE, append=True),
            keras.callbacks.TensorBoard(directory / "tensorboard", write_graph=False),
            CCPTensorBoard(directory / "tensorboard"),
            ProjectionLog(directory),
        ]
        if training.warm_up_epochs:
            logs.append(WarmUp(training.warm_up_epochs))
        try:
            model.fit(
                training_batches(config, fold, first_batch),
                steps_per_epoch=training.steps_per_evaluation,
                epochs=training.max_evaluations,
                verbose=verbose if is_chief(strategy) else 0,
                callbacks=[callback, *logs, *callbacks, backup],
            )
        except tf.errors.InvalidArgumentError:
            verify(fold.training)  # names what cannot be decoded
            raise
        partial = directory / f"partial_{EMBEDDER_FILE}"
        model.embedder.save(partial)
        partial.replace(directory / EMBEDDER_FILE)
        summary = {
            "validation": callback.evaluate(),
            "num_projections": callback.num_projections,
            "num_steps": int(model.optimizer.iterations.numpy()),
            "seconds": round(time.perf_counter() - start, 1),
        }
        # Last and at once: its presence says that the fold is finished.
        write_file(directory / SUMMARY_FILE, json.dumps(summary, indent=2))


def _cut_log(path: Path, num_epochs: int) -> None:
    """Leaves only the rows of epochs that are not run again."""
    if not path.exists():
        return
    header, *rows = path.read_text("utf-8", "replace").splitlines() or [""]
    kept = dict.fromkeys(map(str, range(num_epochs)))
    for row in rows:
        epoch = row.partition(",")[0]
        if epoch in kept and row.count(",") == header.count(","):
            kept[epoch] = row
    lines = [header, *filter(None, kept.values())] if num_epochs else []
    write_file(path, "".join(f"{line}\n" for line in lines))


def make_model(config: Config, training: Dataset, root: Path) -> CCPModel:
    """The compiled model of an experiment; weight files are relative to `root`."""
    section = config.embedder
    embedder = build_embedder(
        _backbone(section, training, root),
        embedding_dim=section.embedding_dim,
        pooling=section.pooling,
        normalization=section.normalization,
    )
    model = CCPModel(
        embedder,
        num_classes=training.num_classes,
        normalization=section.normalization,
        **config.model,
    )
    loss, memory = (
        losses.get(config.loss.name, **config.loss.arguments),
        config.loss.memory,
    )
    options = config.training
    if memory is not None:
        size = memory.batches * options.batch_size
        loss = losses.CrossBatchMemory(loss, size, memory.start_step)
    rate = options.learning_rate
    if options.schedule == "cosine":
        steps = options.steps_per_evaluation * options.max_evaluations
        rate = keras.optimizers.schedules.CosineDecay(rate, steps, alpha=0.02)
    optimizer = keras.optimizers.Adam(rate, options.beta_1, options.beta_2)
    model.compile(optimizer, loss, jit_compile=options.jit_compile)
    return model


def untrained_embedder(config: Config, training: Dataset, root: Path) -> keras.Model:
    """The network as it is, pooled and without a head: what training has to beat."""
    keras.utils.set_random_seed(config.seed)
    backbone = _backbone(config.embedder, training, root)
    return build_embedder(backbone, None, config.embedder.pooling, "l2")


def _backbone(section: EmbedderConfig, training: Dataset, root: Path) -> keras.Model:
    shape = training.images.shape[1:]
    if training.is_encoded:
        shape = (training.size, training.size, 3)
    name, options = section.backbone, {"frozen_statistics": section.frozen_statistics}
    # Two have no weights to load, and refuse any.
    if section.weights or name not in ("small_cnn", "resnet20_v2"):
        is_file = section.weights not in (None, "imagenet")
        options["weights"] = root / section.weights if is_file else section.weights
    if hasattr(keras.applications, name):
        return backbones.application(name, shape, **options)
    return getattr(backbones, name)(shape, **options)


def training_batches(
    config: Config, fold: Fold, first_batch: int = 0
) -> tf.data.Dataset:
    """Endless augmented batches of a model's training images and labels.

    The first `first_batch` ones are passed over.
    """
    data, training = fold.training, config.training
    crops = data.size, data.short_side
    augment = {
        "mlrc": lambda: pipeline.mlrc_augmentation(*crops),
        "conventional": lambda: pipeline.conventional_augmentation(*crops),
        "small": pipeline.small_image_augmentation,
        "small_no_flip": lambda: pipeline.small_image_augmentation(flip=False),
        "none": lambda: None,
    }[config.data.augmentation]()
    return pipeline.balanced_batches(
        data,
        classes_per_batch=training.batch_size // training.samples_per_class,
        samples_per_class=training.samples_per_class,
        seed=fold.seed,
        augment=augment,
        first_batch=first_batch,
    )
