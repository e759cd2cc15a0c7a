"""Batches of images that are read and decoded when their turn comes."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

Decode = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
Finish = Callable[[tf.Tensor, tf.Tensor], Any]
Reader = Callable[[np.ndarray], np.ndarray]

# To be traced without reading its source for loops and branches, which takes as long as
# all the rest: at each projection the pool is a new dataset.
_as_it_is = tf.autograph.experimental.do_not_convert


def decoder(decode: Decode) -> tf.types.experimental.PolymorphicFunction:
    """Makes a function for `encoded_batches` that is traced once, when it is needed.

    Args:
        decode: Maps a scalar string, the bytes of a file, and the scalar int64 number
            of the image in the sequence to an image of known shape.
    """
    signature = [tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int64)]
    return tf.function(decode, input_signature=signature)


def encoded_batches(
    index_batches: tf.data.Dataset,
    images: np.ndarray,
    decode: tf.types.experimental.PolymorphicFunction,
    finish: Finish,
    batch_size: int,
    cache: bool = False,
) -> tf.data.Dataset:
    """Reads and decodes images in parallel and in order.

    TensorFlow's own error for a broken image does not say which one it is. So images
    that fail are dropped first; a number that is missing then shows that there was one,
    and what comes after it knows its name.

    Args:
        index_batches: Batches `(step, rows)`: scalar int64 0, 1, 2... and `(k,)` int64
            indices into `images`, k = `batch_size` in all but the last.
        images: `(n,)` object array of paths (`str`) or of encoded `bytes`.
        decode: What `decoder` returned.
        finish: Makes an element of the `(k, ...)` images and `(k,)` rows of a batch.
        batch_size: Images in a batch.
        cache: Keep the bytes of files in memory once they are read.

    Returns:
        tf.data.Dataset of what `finish` makes. A broken image raises a
        `tf.errors.InvalidArgumentError` that names it.
    """
    are_paths = isinstance(images[0], str)
    reads_in_graph = are_paths and not cache
    load = _cached_reader(images) if are_paths and cache else _reader(images)
    # Here, so that what it refuses is an error now and not at the first batch.
    decode = decode.get_concrete_function()
    shape, dtype = decode.output_shapes, decode.output_dtypes

    def name(row: int) -> bytes:
        return os.fsencode(images[row]) if are_paths else b"of row %d" % row

    def read_and_decode(encoded: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        return decode(tf.io.read_file(encoded) if reads_in_graph else encoded, number)

    def decode_or_mark(
        number: tf.Tensor, row: tf.Tensor, previous: tf.Tensor, encoded: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        image = tf.cond(
            number < 0,
            lambda: tf.zeros(shape, dtype),
            lambda: read_and_decode(encoded, number),
        )
        return number, row, previous, image

    in_order = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
    groups = (
        index_batches.map(_marked_batch(load, name, batch_size), **in_order)
        .unbatch()
        .map(_as_it_is(decode_or_mark), **in_order)
        .ignore_errors()
        .batch(batch_size + 1, **in_order)
    )
    return numbered(groups).map(_without_mark(batch_size, finish), **in_order)


def numbered(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Pairs of 0, 1, 2... and what comes in its place.

    `enumerate()` does the same and rewrites the whole graph for it, which takes a tenth
    of a second for the rows of 80,000 images.

    Args:
        batches: What is to be numbered.
    """
    return tf.data.Dataset.zip(tf.data.Dataset.range(tf.int64.max), batches)


def _marked_batch(
    load: Reader, name: Callable[[int], bytes], batch_size: int
) -> Callable[..., tuple]:
    """Makes numbers, rows, names and encoded images of a batch, with a mark at its end.

    The name is that of the image before. The number of the mark is minus the number of
    images, which shows whether any are missing before it. A mark never fails: otherwise
    an endless sequence of nothing but broken images would be dropped for ever.
    """

    def load_and_name(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return load(rows), _strings([b"", *map(name, rows.tolist())])

    @_as_it_is
    def mark(step: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, ...]:
        encoded, previous = tf.numpy_function(
            load_and_name, [rows], [tf.string, tf.string], stateful=False
        )
        count = tf.size(rows, tf.int64)
        numbers = step * batch_size + tf.range(count)
        return (
            tf.concat([numbers, [-count]], 0),
            tf.concat([rows, [0]], 0),
            tf.ensure_shape(previous, [None]),
            tf.concat([tf.ensure_shape(encoded, [None]), [""]], 0),
        )

    return mark


def _without_mark(batch_size: int, finish: Finish) -> Callable[..., Any]:
    """Takes the mark off and finishes; raises the error where a number is missing."""

    @_as_it_is
    def check(step: tf.Tensor, group: tuple[tf.Tensor, ...]) -> Any:
        numbers, rows, previous, images = group
        count = tf.size(numbers, tf.int64) - 1
        expected = tf.concat([step * batch_size + tf.range(count), [-count]], 0)
        is_right = tf.equal(numbers, expected)
        # In the graph: Python that runs in the background when a program ends after
        # an error can stop it from ending.
        after = tf.argmin(tf.cast(is_right, tf.int32))
        message = (
            "An image cannot be read or decoded; "
            "`keras_ccp.datasets.verify(dataset)` says why and finds all such images:"
        )
        checked = tf.debugging.Assert(
            tf.reduce_all(is_right), [message, previous[after]]
        )
        with tf.control_dependencies([checked]):
            return finish(images[:-1], rows[:-1])

    return check


def _reader(images: np.ndarray) -> Reader:
    """Takes encoded images, or the paths of files, as bytes."""

    def load(rows: np.ndarray) -> np.ndarray:
        return _strings([os.fsencode(image) for image in images[rows]])

    return load


def _cached_reader(paths: np.ndarray) -> Reader:
    """Takes the content of files, and reads each of them once."""
    contents: dict[int, bytes] = {}

    def read(row: int) -> bytes:
        if row not in contents:
            try:
                with open(paths[row], "rb") as file:
                    contents[row] = file.read()
            except OSError:
                return b""  # cannot be decoded, and is named then
        return contents[row]

    return lambda rows: _strings([read(row) for row in rows.tolist()])


def _strings(items: list[bytes]) -> np.ndarray:
    # Not np.array(items): its type "S" loses zeros at the end.
    array = np.empty(len(items), object)
    array[:] = items
    return array
