"""Small images inside of a page."""

import base64

import numpy as np
import tensorflow as tf

SIDE = 192


def thumbnail(image: tf.Tensor | np.ndarray) -> str:
    """A JPEG as a data URI, at most 192 pixels wide and high.

    Args:
        image: `(height, width, channels)` uint8, or floats of 0 to 1 or 0 to 255. Of
            two channels the first is shown, of more than three the first three.
    """
    image = np.asarray(image)
    image = image[..., : 3 if image.shape[-1] >= 3 else 1]
    if image.dtype != np.uint8 and image.max(initial=0) <= 1:
        image = image * 255.0
    height, width = image.shape[:2]
    scale = min(1.0, SIDE / max(height, width))
    shape = max(1, int(height * scale)), max(1, int(width * scale))
    pixels = tf.image.resize(image, shape, antialias=True)
    pixels = tf.cast(tf.clip_by_value(pixels, 0, 255) + 0.5, tf.uint8)
    # Colours at full size, without which drawings of a few pixels have grey edges.
    small = tf.io.encode_jpeg(pixels, quality=85, chroma_downsampling=False)
    return "data:image/jpeg;base64," + base64.b64encode(small.numpy()).decode()
