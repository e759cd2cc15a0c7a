"""Images of another range than the embedder takes, and validation on training data."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import CCPCallback, CCPModel, build_embedder
from keras_ccp.datasets import Dataset
from keras_ccp.model import ImageSpec, check_images
from keras_ccp.pipeline import balanced_batches

LABELS = np.arange(8) % 2
BYTES = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3)).astype("uint8")
UNIT = BYTES.astype("float32") / 255


def network(dtype="uint8", *first):
    return keras.Sequential(
        [keras.Input((4, 4, 3), dtype=dtype), *first, keras.layers.Conv2D(2, 3)]
    )


def model():
    backbone = network("uint8", keras.layers.Rescaling(1 / 255))
    model = CCPModel(build_embedder(backbone, 2), num_classes=2)
    model.compile("sgd", "triplet")
    return model


def rescaling():
    # Inside another model, as the preprocessing of a backbone is.
    return keras.Sequential(
        [keras.Input((4, 4, 3)), keras.layers.Rescaling(1 / 127.5, -1)]
    )


TAKES_BYTES = [
    network("uint8"),
    network("int32"),
    network("float32", keras.layers.Rescaling(1 / 255)),
    network("float32", keras.layers.Rescaling([1 / 60, 1 / 58, 1 / 57], -2.0)),
    network("float32", rescaling()),
]
TAKES_OTHERS = [
    network("float32"),
    network("float32", keras.layers.Rescaling(2.0, -1)),  # 0..1 to -1..1
    network("float32", keras.layers.Normalization(mean=0.5, variance=1.0)),
]


@pytest.mark.parametrize("embedder", TAKES_BYTES)
@pytest.mark.parametrize("images", [UNIT, 2 * UNIT - 1, 4.6 * UNIT - 2.1])
def test_small_floats_are_told_of_where_bytes_are_taken(embedder, images, caplog):
    spec = ImageSpec.of(embedder)
    received = f"float32 images of {images.min():.4g} to {images.max():.4g}"
    for given in (images, tf.constant(images)):
        if "int" in spec.dtype:  # would be rounded to nothing
            with pytest.raises(ValueError, match=f"of 0 to 255.*{received}"):
                check_images("x", given, spec)
        else:
            check_images("x", given, spec)
            assert received in caplog.messages[-1]
    caplog.clear()
    for given in (BYTES, BYTES // 255, BYTES.astype("float32"), 0 * UNIT):
        check_images("x", given, spec)
    assert not caplog.messages


@pytest.mark.parametrize("embedder", TAKES_OTHERS)
def test_any_floats_pass_where_the_range_is_not_known(embedder):
    for images in (UNIT, 2 * UNIT - 1, BYTES.astype("float32")):
        check_images("x", images, ImageSpec.of(embedder))


def test_values_that_a_cast_to_bytes_would_wrap_are_refused():
    images = BYTES.astype("float32")
    for change in (-40, 40):
        with pytest.raises(ValueError, match="input of integers"):
            check_images("x", images + change, ImageSpec.of(network("uint8")))
        # Floats go on as they are, for example where a resize overshoots.
        check_images("x", images + change, ImageSpec.of(TAKES_BYTES[2]))


def batches(images):
    return tf.data.Dataset.from_tensor_slices((images, LABELS)).batch(8)


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: m.fit(x, LABELS, verbose=0),
        lambda m, x: m.fit(batches(x), verbose=0),
        lambda m, x: m.fit((batch for batch in batches(x)), verbose=0),
        lambda m, x: m.fit(
            balanced_batches(Dataset(x, LABELS), 2, 2), steps_per_epoch=1, verbose=0
        ),
        lambda m, x: m.train_on_batch(x, LABELS),
        lambda m, x: m.evaluate(x, LABELS),
        lambda m, x: m.evaluate(Dataset(x, LABELS)),
        lambda m, x: m.evaluate(batches(x)),
        lambda m, x: m.predict(x, verbose=0),
    ],
)
def test_every_way_in_looks_at_the_range(use):
    with pytest.raises(ValueError, match=r"`x` must hold pixels of 0 to 255.* \* 255"):
        use(model(), UNIT)


def test_floats_of_the_range_of_bytes_are_used():
    trained = model()
    trained.fit(BYTES.astype("float32"), LABELS, verbose=0)
    expected = trained.evaluate(BYTES, LABELS)
    assert trained.evaluate(BYTES.astype("float32"), LABELS) == expected


@pytest.mark.parametrize("wrong", ["pool", "validation"])
def test_the_callback_looks_at_the_range(wrong):
    images = {"pool": BYTES, "validation": BYTES[::-1].copy()}
    images[wrong] = images[wrong] / np.float32(255)
    data = {name: (values, LABELS) for name, values in images.items()}
    callback = CCPCallback(**data)
    callback.set_model(model())
    with pytest.raises(ValueError, match=f"`{wrong}` must hold pixels of 0 to 255"):
        callback.on_train_begin()


# ==== Validation on what is trained on ====

DATASET = Dataset(BYTES, LABELS)
FILES = Dataset([b"one", b"two"] * 4, LABELS)
STREAM = batches(BYTES)


@pytest.mark.parametrize(
    ("pool", "validation"),
    [
        (DATASET, DATASET),
        (DATASET, (BYTES, LABELS)),
        ((BYTES, LABELS), (BYTES, LABELS)),
        ((BYTES, LABELS), (BYTES[4:], LABELS[4:])),
        ((tf.constant(BYTES), LABELS),) * 2,
        (FILES, FILES),
        (STREAM, STREAM),
    ],
)
def test_validation_on_the_pool_is_told_of(pool, validation, caplog):
    CCPCallback(pool, validation)
    assert caplog.messages[0].startswith("`validation` and `pool` share images")


@pytest.mark.parametrize(
    ("pool", "validation"),
    [
        ((BYTES[:4], LABELS[:4]), (BYTES[4:], LABELS[4:])),
        ((BYTES[::2], LABELS[:4]), (BYTES[1::2], LABELS[:4])),
        Dataset(BYTES, np.arange(8) // 2).split_classes(2),
        Dataset([b"one", b"two"] * 4, np.arange(8) // 2).split_classes(2),
        (STREAM, batches(BYTES)),
        (STREAM, DATASET),
        (FILES, DATASET),
        (DATASET, FILES),
    ],
)
def test_validation_on_other_images_passes(pool, validation, caplog):
    CCPCallback(pool, validation)
    assert not caplog.messages


# ==== Names ====


@pytest.mark.parametrize("labels", [LABELS - 1, LABELS + 0.5, ["a"] * 8])
def test_labels_of_evaluate_have_their_name(labels):
    with pytest.raises((TypeError, ValueError), match=re.escape("`y` must")):
        model().evaluate(BYTES, labels)
