"""Networks for icons, characters and other images of 28 to 64 pixels."""

import keras

from keras_ccp.layers import freeze_batch_norm


def small_cnn(
    input_shape: tuple[int, int, int] = (32, 32, 3), frozen_statistics: bool = False
) -> keras.Model:
    """Three convolutions that reduce each side to an eighth.

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


def resnet20_v2(
    input_shape: tuple[int, int, int] = (32, 32, 3), frozen_statistics: bool = False
) -> keras.Model:
    """Pre-activation bottleneck ResNet of 20 layers for images of about 32 x 32.

    Three stages of two blocks with 64, 128 and 256 output channels; the second and
    third halve the resolution. Pixels are brought to -1..1 inside. Source:
    "Identity Mappings in Deep Residual Networks", https://arxiv.org/abs/1603.05027.

    Args:
        input_shape: `(height, width, channels)` of an image. Defaults to
            `(32, 32, 3)`.
        frozen_statistics: As for `small_cnn`. Defaults to `False`.

    Returns:
        `keras.Model`, `(batch, height, width, channels)` uint8 images ->
        `(batch, height / 4, width / 4, 256)` feature map.
    """
    inputs = keras.Input(input_shape, dtype="uint8")
    x = keras.layers.Rescaling(1 / 127.5, offset=-1, name="rescaling")(inputs)
    x = keras.layers.Conv2D(16, 3, padding="same", use_bias=False, name="stem_conv")(x)
    for stage, width in enumerate((16, 32, 64)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            x = _bottleneck(x, width, stride, bool(block), f"stage{stage}_block{block}")
    x = keras.layers.BatchNormalization(name="final_norm")(x)
    x = keras.layers.ReLU(name="final_relu")(x)
    model = keras.Model(inputs, x, name="resnet20_v2")
    return freeze_batch_norm(model) if frozen_statistics else model


def _bottleneck(x, width: int, stride: int, identity: bool, name: str):
    """1x1, 3x3, 1x1 convolutions, each after batch norm and ReLU, and a shortcut."""
    shortcut = x
    for index, (channels, kernel, strides) in enumerate(
        ((width, 1, stride), (width, 3, 1), (4 * width, 1, 1))
    ):
        x = keras.layers.BatchNormalization(name=f"{name}_norm{index}")(x)
        x = keras.layers.ReLU(name=f"{name}_relu{index}")(x)
        if index == 0 and not identity:
            # The projection sees the activated input (the paper's section 4.1).
            shortcut = keras.layers.Conv2D(
                4 * width, 1, strides=stride, use_bias=False, name=f"{name}_shortcut"
            )(x)
        x = keras.layers.Conv2D(
            channels,
            kernel,
            strides,
            "same",
            use_bias=False,
            name=f"{name}_conv{index}",
        )(x)
    return keras.layers.Add(name=f"{name}_add")([shortcut, x])
