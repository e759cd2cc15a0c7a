"""What `compile` and `fit` are told besides loss and data, and the end of the data."""

from typing import Any

import keras
import tensorflow as tf

from keras_ccp.arguments import check_int

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
