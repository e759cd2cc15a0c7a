"""Numbers of a projection by arithmetic, and what ProjectionLog writes of a fit."""

import json

import keras
import numpy as np
import pytest

from keras_ccp import Backup, CCPCallback, CCPModel, losses, retrieval
from keras_ccp.callback import BestWeights, at_best
from keras_ccp.monitor.projection_log import (
    ProjectionLog,
    load_projections,
    mean_inter_class_distance,
    measure,
    proxy_spreads,
    read_lines,
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
    radius = retrieval.covering_radius(EMBEDDINGS, LABELS, PROXIES)
    assert numbers["mean_covering_radius"] == pytest.approx(radius)


def test_class_of_one_image_has_no_spread():
    embeddings = np.append(EMBEDDINGS, [[5, 5], [5, 5]], axis=0)
    labels = np.append(LABELS, [2, 2])
    proxies = np.append(PROXIES, [[[0, 0], [1, 1], [2, 2]]], axis=0)
    spread = proxy_spreads(EMBEDDINGS, LABELS, PROXIES).mean()
    assert np.isnan(proxy_spreads(embeddings, labels, proxies)).tolist() == [0, 0, 1]
    assert measure(embeddings, labels, proxies)["proxy_spread"] == spread
    assert measure(embeddings[5:], [0, 0], proxies[2:])["proxy_spread"] == 0


def test_ten_classes_on_the_circle():
    angles = np.arange(10) * 2 * np.pi / 10
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    # The mean of 2 sin(k pi / 10) over k = 1...9.
    expected = np.mean(2 * np.sin(np.arange(1, 10) * np.pi / 10))
    measured = mean_inter_class_distance(circle.repeat(2, axis=0), np.arange(20) // 2)
    assert measured == pytest.approx(expected)
    assert measured == pytest.approx(2 / 9 / np.tan(np.pi / 20))
    assert mean_inter_class_distance(circle, np.zeros(10, int)) == 0


@pytest.mark.parametrize(
    ("labels", "shape"),
    [
        ([0, 1], (2, 3, 4)),
        ([0, 1], (3, 3, 2)),
        ([0, 2], (2, 3, 2)),
        ([0, 2], (3, 3, 2)),
    ],
)
def test_shapes_must_fit(labels, shape):
    with pytest.raises(ValueError):
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


def shift_model(num_classes=2, proxies_per_class=2, **kwargs):
    inputs = keras.Input((1, 2, 1))
    embedder = keras.Model(inputs, Shift()(inputs))
    sizes = num_classes, proxies_per_class
    model = CCPModel(embedder, *sizes, normalization=None, **kwargs)
    model.compile("sgd", losses.ContrastiveLoss())
    return model


POOL = (two_pixels(EMBEDDINGS), LABELS)
VALIDATION = (two_pixels(EMBEDDINGS.copy()), LABELS)


def driven(tmp_path, values, **kwargs):
    """A fit by hand: the weights at epoch e are e + 1, its MAP@R is `values[e]`."""
    model = shift_model()
    callback = CCPCallback(POOL, VALIDATION, pool_size=3, patience=1, seed=0, **kwargs)
    log = ProjectionLog(tmp_path, save_arrays=True)
    model.fit_callbacks = callbacks = [callback, log]
    for member in callbacks:
        member.set_model(model)
        member.on_train_begin()
    for epoch, value in enumerate(values):
        log.on_epoch_begin(epoch)
        model.embedder.set_weights([np.full(2, epoch + 1, "float32")])
        metrics = dict.fromkeys(("map_at_r", "precision_at_1", "precision_at_r"), value)
        callback.evaluate = lambda metrics=metrics: metrics
        callback.on_epoch_end(epoch, {})
    for member in callbacks:
        member.on_train_end()
    return model, log


def column(lines, name):
    return [line[name] for line in lines]


def test_line_of_each_problem(tmp_path):
    # Best of problem 0 at epoch 0, of problem 1 at epoch 2, then the end.
    model, log = driven(tmp_path, [0.5, 0.4, 0.9])
    # Each line is plain JSON, without Python's NaN and Infinity.
    text = (tmp_path / "projections.jsonl").read_text("utf-8")
    lines = [json.loads(line, parse_constant=int) for line in text.splitlines()]
    assert lines == log.lines == read_lines(tmp_path)
    assert column(lines, "projection") == [0, 1]
    assert column(lines, "epoch") == [1, 2]
    assert column(lines, "val_map_at_r") == [0.5, 0.9]
    assert column(lines, "is_last") == [False, True]
    assert [(line["num_samples"], line["num_classes"]) for line in lines] == 2 * [
        (5, 2)
    ]
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
    # A problem that was never evaluated, here the second, has no line.
    (line,) = read_lines(tmp_path)
    assert not line["is_last"]
    (record,) = load_projections(tmp_path)
    np.testing.assert_array_equal(record.embeddings, EMBEDDINGS + 1)
    # Weights 2, of the epoch without improvement, are those that stay.
    assert line["after"] == measure(EMBEDDINGS + 2, LABELS, record.next_proxies)
    assert line["after"] != measure(EMBEDDINGS + 1, LABELS, record.next_proxies)


def test_last_problem_keeps_its_own_best_and_the_weights_stay(tmp_path):
    # The run's best is that of problem 0; problem 1 reaches 0.3 at epoch 2.
    model, log = driven(tmp_path, [0.9, 0.1, 0.3])
    assert column(read_lines(tmp_path), "val_map_at_r") == [0.9, 0.3]
    assert load_projections(tmp_path)[1].embeddings[1].tolist() == [3, 3]
    assert model.embedder.get_weights()[0].tolist() == [1, 1]
    log.on_epoch_begin(8)
    assert len(read_lines(tmp_path)) == 2
    log.on_epoch_begin(0)  # a new run
    assert read_lines(tmp_path) == log.lines == []


def test_samples_of_the_pool_leave_out_classes(tmp_path):
    labels = np.arange(40) // 4
    pool = (two_pixels(np.arange(80)), labels)
    model = shift_model(10, 1)
    log = ProjectionLog(tmp_path, max_samples=9)
    log.set_model(model)
    model.fit_callbacks = [CCPCallback(pool, VALIDATION, pool_size=3, seed=0)]
    log.on_train_begin()
    # Three images of each class are drawn: room for three classes.
    assert len(log.rows) == 9 and (np.diff(log.rows) > 0).all()
    classes, counts = np.unique(labels[log.rows], return_counts=True)
    assert classes.tolist() == log.classes.tolist()
    assert counts.tolist() == [3, 3, 3]
    assert log._proxies().shape == (3, 1, 2)


def test_what_would_be_noticed_at_the_first_projection_only(tmp_path):
    def fit(*callbacks, **kwargs):
        callbacks = [ProjectionLog(tmp_path, **kwargs), *callbacks]
        shift_model().fit(*POOL, callbacks=callbacks, verbose=0)

    with pytest.raises(ValueError, match="must hold a CCPCallback"):
        fit()
    callback = CCPCallback(POOL, VALIDATION)
    with pytest.raises(ValueError, match="labels from 0 to 1. Received: label 2"):
        fit(callback, samples=(POOL[0], LABELS + 1))
    (tmp_path / "projections.jsonl").write_text('{"projection": 0}\n{"projec')
    with pytest.raises(ValueError, match="projections.jsonl must hold an undam"):
        fit(callback)


# ==== In a fit ====


class FlatEpochs(CCPCallback):
    """Finds the same value in every evaluation: each second one ends a problem."""

    def evaluate(self):
        return {**super().evaluate(), "map_at_r": 0.5}


def fit(directory, epochs, backup=False, **kwargs):
    keras.utils.set_random_seed(0)
    model = shift_model(**kwargs)
    flat = FlatEpochs(POOL, VALIDATION, pool_size=3, patience=1, seed=0)
    callbacks = [ProjectionLog(directory), flat]
    if backup:
        callbacks.append(Backup(directory / "backup"))
    model.fit(*POOL, batch_size=5, epochs=epochs, verbose=0, callbacks=callbacks)
    return read_lines(directory)


def test_fit_logs_and_a_resumed_one_the_same(tmp_path):
    whole = fit(tmp_path / "whole", 5)
    # Epochs 0, 2 and 4 are the best of a problem, 1 and 3 end in a projection.
    assert column(whole, "epoch") == [1, 3, 4]
    assert all(np.isfinite(list(line["before"].values())).all() for line in whole)
    parts = fit(tmp_path / "parts", 3, backup=True)
    assert column(parts, "epoch") == [1, 2]
    # Killed before its last line was written, and with nothing left to train.
    (tmp_path / "parts" / "projections.jsonl").write_text(f"{json.dumps(parts[0])}\n")
    assert fit(tmp_path / "parts", 3, backup=True) == parts
    assert fit(tmp_path / "parts", 5, backup=True) == whole


def test_reference_samples_are_logged_and_pairwise_losses_are_not(tmp_path):
    lines = fit(tmp_path / "samples", 3, references="samples")
    assert column(lines, "is_last") == [False, True]
    assert lines[0]["before"]["proxy_usage"] > 0
    assert not fit(tmp_path / "pairs", 1, proxies_per_class=0)
    assert not (tmp_path / "pairs").exists()


# ==== Events ====


def test_any_callback_may_listen():
    heard = []

    class Listener(keras.callbacks.Callback):
        def on_projection(self, best, is_last):
            heard.append((best.map_at_r, is_last))

    callback = FlatEpochs(POOL, VALIDATION, pool_size=3, patience=1, seed=0)
    callbacks = [Listener(), keras.callbacks.Callback(), callback]
    shift_model().fit(*POOL, epochs=2, verbose=0, callbacks=callbacks)
    # The problem that began in the last epoch was never evaluated.
    assert heard == [(0.5, False)]


def test_at_best_goes_there_and_back():
    model = shift_model()
    best = BestWeights.of(model)
    proxies = model.proxy_embeddings()
    model.embedder.set_weights([np.ones(2, "float32")])
    model.proxies.assign(model.proxies + 1)
    with pytest.raises(RuntimeError), at_best(model, best):
        assert model.embedder.get_weights()[0].tolist() == [0, 0]
        np.testing.assert_array_equal(model.proxy_embeddings(), proxies)
        raise RuntimeError
    assert model.embedder.get_weights()[0].tolist() == [1, 1]
    np.testing.assert_array_equal(model.proxy_embeddings(), proxies + 1)
