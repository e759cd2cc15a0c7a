"""References that are samples, embedded afresh at every step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import CCPCallback, CCPModel, losses
from keras_ccp.model import SampleBank

NUM_CLASSES = 3


def make_model(samples=2, **arguments):
    embedder = keras.Sequential(
        [
            keras.Input((4, 4, 1), dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(5),
        ]
    )
    model = CCPModel(embedder, NUM_CLASSES, samples, references="samples", **arguments)
    model.compile(keras.optimizers.SGD(0.1), losses.ContrastiveLoss())
    return model


def images_and_labels(n=18, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(n, dtype="int32") % NUM_CLASSES
    return rng.integers(0, 256, (n, 4, 4, 1), np.uint8), labels


def test_step_pairs_the_batch_with_embedded_samples():
    # Oracle: the loss of the batch against the samples' own embeddings, by hand.
    model = make_model()
    images, labels = images_and_labels()
    samples, classes = images_and_labels(6, seed=1)
    order = np.argsort(classes, kind="stable")
    model.sample_bank.assign(samples[order].reshape(3, 2, 4, 4, 1))
    weights = model.embedder.trainable_variables
    with tf.GradientTape() as tape:
        rows = model.loss.pairs(
            labels, model(images), classes[order], model(samples[order])
        )
        expected = tf.reduce_mean(rows)
    gradients = tape.gradient(expected, weights)
    wanted = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
    logs = model.train_on_batch(images, labels, return_dict=True)
    assert logs["pair_loss"] == pytest.approx(float(expected), rel=1e-5)
    for weight, value in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(weight, value, rtol=1e-4, atol=1e-6)


def test_callback_chooses_images_of_each_class():
    model = make_model()
    images, labels = images_and_labels()
    callback = CCPCallback((images, labels), (images, labels), patience=1, seed=0)
    batches = tf.data.Dataset.from_tensors((images, labels)).repeat()
    model.fit(batches, steps_per_epoch=1, epochs=4, verbose=0, callbacks=[callback])
    chosen = model.sample_bank.images.numpy()
    for label, of_class in enumerate(chosen):
        pool = images[labels == label]
        assert all((image == pool).all(axis=(1, 2, 3)).any() for image in of_class)
        assert (of_class[0] != of_class[1]).any()


def test_switch_covers_what_the_samples_do_not():
    # One sample a class; class 0 has images of two kinds: the other kind is next.
    model = make_model(samples=1)
    images, labels = images_and_labels(6)
    callback = CCPCallback((images, labels), (images, labels), seed=0)
    callback.set_model(model)
    callback.on_train_begin()
    first = model.sample_bank.images.numpy()
    callback.project()
    assert (model.sample_bank.images.numpy() != first).any(axis=(1, 2, 3, 4)).all()
    assert callback.num_projections == 1


def test_survives_saving(tmp_path):
    model = make_model()
    samples, _ = images_and_labels(6)
    model.sample_bank.assign(samples.reshape(3, 2, 4, 4, 1))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.sample_bank.images, samples.reshape(3, 2, 4, 4, 1)
    )
    images, labels = images_and_labels()
    for either in (model, loaded):
        either.train_on_batch(images, labels)
    for weight, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)


def test_training_without_samples_is_refused():
    images, labels = images_and_labels()
    with pytest.raises(ValueError, match="sample_bank.assign"):
        make_model().fit(images, labels, verbose=0)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="references='images'"):
        CCPModel(make_model().embedder, 3, references="images")
    with pytest.raises(ValueError, match=r"image shape \(None, None, 3\)"):
        SampleBank(3, 2, (None, None, 3))
    with pytest.raises(ValueError, match=r"images.shape=\(3, 4, 4, 1\)"):
        make_model().sample_bank.assign(np.zeros((3, 4, 4, 1)))
