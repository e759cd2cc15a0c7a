"""Whether labels and embeddings fit together, as far as their shapes are known.

Nothing of this is in the graph: a shape that is known only when the graph runs passes.
"""

from typing import Any

import tensorflow as tf

from keras_ccp.checks import as_array


def check_sides(
    labels_name: str, labels: Any, embeddings_name: str, embeddings: Any
) -> None:
    """Checks the labels and embeddings of one side of the pairs.

    Args:
        labels_name: Name of the argument.
        labels: `(n,)` or `(n, 1)` whole numbers: tensor, array or list.
        embeddings_name: Name of the argument.
        embeddings: `(n, dim)` numbers.

    Raises:
        TypeError: If labels are strings.
        ValueError: If a shape is another one, or they are not equally many.
    """
    label_shape, dtype = _shape_and_dtype(labels_name, labels)
    if dtype == tf.string:
        raise TypeError(
            f"`{labels_name}` must be whole numbers; number strings with "
            "`keras_ccp.datasets.Dataset(images, labels)`. "
            f"Received: {labels_name}={labels!r:.100}"
        )
    if label_shape.rank not in (1, None) and not (
        label_shape.rank == 2 and label_shape[1] in (1, None)
    ):
        raise ValueError(
            f"`{labels_name}` must have shape (n,) or (n, 1), one number an embedding; "
            "turn one-hot rows into numbers with `tf.argmax(labels, axis=1)`. "
            f"Received: {labels_name} of shape {label_shape}"
        )
    shape, dtype = _shape_and_dtype(embeddings_name, embeddings)
    if not (dtype.is_floating or dtype.is_integer):
        raise TypeError(
            f"`{embeddings_name}` must be real numbers. "
            f"Received: {embeddings_name} of dtype {dtype.name}"
        )
    if shape.rank not in (2, None):
        raise ValueError(
            f"`{embeddings_name}` must have shape (n, dim), one vector a row. "
            f"Received: {embeddings_name} of shape {shape}"
        )
    if not label_shape[:1].is_compatible_with(shape[:1]):
        raise ValueError(
            f"`{labels_name}` must hold one label for each row of "
            f"`{embeddings_name}`. Received: {labels_name} of shape {label_shape}, "
            f"{embeddings_name} of shape {shape}"
        )


def check_widths(
    name: str, embeddings: Any, reference_name: str, references: Any
) -> None:
    """Checks that both sides of the pairs have vectors of one width.

    Args:
        name: Name of the argument.
        embeddings: `(batch, dim)` numbers.
        reference_name: Name of the argument.
        references: `(n, dim)` numbers.

    Raises:
        ValueError: If they differ in width.
    """
    shape, _ = _shape_and_dtype(name, embeddings)
    reference_shape, _ = _shape_and_dtype(reference_name, references)
    if not shape[1:].is_compatible_with(reference_shape[1:]):
        raise ValueError(
            f"`{reference_name}` must be as wide as `{name}`. Received: {name} of "
            f"shape {shape}, {reference_name} of shape {reference_shape}"
        )


def _shape_and_dtype(name: str, values: Any) -> tuple[tf.TensorShape, tf.DType]:
    if isinstance(values, (tf.SparseTensor, tf.RaggedTensor)):
        raise TypeError(
            f"`{name}` must be a dense tensor. "
            f"Received: {name} of type {type(values).__name__}"
        )
    if not hasattr(values, "shape"):
        values = as_array(name, values)
    try:
        return tf.TensorShape(values.shape), tf.as_dtype(values.dtype)
    except TypeError as error:
        raise TypeError(
            f"`{name}` must be numbers of a type that TensorFlow has. "
            f"Received: {name} of dtype {values.dtype}"
        ) from error
