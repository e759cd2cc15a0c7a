"""Normalisation of embeddings and proxies.

`keras.layers.UnitNormalization` and the sum of average and maximum pooling exist in
Keras; only what it lacks is here.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_ccp.checks import check_int


def lipschitz_normalize(vectors: tf.Tensor) -> tf.Tensor:
    """Projects vectors onto the unit ball: `v / max(1, ||v||_2)`.

    Unlike `v / ||v||` the map is Lipschitz (constant 2) and leaves the inside of the
    ball as it is, so neither its value nor its gradient is singular at zero. A vector
    of norm exactly 1 counts as inside: its gradient is the upstream one. Norms are
    taken in float32 or better and cannot overflow.

    Source: "Deep Metric Learning with Chance Constraints"
    (https://arxiv.org/abs/2209.09060).

    Args:
        vectors: `(..., dim)` float tensor.

    Returns:
        Tensor of the shape and dtype of `vectors`, norms at most 1.
    """
    vectors = tf.convert_to_tensor(vectors)
    wide = _at_least_float32(vectors)
    norms = euclidean_norms(wide)
    # A condition, so that the boundary belongs to the inside.
    norms = tf.where(norms > 1.0, norms, tf.ones_like(norms))
    return tf.cast(_divide(wide, norms, norms > 1.0), vectors.dtype)


def l2_normalize(vectors: tf.Tensor) -> tf.Tensor:
    """Scales vectors to unit length: `v / ||v||_2`; zero stays zero.

    The gradient at zero is the upstream gradient, where `tf.math.l2_normalize`
    multiplies it by a million.

    Args:
        vectors: `(..., dim)` float tensor.

    Returns:
        Tensor of the shape and dtype of `vectors`, norms 1 or 0.
    """
    vectors = tf.convert_to_tensor(vectors)
    wide = _at_least_float32(vectors)
    norms = euclidean_norms(wide)
    # Below the threshold a vector is taken for zero.
    is_zero = norms <= 1e-12
    norms = tf.where(is_zero, tf.ones_like(norms), norms)
    return tf.cast(_divide(wide, norms, tf.logical_not(is_zero)), vectors.dtype)


def euclidean_norms(vectors: tf.Tensor) -> tf.Tensor:
    """Lengths of vectors, whose squares may over- or underflow.

    Args:
        vectors: `(..., dim)` float32 or float64 tensor.

    Returns:
        `(..., 1)` tensor, a constant for the gradient.
    """
    vectors = tf.stop_gradient(vectors)
    squares = tf.reduce_sum(tf.square(vectors), axis=-1, keepdims=True)
    # Plain squares are one pass over the vectors, which are many where they are
    # proxies; lengths whose square is not a plain number take three.
    is_plain = tf.reduce_all((squares > 1e-20) & (squares < 1e20))
    return tf.cond(is_plain, lambda: tf.sqrt(squares), lambda: _scaled_norms(vectors))


def _scaled_norms(vectors):
    """Norms as a multiple of the largest component, whose square is finite."""
    largest = tf.reduce_max(tf.abs(vectors), axis=-1, keepdims=True)
    scaled = tf.math.divide_no_nan(vectors, largest)
    squares = tf.reduce_sum(tf.square(scaled), axis=-1, keepdims=True)
    return tf.minimum(largest * tf.sqrt(squares), vectors.dtype.max)


@tf.custom_gradient
def _divide(vectors, norms, is_scaled):
    """Returns `vectors / norms`; where scaled, norms are those of the vectors.

    The gradient there lacks its part along the vector, whose length has no effect.
    """
    outputs = vectors / norms

    def grad(upstream):
        along = tf.reduce_sum(upstream * outputs, axis=-1, keepdims=True)
        along = tf.where(is_scaled, along, tf.zeros_like(along))
        return (upstream - outputs * along) / norms, None, None

    return outputs, grad


def _at_least_float32(tensor):
    """Widens float16 and bfloat16; squares of small components underflow there."""
    return tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32)


@keras.saving.register_keras_serializable(package="keras_ccp")
class LipschitzNormalization(keras.layers.Layer):
    """Layer form of `lipschitz_normalize`: `v / max(1, ||v||_2)` over the last axis.

    Applying it twice changes nothing but rounding. Under a float16 policy it receives
    and returns float16 but takes the norm in float32.

    Source: "Deep Metric Learning with Chance Constraints"
    (https://arxiv.org/abs/2209.09060).

    Args:
        **kwargs: `name`, `dtype` and the other arguments of `keras.layers.Layer`.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return lipschitz_normalize(inputs)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        return input_shape


def normalization_layer(normalization: str | None, name: str) -> keras.layers.Layer:
    """Makes the layer that normalises embeddings.

    Args:
        normalization: `"lipschitz"` (v / max(1, ||v||)), `"l2"` (v / ||v||) or `None`.
        name: name of the layer.

    Returns:
        Layer from `(..., dim)` to `(..., dim)` float32, whatever the dtype policy:
        distances between embeddings need the digits.

    Raises:
        ValueError: if there is no such normalisation.
    """
    if normalization == "lipschitz":
        return LipschitzNormalization(name=name, dtype="float32")
    if normalization == "l2":
        return keras.layers.UnitNormalization(name=name, dtype="float32")
    if normalization is None:
        return keras.layers.Identity(name=name, dtype="float32")
    raise ValueError(
        '`normalization` must be "lipschitz", "l2" or None. '
        f"Received: normalization={normalization!r}"
    )


_POOLINGS = ("average", "max", "average_max", "flatten")


def build_embedder(
    backbone: keras.Model,
    embedding_dim: int = 128,
    pooling: str = "average",
    normalization: str | None = "lipschitz",
    name: str = "embedder",
) -> keras.Model:
    """Puts an embedding head on a backbone.

    backbone -> global pooling -> Dense without bias -> normalisation. The
    input keeps the backbone's shape and dtype, so that preprocessing inside
    the backbone is part of the embedder and of everything exported from it.

    Args:
        backbone: built `keras.Model`, images -> `(batch, height, width,
            channels)` feature map.
        embedding_dim: int, width of an embedding. Defaults to 128.
        pooling: `"average"`, `"max"`, `"average_max"` (their sum), or `"flatten"`,
            which keeps apart what was seen where: for aligned images such as icons.
            Defaults to `"average"`.
        normalization: `"lipschitz"` (v / max(1, ||v||)), `"l2"` (v / ||v||) or
            `None`. Defaults to `"lipschitz"`, the paper's.
        name: name of the returned model. Defaults to `"embedder"`.

    Returns:
        Functional `keras.Model`, images -> `(batch, embedding_dim)` float32.

    Raises:
        ValueError: if the backbone does not map one tensor to one feature map, an
            argument has a value that does not exist, or the feature map has no fixed
            size for `"flatten"`.
    """
    if not getattr(backbone, "inputs", None):
        raise ValueError(
            "`backbone` must be a built Functional or Sequential model, so that its "
            "input is known. Start it with keras.Input(shape=(height, width, "
            f"channels)). Received: backbone={backbone!r}"
        )
    _check_one_tensor("backbone", backbone)
    if len(backbone.output_shape) != 4:
        raise ValueError(
            "`backbone` must give a feature map of shape (batch, height, width, "
            "channels): leave out its pooling and classification layers. "
            f"Received: output_shape={backbone.output_shape}"
        )
    check_int("embedding_dim", embedding_dim, minimum=1)
    if pooling not in _POOLINGS:
        raise ValueError(
            f"`pooling` must be one of {_POOLINGS}. Received: pooling={pooling!r}"
        )
    if pooling == "flatten" and None in backbone.output_shape[1:]:
        raise ValueError(
            '`pooling` must not be "flatten" where the size of the feature map is not '
            "known: give the backbone's keras.Input a height and a width. "
            f"Received: backbone.output_shape={backbone.output_shape}"
        )
    inputs = keras.Input(
        batch_shape=backbone.inputs[0].shape, dtype=backbone.inputs[0].dtype
    )
    features = backbone(inputs)
    pooled = _pool(features, pooling)
    embeddings = keras.layers.Dense(embedding_dim, use_bias=False, name="embedding")(
        pooled
    )
    embeddings = normalization_layer(normalization, name="normalization")(embeddings)
    return keras.Model(inputs, embeddings, name=name)


def _pool(features, pooling: str):
    if pooling == "flatten":
        return keras.layers.Flatten(name="flatten")(features)
    average = keras.layers.GlobalAveragePooling2D(name="average_pooling")
    maximum = keras.layers.GlobalMaxPooling2D(name="max_pooling")
    if pooling == "average":
        return average(features)
    if pooling == "max":
        return maximum(features)
    return keras.layers.Add(name="average_max_pooling")(
        [average(features), maximum(features)]
    )


def _check_one_tensor(name: str, model: keras.Model) -> None:
    """Raises unless a built model maps one tensor to one, neither of them in a dict."""
    if isinstance(model, keras.Sequential):  # `input` would need a call
        (given,), result = model.inputs, model.outputs
        result = result[0] if len(result) == 1 else result
    else:
        given, result = model.input, model.output
    if isinstance(given, (list, tuple)) and len(given) == 1:
        (given,) = given  # Keras takes a tensor for it
    for side, parts in (("input", given), ("output", result)):
        if isinstance(parts, (dict, list, tuple)):
            raise ValueError(
                f"`{name}` must have one {side} that is a tensor: make a "
                "keras.Model(inputs, outputs) of the tensors that count. "
                f"Received: {len(parts)} {side}s as a {type(parts).__name__}"
            )


def check_embedder(embedder: keras.Model) -> None:
    """Raises if a model cannot be trained as an embedder.

    Args:
        embedder: built `keras.Model`, images -> `(batch, embedding_dim)`.

    Raises:
        TypeError: if it is not a Functional or Sequential model.
        ValueError: if it is not built, or does not map one tensor of images to one
            vector an image.
    """
    if isinstance(embedder, keras.Sequential) and not embedder.built:
        raise ValueError(
            "`embedder` must be built, since its weights are copied at once: start it "
            f"with keras.Input(shape). Received: embedder={embedder!r}"
        )
    if not isinstance(embedder, keras.Model) or not hasattr(embedder, "inputs"):
        raise TypeError(
            "`embedder` must be a Functional or Sequential keras.Model; wrap others "
            "as keras.Model(inputs, outputs). Received: "
            f"type(embedder)={type(embedder).__name__}"
        )
    _check_one_tensor("embedder", embedder)
    if len(embedder.output_shape) != 2:
        raise ValueError(
            "`embedder` must give one vector an image. "
            f"Received: output_shape={embedder.output_shape}"
        )
