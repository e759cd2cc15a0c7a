"""CCPModel: an embedder trained against class proxies and a snapshot of itself."""

import contextlib
import functools
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_ccp import distribute, losses, pipeline, retrieval
from keras_ccp.datasets import Dataset
from keras_ccp.images import BrokenImage, failure
from keras_ccp.layers import input_of, normalization_layer, normalized
from keras_ccp.losses.reach import within_reach
from keras_ccp.pipeline import EvaluationData

logger = logging.getLogger("keras_ccp")


@keras.saving.register_keras_serializable(package="keras_ccp")
class CCPModel(keras.Model):
    r"""Trains an embedder by one problem of chance constrained programming.

    One step minimises, over the embedder's weights and the proxies,

    `pair_loss(batch, all proxies) + in_batch_weight * pair_loss(batch, batch)
    + (proximal_weight / 2) * sum ||weight - snapshot||^2`

    on normalised embeddings and proxies. `CCPCallback` makes a sequence of such
    problems of it; without it this is plain proxy-based metric learning and, with
    `proxies_per_class=0`, plain pairwise metric learning. The published lambda
    multiplies `weight - snapshot` in the gradient; hence the half.
    Source: "Deep Metric Learning with Chance Constraints",
    https://arxiv.org/abs/2209.09060.

    Called on images, the model gives normalised embeddings. `fit` logs `loss`,
    `pair_loss` (proxies and in-batch) and `proximal_loss`. `evaluate` and the
    `validation_data` of `fit` report retrieval metrics, on classes of any kind.

    ```python
    model = CCPModel(build_embedder(small_cnn()), num_classes=100, proxies_per_class=8)
    model.compile("adam", "multi_similarity")
    model.fit(batches, steps_per_epoch=25, callbacks=[CCPCallback(pool, validation)])
    ```

    Args:
        embedder: built `keras.Model`, images or what else it takes -> `(batch,
            embedding_dim)`, as `build_embedder` makes it. `model.embedder` ends in the
            normalisation, whether or not this one does.
        num_classes: int, number of training classes; labels are 0..num_classes-1.
        proxies_per_class: int, proxies of each class, 0 for none. Defaults to 1.
        proximal_weight: float, lambda. Defaults to 2e-4.
        in_batch_weight: float, weight of the pairs inside the batch. Defaults
            to 0. Without proxies it is not used: the weight is then 1.
        normalization: `"lipschitz"`, `"l2"` or `None`, for embeddings and proxies.
            Defaults to `"lipschitz"`.
        references: what stands for a class: `"proxies"`, learned points, or
            `"samples"`, images that are embedded afresh at every step, as many as
            there would be proxies. Defaults to `"proxies"`.
        proxy_learning_rate_multiplier: float, proxies move by this multiple of what
            the optimizer would move them by. Defaults to 1.
        weight_decay: float, L2: this multiple of each weight is added to its gradient,
            as the published runs do it. An optimizer's own `weight_decay` in Keras
            leaves the gradient alone. Defaults to 0.
        **kwargs: `name` and the other arguments of `keras.Model`.

    Attributes:
        proxies: `(num_classes, proxies_per_class, embedding_dim)` variable, or `None`.
        samples: `(num_classes, proxies_per_class, height, width, channels)` variable
            with `references="samples"`, else `None`.
        frozen_weights: the snapshot, a variable for each weight that can be trained.
        num_projections: int variable, projections so far.

    Raises:
        ValueError: if the embedder is not built or does not give one vector an image,
            or there is no such normalisation or kind of reference.
    """

    # ==== State ====

    def __init__(
        self,
        embedder: keras.Model,
        num_classes: int,
        proxies_per_class: int = 1,
        proximal_weight: float = 2e-4,
        in_batch_weight: float = 0.0,
        normalization: str | None = "lipschitz",
        references: str = "proxies",
        proxy_learning_rate_multiplier: float = 1.0,
        weight_decay: float = 0.0,
        **kwargs: Any,
    ):
        if references not in ("proxies", "samples"):
            raise ValueError('`references` must be "proxies" or "samples"')
        if references == "samples" and len(embedder.inputs) > 1:
            raise ValueError(
                '`references="samples"` needs a network of one input. Received: '
                f"{len(embedder.inputs)}\nTake the proxies"
            )
        super().__init__(**kwargs)
        self.embedder = normalized(embedder, normalization)
        if distribute.num_replicas() > 1:  # as in the scope of a strategy
            distribute.synchronize_batch_norm(self.embedder)
        self.num_classes = num_classes
        self.proxies_per_class = proxies_per_class
        self.proximal_weight = proximal_weight
        self.in_batch_weight = in_batch_weight
        self.normalization = normalization
        self.references = references
        self.proxy_learning_rate_multiplier = proxy_learning_rate_multiplier
        self.weight_decay = weight_decay
        self.normalize = normalization_layer(normalization)
        add = functools.partial(
            self.add_weight,
            initializer="zeros",
            dtype="float32",  # whatever the policy
            trainable=False,
            autocast=False,
            # Every replica computes the same update, if one is assigned in a step.
            aggregation="only_first_replica",
        )
        self.proxies = self.samples = None
        sizes = num_classes, proxies_per_class
        if proxies_per_class and references == "proxies":
            dim = self.embedder.output_shape[-1]
            # Expected norm 1, where embeddings live too after normalisation.
            start = keras.initializers.RandomNormal(stddev=dim**-0.5)
            self.proxies = add(
                (*sizes, dim), name="proxies", initializer=start, trainable=True
            )
        elif proxies_per_class:
            shape, dtype = self.embedder.input_shape[1:], self.embedder.inputs[0].dtype
            self.samples = add((*sizes, *shape), dtype=dtype, name="samples")
        weights = _trainable_by_nature(self.embedder)
        self.frozen_weights = [add(w.shape, name="frozen") for w in weights]
        # In a function: in an attribute Keras would count them twice.
        self._embedder_weights = lambda: weights
        # Variables, since Python numbers would be baked into the traced step.
        self.active_proximal_weight = add((), name="active_proximal_weight")
        self.num_projections = add((), dtype="int32", name="num_projections")
        means = "loss", "pair_loss", "proximal_loss"
        self._means = [keras.metrics.Mean(name=name) for name in means]
        self._memory: list[keras.layers.Layer] = []
        self.fit_callbacks: list[keras.callbacks.Callback] = []
        self.head_alone = False
        self.built = True

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return list(self._means)

    def proxy_embeddings(self) -> np.ndarray:
        """`(num_classes, proxies_per_class, dim)` normalised proxies or samples."""
        if self.samples is None:
            return np.asarray(self.normalize(self.proxies))
        images = tf.reshape(self.samples, (-1, *self.samples.shape[2:]))
        embeddings = self.predict(images, verbose=0)
        return embeddings.reshape(self.num_classes, self.proxies_per_class, -1)

    def take_snapshot(self) -> None:
        """Copies the embedder's weights into the snapshot and switches lambda on."""
        for weight, frozen in self._snapshot_pairs():
            # Of hundreds of weights, the checks of Keras' `assign` take most of it.
            value = tf.cast(weight.value, frozen.dtype)
            frozen.value.assign(value, read_value=False)
        self.active_proximal_weight.assign(self.proximal_weight)

    def drop_snapshot(self) -> None:
        """Switches lambda off, as before the first snapshot."""
        self.active_proximal_weight.assign(0.0)

    def proximal_loss(self) -> tf.Tensor:
        """`(lambda / 2) * sum ||weight - snapshot||^2`, 0 before the first snapshot."""
        if not self.proximal_weight or not self.frozen_weights:
            return tf.zeros(())
        parts = [tf.nn.l2_loss(weight - old) for weight, old in self._snapshot_pairs()]
        return self.active_proximal_weight * tf.cast(tf.add_n(parts), tf.float32)

    def _snapshot_pairs(self):
        return zip(self._embedder_weights(), self.frozen_weights, strict=True)

    def train_head_alone(self, alone: bool) -> None:
        """Trains nothing but the last layer and the proxies, or all again."""
        if alone != self.head_alone:
            self.head_alone = alone
            # What is trained was baked into the step when it was traced.
            self.make_train_function(force=True)

    # ==== One step ====

    def call(self, images, training=None):
        # Not None, with which augmentation layers would change the images of users.
        return self.embedder(images, training=bool(training))

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        """This replica's share of the loss; the shares add up to the whole."""
        labels = tf.reshape(tf.cast(y, "int32"), (-1,))
        if self.proxies_per_class:
            rows = self.loss.pairs(labels, y_pred, *self._proxy_rows(labels, y_pred))
            rows = losses.pair_loss.as_rows(rows, labels)
            if self.in_batch_weight:
                rows += self.in_batch_weight * self.loss.call(labels, y_pred)
        else:
            rows = self.loss.call(labels, y_pred)
        pair_loss, proximal_loss = tf.reduce_mean(rows), self.proximal_loss()
        regularisers = [tf.cast(loss, tf.float32) for loss in self.losses]
        loss = tf.add_n([pair_loss, proximal_loss, *regularisers])
        for mean, value in zip(
            self._means, (loss, pair_loss, proximal_loss), strict=True
        ):
            mean.update_state(value)
        return loss / distribute.num_replicas()

    def _proxy_rows(self, labels, embeddings):
        """`(n,)` labels and `(n, dim)` normalised rows that a batch is compared to."""
        classes = np.arange(self.num_classes, dtype="int32")
        classes = np.repeat(classes, self.proxies_per_class)
        if self.samples is not None:
            images = tf.reshape(self.samples, (-1, *self.samples.shape[2:]))
            return classes, self(images, training=not self.head_alone)
        proxies = tf.reshape(self.proxies, (-1, self.proxies.shape[-1]))
        # Where only directions count the normalisation would be for nothing.
        normalize = tf.identity if self.loss.ignores_length else self.normalize
        # XLA has to know how many rows there are.
        reach = np.inf if self.jit_compile else self.loss.reach
        return within_reach(reach, labels, embeddings, classes, proxies, normalize)

    def train_step(self, data):
        images, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        checks = self._label_assertions(labels, sample_weight)
        checks += _pixel_assertions(images, self.embedder)
        update = self._update
        if self.jit_compile:
            update = tf.function(update, autograph=False, jit_compile=True)
        with tf.control_dependencies(checks):
            update(images, labels)
        logs = {mean.name: mean.result() for mean in self._means}
        if distribute.has_workers(self.distribute_strategy):
            # Keras averages over workers along an axis, which a number has not.
            logs = {name: tf.reshape(value, (1,)) for name, value in logs.items()}
        return logs

    def _update(self, images, labels):
        with tf.GradientTape() as tape:
            embeddings = self(images, training=not self.head_alone)
            loss = self.compute_loss(images, labels, embeddings)
            loss = self.optimizer.scale_loss(loss)
        weights = self.trainable_weights
        if self.head_alone:
            head = [la for la in self.embedder.layers if la.trainable_weights][-1]
            trained = {id(w) for w in (*head.trainable_weights, self.proxies)}
            weights = [weight for weight in weights if id(weight) in trained]
        gradients = tape.gradient(loss, weights)
        if self.weight_decay:
            # Once, though gradients are summed over replicas, and scaled as they are.
            decay = tf.constant(self.weight_decay / distribute.num_replicas())
            decay = self.optimizer.scale_loss(decay)
            pairs = zip(gradients, weights, strict=True)
            gradients = [gradient + decay * weight for gradient, weight in pairs]
        before = None if self.proxies is None else tf.identity(self.proxies)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        if before is not None and (factor := self.proxy_learning_rate_multiplier) != 1:
            # The update is scaled, not the gradient: Adam would undo that.
            self.proxies.assign(before + factor * (self.proxies - before))

    def _label_assertions(self, labels, sample_weight):
        """What is asserted of labels as a part of the step; other forms are refused."""
        if sample_weight is not None:
            raise ValueError(
                "`sample_weight` and `class_weight` must be left out. Received: weights"
                "\nThe loss compares pairs; draw samples more often instead"
            )
        if labels is not None:
            labels = tf.convert_to_tensor(labels)  # an array in eager steps
        integer = labels is not None and labels.dtype.is_integer
        if not integer or (
            labels.shape.rank != 1 and not labels.shape[1:].is_compatible_with((1,))
        ):
            received = labels is not None and f"{labels.dtype.name} {labels.shape}"
            raise ValueError(
                f"`y` must be integers, one an image. Received: {received or None}\n"
                "Pass labels beside images; np.argmax(y, axis=1) undoes one-hot rows"
            )
        # Wide, so that neither a label nor the number of classes wraps around.
        labels = tf.cast(labels, tf.int64)
        bound = self.num_classes if self.proxies_per_class else tf.int32.max
        low, high = tf.reduce_min(labels), tf.reduce_max(labels)
        values = [_WRONG_LABELS, low, high, bound - 1]
        return [tf.debugging.Assert((low >= 0) & (high < bound), values)]

    def make_train_function(self, force: bool = False) -> Any:
        # XLA drops assertions; `train_step` has it compile what comes after them.
        jit_compile, self.jit_compile = self.jit_compile, False
        super().make_train_function(force)
        self.jit_compile = jit_compile
        return self.train_function

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Nothing: the constructor and `compile` have built all there is.

        Keras has no public name for it, and its own fails where several workers train:
        it averages their batches to see the shape.
        """

    # ==== Keras' verbs ====

    def compile(
        self,
        optimizer: keras.optimizers.Optimizer | str = "rmsprop",
        loss: losses.PairLoss | str | None = None,
        **kwargs: Any,
    ) -> None:
        """Configures training.

        Args:
            optimizer: Keras optimizer or its name. Defaults to `"rmsprop"`.
            loss: pair loss, its name, or an object with the same `pairs` method.
            **kwargs: as for `keras.Model.compile`.

        Raises:
            TypeError: if `loss` has no `pairs`, or it takes other arguments.
            ValueError: if `loss.pairs` does not give one value an anchor, of which the
                mean is taken, or metrics or loss weights are given.
        """
        if given := {"loss_weights", "metrics", "weighted_metrics"} & {
            name for name, value in kwargs.items() if value
        }:
            raise ValueError(
                f"`{given.pop()}` must be left out. Received: a value\nThere is one "
                "loss, over pairs; evaluate and CCPCallback report P@1, P@R and MAP@R"
            )
        loss, dim = losses.get(loss), self.embedder.output_shape[-1]
        kept = self._memory[0] if self._memory else None
        self._memory.clear()  # of another loss; Keras would go on to save it
        if isinstance(loss, losses.CrossBatchMemory):
            if self.proxies_per_class and not self.in_batch_weight:
                raise ValueError(
                    "`loss` must not be a CrossBatchMemory beside proxies with "
                    "in_batch_weight=0: pairs with the memory would not count.\n"
                    "Give CCPModel proxies_per_class=0, or in_batch_weight above 0"
                )
            loss.build(dim, of=kept)
            self._memory.append(loss.memory)
        super().compile(optimizer=optimizer, loss=loss, **kwargs)
        self.optimizer.build(self.trainable_variables)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Any = None,
        **kwargs: Any,
    ) -> keras.callbacks.History:
        """Trains the model, as `keras.Model.fit` does.

        `CCPCallback` runs before the other callbacks, which find its values in their
        logs, and `Backup` after them. While it runs they are `model.fit_callbacks`.

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
            ValueError: if labels or images do not fit, sample weights are given,
                nothing can be trained, `steps_per_execution` does not divide the
                steps, there are `validation_data` beside a `CCPCallback`, or the data
                end before the epoch does.
        """
        if not self.trainable_variables:
            raise ValueError(
                "There must be something to train. Received: an embedder with all "
                "layers frozen and no proxies\nSet `trainable = True` and compile again"
            )
        steps = kwargs.get("steps_per_epoch")
        if isinstance(x, tf.data.Dataset) and (steps is None or steps < 1):
            if x.cardinality() == tf.data.INFINITE_CARDINALITY:
                raise ValueError(
                    "`steps_per_epoch` must be given with endless data. Received: "
                    f"{steps}\nThe published runs evaluate after 25: steps_per_epoch=25"
                )
        if steps and steps % self.steps_per_execution:
            raise ValueError(
                "`steps_per_execution` must divide `steps_per_epoch`. Received: "
                f"{self.steps_per_execution} for {steps}\n"
                "Keras would run more steps than asked for; compile with another"
            )
        if y is None and not isinstance(x, keras.utils.PyDataset):
            # Keras' default would warn that it cannot shuffle a stream.
            kwargs.setdefault("shuffle", False)
        listed = keras.tree.flatten([] if callbacks is None else callbacks)
        if (validation := kwargs.get("validation_data")) is not None:
            if any(hasattr(callback, "project") for callback in listed):
                raise ValueError(
                    "`validation_data` must be left out beside a CCPCallback, whose "
                    "names in the logs it shares\nEvaluate other images after `fit`"
                )
            data = EvaluationData(validation, "validation_data")
            self.check_images(data)
            if isinstance(validation, Dataset):
                kwargs["validation_data"] = data.labelled_batches()
        watch = _Watch()
        # Known by what they do, since they build upon this module.
        self.fit_callbacks = [
            *sorted(
                listed,
                key=lambda c: hasattr(c, "first_epoch") - hasattr(c, "project"),
            ),
            watch,
        ]
        callbacks = list(self.fit_callbacks)
        first = [c.first_epoch() for c in callbacks if hasattr(c, "first_epoch")]
        kwargs["initial_epoch"] = max(kwargs.get("initial_epoch", 0), *first, 0)
        try:
            with _plain_errors():
                history = super().fit(
                    x, y, batch_size, epochs, verbose, callbacks, **kwargs
                )
        finally:
            self.train_head_alone(False)  # also where it was interrupted
        if watch.problem:
            raise ValueError(watch.problem)
        return history

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with _plain_errors():
            return super().train_on_batch(*args, **kwargs)

    def evaluate(self, x: Any = None, y: Any = None, **kwargs: Any) -> dict:
        """Retrieval metrics of images among themselves, of any classes.

        Args:
            x: images, a `Dataset`, or a finite batched `tf.data.Dataset` of
                `(images, labels)`.
            y: `(n,)` integer labels where `x` is an array of images.
            **kwargs: other arguments of `keras.Model.evaluate`; not used.

        Returns:
            dict of `retrieval.evaluate`: `precision_at_1`, `precision_at_r`,
            `map_at_r`, `num_queries`, `num_skipped`.
        """
        data = EvaluationData(x if y is None else (x, y), "x")
        self.check_images(data)
        return retrieval.evaluate(self.embed(data), data.labels)

    def test_step(self, data):
        raise ValueError("Unseen classes have no proxies.\nUse model.evaluate")

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        """As `keras.Model.predict`, also of a `Dataset`."""
        if isinstance(x, Dataset):
            x = EvaluationData(x, "x").batches()
        return super().predict(x, *args, **kwargs)

    def embed(self, data: Any, progress: bool = False) -> np.ndarray:
        """Embeddings of images, in their order.

        Args:
            data: `Dataset`, array of images, dict of arrays, list of paths or of
                encoded bytes, or batches of images.
            progress: whether to show a bar. Defaults to `False`.

        Returns:
            `(n, dim)` float32 array, normalised.
        """
        return pipeline.embed(self, data, progress)

    def check_images(self, data: EvaluationData) -> None:
        """Refuses another size, and pixels of 0..1 where the embedder takes 0..255."""
        with _plain_errors():
            images = next(iter(data.batches(np.arange(min(32, len(data))))))
            specs = keras.tree.map_structure(
                lambda part: keras.KerasTensor(part.shape, part.dtype.name), images
            )
            self.embedder.compute_output_spec(specs)  # Keras looks at the size
            _pixel_assertions(images, self.embedder)
        if not _takes_images(self.embedder):
            return
        (images,) = keras.tree.flatten(images)
        scales = [
            np.max(np.abs(layer.scale))
            for layer in _all_layers(self.embedder)
            if isinstance(layer, keras.layers.Rescaling)
        ]
        # Of 0..255 no 32 images are as dark, and a lesser factor is for such pixels.
        is_dark = images.dtype.is_floating and 0 < tf.reduce_max(images) <= 1
        if is_dark and min(scales, default=1) < 1 / 32:
            logger.warning(
                "`%s` looks like pixels of 0 to 1, and the embedder's `Rescaling` "
                "takes 0 to 255: pass `images * 255`, or leave the layer out",
                data.name,
            )

    def export(self, filepath: str | os.PathLike, **kwargs: Any) -> None:
        """Writes the embedder, without proxies, for serving.

        Args:
            filepath: directory of the SavedModel: images -> normalised embeddings.
            **kwargs: further arguments of `keras.Model.export`.
        """
        inputs = input_of(self.embedder)
        # So that layers of augmentation do nothing.
        embeddings = self.embedder(inputs, training=False)
        keras.Model(inputs, embeddings).export(filepath, **kwargs)

    def compile_from_config(self, config):
        config = keras.saving.deserialize_keras_object(config)
        self.compile(**{k: v for k, v in config.items() if v is not None})

    def get_config(self) -> dict:
        names = (
            "num_classes proxies_per_class proximal_weight in_batch_weight "
            "normalization references proxy_learning_rate_multiplier weight_decay"
        ).split()
        return {
            **super().get_config(),
            "embedder": keras.saving.serialize_keras_object(self.embedder),
            **{name: getattr(self, name) for name in names},
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        embedder = keras.saving.deserialize_keras_object(
            config["embedder"], custom_objects=custom_objects
        )
        return cls(**{**config, "embedder": embedder})


def reset_slots(optimizer: keras.optimizers.Optimizer, variable: Any) -> None:
    """Forgets what an optimizer has gathered about one variable."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    prefix = f"{variable.path.replace('/', '_')}_"
    for slot in inner.variables:
        if slot.name == f"{prefix}average":
            # A moving average of the weights, not a moment: it starts again.
            slot.assign(variable)
        elif slot.name.startswith(prefix) or slot.name == variable.name:
            # Adafactor names its factored moments after the variable alone.
            slot.assign(np.zeros(slot.shape, slot.dtype))


def _all_layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    for layer in model.layers:
        yield layer
        if isinstance(layer, keras.Model):
            yield from _all_layers(layer)


def _trainable_by_nature(model: keras.Model) -> list[keras.Variable]:
    """The model's `trainable_weights` as if no layer were frozen.

    A snapshot of those that are trainable now would not load again after a layer was
    frozen or unfrozen.
    """
    by_nature = set()
    for layer in _all_layers(model):
        if frozen := not layer.trainable and not isinstance(layer, keras.Model):
            layer.trainable = True
        by_nature |= {id(weight) for weight in layer.trainable_weights}
        if frozen:
            layer.trainable = False
    return [weight for weight in model.weights if id(weight) in by_nature]


# ==== What would be silently wrong ====

_WRONG_LABELS, _WRONG_PIXELS = "keras_ccp labels", "keras_ccp pixels"
_MESSAGES = {
    _WRONG_LABELS: "`y` must hold labels from 0 to {2}. Received: labels of {0} to {1}"
    "\nkeras_ccp.datasets.Dataset numbers the classes of any labels from 0 on",
    _WRONG_PIXELS: "Images must hold pixels of 0 to 255, which is what the embedder's "
    "input of integers takes. Received: pixels of {0} to {1}\n"
    "Pass `images * 255`, or build the embedder with an input of floats",
}


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises what TensorFlow reports of our assertions as one plain `ValueError`."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if "keras_ccp.datasets.verify" in str(error):
            raise BrokenImage(failure(error)) from None
        for mark, message in _MESSAGES.items():
            if mark in str(error):
                values = re.split(r"[\[\]\s']+", str(error).rpartition(mark)[2])
                raise ValueError(message.format(*values[1:4])) from None
        raise


def _takes_images(embedder: keras.Model) -> bool:
    return len(embedder.inputs) == 1 and len(embedder.inputs[0].shape) == 4


def _pixel_assertions(images: tf.Tensor, embedder: keras.Model) -> list:
    """What is asserted of images that an input of integers may not hold."""
    if not _takes_images(embedder) or "int" not in embedder.inputs[0].dtype:
        return []
    (images,) = keras.tree.flatten(images)
    images = tf.convert_to_tensor(images)  # an array in eager steps
    if images.dtype == tf.uint8:
        return []
    low, high = tf.reduce_min(images), tf.reduce_max(images)
    fits = (low >= 0) & (high <= 255)
    if images.dtype.is_floating:  # would be rounded to nothing
        fits &= (high > 1) | (high == 0)
    return [tf.debugging.Assert(fits, [_WRONG_PIXELS, low, high])]


class _Watch(keras.callbacks.Callback):
    """Stops the training in good order where Keras would go on without data."""

    problem = None

    def on_train_begin(self, logs=None):
        samples = self.model.samples
        if samples is not None and not np.any(samples):
            raise ValueError(
                '`references="samples"` needs images before the first step. Received: '
                "none\nPass a CCPCallback, or call model.samples.assign(images)"
            )

    def on_epoch_begin(self, epoch, logs=None):
        self._steps = 0

    def on_train_batch_end(self, batch, logs=None):
        # `batch` is the last of several when steps_per_execution is set.
        self._steps = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        expected = self.params.get("steps") or 1
        if self._steps < expected and not self.model.stop_training:
            self.problem = (
                f"`x` must give data for {expected} steps in each epoch. Received: its "
                f"end after {self._steps} steps of epoch {epoch + 1}, where training "
                "stopped\nUse .repeat(), balanced_batches or fewer steps"
            )
            self.model.stop_training = True
