"""Packs the emoji images into the files that `keras_ccp.datasets.emoji` reads.

    python tools/build_emoji.py emoji_32.npz keras_ccp/datasets/bundled

The input holds `images` (2766, 32, 32, 3) uint8, sorted by class, six vendors each,
and `class_names` (461,). It was rendered from the npm packages

    @iconify-json/noto 1.2.9      @iconify-json/fluent-emoji-flat 1.2.6
    @iconify-json/noto-v1 1.2.5   @iconify-json/emojione 1.2.3
    @iconify-json/twemoji 1.2.5   @iconify-json/fxemoji 1.2.2

(in this order of vendors: noto, noto-v1, twemoji, fluent-emoji-flat, emojione,
fxemoji) with resvg_py 0.5.0 from PyPI: the body of an icon in an SVG with the view
box of the icon, rendered at 64x64, put on white, reduced to 32x32 (Lanczos). Classes
are the names that all six sets have once '-' is removed; flags and skin tones are
left out.

The same input gives the same bytes with Pillow 13.0.0, numpy 2.4.6 and liblzma 5;
another version of Pillow may choose slightly different colours.
"""

import argparse
import lzma
from pathlib import Path

import numpy as np
from PIL import Image

VENDORS = 6
# The smallest palette that is nearer to the source, in mean absolute and in mean
# square difference, than the 256 colours of Pillow's median cut without k-means.
COLOURS = 160
KMEANS_ROUNDS = 10


def quantize(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduces images to one palette.

    Args:
        images: `(n, size, size, 3)` uint8.

    Returns:
        `(colours, 3)` uint8 palette and `(n, size, size)` uint8 indices into it.
    """
    size = images.shape[1]
    sheet = Image.fromarray(images.reshape(-1, size, 3))
    reduced = sheet.quantize(
        COLOURS, method=Image.Quantize.MEDIANCUT, kmeans=KMEANS_ROUNDS
    )
    palette = np.array(reduced.getpalette(), np.uint8).reshape(-1, 3)
    order = tour(palette)
    rank = np.empty(len(order), np.uint8)
    rank[order] = np.arange(len(order))
    return palette[order], rank[np.asarray(reduced)].reshape(images.shape[:3])


def tour(palette: np.ndarray) -> np.ndarray:
    """Orders colours so that neighbours look alike, from white on: packs smaller.

    Args:
        palette: `(colours, 3)` uint8.

    Returns:
        `(colours,)` order of the colours.
    """
    colours = palette.astype(np.int64)
    order = [int(np.argmax(colours.sum(1)))]
    left = np.delete(np.arange(len(colours)), order)
    while len(left):
        distances = ((colours[left] - colours[order[-1]]) ** 2).sum(1)
        order.append(int(left[np.argmin(distances)]))
        left = left[left != order[-1]]
    return np.array(order)


def pack(palette: np.ndarray, indices: np.ndarray) -> bytes:
    """Compresses a palette, padded to 256 colours, and the indices behind it.

    Args:
        palette: `(colours, 3)` uint8.
        indices: `(classes * vendors, size, size)` uint8.

    Returns:
        An xz file.
    """
    padded = np.zeros((256, 3), np.uint8)
    padded[: len(palette)] = palette
    by_class = indices.reshape(-1, VENDORS, *indices.shape[1:])
    # Column by column: the two halves of most drawings mirror each other, so whole
    # columns come back.
    columns = by_class.transpose(1, 0, 3, 2)
    lzma2 = {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "lc": 4,
        "lp": 0,
        "pb": 0,
        "dict_size": 1 << 22,
    }
    return lzma.compress(padded.tobytes() + columns.tobytes(), filters=[lzma2])


def main(arguments: list[str] | None = None) -> None:
    """Writes `emoji.xz` and `emoji_classes.txt`.

    Args:
        arguments: Command line without the program; default `sys.argv[1:]`.
    """
    parser = argparse.ArgumentParser(description="Packs the bundled emoji.")
    parser.add_argument("input", type=Path, help="npz of the rendered images")
    parser.add_argument("output", type=Path, help="folder for the packed files")
    options = parser.parse_args(arguments)
    with np.load(options.input) as source:
        images, names = source["images"], source["class_names"]
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "emoji.xz").write_bytes(pack(*quantize(images)))
    text = "".join(f"{name}\n" for name in names)
    (options.output / "emoji_classes.txt").write_bytes(text.encode())


if __name__ == "__main__":
    main()
