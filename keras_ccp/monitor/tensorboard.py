"""What Keras' TensorBoard callback does not show of a training."""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_ccp.callback import BestWeights, at_best
from keras_ccp.files import write_file
from keras_ccp.monitor.projection_log import ProjectionListener, ProjectionLog
from keras_ccp.pipeline import EvaluationData

_THUMBNAIL = 32  # pixels; 1000 images make a sprite of 1024 x 1024


class CCPTensorBoard(ProjectionListener):
    """Shows projections, distances and embeddings, beside Keras' `TensorBoard`.

    Scalars of each epoch (`loss`, `pair_loss`, `proximal_loss`, the retrieval metrics)
    come by `keras.callbacks.TensorBoard`; give both the same folder. This one adds, as
    the run `ccp`,

    - Text: a sentence for each proxy problem that ended.
    - Scalars: the numbers of a `ProjectionLog`, if there is one.
    - Histograms: distances between the images of a class and between those of two, at
      the best weights of each problem.
    - Projector: the embeddings at the end of the training, with thumbnails and names.

    Args:
        log_dir: folder that TensorBoard is pointed at.
        images: what to show, in a form that `CCPCallback` takes; a `Dataset` gives its
            class names. Defaults to `None`: the validation images of the `CCPCallback`.
        max_images: int, images at most; of more, a random choice that stays. Defaults
            to 1000.

    Raises:
        ValueError: if images are badly labelled. By `fit`: if there is no
            `CCPCallback`.

    Example: `callbacks=[CCPCallback(training, validation), CCPTensorBoard("logs")]`.
    """

    def __init__(
        self, log_dir: str | os.PathLike, images: Any = None, max_images: int = 1000
    ):
        super().__init__()
        self.folder = Path(log_dir) / "ccp"
        self.images = None if images is None else EvaluationData(images, "images")
        self.class_names = getattr(images, "class_names", None)
        self.max_images = max_images

    def on_train_begin(self, logs=None):
        self.callback = self.ccp_callback()
        self.data = self.images or self.callback.validation
        order = np.random.default_rng(0).permutation(len(self.data))
        self.rows = np.sort(order[: self.max_images])
        self.labels = self.data.labels[self.rows]
        self.writer = tf.summary.create_file_writer(str(self.folder))

    def on_projection(self, best: BestWeights, is_last: bool) -> None:
        """Writes what the problem came to."""
        with at_best(self.model, best):
            distances = pair_distances(self.embed(), self.labels)
        number = self.callback.num_projections + is_last
        follows = "the training ended" if is_last else "new proxies"
        with self.writer.as_default(step=self.epoch):
            tf.summary.text(
                "projection",
                f"Problem {number} ended with epoch {self.epoch} at MAP@R "
                f"{best.map_at_r:.4f}: {follows}.",
            )
            for name, values in distances.items():
                if len(values):
                    tf.summary.histogram(f"distances/{name}", values)

    def on_epoch_end(self, epoch, logs=None):
        self._write_numbers(is_last=False)

    def on_train_end(self, logs=None):
        self._write_numbers(is_last=True)
        self.writer.close()
        names = self.class_names or range(self.labels.max() + 1)
        write_projector(
            self.folder,
            self.embed(),
            [names[label] for label in self.labels],
            self.data.batches(self.rows),
        )

    def _write_numbers(self, is_last: bool) -> None:
        """Writes the log's line of this epoch, if it has one.

        Later than `on_projection`, where the log may be the next to hear.
        """
        for log in self.model.fit_callbacks:
            for line in log.lines[-1:] if isinstance(log, ProjectionLog) else ():
                if (line["epoch"], line["is_last"]) == (self.epoch, is_last):
                    self._write_line(line)

    def _write_line(self, line: dict[str, Any]) -> None:
        with self.writer.as_default(step=self.epoch):
            for when in ("before", "after"):
                for name, value in (line[when] or {}).items():
                    tf.summary.scalar(f"{name}/{when}_projection", value)


def pair_distances(embeddings: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Float32 L2 distances of the pairs of one class and of two, each pair once."""
    found: dict[str, list] = {"same class": [], "other class": []}
    for row, embedding in enumerate(embeddings):
        distances = np.linalg.norm(embeddings[:row] - embedding, axis=1)
        is_same = labels[:row] == labels[row]
        found["same class"].append(distances[is_same])
        found["other class"].append(distances[~is_same])
    return {name: np.concatenate(distances) for name, distances in found.items()}


def write_projector(
    folder: Path,
    embeddings: np.ndarray,
    names: Sequence[Any],
    images: Iterable[np.ndarray],
) -> None:
    """Writes the files of TensorBoard's projector into the folder of a run.

    `images` are batches `(batch, height, width, channels)`, uint8 or floats from 0 to
    1. Of other than three channels the first is shown.
    """
    from tensorboard.plugins import projector

    # A tab or a line end in a name would make columns and rows of it.
    rows = [" ".join(str(name).split()) for name in names]
    write_file(folder / "metadata.tsv", "".join(f"{row}\n" for row in rows))
    np.savetxt(folder / "embeddings.tsv", embeddings, fmt="%.6g", delimiter="\t")
    thumbnails = np.concatenate([_thumbnails(np.asarray(batch)) for batch in images])
    write_file(folder / "sprite.png", tf.io.encode_png(_sprite(thumbnails)).numpy())
    config = projector.ProjectorConfig()
    shown = config.embeddings.add(
        tensor_name="embeddings",
        tensor_path="embeddings.tsv",
        metadata_path="metadata.tsv",
    )
    shown.sprite.image_path = "sprite.png"
    shown.sprite.single_image_dim.extend([_THUMBNAIL, _THUMBNAIL])
    projector.visualize_embeddings(str(folder), config)


def _thumbnails(images: np.ndarray) -> np.ndarray:
    if images.shape[-1] != 3:
        images = images[..., :1].repeat(3, axis=-1)
    white = 255 if images.dtype == np.uint8 else 1
    small = tf.image.resize(images, (_THUMBNAIL, _THUMBNAIL), method="area")
    return np.clip(np.rint(small * (255 / white)), 0, 255).astype(np.uint8)


def _sprite(thumbnails: np.ndarray) -> np.ndarray:
    """A square of them, row by row."""
    side = math.ceil(len(thumbnails) ** 0.5)
    blank = ((0, side * side - len(thumbnails)), (0, 0), (0, 0), (0, 0))
    grid = np.pad(thumbnails, blank, constant_values=255)
    grid = grid.reshape(side, side, *thumbnails.shape[1:])
    return grid.swapaxes(1, 2).reshape(side * _THUMBNAIL, side * _THUMBNAIL, 3)
