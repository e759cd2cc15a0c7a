"""CCPModel: its loss, its step, what it refuses, and how it is saved."""

import functools
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import color_data, small_model

from keras_ccp import CCPCallback, CCPModel, build_embedder, losses
from keras_ccp.backbones import resnet20_v2, small_cnn
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


def dense_model(num_classes=2, proxies_per_class=1, **kwargs):
    """Four numbers to three."""
    embedder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    return CCPModel(embedder, num_classes, proxies_per_class, **kwargs)


FOURS = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


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
    model.proxies.assign(proxies)
    with tf.GradientTape() as tape:
        raw = tf.constant(embeddings)
        tape.watch(raw)
        loss = model.compute_loss(
            y=golden["in/ccp/labels"], y_pred=model.normalize(raw)
        )
    grad_raw, grad_proxies = tape.gradient(loss, [raw, model.proxies.value])
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
    values = [golden[f"in/gt_v_{i}"] for i in range(2)]
    frozen = [golden[f"in/gt_prev_{i}"] for i in range(2)]
    layer, vector = keras.layers.Dense(2), keras.layers.Dense(4)
    embedder = keras.Sequential([keras.Input((3,)), layer, vector])
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
    model.drop_snapshot()
    assert float(model.proximal_loss()) == 0.0


def test_snapshot_is_of_the_trainable_weights_in_their_order():
    model = small_model()
    model.take_snapshot()
    # conv kernel and bias, batch-norm scale and shift, dense kernel; no statistics
    shapes = [(3, 3, 3, 4), (4,), (4,), (4,), (4, 5)]
    assert [tuple(w.shape) for w in model.frozen_weights] == shapes
    pairs = zip(model.frozen_weights, model.embedder.trainable_weights, strict=True)
    for frozen, weight in pairs:
        assert not frozen.trainable
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
        balanced_batches(color_data(), 4, 2, seed=0),
        steps_per_epoch=3,
        epochs=2,
        verbose=0,
    ).history
    assert set(history) == {"loss", "pair_loss", "proximal_loss"}
    total = np.add(history["pair_loss"], history["proximal_loss"])
    np.testing.assert_allclose(history["loss"], total, rtol=1e-6)
    assert min(history["proximal_loss"]) > 0


def test_regularisers_of_the_embedder_count():
    penalty = keras.regularizers.L2(0.5)
    dense = keras.layers.Dense(2, kernel_initializer="ones", kernel_regularizer=penalty)
    model = compiled(CCPModel(keras.Sequential([keras.Input((2,)), dense]), 2))
    x, y = np.ones((2, 2), "float32"), np.array([0, 1])
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
    assert model.proxies is None


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


# Those that are left out have the formula of one that is here.
LOSSES = [n for n in losses._BY_NAME if n not in ("cos_face", "n_pairs", "sup_con")]


@pytest.mark.parametrize("loss", LOSSES)
def test_modes_take_the_same_steps(loss):
    start = small_model(in_batch_weight=0.5)
    start.take_snapshot()
    data = balanced_batches(color_data(), 3, 2, seed=0)
    weights = []
    for mode in ({}, {"run_eagerly": True}, {"jit_compile": True}):
        model = small_model(in_batch_weight=0.5)
        model.set_weights(start.get_weights())
        compiled(model, keras.optimizers.SGD(0.01), loss, **mode)
        model.fit(data, steps_per_epoch=2, verbose=0)
        weights.append(model.get_weights())
    # What float32 rounds (6e-8) is multiplied by scale / gamma = 200 of SoftTriple, and
    # by gamma (1 + margin) = 112 of circle, in the loss and in its gradient.
    atol = {"soft_triple": 2e-5, "circle": 5e-5}.get(loss, 1e-5)
    for graph, eager, jit in zip(*weights, strict=True):
        np.testing.assert_allclose(eager, graph, atol=atol)
        np.testing.assert_allclose(jit, graph, atol=atol)


OPTIMIZERS = """sgd adam adamw rmsprop nadam adagrad adamax lion ftrl adadelta
adafactor""".split()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_moves_embedder_and_proxies(optimizer):
    model = compiled(small_model(), optimizer)
    before = [np.array(w) for w in model.trainable_weights]
    data = color_data()
    model.fit(data.images, data.labels, batch_size=8, verbose=0)
    for weight, old in zip(model.trainable_weights, before, strict=True):
        assert np.isfinite(weight).all()
        if weight is model.proxies or weight.shape.rank == 4:
            assert not np.array_equal(weight, old)


def test_labels_of_a_large_class_keep_their_number_in_float16():
    """float16 would round 2049 to 2048, another class (11 bits of mantissa)."""
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(vector_model(2, 2050, normalization=None), loss="contrastive")
    proxies = np.full((2050, 1, 2), 9.0)
    proxies[2049] = [[1.0, 0.0]]
    model.proxies.assign(proxies)
    x = np.array([[[[1.0, 0.0]]]], "float32")
    logs = model.train_on_batch(x, np.array([2049]), return_dict=True)
    assert logs["pair_loss"] == 0.0


# ==== Evaluation ====


def test_validation_data_of_unseen_classes_report_retrieval():
    model = compiled(small_model())
    train, unseen = color_data(7).split_classes(4)
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
    ("data", "message"),
    [
        ((np.zeros((8, 8, 8, 3), "uint8"), np.zeros(7, int)), "7 labels for 8 rows"),
        ((np.zeros((8, 3, 3, 3), "uint8"), np.zeros(8, int)), r"shape=\(8, 3, 3, 3\)"),
    ],
)
def test_wrong_validation_data_are_refused_before_the_first_step(data, message):
    model, training = compiled(small_model()), color_data()
    with pytest.raises(ValueError, match=message):
        model.fit(training.images, training.labels, validation_data=data)
    assert model.optimizer.iterations == 0
    with pytest.raises(ValueError, match=message):
        model.evaluate(*data)


def test_validation_data_beside_a_ccp_callback_are_refused():
    model, (training, unseen) = compiled(small_model()), color_data(7).split_classes(4)
    with pytest.raises(ValueError, match="`validation_data` must be left out beside"):
        model.fit(
            training.images,
            training.labels,
            validation_data=unseen,
            callbacks=CCPCallback(training, unseen),
        )
    assert model.optimizer.iterations == 0


def test_steps_per_execution_must_divide_the_steps():
    model, data = small_model(), color_data()
    model.compile("sgd", "contrastive", steps_per_execution=3)
    batches = tf.data.Dataset.from_tensors((data.images[:8], data.labels[:8])).repeat()
    with pytest.raises(ValueError, match="must divide.*Received: 3 for 10\n"):
        model.fit(batches, steps_per_epoch=10)
    model.fit(batches, steps_per_epoch=6, verbose=0)
    assert model.optimizer.iterations == 6


def test_test_on_batch_says_what_to_use():
    model = compiled(small_model())
    data = color_data()
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
    data = color_data()
    x, y = data.images[::2], data.labels[::2]
    np.savez(tmp_path / "data.npz", x=x, y=y)
    models = {}
    # What is saved of a loss is its configuration: tests/test_contract.py has them all.
    for name in ("contrastive", "multi_similarity", "soft_triple", "arc_face"):
        model = small_model(in_batch_weight=0.3, proximal_weight=0.7)
        compiled(model, keras.optimizers.Adam(3e-3), name)
        model.fit(data.images, data.labels, batch_size=8, verbose=0)
        model.take_snapshot()
        model.num_projections.assign(3)
        model.fit(data.images, data.labels, batch_size=8, verbose=0)
        models[f"ccp_{name}"] = model
        if name not in ("contrastive", "soft_triple"):
            continue
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


def test_export_is_the_embedder_alone(tmp_path):
    images = color_data().images
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


# ==== What would be silently wrong ====


class Items(keras.utils.PyDataset):
    """Batches of four in order."""

    def __init__(self, x, y):
        super().__init__()
        self.data = x, y

    def __len__(self):
        return len(self.data[0]) // 4

    def __getitem__(self, index):
        return tuple(part[4 * index : 4 * index + 4] for part in self.data)


SOURCES = {
    "arrays": lambda m, x, y: m.fit(x, y, batch_size=4, verbose=0, shuffle=False),
    "tf.data": lambda m, x, y: m.fit(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(4), verbose=0
    ),
    "generator": lambda m, x, y: m.fit(
        (Items(x, y)[i] for i in range(len(x) // 4)),
        steps_per_epoch=len(x) // 4,
        verbose=0,
    ),
    "PyDataset": lambda m, x, y: m.fit(Items(x, y), verbose=0, shuffle=False),
    "batch": lambda m, x, y: m.train_on_batch(x, y),
}


MODES = {"jit_compile": True}, {"run_eagerly": True}
WAYS = [(source, {"jit_compile": False}) for source in SOURCES]
WAYS += [(source, mode) for source in ("arrays", "batch") for mode in MODES]


@pytest.mark.parametrize("source, mode", WAYS)
def test_label_of_no_class_is_refused_in_its_step(source, mode):
    data = color_data()
    for wrong in (4, -1):
        model = compiled(small_model(), **mode)
        before = model.get_weights()
        labels = data.labels.copy()
        labels[-1] = wrong
        with pytest.raises(
            ValueError, match="`y` must hold labels from 0 to 3"
        ) as info:
            SOURCES[source](model, data.images, labels)
        message = str(info.value)
        assert str(wrong) in message and len(message.splitlines()) == 2
        assert all(np.isfinite(w).all() for w in model.get_weights())
        # The step is not taken; those before it are.
        steps = 0 if source == "batch" else 3
        assert model.optimizer.iterations == steps
        if not steps:
            for weight, old in zip(model.get_weights(), before, strict=True):
                np.testing.assert_array_equal(weight, old)


@pytest.mark.parametrize("source", SOURCES)
def test_labels_that_are_no_integers_are_refused(source):
    model, data = compiled(small_model()), color_data()
    for labels in (np.eye(4)[data.labels], np.eye(4, dtype=int)[data.labels]):
        with pytest.raises(ValueError, match="one an image.*4\\).*\n.*argmax"):
            SOURCES[source](model, data.images, labels)
    with pytest.raises(ValueError, match="`y` must be integers.*float32"):
        SOURCES[source](model, data.images, data.labels.astype("float32"))
    with pytest.raises(ValueError, match="`y` must be integers.*None"):
        model.fit(data.images, verbose=0)
    assert model.optimizer.iterations == 0


def test_labels_of_any_integer_type_are_taken():
    model = compiled(vector_model(2, 256), jit_compile=False)
    x, y = np.ones((4, 1, 1, 2), "float32"), np.array([0, 7, 254, 255])
    weights = model.get_weights()
    losses_of_types = []
    for dtype in ("uint8", "int16", "int32", "int64", "uint32"):
        model.set_weights(weights)
        model.reset_metrics()
        logs = model.train_on_batch(x, y.astype(dtype)[:, None], return_dict=True)
        losses_of_types.append(logs["loss"])
    assert len(set(losses_of_types)) == 1
    with pytest.raises(ValueError, match="labels of 0 to 4294967296"):
        model.train_on_batch(x, np.array([0, 1, 2, 2**32]))


def test_sample_weights_are_refused():
    model, data = compiled(small_model()), color_data()
    weights = np.ones(len(data), "float32")
    batches = tf.data.Dataset.from_tensor_slices((data.images, data.labels, weights))
    for given in (
        ((data.images, data.labels), {"sample_weight": weights}),
        ((data.images, data.labels), {"class_weight": {0: 1.0}}),
        ((batches.batch(4),), {}),
    ):
        with pytest.raises(ValueError, match="`sample_weight` and `class_weight` must"):
            model.fit(*given[0], **given[1])


def test_data_that_end_early_stop_in_good_order():
    data = color_data()

    def generator():
        for _ in range(5):
            yield data.images[:8], data.labels[:8]

    model = compiled(small_model())
    message = "`x` must give data for 3 steps in each epoch.*after 2 steps of epoch 2"
    with pytest.warns(UserWarning, match="ran out of data"):
        with pytest.raises(ValueError, match=message):
            model.fit(generator(), steps_per_epoch=3, epochs=4, verbose=0)
    assert all(np.isfinite(w).all() for w in model.get_weights())


@pytest.mark.parametrize("steps", [None, 0, -1])
def test_endless_data_need_a_number_of_steps(steps):
    model = compiled(small_model())
    with pytest.raises(ValueError, match="`steps_per_epoch` must be given"):
        model.fit(balanced_batches(color_data(), 2, 2), steps_per_epoch=steps)


def test_nothing_to_train_is_said():
    model = small_model(proxies_per_class=0)
    model.embedder.trainable = False
    compiled(model)
    with pytest.raises(ValueError, match="something to train"):
        model.fit(color_data().images, color_data().labels)


@pytest.mark.parametrize("argument", ["metrics", "weighted_metrics", "loss_weights"])
def test_compile_refuses_what_has_no_meaning(argument):
    with pytest.raises(ValueError, match=f"`{argument}` must be left out.*\n.*MAP@R"):
        compiled(small_model(), **{argument: ["accuracy"]})
    compiled(small_model(), **{argument: None}, run_eagerly=True)


@pytest.mark.parametrize("loss", ["mse", None, 3, keras.losses.MeanSquaredError()])
def test_other_losses_are_refused_at_compile(loss):
    with pytest.raises((TypeError, ValueError), match="multi_similarity"):
        small_model().compile("adam", loss)


def test_wrong_references_and_embedders_are_refused():
    with pytest.raises(ValueError, match="`references` must be"):
        small_model(references="images")
    inputs = keras.Input((8, 8, 3))
    with pytest.raises(ValueError, match="`embedder` must give vectors"):
        CCPModel(keras.Model(inputs, keras.layers.Conv2D(2, 3)(inputs)), 3)
    with pytest.raises(ValueError, match="unpack"):  # the first would be taken
        CCPModel(keras.Model(inputs, [inputs, inputs]), 3)


# ==== Pixels of another range ====

LABELS = np.arange(8) % 2
BYTES = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3)).astype("uint8")
UNIT = BYTES.astype("float32") / 255


def pixel_model(dtype, *first):
    layers = [*first, keras.layers.Conv2D(2, 3)]
    backbone = keras.Sequential([keras.Input((4, 4, 3), dtype=dtype), *layers])
    return compiled(CCPModel(build_embedder(backbone, 2), 2), "sgd", "triplet")


WAYS_IN = {
    **SOURCES,
    "balanced": lambda m, x, y: m.fit(
        balanced_batches(Dataset(x, y), 2, 2), steps_per_epoch=1, verbose=0
    ),
    "evaluate": lambda m, x, y: m.evaluate(x, y),
    "evaluate Dataset": lambda m, x, y: m.evaluate(Dataset(x, y)),
    "validation": lambda m, x, y: m.fit(BYTES, y, validation_data=(x, y), verbose=0),
    "pool": lambda m, x, y: m.fit(
        BYTES, y, callbacks=[CCPCallback((x, y), (BYTES.copy(), y))], verbose=0
    ),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_every_way_in_refuses_pixels_that_integers_cannot_hold(way):
    model = pixel_model("uint8", keras.layers.Rescaling(1 / 255))
    for images in (UNIT, 2 * UNIT - 1, BYTES - 40.0, BYTES + 40.0):
        with pytest.raises(ValueError, match="pixels of 0 to 255.*\n.* \\* 255"):
            WAYS_IN[way](model, images.astype("float32"), LABELS)
    assert model.optimizer.iterations == 0
    for images in (BYTES, BYTES // 255, BYTES.astype("float32"), 0 * UNIT):
        WAYS_IN[way](model, images, LABELS)


@pytest.mark.parametrize(
    ("layer", "is_told"),
    [
        (keras.layers.Rescaling(1 / 255), True),
        # Inside another model, as the preprocessing of a backbone is.
        (
            keras.Sequential(
                [keras.Input((4, 4, 3)), keras.layers.Rescaling([1 / 60] * 3, -2.0)]
            ),
            True,
        ),
        (keras.layers.Rescaling(2.0, -1), False),  # 0..1 to -1..1
        (keras.layers.Normalization(mean=0.5, variance=1.0), False),
    ],
)
def test_dark_images_are_told_of_where_the_embedder_rescales(layer, is_told, caplog):
    model = pixel_model("float32", layer)
    model.evaluate(UNIT, LABELS)
    assert ["looks like pixels of 0 to 1" in m for m in caplog.messages] == (
        [True] * is_told
    )
    caplog.clear()
    for images in (BYTES, BYTES.astype("float32"), 0 * UNIT):
        model.evaluate(images, LABELS)
    assert not caplog.messages


# ==== The proxies' own learning rate ====


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_proxies_have_a_learning_rate_of_their_own(policy):
    # Adam's first step is the learning rate, whatever the gradient is.
    keras.config.set_dtype_policy(policy)
    model = dense_model(proxy_learning_rate_multiplier=100.0)
    model.compile(keras.optimizers.Adam(1e-3), "contrastive", jit_compile=False)
    before = model.proxies.numpy(), model.embedder.get_weights()[0]
    model.train_on_batch(FOURS, np.arange(8) % 2)
    moved = np.abs(model.proxies.numpy() - before[0])
    np.testing.assert_allclose(moved, 0.1, rtol=1e-3)
    moved = np.abs(model.embedder.get_weights()[0] - before[1])
    np.testing.assert_allclose(moved, 0.001, rtol=1e-2)


def test_a_memory_is_of_one_compiled_model():
    loss = losses.CrossBatchMemory("contrastive", size=8)
    with pytest.raises(ValueError, match="in_batch_weight=0"):  # it is never used
        dense_model().compile("sgd", loss)
    model = dense_model(proxies_per_class=0)
    model.compile("sgd", losses.CrossBatchMemory("contrastive", size=16))
    count = len(model.weights)
    # Compiling again drops the memory of the loss before.
    model.compile("sgd", loss, jit_compile=False)
    assert len(model.weights) == count
    model.train_on_batch(FOURS, np.arange(8) % 2)
    model.compile("sgd", loss)  # the same model goes on with its memory
    with pytest.raises(ValueError, match="new CrossBatchMemory for each model"):
        dense_model(proxies_per_class=0).compile("sgd", loss)
    model.compile("sgd", "contrastive")
    assert len(model.weights) == count - 4


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_weight_decay_is_l2_in_the_gradient(policy):
    # SGD(0.1), decay 0.5: beside the gradient's step each weight loses 5 % of itself.
    keras.config.set_dtype_policy(policy)
    results = []
    for decay in (0.0, 0.5):
        keras.utils.set_random_seed(0)
        model = dense_model(weight_decay=decay)
        model.compile(keras.optimizers.SGD(0.1), "contrastive", jit_compile=False)
        before = [weight.numpy() for weight in model.trainable_weights]
        model.train_on_batch(FOURS, np.arange(8) % 2)
        results.append([weight.numpy() for weight in model.trainable_weights])
    for start, plain, decayed in zip(before, *results, strict=True):
        np.testing.assert_allclose(decayed, plain - 0.05 * start, atol=1e-6)


# ==== The embedder owns its normalisation ====


def test_a_plain_network_is_given_the_normalisation_once():
    network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model, x = CCPModel(network, 2), 9 * FOURS
    expected = network(x) / np.maximum(1, np.linalg.norm(network(x), axis=1))[:, None]
    np.testing.assert_allclose(model.embedder(x), expected, rtol=1e-6)
    assert model.embedder.weights[0] is network.weights[0]
    again = CCPModel(model.embedder, 2)
    assert again.embedder is model.embedder
    # Another one is put behind it.
    other = CCPModel(model.embedder, 2, normalization="l2")
    np.testing.assert_allclose(np.linalg.norm(other(x), axis=1), 1, rtol=1e-6)
    built = small_model().embedder
    assert CCPModel(built, 2).embedder is built


def test_augmentation_layers_do_nothing_for_users(tmp_path):
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.RandomFlip()(keras.layers.RandomBrightness(0.9)(inputs))
    outputs = keras.layers.Dense(3)(keras.layers.Flatten()(x))
    model = compiled(CCPModel(keras.Model(inputs, outputs), 4))
    images = color_data().images.astype("float32")
    expected = model.predict(images, verbose=0)
    model.export(tmp_path / "model", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "model")
    for embeddings in (model(images), model.embed(images), loaded.serve(images)):
        np.testing.assert_allclose(embeddings, expected, atol=1e-6)
    np.testing.assert_allclose(model.embed(color_data()), expected, atol=1e-6)


# ==== Samples in place of proxies ====


def samples_model(samples=2):
    embedder = keras.Sequential(
        [
            keras.Input((4, 4, 3), dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(5),
        ]
    )
    model = CCPModel(embedder, 2, samples, references="samples")
    return compiled(model, keras.optimizers.SGD(0.1), "contrastive")


def test_step_pairs_the_batch_with_embedded_samples(tmp_path):
    # Oracle: the loss of the batch against the samples' own embeddings, by hand.
    model = samples_model()
    samples = BYTES[:4, ::-1]
    model.samples.assign(samples.reshape(2, 2, 4, 4, 3))
    np.testing.assert_array_equal(
        model.proxy_embeddings().reshape(4, 5), model.predict(samples, verbose=0)
    )
    model.save(tmp_path / "model.keras")
    weights = model.embedder.trainable_variables
    with tf.GradientTape() as tape:
        rows = model.loss.pairs(LABELS, model(BYTES), [0, 0, 1, 1], model(samples))
        expected = tf.reduce_mean(rows)
    gradients = tape.gradient(expected, weights)
    wanted = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
    logs = model.train_on_batch(BYTES, LABELS, return_dict=True)
    assert logs["pair_loss"] == pytest.approx(float(expected), rel=1e-5)
    for weight, value in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(weight, value, rtol=1e-4, atol=1e-6)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.train_on_batch(BYTES, LABELS)
    for weight, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)


def test_callback_chooses_samples_that_cover_what_others_do_not():
    model = samples_model(samples=1)
    callback = CCPCallback((BYTES, LABELS), (BYTES[::-1].copy(), LABELS), seed=0)
    callback.set_model(model)
    callback.on_train_begin()
    first = model.samples.numpy()
    callback.project()
    for label, (image,) in enumerate(model.samples.numpy()):
        assert (image == BYTES[LABELS == label]).all(axis=(1, 2, 3)).any()
        assert (image != first[label]).any()
    assert callback.num_projections == 1


def test_training_without_samples_is_refused():
    with pytest.raises(ValueError, match="model.samples.assign"):
        samples_model().fit(BYTES, LABELS, verbose=0)


# ==== How steps are executed changes no result beyond rounding ====

NUM_CLASSES, BATCH, NUM_STEPS, NUM_EPOCHS = 4, 8, 4, 4
RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(NUM_EPOCHS * NUM_STEPS, BATCH, 6)).astype("float32")
CLASSES = RNG.integers(0, NUM_CLASSES, VECTORS.shape[:2]).astype("int32")
POOL = RNG.normal(size=(16, 6)).astype("float32"), np.arange(16) % NUM_CLASSES
UNSEEN = RNG.normal(size=(12, 6)).astype("float32"), np.arange(12) % 3


class ProjectEveryEpoch(CCPCallback):
    """Does not leave it to rounding when a problem is over."""

    def _record(self, map_at_r):
        super()._record(map_at_r)
        self.wait = self.patience


def train(
    optimizer=None, policy="float32", data=(VECTORS, CLASSES), pool_size=4, **mode
):
    """Trains by a sequence of problems; returns the history and the model."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    images = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(images)
    # Inside the unit ball. All that is outside of it has length 1 for K-Center, which
    # would choose the farthest from the origin by the last bit.
    small = keras.initializers.RandomNormal(stddev=0.15, seed=0)
    head = keras.layers.Dense(4, kernel_initializer=small, dtype="float32")
    embedder = keras.Model(images, head(hidden))
    model = CCPModel(embedder, NUM_CLASSES, 2, proximal_weight=0.1, in_batch_weight=0.5)
    # Not Adam, whose first step keeps but the sign of a gradient.
    optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
    compiled(model, optimizer, "contrastive", **{"jit_compile": False, **mode})
    callback = ProjectEveryEpoch(
        POOL,
        UNSEEN,
        pool_size=pool_size,
        restore_best=False,
        restore_on_projection=False,
        seed=0,
    )
    history = model.fit(
        tf.data.Dataset.from_tensor_slices(data),
        steps_per_epoch=len(data[0]) // NUM_EPOCHS,
        epochs=NUM_EPOCHS,
        callbacks=[callback],
        verbose=0,
    ).history
    assert callback.num_projections == NUM_EPOCHS
    return history, model


@functools.cache
def plain(pool_size=4):
    return train(pool_size=pool_size)


@pytest.mark.parametrize(
    ("mode", "tolerance"),
    [
        ({"steps_per_execution": 2}, 1e-6),
        ({"jit_compile": True}, 1e-5),
        ({"run_eagerly": True}, 1e-5),
        # Float16 has 11 bits and bfloat16 8: each product is off by up to 2^-11, 2^-8.
        # Two images a class for two proxies: rounding cannot choose another image.
        ({"policy": "mixed_float16", "pool_size": 2}, 5e-3),
        ({"policy": "mixed_bfloat16", "pool_size": 2}, 4e-2),
    ],
)
def test_execution(mode, tolerance):
    (history, model), (expected, other) = train(**mode), plain(mode.get("pool_size", 4))
    assert history["projection"] == list(range(NUM_EPOCHS))
    for name in ("loss", "pair_loss", "proximal_loss"):
        np.testing.assert_allclose(history[name], expected[name], tolerance, tolerance)
    for weight, same in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(weight, same, tolerance, tolerance)


def test_accumulated_gradients_of_equal_batches_are_those_of_one():
    """The mean of two equal gradients is each of them: the same updates."""
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2)
    twice = np.repeat(VECTORS, 2, axis=0), np.repeat(CLASSES, 2, axis=0)
    history, model = train(optimizer, data=twice)
    for weight, same in zip(model.get_weights(), plain()[1].get_weights(), strict=True):
        np.testing.assert_allclose(weight, same, rtol=1e-5, atol=1e-6)
    assert int(model.optimizer.iterations) == NUM_EPOCHS * NUM_STEPS
    assert history["val_map_at_r"] == pytest.approx(plain()[0]["val_map_at_r"])


# ==== Every loss under the float16 and bfloat16 policies ====


def policy_model(name, policy):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(8)]
    embedder = keras.Sequential([keras.Input((6,)), *layers])
    model = CCPModel(embedder, 4, 2, in_batch_weight=0.5, proximal_weight=0.1)
    compiled(model, keras.optimizers.Adam(1e-2), name, jit_compile=False)
    model.take_snapshot()
    return model


X, Y = VECTORS[:2].reshape(16, 6), np.arange(16) % 4


POLICIES = [(name, "mixed_float16") for name in LOSSES]
POLICIES += [(name, "mixed_bfloat16") for name in ("contrastive", "soft_triple")]


@pytest.mark.parametrize("name, policy", POLICIES)
def test_mixed_precision(name, policy):
    expected = policy_model(name, "float32").train_on_batch(X, Y, return_dict=True)
    model = policy_model(name, policy)
    before = model.get_weights()
    logs = model.train_on_batch(X, Y, return_dict=True)
    assert logs["loss"] == pytest.approx(expected["loss"], rel=1e-2)
    assert {w.dtype for w in (model.proxies, *model.frozen_weights)} == {"float32"}
    assert model(X).dtype == "float32"
    # float16 steps go through loss scaling; the logged loss is the unscaled one.
    is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert is_scaled == (policy == "mixed_float16")
    data = tf.data.Dataset.from_tensors((X, Y)).repeat(10)
    history = model.fit(data, epochs=2, verbose=0).history["loss"]
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert np.isfinite(history).all() and history[1] < history[0]
    assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))


def test_a_float64_network_trains_as_a_float32_one():
    single = policy_model("contrastive", "float32")
    keras.config.set_floatx("float64")
    try:
        double = policy_model("contrastive", "float64")
        double.set_weights(single.get_weights())
        logs = double.train_on_batch(X, Y, return_dict=True)
    finally:
        keras.config.set_floatx("float32")
    expected = single.train_on_batch(X, Y, return_dict=True)
    assert double.embedder.weights[0].dtype == "float64"
    assert logs["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for weight, other in zip(double.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-4, atol=1e-4)


# ==== Memory ====


def num_bytes(variables):
    return sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables)


@pytest.mark.parametrize("backbone", [small_cnn, resnet20_v2])
def test_lambda_costs_one_copy_of_the_trainable_weights(backbone):
    model = compiled(CCPModel(build_embedder(backbone(), 8), 3, 2))
    trainable, frozen = model.embedder.trainable_weights, model.frozen_weights
    assert num_bytes(frozen) == num_bytes(trainable)
    # Beside the embedder, the copy and the proxies the model has a few numbers, such
    # as lambda, the count of projections and means of the losses.
    known = {id(v) for v in [*model.embedder.variables, *frozen, model.proxies]}
    assert num_bytes([v for v in model.variables if id(v) not in known]) < 100
    # Adam: two moments of what is trained, step and learning rate.
    moments = 2 * num_bytes(model.trainable_variables)
    assert moments <= num_bytes(model.optimizer.variables) <= moments + 16
    pointers = [v.value.handle for v in frozen]
    model.take_snapshot()
    assert all(v.value.handle is p for v, p in zip(frozen, pointers, strict=True))
