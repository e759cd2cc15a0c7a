"""The reference samples: images that stand for the classes in place of proxies."""

import keras
import numpy as np
import tensorflow as tf

from keras_ccp.arguments import check_int


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
