"""neighbor_gallery: queries and what an embedder finds for them."""

import numpy as np

_QUERY, _RIGHT, _WRONG = (90, 90, 90), (34, 160, 60), (214, 40, 40)


def neighbor_gallery(
    queries: np.ndarray,
    neighbors: np.ndarray,
    is_right: np.ndarray,
    columns: int = 2,
    scale: int = 2,
) -> np.ndarray:
    """Draws queries, each with its nearest neighbours to the right of it.

    Queries are framed grey, neighbours green where they are right and red where
    they are wrong.

    Args:
        queries: `(n, height, width, 3)` uint8 images.
        neighbors: `(n, k, height, width, 3)` uint8 images, nearest first.
        is_right: `(n, k)` bool, whether a neighbour is of the query's class.
        columns: int, queries side by side. Defaults to 2.
        scale: int, each pixel becomes a square of this side. Defaults to 2.

    Returns:
        `(picture_height, picture_width, 3)` uint8 image on white.

    Raises:
        ValueError: if the shapes do not fit together.
    """
    queries, neighbors = np.asarray(queries), np.asarray(neighbors)
    is_right = np.asarray(is_right, bool)
    n, k = is_right.shape
    if neighbors.shape != (n, k, *queries.shape[1:]) or len(queries) != n:
        raise ValueError(
            "`neighbors` must hold k images for each of n queries, and `is_right` n "
            f"rows of k. Received: queries.shape={queries.shape}, "
            f"neighbors.shape={neighbors.shape}, is_right.shape={is_right.shape}"
        )
    rows = [
        _row(query, found, right, scale)
        for query, found, right in zip(queries, neighbors, is_right, strict=True)
    ]
    blank = np.full_like(rows[0], 255)
    rows += [blank] * (-n % columns)
    lines = [
        np.concatenate(rows[i : i + columns], axis=1)
        for i in range(0, len(rows), columns)
    ]
    return np.concatenate(lines, axis=0)


def _row(query, found, right, scale):
    frames = [_RIGHT if hit else _WRONG for hit in right]
    tiles = [_framed(query, _QUERY, scale)]
    # A gap sets the query apart from what it found.
    tiles.append(np.full((len(tiles[0]), 6 * scale, 3), 255, np.uint8))
    tiles += [_framed(f, c, scale) for f, c in zip(found, frames, strict=True)]
    row = np.concatenate(tiles, axis=1)
    return np.pad(row, ((0, 0), (0, 8 * scale), (0, 0)), constant_values=255)


def _framed(image, color, scale):
    image = image.repeat(scale, axis=0).repeat(scale, axis=1)
    width = 2 * scale
    framed = np.empty((image.shape[0] + 2 * width, image.shape[1] + 2 * width, 3))
    framed[:] = color
    framed[width:-width, width:-width] = image
    return np.pad(
        framed.astype(np.uint8),
        ((scale, scale), (scale, scale), (0, 0)),
        constant_values=255,
    )
