"""The bundled data: emoji as drawn by six vendors."""

import lzma
from pathlib import Path

import numpy as np

from keras_ccp.datasets.dataset import Dataset

_VENDORS = 6
_SIZE = 32
_PALETTE_BYTES = 3 * 256


def emoji() -> Dataset:
    """Loads 461 emoji as drawn by six vendors: no download, about 0.2 s.

    Images are sorted by class; within a class the vendors are Noto, Noto v1,
    Twemoji, Fluent flat, EmojiOne, FxEmoji, in this order. They are stored in one
    palette of 160 colours: against the drawings in full colour the mean absolute
    difference of a pixel value is 3.19 of 255, the root mean square 6.01.

    Authors and licences are in `bundled/ATTRIBUTION.txt` beside this file;
    `tools/build_emoji.py` of the repository says how the images were made.

    Returns:
        A dataset of 2,766 images `(2766, 32, 32, 3)` uint8 on white, six for each
        class; `class_names` such as "alarm-clock".
    """
    return _load(Path(__file__).parent / "bundled")


def _load(folder: Path) -> Dataset:
    names = (folder / "emoji_classes.txt").read_text(encoding="utf-8").split()
    raw = np.frombuffer(lzma.decompress((folder / "emoji.xz").read_bytes()), np.uint8)
    palette = raw[:_PALETTE_BYTES].reshape(256, 3)
    # Stored vendor by vendor and column by column: that packs smaller.
    columns = raw[_PALETTE_BYTES:].reshape(_VENDORS, len(names), _SIZE, _SIZE)
    rows = columns.transpose(1, 0, 3, 2).reshape(-1, _SIZE, _SIZE)
    labels = np.repeat(np.arange(len(names)), _VENDORS)
    return Dataset(palette[rows], labels, names)
