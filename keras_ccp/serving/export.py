"""One SavedModel from the bytes of image files to embeddings, or to what is similar."""

import os
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_ccp.checks import check_int
from keras_ccp.datasets import Dataset
from keras_ccp.index import RetrievalIndex, fingerprint
from keras_ccp.model import CCPModel
from keras_ccp.pipeline import decode_center_crop
from keras_ccp.serving.folders import check_replaceable, replaced_folder
from keras_ccp.serving.golden import write_manifest
from keras_ccp.serving.search_in_graph import SearchInGraph


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
        path: folder to write; one that holds a SavedModel is replaced at once, when the
            new one is complete.
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
        TypeError: If `embedder` is nothing of the above.
        FileNotFoundError: If it is a path where nothing is.
        ImportError: If the index is a ScaNN index and ScaNN is not installed.
    """
    path = Path(path)
    check_replaceable(path)
    module = _ServingModule(load_embedder(embedder), size, short_side, index)
    with replaced_folder(path) as folder:
        tf.saved_model.save(
            module,
            folder,
            signatures=module.endpoints,
            options=tf.saved_model.SaveOptions(namespace_whitelist=["Scann"]),
        )
        write_manifest(folder, module.preparation)
    return path


def export_trained(
    embedder: keras.Model, path: str | os.PathLike, dataset: Dataset
) -> Path:
    """Writes an embedder that prepares images as those it was scored on.

    Of square RGB images by `export_serving`, files by the `size` and `short_side`
    of the dataset and arrays as they are; of other images as Keras exports it.
    `check_model` checks either.

    Args:
        embedder: built Keras model, images -> embeddings.
        path: folder to write, as for `export_serving`.
        dataset: images that the embedder was scored on.

    Returns:
        The path.

    Raises:
        ValueError: As `export_serving`.
    """
    path = Path(path)
    shape = embedder.input_shape[1:]
    if len(shape) == 3 and shape[0] == shape[1] and shape[2] == 3:
        short_side = dataset.short_side if dataset.is_encoded else shape[0]
        return export_serving(embedder, path, None, dataset.size, short_side)
    check_replaceable(path)
    with replaced_folder(path) as folder:
        embedder.export(folder, verbose=False)
        write_manifest(folder, {})
    return path


def load_embedder(embedder: Any) -> Any:
    """Loads an embedder if it is a path.

    Args:
        embedder: as for `export_serving`.

    Returns:
        A Keras model or a loaded SavedModel.

    Raises:
        TypeError: If it is none of these.
        FileNotFoundError: If it is a path where nothing is.
    """
    if isinstance(embedder, CCPModel):
        given = embedder.embedder.inputs[0]
        images = keras.Input(batch_shape=given.shape, dtype=given.dtype)
        return keras.Model(images, embedder.normalize(embedder.embedder(images)))
    if isinstance(embedder, (str, os.PathLike)):
        path = Path(embedder)
        if (path / "saved_model.pb").exists():
            return tf.saved_model.load(path)
        if path.is_file():
            return load_embedder(keras.models.load_model(path, compile=False))
        raise FileNotFoundError(
            "`embedder` must be a .keras file or the folder of a SavedModel. "
            f"Received: embedder={str(path)!r}"
        )
    if isinstance(embedder, keras.Model) or getattr(embedder, "signatures", None):
        return embedder
    raise TypeError(
        "`embedder` must be a Keras model, a loaded SavedModel or the path of one. "
        f"Received: embedder={embedder!r}"
    )


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
        own = fingerprint(embedder)
        if index is not None and (index.fingerprint or own) != own:
            raise ValueError(
                "`index` must hold embeddings of this embedder; build it anew with "
                f"them. Received: an index of {index.fingerprint}, an embedder {own}"
            )
        self.embedder_fingerprint = tf.Variable(own, trainable=False)
        if isinstance(embedder, keras.Model):
            # The variables without the Keras objects: those would need Keras to load.
            self.weights = [variable.value for variable in embedder.variables]
            call, given = _keras_call(embedder)
        else:
            self.saved_model = embedder
            call, given = _signature_call(embedder)
        size, short_side = _sizes(image_size(embedder), size, short_side)
        self.preparation = {"size": size, "short_side": short_side}

        @tf.function(
            input_signature=[tf.TensorSpec((None, size, size, 3), tf.uint8, "images")]
        )
        def embed(images: tf.Tensor) -> dict[str, tf.Tensor]:
            images = tf.cast(_at_least_one("images", images), given.dtype)
            return {"embeddings": tf.cast(call(images), "float32")}

        # There is no Python to convert, and looking for it takes seconds.
        @tf.function(
            input_signature=[tf.TensorSpec((None,), tf.string, "image_bytes")],
            autograph=False,
        )
        def embed_bytes(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
            images = tf.map_fn(
                lambda encoded: decode_center_crop(encoded, size, short_side, True),
                _at_least_one("image_bytes", image_bytes),
                fn_output_signature=tf.TensorSpec((size, size, 3), tf.uint8),
            )
            return embed(images)

        self.embed, self.embed_bytes = embed, embed_bytes
        self.endpoints = {"embed": embed, "embed_bytes": embed_bytes}
        if index is not None:
            self._add_search(index)

    def _add_search(self, index: RetrievalIndex) -> None:
        width = self.embed.get_concrete_function().structured_outputs["embeddings"]
        if width.shape[-1] != index.embeddings.shape[1]:
            raise ValueError(
                f"`index` must hold embeddings of {width.shape[-1]} numbers, as the "
                f"embedder makes. Received: an index of {index.embeddings.shape[1]}"
            )
        self.index = SearchInGraph(index)

        @tf.function(
            input_signature=[
                tf.TensorSpec((None,), tf.string, "image_bytes"),
                tf.TensorSpec((None,), tf.int32, "k"),
            ],
            autograph=False,
        )
        def search(image_bytes: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
            embeddings = self.embed_bytes(image_bytes)["embeddings"]
            return self.index.search(embeddings, k)

        self.search = search
        self.endpoints["search"] = search


def _at_least_one(name: str, batch: tf.Tensor) -> tf.Tensor:
    """The batch, if it is not empty: few networks take that."""
    message = f"`{name}` must hold one image at least"
    check = tf.debugging.assert_positive(tf.shape(batch)[0], message)
    with tf.control_dependencies([check]):
        return tf.identity(batch)


def image_size(embedder: Any) -> int | None:
    """Side of the images that an embedder takes, `None` if it is free.

    Args:
        embedder: what `load_embedder` returns.

    Raises:
        ValueError: If it does not take square RGB images.
    """
    is_keras = isinstance(embedder, keras.Model)
    _, given = (_keras_call if is_keras else _signature_call)(embedder)
    shape = tuple(given.shape)
    if len(shape) != 4 or shape[3] not in (3, None) or shape[1] != shape[2]:
        raise ValueError(
            "`embedder` must take square RGB images, (batch, size, size, 3). "
            f"Received: an embedder for {shape}"
        )
    return shape[1]


def _keras_call(model: keras.Model) -> tuple[Any, Any]:
    if len(model.inputs or ()) != 1 or len(model.outputs) != 1:
        raise ValueError(
            "`embedder` must be a built model with one input and one output. "
            f"Received: {model.name} with inputs {model.inputs}"
        )
    return lambda images: model(images, training=False), model.inputs[0]


def _signature_call(model: Any) -> tuple[Any, Any]:
    names = list(model.signatures)
    name = next((n for n in ("embed", "serving_default", "serve") if n in names), None)
    signature = model.signatures[name] if name else None
    given = signature.structured_input_signature[1] if name else {}
    if len(given) != 1 or len(signature.structured_outputs) != 1:
        raise ValueError(
            "`embedder` must have a signature `serving_default` or `embed` with one "
            f"input and one output. Received: signatures {names}"
        )
    (argument, spec), (output,) = *given.items(), signature.structured_outputs
    return lambda images: signature(**{argument: images})[output], spec


def _sizes(
    expected: int | None, size: int | None, short_side: int | None
) -> tuple[int, int]:
    """Side of the images, and short side before the crop."""
    if size is None and expected is None:
        raise ValueError(
            "`size` must be given: the embedder takes images of any size. "
            f"Received: size={size}"
        )
    if size is not None:
        check_int("size", size, minimum=1)
        if expected not in (None, size):
            raise ValueError(
                f"`size` must be {expected}, as the embedder takes images. "
                f"Received: size={size}"
            )
    size = int(size or expected)
    if short_side is None:
        short_side = round(size * 256 / 227)
    check_int("short_side", short_side, minimum=size)
    return size, int(short_side)
