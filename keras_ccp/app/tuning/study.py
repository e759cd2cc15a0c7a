"""`tune`: trials of a search, each a model trained as by `keras-ccp train`."""

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

from keras_ccp.app.config import Config, changed_values, check_config
from keras_ccp.app.fold import SUMMARY_FILE, Fold, train_fold
from keras_ccp.app.splits import check_classes, fold_splits, load_splits
from keras_ccp.app.tuning.results import has_picture, reached, write_results
from keras_ccp.app.tuning.search_space import Parameter, search_space, with_values
from keras_ccp.app.tuning.trials import (
    first_try,
    next_trial,
    note_error,
    queue_trials,
    states,
    trial_state,
    tries,
    values_text,
)
from keras_ccp.checks import check_int
from keras_ccp.datasets import Dataset
from keras_ccp.distribute import make_strategy
from keras_ccp.files import check_folder, locked, make_folder

logger = logging.getLogger(__name__)

STUDY_FILE = "study.db"
_RUNNING = "running"
_STARTUP_TRIALS = 5  # without pruning: too few to compare with


def tune(
    config: Config,
    root: str | os.PathLike,
    out: str | os.PathLike,
    trials: int = 20,
    verbose: int | str = "auto",
) -> dict[str, Any]:
    """Searches lambda, the proxies of each class and the parameters of the loss.

    A trial trains the model of fold 0 with other values; its result is the best MAP@R
    on the validation classes of that fold. Test classes are not looked at. The first
    trial has the configuration's own values, so that the best is never below them.
    Trials whose MAP@R is below the median of the others are stopped early.

    Writes `study.db` (Optuna), and after each trial `best.yaml` (a configuration),
    `trials.csv` and, where lambda and proxies are both searched, `lambda_proxies.png`.
    Called again it goes on: a study that was interrupted, however often, ends with the
    same finished trials as one that was not. What was interrupted is tried again. So is
    a trial that ended in an error, which `tune` raises; after its second error it is
    left out, but for the configuration's own values.

    Needs `pip install -e ".[tune,plots]"`.

    Args:
        config: the experiment.
        root: folder of the data.
        out: folder of the study; new, or that of the same experiment.
        trials: int, trials of the study that are finished in the end, pruned ones among
            them and those of earlier calls. Defaults to 20.
        verbose: as for `keras.Model.fit`.

    Returns:
        dict of `map_at_r`, the best; `own_map_at_r`, that of the configuration's own
        values; `values`, the best by key; `complete` and `pruned`, numbers of trials.

    Raises:
        ImportError: If Optuna, or matplotlib for the picture, is not installed.
        BlockingIOError: If another process runs the study in `out`.
        OSError: If `out` is no folder, or cannot be made.
        ValueError: If the study in `out` is of another experiment, a value cannot be
            searched, or the experiment holds no classes out or needs several workers.
    """
    check_int("trials", trials, minimum=1)
    _check(config)
    space = search_space(config)
    optuna = _required("optuna", "tune")
    if has_picture(space):
        _required("matplotlib", "plots")
    out = Path(out)
    check_folder("out", out)
    strategy = make_strategy(
        config.distribution.strategy, config.distribution.devices
    )
    training = load_splits(config.data, root).training
    check_classes(config, training)
    fold = fold_splits(config.data, training)[0]
    task = _Task(config, root, *fold, strategy, out)
    make_folder(out)
    with locked(out), _opened(optuna, config, out) as study:
        queue_trials(study, space)
        while True:
            if states(study.trials, "COMPLETE"):
                write_results(study, config, space, out)
            done = len(states(study.trials, "COMPLETE", "PRUNED"))
            if done >= trials:
                return _summary(study, space)
            trial = next_trial(study, space, config.seed)
            text = values_text(trial.params)
            logger.info("trial %d of %d: %s", done + 1, trials, text)
            try:
                _run(study, trial, task, verbose)
            except Exception as error:  # not KeyboardInterrupt
                note_error(trial, error)
                raise


@dataclasses.dataclass(frozen=True)
class _Task:
    """What all trials share."""

    config: Config
    root: str | os.PathLike
    training: Dataset
    validation: Dataset
    strategy: tf.distribute.Strategy
    out: Path


class _Reports(keras.callbacks.Callback):
    """Tells a trial each MAP@R, and stops the training where it is to be pruned."""

    def __init__(self, trial: Any, reported: dict[int, float]):
        super().__init__()
        self._trial = trial
        self._reported = reported

    def on_epoch_end(self, epoch, logs=None):
        map_at_r = (logs or {}).get("val_map_at_r")
        if map_at_r is None:  # weights are no longer finite: the training ends
            return
        if epoch not in self._reported:
            self._trial.report(map_at_r, epoch)
        if self._trial.should_prune():
            self.model.stop_training = True


def _run(study: Any, trial: Any, task: _Task, verbose: int | str) -> None:
    """Trains a trial, from the last evaluation on if it is tried again."""
    # A retry takes over the folder, and so the backup, of what was interrupted.
    number, reported = first_try(trial), {}
    for tried in tries(study, trial):
        reported.update(tried.intermediate_values)
    for step, map_at_r in reported.items():
        trial.report(map_at_r, step)
    directory = task.out / _RUNNING / str(number)
    fold = Fold(task.training, task.validation, directory, task.config.seed)
    if not fold.is_finished:
        config = with_values(task.config, trial.params)
        reports = _Reports(trial, reported)
        train_fold(config, fold, task.root, task.strategy, verbose, [reports])
    if trial.should_prune():
        study.tell(trial, state=trial_state("PRUNED"))
    else:
        summary = json.loads((directory / SUMMARY_FILE).read_text())
        study.tell(trial, summary["validation"]["map_at_r"])
    ended = study.trials[trial.number]
    logger.info(
        "%s after %d evaluations: MAP@R %.4f",
        ended.state.name.lower(),
        len(ended.intermediate_values),
        reached(ended),
    )
    shutil.rmtree(task.out / _RUNNING)


@contextlib.contextmanager
def _opened(optuna: ModuleType, config: Config, out: Path) -> Iterator[Any]:
    """The `optuna.Study` in a folder, made where there is none."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{out.absolute() / STUDY_FILE}")
    try:
        study = optuna.create_study(
            storage=storage,
            study_name="keras-ccp",
            direction="maximize",
            # Not before a problem can have ended: until then lambda has no part.
            pruner=optuna.pruners.MedianPruner(
                _STARTUP_TRIALS, n_warmup_steps=config.proxies.patience
            ),
            load_if_exists=True,
        )
        _claim(study, config, out)
        yield study
    finally:
        storage.engine.dispose()


def _summary(study: Any, space: dict[str, Parameter]) -> dict[str, Any]:
    own = {key: parameter.own for key, parameter in space.items()}
    complete = states(study.trials, "COMPLETE")
    own_map_at_r = next(trial.value for trial in complete if trial.params == own)
    return {
        "map_at_r": study.best_value,
        "own_map_at_r": own_map_at_r,
        "values": study.best_params,
        "complete": len(complete),
        "pruned": len(states(study.trials, "PRUNED")),
    }


# ==== Checks ====


def _check(config: Config) -> None:
    if config.data.split == "conventional":
        raise ValueError(
            "`data.split` must hold classes out, by which trials are compared; the "
            "values that are found can be used for training on all: "
            "--set data.split=mlrc. Received: data.split=conventional"
        )
    if config.distribution.strategy == "multi_worker":
        raise ValueError(
            "`distribution.strategy` must be none or mirrored: trials run on one "
            "machine. Received: distribution.strategy=multi_worker"
        )


def _claim(study: Any, config: Config, out: Path) -> None:
    """Refuses a study of another experiment; on other devices it is the same."""
    if "config" not in study.user_attrs:
        study.set_user_attr("config", config.model_dump(mode="json"))
        return
    then = check_config(study.user_attrs["config"])
    changed = changed_values(then, config, "in the study")
    if changed:
        raise ValueError(
            f"`config` must be that of the study in {out}; give the same file and "
            f"--set, or choose another --out. Received: {changed}"
        )


def _required(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'`tune` needs {module}: pip install -e ".[{extra}]"'
        ) from error
