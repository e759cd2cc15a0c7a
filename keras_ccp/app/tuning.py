"""A search for the hyper-parameters of an experiment on its validation classes."""

import contextlib
import csv
import dataclasses
import io
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_ccp import losses
from keras_ccp.app.config import (
    Config,
    check_config,
)
from keras_ccp.app.fold import SUMMARY_FILE, Fold, train_fold
from keras_ccp.app.record import keep_record, read_record, record
from keras_ccp.app.run import claimed
from keras_ccp.app.splits import check_classes, fold_splits, load_recorded
from keras_ccp.checks import require
from keras_ccp.distribute import make_strategy
from keras_ccp.files import read_json, reading, write_file

logger = logging.getLogger(__name__)

BEST_FILE, TABLE_FILE = "best.yaml", "trials.csv"
PICTURE_FILE, STUDY_FILE = "lambda_proxies.png", "study.db"
FILES = (BEST_FILE, TABLE_FILE, PICTURE_FILE, STUDY_FILE)
# What is shortened for the trials, and is not of the best.
SCHEDULE = (
    "training.max_evaluations",
    "training.steps_per_evaluation",
    "callback.stop_patience",
)
_STARTUP_TRIALS = 5  # without pruning: too few to compare with
_MAX_ERRORS = 2
_STUDY_REMEDY = "Copy it back, or delete it to search again"

# ==== The search space ====

PROXIMAL_WEIGHT = "model.proximal_weight"
PER_CLASS = "model.proxies_per_class"
# Lowest and highest, and "log" where each factor counts the same in place of each
# difference: around every value that the paper and its sources use for any dataset.
_PROXIMAL_WEIGHTS = (1e-5, 1e-1, "log")
LOSS_RANGES = {
    "contrastive": {"positive_margin": (0.0, 0.3), "negative_margin": (0.3, 0.8)},
    "cosine_contrastive": {"margin": (0.2, 0.8)},
    "multi_similarity": {
        "alpha": (1.0, 20.0, "log"),
        "beta": (20.0, 100.0, "log"),
        "base": (0.3, 0.8),
    },
    "proxy_anchor": {"margin": (0.0, 0.3), "alpha": (16.0, 64.0, "log")},
    "proxy_nca": {"temperature": (0.03, 0.3, "log")},
    "soft_triple": {
        "scale": (10.0, 100.0, "log"),
        "gamma": (0.05, 50.0, "log"),
        "tau": (0.0, 0.3),
        "margin": (0.0, 0.4),
    },
    "triplet": {"margin": (0.02, 0.5, "log")},
}


class Parameter(NamedTuple):
    """The value that the configuration has, and Optuna's range of those to try."""

    own: float
    range: Any


def search_space(config: Config) -> dict[str, Parameter]:
    """What there is to tune of an experiment, by key as in an override.

    The parameters of its loss; where it has proxies, how many of each class, up to
    `callback.pool_size`; and where these are projected, lambda. Ranges reach as far as
    the configuration's own values, so that they are among what is searched.
    """
    kinds = require("optuna.distributions", "tune")
    model, callback = config.model, config.callback
    ranges, space = {}, {}
    if model.proxies_per_class and callback.max_projections != 0:
        ranges[PROXIMAL_WEIGHT] = model.proximal_weight, *_PROXIMAL_WEIGHTS
    if model.proxies_per_class and callback.pool_size > 1:
        ranges[PER_CLASS] = model.proxies_per_class, 1, callback.pool_size
    loss = losses.get(config.loss.name, **config.loss.arguments)
    for name, values in LOSS_RANGES.get(config.loss.name, {}).items():
        ranges[f"loss.arguments.{name}"] = getattr(loss, name), *values
    for key, (own, low, high, *log) in ranges.items():
        if log and own <= 0:
            raise ValueError(
                f"`{key}` must be above 0 to be tuned, since it is searched by factors."
                f" Received: {own}\nBegin within the range: --set {key}={low:g}"
            )
        kind = kinds.IntDistribution if key == PER_CLASS else kinds.FloatDistribution
        values = kind(min(low, own), max(high, own), log=bool(log))
        space[key] = Parameter(own, values)
    return space


# ==== The study ====


def tune(
    config: Config,
    root: str | os.PathLike,
    out: str | os.PathLike,
    trials: int = 20,
    verbose: int | str = "auto",
    full: Config | None = None,
) -> dict[str, Any]:
    """Searches lambda, the proxies of each class and the parameters of the loss.

    A trial trains the model of fold 0 with other values; its result is the best MAP@R
    on the validation classes of that fold. Test classes are not looked at. The first
    trial has the configuration's own values, so that the best is never below them.
    Trials whose MAP@R is below the median of the others are stopped early.

    Where the best trial went on after no projection, lambda was no part of its loss and
    is not among the best values.

    Writes `study.db` (Optuna), `data.json` (the files, which have to stay as they are),
    and after each trial `best.yaml` (a configuration), `trials.csv` and, where lambda
    and proxies are both searched, `lambda_proxies.png`.
    Called again it goes on: a study that was interrupted, however often, ends with the
    same finished trials as one that was not. What was interrupted is tried again. So is
    a trial that ended in an error, which `tune` raises; after its second error it is
    left out, but for the configuration's own values.

    Needs `pip install "keras-ccp[tune,plots]"`.

    Args:
        config: the experiment.
        root: folder of the data.
        out: folder of the study; new, or that of the same experiment.
        trials: int, trials of the study that are finished in the end, pruned ones among
            them and those of earlier calls. Defaults to 20.
        verbose: as for `keras.Model.fit`.
        full: the experiment with its whole schedule, into which `best.yaml` puts the
            values. Defaults to `None`: `config`.

    Returns:
        dict of `map_at_r`, the best; `own_map_at_r`, that of the configuration's own
        values; `values`, the best by key; `without_effect`, the keys left out of them;
        `complete`, `pruned` and `projected`, numbers of trials, the last of those that
        went on after a projection.

    Raises:
        ImportError: If Optuna, or matplotlib for the picture, is not installed.
        BlockingIOError: If another process runs the study in `out`.
        OSError: If `out` is no folder, or cannot be made.
        ValueError: If the study in `out` is of another experiment, of other data or
            damaged, a value cannot be searched, or the experiment holds no classes out.
    """
    if config.data.split == "conventional":
        raise ValueError(
            "`data.split: conventional` holds no classes out to compare trials by\n"
            "Search with --set data.split=mlrc, and train on all with what is found"
        )
    space, out = search_space(config), Path(out)
    if PROXIMAL_WEIGHT in space and PER_CLASS in space:
        require("matplotlib", "plots")
    strategy = make_strategy(**config.distribution)
    with claimed(out):
        then = read_record(out) if (out / STUDY_FILE).exists() else {}
        splits, others = load_recorded(config.data, root, then)
        check_classes(config, splits.training)
        now = record(config, splits, others, root)
        parts = fold_splits(config.data, splits.training)[0]
        fold = Fold(*parts, out / "running", config.seed)
        with _opened(config, out) as study:
            keep_record(out, then, now, "Put them back, or choose another --out")
            _queue(study, space)
            while True:
                if _in(study, "COMPLETE"):
                    _write_results(study, full or config, space, out)
                done = len(_in(study, "COMPLETE", "PRUNED"))
                if done >= trials:
                    return _summary(study, space)
                trial = _next_trial(study, space, config.seed)
                logger.info("trial %d of %d: %s", done + 1, trials, _text(trial.params))
                try:
                    _run(study, trial, config, fold, root, strategy, verbose)
                except Exception as error:  # not KeyboardInterrupt
                    errors = trial.user_attrs.get("errors", [])
                    error_text = f"{type(error).__name__}: {error}"
                    trial.set_user_attr("errors", [*errors, error_text])
                    raise


@contextlib.contextmanager
def _opened(config: Config, out: Path) -> Iterator[Any]:
    """The `optuna.Study` in a folder, made where there is none."""
    optuna = require("optuna", "tune")
    _check_study(path := out.absolute() / STUDY_FILE)
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    # Not before a problem can have ended: until then lambda has no part.
    pruner = optuna.pruners.MedianPruner(_STARTUP_TRIALS, config.callback.patience)
    try:
        with reading(f"{path} must be an undamaged study", _STUDY_REMEDY):
            study = optuna.create_study(
                storage=storage,
                study_name="keras-ccp",
                direction="maximize",
                pruner=pruner,
                load_if_exists=True,
            )
            then = study.user_attrs.get("config")
            [_values(trial) for trial in study.trials]
        if then is None:
            study.set_user_attr("config", config.model_dump(mode="json"))
        elif changed := check_config(then).changes(config, "in the study"):
            raise ValueError(
                f"`config` must be that of the study in {out}. Received: {changed}\n"
                "Give the same names or file and --set, or choose another --out"
            )
        yield study
    finally:
        storage.engine.dispose()


def _check_study(path: Path) -> None:
    """Refuses a database that is damaged, or was emptied, which would begin again."""
    if not path.exists():
        return
    with reading(f"{path} must be an undamaged study", _STUDY_REMEDY):
        database = sqlite3.connect(path)
        try:
            tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            found = database.execute("PRAGMA integrity_check").fetchone()
        finally:
            database.close()
        if found != ("ok",) or tables == (0,):
            raise ValueError(f"{found[0]}, {tables[0]} tables")


def _in(study: Any, *names: str) -> list[Any]:
    """The trials that are in one of some states."""
    return [trial for trial in study.trials if trial.state.name in names]


def _text(values: dict[str, float]) -> str:
    return ", ".join(f"{key}={value:.4g}" for key, value in values.items())


# ==== Trials, and those that did not finish ====


def _first(trial: Any) -> int:
    """Number of the trial that this one tries again, or its own."""
    return trial.user_attrs.get("first", trial.number)


def _values(trial: Any) -> dict[str, Any]:
    """Values of a trial, also where it was killed before it had taken them up."""
    return {**trial.user_attrs.get("values", {}), **trial.params}


def _queue(study: Any, space: dict[str, Parameter]) -> None:
    """Queues the own values, and again what did not finish.

    What was interrupted is tried again without limit; what ended in errors is not, but
    for the own values, by which the others are judged.
    """
    own = {key: parameter.own for key, parameter in space.items()}
    if not study.trials:
        study.enqueue_trial(own, user_attrs={"values": own})
    for trial in _in(study, "RUNNING"):  # of a process that is no more: `out` is locked
        study.tell(trial.number, state=_state("FAIL"))
    for first, trial in {_first(trial): trial for trial in study.trials}.items():
        values, errors = _values(trial), trial.user_attrs.get("errors", [])
        # Without all of its values it had not begun.
        if trial.state.name != "FAIL" or values.keys() != space.keys():
            continue
        if len(errors) < _MAX_ERRORS or values == own:
            attributes = {"first": first, "values": values, "errors": errors}
            study.enqueue_trial(values, user_attrs=attributes)
        else:
            text = "left out after %d errors, of which the last is %s: %s"
            logger.warning(text, len(errors), errors[-1], _text(values))


def _next_trial(study: Any, space: dict[str, Parameter], seed: int) -> Any:
    """The trial that is queued, or one with new values.

    Each is drawn by a seed of its own: a sampler that goes on after a kill would draw
    again what it drew at the start.
    """
    begun = {_first(t) for t in study.trials if _values(t).keys() == space.keys()}
    (drawn,) = np.random.SeedSequence([seed, len(begun)]).generate_state(1)
    study.sampler = require("optuna", "tune").samplers.TPESampler(seed=int(drawn))
    return study.ask({key: parameter.range for key, parameter in space.items()})


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
        # Those that steps of this epoch followed.
        self._trial.set_user_attr("projections", int((logs or {}).get("projection", 0)))
        if epoch not in self._reported:
            self._trial.report(map_at_r, epoch)
        if self._trial.should_prune():
            self.model.stop_training = True


def _run(
    study: Any,
    trial: Any,
    config: Config,
    fold: Fold,
    root: str | os.PathLike,
    strategy: tf.distribute.Strategy,
    verbose: int | str,
) -> None:
    """Trains a trial, from the last evaluation on if it is tried again."""
    reported = {}
    for other in study.trials:
        if _first(other) == _first(trial):
            reported.update(other.intermediate_values)
            if "projections" in other.user_attrs:
                trial.set_user_attr("projections", other.user_attrs["projections"])
    for step, map_at_r in reported.items():
        trial.report(map_at_r, step)
    # A retry takes over the folder, and so the backup, of what was interrupted.
    directory = fold.directory / str(_first(trial))
    if not (fold := dataclasses.replace(fold, directory=directory)).is_finished:
        reports = _Reports(trial, reported)
        tried = config.with_values(trial.params)
        train_fold(tried, fold, root, strategy, verbose, [reports])
    if trial.should_prune():
        study.tell(trial, state=_state("PRUNED"))
    else:
        summary = read_json(directory / SUMMARY_FILE, "validation")
        study.tell(trial, summary["validation"]["map_at_r"])
    ended = study.trials[trial.number]
    text, evaluations = "%s after %d evaluations: MAP@R %.4f", ended.intermediate_values
    logger.info(text, ended.state.name.lower(), len(evaluations), _reached(ended))
    shutil.rmtree(directory.parent)


def _state(name: str) -> Any:
    return require("optuna", "tune").trial.TrialState[name]


# ==== Results ====


def _reached(trial: Any) -> float:
    """MAP@R of a trial: its result, or of one that was cut short its best."""
    return max([*trial.intermediate_values.values(), *(trial.values or ())])


def _projections(trial: Any) -> int:
    return trial.user_attrs.get("projections", 0)


def _best_values(study: Any) -> dict[str, Any]:
    """Without lambda where it was no part of the loss."""
    best = study.best_trial
    return {
        key: value
        for key, value in best.params.items()
        if key != PROXIMAL_WEIGHT or _projections(best)
    }


def _summary(study: Any, space: dict[str, Parameter]) -> dict[str, Any]:
    own = {key: parameter.own for key, parameter in space.items()}
    complete = _in(study, "COMPLETE")
    return {
        "map_at_r": study.best_value,
        "own_map_at_r": next(t.value for t in complete if t.params == own),
        "values": _best_values(study),
        "without_effect": [*study.best_params.keys() - _best_values(study).keys()],
        "complete": len(complete),
        "pruned": len(_in(study, "PRUNED")),
        "projected": sum(
            map(bool, map(_projections, _in(study, "COMPLETE", "PRUNED")))
        ),
    }


def _write_results(
    study: Any, config: Config, space: dict[str, Parameter], out: Path
) -> None:
    best = study.best_trial
    comment = (
        f"# Trial {best.number} of a study with {len(study.trials)}: MAP@R "
        f"{best.value:.4f} on the validation classes of fold 0.\n"
    )
    if PROXIMAL_WEIGHT in best.params and not _projections(best):
        comment += "# It made no projection, so that lambda had no effect: not set.\n"
    values = config.with_values(_best_values(study))
    write_file(out / BEST_FILE, comment + values.to_yaml())
    write_file(out / TABLE_FILE, _table(study, space))
    if PROXIMAL_WEIGHT in space and PER_CLASS in space:
        write_file(out / PICTURE_FILE, _picture(study, space))


def _table(study: Any, space: dict[str, Parameter]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["trial", "state", "map_at_r", "evaluations", "projections", "seconds", *space]
    )
    for trial in study.trials:
        evaluations = len(trial.intermediate_values)
        has_value = evaluations or trial.values
        seconds = trial.duration and round(trial.duration.total_seconds(), 1)
        writer.writerow(
            [
                trial.number,
                trial.state.name.lower(),
                f"{_reached(trial):.6f}" if has_value else "",
                evaluations,
                _projections(trial),
                seconds,  # empty for None
                *(trial.params.get(key, "") for key in space),
            ]
        )
    return text.getvalue()


def _picture(study: Any, space: dict[str, Parameter]) -> bytes:
    from keras_ccp.monitor.figures import search_figure  # needs matplotlib

    drawn = _in(study, "COMPLETE", "PRUNED")
    figure = search_figure(
        [trial.params[PROXIMAL_WEIGHT] for trial in drawn],
        [trial.params[PER_CLASS] for trial in drawn],
        [_reached(trial) for trial in drawn],
        is_pruned=[trial.state.name == "PRUNED" for trial in drawn],
        own=(space[PROXIMAL_WEIGHT].own, space[PER_CLASS].own),
    )
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
