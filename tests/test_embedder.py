"""build_embedder: what its head computes, and what it refuses."""

import keras
import numpy as np
import pytest

from keras_ccp import build_embedder
from keras_ccp.backbones import resnet20_v2
from keras_ccp.layers import check_embedder


def identity_backbone(shape=(2, 2, 3), dtype="float32"):
    inputs = keras.Input(shape, dtype=dtype)
    return keras.Model(inputs, keras.layers.Rescaling(1.0)(inputs))


FEATURES = np.arange(12, dtype="float32").reshape(1, 2, 2, 3)


@pytest.mark.parametrize(
    ("pooling", "pooled"),
    [
        # Channel 0 holds 0, 3, 6, 9: mean 4.5, largest 9; the others one and two more.
        ("average", [4.5, 5.5, 6.5]),
        ("max", [9.0, 10.0, 11.0]),
        ("average_max", [13.5, 15.5, 17.5]),
        ("flatten", list(range(12))),
    ],
)
def test_pooling(pooling, pooled):
    embedder = build_embedder(identity_backbone(), 2, pooling, normalization=None)
    kernel = np.random.default_rng(0).normal(size=(len(pooled), 2)).astype("float32")
    embedder.get_layer("embedding").kernel.assign(kernel)
    np.testing.assert_allclose(
        embedder(FEATURES)[0], np.array(pooled, "float32") @ kernel, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [("lipschitz", [0.6, 0.8]), ("l2", [0.6, 0.8]), (None, [3.0, 4.0])],
)
def test_normalization(normalization, expected):
    embedder = build_embedder(
        identity_backbone((1, 1, 2)), 2, normalization=normalization
    )
    embedder.get_layer("embedding").kernel.assign(np.eye(2))
    image = np.array([3.0, 4.0], "float32").reshape(1, 1, 1, 2)
    np.testing.assert_allclose(embedder(image)[0], expected, rtol=1e-6)


def test_head_has_no_bias_and_input_keeps_the_backbones_type():
    embedder = build_embedder(identity_backbone(dtype="uint8"), 7)
    assert embedder.inputs[0].dtype == "uint8"
    assert [w.name for w in embedder.weights] == ["kernel"]
    assert embedder.output_shape == (None, 7)


def test_output_is_float32_under_mixed_precision():
    keras.config.set_dtype_policy("mixed_float16")
    embedder = build_embedder(identity_backbone(), 7)
    assert embedder(FEATURES).dtype == "float32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embedding_dim": 0}, "`embedding_dim` must be at least 1"),
        ({"pooling": "mean"}, "`pooling` must be one of"),
        ({"normalization": "unit"}, "`normalization` must be"),
        ({"backbone": keras.Sequential()}, "`backbone` must be a built"),
        (
            {"backbone": keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])},
            "`backbone` must give a feature map",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_embedder(**{"backbone": identity_backbone(), **arguments})


def several(outputs):
    """Models of more than one tensor in or out, or of one in a dict or list."""
    image, other = (keras.Input((4, 4, 3), name=name) for name in ("image", "other"))
    result = outputs(image)
    both = outputs(keras.layers.Add()([image, other]))
    two = keras.Model(image, [result, outputs(image)])
    return [
        ("input", keras.Model([image, other], both)),
        ("input", keras.Model({"image": image}, result)),
        ("output", two),
        ("output", keras.Model(image, {"a": result})),
        ("output", keras.Model(image, [result])),
        ("output", keras.Sequential([keras.Input((4, 4, 3)), two])),
    ]


@pytest.mark.parametrize("case", range(6))
def test_backbone_and_embedder_map_one_tensor_to_one(case):
    side, backbone = several(lambda x: keras.layers.Conv2D(2, 1)(x))[case]
    with pytest.raises(ValueError, match=f"`backbone` must have one {side} that is"):
        build_embedder(backbone)
    side, embedder = several(lambda x: keras.layers.GlobalMaxPooling2D()(x))[case]
    with pytest.raises(ValueError, match=f"`embedder` must have one {side} that is"):
        check_embedder(embedder)


def test_an_input_in_a_list_of_one_is_a_tensor():
    image = keras.Input((4, 4, 3))
    backbone = keras.Model([image], keras.layers.Conv2D(2, 1)(image))
    embedder = build_embedder(backbone, 5)
    check_embedder(embedder)
    assert embedder(np.zeros((1, 4, 4, 3), "float32")).shape == (1, 5)


def test_flatten_needs_a_known_size():
    backbone = identity_backbone((None, 4, 3))
    with pytest.raises(ValueError, match='`pooling` must not be "flatten"'):
        build_embedder(backbone, pooling="flatten")
    assert build_embedder(backbone, 5).output_shape == (None, 5)


def test_resnet20_v2():
    """Parameters counted by hand: 1x1, 3x3 and 1x1 kernels, shortcuts, batch norms."""
    backbone = resnet20_v2((28, 28, 1))
    assert backbone.output_shape == (None, 7, 7, 256)
    kernels = 9 * 1 * 16  # stem
    norms = 0
    channels = 16
    for width in (16, 32, 64):
        for block in range(2):
            kernels += channels * width + 9 * width * width + 4 * width * width
            kernels += 0 if block else channels * 4 * width
            norms += channels + 2 * width
            channels = 4 * width
    norms += channels
    assert backbone.count_params() == kernels + 4 * norms
