"""Trainer: fit and evaluate for a model that makes embeddings of labelled images."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_ccp import distribute, retrieval
from keras_ccp.arguments import refuse_sample_weight
from keras_ccp.datasets import Dataset, check_labels
from keras_ccp.fit_checks import EndOfData, check_steps, ordered
from keras_ccp.image_checks import (
    ImageSpec,
    check_evaluation_images,
    check_has_pairs,
    check_images,
)
from keras_ccp.pipeline import EvaluationData
from keras_ccp.training_data import checked_training_data, label_errors


class Trainer(keras.Model):
    """A Keras model whose data are checked before time is spent on them.

    What it is evaluated by are retrieval metrics. A subclass has an `embedder`, and
    says by `label_bound` which labels fit it.
    """

    @property
    def image_spec(self) -> ImageSpec:
        """What images must fit."""
        return ImageSpec.of(self.embedder)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Any = None,
        **kwargs,
    ) -> keras.callbacks.History:
        """Trains the model, as `keras.Model.fit` does.

        Data are checked first. `CCPCallback` runs before the other callbacks, which
        find its values in their logs.

        Args:
            x: images, or batches of `(images, labels)` as `balanced_batches` gives.
            y: `(n,)` integer labels where `x` is an array of images.
            batch_size: int, size of a batch where `x` is an array. Defaults to 32.
            epochs: int, number of epochs. Defaults to 1.
            verbose: as for `keras.Model.fit`.
            callbacks: list of Keras callbacks.
            **kwargs: further arguments of `keras.Model.fit`.

        Returns:
            `keras.callbacks.History`.

        Raises:
            TypeError: if the data have no labels.
            ValueError: if labels or images do not fit, sample weights are given,
                nothing can be trained, or the data end before the epoch does.
        """
        for argument in ("sample_weight", "class_weight"):
            refuse_sample_weight(kwargs.get(argument), argument)
        if not self.trainable_variables:
            raise ValueError(
                "There must be something to train. Received: an embedder with all "
                "layers frozen and no proxies; set `trainable = True` and compile again"
            )
        x, y = checked_training_data(x, y, self.label_bound, self.image_spec)
        check_steps(x, kwargs.get("steps_per_epoch"))
        if y is None and not isinstance(x, keras.utils.PyDataset):
            # Keras' default would warn that it cannot shuffle a stream.
            kwargs.setdefault("shuffle", False)
        if (validation := kwargs.get("validation_data")) is not None:
            data = EvaluationData(validation, "validation_data")
            check_evaluation_images(data, self.image_spec)
            check_has_pairs(data)
            if isinstance(validation, Dataset):
                kwargs["validation_data"] = data.labelled_batches()
        end_of_data = EndOfData()
        callbacks = [*ordered(callbacks), end_of_data]
        for callback in callbacks:
            if hasattr(callback, "set_callbacks"):
                callback.set_callbacks(callbacks)
        try:
            with label_errors():
                history = super().fit(
                    x, y, batch_size, epochs, verbose, callbacks=callbacks, **kwargs
                )
        finally:
            # Keras ends no callback when a training is interrupted.
            for callback in callbacks:
                if hasattr(callback, "thaw"):
                    callback.thaw()
        if end_of_data.message:
            raise ValueError(end_of_data.message)
        return history

    def check_start(self) -> None:
        """Raises if a step cannot be taken, after the callbacks have begun."""

    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: None = None, **kwargs
    ) -> Any:
        """Takes one step, as `keras.Model.train_on_batch` does.

        Args:
            x: `(batch, height, width, channels)` images.
            y: `(batch,)` integer labels.
            sample_weight: must be `None`.
            **kwargs: further arguments of `keras.Model.train_on_batch`.

        Raises:
            TypeError: if labels are missing or are not integers.
            ValueError: if labels or images do not fit or sample weights are given.
        """
        refuse_sample_weight(sample_weight)
        x, y = checked_training_data(x, y, self.label_bound, self.image_spec)
        return super().train_on_batch(x, y, **kwargs)

    def evaluate(self, x: Any = None, y: Any = None, **kwargs) -> dict:
        """Retrieval metrics of images among themselves, of any classes.

        Args:
            x: images, a `Dataset`, or a finite batched `tf.data.Dataset` of
                `(images, labels)`.
            y: `(n,)` integer labels where `x` is an array of images.
            **kwargs: other arguments of `keras.Model.evaluate`; not used.

        Returns:
            dict of `retrieval.evaluate`: `precision_at_1`, `precision_at_r`,
            `map_at_r`, `num_queries`, `num_skipped`.

        Raises:
            ValueError: if sample weights or steps are given, or labels or images do
                not fit.
        """
        refuse_sample_weight(kwargs.get("sample_weight"))
        if kwargs.get("steps") is not None:
            raise ValueError(
                "`steps` must be None, since retrieval needs every image; pass fewer "
                f"images instead. Received: steps={kwargs['steps']!r}"
            )
        data = EvaluationData(x if y is None else (x, check_labels(y, "y")), "x")
        check_evaluation_images(data, self.image_spec)
        embeddings = self.predict(data.batches(), verbose=0)
        return retrieval.evaluate(embeddings, data.labels)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Embeddings of images, as `keras.Model.predict` gives them.

        Args:
            x: images, or batches of them.
            *args: further arguments of `keras.Model.predict`.
            **kwargs: further arguments of `keras.Model.predict`.

        Raises:
            ValueError: if an array of images does not fit.
        """
        if isinstance(x, np.ndarray):
            check_images("x", x, self.image_spec)
        return super().predict(x, *args, **kwargs)

    def test_step(self, data):
        raise ValueError(
            "There is no test loss, since unseen classes have no proxies: use "
            "model.evaluate(images, labels), which reports retrieval metrics"
        )

    # ==== Several replicas ====

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures training, as `keras.Model.compile` does.

        Args:
            *args: arguments of `keras.Model.compile`.
            **kwargs: further arguments of `keras.Model.compile`.

        Raises:
            ValueError: if XLA is to compile steps that several replicas share.
        """
        num_replicas = self.distribute_strategy.num_replicas_in_sync
        if kwargs.get("jit_compile") is True and num_replicas > 1:
            raise ValueError(
                "`jit_compile` must be False with several replicas, since XLA compiles "
                "for one device. Received: jit_compile=True, with "
                f"{num_replicas} replicas"
            )
        super().compile(*args, **kwargs)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        if distribute.has_workers(self.distribute_strategy):
            # Keras averages over workers along an axis, which a number has not.
            logs = {name: tf.reshape(value, (1,)) for name, value in logs.items()}
        return logs

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        strategy = self.distribute_strategy
        if iterator is not None and distribute.has_workers(strategy):
            # Keras would average the batches of all workers to see their shape.
            _, _, batches = next(iter(iterator))
            data_batch, iterator = distribute.local_share(next(batches), strategy), None
        super()._maybe_symbolic_build(iterator, data_batch)
