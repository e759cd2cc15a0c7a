"""CCPModel: an embedder trained against class proxies and a frozen copy of itself."""

import contextlib
import functools
import itertools
import logging
import os
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_ccp import distribute, losses, retrieval
from keras_ccp.checks import (
    as_floats,
    check_finite,
    check_int,
    check_number,
    refuse_sample_weight,
)
from keras_ccp.datasets import Dataset, check_labels
from keras_ccp.layers import check_embedder, normalization_layer
from keras_ccp.pipeline import EvaluationData

logger = logging.getLogger("keras_ccp")

# A `Rescaling` by less than this is for pixels of 0..255.
_BYTE_SCALE = 1 / 32
# Pixels of 0..1, or less their mean and divided by their deviation, stay below this;
# of 0..255 no batch is as dark.
_SMALL = 4


class ImageSpec(NamedTuple):
    """What an embedder takes for an image.

    Args:
        shape: `(height, width, channels)`, `None` where free.
        dtype: of its input.
        takes_bytes: whether it brings pixels of 0 to 255 into its own range.
    """

    shape: tuple[int | None, ...]
    dtype: str
    takes_bytes: bool

    @classmethod
    def of(cls, embedder: keras.Model) -> "ImageSpec":
        """What a model takes, by its input and its layers.

        Args:
            embedder: built `keras.Model` of one input.
        """
        dtype = keras.backend.standardize_dtype(embedder.inputs[0].dtype)
        takes_bytes = "int" in dtype or any(
            isinstance(layer, keras.layers.Rescaling)
            and np.max(np.abs(layer.scale)) < _BYTE_SCALE
            for layer in embedder._flatten_layers()
        )
        return cls(embedder.input_shape[1:], dtype, takes_bytes)


def check_images(name: str, images: Any, spec: ImageSpec) -> None:
    """Refuses images that do not fit an embedder.

    Args:
        name: Name of the argument.
        images: `(n, height, width, channels)` array or tensor.
        spec: what the embedder takes.

    Raises:
        TypeError: If they are not one array of numbers.
        ValueError: If the shape differs, or values are not finite or out of range.
    """
    # A list of images of different sizes has no shape, an array of them no number.
    shape = getattr(images, "shape", None)
    if shape is None or str(getattr(images, "dtype", "")) == "object":
        raise TypeError(
            f"`{name}` must be one array of images of the same size; resize them "
            f"first. Received: type({name})={type(images).__name__}"
        )
    check_image_shape(name, tuple(shape)[1:], spec)
    images = np.asarray(images)
    check_finite(name, images)
    check_pixel_range(name, images, spec)


def check_image_shape(name: str, shape: tuple | None, spec: ImageSpec) -> None:
    """Refuses the shape of images that an embedder does not take.

    Args:
        name: Name of the argument.
        shape: shape of one image, `None` where unknown, or `None`.
        spec: what the embedder takes.

    Raises:
        ValueError: If they differ.
    """
    fits = shape is None or (
        len(shape) == len(spec.shape)
        and all(
            None in (expected, given) or expected == given
            for expected, given in zip(spec.shape, shape, strict=True)
        )
    )
    if not fits:
        raise ValueError(
            f"`{name}` must hold images of shape {tuple(spec.shape)}, the embedder's "
            f"input. Received: images of shape {tuple(shape)}"
        )


def check_pixel_range(name: str, images: np.ndarray, spec: ImageSpec) -> None:
    """Refuses images that an integer input cannot hold, and warns of dark ones.

    Args:
        name: Name of the argument.
        images: `(n, height, width, channels)` finite numbers.
        spec: what the embedder takes.

    Raises:
        ValueError: If the embedder's input is of integers and would round floats as
            small as pixels of 0 to 1, or has no room for the values.
    """
    if not spec.takes_bytes or images.dtype == np.uint8 or not images.size:
        return
    low, high = float(images.min()), float(images.max())
    is_float = images.dtype.kind in "fV"  # "V" is bfloat16
    is_small = is_float and 0 < max(-low, high) < _SMALL
    received = f"Received: {images.dtype} images of {low:.4g} to {high:.4g}"
    if "int" in spec.dtype and (is_small or low < 0 or high > 255):
        raise ValueError(
            f"`{name}` must hold pixels of 0 to 255, which is what the embedder's "
            "input of integers takes: bring them there (of 0 to 1 by `images * 255`), "
            f"or build the embedder with an input of floats. {received}"
        )
    if is_small:
        logger.warning(
            "`%s` looks like pixels of 0 to 1, and the embedder's `Rescaling` layer "
            "takes 0 to 255: pass `images * 255`, or build the embedder without the "
            "layer. %s",
            name,
            received,
        )


def check_evaluation_images(data: Any, spec: ImageSpec) -> None:
    """Refuses the images of `EvaluationData` that do not fit an embedder.

    Args:
        data: an `EvaluationData`.
        spec: what the embedder takes.

    Raises:
        ValueError: If shape or range differ.
    """
    check_image_shape(data.name, data.image_shape, spec)
    if data.first_images is not None:
        check_pixel_range(data.name, data.first_images, spec)


def check_has_pairs(data: Any) -> None:
    """Refuses `EvaluationData` among which no image can find one of its class.

    Args:
        data: an `EvaluationData`.

    Raises:
        ValueError: If no class has two images.
    """
    if np.unique_counts(data.labels).counts.max() < 2:
        raise ValueError(
            f"`{data.name}` must have classes of two images or more: a single image "
            "has nothing to be found by. Received: "
            f"{len(data.labels)} images, each of its own class"
        )


def warn_of_shared_images(validation: Any, pool: Any) -> None:
    """Warns where validation images are training images.

    Args:
        validation: an `EvaluationData`.
        pool: an `EvaluationData` of the training classes.
    """
    if validation.shares_images(pool):
        logger.warning(
            "`%s` and `%s` share images: what was trained on does not tell when to "
            "stop. Hold classes out by `Dataset.split_classes(0.75)`",
            validation.name,
            pool.name,
        )


_RETRIEVAL = (
    "labels are not what embeddings predict. model.evaluate(images, labels) and "
    "CCPCallback report P@1, P@R and MAP@R"
)
_REFUSED = {
    "loss_weights": "there is one loss, over pairs",
    "metrics": _RETRIEVAL,
    "weighted_metrics": _RETRIEVAL,
}


def refuse_compile_arguments(arguments: dict[str, Any]) -> None:
    """Raises if `compile` is given what a loss over pairs has no use for.

    Args:
        arguments: further arguments of `keras.Model.compile`, by name.

    Raises:
        ValueError: if one of them is among these.
    """
    for argument, reason in _REFUSED.items():
        value = arguments.get(argument)
        if value is not None and value != []:
            raise ValueError(
                f"`{argument}` is not supported, leave it out: {reason}. "
                f"Received: {argument}={value!r}"
            )


def check_steps(x: Any, steps_per_epoch: int | None) -> None:
    """Raises if the end of an epoch is nowhere.

    Args:
        x: training data.
        steps_per_epoch: int, or `None` for as many steps as there are data.

    Raises:
        TypeError: if the number of steps is not an integer.
        ValueError: if it is below 1, or missing where the data are endless.
    """
    if steps_per_epoch is not None:
        check_int("steps_per_epoch", steps_per_epoch, minimum=1)
    elif (
        isinstance(x, tf.data.Dataset)
        and x.cardinality() == tf.data.INFINITE_CARDINALITY
    ):
        raise ValueError(
            "`steps_per_epoch` must be given with endless data such as "
            "balanced_batches, e.g. steps_per_epoch=25. Received: steps_per_epoch=None"
        )


def ordered(callbacks: Any) -> list[keras.callbacks.Callback]:
    """The callbacks of a `fit`: `runs_first` in front, `runs_last` at the end.

    Args:
        callbacks: a Keras callback, a list of them, a `CallbackList` or `None`.

    Raises:
        TypeError: if one is not an instance of a Keras callback.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    callbacks = keras.tree.flatten([] if callbacks is None else callbacks)
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(
                "`callbacks` must be a list of keras.callbacks.Callback objects. "
                f"Received: {callback!r}"
            )
    return sorted(
        callbacks,
        key=lambda callback: (
            getattr(callback, "runs_last", False)
            - getattr(callback, "runs_first", False)
        ),
    )


class EndOfData(keras.callbacks.Callback):
    """Stops the training in good order where Keras would go on without data."""

    message = None

    def on_train_begin(self, logs=None):
        self.model.check_start()

    def on_epoch_begin(self, epoch, logs=None):
        self._batches = 0

    def on_train_batch_end(self, batch, logs=None):
        # `batch` is the last of several when steps_per_execution is set.
        self._batches = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        steps = self.params.get("steps") or 1
        if self._batches < steps and not self.model.stop_training:
            self.message = (
                f"`x` must give data for {steps} steps in each epoch. Received: its "
                f"end after {self._batches} steps of epoch {epoch + 1}; training was "
                "stopped there. Use .repeat(), balanced_batches or fewer steps"
            )
            self.model.stop_training = True


# Around the messages that have to pass through TensorFlow.
_MARK = "<keras_ccp>"


def checked_training_data(
    x: Any, y: Any, num_classes: int | None, spec: ImageSpec
) -> tuple[Any, Any]:
    """Returns training data whose labels are known to fit, or raises.

    Arrays are checked as a whole, the first item of a `PyDataset` is looked at. A
    `tf.data.Dataset` and a generator also check each later batch as it comes, so
    that no step is taken on a bad one.

    Args:
        x: images, or a source of `(images, labels)` batches: a batched
            `tf.data.Dataset`, a generator or a `keras.utils.PyDataset`.
        y: `(n,)` or `(n, 1)` integer labels, or `None` when `x` brings them.
        num_classes: int, labels must lie below it, or `None` for no upper bound.
        spec: what each image must fit.

    Returns:
        `(x, y)`, ready for `keras.Model.fit`.

    Raises:
        TypeError: if labels are missing or are not integers.
        ValueError: if a label is negative or too large, images are of another shape
            or range, sample weights are given, or a source has no batch.
    """
    is_stream = isinstance(
        x, (tf.data.Dataset, types.GeneratorType, keras.utils.PyDataset)
    )
    if y is not None:
        if is_stream:
            raise TypeError(
                "`y` must be left out where `x` brings the labels. Received: "
                f"type(x)={type(x).__name__}, type(y)={type(y).__name__}"
            )
        check_images("x", x, spec)
        y = _checked_labels(y, num_classes)
        if len(x) != len(y):
            raise ValueError(
                "`x` and `y` must have the same length. "
                f"Received: len(x)={len(x)}, len(y)={len(y)}"
            )
        return x, y
    if isinstance(x, tf.data.Dataset):
        _check_batch(next(iter(x.take(1)), None), num_classes, spec)
        return x.map(lambda *batch: _graph_checked(batch, num_classes)), None
    if isinstance(x, types.GeneratorType):
        first = next(x, None)
        _check_batch(first, num_classes, spec)
        return _checked_generator(first, x, num_classes, spec), None
    if isinstance(x, keras.utils.PyDataset):
        _check_batch(x[0] if x.num_batches != 0 else None, num_classes, spec)
        return _CheckedPyDataset(x, num_classes, spec), None
    raise TypeError(
        "`y` must be given with `x` unless `x` is a tf.data.Dataset, a generator or "
        "a PyDataset of (images, labels); balanced_batches makes one of a Dataset. "
        f"Received: type(x)={type(x).__name__}, y=None"
    )


@contextlib.contextmanager
def label_errors() -> Iterator[None]:
    """Raises what TensorFlow reports of a bad label as one plain `ValueError`."""
    try:
        yield
    except (tf.errors.OpError, ValueError) as error:
        if _MARK not in str(error):
            raise
        message = str(error).split(_MARK)[-2]
        raise ValueError(message.strip()) from None


def _range(num_classes: int | None) -> str:
    return "0 or more" if num_classes is None else f"from 0 to {num_classes - 1}"


def _checked_labels(labels: Any, num_classes: int | None) -> np.ndarray:
    labels = check_labels(labels, "y")
    if num_classes is not None and labels.max() >= num_classes:
        raise ValueError(
            f"`y` must hold labels {_range(num_classes)} (num_classes={num_classes}). "
            f"Received: label {labels.max()} in row {labels.argmax()}; "
            "keras_ccp.datasets.Dataset numbers classes 0..C-1"
        )
    return labels


def _check_batch(batch: Any, num_classes: int | None, spec: ImageSpec) -> None:
    if batch is None:
        raise ValueError(
            "`x` must give at least one batch of (images, labels). Received: no batch"
        )
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or batch[1] is None:
        raise TypeError(
            "`x` must give batches of (images, labels). "
            f"Received: a batch of type {type(batch).__name__}"
        )
    images, labels, *weights = batch
    if weights:
        refuse_sample_weight(weights[0])
    labels = np.asarray(labels)
    if labels.ndim == 0:
        raise ValueError(
            "`x` must give batches; call .batch(...) on it. "
            "Received: single (image, label) elements"
        )
    check_images("x", images, spec)
    _checked_labels(labels, num_classes)


def _graph_checked(batch: tuple, num_classes: int | None) -> tuple:
    images, labels, *rest = batch
    # Checked as they come: a cast to int32 would turn NaN into a number.
    fits = tf.reduce_all(labels >= 0)
    if num_classes is not None:
        fits &= tf.reduce_all(labels < tf.cast(num_classes, labels.dtype))
    message = (
        f"{_MARK} `y` must hold integer labels {_range(num_classes)} "
        f"(num_classes={num_classes}). Received: a batch with a label outside{_MARK}"
    )
    with tf.control_dependencies([tf.debugging.Assert(fits, [message])]):
        labels = tf.identity(labels)
    return (images, labels, *rest)


def _marked_check(batch: Any, num_classes: int | None, spec: ImageSpec) -> None:
    # TensorFlow reads these sources in a function of its own, and wraps the error.
    try:
        _check_batch(batch, num_classes, spec)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_MARK}{error}{_MARK}") from error


def _checked_generator(
    first: Any, rest: Any, num_classes: int | None, spec: ImageSpec
) -> Any:
    for batch in itertools.chain([first], rest):
        _marked_check(batch, num_classes, spec)
        yield batch


class _CheckedPyDataset(keras.utils.PyDataset):
    """Another PyDataset, each batch of which is checked."""

    def __init__(self, dataset, num_classes, spec):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._limits = num_classes, spec

    @property
    def num_batches(self):
        return self._dataset.num_batches

    def __getitem__(self, index):
        batch = self._dataset[index]
        _marked_check(batch, *self._limits)
        return batch

    def on_epoch_begin(self):
        self._dataset.on_epoch_begin()

    def on_epoch_end(self):
        self._dataset.on_epoch_end()


def add_weight_decay(
    gradients: list[tf.Tensor],
    weights: list[keras.Variable],
    weight_decay: float,
    optimizer: keras.optimizers.Optimizer,
) -> list[tf.Tensor]:
    """Adds the gradient of `(weight_decay / 2) * sum ||weight||^2`.

    Args:
        gradients: gradients of this replica's share of the scaled loss.
        weights: their weights.
        weight_decay: float, 0 for none.
        optimizer: the one that scales the loss.

    Returns:
        Gradients of this replica's share with its share of the decay.
    """
    if not weight_decay:
        return gradients
    # Once, though gradients are summed over replicas, and scaled as they are.
    share = tf.constant(weight_decay / distribute.num_replicas())
    share = optimizer.scale_loss(share)
    pairs = zip(gradients, weights, strict=True)
    return [gradient + share * weight for gradient, weight in pairs]


@contextlib.contextmanager
def scale_update(bank: "ProxyBank | None", multiplier: float) -> Iterator[None]:
    """Multiplies what the optimizer does to the proxies inside the `with` block.

    The update is scaled, not the gradient: Adam would undo the latter. So it is what
    a learning rate of its own would do.

    Args:
        bank: proxies, or `None` for none.
        multiplier: float, 1 leaves the update as it is.
    """
    if bank is None or multiplier == 1:
        yield
        return
    before = tf.identity(bank.proxies)
    yield
    bank.proxies.assign(before + multiplier * (bank.proxies - before))


def fuse_adam(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets Keras' Adam and AdamW update a weight by one kernel of TensorFlow.

    The formula is the same and so are the moments; Keras writes it as a dozen
    operations, each a pass over the weight and some with a temporary of its size.
    With many proxies those were a tenth of a step. Other optimizers stay as they are.

    Args:
        optimizer: built Keras optimizer; a scaler of the loss is looked through.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # Not a subclass with an update of its own, and the kernel has no AMSGrad.
    is_adam = type(inner).update_step is keras.optimizers.Adam.update_step
    if is_adam and not inner.amsgrad:
        inner.update_step = functools.partial(_fused_adam_step, inner)


def _fused_adam_step(adam, gradient, variable, learning_rate):
    dtype = variable.dtype
    index = adam._get_variable_index(variable)
    beta_1, beta_2 = tf.constant(adam.beta_1, dtype), tf.constant(adam.beta_2, dtype)
    step = tf.cast(adam.iterations + 1, dtype)
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=adam._momentums[index].value.handle,
        v=adam._velocities[index].value.handle,
        beta1_power=beta_1**step,
        beta2_power=beta_2**step,
        lr=tf.cast(learning_rate, dtype),
        beta1=beta_1,
        beta2=beta_2,
        epsilon=tf.constant(adam.epsilon, dtype),
        grad=tf.cast(gradient, dtype),
    )


@keras.saving.register_keras_serializable(package="keras_ccp")
class ProxyBank(keras.layers.Layer):
    """Trainable points, the same number for each class.

    The variable `proxies` has shape `(num_classes, proxies_per_class,
    embedding_dim)` and stays float32 under every dtype policy. It holds the
    proxies as they are learned; whoever measures distances normalises them.

    Args:
        num_classes: int, number of classes.
        proxies_per_class: int, number of proxies of each class.
        embedding_dim: int, width of an embedding.
        **kwargs: `name`, `trainable` and the other arguments of a Keras layer.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is below 1.
    """

    def __init__(
        self, num_classes: int, proxies_per_class: int, embedding_dim: int, **kwargs
    ):
        check_int("num_classes", num_classes, minimum=1)
        check_int("proxies_per_class", proxies_per_class, minimum=1)
        check_int("embedding_dim", embedding_dim, minimum=1)
        kwargs.setdefault("dtype", "float32")
        super().__init__(**kwargs)
        self.num_classes = int(num_classes)
        self.proxies_per_class = int(proxies_per_class)
        self.embedding_dim = int(embedding_dim)
        self.proxies = self.add_weight(
            name="proxies",
            shape=(self.num_classes, self.proxies_per_class, self.embedding_dim),
            # Expected norm 1, where embeddings live too after normalisation.
            initializer=keras.initializers.RandomNormal(
                stddev=self.embedding_dim**-0.5
            ),
            dtype="float32",
            # Every replica computes the same update, if one is assigned in a step.
            aggregation="only_first_replica",
        )
        self.built = True

    @property
    def labels(self) -> np.ndarray:
        """`(num_classes * proxies_per_class,)` int32 class of each proxy row."""
        classes = np.arange(self.num_classes, dtype="int32")
        return np.repeat(classes, self.proxies_per_class)

    def rows(self) -> tf.Tensor:
        """`(num_classes * proxies_per_class, embedding_dim)` proxies, by class."""
        return tf.reshape(self.proxies, (-1, self.embedding_dim))

    def assign(self, proxies: np.ndarray) -> None:
        """Replaces all proxies.

        Args:
            proxies: `(num_classes, proxies_per_class, embedding_dim)` finite
                array of new proxies.

        Raises:
            ValueError: if the shape differs or a value is not finite.
            TypeError: if they are not real numbers.
        """
        proxies = as_floats("proxies", proxies)
        with np.errstate(over="ignore"):  # becomes infinite, which is refused
            proxies = proxies.astype("float32")
        if proxies.shape != tuple(self.proxies.shape):
            raise ValueError(
                f"`proxies` must have shape {tuple(self.proxies.shape)}. "
                f"Received: proxies.shape={proxies.shape}"
            )
        if not np.isfinite(proxies).all():
            bad = (~np.isfinite(proxies)).any(axis=(1, 2))
            raise ValueError(
                "`proxies` must be finite. Received: NaN or infinity in the "
                f"proxies of {bad.sum()} classes, the first is class {bad.argmax()}"
            )
        self.proxies.assign(proxies)

    def get_config(self) -> dict:
        config = super().get_config()
        config.update(
            num_classes=self.num_classes,
            proxies_per_class=self.proxies_per_class,
            embedding_dim=self.embedding_dim,
        )
        return config


def reset_slots(optimizer: keras.optimizers.Optimizer, variable: Any) -> None:
    """Forgets what an optimizer has gathered about one variable.

    Args:
        optimizer: built or unbuilt Keras optimizer.
        variable: variable whose moments become zero.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    prefix = f"{variable.path.replace('/', '_')}_"
    for slot in inner.variables:
        if slot.name == f"{prefix}average":
            # A moving average of the weights, not a moment: it starts anew.
            slot.assign(variable)
        elif slot.name.startswith(prefix) or slot.name == variable.name:
            # Adafactor names its factored moments after the variable alone.
            slot.assign(np.zeros(slot.shape, slot.dtype))


@keras.saving.register_keras_serializable(package="keras_ccp")
class SampleBank(keras.layers.Layer):
    """Images of each class, the same number for each, embedded afresh at every step.

    The variable `images` has shape `(num_classes, samples_per_class, height, width,
    channels)`. Each step embeds all of them, so they are for few classes.

    Args:
        num_classes: int, number of classes.
        samples_per_class: int, number of images of each class.
        image_shape: `(height, width, channels)` of an image, all of them known.
        image_dtype: dtype of the images, such as `"uint8"`.
        **kwargs: `name` and the other arguments of a Keras layer.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is below 1 or not known.
    """

    def __init__(
        self,
        num_classes: int,
        samples_per_class: int,
        image_shape: tuple[int, ...],
        image_dtype: str = "uint8",
        **kwargs,
    ):
        check_int("num_classes", num_classes, minimum=1)
        check_int("samples_per_class", samples_per_class, minimum=1)
        if None in image_shape:
            raise ValueError(
                "`embedder` must have an input of a fixed size to keep reference "
                f"samples. Received: image shape {tuple(image_shape)}"
            )
        kwargs.setdefault("dtype", "float32")
        super().__init__(trainable=False, **kwargs)
        self.num_classes = int(num_classes)
        self.samples_per_class = int(samples_per_class)
        self.image_shape = tuple(image_shape)
        self.image_dtype = image_dtype
        self.images = self.add_weight(
            name="images",
            shape=(self.num_classes, self.samples_per_class, *self.image_shape),
            initializer="zeros",
            dtype=image_dtype,
            trainable=False,
        )
        self.built = True

    @property
    def labels(self) -> np.ndarray:
        """`(num_classes * samples_per_class,)` int32 class of each image row."""
        classes = np.arange(self.num_classes, dtype="int32")
        return np.repeat(classes, self.samples_per_class)

    def rows(self) -> tf.Tensor:
        """`(num_classes * samples_per_class, height, width, channels)`, by class."""
        return tf.reshape(self.images, (-1, *self.image_shape))

    def check_filled(self) -> None:
        """Raises if there is nothing yet to compare a batch with.

        Raises:
            ValueError: if no images were assigned.
        """
        if not self.images.numpy().any():
            raise ValueError(
                'references="samples" needs reference samples before the first step: '
                "pass a CCPCallback, which chooses them from its pool, or call "
                "model.sample_bank.assign(images). Received: none so far"
            )

    def assign(self, images: np.ndarray) -> None:
        """Replaces all images.

        Args:
            images: `(num_classes, samples_per_class, height, width, channels)` array.

        Raises:
            ValueError: if the shape differs.
        """
        images = np.asarray(images)
        if images.shape != tuple(self.images.shape):
            raise ValueError(
                f"`images` must have shape {tuple(self.images.shape)}. "
                f"Received: images.shape={images.shape}"
            )
        self.images.assign(images.astype(self.image_dtype))

    def get_config(self) -> dict:
        config = super().get_config()
        del config["trainable"]
        config.update(
            num_classes=self.num_classes,
            samples_per_class=self.samples_per_class,
            image_shape=self.image_shape,
            image_dtype=self.image_dtype,
        )
        return config


class Snapshot(keras.layers.Layer):
    """Frozen copy of a model's trainable weights, where the last problem converged.

    All weights that can be trained are covered, also those of layers that are frozen
    for a while; statistics such as those of batch normalisation are not.

    Args:
        model: built `keras.Model`.
        proximal_weight: float, lambda.
        **kwargs: `name` and the other arguments of a Keras layer.
    """

    def __init__(self, model: keras.Model, proximal_weight: float, **kwargs):
        super().__init__(dtype="float32", trainable=False, **kwargs)
        self.proximal_weight = proximal_weight
        weights = _trainable_by_nature(model)
        self.frozen_weights = [
            self.add_weight(shape=weight.shape, initializer="zeros", trainable=False)
            for weight in weights
        ]
        # A variable, since a Python number would be baked into the traced step.
        self.active_weight = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="active_weight"
        )
        # In a function, since Keras would count variables in an attribute as this
        # layer's own and save them twice.
        self._model_weights = lambda: weights
        self.built = True

    def take(self) -> None:
        """Copies the weights and switches lambda on."""
        for weight, frozen in self._pairs():
            # Of hundreds of weights, the checks of Keras' `assign` take most of it.
            value = tf.cast(weight.value, frozen.dtype)
            frozen.value.assign(value, read_value=False)
        self.active_weight.assign(self.proximal_weight)

    def drop(self) -> None:
        """Switches lambda off, as before the first snapshot."""
        self.active_weight.assign(0.0)

    def proximal_loss(self) -> tf.Tensor:
        """Scalar (lambda / 2) * sum ||weight - frozen||^2, 0 while lambda is off."""
        if not self.proximal_weight or not self.frozen_weights:
            return tf.zeros(())
        half_squares = [
            tf.nn.l2_loss(weight - frozen) for weight, frozen in self._pairs()
        ]
        return self.active_weight * tf.add_n(half_squares)

    def _pairs(self):
        return zip(self._model_weights(), self.frozen_weights, strict=True)


def _trainable_by_nature(model: keras.Model) -> list[keras.Variable]:
    """The model's `trainable_weights` as if no layer were frozen.

    Keras has no public name for it: `trainable_weights` follows the layers' current
    `trainable`, and a copy that did would not load again after a layer was unfrozen.
    """
    by_nature = {
        id(weight)
        for layer in model._flatten_layers()
        for weight in layer._trainable_variables
    }
    return [weight for weight in model.weights if id(weight) in by_nature]


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
        self.fit_callbacks = callbacks
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


@keras.saving.register_keras_serializable(package="keras_ccp")
class CCPModel(Trainer):
    r"""Trains an embedder by one problem of chance constrained programming.

    One step minimises, over the embedder's weights and the proxies,

    `pair_loss(batch, all proxies) + in_batch_weight * pair_loss(batch, batch)
    + (proximal_weight / 2) * sum ||weight - frozen copy||^2`

    on normalised embeddings and proxies. `CCPCallback` makes a sequence of such
    problems of it; without it this is plain proxy-based metric learning and, with
    `proxies_per_class=0`, plain pairwise metric learning. The published lambda
    multiplies `weight - frozen copy` in the gradient; hence the half.
    Source: "Deep Metric Learning with Chance Constraints",
    https://arxiv.org/abs/2209.09060.

    Called on images, the model gives normalised embeddings. `fit` logs `loss`,
    `pair_loss` (proxies and in-batch) and `proximal_loss`. `evaluate` and the
    `validation_data` of `fit` report retrieval metrics, on classes of any kind.

    Args:
        embedder: built `keras.Model`, images -> `(batch, embedding_dim)`, as
            `build_embedder` makes it. Weights that are trainable now are the ones
            of which a frozen copy is kept.
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

    Raises:
        TypeError: if `embedder` is not a Functional or Sequential model.
        ValueError: if an argument is out of range, or the embedder not built.
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
        **kwargs,
    ):
        check_embedder(embedder)
        check_int("num_classes", num_classes, minimum=1)
        check_int("proxies_per_class", proxies_per_class, minimum=0)
        check_number("proximal_weight", proximal_weight, minimum=0)
        check_number("in_batch_weight", in_batch_weight, minimum=0)
        multiplier = proxy_learning_rate_multiplier
        check_number("proxy_learning_rate_multiplier", multiplier, minimum=0)
        check_number("weight_decay", weight_decay, minimum=0)
        if references not in ("proxies", "samples"):
            raise ValueError(
                '`references` must be "proxies" or "samples". '
                f"Received: references={references!r}"
            )
        super().__init__(**kwargs)
        self.embedder = embedder
        self.num_classes = num_classes
        self.proxies_per_class = proxies_per_class
        self.proximal_weight = proximal_weight
        self.in_batch_weight = in_batch_weight
        self.normalization = normalization
        self.normalize = normalization_layer(normalization, name="normalize")
        self.references = references
        self.proxy_learning_rate_multiplier = proxy_learning_rate_multiplier
        self.weight_decay = weight_decay
        self.proxy_bank = self.sample_bank = self.memory = None
        sizes = num_classes, proxies_per_class
        if proxies_per_class and references == "proxies":
            self.proxy_bank = ProxyBank(*sizes, embedder.output_shape[-1], name="bank")
        elif proxies_per_class:
            self.sample_bank = SampleBank(
                *sizes, self.image_shape, embedder.inputs[0].dtype, name="bank"
            )
        self.snapshot = Snapshot(embedder, proximal_weight, name="snapshot")
        self.num_projections = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False
        )
        self._pair_loss_tracker = keras.metrics.Mean(name="pair_loss")
        self._proximal_loss_tracker = keras.metrics.Mean(name="proximal_loss")
        self.built = True

    @property
    def frozen_weights(self) -> list[keras.Variable]:
        """Copy of the embedder's trainable weights, as of the last snapshot."""
        return list(self.snapshot.frozen_weights)

    def take_snapshot(self) -> None:
        """Freezes a copy of the embedder's weights and switches lambda on."""
        self.snapshot.take()

    def proximal_loss(self) -> tf.Tensor:
        """Distance of the embedder to its frozen copy.

        Returns:
            Scalar (lambda / 2) * sum ||weight - frozen||^2, 0 before a snapshot.
        """
        return self.snapshot.proximal_loss()

    # ==== One step ====

    def call(self, images, training=None):
        return self.normalize(self.embedder(images, training=training))

    @property
    def reference_bank(self) -> ProxyBank | SampleBank | None:
        """What stands for the classes, `None` with `proxies_per_class=0`."""
        return self.proxy_bank or self.sample_bank

    @property
    def proxies(self) -> keras.Variable | None:
        """`(num_classes, proxies_per_class, dim)`, `None` without proxies."""
        return None if self.proxy_bank is None else self.proxy_bank.proxies

    def proxy_embeddings(self) -> np.ndarray:
        """`(num_classes, proxies_per_class, dim)` proxies or embedded samples."""
        if self.sample_bank is None:
            return np.asarray(self.normalize(self.proxy_bank.proxies))
        embeddings = self.predict(self.sample_bank.rows(), verbose=0)
        return embeddings.reshape(self.num_classes, self.proxies_per_class, -1)

    def _pair_loss(self, labels: tf.Tensor, embeddings: tf.Tensor) -> tf.Tensor:
        if self.reference_bank is None:
            return tf.reduce_mean(self.loss.call(labels, embeddings))
        rows = self.loss.pairs(
            labels, embeddings, *self._references(labels, embeddings)
        )
        if self.in_batch_weight:
            rows += self.in_batch_weight * self.loss.call(labels, embeddings)
        return tf.reduce_mean(rows)

    def _references(self, labels, embeddings):
        """Labels and embeddings of what a batch is compared with."""
        bank = self.reference_bank
        if self.sample_bank is not None:
            return bank.labels, self(bank.rows(), training=True)
        if self.loss.ignores_length:
            return bank.labels, bank.rows()
        # XLA knows only tensors of one size.
        reach = float("inf") if self.jit_compile else self.loss.reach
        return losses.within_reach(
            reach, labels, embeddings, bank.labels, bank.rows(), self.normalize
        )

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        """This replica's share of the loss; the shares add up to the whole.

        Args:
            x: not used.
            y: `(batch,)` or `(batch, 1)` integer labels.
            y_pred: `(batch, embedding_dim)` normalised embeddings.
            sample_weight: must be `None`.
            training: not used.
        """
        refuse_sample_weight(sample_weight)
        labels = tf.reshape(tf.cast(y, "int32"), (-1,))
        pair_loss = self._pair_loss(labels, y_pred)
        proximal_loss = self.proximal_loss()
        self._pair_loss_tracker.update_state(pair_loss)
        self._proximal_loss_tracker.update_state(proximal_loss)
        loss = pair_loss + tf.cast(tf.add_n([proximal_loss, *self.losses]), "float32")
        self._loss_tracker.update_state(loss)
        return loss / distribute.num_replicas()

    def train_step(self, data):
        images, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            embeddings = self(images, training=True)
            loss = self.compute_loss(images, labels, embeddings, sample_weight)
            scaled_loss = self.optimizer.scale_loss(loss)
        weights = self.trainable_weights
        gradients = tape.gradient(scaled_loss, weights)
        gradients = add_weight_decay(
            gradients, weights, self.weight_decay, self.optimizer
        )
        with scale_update(self.proxy_bank, self.proxy_learning_rate_multiplier):
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return self.compute_metrics(images, labels, embeddings)

    # ==== Compile, config and export ====

    def compile(
        self,
        optimizer: keras.optimizers.Optimizer | str = "rmsprop",
        loss: losses.PairLoss | str | None = None,
        **kwargs,
    ) -> None:
        """Configures training.

        Args:
            optimizer: Keras optimizer or its name. Defaults to `"rmsprop"`.
            loss: pair loss, its name, or an object with the same `pairs` method.
            **kwargs: as for `keras.Model.compile`.

        Raises:
            TypeError: if `loss` has no `pairs`, or it takes other arguments.
            ValueError: if `loss.pairs` does not give one value an anchor, of which the
                mean is taken, or an argument has no meaning here, such as `metrics`.
        """
        loss = losses.get(loss)
        losses.check_rows(loss, self.embedder.output_shape[-1])
        refuse_compile_arguments(kwargs)
        kept = self.memory
        if self.memory is not None:
            # Of another loss; Keras would go on to save it.
            self._layers.remove(self.memory)
        self.memory = None
        if isinstance(loss, losses.CrossBatchMemory):
            if self.reference_bank is not None and not self.in_batch_weight:
                raise ValueError(
                    "`loss` must not be a CrossBatchMemory where pairs inside the "
                    "batch, whose memory it is, do not count: give the model "
                    "proxies_per_class=0, or in_batch_weight above 0. "
                    f"Received: in_batch_weight={self.in_batch_weight}"
                )
            loss.build(self.embedder.output_shape[-1], of=kept)
            self.memory = loss.memory
        super().compile(optimizer=optimizer, loss=loss, **kwargs)
        self.optimizer.build(self.trainable_variables)
        fuse_adam(self.optimizer)

    def compile_from_config(self, config):
        config = keras.saving.deserialize_keras_object(config)
        self.compile(**{k: v for k, v in config.items() if v is not None})

    def check_start(self) -> None:
        if self.sample_bank is not None:
            self.sample_bank.check_filled()

    @property
    def image_shape(self) -> tuple:
        """Shape of one image, `None` where it is free."""
        return self.embedder.input_shape[1:]

    @property
    def label_bound(self) -> int | None:
        """Number that labels stay below, `None` without proxies."""
        return None if self.reference_bank is None else self.num_classes

    def export(self, filepath: str | os.PathLike, **kwargs) -> None:
        """Writes the embedder, without proxies, for serving.

        Args:
            filepath: directory of the SavedModel: images -> normalised embeddings.
            **kwargs: further arguments of `keras.Model.export`.
        """
        given = self.embedder.inputs[0]
        images = keras.Input(batch_shape=given.shape, dtype=given.dtype)
        embeddings = self.normalize(self.embedder(images))
        keras.Model(images, embeddings).export(filepath, **kwargs)

    def get_config(self) -> dict:
        config = super().get_config()
        config.update(
            embedder=keras.saving.serialize_keras_object(self.embedder),
            num_classes=self.num_classes,
            proxies_per_class=self.proxies_per_class,
            proximal_weight=self.proximal_weight,
            in_batch_weight=self.in_batch_weight,
            normalization=self.normalization,
            references=self.references,
            proxy_learning_rate_multiplier=self.proxy_learning_rate_multiplier,
            weight_decay=self.weight_decay,
        )
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        embedder = keras.saving.deserialize_keras_object(
            config["embedder"], custom_objects=custom_objects
        )
        return cls(**{**config, "embedder": embedder})
