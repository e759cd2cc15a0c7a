"""What CCP holds in memory: one more copy of the embedder's weights, and no images."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import CCPCallback, CCPModel, build_embedder
from keras_ccp.backbones import resnet20_v2, small_cnn
from keras_ccp.datasets import Dataset
from keras_ccp.pipeline import EvaluationData


def num_bytes(variables):
    return sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables)


def make_model(backbone, **kwargs):
    model = CCPModel(build_embedder(backbone, embedding_dim=8), 3, **kwargs)
    model.compile(keras.optimizers.Adam(1e-3), "contrastive")
    return model


# ==== The frozen copy ====


@pytest.mark.parametrize("backbone", [small_cnn, resnet20_v2])
def test_lambda_costs_one_copy_of_the_trainable_weights(backbone):
    model = make_model(backbone(), proxies_per_class=2)
    trainable = model.embedder.trainable_weights
    frozen = model.frozen_weights
    assert [w.shape for w in frozen] == [w.shape for w in trainable]
    assert num_bytes(frozen) == num_bytes(trainable)
    # That is all there is: beside the embedder, the copy and the proxies the model has
    # a few numbers, such as lambda, the count of projections and means of the losses.
    known = [*model.embedder.variables, *frozen, *model.proxy_bank.variables]
    known = {id(variable) for variable in known}
    assert num_bytes([v for v in model.variables if id(v) not in known]) < 100


def test_the_optimizer_keeps_nothing_for_the_copy():
    model = make_model(small_cnn(), proxies_per_class=2)
    bare = make_model(small_cnn(), proxies_per_class=2, proximal_weight=0.0)
    assert num_bytes(model.optimizer.variables) == num_bytes(bare.optimizer.variables)
    # Adam: two moments of what is trained, step and learning rate.
    moments = 2 * num_bytes(model.trainable_variables)
    assert moments <= num_bytes(model.optimizer.variables) <= moments + 16


def test_snapshots_do_not_add_up():
    model = make_model(small_cnn(), proxies_per_class=2)
    before = [id(v) for v in model.variables]
    pointers = [v.value.handle for v in model.frozen_weights]
    for _ in range(3):
        model.take_snapshot()
    assert [id(v) for v in model.variables] == before
    assert all(
        v.value.handle is p for v, p in zip(model.frozen_weights, pointers, strict=True)
    )


# ==== Images ====

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
    with pytest.raises(tf.errors.InvalidArgumentError, match="cannot be read"):
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


def test_arrays_are_not_copied():
    images = np.zeros((6, 4, 4, 3), "uint8")
    labels = np.arange(6) // 2
    for data in ((images, labels), Dataset(images, labels)):
        assert EvaluationData(data).first_images is images


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
