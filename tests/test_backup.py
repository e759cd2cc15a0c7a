"""A run that was killed and resumed ends as one that never stopped."""

import contextlib
import functools
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import CCPCallback, CCPModel, build_embedder, losses
from keras_ccp.backup import Backup, load_latest, save_checkpoint
from keras_ccp.datasets import Dataset
from keras_ccp.pipeline import balanced_batches

NUM_EPOCHS, STEPS = 6, 2


def color_data():
    """Images of one random colour a class, with more noise than colour."""
    rng = np.random.default_rng(3)
    colors = rng.integers(80, 175, (8, 1, 1, 1, 3))
    noise = np.random.default_rng(3).integers(-90, 90, (8, 5, 8, 8, 3))
    images = np.clip(colors + noise, 0, 255).astype("uint8").reshape(-1, 8, 8, 3)
    return Dataset(images, np.repeat(np.arange(8), 5))


TRAIN, UNSEEN = color_data().split_classes(4)


def new_model(seed, dim=5, optimizer=None, loss=None, **kwargs):
    """A model whose weights and dropout follow from a seed."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8, 8, 3), dtype="uint8")
    x = keras.layers.Rescaling(1 / 255)(inputs)
    x = keras.layers.Conv2D(4, 3, activation="relu")(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.3)(x)
    embedder = build_embedder(keras.Model(inputs, x), embedding_dim=dim)
    model = CCPModel(embedder, 4, **{"proxies_per_class": 2, **kwargs})
    model.compile(
        optimizer or keras.optimizers.Adam(3e-2),
        loss or losses.MultiSimilarityLoss(),
        jit_compile=False,
    )
    return model


class Killed(Exception):
    """Stands for the end of a process, which tells nobody."""


class Kill(keras.callbacks.Callback):
    """Ends the run in an epoch, or once the backup of it is written."""

    def __init__(self, epoch, after=False):
        super().__init__()
        self.epoch, self.after = epoch, after
        if after:
            self.first_epoch = lambda: 0  # `fit` takes it for a Backup: the last ones

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == self.now and not self.after:
            raise Killed

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_epoch_end(self, epoch, logs=None):
        if self.epoch == epoch:
            raise Killed


def batches(backup):
    """What the data would give after the epochs that are done."""
    done = 0 if backup is None else backup.num_epochs * STEPS
    return balanced_batches(TRAIN, 2, 2, seed=0).skip(done)


class Outcome(NamedTuple):
    """What a `fit` left behind."""

    values: list
    epochs: list
    history: dict
    callback: CCPCallback
    num_projections: int


def run(directory=None, model=None, callbacks=(), seed=1, epochs=NUM_EPOCHS, **kwargs):
    """One call of `fit` in what stands for a new process.

    Without `model` by the one that is traced already. Its state counts for nothing in
    a resumed run: nonsense is put into every variable.
    """
    if model is None:
        model = traced_model()
        scramble(model)
    backup = Backup(directory) if directory else None
    callback = CCPCallback(TRAIN, UNSEEN, seed=seed, **{"patience": 1, **kwargs})
    history = model.fit(
        batches(backup),
        steps_per_epoch=STEPS,
        epochs=epochs,
        verbose=0,
        callbacks=[*([backup] if backup else []), callback, *callbacks],
    )
    values, projections = everything(model), callback.num_projections
    return Outcome(values, history.epoch, history.history, callback, projections)


@functools.cache
def traced_model():
    return new_model(0)


@functools.cache
def start_values():
    return everything(new_model(0))


def started():
    """The traced model as `new_model(0)` is."""
    model = traced_model()
    assign(model, start_values())
    return model


def scramble(model):
    assign(model, [value + 1 for value in everything(model)])


def assign(model, values):
    variables = model.variables + model.optimizer.variables
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def interrupted(directory, kill, **kwargs):
    with contextlib.suppress(Killed):
        run(directory, callbacks=[kill], **kwargs)
        raise RuntimeError("was not killed")


def everything(model):
    """Each variable of the model and the optimizer."""
    return [v.numpy() for v in model.variables + model.optimizer.variables]


def assert_same_end(resumed, whole):
    for mine, theirs in zip(resumed.values, whole.values, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    for name, values in resumed.history.items():
        assert values == whole.history[name][-len(resumed.epochs) :]
    assert resumed.callback.wait == whole.callback.wait
    assert resumed.callback._wait_of_run == whole.callback._wait_of_run
    assert resumed.num_projections == whole.num_projections


class CopyBackup(keras.callbacks.Callback):
    """Keeps what a process that dies at the end of an epoch would leave."""

    def __init__(self, directory):
        super().__init__()
        self.directory = directory
        self.first_epoch = lambda: 0  # `fit` takes it for a Backup: the last ones

    def on_epoch_end(self, epoch, logs=None):
        shutil.copytree(self.directory, copy_of(self.directory, epoch + 1))


def copy_of(directory, num_epochs):
    return directory.with_name(f"after {num_epochs}")


@pytest.fixture(scope="module")
def whole():
    """The run that is never stopped."""
    outcome = run(model=started())
    # Otherwise the tests below could not fail.
    assert 2 <= outcome.num_projections < NUM_EPOCHS
    assert 0 < np.argmax(outcome.history["val_map_at_r"]) < NUM_EPOCHS - 1
    return outcome


@pytest.fixture(scope="module")
def backups(tmp_path_factory):
    """A folder of backups as they were after each epoch of the same run."""
    directory = tmp_path_factory.mktemp("run") / "backup"
    run(directory, model=started(), callbacks=[CopyBackup(directory)])
    return directory


@pytest.mark.parametrize("num_epochs", range(1, NUM_EPOCHS + 1))
def test_resumed_run_ends_like_a_whole_one(num_epochs, backups, whole):
    directory = copy_of(backups, num_epochs)
    assert Backup(directory).num_epochs == num_epochs
    resumed = run(directory)
    assert resumed.epochs == list(range(num_epochs, NUM_EPOCHS))
    assert_same_end(resumed, whole)


def test_killed_inside_an_epoch(tmp_path, whole):
    interrupted(tmp_path, Kill(3), model=started())
    # Other names of layers, other weights and other seeds.
    assert_same_end(run(tmp_path, model=new_model(1)), whole)


def test_killed_again_and_again(tmp_path, whole):
    interrupted(tmp_path, Kill(0, after=True), model=started())
    for epoch in range(1, NUM_EPOCHS):
        interrupted(tmp_path, Kill(epoch, after=True))
    assert_same_end(run(tmp_path), whole)


def test_seed_that_was_drawn_is_kept(tmp_path):
    """`seed=None` draws 128 bits once; the resumed run goes on with them."""
    interrupted(tmp_path, Kill(1, after=True), model=started(), seed=None)
    arrays = load_latest(tmp_path)[1]
    seed = int(str(arrays["callbacks/CCPCallback 1/seed"]))
    resumed = run(tmp_path, seed=None)
    assert resumed.callback._seed == seed > 2**64
    assert_same_end(resumed, run(model=started(), seed=seed))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)},
        {
            "optimizer": lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(gradient_accumulation_steps=3), initial_scale=4.0
            ),
            "references": "samples",
        },
        {
            "loss": lambda: losses.CrossBatchMemory("contrastive", size=10),
            "proxies_per_class": 0,
        },
        {"policy": "bfloat16"},
    ],
)
def test_every_part_of_a_training_is_kept(kwargs, tmp_path):
    keras.config.set_dtype_policy(kwargs.pop("policy", "float32"))
    model = new_model(0, **{k: v() if callable(v) else v for k, v in kwargs.items()})
    start = everything(model)
    directory = tmp_path / "backup"
    whole = run(directory, model=model, callbacks=[CopyBackup(directory)])
    assert any(np.any(a != b) for a, b in zip(start, whole.values, strict=True))
    scramble(model)
    resumed = run(copy_of(directory, 3), model=model)
    assert resumed.epochs == [3, 4, 5]
    assert_same_end(resumed, whole)


# ==== When the run is over (see also the last case above) ====


def test_further_epochs_go_on(tmp_path, whole):
    run(tmp_path, model=started(), epochs=4)
    assert_same_end(run(tmp_path), whole)


def test_run_that_stopped_stays_stopped(tmp_path):
    arguments = {"patience": 9, "stop_patience": 1, "epochs": 30}
    first = run(tmp_path, model=started(), **arguments)
    assert len(first.epochs) < 30
    again = run(tmp_path, **arguments)
    assert again.epochs == []
    assert_same_end(again, first)


def test_callbacks_behind_it_in_the_list_stop_before_it_saves(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    run(tmp_path, callbacks=[Stop()])
    assert load_latest(tmp_path)[1]["stopped"]


def test_later_fit_without_backup_runs_every_epoch(tmp_path):
    for directory, epochs, expected in (
        (tmp_path, 2, [0, 1]),
        (tmp_path, 3, [2]),
        (None, 2, [0, 1]),
        (tmp_path, 2, []),
        (None, 1, [0]),
    ):
        assert run(directory, epochs=epochs).epochs == expected


def test_epoch_that_was_cut_short_runs_again(tmp_path, whole, caplog):
    class StopInside(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if self.epoch == 3 and batch == 0:
                self.model.stop_training = True

    with caplog.at_level(logging.INFO, logger="keras_ccp"):
        run(tmp_path, model=started(), callbacks=[StopInside()])
    assert "epoch 4 was cut short and is not saved" in caplog.text
    assert Backup(tmp_path).num_epochs == 3
    assert_same_end(run(tmp_path), whole)


# ==== What is wrong on the disk ====


def test_damaged_newest_backup_costs_one_epoch(tmp_path, whole, caplog):
    interrupted(tmp_path, Kill(3, after=True), model=started())
    newest = max(tmp_path.iterdir())
    newest.write_bytes(newest.read_bytes()[:-7])
    resumed = run(tmp_path)
    assert resumed.epochs == [3, 4, 5]
    assert newest.name in caplog.text
    assert_same_end(resumed, whole)


def test_full_disk_stops_the_run_which_goes_on_later(tmp_path, whole, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    class FillDisk(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2:
                monkeypatch.setattr(Path, "write_bytes", full)

    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, model=started(), callbacks=[FillDisk()])
    monkeypatch.undo()
    assert Backup(tmp_path).num_epochs == 2
    assert_same_end(run(tmp_path), whole)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"dim": 6}, r"proxies \(4, 2, 6\).* is .*proxies \(4, 2, 5\)"),
        ({"proxies_per_class": 1}, r"proxies \(4, 1, 5\).* is .*proxies \(4, 2, 5\)"),
        ({"references": "samples"}, "samples.* is .*proxies"),
        (
            {"optimizer": lambda: keras.optimizers.SGD()},
            "sgd.iteration .* is .*adam.iteration",
        ),
    ],
)
def test_backup_of_another_model_is_refused_untouched(other, message, backups):
    model = new_model(1, **{k: v() if callable(v) else v for k, v in other.items()})
    embedder = model.embedder.get_weights()
    with pytest.raises(ValueError, match=f"`directory` must .*{message}"):
        run(copy_of(backups, 1), model=model)
    for now, before in zip(model.embedder.get_weights(), embedder, strict=True):
        np.testing.assert_array_equal(now, before)


def test_other_callbacks_are_refused(backups):
    with pytest.raises(ValueError, match="'nothing more' is 'callbacks/CCPCallback 1'"):
        started().fit(
            batches(None), steps_per_epoch=2, callbacks=Backup(copy_of(backups, 1))
        )


# ==== Other callbacks with a state ====


class Counter(keras.callbacks.Callback):
    """Counts epochs over all fits."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def get_state(self):
        return {"count": self.count, "nested": {"deep": {"twice": 2 * self.count}}}

    def set_state(self, state):
        self.count = int(state["count"])
        assert state["nested"]["deep"]["twice"] == 2 * self.count

    def on_epoch_end(self, epoch, logs=None):
        self.count += 1


def fit_keras_callbacks(folder, scores, kill=None):
    """Epochs, learning rates and the best file of Keras' callbacks beside a Backup."""
    model = started() if kill is not None or not folder.exists() else traced_model()
    backup = Backup(folder / "backup")

    def score(epoch, logs):
        logs["score"] = scores[epoch]

    best = {"monitor": "score", "mode": "max"}
    callbacks = [
        keras.callbacks.LambdaCallback(on_epoch_end=score),
        keras.callbacks.ModelCheckpoint(
            folder / "best.weights.h5",
            save_best_only=True,
            save_weights_only=True,
            **best,
        ),
        keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True, **best),
        keras.callbacks.ReduceLROnPlateau(patience=2, cooldown=1, **best),
        keras.callbacks.CSVLogger(folder / "log.csv", append=True),
    ]
    if kill is not None:
        callbacks.append(Kill(kill, after=True))
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(Killed):
        model.fit(
            batches(backup),
            steps_per_epoch=STEPS,
            epochs=len(scores),
            verbose=0,
            callbacks=[backup, *callbacks],
        )
    callbacks[4].csv_file.close()  # as the end of a process does
    return everything(model)


@pytest.mark.parametrize("killed_at", [1, 3])
def test_callbacks_of_keras_go_on(killed_at, tmp_path):
    # The best is that of epoch 1; three without a better one end it at epoch 4.
    scores = [0.5, 0.9, 0.7, 0.8, 0.6, 0.7, 0.7, 0.7]
    expected = fit_keras_callbacks(tmp_path / "whole", scores)
    fit_keras_callbacks(tmp_path / "killed", scores, kill=killed_at)
    scramble(traced_model())
    values = fit_keras_callbacks(tmp_path / "killed", scores)
    folders = tmp_path / "whole", tmp_path / "killed"
    logs = [(folder / "log.csv").read_text() for folder in folders]
    assert logs[0] == logs[1] and len(logs[0].splitlines()) == 1 + 5
    kept = []
    for folder in folders:
        traced_model().load_weights(folder / "best.weights.h5")
        kept.append(everything(traced_model()))
    for pairs in ((values, expected), kept):
        for mine, theirs in zip(*pairs, strict=True):
            np.testing.assert_array_equal(mine, theirs)


class Gathers(keras.callbacks.Callback):
    def __init__(self, patience):
        super().__init__()
        self.patience, self.count, self.seen = patience, 0, []

    def on_epoch_end(self, epoch, logs=None):
        self.count += 1
        self.seen.append(epoch)


def test_what_is_not_resumed_is_named(tmp_path, caplog):
    with contextlib.suppress(Killed):
        checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "m.keras", save_freq=3)
        run(tmp_path, started(), [Gathers(3), checkpoint, Kill(2)])
    assert not caplog.text.count("not resumed")
    gathers = Gathers(5)
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "m.keras", save_freq=3)
    run(tmp_path, callbacks=[gathers, checkpoint, Kill(None)])
    assert "not resumed of Gathers 1: seen" in caplog.text
    assert "ModelCheckpoint 1: the batches counted for `save_freq`" in caplog.text
    assert gathers.count == NUM_EPOCHS and gathers.patience == 5


def test_state_of_every_callback_is_kept(tmp_path):
    counters = [Counter(), Counter()]
    counters[1].count = 10
    with contextlib.suppress(Killed):
        run(tmp_path, callbacks=[*counters, Kill(2, after=True)])
    resumed = [Counter(), Counter()]
    run(tmp_path, callbacks=resumed)
    assert [counter.count for counter in resumed] == [NUM_EPOCHS, 10 + NUM_EPOCHS]


# ==== Replicas ====


def replicas_model(seed, num_replicas):
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        embedder = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(4),
            ]
        )
        model = CCPModel(embedder, 4, 2)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer, losses.ContrastiveLoss(), jit_compile=False)
    return model


def fit_replicas(model, directory=None, callbacks=()):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 8, 6)).astype("float32")
    y = rng.integers(0, 4, (10, 8)).astype("int32")
    backup = [Backup(directory)] if directory else []
    start = 2 * backup[0].num_epochs if backup else 0
    callback = CCPCallback((x[0], np.arange(8) % 4), (x[1], y[1]), patience=1, seed=0)
    model.fit(
        tf.data.Dataset.from_tensor_slices((x[start:], y[start:])).repeat(),
        steps_per_epoch=2,
        epochs=5,
        verbose=0,
        callbacks=[callback, *backup, *callbacks],
    )
    return callback


def on_replicas(model):
    """Every variable as each replica has it."""
    local = model.distribute_strategy.experimental_local_results
    variables = model.variables + model.optimizer.variables
    return [[v.numpy() for v in local(variable.value)] for variable in variables]


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory):
    """Backups after three of five epochs, and the model that trained them all."""
    directory = tmp_path_factory.mktemp("replicas") / "backup"
    model = replicas_model(0, 2)
    callback = fit_replicas(model, directory, [CopyBackup(directory)])
    assert callback.num_projections >= 2
    return copy_of(directory, 3), model


def test_resumed_on_two_replicas(two_replicas):
    """Batch norm sees the whole batch, so that one copy of its statistics is kept."""
    directory, model = two_replicas
    arrays = load_latest(directory)[1]
    variables = {k: v for k, v in arrays.items() if k.startswith(("model", "opti"))}
    assert any("moving_" in name for name in variables)
    assert {len(values) for values in variables.values()} == {1}
    expected = on_replicas(model)
    scramble(model)
    fit_replicas(model, directory)
    for mine, theirs in zip(on_replicas(model), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_another_number_of_replicas_goes_on_from_the_first(two_replicas):
    directory, _ = two_replicas
    values = [
        value
        for name, value in load_latest(directory)[1].items()
        if name.startswith(("model", "optimizer"))
    ]
    model = replicas_model(1, 3)
    backup = Backup(directory)
    backup.set_model(model)
    model.fit_callbacks = [CCPCallback(TRAIN, UNSEEN)]
    backup.on_train_begin()
    for replicas, value in zip(on_replicas(model), values, strict=True):
        for replica in replicas:
            np.testing.assert_array_equal(replica, value[0])


# ==== A real kill ====

SCRIPT = """
import pathlib, sys, time
sys.path.insert(0, {tests!r})
import conftest, test_backup

replace = pathlib.Path.replace
def slow(path, other):
    time.sleep(0.1)  # time to be killed in
    replace(path, other)
pathlib.Path.replace = slow
test_backup.run({directory!r}, model=test_backup.new_model(0))
"""


def test_sigkill_at_a_random_moment(tmp_path, whole):
    """Before the first backup, while one is written, after it is, in a step."""
    tests = str(Path(__file__).parent)
    code = SCRIPT.format(tests=tests, directory=str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    rng = np.random.default_rng()
    # Two more epochs take 0.3 s at least: it cannot be over by then.
    epoch, delay = int(rng.integers(1, NUM_EPOCHS - 1)), rng.uniform(0, 0.25)
    partial = tmp_path / f"partial_checkpoint-{epoch:08d}.npz"
    while process.poll() is None and not partial.exists():
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    moment = f"{delay:.3f} s after {partial.name} appeared"
    assert process.wait() == -signal.SIGKILL, moment
    done = Backup(tmp_path).num_epochs
    assert done >= epoch - 1, moment
    resumed = run(tmp_path)
    assert len(resumed.epochs) == NUM_EPOCHS - done
    if done:
        assert_same_end(resumed, whole)


# ==== The files ====

ARRAYS = {
    "weights/kernel": np.arange(6, dtype="float32").reshape(2, 3),
    "brain": np.array([[1.5], [-0.0]], ml_dtypes.bfloat16),
    "seed": np.array([2**63, 1], "uint64"),
    "transposed": np.arange(6).reshape(2, 3).T,
    "flag": True,
    "number": -np.inf,
    "text": "é123",
    "empty": np.zeros((0, 3), "int8"),
}


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_arrays_come_back_bit_for_bit(tmp_path):
    assert load_latest(tmp_path / "new") == (0, {})
    save_checkpoint(tmp_path / "new" / "folder", 7, ARRAYS)
    step, loaded = load_latest(tmp_path / "new" / "folder")
    assert step == 7 and list(loaded) == list(ARRAYS)
    for name, array in ARRAYS.items():
        array = np.asarray(array)
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()


def test_the_newest_are_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "partial_checkpoint-00000050.npz").write_text("of a killed process")
    for step in (1, 9, 10, 100):
        save_checkpoint(tmp_path, step, {"a": step}, keep=2)
    kept = ["checkpoint-00000010.npz", "checkpoint-00000100.npz", "notes.txt"]
    assert names(tmp_path) == kept
    # Back to an earlier step: the later one is of a past that did not happen.
    save_checkpoint(tmp_path, 11, {"a": 11}, keep=2)
    assert load_latest(tmp_path)[0] == 11
    save_checkpoint(tmp_path, 12, {"a": 12}, keep=1)
    assert names(tmp_path) == ["checkpoint-00000012.npz", "notes.txt"]


def test_damage_of_the_newest_is_noticed_or_harmless(tmp_path, caplog):
    """Each byte changed in turn, and each length: zipfile's CRC is the oracle."""
    save_checkpoint(tmp_path, 1, {"a": 1.0})
    path = save_checkpoint(tmp_path, 2, {"a": 2.0})
    content = path.read_bytes()
    noticed = 0
    changed = [content[:size] for size in range(len(content))]
    for position in range(len(content)):
        other = bytearray(content)
        other[position] ^= 1
        changed.append(bytes(other))
    for other in changed:
        path.write_bytes(other)
        step, arrays = load_latest(tmp_path)
        assert (step, arrays["a"]) in ((1, 1.0), (2, 2.0))
        noticed += step == 1
    assert noticed > len(changed) / 2 and path.name in caplog.text
    for checkpoint in tmp_path.iterdir():
        checkpoint.write_bytes(b"x")
    with pytest.raises(ValueError, match="all 2 are damaged\n.*delete them to begin"):
        load_latest(tmp_path)


@pytest.mark.parametrize("value", [None, object(), np.array([1, "a"], object), [{}]])
def test_objects_are_neither_written_nor_read(value, tmp_path):
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        save_checkpoint(tmp_path / "folder", 1, {"a": value})
    assert not (tmp_path / "folder").exists()
    np.savez(tmp_path / "checkpoint-00000001.npz", a=np.array([value], object))
    with pytest.raises(ValueError, match="`directory` must hold"):
        load_latest(tmp_path)


def test_write_that_the_system_breaks_off(tmp_path):
    """A limit of the system on the size of a file cuts it, as a full disk does."""
    save_checkpoint(tmp_path, 1, {"a": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(tmp_path, 2, {"a": np.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["checkpoint-00000001.npz"]
