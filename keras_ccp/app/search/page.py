"""Search results as one HTML file that needs nothing else."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from keras_ccp.app.html_page import render, thumbnail
from keras_ccp.app.search.results import (
    SearchResult,
    check_writable_file,
    write_file,
)
from keras_ccp.pipeline import decode_image


class _Figure(NamedTuple):
    kind: str
    source: str | None
    name: str
    note: str


def write_page(results: Sequence[SearchResult], path: str | os.PathLike) -> None:
    """Writes a page with a row of images a query, the query framed.

    Images are in the file itself, at most 192 pixels wide and high, upright. One that
    is not where it was indexed is shown as missing.

    Args:
        results: what was found.
        path: HTML file.

    Raises:
        ValueError: If it is a folder.
    """
    check_writable_file("path", path)
    rows = [_row(result) for result in results]
    write_file(path, render("app/search/page.html.j2", rows=rows))


def _row(result: SearchResult) -> list[_Figure]:
    name = Path(result.query).name
    figures = [_Figure("query", _source(result.query), name, "query")]
    for rank, found in enumerate(result.neighbours, 1):
        note = f"{rank}. distance {found.distance:.4f}"
        figures.append(_Figure("neighbour", _source(found.path), found.id, note))
    return figures


def _source(path: str) -> str | None:
    """The image as a data URI, or `None` if it cannot be read."""
    try:
        image = decode_image(tf.constant(Path(path).read_bytes()))
    except (OSError, tf.errors.OpError):
        return None
    return thumbnail(image)
