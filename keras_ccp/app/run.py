"""A whole protocol: all models of all repetitions, and the row they make."""

import contextlib
import csv
import importlib.metadata
import io
import json
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import tensorflow as tf

from keras_ccp.app.config import Config, changed_values, check_config, dump_config
from keras_ccp.app.evaluation import (
    METRICS,
    join_embedders,
    score_folds,
    summarize,
)
from keras_ccp.app.fold import Fold, train_fold
from keras_ccp.app.splits import (
    Splits,
    check_classes,
    fold_splits,
    load_splits,
)
from keras_ccp.app.yaml_files import read_yaml
from keras_ccp.checks import check_int
from keras_ccp.distribute import (
    is_chief,
    lost_workers,
    make_strategy,
    wait_for_workers,
    writable,
)
from keras_ccp.files import (
    check_folder,
    locked,
    make_folder,
    write_whole,
)
from keras_ccp.serving import export_trained

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.json"


def train_run(
    config: Config,
    root: str | os.PathLike,
    out: str | os.PathLike,
    repeats: int = 1,
    resume: bool = False,
    verbose: int | str = "auto",
) -> dict:
    """Trains and scores every model of an experiment.

    Args:
        config: the experiment.
        root: folder of the data.
        out: folder for everything that is written; new, or with `resume` an old one.
        repeats: how often the whole protocol runs, each time with another seed.
        resume: goes on with what is in `out`. Models that are finished there are not
            trained again.
        verbose: as for `keras.Model.fit`.

    Returns:
        The metrics, as `evaluate_run` gives them.

    Raises:
        FileExistsError: If `out` holds a run and `resume` is not set.
        BlockingIOError: If another process trains in `out`.
        OSError: If `out` is no folder, or cannot be made.
        ValueError: If the run in `out` has another configuration, the data have too
            few classes for it, or this machine not the devices of
            `config.distribution`.
        ConnectionError: If another worker has ended.
    """
    check_int("repeats", repeats, minimum=1)
    # First, since it decides which devices TensorFlow begins with.
    strategy = make_strategy(
        config.distribution.strategy, config.distribution.devices
    )
    out = Path(out)
    if is_chief(strategy):
        check_folder("out", out)
        _check_out(out, config, resume)
        if (out / CONFIG_FILE).exists():
            with locked(out):  # refused before the data are loaded
                pass
    splits = load_splits(config.data, root)
    check_classes(config, splits.training)
    with contextlib.ExitStack() as stack:
        # Not before, so that data which do not fit leave nothing behind.
        if is_chief(strategy):
            stack.enter_context(_claimed(out, config, resume))
        stack.enter_context(lost_workers(strategy))
        folds = _folds(config, splits, out, repeats)
        for index, fold in enumerate(folds):
            if not fold.is_finished:
                logger.info(_title(index, len(folds), repeats))
                train_fold(config, fold, root, strategy, verbose)
        wait_for_workers(strategy)  # until the chief has written the last model
        metrics = _score(config, splits, out, strategy)
        wait_for_workers(strategy)  # one that leaves early takes the others down
    return metrics


def evaluate_run(run: str | os.PathLike, root: str | os.PathLike) -> dict:
    """Scores the finished models of a run on the test classes.

    Writes `metrics.json`, `metrics.csv` and the SavedModel `embedder`: images -> the
    embeddings of all models of the first repetition side by side, as
    `serving.export_trained` writes it.

    Args:
        run: folder of the run.
        root: folder of the data.

    Returns:
        dict of `separated` and `concatenated`: for each metric its mean and the half
        width of its 95 % interval; `models` and `repetitions`: the single scores.

    Raises:
        FileNotFoundError: If there is no run, or none of its models is finished.
    """
    run = Path(run)
    config = load_run_config(run)
    splits = load_splits(config.data, root)
    if message := unfinished(run, config):
        logger.warning("%s: %s", run, message)
    return _score(config, splits, run, tf.distribute.get_strategy())


def unfinished(run: Path, config: Config) -> str:
    """What is to be said of a run whose models are not all finished.

    Args:
        run: folder of the run.
        config: its configuration.

    Returns:
        A line, empty where they are.
    """
    finished, count = sum(map(len, _finished(run))), count_models(run, config)
    if finished >= count:
        return ""
    return f"{finished} of {count} models are finished: not the protocol's result"


def count_models(run: Path, config: Config) -> int:
    """How many models a run has when it is finished.

    Args:
        run: folder of the run. Its repetitions are those that began: how many were
            asked for is not written down.
        config: its configuration.
    """
    folds = config.data.folds if config.data.split == "mlrc" else 1
    return folds * max(1, len(list(run.glob("repeat*"))))


def load_run_config(run: str | os.PathLike) -> Config:
    """The configuration of a run.

    Args:
        run: folder of the run.

    Raises:
        FileNotFoundError: If there is no run.
    """
    path = Path(run) / CONFIG_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"There is no run in {run}: it has no {CONFIG_FILE}. "
            "`keras-ccp train CONFIG --data ROOT --out RUN` makes one"
        )
    return check_config(read_yaml(path), str(path))


def _check_out(out: Path, config: Config, resume: bool) -> None:
    if (out / CONFIG_FILE).exists():
        if not resume:
            raise FileExistsError(
                f"`out` must be a new folder, or go on with --resume. Received: {out}, "
                "which holds a run"
            )
        changed = changed_values(load_run_config(out), config, "in the run")
        if changed:
            raise ValueError(
                f"`config` must be that of the run in {out}, which is resumed; give "
                f"the same file and --set, or choose another `out`. Received: {changed}"
            )


@contextlib.contextmanager
def _claimed(out: Path, config: Config, resume: bool) -> Iterator[None]:
    """Keeps the folder for this process, and says whose it is."""
    make_folder(out)
    with locked(out):
        # Another process may have trained here while the data were loaded.
        _check_out(out, config, resume)
        if not (out / CONFIG_FILE).exists():
            write_whole(out / "versions.json", json.dumps(_versions(), indent=2))
            write_whole(out / CONFIG_FILE, dump_config(config))
        yield


def _versions() -> dict[str, str]:
    names = ("keras-ccp", "tensorflow", "keras", "numpy")
    versions = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **versions}


def _folds(config: Config, splits: Splits, out: Path, repeats: int) -> list[Fold]:
    pairs = fold_splits(config.data, splits.training)
    return [
        Fold(
            training,
            validation,
            out / f"repeat{repeat}" / f"fold{number}",
            # No two models share a seed, however many folds and repetitions.
            config.seed + 1000 * repeat + number,
        )
        for repeat in range(repeats)
        for number, (training, validation) in enumerate(pairs)
    ]


def _title(index: int, count: int, repeats: int) -> str:
    """Which model it is, counted from 1 as in the report."""
    per_repeat = count // repeats
    repeat, fold = divmod(index, per_repeat)
    model = f"model {fold + 1} of {per_repeat}"
    return f"repetition {repeat + 1} of {repeats}, {model}" if repeats > 1 else model


def _score(
    config: Config, splits: Splits, run: Path, strategy: tf.distribute.Strategy
) -> dict:
    repetitions = _finished(run)
    scores = [score_folds(folds, splits, strategy) for folds in repetitions]
    separated = [score for part in scores for score in part["separated"]]
    concatenated = [score for part in scores for score in part["concatenated"]]
    metrics = {
        "dataset": config.data.name,
        "method": config.method,
        "separated": summarize(separated),
        "concatenated": summarize(concatenated),
        "models": separated,
        "repetitions": concatenated,
    }
    with writable(run, strategy) as directory:
        text = json.dumps(metrics, indent=2, allow_nan=False)
        write_whole(directory / METRICS_FILE, text)
        write_whole(directory / "metrics.csv", _table(separated, concatenated))
        embedder = join_embedders(repetitions[0])
        export_trained(embedder, directory / "embedder", splits.query)
    return metrics


def _finished(run: Path) -> list[list[Path]]:
    """Folders of the finished models of each repetition."""
    repetitions = [
        sorted(path.parent for path in repeat.glob("fold*/fold.json"))
        for repeat in sorted(run.glob("repeat*"))
    ]
    repetitions = [folds for folds in repetitions if folds]
    if not repetitions:
        raise FileNotFoundError(
            f"No model of {run} is finished. Go on with `keras-ccp train ... --resume`"
        )
    return repetitions


def _table(separated: Sequence[dict], concatenated: Sequence[dict]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["kind", "number", *METRICS])
    for kind, scores in (("model", separated), ("repetition", concatenated)):
        for number, score in enumerate(scores):
            writer.writerow([kind, number, *(score[name] for name in METRICS)])
    return text.getvalue()
