"""Pairs of images that look the same: resized, or compressed once more."""

import numpy as np

# Of 64 bits, and of 255: half the size, JPEG quality 50 or 5 % more light stay below
# both. The bits alone are as near for line drawings of different things.
_MAX_BITS, _MAX_DIFFERENCE = 6, 20
_CHUNK = 64
_CANDIDATES = 16
_LUMA = np.array((0.299, 0.587, 0.114), np.float32)  # ITU-R BT.601


def difference_hash(thumbnails: np.ndarray) -> np.ndarray:
    """dHash: of each pixel whether its right neighbour is brighter.

    Args:
        thumbnails: `(n, 8, 9, 3)` uint8.

    Returns:
        `(n,)` uint64.
    """
    luma = thumbnails @ _LUMA
    bits = (luma[..., 1:] > luma[..., :-1]).reshape(len(luma), 64)
    return np.packbits(bits, axis=1).view(np.uint64)[:, 0]


def near_duplicates(thumbnails: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Finds images among others, by their hashes and then by their thumbnails.

    A pair has hashes that differ in at most 6 of 64 bits, and thumbnails that differ
    nowhere by more than 20 of 255. Of each image the 16 others with the nearest hashes
    are looked at. Memory is bounded: 64 images are compared with all others at a time.

    Args:
        thumbnails: `(n, 8, 9, 3)` uint8.
        others: `(m, 8, 9, 3)` uint8.

    Returns:
        `(k, 2)` int rows, first of an image, then of the other that is most like it.
    """
    hashes, other_hashes = difference_hash(thumbnails), difference_hash(others)
    pairs = []
    for start in range(0, len(hashes), _CHUNK):
        chunk = hashes[start : start + _CHUNK, None]
        distances = np.bitwise_count(chunk ^ other_hashes)
        for row in np.flatnonzero(distances.min(axis=1) <= _MAX_BITS):
            number = min(_CANDIDATES, len(others))
            nearest = np.argpartition(distances[row], number - 1)[:number]
            nearest = nearest[distances[row, nearest] <= _MAX_BITS]
            image = thumbnails[start + row].astype(np.int16)
            differences = np.abs(others[nearest] - image).max(axis=(1, 2, 3))
            best = differences.argmin()
            if differences[best] <= _MAX_DIFFERENCE:
                pairs.append((start + row, nearest[best]))
    return np.array(pairs, np.int64).reshape(-1, 2)
