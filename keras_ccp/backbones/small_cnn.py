"""A small network for icons and characters."""

import keras

from keras_ccp.backbones.batch_norm import freeze_batch_norm


def small_cnn(
    input_shape: tuple[int, int, int] = (32, 32, 3), frozen_statistics: bool = False
) -> keras.Model:
    """Three convolutions that reduce each side to an eighth, for 28 to 64 pixels.

    Args:
        input_shape: `(height, width, channels)` of an image. Defaults to
            `(32, 32, 3)`.
        frozen_statistics: Whether batch norm keeps to its moving statistics while
            training, see `FrozenBatchNormalization`. Defaults to `False`.

    Returns:
        `keras.Model` of 0.23 M weights, `(batch, height, width, channels)` uint8
        images -> `(batch, height / 8, width / 8, 128)` feature map.
    """
    layers = keras.layers
    x = images = keras.Input(input_shape, dtype="uint8")
    x = layers.Rescaling(1 / 127.5, offset=-1)(x)
    for channels, kernel, stride in ((64, 4, 2), (128, 3, 1), (128, 3, 1)):
        if stride == 1:
            x = layers.MaxPooling2D()(x)
        x = layers.Conv2D(channels, kernel, stride, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(momentum=0.9)(x)
        x = layers.ReLU()(x)
    model = keras.Model(images, x, name="small_cnn")
    return freeze_batch_norm(model) if frozen_statistics else model
