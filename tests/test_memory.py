"""Images that are embedded are read as they are needed, and never all held."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import CCPCallback, CCPModel
from keras_ccp.datasets import Dataset
from keras_ccp.pipeline import EvaluationData

BATCHES, BATCH_SIZE = 60, 8
# Batches that may be under way: what tf.data prefetches and decodes in parallel.
AHEAD = 20


@pytest.fixture
def paths(tmp_path):
    rng = np.random.default_rng(0)
    paths = []
    for i in range(BATCHES * BATCH_SIZE):
        paths.append(str(tmp_path / f"{i}.png"))
        pixels = tf.constant(rng.integers(0, 256, (4, 4, 3), np.uint8))
        tf.io.write_file(paths[-1], tf.io.encode_png(pixels))
    return paths


def test_encoded_images_are_read_batch_by_batch(paths):
    labels = np.arange(len(paths)) // 2
    data = EvaluationData(Dataset(paths, labels).with_size(4))
    iterator = iter(data.batches(batch_size=BATCH_SIZE))
    next(iterator)
    for path in paths:
        tf.io.gfile.remove(path)
    # Had all been read at the start, all would still come.
    count = 1
    with pytest.raises(tf.errors.OpError, match=r"\.png"):
        for _ in range(BATCHES):
            next(iterator)
            count += 1
    assert count < AHEAD


def test_streams_are_read_batch_by_batch():
    made = []

    def generate():
        for i in range(BATCHES):
            made.append(i)
            yield np.full((BATCH_SIZE, 4, 4, 3), i, "uint8"), np.arange(BATCH_SIZE)

    stream = tf.data.Dataset.from_generator(
        generate,
        output_signature=(
            tf.TensorSpec((None, 4, 4, 3), tf.uint8),
            tf.TensorSpec((None,), tf.int64),
        ),
    )
    data = EvaluationData(stream)
    made.clear()
    for i, images in enumerate(data.batches(batch_size=BATCH_SIZE)):
        assert images.shape == (BATCH_SIZE, 4, 4, 3)
        assert len(made) - i <= AHEAD
    assert len(made) == BATCHES


def test_a_callback_embeds_what_is_read_as_it_is_needed():
    """Validation and pool reach the model as streams of batches, as above."""
    images = np.zeros((300, 2, 2, 3), "uint8")
    labels = np.arange(300) // 3
    inputs = keras.Input((2, 2, 3), dtype="uint8")
    features = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(inputs))
    model = CCPModel(keras.Model(inputs, keras.layers.Dense(4)(features)), 100, 2)
    model.compile("sgd", "contrastive")
    callback = CCPCallback((images, labels), (images.copy(), labels), pool_size=2)
    callback.set_model(model)
    given = []

    def predict(batches, **kwargs):
        assert isinstance(batches, tf.data.Dataset)
        given.append([len(batch) for batch in batches])
        return np.random.default_rng(0).random((sum(given[-1]), 4), np.float32)

    model.predict = predict
    callback.on_train_begin()
    callback.evaluate()
    callback.project()
    # Two images of each of 100 classes, all 300 of validation, then the pool again.
    assert given == [[128, 72], [128, 128, 44], [128, 72]]
