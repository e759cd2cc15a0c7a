"""The state machine of CCPCallback, driven by hand and by fit."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import color_data, small_model

from keras_ccp import CCPCallback, CCPModel, WarmUp, build_embedder, losses
from keras_ccp import callback as callback_module
from keras_ccp.callback import at_best, draw_pool
from keras_ccp.datasets import Dataset
from keras_ccp.model import reset_slots
from keras_ccp.pipeline import balanced_batches


class IdentityEmbedder(keras.layers.Layer):
    """Gives the one pixel of an image back, and has a weight that does nothing."""

    def build(self, input_shape):
        self.idle = self.add_weight(shape=(), initializer="zeros", name="idle")

    def call(self, images):
        return keras.layers.Flatten()(images)


def one_pixel_model(num_classes=1, proxies_per_class=1, **kwargs):
    inputs = keras.Input((1, 1, 1))
    embedder = keras.Model(inputs, IdentityEmbedder()(inputs))
    model = CCPModel(
        embedder, num_classes, proxies_per_class, normalization=None, **kwargs
    )
    model.compile(keras.optimizers.Adam(), losses.ContrastiveLoss())
    return model


def pixels(values):
    return np.asarray(values, "float32").reshape(-1, 1, 1, 1)


VALIDATION = (pixels([0, 1, 5, 6]), np.array([0, 0, 1, 1]))


def driven(values, pool_values=(1, 2, 3), before=None, **kwargs):
    """Runs a callback by hand over a list of MAP@R values."""
    model = one_pixel_model()
    data = (pixels(pool_values), np.zeros(len(pool_values), int))
    callback = CCPCallback(data, VALIDATION, seed=0, **kwargs)
    callback.set_model(model)
    model.stop_training = False
    callback.on_train_begin()
    logs = []
    for epoch, value in enumerate(values):
        model.embedder.set_weights([np.float32(epoch + 1)])
        model.proxies.assign([[[100.0 + epoch]]])
        if before:
            before(model)
        callback.evaluate = lambda value=value: {
            "map_at_r": value,
            "precision_at_1": 0.5,
            "precision_at_r": 0.25,
        }
        logs.append({"loss": 1.0})
        callback.on_epoch_end(epoch, logs[-1])
        if model.stop_training:
            break
    return callback, model, logs


def test_state_machine_equals_the_published_codes(golden, monkeypatch):
    """Oracle `state_machine`, columns as in the oracles' description."""
    drawn = iter(range(100))

    def draw_in_order(labels, num_classes, pool_size, rng):
        rows = np.array([[next(drawn) for _ in range(pool_size)]])
        return rows, np.ones_like(rows, bool)

    monkeypatch.setattr(callback_module, "draw_pool", draw_in_order)
    model = one_pixel_model()
    # The oracle's sampler returns 1, 2, 3, ... in turn.
    data = (pixels(range(1, 31)), np.zeros(30, int))
    callback = CCPCallback(
        data, VALIDATION, pool_size=3, patience=3, restore_on_projection=False, seed=0
    )
    callback.set_model(model)
    callback.on_train_begin()
    table = golden["out/state_machine"]
    assert model.proxies.numpy().item() == table[0, 7]
    for row in table[1:]:
        index, value, weight, frozen, best, calls, wait, proxy, best_proxy = row
        model.embedder.set_weights([np.float32(index + 1)])
        model.proxies.assign([[[100 + index]]])
        previous = callback._best_of_problem
        callback.evaluate = lambda value=value: {
            "map_at_r": value,
            "precision_at_1": 0.0,
            "precision_at_r": 0.0,
        }
        callback.on_epoch_end(int(index), {})
        assert callback.wait == wait
        assert model.proxies.numpy().item() == proxy
        assert model.frozen_weights[0].numpy() == frozen
        # The oracle's lambda decays; ours is on or off.
        assert bool(model.active_proximal_weight.numpy()) == bool(weight)
        # A projection clears the best of the problem, which the oracle still shows.
        kept = callback._best_of_problem
        kept = previous if kept.proxies is None else kept
        assert kept.embedder_weights[0] == best
        assert kept.proxies.item() == best_proxy
        assert callback.num_projections * 3 + 3 == calls


def test_projection_restores_freezes_and_starts_again():
    # Best is 0.5 at epoch 1 (weight 2, proxy 101); waits 1, 2, then the projection.
    callback, model, logs = driven([0.1, 0.5, 0.4, 0.4], patience=2)
    assert callback.num_projections == 1
    assert callback.wait == 0
    assert model.embedder.get_weights()[0] == 2.0
    assert model.frozen_weights[0].numpy() == 2.0
    # Covered is 101, so of 1, 2, 3 the farthest is 1.
    assert model.proxies.numpy().item() == 1.0
    assert model.active_proximal_weight.numpy() == np.float32(2e-4)
    assert [log["projection"] for log in logs] == [0, 0, 0, 0]


def test_logs_are_written_beside_what_was_there():
    _, _, logs = driven([0.1])
    scores = {"precision_at_1": 0.5, "precision_at_r": 0.25, "map_at_r": 0.1}
    written = {f"val_{name}": score for name, score in scores.items()}
    assert logs == [{"loss": 1.0, "projection": 0, **written}]


def test_improvement_must_exceed_min_delta():
    callback, _, _ = driven([0.5, 0.55, 0.56, 0.7], min_delta=0.1)
    # 0.55 and 0.56 are within 0.1 of 0.5, 0.7 is not.
    assert callback.wait == 0
    callback, _, _ = driven([0.5, 0.6 - 1e-9], min_delta=0.1)
    assert callback.wait == 1


def test_run_ends_with_the_best_of_all_problems():
    # The second problem (from epoch 3) never reaches 0.9 of the first.
    values = [0.9, 0.1, 0.1, 0.2, 0.3]
    callback, model, _ = driven(values, patience=2)
    assert callback.num_projections == 1
    callback.on_train_end()
    assert model.embedder.get_weights()[0] == 1.0
    assert model.proxies.numpy().item() == 100.0
    callback, model, _ = driven(values, patience=2, restore_best=False)
    callback.on_train_end()
    assert model.embedder.get_weights()[0] == 5.0


def test_stop_patience_counts_against_the_best_of_the_run():
    # From epoch 3 on a new problem improves (.1, .2, .3), and the run does not.
    callback, model, logs = driven(
        [0.9, 0.1, 0.1, 0.1, 0.2, 0.3, 0.4], patience=2, stop_patience=5
    )
    assert model.stop_training
    assert len(logs) == 6
    callback.on_train_end()
    assert model.embedder.get_weights()[0] == 1.0


def test_max_projections_stops_the_projections_not_the_training():
    callback, model, logs = driven([0.9] + [0.1] * 9, patience=2, max_projections=1)
    assert callback.num_projections == 1
    assert len(logs) == 10
    callback, _, _ = driven([0.9] + [0.1] * 9, patience=2, max_projections=0)
    assert callback.num_projections == 0


def test_state_makes_another_callback_go_on():
    # Best of the run 0.9 (weight 1), of the second problem 0.3 (weight 5), wait 1.
    first, model, _ = driven([0.9, 0.1, 0.1, 0.2, 0.3, 0.3], patience=2)
    state = first.get_state()
    other = driven([0.4], patience=2)[0]
    other.set_state(state)
    assert (other.wait, other._wait_of_run) == (first.wait, 5) == (1, 5)
    for name, best, weight in (("problem", 0.3, 5.0), ("run", 0.9, 1.0)):
        kept = getattr(other, f"_best_of_{name}")
        assert kept.map_at_r == best
        assert kept.embedder_weights == [weight]
        assert kept.proxies.item() == 99.0 + weight
    other.on_train_end()
    assert other.model.embedder.get_weights()[0] == 1.0
    # What it went on from ends with this `fit`.
    other.on_train_begin()
    assert (other.wait, other._wait_of_run) == (0, 0)
    assert other._best_of_run.map_at_r == -np.inf


def test_state_right_after_a_projection_and_without_proxies():
    first = driven([0.5, 0.4], patience=1)[0]
    other = driven([0.1])[0]
    other.set_state(first.get_state())
    assert other._best_of_problem == type(other._best_of_problem)()
    callback, model, _ = fitted(epochs=1, model=color_model(proxies_per_class=0))
    callback.set_state(callback.get_state())
    assert callback._best_of_run.proxies is None
    assert len(callback._best_of_run.embedder_weights) == len(model.embedder.weights)


def test_state_holds_a_drawn_seed():
    callbacks = [CCPCallback(TRAIN, UNSEEN) for _ in range(2)]
    callbacks[1].set_state(callbacks[0].get_state())
    assert callbacks[0]._seed == callbacks[1]._seed


OPTIMIZERS = """sgd adam adamw rmsprop nadam adagrad adamax lion ftrl adadelta
adafactor""".split()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_the_slots_of_the_variable_are_reset(name):
    first = keras.Variable(np.ones((4, 3), "float32"), name="first")
    second = keras.Variable(np.ones((4, 3), "float32"), name="second")
    optimizer = keras.optimizers.get(name)
    optimizer.build([first, second])
    for _ in range(2):
        gradient = keras.ops.ones((4, 3))
        optimizer.apply_gradients([(gradient, first), (gradient, second)])
    before = [np.array(v) for v in optimizer.variables]
    reset_slots(optimizer, second)
    for index, variable in enumerate(optimizer.variables):
        mine = "second" in variable.name
        expected = 0 * before[index] if mine else before[index]
        np.testing.assert_array_equal(variable, expected, err_msg=f"{index}")
    assert optimizer.learning_rate > 0
    assert int(optimizer.iterations) == 2


def test_moving_average_starts_from_the_variable():
    variable = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(use_ema=True)
    optimizer.build([variable])
    variable.assign([5.0, 6.0])
    reset_slots(optimizer, variable)
    average = [v for v in optimizer.variables if v.name.endswith("average")]
    np.testing.assert_array_equal(average[0], [5.0, 6.0])


@pytest.mark.parametrize("scaled", [False, True])
def test_reset_covers_accumulator_and_loss_scaling(scaled):
    optimizer = inner = keras.optimizers.Adam(gradient_accumulation_steps=2)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(inner)
    variables = [keras.Variable(np.ones(3), name=name) for name in ("a", "b")]
    optimizer.build(variables)
    slots = [slot for slot in inner.variables if slot.shape == (3,)]
    for slot in slots:
        slot.assign(np.ones(3))
    reset_slots(optimizer, variables[0])
    assert len(slots) == 6  # two moments and the gathered gradient of each
    assert [slot.numpy().any() for slot in slots] == ["a_" not in s.name for s in slots]


def test_pool_is_drawn_without_repetition_and_by_seed():
    labels = np.repeat(np.arange(3), [5, 2, 9])
    rows, mask = draw_pool(labels, 3, 4, np.random.default_rng(0))
    assert mask.sum(axis=1).tolist() == [4, 2, 4]
    for cls in range(3):
        chosen = rows[cls][mask[cls]]
        assert len(set(chosen)) == len(chosen)
        assert (labels[chosen] == cls).all()
    again, _ = draw_pool(labels, 3, 4, np.random.default_rng(0))
    np.testing.assert_array_equal(rows, again)


TRAIN, UNSEEN = color_data(6).split_classes(4)


def color_model(num_classes=4, **kwargs):
    model = small_model(num_classes, **kwargs)
    model.compile(keras.optimizers.Adam(1e-2), losses.MultiSimilarityLoss())
    return model


def fitted(epochs=6, model=None, callbacks=(), position=0, **kwargs):
    model = model or color_model()
    callback = CCPCallback(TRAIN, UNSEEN, seed=1, **{"patience": 1, **kwargs})
    callbacks = list(callbacks)
    callbacks.insert(position, callback)
    history = model.fit(
        balanced_batches(TRAIN, 2, 2, seed=0),
        steps_per_epoch=2,
        epochs=epochs,
        verbose=0,
        callbacks=callbacks,
    )
    return callback, model, history


def test_fit_projects_and_logs():
    callback, model, history = fitted()
    assert callback.num_projections >= 1
    logged = "loss pair_loss proximal_loss projection val_map_at_r val_precision_at_1"
    assert {*logged.split(), "val_precision_at_r"} <= set(history.history)
    assert max(history.history["projection"]) >= 1
    # λ acts only after a projection.
    first = history.history["projection"].index(1)
    assert not np.any(history.history["proximal_loss"][:first])
    assert np.any(history.history["proximal_loss"][first:])
    assert callback.evaluate()["map_at_r"] == max(history.history["val_map_at_r"])


def test_position_in_the_callback_list_does_not_matter():
    class Reader(keras.callbacks.Callback):
        seen = ()

        def on_epoch_end(self, epoch, logs=None):
            self.seen += (logs["val_map_at_r"],)

    keras.utils.set_random_seed(0)
    before, after = Reader(), Reader()
    _, _, first = fitted(callbacks=[before], position=0)
    keras.utils.set_random_seed(0)
    _, _, last = fitted(callbacks=[after], position=1)
    assert list(before.seen) == first.history["val_map_at_r"]
    assert list(after.seen) == last.history["val_map_at_r"]
    # Two trainings in several threads may differ in the last bit.
    for name, values in first.history.items():
        np.testing.assert_allclose(values, last.history[name], rtol=1e-6)


def test_second_fit_starts_afresh():
    model = color_model()
    fitted(model=model)
    callback, _, history = fitted(model=model, epochs=2, patience=9)
    assert history.history["projection"] == [0, 0]
    assert history.history["proximal_loss"] == [0.0, 0.0]


def test_one_callback_in_two_fits():
    callback = CCPCallback(TRAIN, UNSEEN, patience=1, seed=1)
    histories = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        batches = balanced_batches(TRAIN, 2, 2, seed=0)
        arguments = {"steps_per_epoch": 2, "epochs": 4, "verbose": 0}
        model = color_model()
        histories.append(model.fit(batches, callbacks=[callback], **arguments).history)
    assert histories[0] == histories[1]


def test_pairwise_model_is_evaluated_and_never_projects():
    model = color_model(proxies_per_class=0)
    callback, _, history = fitted(model=model)
    assert max(history.history["projection"]) == 0
    assert callback.evaluate()["map_at_r"] == max(history.history["val_map_at_r"])


def test_starting_proxies_are_pool_embeddings():
    model = color_model()
    callback = CCPCallback(TRAIN, UNSEEN, seed=0)
    callback.set_model(model)
    callback.on_train_begin()
    embeddings = model.predict(TRAIN.images, verbose=0)
    for cls, proxies in enumerate(model.proxies.numpy()):
        own = embeddings[TRAIN.labels == cls]
        nearest = np.linalg.norm(proxies[:, None] - own, axis=-1).argmin(axis=1)
        assert len(set(nearest)) == len(proxies)
        np.testing.assert_allclose(own[nearest], proxies, atol=1e-6)


def test_small_pool_classes_repeat():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (7, 8, 8, 3), dtype="uint8")
    small = Dataset(images, [0, 0, 0, 0, 1, 1, 2])
    model = color_model(num_classes=3, proxies_per_class=3)
    callback = CCPCallback(small, UNSEEN, pool_size=4, seed=0)
    callback.set_model(model)
    callback.on_train_begin()
    callback.project()
    distinct = [len(np.unique(p, axis=0)) for p in model.proxies.numpy()]
    assert distinct == [3, 2, 1]


def test_forms_of_the_data_are_equal():
    proxies = []
    for form in (
        lambda d: d,
        lambda d: (d.images, d.labels),
        lambda d: tf.data.Dataset.from_tensor_slices((d.images, d.labels)).batch(5),
    ):
        keras.utils.set_random_seed(0)
        model = color_model()
        callback = CCPCallback(form(TRAIN), form(UNSEEN), pool_size=2, seed=0)
        callback.set_model(model)
        callback.on_train_begin()
        proxies.append((model.proxies.numpy(), callback.evaluate()))
    for other, metrics in proxies[1:]:
        np.testing.assert_allclose(other, proxies[0][0], atol=1e-6)
        assert metrics == proxies[0][1]


def test_embeddings_not_finite_with_finite_weights_are_refused():
    inputs = keras.Input((8, 8, 3))
    features = keras.layers.Lambda(lambda x: x / 0.0)(inputs)
    embedder = build_embedder(keras.Model(inputs, features), embedding_dim=5)
    callback = CCPCallback(TRAIN, UNSEEN)
    callback.set_model(CCPModel(embedder, 4, 2))
    with pytest.raises(ValueError, match="Weights and embeddings must be finite"):
        callback.on_train_begin()


@pytest.mark.parametrize("proxies_per_class", [0, 2])
def test_broken_weights_behind_a_relu_are_seen(proxies_per_class, caplog):
    """ReLU makes zeros of NaN, so that the embeddings look finite."""
    model = color_model(proxies_per_class=proxies_per_class)
    convolution = model.embedder.layers[1].layers[2]
    convolution.bias.assign(np.full(4, np.nan))
    callback = CCPCallback(TRAIN, UNSEEN)
    callback.set_model(model)
    with pytest.raises(ValueError, match="Weights and embeddings must be finite"):
        callback.on_train_begin()

    class Poison(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                layer = self.model.embedder.layers[1].layers[2]
                layer.bias.assign(np.full(4, np.nan))

    model = color_model(proxies_per_class=proxies_per_class)
    _, _, history = fitted(model=model, callbacks=[Poison()])
    assert len(history.epoch) == 2
    assert "no longer finite" in caplog.text
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_embeddings_not_finite_later_stop_with_the_best_weights(caplog):
    class Poison(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                kernel = self.model.embedder.layers[-2].kernel
                kernel.assign(np.full((4, 5), np.nan))

    callback, model, history = fitted(callbacks=[Poison()], patience=9)
    assert len(history.epoch) == 3
    assert "no longer finite" in caplog.text
    assert np.isfinite(model.embedder.get_weights()[-1]).all()
    assert callback.evaluate()["map_at_r"] == max(history.history["val_map_at_r"])


def test_divergence_in_the_first_epoch_goes_back_to_the_start():
    model = color_model()
    start = model.embedder.get_weights()
    model.optimizer.learning_rate = 1e30
    _, _, history = fitted(model=model)
    assert len(history.epoch) == 1
    for weight, before in zip(model.embedder.get_weights(), start, strict=True):
        np.testing.assert_array_equal(weight, before)


def test_bad_data_are_refused():
    with pytest.raises(ValueError, match="`pool labels`"):
        CCPCallback((TRAIN.images[:0], TRAIN.labels[:0]), UNSEEN)
    with pytest.raises(ValueError, match="pool"):
        CCPCallback((TRAIN.images, TRAIN.labels - 1), UNSEEN)
    for num_classes in (3, 5):
        callback = CCPCallback(TRAIN, UNSEEN)
        callback.set_model(color_model(num_classes=num_classes))
        with pytest.raises(ValueError, match="`pool` .* 4 classes from 0 to 3"):
            callback.on_train_begin()
    singles = CCPCallback(TRAIN, (UNSEEN.images[:2], np.array([0, 1])))
    singles.set_model(color_model())
    with pytest.raises(ValueError, match="query with a true reference"):
        singles.evaluate()


# ==== Validation on what is trained on ====

BYTES, LABELS = TRAIN.images, TRAIN.labels
FILES = Dataset([b"one", b"two"] * 8, LABELS)


def batches(images):
    return tf.data.Dataset.from_tensor_slices((images, LABELS)).batch(8)


STREAM = batches(BYTES)


@pytest.mark.parametrize(
    ("pool", "validation", "is_told"),
    [
        (TRAIN, TRAIN, True),
        (TRAIN, (BYTES, LABELS), True),
        ((BYTES, LABELS), (BYTES[4:], LABELS[4:]), True),
        (FILES, FILES, True),
        (STREAM, STREAM, True),
        ((BYTES[:4], LABELS[:4]), (BYTES[4:], LABELS[4:]), False),
        (*TRAIN.split_classes(2), False),
        (*FILES.split_classes(2), False),
        (STREAM, batches(BYTES), False),
        (STREAM, TRAIN, False),
        (FILES, TRAIN, False),
    ],
)
def test_validation_on_the_pool_is_told_of(pool, validation, is_told, caplog):
    CCPCallback(pool, validation)
    told = ["`validation` and `pool` share images" in m for m in caplog.messages]
    assert told == [True] * is_told


# ==== The hook ====


def test_callbacks_of_the_fit_hear_of_projections():
    class Listener(keras.callbacks.Callback):
        heard = ()

        def on_projection(self, best, is_last):
            current = self.model.get_weights()
            with at_best(self.model, best):
                map_at_r = self.model.evaluate(UNSEEN)["map_at_r"]
            assert map_at_r == best.map_at_r
            for weight, before in zip(self.model.get_weights(), current, strict=True):
                np.testing.assert_array_equal(weight, before)
            self.heard += ((int(self.model.num_projections), is_last),)

    listener = Listener()
    callback, model, _ = fitted(callbacks=[listener])
    count = callback.num_projections
    projections = [(i + 1, False) for i in range(count)]
    # The last problem is not told of where it was never evaluated.
    assert listener.heard in ((*projections, (count, True)), tuple(projections))
    assert callback is model.fit_callbacks[0] and listener in model.fit_callbacks


# ==== Warm-up ====


def warm_up_model():
    layers = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization()]
    layers = [keras.Input((8, 8, 3)), *layers, keras.layers.Conv2D(4, 3)]
    model = CCPModel(build_embedder(keras.Sequential(layers), embedding_dim=3), 4)
    # Adam keeps moments of all weights, so that a later phase must not surprise it.
    model.compile(keras.optimizers.Adam(1e-2), "contrastive", jit_compile=False)
    return model


WARM_UP_DATA = TRAIN.images.astype("float32"), TRAIN.labels


class Weights(keras.callbacks.Callback):
    """Remembers the weights after each epoch."""

    def on_train_begin(self, logs=None):
        self.history = [self.now()]

    def on_epoch_end(self, epoch, logs=None):
        self.history.append(self.now())

    def now(self):
        *rest, head = self.model.embedder.get_weights()
        return rest, [head], [self.model.proxies.numpy()]

    def changes(self):
        for before, after in zip(self.history, self.history[1:], strict=False):
            yield [
                sum((a != b).any() for a, b in zip(*parts, strict=True))
                for parts in zip(before, after, strict=True)
            ]


def test_warm_up_trains_the_head_and_the_proxies_alone():
    model, weights = warm_up_model(), Weights()
    model.fit(*WARM_UP_DATA, epochs=3, verbose=0, callbacks=[WarmUp(2), weights])
    first, second, third = weights.changes()
    # Batch-norm statistics stay too.
    assert first == second == [0, 1, 1]
    # All but the first bias, which batch normalisation takes away again: it moves by
    # rounding alone.
    assert third[0] >= len(weights.history[0][0]) - 1 and third[1:] == [1, 1]


def test_an_interrupted_warm_up_leaves_nothing_frozen():
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model, weights = warm_up_model(), Weights()
    with pytest.raises(KeyboardInterrupt):
        model.fit(*WARM_UP_DATA, verbose=0, callbacks=[WarmUp(1), Interrupt()])
    model.fit(*WARM_UP_DATA, verbose=0, callbacks=[weights])
    assert next(weights.changes())[0] > 1
