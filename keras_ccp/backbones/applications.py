"""The networks of `keras.applications` with their preprocessing inside."""

import inspect
import os
from collections.abc import Callable

import keras
import numpy as np

from keras_ccp.layers import freeze_batch_norm


def application(
    name: str,
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    weights: str | os.PathLike | None = "imagenet",
    frozen_statistics: bool = False,
) -> keras.Model:
    """A network of `keras.applications` without its classifier.

    What the network's own `preprocess_input` does to pixels is done inside.

    Args:
        name: Its name there, such as `"ResNet50"` or `"MobileNetV3Small"`.
        input_shape: `(height, width, 3)` of an image; height and width may be `None`
            where the network allows it. Defaults to `(224, 224, 3)`.
        weights: `"imagenet"` (Keras downloads them), a file of weights that Keras
            wrote for that network without its classifier, or `None` for random
            weights. Defaults to `"imagenet"`.
        frozen_statistics: As for `small_cnn`. Defaults to `False`.

    Returns:
        `keras.Model`, `(batch, height, width, 3)` uint8 RGB images -> `(batch,
        rows, columns, channels)` feature map.

    Raises:
        ValueError: If there is no such network, or the weights are not for it.
    """
    build = getattr(keras.applications, name, None)
    if not inspect.isfunction(build):
        raise ValueError(
            "`name` must be a network of keras.applications. "
            f"Received: name={name!r}\nThey are spelled like ResNet50, MobileNetV3Small"
        )
    inputs = keras.Input(input_shape, dtype="uint8")
    preprocess_input = inspect.getmodule(build).preprocess_input
    pixels = scale_pixels(inputs, *_pixel_map(preprocess_input))
    model = build(
        include_top=False,
        weights=None if weights is None else os.fspath(weights),
        input_tensor=pixels,
        input_shape=tuple(input_shape),
    )
    # Keras made a model of a list of one tensor.
    model = keras.Model(inputs, model.outputs[0], name=model.name)
    return freeze_batch_norm(model) if frozen_statistics else model


def scale_pixels(
    images: keras.KerasTensor,
    scale: float | list[float],
    offset: float | list[float],
    reverse_channels: bool = False,
) -> keras.KerasTensor:
    """`pixels * scale + offset`, for each channel its own after RGB became BGR."""
    if reverse_channels:
        images = keras.ops.flip(images, axis=-1)
    return keras.layers.Rescaling(scale, offset=offset, name="pixel_range")(images)


def _pixel_map(preprocess_input: Callable) -> tuple[list[float], list[float], bool]:
    """Scale, offset and channel reversal of a `preprocess_input`, by trying it.

    All of them are `pixels * scale + offset` for each channel, some after a reversal.
    """
    # Black, then one image for each channel with that channel alone at 255.
    probes = np.concatenate([np.zeros((1, 3)), 255 * np.eye(3)])
    black, *bright = np.asarray(preprocess_input(probes.reshape(4, 1, 1, 3)))[:, 0, 0]
    responses = (np.array(bright) - black) / 255
    reverse_channels = bool(responses[0, 0] == 0)
    if reverse_channels:
        responses = responses[::-1]
    return np.diag(responses).tolist(), black.tolist(), reverse_channels
