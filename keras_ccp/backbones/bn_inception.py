"""BN-Inception, the backbone of most papers on deep metric learning."""

import os

import keras

from keras_ccp.backbones.applications import scale_pixels
from keras_ccp.backbones.torch_weights import load_torch_weights
from keras_ccp.layers import freeze_batch_norm

_URL = "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth"

# Channels of the branches of a block: 1x1, (reduction, 3x3), (reduction, 3x3 and 3x3),
# and the 1x1 behind the pooling. Without a 1x1 branch a block halves the resolution.
_BLOCKS = {
    "3a": (64, (64, 64), (64, 96), 32),
    "3b": (64, (64, 96), (64, 96), 64),
    "3c": (None, (128, 160), (64, 96), None),
    "4a": (224, (64, 96), (96, 128), 128),
    "4b": (192, (96, 128), (96, 128), 128),
    "4c": (160, (128, 160), (128, 160), 128),
    "4d": (96, (128, 192), (160, 192), 128),
    "4e": (None, (128, 192), (192, 256), None),
    "5a": (352, (192, 320), (160, 224), 128),
    "5b": (352, (192, 320), (192, 224), 128),
}


def bn_inception(
    input_shape: tuple[int | None, int | None, int] = (227, 227, 3),
    weights: str | os.PathLike | None = None,
    mean: tuple[float, float, float] = (104.0, 117.0, 128.0),
    frozen_statistics: bool = False,
) -> keras.Model:
    """BN-Inception as published for PyTorch, without its classifier.

    Numerically the definition in pretrainedmodels 0.7.4 (Cadene), whose layer names it
    keeps; it reads that package's ImageNet weights. Source of the network: "Batch
    Normalization: Accelerating Deep Network Training by Reducing Internal Covariate
    Shift" (https://arxiv.org/abs/1502.03167).

    Inside, RGB becomes BGR and `mean` is subtracted. The CCP paper's runs subtract
    255 * (0.485, 0.456, 0.406) from RGB, that is `mean=(103.53, 116.28, 123.675)`.

    Args:
        input_shape: `(height, width, 3)` of an image; height and width may be `None`.
            Defaults to `(227, 227, 3)`.
        weights: File `bn_inception-52deb4733.pth`, to be downloaded from
            http://data.lip6.fr/cadene/pretrainedmodels/, or another `state_dict` with
            the same names. Defaults to `None`, random weights.
        mean: Blue, green and red that are subtracted, 0 to 255. Defaults to
            `(104, 117, 128)`, with which those weights were trained.
        frozen_statistics: As for `small_cnn`. Defaults to `False`.

    Returns:
        `keras.Model`, `(batch, height, width, 3)` uint8 RGB images -> `(batch,
        height / 32, width / 32, 1024)` feature map, sizes rounded up; from 227 pixels
        7 x 7.

    Raises:
        ValueError: If the weights cannot be read or are those of another network.
        FileNotFoundError: If there is no file `weights`.
    """
    if weights == "imagenet":
        raise ValueError(
            f'`weights` must be a file. Received: "imagenet"\nDownload {_URL}'
        )
    inputs = keras.Input(input_shape, dtype="uint8")
    x = scale_pixels(inputs, 1.0, [-value for value in mean], reverse_channels=True)
    x = _conv(x, 64, 7, "conv1_7x7_s2", stride=2)
    x = _halving_max_pool(x, "pool1_3x3_s2")
    x = _conv(x, 64, 1, "conv2_3x3_reduce")
    x = _conv(x, 192, 3, "conv2_3x3")
    x = _halving_max_pool(x, "pool2_3x3_s2")
    for block in _BLOCKS:
        x = _inception(x, block)
    model = keras.Model(inputs, x, name="bn_inception")
    if weights is not None:
        load_torch_weights(model, weights)
    return freeze_batch_norm(model) if frozen_statistics else model


def _conv(x, channels: int, kernel: int, name: str, stride: int = 1):
    """Convolution, batch norm and ReLU."""
    padding = "same"
    if stride > 1:
        # PyTorch pads both sides, "same" only the right where the size is even.
        x = keras.layers.ZeroPadding2D(kernel // 2, name=f"{name}_pad")(x)
        padding = "valid"
    x = keras.layers.Conv2D(channels, kernel, stride, padding, name=name)(x)
    x = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_bn")(
        x
    )
    return keras.layers.ReLU(name=f"{name}_relu")(x)


def _halving_max_pool(x, name: str):
    """3x3 windows without padding; the last may hang over the edge (ceil mode).

    One more row and column never changes the number of windows where the size is odd.
    Zero is neutral, since the input comes from a ReLU.
    """
    x = keras.layers.ZeroPadding2D(((0, 1), (0, 1)), name=f"{name}_pad")(x)
    return keras.layers.MaxPooling2D(3, 2, name=name)(x)


def _inception(x, block: str):
    name = f"inception_{block}"
    single, (reduce, triple), (double_reduce, double), projection = _BLOCKS[block]
    stride = 1 if single else 2
    branches = []
    if single:
        branches.append(_conv(x, single, 1, f"{name}_1x1"))
    branch = _conv(x, reduce, 1, f"{name}_3x3_reduce")
    branches.append(_conv(branch, triple, 3, f"{name}_3x3", stride))
    branch = _conv(x, double_reduce, 1, f"{name}_double_3x3_reduce")
    branch = _conv(branch, double, 3, f"{name}_double_3x3_1")
    branches.append(_conv(branch, double, 3, f"{name}_double_3x3_2", stride))
    branch = _pool(x, block, f"{name}_pool")
    if projection:
        branch = _conv(branch, projection, 1, f"{name}_pool_proj")
    branches.append(branch)
    return keras.layers.Concatenate(name=f"{name}_output")(branches)


def _pool(x, block: str, name: str):
    if block in ("3c", "4e"):
        return _halving_max_pool(x, name)
    if block == "5b":
        return keras.layers.MaxPooling2D(3, 1, "same", name=name)(x)
    # The zeros of the padding count, which "same" leaves out.
    x = keras.layers.ZeroPadding2D(1, name=f"{name}_pad")(x)
    return keras.layers.AveragePooling2D(3, 1, name=name)(x)
