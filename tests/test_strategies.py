"""Devices of an experiment, and embedding shared by replicas."""

import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

from keras_ccp import CCPModel
from keras_ccp import distribute as strategies
from keras_ccp.app.config import DistributionConfig
from keras_ccp.distribute import is_chief, make_strategy, synchronize_batch_norm
from keras_ccp.pipeline import EvaluationData


def strategy_of(kind="mirrored", devices=None):
    return make_strategy(kind, devices)


@keras.saving.register_keras_serializable("tests")
class WithReplica(keras.layers.Layer):
    """Puts the number of the replica beside each row."""

    def call(self, inputs):
        context = tf.distribute.get_replica_context()  # none while it is built
        replica = 0 if context is None else context.replica_id_in_sync_group
        replica = tf.fill(tf.shape(inputs), tf.cast(replica, inputs.dtype))
        return tf.concat([inputs, replica], axis=1)


def row_model(num_replicas):
    """Images of one number -> that number and the replica that saw it."""
    with strategy_of(devices=num_replicas).scope():
        images = keras.Input((1,))
        model = CCPModel(
            keras.Model(images, WithReplica()(images)), 2, 0, normalization=None
        )
        model.compile(keras.optimizers.SGD(), "contrastive")
    return model


# ==== Embedding ====


@pytest.mark.parametrize(("num_replicas", "batch_size"), [(2, 128), (2, 4), (3, 6)])
def test_every_row_is_embedded_once_in_order(num_replicas, batch_size):
    model = row_model(num_replicas)
    for count in (1, 5, 9):
        rows = np.arange(float(count), dtype="float32")[:, None]
        data = EvaluationData((rows, np.zeros(count, "int32")))
        embeddings = model.predict(data.batches(batch_size=batch_size), verbose=0)
        np.testing.assert_array_equal(embeddings[:, :1], rows)
    if batch_size < 9:
        assert set(embeddings[:, 1]) == set(range(num_replicas))
    pairs = tf.data.Dataset.from_tensor_slices((rows, np.zeros(9, "int32"))).batch(2)
    some = np.array([0, 1, 3, 7, 8])
    streamed = EvaluationData(pairs).batches(some, batch_size)
    embeddings = model.predict(streamed, verbose=0)
    np.testing.assert_array_equal(embeddings[:, 0], some)


def test_replicas_share_a_full_batch_evenly():
    model = row_model(2)
    rows = np.arange(256.0, dtype="float32")[:, None]
    data = EvaluationData((rows, np.zeros(256, "int32")))
    replicas = model.predict(data.batches(), verbose=0)[:, 1]
    np.testing.assert_array_equal(replicas.reshape(2, 2, 64)[..., 0], [[0, 1], [0, 1]])
    assert replicas.sum() == 128


def test_evaluate_on_replicas_is_that_of_one():
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(7, 2)).astype("float32"), np.arange(7) % 3

    def evaluate(devices):
        keras.utils.set_random_seed(0)
        with strategy_of(devices=devices).scope():
            embedder = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
            model = CCPModel(embedder, 3, 0)
            model.compile(keras.optimizers.SGD(), "contrastive")
        return model.evaluate(images, labels)

    assert evaluate(2) == evaluate(1)


# ==== Batch norm ====


def test_batch_norm_sees_the_whole_batch():
    """Two replicas, of 1.. and of 9.., end with the weights and statistics of one."""

    def train(devices):
        keras.utils.set_random_seed(0)
        strategy = strategy_of(devices=devices)
        with strategy.scope():
            layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
            embedder = keras.Sequential([keras.Input((2,)), *layers])
            model = CCPModel(embedder, 2, 1, normalization=None)
            model.compile(keras.optimizers.SGD(0.1), "contrastive")
        if devices > 1:
            synchronize_batch_norm(model.embedder)
        images = np.arange(24, dtype="float32").reshape(12, 2) ** 1.1 / 10
        data = tf.data.Dataset.from_tensor_slices((images, np.arange(12) % 2))
        model.fit(data.batch(4), epochs=2, verbose=0)
        return model.get_weights()

    for weight, other in zip(train(2), train(1), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-5)


# ==== Strategies ====


def test_strategies_of_the_config():
    assert strategy_of("none") is tf.distribute.get_strategy()
    assert strategy_of().num_replicas_in_sync == 1
    assert strategy_of(devices=3).num_replicas_in_sync == 3
    assert is_chief(strategy_of("none")) and is_chief(strategy_of(devices=2))


def test_devices_that_come_too_late_are_refused():
    tf.zeros(())
    with pytest.raises(RuntimeError, match=r"before TensorFlow.*devices=5.*with 4"):
        strategy_of(devices=5)


def test_gpus_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind: [kind] * (kind == "GPU")
    )
    with pytest.raises(ValueError, match="devices=2, with 1 GPUs"):
        strategy_of(devices=2)


def test_workers_need_addresses(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match="TF_CONFIG.*docs/distribution.md"):
        strategy_of("multi_worker")
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(ValueError, match="more than the GPUs of each machine"):
        strategy_of("multi_worker", devices=2)


def test_files_of_other_workers_vanish(tmp_path, monkeypatch):
    out = tmp_path / "new" / "run"
    with strategies.writable(out, strategy_of("none")) as directory:
        assert directory == out and out.is_dir()
    monkeypatch.setattr(strategies, "is_chief", lambda strategy: False)
    with strategies.writable(out, strategy_of("none")) as directory:
        (directory / "file").touch()
    assert not directory.exists() and list(out.iterdir()) == []


def test_xla_is_refused_on_several_replicas():
    with pytest.raises(ValueError, match="`jit_compile` must be False.*2 replicas"):
        row_model(2).compile("sgd", "contrastive", jit_compile=True)


# ==== The guide ====


def test_guide(monkeypatch):
    guide = Path(__file__).parent.parent / "docs" / "distribution.md"
    blocks = re.findall(r"```(\w+)\n(.*?)```", guide.read_text("utf-8"), re.DOTALL)
    for language, text in blocks:
        if language == "yaml" and text.startswith("distribution:"):
            DistributionConfig.model_validate(yaml.safe_load(text)["distribution"])
        if found := re.search(r"TF_CONFIG='(.*?)'", text, re.DOTALL):
            given = json.loads(found[1])
            assert len(given["cluster"]["worker"]) == 2 and given["task"]["index"] == 0
    (code,) = [text for language, text in blocks if language == "python"]
    strategy = strategy_of(devices=2)
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: strategy)
    namespace = {}
    exec(compile(code, str(guide), "exec"), namespace)
    assert namespace["model"].distribute_strategy.num_replicas_in_sync == 2
