"""What TensorBoard is given, read back with TensorBoard's own readers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.projector import ProjectorConfig

from keras_ccp import CCPCallback, CCPModel, losses
from keras_ccp.datasets import Dataset
from keras_ccp.monitor.projection_log import ProjectionLog
from keras_ccp.monitor.tensorboard import (
    CCPTensorBoard,
    pair_distances,
    write_projector,
)

LABELS = np.arange(12) // 3
IMAGES = np.random.default_rng(0).integers(0, 256, (12, 4, 4, 3)).astype("uint8")
DATA = Dataset(IMAGES, LABELS, ["one", "two", "three", "four"])
VALIDATION = IMAGES[::-1].copy(), LABELS


class FlatEpochs(CCPCallback):
    """Finds the same value in every evaluation: each second one ends a problem."""

    def evaluate(self):
        return {**super().evaluate(), "map_at_r": 0.5}


def fit(callbacks, proxies_per_class=2, epochs=1):
    images = keras.Input((4, 4, 3), dtype="uint8")
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(images))
    embedder = keras.Model(images, keras.layers.Dense(3)(x))
    model = CCPModel(embedder, 4, proxies_per_class)
    model.compile("sgd", losses.ContrastiveLoss())
    model.fit(IMAGES, LABELS, epochs=epochs, verbose=0, callbacks=callbacks)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three epochs of one step, the second of which ends in a projection."""
    folder = tmp_path_factory.mktemp("run")
    callbacks = [
        keras.callbacks.TensorBoard(folder, write_graph=False),
        CCPTensorBoard(folder),
        FlatEpochs(DATA, VALIDATION, pool_size=3, patience=1, seed=0),
        ProjectionLog(folder),
    ]
    return folder, fit(callbacks, epochs=3), callbacks


def read(folder, name):
    events = EventAccumulator(str(folder / name))
    events.Reload()
    # TensorFlow 2 writes scalars, histograms and texts as tensors.
    return {
        tag: [(event.step, tf.make_ndarray(event.tensor_proto)) for event in found]
        for tag in events.Tags()["tensors"]
        for found in [events.Tensors(tag)]
    }


def names(folder):
    return (folder / "ccp" / "metadata.tsv").read_text("utf-8").splitlines()


def test_keras_writes_every_logged_term(run):
    folder, model, _ = run
    train, validation = read(folder, "train"), read(folder, "validation")
    for term in ("loss", "pair_loss", "proximal_loss", "projection"):
        assert [step for step, _ in train[f"epoch_{term}"]] == [0, 1, 2]
    for metric in ("map_at_r", "precision_at_1", "precision_at_r"):
        written = [float(value) for _, value in validation[f"epoch_{metric}"]]
        history = model.history.history[f"val_{metric}"]
        np.testing.assert_allclose(written, history, rtol=1e-6)


def test_projections_are_told(run):
    folder, _, callbacks = run
    written = read(folder, "ccp")
    assert [(step, text.item(0).decode()) for step, text in written["projection"]] == [
        (1, "Problem 1 ended with epoch 1 at MAP@R 0.5000: new proxies."),
        (2, "Problem 2 ended with epoch 2 at MAP@R 0.5000: the training ended."),
    ]
    first, second = callbacks[3].lines
    for name, value in first["before"].items():
        (step, before), (last_step, last) = written[f"{name}/before_projection"]
        assert (step, last_step) == (1, 2)
        np.testing.assert_allclose([before, last], [value, second["before"][name]])
        ((step, after),) = written[f"{name}/after_projection"]
        assert step == 1
        np.testing.assert_allclose(after, first["after"][name])


def test_distances_of_each_problem_are_counted(run):
    written = read(run[0], "ccp")
    # Of 12 images in classes of three, 4 * 3 pairs share their class and 66 - 12 not.
    for name, count in (("same class", 12), ("other class", 54)):
        histograms = written[f"distances/{name}"]
        assert [step for step, _ in histograms] == [1, 2]
        # Rows of a histogram are left, right, count.
        assert [values[:, 2].sum() for _, values in histograms] == [count, count]


def test_projector_shows_the_last_embeddings(run):
    folder, model, _ = run
    text = (folder / "ccp" / "projector_config.pbtxt").read_text("utf-8")
    (shown,) = text_format.Parse(text, ProjectorConfig()).embeddings
    points = np.loadtxt(folder / "ccp" / shown.tensor_path, delimiter="\t")
    expected = model.predict(VALIDATION[0], verbose=0)
    np.testing.assert_allclose(points, expected, rtol=1e-5, atol=1e-6)
    # The callback's validation images have no names.
    assert shown.metadata_path == "metadata.tsv"
    assert names(folder) == [str(label) for label in LABELS]
    picture = (folder / "ccp" / shown.sprite.image_path).read_bytes()
    sprite = tf.io.decode_png(picture).numpy()
    width, height = shown.sprite.single_image_dim
    # Twelve in a square of four by four.
    assert sprite.shape == (4 * height, 4 * width, 3)
    # Each pixel of an image of 4 x 4 became a square of 8 x 8.
    seventh = sprite[height : 2 * height, 2 * width : 3 * width]
    np.testing.assert_array_equal(seventh[4::8, 4::8], VALIDATION[0][6])
    assert (sprite[3 * height :] == 255).all()


def test_names_and_a_random_choice_of_a_dataset(tmp_path):
    board = CCPTensorBoard(tmp_path, images=DATA, max_images=5)
    fit([board, CCPCallback(DATA, VALIDATION)], proxies_per_class=0)
    assert len(board.rows) == 5
    assert names(tmp_path) == [DATA.class_names[LABELS[row]] for row in board.rows]
    # Without proxies there is one problem, and no numbers of proxies.
    written = read(tmp_path, "ccp")
    assert [step for step, _ in written["projection"]] == [0]
    assert not [tag for tag in written if tag.endswith("_projection")]


def test_thumbnails_of_grey_floats(tmp_path):
    images = np.linspace(0, 1, 4, dtype="float32").reshape(4, 1, 1, 1)
    parts = [images[:3], images[3:]]
    write_projector(tmp_path / "ccp", np.eye(4), ["a\tb", "c\n", "d", "e"], parts)
    sprite = tf.io.decode_png((tmp_path / "ccp" / "sprite.png").read_bytes()).numpy()
    # Thirds of 255 in a square of two by two.
    assert sprite[::32, ::32, 1].tolist() == [[0, 85], [170, 255]]
    assert names(tmp_path) == ["a b", "c", "d", "e"]


def test_pair_distances_by_arithmetic():
    points = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    found = pair_distances(points, np.array([0, 0, 1]))
    np.testing.assert_allclose(found["same class"], [5])
    np.testing.assert_allclose(found["other class"], [1, 18**0.5])
