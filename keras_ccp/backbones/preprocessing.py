"""Layers between uint8 pixels and what a network was trained on."""

import keras


def check_rgb(input_shape: tuple[int | None, int | None, int]) -> None:
    """Refuses the shape of what is not an RGB image.

    Args:
        input_shape: `(height, width, channels)`.

    Raises:
        ValueError: If there are not three entries or not three channels.
    """
    if not isinstance(input_shape, (tuple, list)) or len(input_shape) != 3:
        raise ValueError(
            "`input_shape` must be (height, width, 3). "
            f"Received: input_shape={input_shape!r}"
        )
    if input_shape[-1] != 3:
        raise ValueError(
            "`input_shape` must have three channels, red, green and blue; repeat the "
            f"channel of grey images. Received: input_shape={input_shape!r}"
        )


def scale_pixels(
    images: keras.KerasTensor,
    scale: float | list[float],
    offset: float | list[float],
    reverse_channels: bool = False,
) -> keras.KerasTensor:
    """Brings pixels into a network's range: `pixels * scale + offset`.

    Args:
        images: `(batch, height, width, 3)` symbolic uint8 RGB images.
        scale: Factor, or one for each channel after the reversal.
        offset: Summand, or one for each channel after the reversal.
        reverse_channels: Whether RGB becomes BGR first. Defaults to `False`.

    Returns:
        Symbolic float tensor of the same shape.
    """
    if reverse_channels:
        images = keras.ops.flip(images, axis=-1)
    return keras.layers.Rescaling(scale, offset=offset, name="pixel_range")(images)
