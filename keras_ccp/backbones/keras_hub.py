"""Image transformers of KerasHub (ViT, DINOv2) with their preprocessing inside."""

from typing import Any

import keras

from keras_ccp.backbones.applications import scale_pixels
from keras_ccp.checks import require


def keras_hub_backbone(
    backbone: str | keras.Model, scale: Any = 1 / 255, offset: Any = 0.0
) -> keras.Model:
    """An image backbone of KerasHub that takes pixels of 0 to 255.

    ```python
    backbone = keras_hub_backbone("vit_base_patch16_224_imagenet")
    embedder = build_embedder(backbone, pooling="class_token")
    ```

    Args:
        backbone: name of a preset, with the pixel range and the weights of which the
            network is made (needs the extra `hub`; KerasHub downloads it), or a
            backbone that is there already.
        scale: number, or one for each channel, that pixels are multiplied by; for a
            preset its own. Defaults to 1 / 255.
        offset: number, or one for each channel, that is then added; for a preset its
            own. Defaults to 0.

    Returns:
        `keras.Model`, `(batch, height, width, 3)` uint8 RGB images -> `(batch, tokens,
        channels)`, the class token first. Images must have the size of its input.

    Raises:
        ImportError: If a preset is asked for and KerasHub is not installed.
    """
    if isinstance(backbone, str):
        hub = require("keras_hub", "hub")
        converter = hub.layers.ImageConverter.from_preset(backbone)
        scale, offset = converter.scale or 1.0, converter.offset or 0.0
        backbone = hub.models.Backbone.from_preset(backbone)
    (given,) = backbone.inputs
    images = keras.Input(given.shape[1:], dtype="uint8")
    pixels = scale_pixels(images, scale, offset)
    tokens = backbone(keras.tree.map_structure(lambda _: pixels, backbone.input))
    return keras.Model(images, tokens, name=backbone.name)
