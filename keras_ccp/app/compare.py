"""Methods side by side, and what can be concluded of their differences."""

import dataclasses
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_ccp.app.config import Config
from keras_ccp.app.fold import SUMMARY_FILE
from keras_ccp.app.page import render
from keras_ccp.app.record import keep_record, read_record, record
from keras_ccp.app.report.charts import padded_range, round_numbers
from keras_ccp.app.run import (
    METRICS_FILE,
    claimed,
    load_run_config,
    mean_and_interval,
    train_run,
)
from keras_ccp.app.splits import load_recorded
from keras_ccp.files import read_json, write_file
from keras_ccp.retrieval.statistics import mean_interval, sign_flip_p

logger = logging.getLogger(__name__)

FILES = JSON_FILE, PAGE_FILE = "compare.json", "compare.html"
RATE = "training.learning_rate"
_SHARED = ("data.", "embedder.", "training.", "seed")
# What acts upon proxies alone.
_OF_PROXIES = ("model.", "callback.")
Grid = Mapping[str, Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Trial:
    """What was tried for a method.

    Args:
        values: by key.
        run: folder of the run that began with it.
        map_at_r: of its first model on validation classes.
    """

    values: dict[str, Any]
    run: Path
    map_at_r: float


@dataclasses.dataclass(frozen=True)
class Method:
    """What a method reached.

    Args:
        name: as it was asked for.
        run: folder of its run.
        map_at_r: mean over the models, and half the width of its 95 % interval.
        precision_at_1: the same.
        scores: MAP@R of each model, in the order of repetitions and folds.
        steps: mean over the models.
        seconds: the same.
        projections: the same.
        trials: what was tried for it, the chosen one first; none of finished runs.
    """

    name: str
    run: str
    map_at_r: dict[str, float | None]
    precision_at_1: dict[str, float | None]
    scores: list[float]
    steps: float
    seconds: float
    projections: float
    trials: Sequence[Trial] = ()


@dataclasses.dataclass(frozen=True)
class Difference:
    """MAP@R of one method minus that of another, model by model.

    Args:
        first: name of the one.
        second: name of the other.
        mean: over models.
        models: 95 % interval by Student's t over the pairs of models: other folds and
            seeds, the same test classes. `None` with one pair.
        classes: 95 % interval by a bootstrap over the test classes: other classes of
            the kind, the same models.
        p_value: of a test that swaps the methods class by class.
    """

    first: str
    second: str
    mean: float
    models: tuple[float, float] | None
    classes: tuple[float, float]
    p_value: float

    @property
    def is_known(self) -> bool:
        """Whether both intervals lie on one side of zero."""
        bounds = [*self.classes, *(self.models or (-1, 1))]
        return min(bounds) > 0 or max(bounds) < 0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Methods, the untrained network, and each method against the first.

    Args:
        dataset: name of the data.
        num_classes: test classes.
        num_models: models of each method.
        methods: in the order that was asked for.
        untrained: scores of the network before training, or `None`.
        differences: each method but the first against the first.
        notes: what a reader has to know of how it was obtained.
    """

    dataset: str
    num_classes: int
    num_models: int
    methods: list[Method]
    untrained: dict[str, float] | None
    differences: list[Difference]
    notes: list[str]

    @property
    def sentences(self) -> list[str]:
        """What can be concluded, and what cannot."""
        return [_sentence(each, self.num_models) for each in self.differences]


def compare_methods(
    methods: Mapping[str, Config],
    root: str | os.PathLike,
    out: str | os.PathLike,
    seeds: int = 2,
    grid: Grid | None = None,
    verbose: int | str = "auto",
) -> Comparison:
    """Trains methods on the same folds, seeds, batches and steps, and compares them.

    Of each method the first model is trained with every combination of the grid; the
    one of highest validation MAP@R is kept for all folds and seeds. Keys of `model` and
    `callback` are tried where there are proxies. Test classes are scored in the end
    and decide nothing. Called again it goes on where it was stopped.

    Args:
        methods: configurations by name, of the same data, network, batches and steps.
        root: folder of the data.
        out: folder for the runs, one below each method, `compare.json` and
            `compare.html`.
        seeds: int, repetitions of all folds. Defaults to 2.
        grid: values to try by key. Defaults to `None`: a third, one and three times
            the learning rate.
        verbose: as for `keras.Model.fit`.

    Returns:
        `Comparison`.

    Raises:
        ValueError: If there are not two methods, or they differ in their data, network,
            batches or steps.
    """
    _check_alike(methods)
    # Before time is spent: a value that is not valid is refused here.
    candidates = {name: _candidates(config, grid) for name, config in methods.items()}
    out = Path(out)
    with claimed(out):
        _keep_data(next(iter(methods.values())), root, out)
        trials = {}
        for number, (name, tried) in enumerate(candidates.items(), 1):
            logger.info("method %d of %d: %s", number, len(methods), name)
            options = {"root": root, "repeats": seeds, "verbose": verbose}
            folder = out / name.replace(os.sep, "_")
            trials[name], chosen = _tried(tried, folder, options)
            _train(chosen, out=trials[name][0].run, **options)
        comparison = compare_runs({name: own[0].run for name, own in trials.items()})
        comparison = dataclasses.replace(
            comparison,
            methods=[
                dataclasses.replace(method, trials=trials[method.name])
                for method in comparison.methods
            ],
            notes=[*_about_tuning(trials), *_without_projections(methods, comparison)],
        )
        write_comparison(comparison, out)
    return comparison


def _keep_data(config, root, out) -> None:
    """Refuses data that changed, of which some methods would not know."""
    then = read_record(out)
    splits, others = load_recorded(config.data, root, then)
    now = record(config, splits, others, Path(root))
    keep_record(out, then, now, "Put them back, or choose another --out")


def _tried(candidates, folder, options) -> tuple[list[Trial], Config]:
    """The first model of each candidate, the best one first, and its configuration."""
    trials = []
    for values, config in candidates:
        label = ", ".join(f"{k}={v}" for k, v in values.items()) or "as given"
        logger.info("%s, %s", folder.name, label)
        run = folder / label
        _train(config, out=run, most=1, **options)
        summary = read_json(run / "repeat0/fold0" / SUMMARY_FILE, "validation")
        trials.append(Trial(values, run, summary["validation"]["map_at_r"]))
    order = sorted(range(len(trials)), key=lambda i: -trials[i].map_at_r)
    return [trials[i] for i in order], candidates[order[0]][1]


def _check_alike(methods: Mapping[str, Config]) -> None:
    first, *others = _at_least_two(methods)
    for name in others:
        changed = methods[first].changes(methods[name], f"in {first}")
        unlike = [
            part
            for part in changed.split("; ")
            if part.startswith(_SHARED)
            and not part.startswith((RATE, "training.warm_up", "training.beta"))
        ]
        if unlike:
            raise ValueError(
                "`methods` must have the same data, network, batches and steps. "
                f"Received: {'; '.join(unlike)}, in {name}\n"
                "Give them one value by --set"
            )


def _at_least_two(names: Mapping[str, Any]) -> list[str]:
    if len(names) < 2:
        raise ValueError(
            "There must be two methods or runs to compare. Received: "
            f"{', '.join(names)}\nGive another"
        )
    return list(names)


def _candidates(
    config: Config, grid: Grid | None
) -> list[tuple[dict[str, Any], Config]]:
    """Each combination of the grid, and the configuration that it makes."""
    if grid is None:
        rate = config.training.learning_rate
        grid = {RATE: [float(f"{factor * rate:.2g}") for factor in (1 / 3, 1, 3)]}
    keys = [
        key
        for key in grid
        if config.model.proxies_per_class or not key.startswith(_OF_PROXIES)
    ]
    # So that each makes all steps.
    steps = {"callback.stop_patience": config.training.max_evaluations}
    combinations = [
        dict(zip(keys, values, strict=True))
        for values in itertools.product(*(grid[key] for key in keys))
    ]
    return [(values, config.with_values(steps | values)) for values in combinations]


def _train(config: Config, out: Path, repeats: int, **options: Any) -> None:
    """Trains models of a run that are not there yet."""
    if (out / METRICS_FILE).exists():
        models = read_json(out / METRICS_FILE, "models")["models"]
        if len(models) >= repeats * config.data.num_models:
            return
    train_run(config, out=out, repeats=repeats, resume=True, **options)


def compare_runs(runs: Mapping[str, str | os.PathLike]) -> Comparison:
    """Compares finished runs, by the scores they have written.

    Args:
        runs: folders by name.

    Returns:
        `Comparison`.

    Raises:
        FileNotFoundError: If a run has no scores.
        ValueError: If runs have other test classes, another number of models, or were
            made before scores by class were written.
    """
    scores = {name: _read_scores(Path(run)) for name, run in runs.items()}
    first, *others = _at_least_two(scores)
    for name in others:
        for what, of in (
            (
                "test classes",
                lambda s: (s["by_class"]["names"], s["by_class"]["queries"]),
            ),
            ("number of models", lambda s: len(s["models"])),
        ):
            if of(scores[name]) != of(scores[first]):
                raise ValueError(
                    f"Runs must have the same {what}. Received: others in {runs[name]} "
                    f"than in {runs[first]}\nTrain them with the same data and folds"
                )
    untrained = [s["untrained"] for s in scores.values() if "untrained" in s]
    return Comparison(
        dataset=load_run_config(runs[first]).data.title,
        num_classes=len(scores[first]["by_class"]["names"]),
        num_models=len(scores[first]["models"]),
        methods=[_method(name, Path(runs[name]), scores[name]) for name in scores],
        untrained=untrained[0] if untrained else None,
        differences=[_difference(scores, name, first) for name in others],
        notes=[],
    )


def _read_scores(run: Path) -> dict:
    path = run / METRICS_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"There are no scores in {run}\nFinish it: keras-ccp train --resume --out "
            f"{run}"
        )
    scores = read_json(path, "models")
    if "by_class" not in scores:
        raise ValueError(
            f"{path} must hold scores by class. Received: those of an earlier version\n"
            f"Score it again: keras-ccp train --resume --out {run}"
        )
    return scores


def _method(name: str, run: Path, scores: dict) -> Method:
    summaries = [
        read_json(path, "num_steps", "seconds", "num_projections")
        for path in sorted(run.glob(f"repeat*/fold*/{SUMMARY_FILE}"))
    ]
    means = {
        key: float(np.mean([summary[key] for summary in summaries]))
        for key in ("num_steps", "seconds", "num_projections")
    }
    reached = {
        key: mean_and_interval([model[key] for model in scores["models"]])
        for key in ("map_at_r", "precision_at_1")
    }
    return Method(
        name,
        str(run),
        **reached,
        scores=[model["map_at_r"] for model in scores["models"]],
        steps=means["num_steps"],
        seconds=means["seconds"],
        projections=means["num_projections"],
    )


def _difference(scores: Mapping[str, dict], first: str, second: str) -> Difference:
    pairs = zip(scores[first]["models"], scores[second]["models"], strict=True)
    found = mean_and_interval([a["map_at_r"] - b["map_at_r"] for a, b in pairs])
    mean, half = found["mean"], found["interval"]
    count = len(scores[first]["models"])
    own, other = (
        np.mean(scores[name]["by_class"]["map_at_r"][:count], axis=0)
        for name in (first, second)
    )
    queries = np.asarray(scores[first]["by_class"]["queries"], float)
    sums = (own - other) * queries
    return Difference(
        first,
        second,
        mean,
        None if half is None else (mean - half, mean + half),
        mean_interval(sums, queries),
        sign_flip_p(sums),
    )


def _sentence(found: Difference, num_models: int) -> str:
    name, other = found.first, found.second
    points = f"{100 * abs(found.mean):.2f} points of MAP@R"
    of_classes = "{:+.2f} to {:+.2f} over test classes".format(
        *(100 * bound for bound in found.classes)
    )
    if found.models is None:
        return (
            f"{name} against {other}: {points} {'above' if found.mean > 0 else 'below'}"
            f" in one pair of models, {of_classes}. One pair says nothing of other "
            "folds and seeds: give more."
        )
    of_models = "{:+.2f} to {:+.2f} over {} pairs of models".format(
        *(100 * bound for bound in found.models), num_models
    )
    side = "above" if found.mean > 0 else "below"
    if found.is_known:
        return f"{name} is {side} {other} by {points}: {of_models}, {of_classes}."
    return (
        f"Whether {name} is above or below {other} cannot be concluded: "
        f"{100 * found.mean:+.2f} points of MAP@R, {of_models}, {of_classes}."
    )


def _about_tuning(trials: Mapping[str, Sequence[Trial]]) -> list[str]:
    """How values were chosen, and where the grid may have been too narrow."""
    notes = [
        "Values were chosen by validation MAP@R of the first model; test classes were "
        "scored once, in the end."
    ]
    for name, (best, *others) in trials.items():
        for key, value in best.values.items():
            tried = sorted({value, *(trial.values[key] for trial in others)})
            if len(tried) > 1 and value in (tried[0], tried[-1]):
                shown = ", ".join(map(str, tried))
                notes.append(
                    f"{name}: {key}={value} is at the end of what was tried ({shown}), "
                    "so that another may be better."
                )
    return notes


def _without_projections(methods, comparison: Comparison) -> list[str]:
    return [
        f"{method.name} made no projection in {method.steps:,.0f} steps: its proxies "
        "stayed. Give it more steps, or a smaller callback.patience."
        for method in comparison.methods
        if methods[method.name].model.proxies_per_class
        and methods[method.name].callback.max_projections != 0
        and not method.projections
    ]


# ==== Output ====


class Axis:
    """Places between two numbers, in percent of a width."""

    def __init__(self, values: Sequence[float]):
        self.low, self.high = padded_range(values)

    def place(self, value: float) -> float:
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    @property
    def ticks(self) -> list[float]:
        return round_numbers(self.low, self.high, 4)


def write_comparison(comparison: Comparison, out: Path) -> None:
    """Writes `compare.json`, all numbers, and `compare.html`, a page to look at."""
    values = dataclasses.asdict(comparison) | {"sentences": comparison.sentences}
    write_file(out / JSON_FILE, json.dumps(values, indent=2, default=str))
    scores = [
        method.map_at_r["mean"] + sign * (method.map_at_r["interval"] or 0)
        for method in comparison.methods
        for sign in (-1, 1)
    ]
    if comparison.untrained:
        scores.append(comparison.untrained["map_at_r"])
    bounds = [
        bound
        for each in comparison.differences
        for bound in (0.0, each.mean, *each.classes, *(each.models or ()))
    ]
    page = render(
        "app/compare.html.j2",
        comparison=comparison,
        differences={each.first: each for each in comparison.differences},
        score_axis=Axis(scores),
        difference_axis=Axis(bounds),
    )
    write_file(out / PAGE_FILE, page)
