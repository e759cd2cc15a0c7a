"""CCPModel: its loss, its step, what it refuses, and how it is saved."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import CCPModel, build_embedder, losses
from keras_ccp.datasets import Dataset
from keras_ccp.pipeline import balanced_batches


def vector_model(dim, num_classes, proxies_per_class=1, **kwargs):
    """A model whose embedder gives its input back, (batch, 1, 1, dim) -> (batch, dim).

    A Dense layer with the unit matrix stands for the embedder's weights.
    """
    inputs = keras.Input((1, 1, dim))
    outputs = keras.layers.Dense(dim, use_bias=False, kernel_initializer="identity")(
        keras.layers.Flatten()(inputs)
    )
    embedder = keras.Model(inputs, outputs)
    return CCPModel(embedder, num_classes, proxies_per_class, **kwargs)


def small_model(num_classes=4, **kwargs):
    inputs = keras.Input((8, 8, 3), dtype="uint8")
    x = keras.layers.Rescaling(1 / 255)(inputs)
    x = keras.layers.Conv2D(4, 3, activation="relu")(x)
    x = keras.layers.BatchNormalization()(x)
    embedder = build_embedder(keras.Model(inputs, x), embedding_dim=5)
    return CCPModel(embedder, num_classes, **{"proxies_per_class": 2, **kwargs})


def small_data(num_classes=4, per_class=4):
    rng = np.random.default_rng(0)
    shape = (num_classes * per_class, 8, 8, 3)
    images = rng.integers(0, 256, shape, dtype="uint8")
    return Dataset(images, np.repeat(np.arange(num_classes), per_class))


def compiled(model, optimizer="adam", loss="multi_similarity", **kwargs):
    model.compile(optimizer, loss, **kwargs)
    return model


ORACLE_LOSSES = {
    "C2": losses.ContrastiveLoss(0.0, 0.5),
    "C1": losses.CosineContrastiveLoss(0.5, similarity="dot"),
    "MS": losses.MultiSimilarityLoss(2, 50, 0.5, similarity="dot"),
    "Triplet": losses.TripletLoss(0.05),
}


@pytest.mark.parametrize("name", ORACLE_LOSSES)
@pytest.mark.parametrize("weight", ["0", "0.1"])
def test_loss_of_a_step_equals_the_oracle(golden, name, weight):
    """Oracles CCP_<loss>_pair<W>_proxy1; the oracle's proxy rows are set-major."""
    embeddings = golden["in/ccp/emb"]
    model = vector_model(6, 10, 3, in_batch_weight=float(weight))
    compiled(model, loss=ORACLE_LOSSES[name])
    proxies = golden["in/ccp/proxies"].reshape(3, 10, 6).transpose(1, 0, 2)
    model.proxy_bank.assign(proxies)
    with tf.GradientTape() as tape:
        raw = tf.constant(embeddings)
        tape.watch(raw)
        loss = model.compute_loss(
            y=golden["in/ccp/labels"], y_pred=model.normalize(raw)
        )
    grad_raw, grad_proxies = tape.gradient(loss, [raw, model.proxy_bank.proxies.value])
    case = f"out/CCP_{name}_pair{weight}_proxy1"
    np.testing.assert_allclose(loss, golden[f"{case}/loss"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad_raw, golden[f"{case}/grad_emb"], atol=1e-5)
    np.testing.assert_allclose(
        np.transpose(grad_proxies, (1, 0, 2)).reshape(30, 6),
        golden[f"{case}/grad_proxies"],
        atol=1e-5,
    )


def test_gradient_of_the_proximal_term_equals_the_oracle(golden):
    """Oracle gt_after_distance: λ = .5 on the first two variables."""
    model = vector_model(2, 3, proximal_weight=0.5)
    values = [golden[f"in/gt_v_{i}"] for i in range(2)]
    frozen = [golden[f"in/gt_prev_{i}"] for i in range(2)]
    inputs = keras.Input((1, 1, 3))
    layer = keras.layers.Dense(2)
    flat = keras.layers.Flatten()(inputs)
    hidden = layer(flat)
    vector = keras.layers.Dense(4, use_bias=True)
    embedder = keras.Model(inputs, vector(hidden))
    # kernel (3, 2) is the first oracle variable, the bias (4,) the second.
    model = CCPModel(embedder, 3, proximal_weight=0.5)
    layer.kernel.assign(frozen[0])
    vector.bias.assign(frozen[1])
    model.take_snapshot()
    layer.kernel.assign(values[0])
    vector.bias.assign(values[1])
    with tf.GradientTape() as tape:
        loss = model.proximal_loss()
    gradients = tape.gradient(loss, [layer.kernel.value, vector.bias.value])
    for i, gradient in enumerate(gradients):
        expected = golden[f"out/gt_after_distance_{i}"] - golden[f"in/gt_g_{i}"]
        np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_proximal_loss_by_arithmetic():
    model = vector_model(2, 3, proximal_weight=0.2)
    assert float(model.proximal_loss()) == 0.0
    model.take_snapshot()
    assert float(model.proximal_loss()) == 0.0
    # The kernel moves from the unit matrix by (3, 0; 0, 4): .2 / 2 * (9 + 16) = 2.5
    model.embedder.set_weights([np.array([[4.0, 0.0], [0.0, 5.0]])])
    np.testing.assert_allclose(model.proximal_loss(), 2.5, rtol=1e-6)
    model.snapshot.drop()
    assert float(model.proximal_loss()) == 0.0


def test_snapshot_covers_trainable_weights_only():
    model = small_model()
    # conv kernel and bias, batch-norm scale and shift, dense kernel; no statistics
    shapes = [(3, 3, 3, 4), (4,), (4,), (4,), (4, 5)]
    assert [tuple(w.shape) for w in model.frozen_weights] == shapes
    assert not any(w.trainable for w in model.frozen_weights)


def test_snapshot_has_the_order_of_the_trainable_weights():
    model = small_model()
    model.take_snapshot()
    pairs = zip(model.frozen_weights, model.embedder.trainable_weights, strict=True)
    for frozen, weight in pairs:
        np.testing.assert_array_equal(frozen, weight)


@pytest.mark.parametrize("first", [True, False])
def test_layers_may_be_frozen_and_unfrozen_between_making_and_saving(first, tmp_path):
    embedder = small_model().embedder
    embedder.layers[1].trainable = first
    model = compiled(CCPModel(embedder, 4, 2))
    assert len(model.frozen_weights) == 5
    embedder.layers[1].trainable = not first
    compiled(model)
    model.take_snapshot()
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    for mine, theirs in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_terms_are_logged_apart_and_add_up():
    model = compiled(small_model(proximal_weight=10.0))
    model.take_snapshot()
    history = model.fit(
        balanced_batches(small_data(), 4, 2, seed=0),
        steps_per_epoch=3,
        epochs=2,
        verbose=0,
    ).history
    assert set(history) == {"loss", "pair_loss", "proximal_loss"}
    total = np.add(history["pair_loss"], history["proximal_loss"])
    np.testing.assert_allclose(history["loss"], total, rtol=1e-6)
    assert min(history["proximal_loss"]) > 0


def test_regularisers_of_the_embedder_count():
    inputs = keras.Input((1, 1, 2))
    outputs = keras.layers.Dense(
        2, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5)
    )(keras.layers.Flatten()(inputs))
    model = compiled(CCPModel(keras.Model(inputs, outputs), 2))
    x, y = np.ones((2, 1, 1, 2), "float32"), np.array([0, 1])
    logs = model.train_on_batch(x, y, return_dict=True)
    # .5 * (1 + 1 + 1 + 1) = 2
    np.testing.assert_allclose(logs["loss"] - logs["pair_loss"], 2.0, rtol=1e-5)


def test_without_proxies_the_loss_is_the_in_batch_loss():
    model = compiled(vector_model(3, 4, 0, in_batch_weight=0.1, normalization=None))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 1, 1, 3)).astype("float32")
    y = np.repeat(np.arange(4), 2)
    logs = model.train_on_batch(x, y, return_dict=True)
    expected = losses.MultiSimilarityLoss()(y, x[:, 0, 0])
    np.testing.assert_allclose(logs["pair_loss"], expected, rtol=1e-6)
    assert model.proxy_bank is None


@pytest.mark.parametrize("normalization", ["lipschitz", "l2", None])
def test_call_gives_normalised_embeddings(normalization):
    model = vector_model(2, 2, normalization=normalization)
    x = np.array([[3.0, 4.0], [0.3, 0.4]], "float32").reshape(2, 1, 1, 2)
    expected = {
        "lipschitz": [[0.6, 0.8], [0.3, 0.4]],
        "l2": [[0.6, 0.8], [0.6, 0.8]],
        None: [[3.0, 4.0], [0.3, 0.4]],
    }[normalization]
    np.testing.assert_allclose(model(x), expected, rtol=1e-6)


@pytest.mark.parametrize("loss", list(losses._BY_NAME))
def test_modes_take_the_same_steps(loss):
    start = small_model(in_batch_weight=0.5)
    start.take_snapshot()
    data = balanced_batches(small_data(), 3, 2, seed=0)
    weights = []
    for mode in ({}, {"run_eagerly": True}, {"jit_compile": True}):
        model = small_model(in_batch_weight=0.5)
        model.set_weights(start.get_weights())
        compiled(model, keras.optimizers.SGD(0.01), loss, **mode)
        model.fit(data, steps_per_epoch=2, verbose=0)
        weights.append(model.get_weights())
    # SoftTriple multiplies what float32 rounds (6e-8) by scale / gamma = 200.
    atol = 2e-5 if loss == "soft_triple" else 1e-5
    for graph, eager, jit in zip(*weights, strict=True):
        np.testing.assert_allclose(eager, graph, atol=atol)
        np.testing.assert_allclose(jit, graph, atol=atol)


@pytest.mark.parametrize(
    "optimizer",
    [
        "sgd",
        "adam",
        "adamw",
        "rmsprop",
        "nadam",
        "adagrad",
        "adamax",
        "lion",
        "ftrl",
        "adadelta",
        "adafactor",
    ],
)
def test_any_optimizer_moves_embedder_and_proxies(optimizer):
    model = compiled(small_model(), optimizer)
    before = [np.array(w) for w in model.trainable_weights]
    data = small_data()
    model.fit(data.images, data.labels, batch_size=8, verbose=0)
    for weight, old in zip(model.trainable_weights, before, strict=True):
        assert np.isfinite(weight).all()
        if weight is model.proxy_bank.proxies or weight.shape.rank == 4:
            assert not np.array_equal(weight, old)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_keeps_proxies_and_frozen_copy_wide(policy):
    keras.config.set_dtype_policy(policy)
    model = compiled(small_model())
    model.take_snapshot()
    data = balanced_batches(small_data(), 4, 2, seed=0)
    history = model.fit(data, steps_per_epoch=10, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert model.proxy_bank.proxies.dtype == "float32"
    assert {w.dtype for w in model.frozen_weights} == {"float32"}
    assert model(small_data().images).dtype == "float32"


def test_labels_of_a_large_class_keep_their_number_in_float16():
    """float16 would round 2049 to 2048, another class (11 bits of mantissa)."""
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(vector_model(2, 2050, normalization=None), loss="contrastive")
    proxies = np.full((2050, 1, 2), 9.0)
    proxies[2049] = [[1.0, 0.0]]
    model.proxy_bank.assign(proxies)
    x = np.array([[[[1.0, 0.0]]]], "float32")
    logs = model.train_on_batch(x, np.array([2049]), return_dict=True)
    assert logs["pair_loss"] == 0.0


def test_two_replicas_take_the_step_of_one():
    devices = tf.config.list_logical_devices("CPU")[:2]
    data = balanced_batches(small_data(), 4, 2, seed=0)
    results = []
    for strategy in (
        tf.distribute.get_strategy(),
        tf.distribute.MirroredStrategy([d.name for d in devices]),
    ):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = vector_model(192, 4, 2, proximal_weight=0.3)
            compiled(model, keras.optimizers.SGD(0.1), "contrastive")
        model.take_snapshot()
        flat = data.map(lambda x, y: (tf.reshape(x, (-1, 1, 1, 192)) / 255, y))
        history = model.fit(flat, steps_per_epoch=3, verbose=0)
        results.append((history.history, model.get_weights()))
    for name, values in results[0][0].items():
        np.testing.assert_allclose(results[1][0][name], values, rtol=1e-5)
    for one, two in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_allclose(two, one, atol=1e-5)


# ==== Evaluation ====


def test_validation_data_of_unseen_classes_report_retrieval():
    model = compiled(small_model())
    train, unseen = small_data(7).split_classes(4)
    history = model.fit(
        train.images,
        train.labels,
        batch_size=8,
        verbose=0,
        epochs=2,
        validation_data=(unseen.images, unseen.labels + 40),
    ).history
    direct = model.evaluate(unseen.images, unseen.labels)
    assert history["val_map_at_r"][-1] == direct["map_at_r"]
    assert direct["num_queries"] == len(unseen)
    assert model.evaluate(unseen) == direct
    history = model.fit(
        train.images, train.labels, verbose=0, validation_data=unseen
    ).history
    assert history["val_map_at_r"] == [model.evaluate(unseen)["map_at_r"]]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"labels": np.arange(8)}, "`validation_data` must have classes of two images"),
        ({"labels": np.zeros(7, int)}, "8 images and 7 labels"),
        ({"images": np.zeros((8, 3, 3, 3), "uint8")}, "`validation_data` must hold im"),
    ],
)
def test_wrong_validation_data_are_refused_before_the_first_step(change, message):
    model = compiled(small_model())
    train, _ = small_data(7).split_classes(4)
    given = {"images": train.images[:8], "labels": np.zeros(8, int)} | change
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda *_: steps.append(1)
    )
    with pytest.raises(ValueError, match=message):
        model.fit(
            train.images,
            train.labels,
            verbose=0,
            callbacks=[count],
            validation_data=(given["images"], given["labels"]),
        )
    assert not steps


def test_test_on_batch_says_what_to_use():
    model = compiled(small_model())
    data = small_data()
    with pytest.raises(ValueError, match="model.evaluate"):
        model.test_on_batch(data.images, data.labels)


# ==== Saving ====

NEXT_STEP = """
import pathlib, sys
import keras, numpy as np
import keras_ccp
folder = pathlib.Path(sys.argv[1])
data = np.load(folder / "data.npz")
for path in folder.glob("*.keras"):
    model = keras.saving.load_model(path)
    logs = model.train_on_batch(data["x"], data["y"], return_dict=True)
    logs = [logs[name] for name in sorted(logs)]
    np.savez(path.with_suffix(".npz"), *logs, *model.get_weights())
"""


def test_saved_models_take_the_same_next_step_in_a_new_process(tmp_path):
    data = small_data()
    x, y = data.images[::2], data.labels[::2]
    np.savez(tmp_path / "data.npz", x=x, y=y)
    models = {}
    for name in losses._BY_NAME:
        model = small_model(in_batch_weight=0.3, proximal_weight=0.7)
        compiled(model, keras.optimizers.Adam(3e-3), name)
        model.fit(data.images, data.labels, batch_size=8, verbose=0)
        model.take_snapshot()
        model.num_projections.assign(3)
        model.fit(data.images, data.labels, batch_size=8, verbose=0)
        models[f"ccp_{name}"] = model
        # The same loss in a plain model, inside a batch.
        plain = keras.models.clone_model(model.embedder)
        plain.compile(keras.optimizers.Adam(3e-3), losses.get(name))
        plain.fit(data.images, data.labels, batch_size=8, verbose=0)
        models[f"plain_{name}"] = plain
    for name, model in models.items():
        model.save(tmp_path / f"{name}.keras")
    subprocess.run([sys.executable, "-c", NEXT_STEP, str(tmp_path)], check=True)
    for name, model in models.items():
        model.reset_metrics()  # Keras before 3.15 goes on with the means of fit.
        logs = model.train_on_batch(x, y, return_dict=True)
        here = [logs[key] for key in sorted(logs)] + model.get_weights()
        with np.load(tmp_path / f"{name}.npz") as there:
            for mine, key in zip(here, there.files, strict=True):
                np.testing.assert_array_equal(there[key], mine, err_msg=name)


def test_config_is_the_inverse_of_the_constructor():
    model = small_model(
        proxies_per_class=3,
        proximal_weight=0.1,
        in_batch_weight=0.2,
        normalization="l2",
        name="mine",
    )
    again = CCPModel.from_config(model.get_config())
    assert again.get_config() == model.get_config()
    assert [w.shape for w in again.weights] == [w.shape for w in model.weights]


def test_export_is_the_embedder_alone(tmp_path):
    images = small_data().images
    sizes = {}
    for num_classes in (4, 5000):
        model = small_model(num_classes=num_classes)
        path = tmp_path / str(num_classes)
        model.export(path, verbose=False)
        sizes[num_classes] = sum(f.stat().st_size for f in path.rglob("*"))
        loaded = tf.saved_model.load(path)
        np.testing.assert_allclose(loaded.serve(images), model(images), atol=1e-6)
    # The proxies of 5,000 classes alone would take 5000 * 2 * 5 * 4 = 200,000 bytes.
    assert abs(sizes[5000] - sizes[4]) < 1000


# ==== What is refused ====


def bad(labels):
    data = small_data()
    return data.images, labels(data.labels)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (lambda y: y + 1, ValueError, r"from 0 to 3 \(num_classes=4\).*label 4"),
        (lambda y: y - 1, ValueError, "negative"),
        (lambda y: np.where(y == 2, np.nan, y), ValueError, "NaN"),
        (lambda y: y[:-1], ValueError, "same length"),
        (lambda y: np.eye(4)[y], ValueError, r"shape \(n,\) or \(n, 1\)"),
        (lambda y: y.astype(str), TypeError, "integers"),
    ],
)
def test_bad_labels_are_refused_before_a_step(labels, error, message):
    model = compiled(small_model())
    before = [np.array(w) for w in model.weights]
    with pytest.raises(error, match=message):
        model.fit(*bad(labels), verbose=0)
    for weight, old in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight, old)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("wrong", [4, -1])
def test_bad_label_in_a_later_batch_of_tf_data(jit_compile, wrong):
    model = compiled(small_model(), jit_compile=jit_compile)
    data = small_data()
    labels = data.labels.copy()
    labels[-1] = wrong
    batches = tf.data.Dataset.from_tensor_slices((data.images, labels)).batch(4)
    with pytest.raises(ValueError, match="`y` must hold .*labels from 0 to 3") as info:
        model.fit(batches, verbose=0)
    assert "Graph execution error" not in str(info.value)
    assert all(np.isfinite(w).all() for w in model.get_weights())


class Items(keras.utils.PyDataset):
    """Three batches, the last of which has a bad label."""

    def __init__(self):
        super().__init__()
        self.data = small_data()

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.data.images[:4], self.data.labels[:4] + (9 if index == 2 else 0)


def test_bad_label_in_a_later_batch_of_other_sources():
    def generator():
        for index in range(3):
            yield Items()[index]

    for source in (Items(), generator()):
        model = compiled(small_model())
        with pytest.raises(ValueError, match="^`y` must hold labels .* label 9 ") as e:
            model.fit(source, verbose=0, shuffle=False)
        assert "Graph execution" not in str(e.value)
    with pytest.raises(ValueError, match="`y` must hold labels .* label 9 "):
        model.train_on_batch(*Items()[2])


def test_sample_weights_are_refused():
    model = compiled(small_model())
    data = small_data()
    weights = np.ones(len(data), "float32")
    with pytest.raises(ValueError, match="`sample_weight` is not supported"):
        model.fit(data.images, data.labels, sample_weight=weights)
    with pytest.raises(ValueError, match="`class_weight` is not supported"):
        model.fit(data.images, data.labels, class_weight={0: 1.0})
    batches = tf.data.Dataset.from_tensor_slices((data.images, data.labels, weights))
    with pytest.raises(ValueError, match="`sample_weight` is not supported"):
        model.fit(batches.batch(4))
    with pytest.raises(ValueError, match="`sample_weight` is not supported"):
        model.train_on_batch(data.images, data.labels, sample_weight=weights)


def test_images_must_fit():
    model = compiled(small_model())
    y = np.arange(4)
    mixed = [np.zeros((s, s, 3), "uint8") for s in (8, 8, 9, 8)]
    with pytest.raises(TypeError, match="images of the same size"):
        model.fit(mixed, y)
    with pytest.raises(ValueError, match=r"shape \(8, 8, 3\)"):
        model.fit(np.zeros((4, 9, 9, 3), "uint8"), y)
    with pytest.raises(TypeError, match="`y` must be given"):
        model.fit(np.zeros((4, 8, 8, 3), "uint8"))


def test_data_that_end_early_stop_in_good_order():
    data = small_data()

    def generator():
        for _ in range(5):
            yield data.images[:8], data.labels[:8]

    model = compiled(small_model())
    message = "`x` must give data for 3 steps in each epoch.*after 2 steps of epoch 2"
    with pytest.warns(UserWarning, match="ran out of data"):
        with pytest.raises(ValueError, match=message):
            model.fit(generator(), steps_per_epoch=3, epochs=4, verbose=0)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    with pytest.raises(ValueError, match="at least one batch"):
        model.fit((_ for _ in ()), steps_per_epoch=1)


def test_endless_data_need_a_number_of_steps():
    model = compiled(small_model())
    with pytest.raises(ValueError, match="`steps_per_epoch` must be given"):
        model.fit(balanced_batches(small_data(), 2, 2))


@pytest.mark.parametrize("steps", [0, -1])
def test_number_of_steps_must_be_positive(steps):
    model = compiled(small_model())
    with pytest.raises(ValueError, match="`steps_per_epoch` must be at least 1"):
        model.fit(balanced_batches(small_data(), 2, 2), steps_per_epoch=steps)


def test_evaluate_refuses_images_of_another_size():
    model = compiled(small_model())
    data = small_data()
    model.evaluate(data)
    with pytest.raises(ValueError, match=r"`x` must hold images of shape \(8, 8, 3\)"):
        model.evaluate(data.images[:, :4], data.labels)


def test_images_must_be_finite():
    inputs = keras.Input((8, 8, 3))
    backbone = keras.Model(inputs, keras.layers.Conv2D(2, 3)(inputs))
    model = compiled(CCPModel(build_embedder(backbone, 3), 4))
    images = small_data().images.astype("float32")
    images[5, 0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="`x` must .* the first at 5"):
        model.fit(images, small_data().labels)


def test_nothing_to_train_is_said():
    model = small_model(proxies_per_class=0)
    model.embedder.trainable = False
    compiled(model)
    with pytest.raises(ValueError, match="something to train"):
        model.fit(small_data().images, small_data().labels)


def test_arguments_of_fit_may_be_positional():
    model = compiled(small_model())
    data = small_data()
    stop = keras.callbacks.EarlyStopping("loss")
    history = model.fit(data.images, data.labels.tolist(), 8, 2, 0, [stop])
    assert len(history.epoch) == 2
    with pytest.raises(TypeError, match="`callbacks` must be a list"):
        model.fit(data.images, data.labels, callbacks=["x"])
    with pytest.raises(TypeError, match="`y` must be left out"):
        model.fit(balanced_batches(data, 2, 2), data.labels)


def test_what_the_loss_does_not_use_is_refused():
    with pytest.raises(ValueError, match="`loss_weights` is not supported"):
        compiled(small_model(), loss_weights=2.0)
    with pytest.raises(ValueError, match="compile"):
        small_model().fit(small_data().images, small_data().labels)


class ScalarLoss(losses.PairLoss):
    def pairs(self, labels, embeddings, *references, exclude_self=False):
        return tf.reduce_sum(embeddings)


def test_scalar_loss_is_refused():
    model = small_model()
    model.compile("adam", ScalarLoss(), jit_compile=False)
    with pytest.raises(ValueError, match=r"one value a sample, shape \(batch,\)"):
        model.train_on_batch(small_data().images, small_data().labels)


@pytest.mark.parametrize("loss", ["mse", None, 3, keras.losses.MeanSquaredError()])
def test_other_losses_are_refused_at_compile(loss):
    with pytest.raises((TypeError, ValueError), match="multi_similarity"):
        small_model().compile("adam", loss)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_classes": 0}, "`num_classes` must be"),
        ({"num_classes": 2.5}, "`num_classes` must be"),
        ({"proxies_per_class": -1}, "`proxies_per_class` must be"),
        ({"proximal_weight": -1.0}, "`proximal_weight` must be"),
        ({"proximal_weight": np.nan}, "`proximal_weight` must be"),
        ({"in_batch_weight": np.inf}, "`in_batch_weight` must be"),
        ({"normalization": "L2"}, "`normalization` must be"),
    ],
)
def test_bad_arguments_are_refused(kwargs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        small_model(**kwargs)


def test_embedder_must_be_built():
    with pytest.raises(ValueError, match="`embedder` must be built"):
        CCPModel(keras.Sequential([keras.layers.Dense(2)]), 3)
    with pytest.raises(TypeError, match="`embedder` must be a Functional"):
        CCPModel(keras.layers.Dense(2), 3)
    inputs = keras.Input((8, 8, 3))
    with pytest.raises(ValueError, match="one vector an image"):
        CCPModel(keras.Model(inputs, keras.layers.Conv2D(2, 3)(inputs)), 3)


def test_proxies_are_checked():
    model = small_model()
    with pytest.raises(ValueError, match=r"must have shape \(4, 2, 5\)"):
        model.proxy_bank.assign(np.zeros((2, 4, 5)))
    broken = np.zeros((4, 2, 5))
    broken[3, 0, 1] = np.nan
    with pytest.raises(ValueError, match="1 classes, the first is class 3"):
        model.proxy_bank.assign(broken)


# ==== The proxies' own learning rate ====


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_proxies_have_a_learning_rate_of_their_own(policy):
    # Adam's first step is the learning rate, whatever the gradient is.
    keras.config.set_dtype_policy(policy)
    embedder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model = CCPModel(embedder, 2, 1, proxy_learning_rate_multiplier=100.0)
    model.compile(keras.optimizers.Adam(1e-3), "contrastive", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    before = model.proxy_bank.proxies.numpy(), model.embedder.get_weights()[0]
    model.train_on_batch(x, np.arange(8) % 2)
    moved = np.abs(model.proxy_bank.proxies.numpy() - before[0])
    np.testing.assert_allclose(moved, 0.1, rtol=1e-3)
    moved = np.abs(model.embedder.get_weights()[0] - before[1])
    np.testing.assert_allclose(moved, 0.001, rtol=1e-2)


def test_compiling_anew_drops_the_memory_of_the_loss_before():
    embedder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model = CCPModel(embedder, 2, proxies_per_class=0)
    model.compile("sgd", losses.CrossBatchMemory("contrastive", size=8))
    count = len(model.weights)
    model.compile("sgd", losses.CrossBatchMemory("contrastive", size=16))
    assert len(model.weights) == count
    model.compile("sgd", "contrastive")
    assert len(model.weights) == count - 4


def test_a_memory_that_is_never_used_is_refused():
    embedder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = losses.CrossBatchMemory("contrastive", size=8)
    with pytest.raises(ValueError, match="in_batch_weight=0"):
        CCPModel(embedder, 2, 1).compile("sgd", loss)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_weight_decay_is_l2_in_the_gradient(policy):
    # SGD(0.1), decay 0.5: beside the gradient's step each weight loses 5 % of itself.
    keras.config.set_dtype_policy(policy)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    results = []
    for decay in (0.0, 0.5):
        keras.utils.set_random_seed(0)
        embedder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model = CCPModel(embedder, 2, 1, weight_decay=decay)
        model.compile(keras.optimizers.SGD(0.1), "contrastive", jit_compile=False)
        before = [weight.numpy() for weight in model.trainable_weights]
        model.train_on_batch(x, np.arange(8) % 2)
        results.append([weight.numpy() for weight in model.trainable_weights])
    for start, plain, decayed in zip(before, *results, strict=True):
        np.testing.assert_allclose(decayed, plain - 0.05 * start, atol=1e-6)


def test_a_memory_in_use_serves_no_second_model():
    loss = losses.CrossBatchMemory("contrastive", size=8)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    embedder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model = CCPModel(embedder, 2, proxies_per_class=0)
    model.compile("sgd", loss, jit_compile=False)
    model.train_on_batch(x, np.arange(8) % 2)
    model.compile("sgd", loss)  # the same model goes on with its memory
    with pytest.raises(ValueError, match="new CrossBatchMemory for each model"):
        CCPModel(embedder, 2, proxies_per_class=0).compile("sgd", loss)
