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
    """Finds the same value in every evaluation, so that each second one switches."""

    def evaluate(self):
        return {**super().evaluate(), "map_at_r": 0.5}


def make_model(proxies_per_class=2):
    images = keras.Input((4, 4, 3), dtype="uint8")
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(images))
    embedder = keras.Model(images, keras.layers.Dense(3)(x))
    model = CCPModel(embedder, 4, proxies_per_class)
    model.compile("sgd", losses.ContrastiveLoss())
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three epochs of one step, the second of which ends in a switch."""
    folder = tmp_path_factory.mktemp("run")
    callbacks = [
        keras.callbacks.TensorBoard(folder, write_graph=False),
        CCPTensorBoard(folder),
        FlatEpochs(DATA, VALIDATION, pool_size=3, patience=1, seed=0),
        ProjectionLog(folder),
    ]
    model = make_model()
    model.fit(IMAGES, LABELS, epochs=3, verbose=0, callbacks=callbacks)
    return folder, model, callbacks


def read(folder, name):
    events = EventAccumulator(str(folder / name))
    events.Reload()
    # TensorFlow 2 writes scalars, histograms and texts as tensors.
    return {
        tag: [(event.step, tf.make_ndarray(event.tensor_proto)) for event in found]
        for tag in events.Tags()["tensors"]
        for found in [events.Tensors(tag)]
    }


def test_keras_writes_every_logged_term(run):
    folder, model, _ = run
    train, validation = read(folder, "train"), read(folder, "validation")
    terms = ("loss", "pair_loss", "proximal_loss", "projection")
    for term in terms:
        assert [step for step, _ in train[f"epoch_{term}"]] == [0, 1, 2]
    for metric in ("map_at_r", "precision_at_1", "precision_at_r"):
        written = [float(value) for _, value in validation[f"epoch_{metric}"]]
        history = model.history.history[f"val_{metric}"]
        np.testing.assert_allclose(written, history, rtol=1e-6)


def test_projections_are_told(run):
    folder, _, callbacks = run
    written = read(folder, "ccp")
    texts = [
        (step, str(value.item(0), "utf-8")) for step, value in written["projection"]
    ]
    assert texts == [
        (1, "Problem 1 ended with epoch 1 at MAP@R 0.5000: new proxies."),
        (2, "Problem 2 ended with epoch 2 at MAP@R 0.5000: the training ended."),
    ]
    first, second = callbacks[3].lines
    for name, value in first["before"].items():
        (step, before), (last_step, last) = written[f"{name}/before_switch"]
        assert (step, last_step) == (1, 2)
        np.testing.assert_allclose([before, last], [value, second["before"][name]])
        ((step, after),) = written[f"{name}/after_switch"]
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
    names = (folder / "ccp" / shown.metadata_path).read_text("utf-8").splitlines()
    assert names == [str(label) for label in LABELS]
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
    model = make_model(proxies_per_class=0)
    board = CCPTensorBoard(tmp_path, images=DATA, max_images=5)
    callbacks = [board, CCPCallback(DATA, VALIDATION)]
    model.fit(IMAGES, LABELS, verbose=0, callbacks=callbacks)
    names = (tmp_path / "ccp" / "metadata.tsv").read_text("utf-8").splitlines()
    assert len(names) == 5 and set(names) <= set(DATA.class_names)
    assert names == [DATA.class_names[LABELS[row]] for row in board._rows]
    # Without proxies there is one problem, and no numbers of proxies.
    written = read(tmp_path, "ccp")
    assert [step for step, _ in written["projection"]] == [0]
    assert not [tag for tag in written if tag.endswith("_switch")]


def test_thumbnails_of_grey_floats(tmp_path):
    images = np.linspace(0, 1, 4, dtype="float32").reshape(4, 1, 1, 1)
    names = ["a\tb", "c\n", "d", "e"]
    write_projector(tmp_path, np.eye(4), names, [images[:3], images[3:]])
    sprite = tf.io.decode_png((tmp_path / "sprite.png").read_bytes()).numpy()
    # Thirds of 255 in a square of two by two.
    assert sprite[::32, ::32, 1].tolist() == [[0, 85], [170, 255]]
    text = (tmp_path / "metadata.tsv").read_text("utf-8")
    assert text.splitlines() == ["a b", "c", "d", "e"]


def test_pair_distances_by_arithmetic():
    points = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    same, other = pair_distances(points, np.array([0, 0, 1]))
    np.testing.assert_allclose(same, [5])
    np.testing.assert_allclose(other, [1, 18**0.5])


def test_callback_is_needed(tmp_path):
    with pytest.raises(ValueError, match="must hold a CCPCallback"):
        make_model().fit(
            IMAGES, LABELS, callbacks=[CCPTensorBoard(tmp_path)], verbose=0
        )
    with pytest.raises(ValueError, match="`max_images` must be at least 2"):
        CCPTensorBoard(tmp_path, max_images=1)


def test_progress_bar_shows_terms_and_map_at_r(capsys):
    callbacks = [CCPCallback(DATA, VALIDATION, pool_size=3)]
    make_model().fit(IMAGES, LABELS, verbose=1, callbacks=callbacks)
    printed = capsys.readouterr().out
    for term in ("loss: ", "pair_loss: ", "proximal_loss: ", "val_map_at_r: "):
        assert f"- {term}" in printed
