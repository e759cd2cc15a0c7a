"""Search results as one HTML file that needs nothing else."""

import base64
import html
import os
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from keras_ccp.pipeline import decode_image
from keras_ccp.search_commands.results import SearchResult, write_file

_SIDE = 192
_STYLE = """
body { font: 14px sans-serif; margin: 24px; color: #222; background: #fff }
section { display: flex; flex-wrap: wrap; gap: 12px; margin-bottom: 32px }
figure { margin: 0; width: 192px }
img, .missing { width: 192px; height: 192px; object-fit: contain; background: #f4f4f4 }
.missing { display: flex; align-items: center; justify-content: center; color: #777 }
.query img, .query .missing { outline: 4px solid #1f5fbf }
figcaption { overflow-wrap: anywhere; margin-top: 6px }
small { color: #666 }
"""


def write_page(results: Sequence[SearchResult], path: str | os.PathLike) -> None:
    """Writes a page with a row of images a query, the query framed.

    Images are in the file itself, at most 192 pixels wide and high, upright. One that
    is not where it was indexed is shown as missing.

    Args:
        results: what was found.
        path: HTML file.
    """
    rows = "\n".join(_row(result) for result in results)
    page = (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>Similar images</title><style>{_STYLE}</style></head>\n"
        f"<body>\n<h1>Similar images</h1>\n{rows}\n</body>\n</html>\n"
    )
    write_file(path, page.encode("utf-8", "replace"))


def _row(result: SearchResult) -> str:
    figures = [_figure(result.query, Path(result.query).name, "query", "query")]
    for rank, found in enumerate(result.neighbours, 1):
        note = f"{rank}. distance {found.distance:.4f}"
        figures.append(_figure(found.path, found.id, note, "neighbour"))
    return "<section>\n" + "\n".join(figures) + "\n</section>"


def _figure(path: str, name: str, note: str, kind: str) -> str:
    name = html.escape(name)
    source = _thumbnail(path)
    image = f'<img src="{source}" alt="{name}">'
    if source is None:
        image = '<div class="missing">not found</div>'
    return (
        f'<figure class="{kind}">{image}'
        f"<figcaption>{name}<br><small>{note}</small></figcaption></figure>"
    )


def _thumbnail(path: str) -> str | None:
    """A small JPEG as a data URI, or `None` if the image cannot be read."""
    try:
        image = decode_image(tf.constant(Path(path).read_bytes()))
    except (OSError, tf.errors.OpError):
        return None
    shape = tf.shape(image)[:2]
    scale = tf.minimum(1.0, _SIDE / tf.cast(tf.reduce_max(shape), tf.float32))
    shape = tf.maximum(1, tf.cast(tf.cast(shape, tf.float32) * scale, tf.int32))
    pixels = tf.image.resize(image, shape, antialias=True)
    small = tf.io.encode_jpeg(tf.cast(pixels + 0.5, tf.uint8), quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(small.numpy()).decode()
