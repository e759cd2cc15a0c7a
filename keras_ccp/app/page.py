"""HTML pages that hold all they need: no network, light and dark, down to a phone."""

import base64
from typing import Any

import jinja2
import numpy as np
import tensorflow as tf

THUMBNAIL_SIDE = 192


# Everything is escaped: names of files and classes cannot become markup.
environment = jinja2.Environment(
    loader=jinja2.PackageLoader("keras_ccp", ""),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values: Any) -> bytes:
    """Fills in a template, named by its path below the package."""
    page = environment.get_template(template).render(values)
    # Names of files may hold bytes that are no text.
    return page.encode("utf-8", "replace")


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
    scale = min(1.0, THUMBNAIL_SIDE / max(height, width))
    shape = max(1, int(height * scale)), max(1, int(width * scale))
    pixels = tf.image.resize(image, shape, antialias=True)
    pixels = tf.cast(tf.clip_by_value(pixels, 0, 255) + 0.5, tf.uint8)
    # Colours at full size, without which drawings of a few pixels have grey edges.
    small = tf.io.encode_jpeg(pixels, quality=85, chroma_downsampling=False)
    return "data:image/jpeg;base64," + base64.b64encode(small.numpy()).decode()
