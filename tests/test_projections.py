"""Numbers of a projection by arithmetic, and what ProjectionLog writes of a fit."""

import json

import keras
import numpy as np
import pytest

from keras_ccp import Backup, CCPCallback, CCPModel, losses, retrieval
from keras_ccp.callback import BestWeights, ProblemEvents, at_best
from keras_ccp.monitor.projection_log import ProjectionLog, load_projections, read_lines
from keras_ccp.monitor.projections import (
    mean_inter_class_distance,
    measure,
    proxy_spreads,
    reference_embeddings,
)

# Class 0 on a line around 0, class 1 around (10, 0).
EMBEDDINGS = np.array([[-2, 0], [0, 0], [2, 0], [10, 3], [10, -3]], "float32")
LABELS = np.array([0, 0, 0, 1, 1])
PROXIES = np.array([[[-1, 0], [1, 0], [9, 9]], [[10, 1], [10, 1], [10, 1]]], "float32")


# ==== The numbers ====


def test_measure_by_arithmetic():
    numbers = measure(EMBEDDINGS, LABELS, PROXIES)
    # Class 0: every sample is 1 from (-1, 0) or (1, 0). Class 1: the farther sample,
    # (10, -3), is 4 from (10, 1).
    assert numbers["mean_covering_radius"] == pytest.approx((1 + 4) / 2)
    assert numbers["max_covering_radius"] == pytest.approx(4)
    # Means (0, 0) and (10, 0).
    assert numbers["mean_inter_class_distance"] == pytest.approx(10)
    # Of class 0 the first two are the nearest to a sample, of class 1 the first.
    assert numbers["proxy_usage"] == pytest.approx(3 / 6)
    spreads = proxy_spreads(EMBEDDINGS, LABELS, PROXIES)
    # Class 0: mean (3, 3), distances 5, sqrt(13), sqrt(72); samples' spread 4/3.
    # Class 1: all on one point.
    expected = [(5 + 13**0.5 + 72**0.5) / 3 / (4 / 3), 0]
    np.testing.assert_allclose(spreads, expected, rtol=1e-6)
    assert numbers["proxy_spread"] == pytest.approx(sum(expected) / 2)
    assert numbers["mean_covering_radius"] == pytest.approx(
        retrieval.covering_radius(EMBEDDINGS, LABELS, PROXIES)
    )


def test_ten_classes_on_the_circle():
    angles = np.arange(10) * 2 * np.pi / 10
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    # The mean of 2 sin(k pi / 10) over k = 1...9.
    expected = np.mean(2 * np.sin(np.arange(1, 10) * np.pi / 10))
    measured = mean_inter_class_distance(circle.repeat(2, axis=0), np.arange(20) // 2)
    assert measured == pytest.approx(expected)
    assert measured == pytest.approx(2 / 9 / np.tan(np.pi / 20))
    assert mean_inter_class_distance(circle, np.zeros(10, int)) == 0


def test_spread_of_samples_on_one_point():
    samples = np.ones((4, 2))
    proxies = np.array([[[0, 0], [0, 0]], [[0, 0], [1, 0]]])
    spreads = proxy_spreads(samples, [0, 0, 1, 1], proxies)
    assert spreads.tolist() == [0, np.inf]


@pytest.mark.parametrize(
    ("labels", "shape"),
    [([0, 1], (2, 3, 4)), ([0, 1], (3, 3, 2)), ([0, 2], (2, 3, 2)), ([0, 1], (2, 2))],
)
def test_shapes_must_fit(labels, shape):
    with pytest.raises(ValueError, match="`proxies` must have shape"):
        measure(np.eye(2), labels, np.zeros(shape))


# ==== The log ====


class Shift(keras.layers.Layer):
    """Gives the two pixels of an image back, moved by a weight."""

    def build(self, input_shape):
        self.shift = self.add_weight(shape=(2,), initializer="zeros", name="shift")

    def call(self, images):
        return keras.layers.Flatten()(images) + self.shift


def two_pixels(points):
    return np.asarray(points, "float32").reshape(-1, 1, 2, 1)


def shift_model(**kwargs):
    inputs = keras.Input((1, 2, 1))
    embedder = keras.Model(inputs, Shift()(inputs))
    model = CCPModel(embedder, 2, 2, normalization=None, **kwargs)
    model.compile("sgd", losses.ContrastiveLoss())
    return model


POOL = (two_pixels(EMBEDDINGS), LABELS)
VALIDATION = (two_pixels(EMBEDDINGS.copy()), LABELS)


def driven(tmp_path, values, model=None, **kwargs):
    """A fit by hand: the weights at epoch e are e + 1, its MAP@R is `values[e]`."""
    model = model or shift_model()
    callback = CCPCallback(POOL, VALIDATION, pool_size=3, patience=1, seed=0, **kwargs)
    log = ProjectionLog(tmp_path, save_arrays=True)
    callbacks = [callback, log]
    for member in callbacks:
        member.set_model(model)
        member.set_callbacks(callbacks)
    for member in callbacks:
        member.on_train_begin()
    for epoch, value in enumerate(values):
        log.on_epoch_begin(epoch)
        model.embedder.set_weights([np.full(2, epoch + 1, "float32")])
        callback.evaluate = lambda value=value: {
            "map_at_r": value,
            "precision_at_1": 0.5,
            "precision_at_r": 0.25,
        }
        callback.on_epoch_end(epoch, {})
    for member in callbacks:
        member.on_train_end()
    return model, log


def test_line_of_each_problem(tmp_path):
    # Best of problem 0 at epoch 0, of problem 1 at epoch 2, then the end.
    model, log = driven(tmp_path, [0.5, 0.4, 0.9])
    lines = read_lines(tmp_path)
    assert lines == log.lines
    assert [line["projection"] for line in lines] == [0, 1]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert [line["val_map_at_r"] for line in lines] == [0.5, 0.9]
    assert [line["is_last"] for line in lines] == [False, True]
    assert [line["num_samples"] for line in lines] == [5, 5]
    assert lines[1]["after"] is None
    records = load_projections(tmp_path)
    for line, record, shift in zip(lines, records, (1, 3), strict=True):
        # At the best weights of its own problem.
        np.testing.assert_array_equal(record.embeddings, EMBEDDINGS + shift)
        np.testing.assert_array_equal(record.labels, LABELS)
        assert line["before"] == measure(record.embeddings, LABELS, record.proxies)
        assert record.map_at_r == line["val_map_at_r"]
    first, second = records
    assert lines[0]["after"] == measure(first.embeddings, LABELS, first.next_proxies)
    # The proxies were not trained here.
    np.testing.assert_array_equal(first.next_proxies, second.proxies)
    assert not np.array_equal(first.next_proxies, first.proxies)
    assert second.next_proxies is None
    assert model.embedder.get_weights()[0].tolist() == [3, 3]


def test_after_is_measured_at_the_weights_that_go_on(tmp_path):
    driven(tmp_path, [0.5, 0.4], restore_on_projection=False, restore_best=False)
    (line,) = read_lines(tmp_path)
    (record,) = load_projections(tmp_path)
    np.testing.assert_array_equal(record.embeddings, EMBEDDINGS + 1)
    # Weights 2, of the epoch without improvement, are those that stay.
    assert line["after"] == measure(EMBEDDINGS + 2, LABELS, record.next_proxies)
    assert line["after"] != measure(EMBEDDINGS + 1, LABELS, record.next_proxies)


def test_last_problem_keeps_its_own_best_and_the_weights_stay(tmp_path):
    # The run's best is that of problem 0; problem 1 reaches 0.3 at epoch 3.
    model, _ = driven(tmp_path, [0.9, 0.1, 0.3], restore_best=True)
    lines = read_lines(tmp_path)
    assert lines[1]["val_map_at_r"] == 0.3
    assert load_projections(tmp_path)[1].embeddings[1].tolist() == [3, 3]
    assert model.embedder.get_weights()[0].tolist() == [1, 1]
    driven(tmp_path / "b", [0.9, 0.1, 0.3, 0.3 + 1e-9], max_projections=1, model=model)
    assert len(read_lines(tmp_path / "b")) == 2


def test_problem_without_an_evaluation_has_no_line(tmp_path):
    driven(tmp_path, [0.9, 0.1])
    assert [line["is_last"] for line in read_lines(tmp_path)] == [False]


def test_lines_from_the_first_repeated_one_on_are_replaced(tmp_path):
    _, log = driven(tmp_path, [0.9, 0.1, 0.3, 0.2, 0.4])
    assert [line["projection"] for line in read_lines(tmp_path)] == [0, 1, 2]
    log._write({"projection": 1, "epoch": 7, "before": None, "after": None})
    assert [line["epoch"] for line in read_lines(tmp_path)] == [1, 7]
    log.on_epoch_begin(8)
    assert len(read_lines(tmp_path)) == 2
    log.on_epoch_begin(0)  # a new run
    assert read_lines(tmp_path) == []


def test_samples_of_the_pool_leave_out_classes(tmp_path):
    labels = np.arange(40) // 4
    pool = (two_pixels(np.arange(80)), labels)
    inputs = keras.Input((1, 2, 1))
    model = CCPModel(keras.Model(inputs, Shift()(inputs)), 10, 1)
    log = ProjectionLog(tmp_path, max_samples=9)
    log.set_model(model)
    log.set_callbacks([CCPCallback(pool, VALIDATION, pool_size=3, seed=0)])
    log.on_train_begin()
    # Three images of each class are drawn: room for three classes.
    assert len(log._rows) == 9 and (np.diff(log._rows) > 0).all()
    classes, counts = np.unique(labels[log._rows], return_counts=True)
    assert classes.tolist() == log._classes.tolist()
    assert counts.tolist() == [3, 3, 3]
    assert log._proxies().shape == (3, 1, 2)


def test_samples_must_be_of_training_classes(tmp_path):
    log = ProjectionLog(tmp_path, samples=(POOL[0], LABELS + 1))
    log.set_model(shift_model())
    with pytest.raises(ValueError, match="labels from 0 to 1.*Received: label 2"):
        log.on_train_begin()


def test_callback_is_needed(tmp_path):
    model = shift_model()
    with pytest.raises(ValueError, match="must hold a CCPCallback"):
        model.fit(*POOL, callbacks=[ProjectionLog(tmp_path)], verbose=0)
    with pytest.raises(ValueError, match="`max_samples` must be at least 1"):
        ProjectionLog(tmp_path, max_samples=0)


# ==== In a fit ====


class FlatEpochs(CCPCallback):
    """Finds the same value in every evaluation, so that each second one switches."""

    def evaluate(self):
        return {**super().evaluate(), "map_at_r": 0.5}


def fit(directory, epochs, references="proxies", backup=False):
    keras.utils.set_random_seed(0)
    model = shift_model(references=references)
    callbacks = [
        ProjectionLog(directory),
        FlatEpochs(POOL, VALIDATION, pool_size=3, patience=1, seed=0),
    ]
    if backup:
        callbacks.append(Backup(directory / "backup"))
    model.fit(*POOL, batch_size=5, epochs=epochs, verbose=0, callbacks=callbacks)
    return read_lines(directory)


def test_fit_logs_and_a_resumed_one_the_same(tmp_path):
    whole = fit(tmp_path / "whole", 5)
    # Epochs 0, 2 and 4 are the best of a problem, 1 and 3 switch.
    assert [line["epoch"] for line in whole] == [1, 3, 4]
    assert all(np.isfinite(list(line["before"].values())).all() for line in whole)
    fit(tmp_path / "parts", 3, backup=True)
    assert [line["epoch"] for line in read_lines(tmp_path / "parts")] == [1, 2]
    assert fit(tmp_path / "parts", 5, backup=True) == whole


def test_reference_samples_are_logged(tmp_path):
    lines = fit(tmp_path, 3, references="samples")
    assert [line["is_last"] for line in lines] == [False, True]
    assert lines[0]["before"]["proxy_usage"] > 0


def test_model_without_proxies_is_not_logged(tmp_path):
    inputs = keras.Input((1, 2, 1))
    model = CCPModel(keras.Model(inputs, Shift()(inputs)), 2, 0)
    model.compile("sgd", losses.ContrastiveLoss())
    callbacks = [CCPCallback(POOL, VALIDATION), ProjectionLog(tmp_path)]
    model.fit(*POOL, verbose=0, callbacks=callbacks)
    assert not list(tmp_path.iterdir())


# ==== Events ====


def test_any_callback_may_listen():
    heard = []

    class Listener(keras.callbacks.Callback):
        def on_projection(self, best, is_last):
            heard.append((best, is_last))

    events = ProblemEvents()
    events.tell_problem_end(BestWeights(0.5, []), is_last=True)  # to none
    events.set_callbacks([Listener(), keras.callbacks.Callback()])
    events.tell_problem_end(BestWeights(), is_last=False)  # was never evaluated
    assert heard == []
    best = BestWeights(0.5, [])
    events.tell_problem_end(best, is_last=False)
    assert heard == [(best, False)]


def test_at_best_goes_there_and_back():
    model = shift_model()
    best = BestWeights.of(model)
    proxies = reference_embeddings(model)
    model.embedder.set_weights([np.ones(2, "float32")])
    model.proxies.assign(proxies + 1)
    with pytest.raises(RuntimeError), at_best(model, best):
        assert model.embedder.get_weights()[0].tolist() == [0, 0]
        np.testing.assert_array_equal(reference_embeddings(model), proxies)
        raise RuntimeError
    assert model.embedder.get_weights()[0].tolist() == [1, 1]
    np.testing.assert_array_equal(reference_embeddings(model), proxies + 1)


def test_file_is_plain_json(tmp_path):
    driven(tmp_path, [0.5, 0.4, 0.9])
    text = (tmp_path / "projections.jsonl").read_text("utf-8")
    assert [set(json.loads(line)) for line in text.splitlines()] == [
        {
            "projection",
            "epoch",
            "val_map_at_r",
            "is_last",
            "num_samples",
            "num_classes",
            "before",
            "after",
        }
    ] * 2


def test_spread_without_limit_is_null_in_the_file(tmp_path):
    # All samples of a class on one point, its proxies not: infinitely far apart.
    _, log = driven(tmp_path, [0.9, 0.1])
    log.lines[0]["before"]["proxy_spread"] = np.inf
    log._write(log.lines[0] | {"projection": 1})
    text = (tmp_path / "projections.jsonl").read_text("utf-8")
    assert '"proxy_spread": null' in text and "Infinity" not in text
    assert read_lines(tmp_path)[-1]["before"]["proxy_spread"] == np.inf
