"""Whole runs from a configuration, on look-alike archives and the bundled emoji."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import look_alikes
import numpy as np
import pytest
import tensorflow as tf
import yaml

from keras_ccp import datasets, retrieval
from keras_ccp.app.config import check_config
from keras_ccp.app.fold import _cut_log
from keras_ccp.app.run import evaluate_run, summarize, train_run
from keras_ccp.app.splits import fold_splits, load_splits
from keras_ccp.serving import check_model

METRICS = ("precision_at_1", "precision_at_r", "map_at_r")


def small_config(**sections):
    """Two folds of three short evaluation intervals, with a projection in between."""
    values = {
        "method": "MS-CCP",
        "data": {
            "name": "emoji",
            "folds": 2,
            "train_classes": 24,
            "split_seed": 0,
            "augmentation": "small",
        },
        "embedder": {
            "backbone": "small_cnn",
            "embedding_dim": 8,
            "frozen_statistics": False,
        },
        "loss": {"name": "multi_similarity"},
        "model": {"proxies_per_class": 2},
        "callback": {"patience": 1, "pool_size": 3},
        "training": {
            "batch_size": 16,
            "samples_per_class": 2,
            "learning_rate": 0.02,
            "steps_per_evaluation": 2,
            "max_evaluations": 5,
        },
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section}
    return check_config(values)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, train_run(small_config(), ".", out, verbose=0)


def test_scores_are_those_of_the_saved_embedders(run):
    out, metrics = run
    _, test = datasets.emoji().split_classes(24, seed=0)
    parts = []
    for fold, score in enumerate(metrics["models"]):
        embedder = keras.models.load_model(out / f"repeat0/fold{fold}/embedder.keras")
        parts.append(embedder.predict(test.images, verbose=0))
        expected = retrieval.evaluate(parts[-1], test.labels)
        assert score == pytest.approx(expected)
    joined = retrieval.evaluate(np.concatenate(parts, axis=1), test.labels)
    assert metrics["repetitions"] == [pytest.approx(joined)]
    for name in METRICS:
        both = [score[name] for score in metrics["models"]]
        summary = metrics["separated"][name]
        assert summary["mean"] == pytest.approx(np.mean(both))
        # Half width for two values a and b: t(.975, 1) |a - b| / 2 = 12.706 |a - b|/2
        half = 12.7062 * abs(both[0] - both[1]) / 2
        assert summary["interval"] == pytest.approx(half, rel=1e-4)
        assert metrics["concatenated"][name]["mean"] == pytest.approx(joined[name])
    loaded = tf.saved_model.load(out / "embedder")
    embeddings = loaded.embed(test.images[:7])["embeddings"]
    np.testing.assert_allclose(embeddings, np.concatenate(parts, axis=1)[:7], atol=1e-5)


def test_files_of_a_run(run):
    out, metrics = run
    written = json.loads((out / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert written == metrics  # with no NaN, which is not JSON
    record = json.loads((out / "run.json").read_text())
    assert record["versions"]["keras"] == keras.__version__
    rows = (out / "metrics.csv").read_text().splitlines()
    assert rows[0] == "kind,number,precision_at_1,precision_at_r,map_at_r"
    assert len(rows) == 1 + 2 + 1
    log = (out / "repeat0/fold0/log.csv").read_text().splitlines()
    assert "val_map_at_r" in log[0] and len(log) == 1 + 5
    assert list((out / "repeat0/fold0/tensorboard").rglob("events*"))
    summary = json.loads((out / "repeat0/fold0/fold.json").read_text())
    assert summary["num_steps"] == 10 and summary["num_projections"] >= 1


def test_evaluation_alone_and_of_an_unfinished_run(run, tmp_path, caplog):
    out, metrics = run
    shutil.copytree(out, tmp_path / "run")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert evaluate_run(out) == metrics  # with the data of the training
    assert not caplog.text
    elsewhere = tmp_path / "scores"
    assert evaluate_run(out, ".", elsewhere) == metrics
    assert json.loads((elsewhere / "metrics.json").read_text()) == metrics
    assert check_model(elsewhere / "embedder")["embedding_dim"] == 16
    with pytest.raises(FileExistsError, match="holds a run\nGive scores another"):
        evaluate_run(out, ".", out)
    # Nothing is written over the run's own.
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    (tmp_path / "run" / "repeat0" / "fold1" / "fold.json").unlink()
    assert evaluate_run(tmp_path / "run", ".")["models"] == metrics["models"][:1]
    assert "1 of 2 models are finished: not the protocol's result" in caplog.text


def test_same_seed_same_metrics(run, tmp_path):
    _, metrics = run
    assert train_run(small_config(), ".", tmp_path / "again", verbose=0) == metrics


# With the devices of the other tests: their number decides how sums are split.
KILLED = """
import conftest, sys, yaml
from keras_ccp.app.config import check_config
from keras_ccp.app.run import train_run
config = check_config(yaml.safe_load(open(sys.argv[1])))
train_run(config, ".", sys.argv[2], resume=True, verbose=0)
"""


def test_killed_run_resumes_to_the_same_metrics(run, tmp_path):
    whole, metrics = run
    out = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(whole / "config.yaml"), str(out)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    backup = out / "repeat0" / "fold0" / "backup"
    # In the middle of the first model: after its second evaluation or later.
    deadline = time.monotonic() + 120
    while not (backup.exists() and len(list(backup.glob("checkpoint-*"))) >= 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    with pytest.raises(BlockingIOError, match=f"Another process works in {out}"):
        train_run(small_config(), ".", out, resume=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # What a full disk leaves.
    with (out / "repeat0" / "fold0" / "log.csv").open("a") as file:
        file.write("1,0.25")
    assert train_run(small_config(), ".", out, resume=True, verbose=0) == metrics
    for fold in ("fold0", "fold1"):
        logs = [(p / "repeat0" / fold / "log.csv").read_text() for p in (whole, out)]
        assert logs[0] == logs[1]


# Killed after its second evaluation: of what is in the log, rows 0 and 1 stay.
HEADER, ROWS = "epoch,loss,val_map_at_r", [f"{i},0.5,0.{i}25" for i in range(4)]


@pytest.mark.parametrize(
    "text",
    [
        "\n".join([HEADER, *ROWS[:2]]) + "\n",
        "\r\n".join([HEADER, *ROWS[:3]]) + "\r\n",  # written, and not backed up
        "\n".join([HEADER, *ROWS[:2], "2,0."]),  # a half row
        "\n".join([HEADER, *ROWS[:2], "2,0.5,1" + ROWS[2], ""]),  # glued
        "\n".join([HEADER, ROWS[0], ROWS[1], ROWS[1], ROWS[2]]),  # twice
    ],
)
def test_log_goes_on_where_the_training_does(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_text(text)
    _cut_log(path, 2)
    assert path.read_text() == "\n".join([HEADER, *ROWS[:2]]) + "\n"
    _cut_log(path, 0)
    assert path.read_text() == ""
    _cut_log(tmp_path / "none.csv", 2)
    assert not (tmp_path / "none.csv").exists()


def test_a_run_is_not_overwritten(run, tmp_path):
    out, _ = run
    with pytest.raises(FileExistsError, match="--resume"):
        train_run(small_config(), ".", out)
    other = small_config(training={"batch_size": 32})
    changed = "`config` must be.*Received: training.batch_size: 16 in the run, 32 now\n"
    with pytest.raises(ValueError, match=changed):
        train_run(other, ".", out, resume=True)
    with pytest.raises(FileNotFoundError, match="There is no run"):
        evaluate_run(tmp_path, ".")


def test_finished_models_are_not_trained_again(run, monkeypatch):
    out, metrics = run
    monkeypatch.setattr("keras_ccp.app.run.train_fold", None)
    assert train_run(small_config(), ".", out, resume=True) == metrics


def test_splits_share_no_class():
    config = small_config().data
    splits = load_splits(config, ".")
    assert splits.training.num_classes == 24 and splits.query.num_classes == 437
    assert not set(splits.training.class_names) & set(splits.query.class_names)
    for training, validation in fold_splits(config, splits.training):
        assert training.num_classes == validation.num_classes == 12
        assert not set(training.class_names) & set(validation.class_names)
    conventional = small_config(data={"split": "conventional"}).data
    ((training, _),) = fold_splits(conventional, splits.training)
    assert training.num_classes == 24
    ablation = small_config(data={"split": "ablation"}).data
    ((training, validation),) = fold_splits(ablation, splits.training)
    assert (training.num_classes, validation.num_classes) == (16, 8)


def test_interval():
    # Printed tables: t(0.975) is 3.1824 for 3 degrees of freedom. The values have the
    # standard deviation 0.2 / sqrt(3), so the mean an error of 0.1 / sqrt(3).
    scores = [dict.fromkeys(METRICS, value) for value in (0.4, 0.4, 0.6, 0.6)]
    summary = summarize(scores)["map_at_r"]
    assert summary["mean"] == pytest.approx(0.5)
    assert summary["interval"] == pytest.approx(3.1824 * 0.1 / 3**0.5, rel=1e-4)


def test_interval_of_one_score_is_not_known():
    summary = summarize([dict.fromkeys(METRICS, 0.5)])
    assert summary["map_at_r"]["mean"] == 0.5
    assert summary["map_at_r"]["interval"] is None


def test_dumped_config_is_the_config(run):
    out, _ = run
    values = yaml.safe_load(Path(out / "config.yaml").read_text("utf-8"))
    assert check_config(values) == small_config()


def test_the_embedder_of_a_run_can_be_checked(run):
    about = check_model(run[0] / "embedder")
    assert about["embedding_dim"] == 16 and about["difference"] < 1e-5
    # Arrays of 32 pixels are embedded as they are.
    assert (about["size"], about["short_side"]) == (32, 32)


def test_out_must_be_a_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    # Refused before the data are looked for, of which there are none.
    nothing = small_config(data={"name": "folder"})
    for out in (file, file / "run"):
        with pytest.raises(OSError, match=f"{out}, where {file} is a file"):
            train_run(nothing, tmp_path / "none", out)


def test_each_model_is_named(run, tmp_path, monkeypatch, caplog):
    whole, _ = run
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "repeat0" / "fold1" / "fold.json").unlink()
    monkeypatch.setattr("keras_ccp.app.run.train_fold", lambda *_: None)
    monkeypatch.setattr("keras_ccp.app.run.score_run", lambda *_: {})
    monkeypatch.setattr("keras_ccp.app.run._write_scores", lambda *_: None)
    caplog.set_level("INFO", "keras_ccp.app.run")
    train_run(small_config(), ".", out, resume=True)
    train_run(small_config(), ".", out, repeats=2, resume=True)
    records = [r for r in caplog.records if r.name.startswith("keras_ccp.app.run")]
    assert [record.getMessage() for record in records] == [
        "model 2 of 2",
        "repetition 1 of 2, model 2 of 2",
        "repetition 2 of 2, model 1 of 2",
        "repetition 2 of 2, model 2 of 2",
    ]


def test_a_run_names_the_image_that_it_cannot_decode(tmp_path):
    look_alikes.write_class_folders(tmp_path / "data", dict.fromkeys("abcdefgh", 4))
    broken = tmp_path / "data" / "a" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    data = {"name": "folder", "augmentation": "mlrc", "size": 16, "unreadable": None}
    config = small_config(data={**data, "train_classes": 6, "split_seed": None})
    with pytest.raises(ValueError, match=re.escape(f"fail: {broken} (Invalid JPEG ")):
        train_run(config, tmp_path / "data", tmp_path / "out")


def test_too_few_classes_leave_nothing_behind(tmp_path):
    few = small_config(training={"batch_size": 64})
    with pytest.raises(ValueError, match="`training.batch_size` must be at most 24"):
        train_run(few, ".", tmp_path / "out")
    assert not (tmp_path / "out").exists()
