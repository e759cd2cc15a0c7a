"""Normalisation, batch norm with frozen statistics, and the embedding head."""

from typing import Any

import keras
import tensorflow as tf


def lipschitz_normalize(vectors: tf.Tensor) -> tf.Tensor:
    """Projects vectors onto the unit ball: `v / max(1, ||v||_2)`.

    Unlike `v / ||v||` the map is Lipschitz (constant 2) and leaves the inside of the
    ball as it is, so neither its value nor its gradient is singular at zero. A vector
    of norm exactly 1 counts as inside: its gradient is the upstream one. Norms are
    taken in float32 or better and cannot overflow.

    Source: "Deep Metric Learning with Chance Constraints"
    (https://arxiv.org/abs/2209.09060).
    """
    # A condition, so that the boundary belongs to the inside.
    return _scale(vectors, lambda norms: norms > 1.0)


def l2_normalize(vectors: tf.Tensor) -> tf.Tensor:
    """Scales vectors to unit length: `v / ||v||_2`; zero stays zero.

    The gradient at zero is the upstream gradient, where `tf.math.l2_normalize`
    multiplies it by a million.
    """
    # Below the threshold a vector is taken for zero.
    return _scale(vectors, lambda norms: norms > 1e-12)


def _scale(vectors, is_scaled):
    """Vectors divided by their norms, where `is_scaled` of the norms says so."""
    vectors = tf.convert_to_tensor(vectors)
    # Squares of small components underflow in float16 and bfloat16.
    wide = vectors if vectors.dtype == tf.float64 else tf.cast(vectors, tf.float32)
    norms = euclidean_norms(wide)
    scaled = is_scaled(norms)
    norms = tf.where(scaled, norms, tf.ones_like(norms))
    return tf.cast(_divide(wide, norms, scaled), vectors.dtype)


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


def euclidean_norms(vectors: tf.Tensor) -> tf.Tensor:
    """`(..., 1)` lengths of vectors, whose squares may over- or underflow.

    They are constants for the gradient.
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


@keras.saving.register_keras_serializable(package="keras_ccp")
class LipschitzNormalization(keras.layers.Layer):
    """Layer form of `lipschitz_normalize`: `v / max(1, ||v||_2)` over the last axis.

    Applying it twice changes nothing but rounding. Under a float16 policy it receives
    and returns float16 but takes the norm in float32.

    Source: "Deep Metric Learning with Chance Constraints"
    (https://arxiv.org/abs/2209.09060).

    ```python
    LipschitzNormalization()([[3.0, 4.0], [0.3, 0.4]])  # [[0.6, 0.8], [0.3, 0.4]]
    ```

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


_NORMALIZATIONS = {
    "lipschitz": LipschitzNormalization,
    "l2": keras.layers.UnitNormalization,
    None: keras.layers.Identity,
}


def normalization_layer(
    normalization: str | None, name: str | None = None
) -> keras.layers.Layer:
    """Layer to float32, whatever the policy: distances need the digits."""
    return _NORMALIZATIONS[normalization](name=name, dtype="float32")


def normalized(model: keras.Model, normalization: str | None) -> keras.Model:
    """The network, or one of the same layers that also ends in the normalisation."""
    (output,) = model.outputs
    if len(output.shape) != 2:
        raise ValueError(
            "`embedder` must give vectors, (batch, embedding_dim). Received: output "
            f"{output.shape}\nPut a head on it: build_embedder(backbone)"
        )
    layer, last = normalization_layer(normalization), model.layers[-1]
    if type(last) is type(layer) and last.compute_dtype == "float32":
        return model
    return keras.Model(input_of(model), layer(output), name=model.name)


def input_of(model: keras.Model) -> Any:
    """A tensor or a dict of them: `Sequential` has no `input` before it is called."""
    is_sequential = isinstance(model, keras.Sequential)
    return model.inputs[0] if is_sequential else model.input


@keras.saving.register_keras_serializable(package="keras_ccp")
class FrozenBatchNormalization(keras.layers.BatchNormalization):
    """Batch norm that always uses its moving statistics and never changes them.

    `gamma * (x - moving_mean) / sqrt(moving_variance + epsilon) + beta`, in training as
    in inference; gamma and beta remain trainable. In Keras `trainable=False` freezes
    gamma and beta too, and `layer(x, training=False)` inside a model gives way to the
    `training=True` that the model is called with.

    Args:
        **kwargs: As for `keras.layers.BatchNormalization`.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)

    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=False, mask=mask)


_POOLINGS = ("average", "max", "average_max", "flatten", "class_token")


def _pooled(features, pooling):
    """One vector of a feature map, of tokens, or of what is a vector already."""
    rank = len(features.shape)
    if pooling not in _POOLINGS or (pooling == "class_token" and rank != 3):
        raise ValueError(
            f"`pooling` must be one of {_POOLINGS}, the last for tokens (batch, n, "
            f"dim). Received: pooling={pooling!r} for {features.shape}\n"
            'Take "average"'
        )
    if rank == 2:
        return features
    if pooling == "class_token":
        return keras.ops.take(features, 0, axis=1)
    if pooling == "flatten":
        return keras.layers.Flatten(name="flatten")(features)
    kinds = {3: "1D", 4: "2D"}[rank]
    pooled = [
        getattr(keras.layers, f"Global{kind.title()}Pooling{kinds}")(
            name=f"{kind}_pooling"
        )(features)
        for kind in pooling.split("_")
    ]
    if len(pooled) == 1:
        return pooled[0]
    return keras.layers.Add(name="average_max_pooling")(pooled)


def build_embedder(
    backbone: keras.Model,
    embedding_dim: int | None = 128,
    pooling: str = "average",
    normalization: str | None = "lipschitz",
    name: str = "embedder",
) -> keras.Model:
    """Puts an embedding head on a backbone.

    backbone -> global pooling -> Dense without bias -> normalisation. The
    inputs keep the backbone's names, shapes and dtypes, so that preprocessing
    inside the backbone is part of the embedder and of everything exported from it.

    ```python
    embedder = build_embedder(keras_ccp.backbones.small_cnn(), embedding_dim=64)
    ```

    Args:
        backbone: built `keras.Model`, one input or several -> `(batch, height, width,
            channels)` feature map, `(batch, tokens, channels)` or `(batch, channels)`.
        embedding_dim: int, width of an embedding, or `None` for the pooled features as
            they are, without a head: the baseline that no training makes. Defaults to
            128.
        pooling: `"average"`, `"max"`, `"average_max"` (their sum), or `"flatten"`,
            which keeps apart what was seen where: for aligned images such as icons.
            Of tokens also `"class_token"`, the first. Vectors are taken as they are.
            Defaults to `"average"`, of tokens those that a mask of Keras leaves.
        normalization: `"lipschitz"` (v / max(1, ||v||)), `"l2"` (v / ||v||) or
            `None`. Defaults to `"lipschitz"`, the paper's.
        name: name of the returned model. Defaults to `"embedder"`.

    Returns:
        Functional `keras.Model`, inputs -> `(batch, embedding_dim)` float32.

    Raises:
        ValueError: If there is no such pooling for what the backbone gives.
    """
    given = input_of(backbone)
    inputs = keras.tree.map_structure(
        lambda part: keras.Input(
            batch_shape=part.shape,
            dtype=part.dtype,
            name=part.name if isinstance(given, dict) else None,
        ),
        given,
    )
    outputs = _pooled(backbone(inputs), pooling)
    if embedding_dim is not None:
        head = keras.layers.Dense(embedding_dim, use_bias=False, name="embedding")
        outputs = head(outputs)
    outputs = normalization_layer(normalization, "normalization")(outputs)
    return keras.Model(inputs, outputs, name=name)


def freeze_batch_norm(model: keras.Model) -> keras.Model:
    """Copies a model with the statistics of its batch norms frozen.

    The copy has the same layer names, weights and outputs at inference. Fine-tuning
    with small or class-balanced batches, whose statistics are not those of the images
    to come, is the reason to do so; the paper's runs do.

    Args:
        model: Built Functional or Sequential model.

    Returns:
        `keras.Model` with a `FrozenBatchNormalization` for each batch norm.
    """

    def clone(layer):
        kind = type(layer)
        if kind is keras.layers.BatchNormalization:
            kind = FrozenBatchNormalization
        return kind.from_config(layer.get_config())

    frozen = keras.models.clone_model(model, clone_function=clone)
    frozen.set_weights(model.get_weights())
    return frozen
