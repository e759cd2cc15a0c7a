"""Models for servers: from the bytes of image files to embeddings and neighbours.

They need TensorFlow, and nothing of this package.
"""

import base64
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_ccp.checks import check_int, require
from keras_ccp.datasets import Dataset
from keras_ccp.files import check_folder, reading, replaced_folder
from keras_ccp.index import RetrievalIndex, fingerprint
from keras_ccp.index.digests import (
    digest,
    read_manifest,
    refuse_damaged,
    write_manifest,
)
from keras_ccp.index.scann_backend import Tuning, make_builder
from keras_ccp.model import CCPModel
from keras_ccp.pipeline import decode_center_crop

# TensorFlow leaves this folder of a SavedModel to others.
_MANIFEST = "assets.extra/keras_ccp.json"
# Between processors and versions of TensorFlow, in parts of the embedding's length.
_TOLERANCE = 1e-4
_GOLDEN_NEIGHBOURS = 5
# Candidates beyond k, for float32 scores that are in the wrong order or tied.
_SPARE = 32


# ==== Writing ====


def export_serving(
    embedder: Any,
    path: str | os.PathLike,
    index: RetrievalIndex | None = None,
    size: int | None = None,
    short_side: int | None = None,
) -> Path:
    """Writes a SavedModel from the bytes of image files to embeddings.

    Images are decoded and prepared inside, as in evaluation
    (`keras_ccp.pipeline.decode_center_crop`). Signatures, with named tensors and the
    batch first:

    - `embed`: `images` `(batch, size, size, 3)` uint8 -> `embeddings` `(batch, dim)`
    - `embed_bytes`: `image_bytes` `(batch,)` string -> `embeddings`
    - `search`, with an index: `image_bytes`, and `k` `(batch,)` or `(1,)` int32 ->
      `ids`, `distances` and, if the index has them, `labels`, all `(batch, k)`. Where
      rows differ in `k`, what a row did not ask for has an infinite distance.

    With an exact index the search is exact but for more than `k` + 32 ties in float32.
    A ScaNN index needs `import scann` where the model is loaded.

    Args:
        embedder: Keras model, `CCPModel` (its proxies stay behind), what
            `tf.saved_model.load` returns, or the path of a `.keras` file or SavedModel:
            images -> embeddings.
        path: folder to write; one that holds a SavedModel is replaced when the new one
            is complete.
        index: to be searched inside. Defaults to `None`: embeddings only.
        size: int, side of the images in pixels. Defaults to `None`: as the embedder
            takes them.
        short_side: int, to which the short side is resized before the centre is cut
            out. Defaults to `None`: size * 256 / 227, rounded.

    Returns:
        The path.

    Raises:
        ValueError: If the embedder has not one input of square RGB images and one
            output of vectors, `size` or `short_side` does not fit, the index is of
            another embedder, or `path` holds something else.
        FileNotFoundError: If `embedder` is a path where nothing is.
        ImportError: If the index is a ScaNN index and ScaNN is not installed.
    """
    path = Path(path)
    _check_replaceable(path)
    module = _ServingModule(load_embedder(embedder, True), size, short_side, index)
    with replaced_folder(path) as folder:
        options = tf.saved_model.SaveOptions(namespace_whitelist=["Scann"])
        tf.saved_model.save(module, folder, module.endpoints, options)
        _write_golden(folder, module.preparation)
    return path


def export_trained(
    embedder: keras.Model, path: str | os.PathLike, dataset: Dataset
) -> Path:
    """Writes an embedder that prepares images as those it was scored on.

    Of square RGB images by `export_serving`, files by the `size` and `short_side`
    of the dataset and arrays as they are; of other images as Keras exports it.
    `check_model` checks either.

    Args:
        embedder: what maps a batch of images to embeddings.
        path: folder to write; that of another exported model is replaced.
        dataset: the images it was scored on.
    """
    path = Path(path)
    shape = embedder.input_shape[1:]
    if len(shape) == 3 and shape[0] == shape[1] and shape[2] == 3:
        short_side = dataset.short_side if dataset.is_encoded else shape[0]
        return export_serving(embedder, path, None, dataset.size, short_side)
    _check_replaceable(path)
    with replaced_folder(path) as folder:
        _inference(embedder).export(folder, verbose=False)
        _write_golden(folder, {})
    return path


def export_onnx(embedder: Any, path: str | os.PathLike) -> None:
    """Writes an embedder in the ONNX format, without decoding and search.

    It takes uint8 or float images as the embedder does, `(batch, size, size, 3)`. Needs
    the packages `onnx` and `tf2onnx`: `pip install --no-deps onnx tf2onnx` (tf2onnx
    1.17 asks for an older NumPy than it needs); Keras names what is missing.

    Args:
        embedder: Keras model, `CCPModel`, or the path of a `.keras` file.
        path: file to write.

    Raises:
        ImportError: If a package is missing.
        ValueError: If it does not take square RGB images.
    """
    embedder = load_embedder(embedder)
    size, model = image_size(embedder) or 32, _inference(embedder)
    # The exporter takes the shapes of a call.
    model(np.zeros((1, size, size, 3), model.inputs[0].dtype))
    model.export(path, format="onnx", verbose=False)


def load_embedder(embedder: Any, trust: bool = False) -> Any:
    """A Keras model or loaded SavedModel, of what `export_serving` takes.

    A SavedModel, a folder or packed as a zip file, is loaded only with `trust`.
    """
    if isinstance(embedder, CCPModel):
        return embedder.embedder
    if not isinstance(embedder, (str, os.PathLike)):
        return embedder
    path = Path(embedder)
    if path.suffix == ".zip" or (path / "saved_model.pb").exists():
        if not trust:
            raise ValueError(
                "`embedder` must run no code of its own. Received: a SavedModel, which "
                f"is a program, in {path}\nTrust those who made it by --trust "
                "(trust=True), or take a .keras file"
            )
        with tempfile.TemporaryDirectory() as folder:
            if path.suffix == ".zip":
                shutil.unpack_archive(path, folder)
                path = Path(folder)
            return tf.saved_model.load(path)
    if path.suffix != ".keras" or not path.is_file():
        raise FileNotFoundError(
            f"`embedder` must be a .keras file or the folder of a SavedModel. Received:"
            f" {path}\nA finished run has the folder `embedder`"
        )
    with reading(
        f"{path} must be an undamaged .keras file of layers of Keras and keras_ccp",
        "Save it again, without Lambda layers and classes of one's own",
    ):
        zipfile.ZipFile(path).close()  # says what Keras calls "not found"
        model = keras.models.load_model(path, compile=False, safe_mode=True)
    return load_embedder(model)


def _inference(embedder: keras.Model) -> keras.Model:
    """The embedder, in which layers of augmentation do nothing."""
    images = embedder.inputs[0]
    return keras.Model(images, embedder(images, training=False))


def image_size(embedder: Any) -> int | None:
    """Side of the images that a loaded embedder takes, `None` if it is free."""
    _, given = call_of(embedder)
    shape = tuple(given.shape)
    if len(shape) != 4 or shape[3] not in (3, None) or shape[1] != shape[2]:
        raise ValueError(
            "`embedder` must take square RGB images, (batch, size, size, 3). "
            f"Received: one for {shape}\nEmbed other images with `model.embed`"
        )
    return shape[1]


def call_of(embedder: Any) -> tuple[Any, Any]:
    """What maps a batch of images to embeddings, and the spec of the images."""
    if isinstance(embedder, keras.Model):
        inputs, outputs = embedder.inputs or (), embedder.outputs or ()
        if len(inputs) == len(outputs) == 1:
            return lambda images: embedder(images, training=False), inputs[0]
    signatures = getattr(embedder, "signatures", {})
    names = [n for n in ("embed", "serving_default", "serve") if n in signatures]
    if names:
        signature = signatures[names[0]]
        given, outputs = signature.structured_input_signature[1], signature.outputs
        if len(given) == len(outputs) == 1:
            ((argument, spec),) = given.items()
            (output,) = signature.structured_outputs
            return lambda images: signature(**{argument: images})[output], spec
    raise ValueError(
        "`embedder` must be a built Keras model or a loaded SavedModel with one input "
        f"and one output. Received: {embedder!r}\n"
        "Call a Keras model on a batch of images to build it"
    )


def prepare_as(
    embedder: Any, size: int | None = None, short_side: int | None = None
) -> dict[str, int]:
    """`size` and `short_side` for a loaded embedder, where they are not given."""
    expected = image_size(embedder)
    size = size or expected
    if size is None or expected not in (None, size):
        raise ValueError(
            f"`size` must be {expected or 'given'}, by what the embedder takes. "
            f"Received: size={size}\nPass the side of its images in pixels"
        )
    short_side = short_side or round(size * 256 / 227)
    check_int("short_side", short_side, minimum=size)
    return {"size": int(size), "short_side": int(short_side)}


def _check_replaceable(path: Path) -> None:
    check_folder("path", path.parent)
    if path.exists() and not (path / "saved_model.pb").exists():
        if not path.is_dir() or any(path.iterdir()):
            raise ValueError(
                "`path` must be a new or empty folder, or a SavedModel to replace. "
                f"Received: {path}\nChoose another"
            )


# ==== Graphs ====


class _ServingModule(tf.Module):
    """Everything that is saved. The attributes are what TensorFlow keeps with it."""

    def __init__(
        self,
        embedder: Any,
        size: int | None,
        short_side: int | None,
        index: RetrievalIndex | None,
    ):
        super().__init__()
        call, given = call_of(embedder)
        self.preparation = prepare_as(embedder, size, short_side)
        size, short_side = self.preparation.values()
        own = fingerprint(embedder)
        if index is not None and (index.fingerprint or own) != own:
            raise ValueError(
                f"`index` must hold embeddings of this embedder. Received: an index "
                f"of {index.fingerprint}, an embedder {own}\nBuild it again with them"
            )
        self.embedder_fingerprint = _fixed(own)
        if isinstance(embedder, keras.Model):
            # The variables without the Keras objects: those would need Keras to load.
            self.weights = [variable.value for variable in embedder.variables]
        else:
            self.saved_model = embedder

        images_spec = tf.TensorSpec((None, size, size, 3), tf.uint8, "images")
        bytes_spec = tf.TensorSpec((None,), tf.string, "image_bytes")

        @tf.function(input_signature=[images_spec])
        def embed(images: tf.Tensor) -> dict[str, tf.Tensor]:
            images = tf.cast(_at_least_one("images", images), given.dtype)
            return {"embeddings": tf.cast(call(images), "float32")}

        # There is no Python to convert, and looking for it takes seconds.
        @tf.function(input_signature=[bytes_spec], autograph=False)
        def embed_bytes(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
            images = tf.map_fn(
                lambda encoded: decode_center_crop(encoded, size, short_side, True),
                _at_least_one("image_bytes", image_bytes),
                fn_output_signature=tf.TensorSpec((size, size, 3), tf.uint8),
            )
            return embed(images)

        self.embed, self.embed_bytes = embed, embed_bytes
        self.endpoints = {"embed": embed, "embed_bytes": embed_bytes}
        if index is None:
            return
        self.index = SearchInGraph(index)

        @tf.function(
            input_signature=[bytes_spec, tf.TensorSpec((None,), tf.int32, "k")],
            autograph=False,
        )
        def search(image_bytes: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
            return self.index.search(embed_bytes(image_bytes)["embeddings"], k)

        self.endpoints["search"] = search


class SearchInGraph(tf.Module):
    """An index as variables, so that no limit on the size of a graph is met.

    Quick float32 scores (or ScaNN) choose candidates, float64 differences order them;
    equally near rows come by their row.
    """

    def __init__(self, index: RetrievalIndex):
        super().__init__()
        embeddings = index.embeddings.astype(np.float32)
        # The nearest has the highest x.y - |y|^2 / 2. With x from the mean of all y,
        # which changes all scores by the same, rounding errors are smaller.
        exact = embeddings.astype(np.float64)
        offsets = exact @ exact.mean(axis=0) - np.square(exact).sum(axis=1) / 2
        self.embeddings = _fixed(embeddings)
        self.origin = _fixed(exact.mean(axis=0).astype(np.float32))
        self.offsets = _fixed(offsets.astype(np.float32))
        self.ids = _fixed(_column(index.ids))
        self.labels = None if index.labels is None else _fixed(_column(index.labels))
        self.scann_state = None
        if not index.is_exact:
            self._tuning = Tuning(**index.parameters)
            # A module of ScaNN's own, in which TensorFlow keeps its structures.
            self._scann_ops = require("scann", "scann").scann_ops
            builder = make_builder(embeddings, self._scann_ops.builder, self._tuning)
            self.scann_state = builder.build().serialize_to_module()

    def search(self, queries: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        """Finds the nearest rows.

        Args:
            queries: `(batch, dim)` float32.
            k: `(batch,)` or `(1,)` int32, neighbours of each query.

        Returns:
            `(batch, max k)` `ids`, float32 `distances` and, if there are any, `labels`.
            Beyond the `k` of a row its distances are infinite.
        """
        count, batch = tf.shape(self.embeddings)[0], tf.shape(queries)[0]
        is_fit = (tf.size(k) == 1) | (tf.size(k) == batch)
        message = (
            "`k` must hold one number, or one for each image. Received (k, images)"
        )
        checks = [
            tf.debugging.Assert(is_fit, [message, tf.size(k), batch]),
            tf.debugging.assert_positive(k, "`k` must be at least 1"),
            tf.debugging.assert_less_equal(
                k, count, "`k` must be at most the number of rows of the index"
            ),
        ]
        with tf.control_dependencies(checks):
            k = tf.identity(k)
        most = tf.reduce_max(k)
        find = self._candidates if self.scann_state is None else self._scann_candidates
        rows = tf.sort(find(queries, most), axis=1)  # kept by the stable sort below
        near = tf.cast(tf.gather(self.embeddings, rows), tf.float64)
        difference = near - tf.cast(queries, tf.float64)[:, None]
        squares = tf.reduce_sum(tf.square(difference), axis=2)
        order = tf.argsort(squares, axis=1, stable=True)[:, :most]
        rows = tf.gather(rows, order, batch_dims=1)
        squares = tf.gather(squares, order, batch_dims=1)
        distances = tf.cast(tf.sqrt(squares), tf.float32)
        is_wanted = tf.range(most)[None] < k[:, None]
        result = {
            "ids": tf.gather(self.ids, rows),
            "distances": tf.where(is_wanted, distances, np.inf),
        }
        if self.labels is not None:
            result["labels"] = tf.gather(self.labels, rows)
        return result

    def _candidates(self, queries: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
        centred = queries - self.origin
        scores = tf.matmul(centred, self.embeddings, transpose_b=True) + self.offsets
        wanted = tf.minimum(tf.shape(scores)[1], 2 * k + _SPARE)
        return tf.math.top_k(scores, wanted).indices

    def _scann_candidates(self, queries: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
        searcher = self._scann_ops.searcher_from_module(self.scann_state)
        count = tf.shape(self.embeddings)[0]
        options = self._tuning.options(k, count, tf.minimum, tf.maximum)
        rows, scores = searcher.search_batched_parallel(queries, k, **options)
        # The partitions that were searched may hold fewer than k: columns or rows of
        # columns are then missing.
        is_full = tf.reduce_all(tf.math.is_finite(scores)) & (tf.shape(rows)[1] == k)
        return tf.cond(
            is_full,
            lambda: tf.cast(rows, tf.int32),
            lambda: self._candidates(queries, k),
        )


def _at_least_one(name: str, batch: tf.Tensor) -> tf.Tensor:
    """The batch, if it is not empty: few networks take that."""
    message = f"`{name}` must hold one image at least"
    check = tf.debugging.assert_positive(tf.shape(batch)[0], message)
    with tf.control_dependencies([check]):
        return tf.identity(batch)


def _fixed(value: Any) -> tf.Variable:
    return tf.Variable(value, trainable=False)


def _column(values: np.ndarray) -> Any:
    if values.dtype.kind != "U":
        return values
    # File names that are no UTF-8 come from Python with such characters, and go back.
    return [text.encode("utf-8", "surrogateescape") for text in values.tolist()]


# ==== Checking ====


def check_model(path: str | os.PathLike) -> dict[str, Any]:
    """Tells whether an exported model is whole and computes what it did.

    Args:
        path: folder that `export_serving` or a run wrote.

    Returns:
        `fingerprint` of the embedder, `size` and `short_side` if it decodes files,
        `embedding_dim`, `num_rows` of the index inside, and `difference`, the length of
        the difference of the golden embedding, in parts of its own length.

    Raises:
        FileNotFoundError: If there is no such model.
        ValueError: If files are changed or missing, the model cannot be loaded, or its
            embedding or neighbours of the golden image are others; it says which.
    """
    manifest = read_undamaged(Path(path))
    difference = _golden_difference(Path(path), manifest["golden"])
    return manifest["about"] | {"difference": difference}


def _golden_difference(path: Path, golden: dict[str, Any]) -> float:
    """How far the embedding of the golden image is from the one that was written."""
    wrong = []
    try:
        model = tf.saved_model.load(path)
        embedding, ids = _golden_results(model, golden["image"])
    except (tf.errors.OpError, OSError, ValueError) as error:
        refuse_damaged(path, [f"the model does not run here: {error}"])
    expected = np.array(golden["embedding"])
    difference = np.linalg.norm(np.array(embedding) - expected)
    difference /= max(np.linalg.norm(expected), 1e-12)
    if not difference <= _TOLERANCE:
        wrong.append(
            f"the embedding of the golden image differs by {difference:.2g} of its "
            f"length, allowed are {_TOLERANCE:g}"
        )
    if ids != golden["ids"]:
        wrong.append(f"the golden image's neighbours are {ids}, not {golden['ids']}")
    if wrong:
        refuse_damaged(path, wrong)
    return float(difference)


def read_undamaged(path: Path) -> dict[str, Any]:
    """What an exported model says of itself, if its files have their checksums."""
    if not (path / _MANIFEST).is_file():
        raise FileNotFoundError(
            f"`path` must be a model that `export_serving` wrote. Received: {path}\n"
            "A run has its own in the folder `embedder`"
        )
    manifest = read_manifest(path / _MANIFEST)
    listed, found = manifest["files"], _checksums(path)
    wrong = [
        f"{name} is "
        + ("missing" if name not in found else "changed" if name in listed else "new")
        for name in sorted({*listed, *found})
        if listed.get(name) != found.get(name)
    ]
    if wrong:
        refuse_damaged(path, wrong)
    return manifest


def read_preparation(path: str | os.PathLike) -> dict[str, int]:
    """`size` and `short_side` of a model's images; nothing if it decodes no files."""
    if not (Path(path) / _MANIFEST).is_file():
        return {}
    about = read_manifest(Path(path) / _MANIFEST)["about"]
    return {name: about[name] for name in ("size", "short_side") if name in about}


def _write_golden(path: Path, preparation: dict[str, int]) -> None:
    """Adds the checksums of its files, and a golden image with its embedding."""
    model = tf.saved_model.load(path)
    image = None
    if preparation:
        # Larger than needed and not square: all steps have work.
        size = preparation["size"]
        pixels = _golden_pixels(3 * size // 2 + 8, 2 * size + 16, 3, size)
        encoded = tf.io.encode_jpeg(pixels.astype(np.uint8), quality=95)
        image = base64.b64encode(encoded.numpy()).decode()
    embedding, ids = _golden_results(model, image)
    manifest = {
        "about": {
            "fingerprint": fingerprint(model),
            **preparation,
            "embedding_dim": len(embedding),
            "num_rows": _num_rows(model),
        },
        "golden": {"image": image, "embedding": embedding, "ids": ids},
        "files": _checksums(path),
    }
    write_manifest(path / _MANIFEST, manifest)


def _golden_pixels(height: int, width: int, channels: int, scale: int) -> np.ndarray:
    """`(height, width, channels)` waves of 0 to 255."""
    rows, columns = np.mgrid[:height, :width] / scale
    waves = [np.sin(9 * rows + 5 * columns), np.cos(7 * rows * columns), rows - columns]
    waves = np.stack([waves[i % 3] for i in range(channels)], -1)
    return 255 * (waves / 4 + 0.5).clip(0, 1)


def _golden_results(model: Any, image: str | None) -> tuple[list, list | None]:
    """Embedding and neighbours of a JPEG in base64, without one of an array."""
    if image is None:
        call, spec = call_of(model)
        height, width, channels = (side or 32 for side in spec.shape[1:])
        pixels = _golden_pixels(height, width, channels, height)
        return call(tf.cast(pixels[None], spec.dtype))[0].numpy().tolist(), None
    files = tf.constant([base64.b64decode(image)])
    found = model.signatures["embed_bytes"](image_bytes=files)["embeddings"]
    embedding, ids = found[0].numpy().tolist(), None
    if "search" in model.signatures:
        k = tf.constant([min(_GOLDEN_NEIGHBOURS, _num_rows(model))])
        found = model.signatures["search"](image_bytes=files, k=k)["ids"][0].numpy()
        ids = [
            i.decode("utf-8", "replace") if isinstance(i, bytes) else i
            for i in found.tolist()
        ]
    return embedding, ids


def _checksums(path: Path) -> dict[str, str]:
    names = [f.relative_to(path).as_posix() for f in path.rglob("*") if f.is_file()]
    return {
        name: digest((path / name).read_bytes()) for name in names if name != _MANIFEST
    }


def _num_rows(model: Any) -> int:
    return int(model.index.ids.shape[0]) if "search" in model.signatures else 0
