"""The search for hyper-parameters: its space, its trials, its files."""

import contextlib
import csv
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import optuna
import pytest
import tensorflow as tf
import yaml

from keras_ccp import datasets, losses
from keras_ccp.app import tuning
from keras_ccp.app.config import check_config, load_config
from keras_ccp.app.fold import Fold, train_fold
from keras_ccp.app.splits import fold_splits, load_splits
from keras_ccp.app.tuning import (
    LOSS_RANGES,
    PER_CLASS,
    PROXIMAL_WEIGHT,
    search_space,
    tune,
)
from keras_ccp.files import locked

TESTS = Path(__file__).parent


def small_config(**sections):
    """One short model of 12 classes; a problem ends after the second evaluation."""
    values = {
        "method": "C2-CCP",
        "data": {
            "name": "emoji",
            "folds": 2,
            "train_classes": 24,
            "split_seed": 0,
            "augmentation": "none",
        },
        "embedder": {
            "backbone": "small_cnn",
            "embedding_dim": 4,
            "frozen_statistics": False,
        },
        "loss": {"name": "contrastive"},
        "model": {"proxies_per_class": 2},
        "callback": {"patience": 1, "pool_size": 3},
        "training": {
            "batch_size": 8,
            "samples_per_class": 2,
            "learning_rate": 0.02,
            "steps_per_evaluation": 2,
            "max_evaluations": 3,
        },
        "seed": 5,
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section}
    return check_config(values)


def table(out):
    with open(out / "trials.csv", newline="") as file:
        return list(csv.DictReader(file))


def values_of(row):
    return tuple(float(v) for key, v in row.items() if "." in key)


# ==== The search space ====


def test_every_loss_has_ranges_of_its_own_arguments():
    for name, ranges in LOSS_RANGES.items():
        own = losses.get(name)
        for argument, (low, high, *_) in ranges.items():
            assert low <= getattr(own, argument) <= high


@pytest.mark.parametrize("name", sorted(LOSS_RANGES))
@pytest.mark.parametrize("end", ["low", "high"])
def test_ends_of_the_ranges_are_valid(name, end):
    config = small_config(loss={"name": name})
    space = search_space(config)
    assert set(space) == {PROXIMAL_WEIGHT, PER_CLASS} | {
        f"loss.arguments.{argument}" for argument in LOSS_RANGES[name]
    }
    values = {key: getattr(parameter.range, end) for key, parameter in space.items()}
    changed = config.with_values(values)
    assert changed.model.proximal_weight == {"low": 1e-5, "high": 0.1}[end]
    assert changed.model.proxies_per_class == {"low": 1, "high": 3}[end]  # pool_size
    place = {"low": 0, "high": 1}[end]
    assert changed.loss.arguments == {
        argument: values[place] for argument, values in LOSS_RANGES[name].items()
    }
    assert changed.training == config.training


def test_documented_ranges():
    lines = (TESTS.parent / "docs" / "tuning.md").read_text("utf-8").splitlines()
    for name, ranges in LOSS_RANGES.items():
        texts = [
            f"`{argument}` {low:g} to {high:g}" + (" (log)" if log else "")
            for argument, (low, high, *log) in ranges.items()
        ]
        assert f"| `{name}` | {', '.join(texts)} |" in lines


def test_ranges_reach_as_far_as_the_own_values():
    config = small_config(
        loss={"arguments": {"negative_margin": 0.9}},
        model={"proximal_weight": 1e-6, "proxies_per_class": 3},
    )
    space = search_space(config)
    margin = space["loss.arguments.negative_margin"]
    assert (margin.own, margin.range.low, margin.range.high) == (0.9, 0.3, 0.9)
    weight = space[PROXIMAL_WEIGHT]
    assert (weight.own, weight.range.low, weight.range.high) == (1e-6, 1e-6, 0.1)
    assert space[PER_CLASS].own == 3


def test_without_projections_lambda_is_not_searched():
    margins = {"loss.arguments.positive_margin", "loss.arguments.negative_margin"}
    proxies = small_config(callback={"max_projections": 0})
    assert set(search_space(proxies)) == margins | {PER_CLASS}
    pairs = small_config(model={"proxies_per_class": 0})
    assert set(search_space(pairs)) == margins


def test_zero_is_not_searched_by_factors():
    config = small_config(model={"proximal_weight": 0.0})
    with pytest.raises(ValueError, match=r"--set model.proximal_weight=1e-05"):
        search_space(config)


# ==== Trials, with a stand-in for the training ====


def height(config):
    """Best at lambda = 0.01, as if nothing else counted."""
    return 0.6 - 0.1 * abs(np.log10(config.model.proximal_weight) + 2)


class StandIn:
    """Trains nothing: MAP@R rises evenly to the height of the configuration."""

    def __init__(self):
        self.trained, self.folds = [], []
        self.fails_at = None  # number of the training that raises, and when
        self.error = RuntimeError("out of memory")
        self.projections = 1  # in each evaluation but the first

    def __call__(self, config, fold, root, strategy, verbose, callbacks):
        number, self.trained = len(self.trained), [*self.trained, config]
        self.folds.append(fold)
        fold.directory.mkdir(parents=True, exist_ok=True)
        model = type("Model", (), {"stop_training": False})()
        (reports,) = callbacks
        reports.set_model(model)
        best = 0.0
        for epoch in range(config.training.max_evaluations):
            if model.stop_training:
                break
            if self.fails_at == (number, epoch):
                raise self.error
            best = height(config) * (epoch + 1) / 3
            logs = {"val_map_at_r": best, "projection": self.projections * epoch}
            reports.on_epoch_end(epoch, logs)
        summary = {"validation": {"map_at_r": best}}
        (fold.directory / "fold.json").write_text(json.dumps(summary))
        if self.fails_at == (number, "end"):
            raise self.error


@contextlib.contextmanager
def standing_in():
    with pytest.MonkeyPatch.context() as patch:
        stand_in = StandIn()
        patch.setattr(tuning, "train_fold", stand_in)
        # Drawing takes longer than all the rest here.
        patch.setattr(tuning, "_picture", lambda study, space: b"picture")
        yield stand_in


@pytest.fixture
def stand_in():
    with standing_in() as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A study of twelve trials: its folder, what it returned and what was trained."""
    out = tmp_path_factory.mktemp("whole")
    with standing_in() as stand_in:
        summary = tune(small_config(), ".", out, trials=12)
    return out, summary, stand_in.trained


def test_best_and_files(whole):
    out, summary, trained = whole
    own = height(small_config())
    heights = [height(config) for config in trained]
    assert len(heights) == 12 and heights[0] == own
    assert summary["own_map_at_r"] == own
    assert summary["map_at_r"] == max(heights) > own
    assert summary["complete"] + summary["pruned"] == 12

    best = load_config(out / "best.yaml")
    assert best == small_config().with_values(summary["values"])
    assert height(best) == summary["map_at_r"]
    assert best.model.proxies_per_class == summary["values"][PER_CLASS]
    rows = table(out)
    assert [int(row["trial"]) for row in rows] == list(range(12))
    assert rows[0]["state"] == "complete" and rows[0]["evaluations"] == "3"
    assert len({values_of(row) for row in rows}) == 12
    for row, reached in zip(rows, heights, strict=True):
        share = int(row["evaluations"]) / 3
        assert float(row["map_at_r"]) == pytest.approx(reached * share, abs=1e-6)
    assert (out / "lambda_proxies.png").read_bytes() == b"picture"
    assert not (out / "running").exists()


def test_pruned_are_those_below_the_median(whole):
    out, _, trained = whole
    complete, pruned_at = [], []  # curves of MAP@R; evaluations
    for row, config in zip(table(out), trained, strict=True):
        curve = [height(config) * (step + 1) / 3 for step in range(3)]
        evaluations = int(row["evaluations"])
        for step in range(3):
            # By the complete trials alone once there are five. Not at the first
            # evaluation, after which no problem can have ended yet.
            may_be_pruned = step > 0 and len(complete) >= 5
            if may_be_pruned and curve[step] < np.median([c[step] for c in complete]):
                pruned_at.append(step)
                assert (row["state"], evaluations) == ("pruned", step + 1)
                break
        else:
            assert (row["state"], evaluations) == ("complete", 3)
            complete.append(curve)
    assert 1 in pruned_at  # something was cut short at all


def test_trains_the_first_model_of_the_protocol(stand_in, tmp_path):
    config = small_config()
    tune(config, ".", tmp_path, trials=2)
    splits = load_splits(config.data, ".")
    training, validation = fold_splits(config.data, splits.training)[0]
    for fold in stand_in.folds:
        assert fold.training.class_names == training.class_names
        assert fold.validation.class_names == validation.class_names
        assert fold.seed == config.seed
        assert not set(fold.validation.class_names) & set(splits.query.class_names)


def test_goes_on_and_repeats_nothing(stand_in, whole, tmp_path):
    out, _, trained = whole
    for trials in (1, 3, 3):
        tune(small_config(), ".", tmp_path / "parts", trials)
    assert stand_in.trained == trained[:3]
    expected = [values_of(row) for row in table(out)]
    assert [values_of(row) for row in table(tmp_path / "parts")] == expected[:3]
    other_seed = small_config().model_copy(update={"seed": 6})
    tune(other_seed, ".", tmp_path / "seed", trials=2)
    first, second = stand_in.trained[3:]
    assert first.model == trained[0].model
    assert second.model != trained[1].model


# To the twelfth trial: from the eleventh on values depend on those before.
@pytest.mark.parametrize(("place", "trials"), [(2, 12), ("end", 5)])
def test_interrupted_trial_is_tried_again(stand_in, whole, tmp_path, place, trials):
    out, _, trained = whole
    expected = [(row["state"], values_of(row)) for row in table(out)]
    stand_in.fails_at = (3, place)
    with pytest.raises(RuntimeError):
        tune(small_config(), ".", tmp_path, trials=trials)
    stand_in.fails_at = None
    tune(small_config(), ".", tmp_path, trials=trials)
    rows = table(tmp_path)
    assert rows.pop(3)["state"] == "fail"
    assert [(row["state"], values_of(row)) for row in rows] == expected[:trials]
    # One whose model was finished already is not trained again.
    again = [] if place == "end" else [trained[3]]
    assert stand_in.trained == trained[:4] + again + trained[4:trials]


# The first, with the configuration's own values, and one that the sampler chose.
@pytest.mark.parametrize("trial", [0, 1])
def test_interruptions_are_no_failures(stand_in, whole, tmp_path, trial):
    out, _, trained = whole
    stand_in.error = KeyboardInterrupt()
    for number in range(trial, trial + 4):
        stand_in.fails_at = (number, 1)
        with pytest.raises(KeyboardInterrupt):
            tune(small_config(), ".", tmp_path, trials=3)
    stand_in.fails_at = None
    summary = tune(small_config(), ".", tmp_path, trials=3)
    rows = table(tmp_path)
    states = [row["state"] for row in rows]
    assert states == ["complete"] * trial + ["fail"] * 4 + ["complete"] * (3 - trial)
    # All in the folder of the first, where the backup is.
    folders = [fold.directory.name for fold in stand_in.folds[trial : trial + 5]]
    assert folders == [str(trial)] * 5
    finished = [values_of(row) for row in rows if row["state"] == "complete"]
    assert finished == [values_of(row) for row in table(out)[:3]]
    assert summary["own_map_at_r"] == height(small_config()) <= summary["map_at_r"]


def test_own_values_are_never_left_out(stand_in, tmp_path):
    for number in range(4):
        stand_in.fails_at = (number, 1)
        with pytest.raises(RuntimeError, match="out of memory"):
            tune(small_config(), ".", tmp_path, trials=1)
    stand_in.fails_at = None
    summary = tune(small_config(), ".", tmp_path, trials=1)
    assert summary["own_map_at_r"] == height(small_config())


def test_values_killed_while_they_are_drawn_are_drawn_again(
    stand_in, whole, tmp_path, monkeypatch
):
    out, _, trained = whole
    tune(small_config(), ".", tmp_path, trials=1)
    suggest = optuna.Trial._suggest

    def killed(trial, name, distribution):
        if name == PER_CLASS:  # the second of them
            raise KeyboardInterrupt
        return suggest(trial, name, distribution)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Trial, "_suggest", killed)
        with pytest.raises(KeyboardInterrupt):
            tune(small_config(), ".", tmp_path, trials=3)
    tune(small_config(), ".", tmp_path, trials=3)
    assert stand_in.trained == trained[:3]


def test_trial_that_fails_twice_is_left_out(stand_in, tmp_path, caplog):
    config = small_config()
    for number in (1, 2):
        stand_in.fails_at = (number, 1)
        with pytest.raises(RuntimeError):
            tune(config, ".", tmp_path, trials=4)
    stand_in.fails_at = None
    assert stand_in.trained[1] == stand_in.trained[2]
    summary = tune(config, ".", tmp_path, trials=4)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "left out after 2 errors" in warning and "out of memory" in warning
    assert summary["complete"] + summary["pruned"] == 4
    states = [row["state"] for row in table(tmp_path)]
    assert states == ["complete", "fail", "fail", "complete", "complete", "complete"]
    settings = [values_of(row) for row in table(tmp_path)]
    assert settings[1] == settings[2]
    assert len(set(settings)) == 5


def test_pairs_alone_have_no_picture(stand_in, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    config = small_config(model={"proxies_per_class": 0})
    assert tune(config, ".", tmp_path, trials=1)["map_at_r"] == height(config)
    assert not list(tmp_path.glob("*.png"))
    assert [*table(tmp_path)[0]][6:] == [
        "loss.arguments.positive_margin",
        "loss.arguments.negative_margin",
    ]


def test_lambda_without_a_projection_is_not_recommended(stand_in, whole, tmp_path):
    assert whole[1]["projected"] == 12 and not whole[1]["without_effect"]
    stand_in.projections = 0
    full = small_config(training={"max_evaluations": 50})
    summary = tune(small_config(), ".", tmp_path, trials=3, full=full)
    assert summary["projected"] == 0
    assert summary["without_effect"] == [PROXIMAL_WEIGHT]
    best = load_config(tmp_path / "best.yaml")
    assert best == full.with_values(summary["values"])
    assert best.model.proximal_weight == full.model.proximal_weight
    assert "lambda had no effect" in (tmp_path / "best.yaml").read_text()
    assert [row["projections"] for row in table(tmp_path)] == ["0"] * 3
    # Beside it the second trial of the study with projections counted two.
    assert {row["projections"] for row in table(whole[0])} <= {"1", "2"}


# ==== What is refused before time is spent ====


def test_a_study_knows_its_data(stand_in, tmp_path):
    root, out = tmp_path / "data", tmp_path / "study"
    root.mkdir()
    emoji = datasets.emoji().select_classes(range(30))
    arrays = {"images": emoji.images, "labels": emoji.labels}
    np.savez(root / "data.npz", **arrays)
    config = small_config(data={"name": "npz", "file": "data.npz"})
    tune(config, root, out, trials=1)
    arrays["images"] = arrays["images"].copy()
    arrays["images"][0, 0, 0] += 1
    np.savez(root / "data.npz", **arrays)
    changed = "1 files changed: images of 0\nPut them back, or choose another --out"
    with pytest.raises(ValueError, match=changed):
        tune(config, root, out, trials=2)


@pytest.mark.parametrize("damage", [0, 100, 0.5, 0.9])
def test_a_damaged_study_is_named(stand_in, tmp_path, damage):
    tune(small_config(), ".", tmp_path, trials=1)
    file = tmp_path / "study.db"
    size = file.stat().st_size
    os.truncate(file, int(damage * size) if damage < 1 else damage)
    with pytest.raises(ValueError, match="study.db must be an undamaged study"):
        tune(small_config(), ".", tmp_path, trials=2)
    assert len(stand_in.trained) == 1


def test_refused(stand_in, tmp_path, monkeypatch):
    config = small_config()
    tune(config, ".", tmp_path / "study", trials=1)
    other = small_config(training={"batch_size": 16})
    changed = "Received: training.batch_size: 8 in the study, 16 now\n"
    with pytest.raises(ValueError, match=changed):
        tune(other, ".", tmp_path / "study")
    with locked(tmp_path / "study"):
        with pytest.raises(BlockingIOError, match="Another process works in"):
            tune(config, ".", tmp_path / "study")
    with pytest.raises(OSError, match="study.db is a file"):
        tune(config, ".", tmp_path / "study" / "study.db")
    with pytest.raises(ValueError, match="--set data.split=mlrc"):
        tune(small_config(data={"split": "conventional"}), ".", tmp_path / "new")
    for module, extra in (("matplotlib", "plots"), ("optuna", "tune")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(ImportError, match=rf"keras-ccp\[{extra}"):
                tune(config, ".", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert len(stand_in.trained) == 1


# ==== A real process, really killed ====

KILLED = """
import conftest, os, signal, sys
from test_tuning import StandIn, small_config
from keras_ccp.app import tuning

class KilledReports(tuning._Reports):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if self._trial.number == 1 and epoch == 1:  # reported, and not yet backed up
            os.kill(os.getpid(), signal.SIGKILL)

trainings = [StandIn(), tuning.train_fold]
tuning.train_fold = lambda *arguments: trainings.pop(0)(*arguments)
tuning._Reports = KilledReports
tuning.tune(small_config(), ".", sys.argv[1], trials=2, verbose=0)
"""


def test_killed_study_goes_on(tmp_path):
    out, config = tmp_path / "killed", small_config()
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(out)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        timeout=120,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL
    with sqlite3.connect(out / "study.db") as database:
        states = database.execute("select number, state from trials").fetchall()
    database.close()
    assert states == [(0, "COMPLETE"), (1, "RUNNING")]
    # What was found until then is there.
    found = load_config(out / "best.yaml")
    assert found.model == config.model
    (first,) = table(out)

    tune(config, ".", out, trials=2, verbose=0)
    rows = table(out)
    assert [row["state"] for row in rows] == ["complete", "fail", "complete"]
    assert rows[0] == first
    assert values_of(rows[1]) == values_of(rows[2]) != values_of(rows[0])
    assert rows[2]["evaluations"] == "3"
    picture = (out / "lambda_proxies.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    # The same model, trained without an interruption and outside of a study.
    values = {key: yaml.safe_load(v) for key, v in rows[2].items() if "." in key}
    training = load_splits(config.data, ".").training
    splits = fold_splits(config.data, training)[0]
    fold = Fold(*splits, tmp_path / "alone", config.seed)
    train_fold(config.with_values(values), fold, ".", tf.distribute.get_strategy(), 0)
    summary = json.loads((fold.directory / "fold.json").read_text())
    assert rows[2]["map_at_r"] == f"{summary['validation']['map_at_r']:.6f}"
    assert len((fold.directory / "log.csv").read_text().splitlines()) == 1 + 3
