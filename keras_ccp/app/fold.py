"""One model of an experiment, from random or pretrained weights to its best ones."""

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import keras
import tensorflow as tf

from keras_ccp import backbones, losses
from keras_ccp.app.config import Config, EmbedderConfig
from keras_ccp.backup import Backup
from keras_ccp.callback import CCPCallback, WarmUp
from keras_ccp.datasets import Dataset
from keras_ccp.distribute import is_chief, synchronize_batch_norm, writable
from keras_ccp.files import write_whole
from keras_ccp.layers import build_embedder
from keras_ccp.model import CCPModel
from keras_ccp.monitor.projection_log import ProjectionLog
from keras_ccp.monitor.tensorboard import CCPTensorBoard
from keras_ccp.pipeline import (
    balanced_batches,
    conventional_augmentation,
    mlrc_augmentation,
    small_image_augmentation,
)

EMBEDDER_FILE = "embedder.keras"
SUMMARY_FILE = "fold.json"


@dataclasses.dataclass(frozen=True)
class Fold:
    """What one model is trained on, and where its files go.

    Args:
        training: images to train on.
        validation: images of other classes.
        directory: folder of this model.
        seed: of everything random.
    """

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
    `fold.json`.

    Args:
        config: the experiment.
        fold: data and place.
        root: folder of the data, to which files of weights are relative.
        strategy: the devices that train.
        verbose: as for `keras.Model.fit`.
        callbacks: further ones, which find each evaluation in their logs.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(fold.seed)
    keras.config.set_dtype_policy(config.training.policy)
    start = time.perf_counter()
    with strategy.scope():
        model = make_model(config, fold.training, Path(root))
    if strategy.num_replicas_in_sync > 1:
        synchronize_batch_norm(model.embedder)
    callback = _ccp_callback(config, fold)
    backup = Backup(fold.directory / "backup")
    training = config.training
    first_batch = backup.num_epochs * training.steps_per_evaluation
    with writable(fold.directory, strategy) as directory:
        model.fit(
            training_batches(config, fold, first_batch),
            steps_per_epoch=training.steps_per_evaluation,
            epochs=training.max_evaluations,
            verbose=verbose if is_chief(strategy) else 0,
            callbacks=[callback, *_callbacks(config, directory), *callbacks, backup],
        )
        _save_embedder(model, directory / EMBEDDER_FILE)
        _write_summary(model, callback, directory, time.perf_counter() - start)


def make_model(config: Config, training: Dataset, root: Path) -> CCPModel:
    """Builds and compiles the model of an experiment.

    Args:
        config: the experiment.
        training: images to train on.
        root: folder to which files of weights are relative.

    Returns:
        A compiled `CCPModel`.
    """
    shape = training.images.shape[1:]
    if training.is_encoded:
        shape = (training.size, training.size, 3)
    section = config.embedder
    embedder = build_embedder(
        _backbone(section, shape, root),
        embedding_dim=section.embedding_dim,
        pooling=section.pooling,
        normalization=section.normalization,
    )
    proxies = config.proxies
    model = CCPModel(
        embedder,
        num_classes=training.num_classes,
        proxies_per_class=proxies.per_class,
        proximal_weight=proxies.proximal_weight,
        in_batch_weight=proxies.in_batch_weight,
        normalization=section.normalization,
        references=proxies.references,
        proxy_learning_rate_multiplier=proxies.learning_rate_multiplier,
        weight_decay=config.training.weight_decay,
    )
    model.compile(
        _optimizer(config), _loss(config), jit_compile=config.training.jit_compile
    )
    return model


def _backbone(section: EmbedderConfig, shape: tuple, root: Path) -> keras.Model:
    frozen = section.frozen_statistics
    if section.backbone == "small_cnn":
        return backbones.small_cnn(shape, frozen_statistics=frozen)
    if section.backbone == "resnet20_v2":
        return backbones.resnet20_v2(shape, frozen_statistics=frozen)
    weights = section.weights
    if weights not in (None, "imagenet"):
        weights = root / weights
    named = {
        "bn_inception": backbones.bn_inception,
        "efficientnet_lite0": backbones.efficientnet_lite0,
    }
    if section.backbone in named:
        return named[section.backbone](shape, weights, frozen_statistics=frozen)
    return backbones.application(section.backbone, shape, weights, frozen)


def _loss(config: Config) -> losses.PairLoss:
    loss = losses.get(config.loss.name, **config.loss.arguments)
    memory = config.loss.memory
    if memory is None:
        return loss
    size = memory.batches * config.training.batch_size
    return losses.CrossBatchMemory(loss, size, memory.start_step)


def _optimizer(config: Config) -> keras.optimizers.Optimizer:
    training = config.training
    rate = training.learning_rate
    if training.schedule == "cosine":
        steps = training.steps_per_evaluation * training.max_evaluations
        rate = keras.optimizers.schedules.CosineDecay(rate, steps, alpha=0.02)
    return keras.optimizers.Adam(rate, training.beta_1, training.beta_2)


def training_batches(
    config: Config, fold: Fold, first_batch: int = 0
) -> tf.data.Dataset:
    """Endless augmented batches of a model's training images.

    Args:
        config: the experiment.
        fold: the model's data and seed.
        first_batch: how many batches are passed over. Defaults to 0.

    Returns:
        `tf.data.Dataset` of `(batch, height, width, channels)` images and
        `(batch,)` int32 labels.
    """
    data, training = config.data, config.training
    augmentations = {
        "mlrc": lambda: mlrc_augmentation(fold.training.size, fold.training.short_side),
        "conventional": lambda: conventional_augmentation(
            fold.training.size, fold.training.short_side
        ),
        "small": small_image_augmentation,
        "small_no_flip": lambda: small_image_augmentation(flip=False),
        "none": lambda: None,
    }
    return balanced_batches(
        fold.training,
        classes_per_batch=training.batch_size // training.samples_per_class,
        samples_per_class=training.samples_per_class,
        seed=fold.seed,
        augment=augmentations[data.augmentation](),
        first_batch=first_batch,
    )


def _ccp_callback(config: Config, fold: Fold) -> CCPCallback:
    proxies = config.proxies
    return CCPCallback(
        fold.training,
        fold.validation,
        pool_size=proxies.pool_size,
        patience=proxies.patience,
        stop_patience=config.training.stop_patience,
        max_projections=None if proxies.switching else 0,
        restore_on_projection=proxies.restore_on_projection,
        seed=fold.seed,
    )


def _callbacks(config: Config, directory: Path) -> list[keras.callbacks.Callback]:
    callbacks = [
        keras.callbacks.CSVLogger(directory / "log.csv", append=True),
        keras.callbacks.TensorBoard(directory / "tensorboard", write_graph=False),
        CCPTensorBoard(directory / "tensorboard"),
        ProjectionLog(directory),
    ]
    if config.training.warm_up_epochs:
        callbacks.append(WarmUp(config.training.warm_up_epochs))
    return callbacks


def _save_embedder(model: CCPModel, path: Path) -> None:
    partial = path.with_name(f"partial_{path.name}")
    model.embedder.save(partial)
    partial.replace(path)


def _write_summary(
    model: CCPModel, callback: CCPCallback, directory: Path, seconds: float
) -> None:
    summary = {
        "validation": callback.evaluate(),
        "num_projections": callback.num_projections,
        "num_steps": int(model.optimizer.iterations.numpy()),
        "seconds": round(seconds, 1),
    }
    # Last and at once: its presence says that the fold is finished.
    write_whole(directory / SUMMARY_FILE, json.dumps(summary, indent=2))
