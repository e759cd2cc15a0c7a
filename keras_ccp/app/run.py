"""A whole protocol: all models of all repetitions, and the row they make."""

import contextlib
import csv
import importlib.metadata
import io
import json
import logging
import math
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scipy.special import stdtrit

from keras_ccp import distribute, retrieval
from keras_ccp.app.config import Config, changed_values, dump_config, load_config
from keras_ccp.app.fold import EMBEDDER_FILE, SUMMARY_FILE, Fold, train_fold
from keras_ccp.app.splits import Splits, check_classes, fold_splits, load_splits
from keras_ccp.files import LOCK_FILE, check_folder, locked, write_file
from keras_ccp.pipeline import embed
from keras_ccp.serving import export_trained

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
METRICS_FILE = "metrics.json"
METRICS = ("precision_at_1", "precision_at_r", "map_at_r")


# ==== Training ====


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
    # First, since it decides which devices TensorFlow begins with.
    strategy = distribute.make_strategy(**config.distribution)
    out = Path(out)
    with contextlib.ExitStack() as stack:
        if distribute.is_chief(strategy):
            stack.enter_context(claimed(out))
            _refuse_another(out, config, resume)
        splits = load_splits(config.data, root)
        check_classes(config, splits.training)
        if distribute.is_chief(strategy) and not (out / CONFIG_FILE).exists():
            record = {"data": str(Path(root).absolute()), "versions": _versions()}
            write_file(out / RUN_FILE, json.dumps(record, indent=2))
            write_file(out / CONFIG_FILE, dump_config(config))
        stack.enter_context(distribute.lost_workers(strategy))
        folds = _folds(config, splits, out, repeats)
        for index, fold in enumerate(folds):
            if not fold.is_finished:
                logger.info(_title(index, len(folds), repeats))
                train_fold(config, fold, root, strategy, verbose)
        distribute.wait_for_workers(strategy)  # until the chief has written the last
        metrics = _score(config, splits, out, strategy)
        # One that leaves early takes the others down.
        distribute.wait_for_workers(strategy)
    return metrics


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Keeps a folder for this process, and leaves none where nothing was written."""
    check_folder("out", out)
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        try:
            yield
        finally:
            if is_new and [path.name for path in out.iterdir()] == [LOCK_FILE]:
                (out / LOCK_FILE).unlink()
                out.rmdir()


def _refuse_another(out: Path, config: Config, resume: bool) -> None:
    if not (out / CONFIG_FILE).exists():
        return
    if not resume:
        raise FileExistsError(f"{out} holds a run\nGo on with it by --resume")
    if changed := changed_values(load_run_config(out), config, "in the run"):
        raise ValueError(
            f"`config` must be that of the run in {out}. Received: {changed}\n"
            "Give the same names or file and --set, or choose another --out"
        )


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


# ==== A run that is there ====


def evaluate_run(run: str | os.PathLike, root: str | os.PathLike | None = None) -> dict:
    """Scores the finished models of a run on the test classes.

    Writes `metrics.json`, `metrics.csv` and the SavedModel `embedder`: images -> the
    embeddings of all models of the first repetition side by side, as
    `serving.export_trained` writes it.

    Args:
        run: folder of the run.
        root: folder of the data. Defaults to that of the training.

    Returns:
        dict of `separated` and `concatenated`: for each metric its mean and the half
        width of its 95 % interval; `models` and `repetitions`: the single scores.

    Raises:
        FileNotFoundError: If there is no run, or none of its models is finished.
    """
    run = Path(run)
    config = load_run_config(run)
    if root is None:
        root = json.loads((run / RUN_FILE).read_text("utf-8"))["data"]
    splits = load_splits(config.data, root)
    if message := unfinished(run, config):
        logger.warning("%s: %s", run, message)
    return _score(config, splits, run, tf.distribute.get_strategy())


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
            f"There is no run in {run}: it has no {CONFIG_FILE}\n"
            "`keras-ccp train` makes one"
        )
    return load_config(path)


def unfinished(run: Path, config: Config) -> str:
    """A line to say of a run whose models are not all finished, or nothing."""
    finished, count = sum(map(len, _finished(run))), count_models(run, config)
    if finished >= count:
        return ""
    return f"{finished} of {count} models are finished: not the protocol's result"


def count_models(run: Path, config: Config) -> int:
    """How many models a run has when the repetitions that it began are finished."""
    folds = config.data.folds if config.data.split == "mlrc" else 1
    return folds * max(1, len(list(run.glob("repeat*"))))


def _finished(run: Path) -> list[list[Path]]:
    """Folders of the finished models of each repetition."""
    repetitions = [
        sorted(path.parent for path in repeat.glob(f"fold*/{SUMMARY_FILE}"))
        for repeat in sorted(run.glob("repeat*"))
    ]
    repetitions = [folds for folds in repetitions if folds]
    if not repetitions:
        raise FileNotFoundError(f"No model of {run} is finished\nGo on by --resume")
    return repetitions


def join_embedders(directories: Sequence[Path]) -> keras.Model:
    """One model of several: images -> their embeddings side by side."""
    embedders = [keras.models.load_model(d / EMBEDDER_FILE) for d in directories]
    if len(embedders) == 1:
        return embedders[0]
    given = embedders[0].inputs[0]
    images = keras.Input(batch_shape=given.shape, dtype=given.dtype)
    for number, embedder in enumerate(embedders):
        embedder.name = f"fold{number}"
    parts = [embedder(images) for embedder in embedders]
    return keras.Model(images, keras.layers.Concatenate()(parts), name="embedder")


# ==== Scores ====


def _score(
    config: Config, splits: Splits, run: Path, strategy: tf.distribute.Strategy
) -> dict:
    """Scores each finished model alone and those of a repetition side by side."""
    repetitions, models, joined = _finished(run), [], []
    for directories in repetitions:
        parts = []
        for directory in directories:
            with strategy.scope():
                embedder = keras.models.load_model(directory / EMBEDDER_FILE)
            parts.append([embed(embedder, splits.query)])
            if splits.gallery is not None:
                parts[-1].append(embed(embedder, splits.gallery))
            models.append(_evaluate(parts[-1:], splits))
        joined.append(_evaluate(parts, splits))
    metrics = {
        "dataset": config.data.name,
        "method": config.method,
        "separated": summarize(models),
        "concatenated": summarize(joined),
        "models": models,
        "repetitions": joined,
    }
    with distribute.writable(run, strategy) as directory:
        text = json.dumps(metrics, indent=2, allow_nan=False)
        write_file(directory / METRICS_FILE, text)
        write_file(directory / "metrics.csv", _table(models, joined))
        embedder = join_embedders(repetitions[0])
        export_trained(embedder, directory / "embedder", splits.query)
    return metrics


def _evaluate(parts: list[list[np.ndarray]], splits: Splits) -> dict:
    """Metrics of embeddings side by side: for each model queries, and a gallery."""
    query, *gallery = (
        np.concatenate(each, axis=1) for each in zip(*parts, strict=True)
    )
    gallery = [(part, splits.gallery.labels) for part in gallery]
    return retrieval.evaluate(query, splits.query.labels, *sum(gallery, ()))


def summarize(scores: Sequence[dict]) -> dict[str, dict[str, float | None]]:
    """`mean` and half the width of the 95 % `interval` of metrics, by Student's t."""
    summary, count = {}, len(scores)
    for name in METRICS:
        values = np.array([score[name] for score in scores], np.float64)
        interval = None  # not known from a single score
        if count > 1:
            error = values.std(ddof=1) / math.sqrt(count)
            interval = float(stdtrit(count - 1, 0.975) * error)
        summary[name] = {"mean": float(values.mean()), "interval": interval}
    return summary


def _table(models: Sequence[dict], repetitions: Sequence[dict]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["kind", "number", *METRICS])
    for kind, scores in (("model", models), ("repetition", repetitions)):
        for number, score in enumerate(scores):
            writer.writerow([kind, number, *(score[name] for name in METRICS)])
    return text.getvalue()
