"""Vectors, sequences, token ids, several inputs and texts in place of images."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_ccp import (
    CCPCallback,
    CCPModel,
    balanced_batches,
    build_embedder,
    datasets,
    retrieval,
)
from keras_ccp.backbones import keras_hub_backbone

RNG = np.random.default_rng(0)
LABELS = np.repeat(np.arange(8), 6)
IDS = RNG.integers(0, 1000, (48, 9)).astype("int32")


def vectors():
    values = RNG.normal(size=(48, 5)) + LABELS[:, None]
    network = keras.Sequential([keras.Input((5,)), layers.Dense(8, "relu")])
    return values.astype("float32"), network, "average"


def sequences():
    network = keras.Sequential([keras.Input((7, 3)), layers.Conv1D(8, 3)])
    return RNG.normal(size=(48, 7, 3)).astype("float32"), network, "average_max"


def token_ids():
    # Far above 255, where pixels would end.
    ids = keras.Input((9,), dtype="int32")
    network = keras.Sequential([ids, layers.Embedding(1000, 6)])
    return IDS, network, "class_token"


def ids_and_mask():
    ids = keras.Input((9,), dtype="int32", name="ids")
    mask = keras.Input((9, 1), name="mask")
    tokens = layers.Embedding(1000, 6)(ids) * mask
    network = keras.Model({"ids": ids, "mask": mask}, tokens)
    return {"ids": IDS, "mask": np.ones((48, 9, 1), "float32")}, network, "max"


def texts():
    words = [f"word {i % 8}, and {i}" for i in range(48)]
    vectorize = layers.TextVectorization(
        split="character",
        output_sequence_length=20,
        vocabulary=list("word,an012345678"),
    )
    text = keras.Input((), dtype="string", name="text")
    tokens = layers.Embedding(18, 6, mask_zero=True)(vectorize(text))
    return {"text": words}, keras.Model({"text": text}, tokens), "average"


def transformer():
    # As KerasHub's DINOv2 takes and gives them: a dict of images, tokens.
    images = keras.Input((8, 8, 3), name="images")
    patches = layers.Conv2D(6, 4, strides=4)(images)
    tokens = layers.Reshape((4, 6))(patches)
    tokens += layers.MultiHeadAttention(2, 3)(tokens, tokens)
    network = keras_hub_backbone(keras.Model({"images": images}, tokens), 1 / 128, -1)
    return RNG.integers(0, 256, (48, 8, 8, 3)).astype("uint8"), network, "class_token"


@pytest.mark.parametrize(
    "make", [vectors, sequences, token_ids, ids_and_mask, texts, transformer]
)
def test_trains_projects_saves_exports_and_searches(make, tmp_path):
    inputs, network, pooling = make()
    dataset = datasets.Dataset(inputs, [f"class {label}" for label in LABELS])
    training, unseen = dataset.split_classes(4)
    model = CCPModel(build_embedder(network, 8, pooling), training.num_classes, 2)
    model.compile("adam", "multi_similarity")
    callback = CCPCallback(training, unseen, patience=1, min_delta=1.0, seed=0)
    history = model.fit(
        balanced_batches(training, 2, 2, seed=0),
        steps_per_epoch=2,
        epochs=3,
        verbose=0,
        callbacks=[callback],
    )
    # No epoch but the first of a problem rises by more than 1, so the second projects.
    assert history.history["projection"] == [0, 0, 1]

    embeddings = model.embed(unseen)
    for again in (
        model.embed(unseen.images),
        model.predict(unseen, verbose=0),
        model.embed(tf.data.Dataset.from_tensor_slices(unseen.images).batch(5)),
    ):
        np.testing.assert_allclose(again, embeddings, atol=1e-6)
    expected = retrieval.evaluate(embeddings, unseen.labels)
    stream = (unseen.images, unseen.labels)
    stream = tf.data.Dataset.from_tensor_slices(stream).batch(5)
    for data in (unseen, stream):
        assert model.evaluate(data) == pytest.approx(expected)

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.embed(unseen), embeddings)
    model.export(tmp_path / "embedder", verbose=False)
    exported = tf.saved_model.load(tmp_path / "embedder")
    served = exported.serve(keras.tree.map_structure(tf.constant, unseen.images))
    np.testing.assert_allclose(served, embeddings, atol=1e-6)


def test_pixels_of_a_keras_hub_backbone():
    images = keras.Input((1, 1, 3), name="images")
    network = keras_hub_backbone(
        keras.Model({"images": images}, images), [1 / 100, 1 / 50, 1], [0, -1, 0.5]
    )
    pixels = np.array([[[[0, 0, 0]]], [[[100, 200, 2]]]], "uint8")
    # 0 / 100 + 0, 0 / 50 - 1, 0 + .5; 100 / 100, 200 / 50 - 1, 2 + .5
    expected = [[0, -1, 0.5], [1, 3, 2.5]]
    np.testing.assert_allclose(network(pixels)[:, 0, 0], expected, rtol=1e-6)


def test_presets_need_keras_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(ImportError, match=r"keras-ccp\[hub\]"):
        keras_hub_backbone("dinov2_small")


def test_pool_of_a_stream_of_several_inputs():
    inputs, network, _ = ids_and_mask()
    stream = tf.data.Dataset.from_tensor_slices((inputs, LABELS)).batch(7)
    model = CCPModel(build_embedder(network, 8), 8, 2)
    model.compile("adam", "contrastive")
    callback = CCPCallback(stream, stream, pool_size=3, seed=0)
    batches = stream.repeat()
    history = model.fit(batches, steps_per_epoch=2, verbose=0, callbacks=[callback])
    assert np.isfinite(history.history["val_map_at_r"]).all()


def test_rows_of_another_size_are_refused():
    _, network, _ = vectors()
    model = CCPModel(build_embedder(network, 8), 8)
    with pytest.raises(ValueError, match="expected shape=\\(None, 5\\)"):
        model.evaluate(np.zeros((4, 6), "float32"), [0, 0, 1, 1])


def test_augmentation_of_several_inputs():
    inputs, _, _ = ids_and_mask()
    dataset = datasets.Dataset(inputs, LABELS)
    batches = balanced_batches(
        dataset,
        2,
        2,
        seed=0,
        augment=lambda rows, seed: {**rows, "ids": rows["ids"] + 1},
    )
    plain = next(iter(balanced_batches(dataset, 2, 2, seed=0)))
    rows, labels = next(iter(batches))
    np.testing.assert_array_equal(rows["ids"], plain[0]["ids"] + 1)
    np.testing.assert_array_equal(labels, plain[1])


def test_samples_need_one_input():
    _, network, _ = ids_and_mask()
    with pytest.raises(ValueError, match="one input. Received: 2"):
        CCPModel(build_embedder(network, 8), 8, 2, references="samples")


@pytest.mark.parametrize("pooling", ["class_token", "mean"])
def test_pooling_that_does_not_fit(pooling):
    with pytest.raises(ValueError, match=f"`pooling`.*Received: pooling='{pooling}'"):
        build_embedder(vectors()[1], pooling=pooling)


def test_dataset_of_several_inputs():
    dataset = datasets.Dataset({"text": ["a", "b", "c"], "x": np.eye(3)}, [4, 2, 4])
    assert repr(dataset) == "Dataset(3 rows of {text: texts, x: 3}, 2 classes)"
    assert len(dataset) == 3 and not dataset.is_encoded
    chosen = dataset.select_classes([1])  # the class 4
    assert chosen.images["text"].tolist() == ["a", "c"]
    np.testing.assert_array_equal(chosen.images["x"], np.eye(3)[[0, 2]])


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"a": np.zeros((3, 2)), "b": np.zeros(2)}, "one length. Received: {'a': 3"),
        ({"a": [[1, 2], [3, 4]], "b": [np.nan, 1.0]}, "NaN or infinity in 1 of 2"),
        ({"a": [object(), object()]}, r"`images\['a'\]` must be an array of numbers"),
        ({"a": ["x", None]}, r"`images\['a'\]` must be an array of numbers or strings"),
        ({"a": 3}, r"`images\['a'\]` must be an array"),
        (np.zeros((2, 3, 4), "uint8"), "give grey ones a channel"),
        (np.zeros((2, 3), bool), "Received: bool"),
    ],
)
def test_inputs_that_do_not_fit(inputs, message):
    with pytest.raises(ValueError, match=message):
        datasets.Dataset(inputs, [0, 1])
