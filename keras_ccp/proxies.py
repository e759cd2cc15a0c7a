"""The proxies: learned points that stand for the classes during training."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_ccp.arguments import as_floats, check_int


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
