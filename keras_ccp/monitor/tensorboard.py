"""CCPTensorBoard: what Keras' TensorBoard callback does not show of a training."""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_ccp.callback import BestWeights, CCPCallback, at_best
from keras_ccp.checks import check_int
from keras_ccp.monitor.projection_log import ProjectionLog
from keras_ccp.pipeline import EvaluationData

_THUMBNAIL = 32  # pixels; 1000 images make a sprite of 1024 x 1024
_RUN = "ccp"


class CCPTensorBoard(keras.callbacks.Callback):
    """Shows projections, distances and embeddings, beside Keras' `TensorBoard`.

    Scalars of each epoch (`loss`, `pair_loss`, `proximal_loss`, the retrieval metrics)
    come by `keras.callbacks.TensorBoard`; give both the same folder. This one adds, as
    the run `ccp`,

    - Text: a sentence for each proxy problem that ended.
    - Scalars, where there is a `ProjectionLog` too: its numbers before and after each
      switch.
    - Histograms: distances between the images of a class and between those of two, at
      the best weights of each problem.
    - Projector: the embeddings at the end of the training, with thumbnails and names.

    Steps are epochs, as Keras counts them.

    Args:
        log_dir: folder that TensorBoard is pointed at.
        images: what to show, in a form that `CCPCallback` takes; a `Dataset` gives its
            class names. Defaults to `None`: the validation images of the `CCPCallback`.
        max_images: int, images at most; of more, a random choice that stays. Defaults
            to 1000.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if `max_images` is below 2, or images are badly labelled. By `fit`:
            if there is no `CCPCallback`.
    """

    def __init__(
        self, log_dir: str | os.PathLike, images: Any = None, max_images: int = 1000
    ):
        super().__init__()
        check_int("max_images", max_images, minimum=2)
        self.log_dir = Path(log_dir)
        self.max_images = max_images
        self.class_names = getattr(images, "class_names", None)
        self._images = None if images is None else EvaluationData(images, "images")
        self._log: ProjectionLog | None = None
        self._data: EvaluationData | None = None
        self._epoch = 0

    def _find_callbacks(self):
        callbacks = self.model.fit_callbacks
        tellers = [c for c in callbacks if isinstance(c, CCPCallback)]
        if not tellers:
            raise ValueError(
                "`callbacks` must hold a CCPCallback beside a CCPTensorBoard; without "
                "one, keras.callbacks.TensorBoard shows all there is. Received: "
                f"callbacks={[type(c).__name__ for c in callbacks]}"
            )
        self._data = self._images or tellers[0].validation
        logs = [c for c in callbacks if isinstance(c, ProjectionLog)]
        self._log = logs[0] if logs else None

    # ==== Events ====

    def on_train_begin(self, logs=None):
        self._find_callbacks()
        n = len(self._data)
        chosen = np.random.default_rng(0).permutation(n)[: self.max_images]
        self._rows = np.sort(chosen)
        self._labels = self._data.labels[self._rows]
        self._writer = tf.summary.create_file_writer(str(self.log_dir / _RUN))
        self._written: dict[str, Any] | None = None

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_projection(self, best: BestWeights, is_last: bool) -> None:
        """Writes what the problem came to; see `CCPCallback`.

        Args:
            best: the best weights of the problem.
            is_last: bool, whether no problem follows.
        """
        with at_best(self.model, best):
            distances = pair_distances(self._embed(), self._labels)
        number = int(self.model.num_projections.numpy()) + bool(is_last)
        follows = "the training ended" if is_last else "new proxies"
        with self._writer.as_default(step=self._epoch):
            tf.summary.text(
                "projection",
                f"Problem {number} ended with epoch {self._epoch} at MAP@R "
                f"{best.map_at_r:.4f}: {follows}.",
            )
            for name, values in zip(
                ("same class", "other class"), distances, strict=True
            ):
                if len(values):
                    tf.summary.histogram(f"distances/{name}", values)

    def on_epoch_end(self, epoch, logs=None):
        # After the events of this epoch, wherever the log is in the list.
        self._write_line()

    def on_train_end(self, logs=None):
        self._write_line()
        self._writer.close()
        write_projector(
            self.log_dir / _RUN,
            self._embed(),
            [self._name(label) for label in self._labels],
            self._data.batches(self._rows),
        )

    # ==== Parts ====

    def _embed(self) -> np.ndarray:
        return self.model.predict(self._data.batches(self._rows), verbose=0)

    def _name(self, label: int) -> str:
        return str(label) if self.class_names is None else self.class_names[label]

    def _write_line(self) -> None:
        """Writes the newest line of the log, if it is new."""
        lines = [] if self._log is None else self._log.lines
        if not lines or lines[-1] is self._written:
            return
        self._written = lines[-1]
        with self._writer.as_default(step=self._epoch):
            for when in ("before", "after"):
                for name, value in (self._written[when] or {}).items():
                    tf.summary.scalar(f"{name}/{when}_switch", value)


def pair_distances(
    embeddings: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Distances of all pairs, apart by whether a pair shares its class.

    Args:
        embeddings: `(n, dim)` floats.
        labels: `(n,)` ints.

    Returns:
        L2 distances, not squared, of the pairs of one class and of those of two, each
        pair once: two `(pairs,)` float32 arrays.
    """
    same, other = [], []
    for row in range(len(embeddings) - 1):
        later = embeddings[row + 1 :]
        distances = np.linalg.norm(later - embeddings[row], axis=1)
        is_same = labels[row + 1 :] == labels[row]
        same.append(distances[is_same])
        other.append(distances[~is_same])
    return np.concatenate(same), np.concatenate(other)


def write_projector(
    directory: str | os.PathLike,
    embeddings: np.ndarray,
    names: Sequence[str],
    images: Iterable[np.ndarray],
) -> None:
    """Writes files that TensorBoard's projector shows.

    Args:
        directory: folder of a TensorBoard run, or `log_dir` itself.
        embeddings: `(n, dim)` floats.
        names: n names, shown with the points; those of classes give them colours.
        images: batches `(batch, height, width, channels)` of the n images, uint8 or
            floats from 0 to 1. Of other than three channels the first is shown.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    np.savetxt(directory / "embeddings.tsv", embeddings, fmt="%.6g", delimiter="\t")
    # A tab or a line end in a name would make columns and rows of it.
    rows = [" ".join(str(name).split()) for name in names]
    text = "".join(f"{row}\n" for row in rows)
    (directory / "metadata.tsv").write_text(text, "utf-8")
    thumbnails = np.concatenate([_thumbnails(np.asarray(batch)) for batch in images])
    sprite = tf.io.encode_png(_sprite(thumbnails))
    (directory / "sprite.png").write_bytes(sprite.numpy())
    (directory / "projector_config.pbtxt").write_text(
        "embeddings {\n"
        '  tensor_name: "embeddings"\n'
        '  tensor_path: "embeddings.tsv"\n'
        '  metadata_path: "metadata.tsv"\n'
        "  sprite {\n"
        '    image_path: "sprite.png"\n'
        f"    single_image_dim: {_THUMBNAIL}\n"
        f"    single_image_dim: {_THUMBNAIL}\n"
        "  }\n"
        "}\n"
    )


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
    return np.concatenate([np.concatenate(row, axis=1) for row in grid])
