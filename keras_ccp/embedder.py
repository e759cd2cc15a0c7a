"""From a backbone to an embedder: images -> embeddings."""

import keras

from keras_ccp.arguments import check_int
from keras_ccp.layers import normalization_layer

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
