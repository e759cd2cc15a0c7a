"""Whole runs from a configuration, on look-alike archives and the bundled emoji."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

from keras_ccp import datasets, retrieval
from keras_ccp.config import check_config
from keras_ccp.experiment import evaluate_run, train_run
from keras_ccp.experiment.evaluation import student_t_quantile, summarize
from keras_ccp.experiment.splits import fold_splits, load_splits
from keras_ccp.serving import check_model

METRICS = ("precision_at_1", "precision_at_r", "map_at_r")


def small_config(**sections):
    """Two folds of three short evaluation intervals, with a switch in between."""
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
        "proxies": {"per_class": 2, "switching": True, "patience": 1, "pool_size": 3},
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
    versions = json.loads((out / "versions.json").read_text())
    assert versions["keras"] == keras.__version__
    rows = (out / "metrics.csv").read_text().splitlines()
    assert rows[0] == "kind,number,precision_at_1,precision_at_r,map_at_r"
    assert len(rows) == 1 + 2 + 1
    log = (out / "repeat0/fold0/log.csv").read_text().splitlines()
    assert "val_map_at_r" in log[0] and len(log) == 1 + 5
    assert list((out / "repeat0/fold0/tensorboard").rglob("events*"))
    summary = json.loads((out / "repeat0/fold0/fold.json").read_text())
    assert summary["num_steps"] == 10 and summary["num_projections"] >= 1


def test_evaluate_alone_gives_the_same(run):
    out, metrics = run
    assert evaluate_run(out, ".") == metrics


def test_same_seed_same_metrics(run, tmp_path):
    _, metrics = run
    assert train_run(small_config(), ".", tmp_path / "again", verbose=0) == metrics


# With the devices of the other tests: their number decides how sums are split.
KILLED = """
import conftest, sys, yaml
from keras_ccp.config import check_config
from keras_ccp.experiment import train_run
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
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert train_run(small_config(), ".", out, resume=True, verbose=0) == metrics


def test_a_run_is_not_overwritten(run, tmp_path):
    out, _ = run
    with pytest.raises(FileExistsError, match="--resume"):
        train_run(small_config(), ".", out)
    other = small_config(training={"batch_size": 32})
    with pytest.raises(ValueError, match="`config` must be that of the run"):
        train_run(other, ".", out, resume=True)
    with pytest.raises(FileNotFoundError, match="There is no run"):
        evaluate_run(tmp_path, ".")


def test_finished_models_are_not_trained_again(run, monkeypatch):
    out, metrics = run
    monkeypatch.setattr("keras_ccp.experiment.run.train_fold", None)
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


@pytest.mark.parametrize(
    "degrees, expected", [(1, 12.7062), (3, 3.1824), (9, 2.2622), (39, 2.0227)]
)
def test_student_t(degrees, expected):
    # Printed tables of t(0.975).
    assert student_t_quantile(0.975, degrees) == pytest.approx(expected, abs=1e-4)


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


def test_too_few_classes_leave_nothing_behind(tmp_path):
    few = small_config(training={"batch_size": 64})
    with pytest.raises(ValueError, match="`training.batch_size` 64 .* 32 classes"):
        train_run(few, ".", tmp_path / "out")
    assert not (tmp_path / "out").exists()
