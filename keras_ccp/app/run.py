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
from keras_ccp.app.config import Config, load_config
from keras_ccp.app.fold import (
    EMBEDDER_FILE,
    SUMMARY_FILE,
    Fold,
    train_fold,
    untrained_embedder,
)
from keras_ccp.app.record import (
    DATA_FILE,
    changes,
    is_hashed,
    keep_record,
    read_record,
    record,
    sha256,
)
from keras_ccp.app.splits import Splits, check_classes, fold_splits, load_recorded
from keras_ccp.datasets import Dataset
from keras_ccp.files import (
    LOCK_FILE,
    check_folder,
    locked,
    read_json,
    reading,
    write_file,
)
from keras_ccp.pipeline import embed
from keras_ccp.retrieval.metrics import mean_scores
from keras_ccp.serving import export_trained

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
METRICS_FILE, TABLE_FILE = "metrics.json", "metrics.csv"
UNTRAINED_FILE = "untrained.keras"
METRICS = ("precision_at_1", "precision_at_r", "map_at_r")


# ==== Training ====


def train_run(
    config: Config,
    root: str | os.PathLike | None,
    out: str | os.PathLike,
    repeats: int | None = None,
    resume: bool = False,
    verbose: int | str = "auto",
    accept_changes: bool = False,
    hash_files: bool = False,
    most: int | None = None,
) -> dict | None:
    """Trains and scores every model of an experiment.

    The run keeps its classes, by name, and writes down the sizes and times of its
    files: one that is resumed is refused where they changed.

    Args:
        config: the experiment.
        root: folder of the data, `None` for that of the run in `out`.
        out: folder for everything that is written; new, or with `resume` an old one.
        repeats: how often the whole protocol runs, each time with another seed.
            Defaults to `None`: as often as in the run in `out`, once in a new one.
        resume: goes on with what is in `out`. Models that are finished there are not
            trained again.
        verbose: as for `keras.Model.fit`.
        accept_changes: goes on where files changed, with the classes of the run.
        hash_files: also writes down the content of the files, which then decides.
        most: number of its models, the first ones, to train without scoring them.
            Defaults to `None`: trains and scores all.

    Returns:
        The metrics, as `evaluate_run` gives them, or `None` with `most`.

    Raises:
        FileExistsError: If `out` holds a run and `resume` is not set.
        BlockingIOError: If another process trains in `out`.
        OSError: If `out` is no folder, or cannot be made.
        ValueError: If the run in `out` has another configuration, its data changed or
            its files are damaged, the data have too few classes, or this machine not
            the devices of `config.distribution`.
        ConnectionError: If another worker has ended.
    """
    # First, since it decides which devices TensorFlow begins with.
    strategy = distribute.make_strategy(**config.distribution)
    out = Path(out)
    with contextlib.ExitStack() as stack:
        if distribute.is_chief(strategy):
            stack.enter_context(claimed(out))
            _refuse_another(out, config, resume)
        about, then = {}, {}
        if (out / CONFIG_FILE).exists():
            check_files(out)
            about, then = read_about(out), read_record(out)
        root = Path(root or about.get("data", ".")).absolute()
        repeats = repeats or about.get("repeats", 1)
        splits, others = load_recorded(config.data, root, then)
        check_classes(config, splits.training)
        if distribute.is_chief(strategy):
            now = record(config, splits, others, root, hash_files or is_hashed(then))
            remedy = "Put them back, or if this is meant: --accept-changes"
            keep_record(out, then, now, None if accept_changes else remedy)
            if not (out / CONFIG_FILE).exists():
                write_file(out / CONFIG_FILE, config.to_yaml())
            about |= {"data": str(root), "repeats": repeats}
            if not (out / UNTRAINED_FILE).exists():
                untrained = untrained_embedder(config, splits.training, root)
                untrained.save(out / UNTRAINED_FILE)
            _write_about(out, {"versions": _versions(), **about})
        stack.enter_context(distribute.lost_workers(strategy))
        folds = _folds(config, splits, out, repeats)
        for index, fold in enumerate(folds[:most]):
            if not fold.is_finished:
                logger.info(_title(index, len(folds), repeats))
                train_fold(config, fold, root, strategy, verbose)
                if distribute.is_chief(strategy):
                    _write_about(out, read_about(out))  # with its checksums
        distribute.wait_for_workers(strategy)  # until the chief has written the last
        if most is not None:
            return None
        metrics = score_run(out, splits, strategy)
        with distribute.writable(out, strategy) as directory:
            _write_scores(metrics, out, directory, splits)
        if distribute.is_chief(strategy):
            _write_about(out, read_about(out), METRICS_FILE, TABLE_FILE)
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
    if changed := load_run_config(out).changes(config, "in the run"):
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


# ==== What a run says of itself ====


def _write_about(out: Path, about: dict, *more: str) -> None:
    """Writes `run.json`, with checksums of what does not change any more."""
    kept = [out / UNTRAINED_FILE] + [
        f
        for d in out.glob("repeat*/fold*")
        if (d / SUMMARY_FILE).exists()
        for f in d.iterdir()
        if f.is_file()
    ]
    files = [out / name for name in (CONFIG_FILE, DATA_FILE, *more)]
    sums = {file.relative_to(out).as_posix(): sha256(file) for file in files}
    # Hashed once: again it would take damage since then for what was written.
    known = about.get("sha256", {})
    for file in kept:
        name = file.relative_to(out).as_posix()
        sums[name] = known.get(name) or sha256(file)
    about["sha256"] = sums
    write_file(out / RUN_FILE, json.dumps(about, indent=2))


def read_about(run: Path) -> dict:
    """What `run.json` holds, nothing where there is none."""
    path = run / RUN_FILE
    return read_json(path, "data", "versions", "sha256") if path.exists() else {}


def check_files(run: Path) -> None:
    """Refuses a run with files that are not as they were written."""
    for name, written in read_about(run).get("sha256", {}).items():
        # What is missing is found where it is needed.
        if (run / name).is_file() and sha256(run / name) != written:
            raise ValueError(
                f"{run / name} must be as it was written. Received: other bytes\n"
                "Copy it back, or delete it: `keras-ccp train --resume` makes scores "
                "again, and models whose folder is deleted"
            )


# ==== A run that is there ====


def evaluate_run(
    run: str | os.PathLike,
    root: str | os.PathLike | None = None,
    out: str | os.PathLike | None = None,
) -> dict:
    """Scores the finished models of a run on its test classes.

    These are the classes that the run has recorded; a logged warning says what changed
    in the data since.

    Args:
        run: folder of the run.
        root: folder of the data. Defaults to that of the training.
        out: folder for `metrics.json`, `metrics.csv` and the SavedModel `embedder`:
            images -> the embeddings of all models of the first repetition side by side,
            as `serving.export_trained` writes it. Defaults to `None`: not written.

    Returns:
        dict of `separated` and `concatenated`: for each metric its mean and the half
        width of its 95 % interval; `models` and `repetitions`: the single scores;
        `untrained`: those of the network before training, pooled and without a head;
        `by_class`: MAP@R of each test class, by each of the models.

    Raises:
        FileNotFoundError: If there is no run, or none of its models is finished.
        FileExistsError: If `out` holds a run, whose own scores these are not.
        ValueError: If a file of the run is damaged, or a test class is missing.
    """
    run = Path(run)
    if out is not None:
        check_folder("out", out := Path(out))
        if (out / CONFIG_FILE).exists():
            raise FileExistsError(f"{out} holds a run\nGive scores another folder")
    splits, _, _ = load_run_splits(run, root)
    if message := unfinished(run):
        logger.warning("%s: %s", run, message)
    metrics = score_run(run, splits)
    if out is not None:
        _write_scores(metrics, run, out, splits)
    return metrics


def load_run_splits(
    run: Path, root: str | os.PathLike | None = None
) -> tuple[Splits, Path, str]:
    """The classes of a run, the folder of their files, and what changed in them."""
    config = load_run_config(run)
    check_files(run)
    about, then = read_about(run), read_record(run)
    root = Path(root or about.get("data", ".")).absolute()
    splits, others = load_recorded(config.data, root, then)
    changed = "it has no record of its data"
    if then:
        now = record(config, splits, others, root, is_hashed(then))
        changed = "; ".join(changes(then, now))
        changed = changed and f"its data changed: {changed}"
    if changed:
        logger.warning("%s: %s", run, changed)
    return splits, root, changed


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


def unfinished(run: Path) -> str:
    """A line to say of a run whose models are not all finished, or nothing."""
    # Of the repetitions that began, or that were asked for.
    begun, asked = len(list(run.glob("repeat*"))), read_about(run).get("repeats", 1)
    finished = sum(map(len, _finished(run)))
    count = load_run_config(run).data.num_models * max(begun, asked)
    if finished >= count:
        return ""
    return f"{finished} of {count} models are finished: not the protocol's result"


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


def load_model(directory: Path) -> keras.Model:
    """The embedder of a finished model."""
    remedy = f"Copy it back, or delete {directory} and train that model by --resume"
    return _load(directory / EMBEDDER_FILE, remedy)


def _load(path: Path, remedy: str) -> keras.Model:
    with reading(f"{path} must be undamaged", remedy):
        return keras.models.load_model(path)


def join_embedders(directories: Sequence[Path]) -> keras.Model:
    """One model of several: images -> their embeddings side by side."""
    embedders = [load_model(directory) for directory in directories]
    if len(embedders) == 1:
        return embedders[0]
    given = embedders[0].inputs[0]
    images = keras.Input(batch_shape=given.shape, dtype=given.dtype)
    for number, embedder in enumerate(embedders):
        embedder.name = f"fold{number}"
    parts = [embedder(images) for embedder in embedders]
    return keras.Model(images, keras.layers.Concatenate()(parts), name="embedder")


# ==== Scores ====


def score_run(
    run: Path, splits: Splits, strategy: tf.distribute.Strategy | None = None
) -> dict:
    """Scores each finished model alone and those of a repetition side by side."""
    config = load_run_config(run)
    strategy = strategy or tf.distribute.get_strategy()
    models, joined = [], []
    for directories in _finished(run):
        parts = []
        for directory in directories:
            with strategy.scope():
                embedder = load_model(directory)
            parts.append(_embed(embedder, splits))
            models.append(_score(parts[-1:], splits))
        joined.append(mean_scores(_score(parts, splits)))
    means = [mean_scores(scores) for scores in models]
    metrics = {
        "dataset": config.data.name,
        "method": config.method,
        "classes": config.data.division,
        "separated": summarize(means),
        "concatenated": summarize(joined),
        "models": means,
        "repetitions": joined,
    }
    # A run of an earlier version has none.
    if (path := run / UNTRAINED_FILE).exists():
        with strategy.scope():
            embedder = _load(path, "Copy it back, or delete it to do without")
        models.append(_score([_embed(embedder, splits)], splits))
        metrics["untrained"] = mean_scores(models[-1])
    return metrics | {"by_class": _by_class(models, splits.query)}


def _by_class(models: list[dict], query: Dataset) -> dict:
    """MAP@R of each test class and model, the last the untrained one."""
    scored = models[0]["num_references"] > 0
    labels = query.labels[scored]
    counts = np.bincount(labels, minlength=query.num_classes)
    kept = np.flatnonzero(counts)
    sums = (np.bincount(labels, model["map_at_r"][scored]) for model in models)
    return {
        "names": [query.class_names[label] for label in kept],
        "queries": counts[kept].tolist(),
        "map_at_r": [(own[kept] / counts[kept]).tolist() for own in sums],
    }


def _write_scores(metrics: dict, run: Path, out: Path, splits: Splits) -> None:
    text = json.dumps(metrics, indent=2, allow_nan=False)
    write_file(out / METRICS_FILE, text)
    write_file(out / TABLE_FILE, _table(metrics["models"], metrics["repetitions"]))
    embedder = join_embedders(_finished(run)[0])
    export_trained(embedder, out / "embedder", splits.query)


def _embed(embedder: keras.Model, splits: Splits) -> list[np.ndarray]:
    """Embeddings of the queries, and of the gallery where there is one."""
    return [embed(embedder, d) for d in (splits.query, splits.gallery) if d is not None]


def _score(parts: list[list[np.ndarray]], splits: Splits) -> dict:
    """Scores of the queries, with the embeddings of some models side by side."""
    query, *gallery = (
        np.concatenate(each, axis=1) for each in zip(*parts, strict=True)
    )
    gallery = [(part, splits.gallery.labels) for part in gallery]
    return retrieval.score_queries(query, splits.query.labels, *sum(gallery, ()))


def summarize(scores: Sequence[dict]) -> dict[str, dict[str, float | None]]:
    """`mean` and half the width of the 95 % `interval` of metrics, by Student's t."""
    return {name: mean_and_interval([s[name] for s in scores]) for name in METRICS}


def mean_and_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and half the width of the 95 % interval of numbers, by Student's t."""
    count, interval = len(values), None  # not known from a single one
    if count > 1:
        error = np.std(values, ddof=1) / math.sqrt(count)
        interval = float(stdtrit(count - 1, 0.975) * error)
    return {"mean": float(np.mean(values)), "interval": interval}


def _table(models: Sequence[dict], repetitions: Sequence[dict]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["kind", "number", *METRICS])
    for kind, scores in (("model", models), ("repetition", repetitions)):
        for number, score in enumerate(scores):
            writer.writerow([kind, number, *(score[name] for name in METRICS)])
    return text.getvalue()
