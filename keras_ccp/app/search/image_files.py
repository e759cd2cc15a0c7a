"""Image files of the user's: found, decoded and embedded, the broken ones apart."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import rich.console
import rich.progress
import tensorflow as tf

from keras_ccp.pipeline import decode_center_crop

_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
_BATCH = 64
_SHOWN = 20


class Embedded(NamedTuple):
    """Embeddings of image files.

    Args:
        embeddings: `(n, dim)` float32.
        files: the n files that could be read.
        failures: reason by file, of those that could not.
    """

    embeddings: np.ndarray
    files: list[Path]
    failures: dict[Path, str]


def find_images(images: Sequence[str | os.PathLike]) -> list[Path]:
    """Lists image files, each once.

    Args:
        images: files, and folders that are searched with all folders in them for JPEG,
            PNG, BMP, GIF and WebP by the ending of their names. Names that begin with
            a dot are passed over.

    Returns:
        Absolute paths, those of a folder sorted.

    Raises:
        FileNotFoundError: If a path does not exist.
        ValueError: If there are no images.
    """
    found = []
    for path in images:
        path = Path(os.path.abspath(Path(path).expanduser()))
        if path.is_dir():
            found += sorted(_in_folder(path))
        elif path.exists():
            found.append(path)
        else:
            raise FileNotFoundError(
                f"`images` must be files or folders that exist. Received: {path}"
            )
    if not found:
        raise ValueError(
            f"`images` must hold images ({', '.join(_ENDINGS)}). "
            f"Received: {', '.join(str(path) for path in images) or 'nothing'}"
        )
    return list(dict.fromkeys(found))


def _in_folder(folder: Path) -> list[Path]:
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [
            Path(place, name)
            for name in names
            if name.lower().endswith(_ENDINGS) and not name.startswith(".")
        ]
    return files


def embed_files(
    embed: Callable[[tf.Tensor], tf.Tensor],
    files: Sequence[Path],
    size: int,
    short_side: int,
    progress: bool = True,
) -> Embedded:
    """Embeds image files, in parallel and in their order.

    Args:
        embed: maps `(batch, size, size, 3)` uint8 images to `(batch, dim)` embeddings.
        files: image files.
        size: side of the images in pixels.
        short_side: to which the short side is resized before.
        progress: whether a bar is shown, on the standard error stream.

    Raises:
        ValueError: If none of the files can be read.
    """
    names = [os.fsencode(file) for file in files]

    def load(row: tf.Tensor, name: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = decode_center_crop(tf.io.read_file(name), size, short_side)
        return row, image

    batches = (
        tf.data.Dataset.from_tensor_slices(names)
        .enumerate()
        .map(load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        .ignore_errors()  # rows that are missing then are those of broken files
        .batch(_BATCH)
        .prefetch(2)
    )
    rows, embeddings = [], []
    with progress_bar(progress) as bar:
        task = bar.add_task("embedding images", total=len(files))
        for numbers, images in batches:
            embeddings.append(embed(images).numpy())
            rows += numbers.numpy().tolist()
            bar.update(task, completed=rows[-1] + 1)
        bar.update(task, completed=len(files))
    missing = sorted(set(range(len(files))) - set(rows))
    failures = {files[row]: reason_of(files[row]) for row in missing}
    check_any_read(len(rows), failures)
    return Embedded(np.concatenate(embeddings), [files[row] for row in rows], failures)


def check_any_read(count: int, failures: dict[Path, str]) -> None:
    """Raises if no image file could be read.

    Args:
        count: number of those that could.
        failures: reason by file, of those that could not.

    Raises:
        ValueError: If the count is 0; the message lists the failures.
    """
    if count:
        return
    lines = [f"{file}: {reason}" for file, reason in failures.items()]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more"]
    raise ValueError(
        "`images` must hold images that can be read. "
        f"Received: {len(failures)} that cannot:\n" + "\n".join(lines)
    )


def progress_bar(is_shown: bool) -> rich.progress.Progress:
    """A bar that leaves the standard output to results.

    Args:
        is_shown: False makes it invisible.
    """
    return rich.progress.Progress(
        *rich.progress.Progress.get_default_columns(),
        rich.progress.MofNCompleteColumn(),
        console=rich.console.Console(stderr=True),
        disable=not is_shown,
        transient=True,
    )


def reason_of(file: Path) -> str:
    """Why an image file cannot be read.

    Args:
        file: a file that failed.
    """
    try:
        content = file.read_bytes()
        decode_center_crop(tf.constant(content), 1, 1)
    except OSError as error:
        return error.strerror or type(error).__name__
    except tf.errors.OpError as error:
        # What TensorFlow says of an image, without the name of the operation.
        message = error.message.split("}} ", 1)[-1].split(" [Op:", 1)[0]
        return message.split("\n", 1)[0].strip()
    return "it could be read when it was tried again"
