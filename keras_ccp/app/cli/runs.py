"""Commands around a run: train, evaluate, tune, doctor, report."""

from pathlib import Path
from typing import Annotated

import typer

from keras_ccp.app.cli.console import (
    DataOption,
    OverridesOption,
    console,
    plain_errors,
    shown_logs,
)
from keras_ccp.app.cli.score_table import score_table
from keras_ccp.app.config import load_config, on_devices
from keras_ccp.app.doctor import diagnose, findings_text, has_errors
from keras_ccp.app.report import write_report
from keras_ccp.app.run import evaluate_run, train_run
from keras_ccp.app.tuning import tune as search_values
from keras_ccp.app.tuning.results import BEST_FILE, PICTURE_FILE, TABLE_FILE
from keras_ccp.app.tuning.study import STUDY_FILE


def train(
    config: Annotated[Path, typer.Argument(help="YAML file, see configs/.")],
    out: Annotated[Path, typer.Option(help="Folder for the run.")],
    data: DataOption = Path("."),
    overrides: OverridesOption = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of the whole protocol.")] = 1,
    resume: Annotated[bool, typer.Option(help="Go on with the run in --out.")] = False,
    devices: Annotated[
        int | None, typer.Option(min=1, help="GPUs of this machine to train on.")
    ] = None,
) -> None:
    """Train all models of an experiment and score them on the test classes.

    Args:
        config: YAML file.
        out: folder for the run.
        data: folder of the data.
        overrides: values over those of the file.
        repeat: how often the whole protocol runs.
        resume: whether to go on with a run.
        devices: GPUs of this machine, or of each machine, over the file's own.
    """
    with plain_errors(), shown_logs("keras_ccp.app.run"):
        experiment = load_config(config, overrides or ())
        if devices is not None:
            experiment = on_devices(experiment, devices)
        metrics = train_run(experiment, data, out, repeat, resume)
    console.print(score_table(metrics))
    console.print(f"Written to {out}: metrics.json, metrics.csv, embedder/")


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: DataOption = Path("."),
) -> None:
    """Score the finished models of a run on the test classes.

    Args:
        run: folder of the run.
        data: folder of the data.
    """
    with plain_errors():
        metrics = evaluate_run(run, data)
    console.print(score_table(metrics))


def doctor(
    config: Annotated[Path, typer.Argument(help="YAML file, see configs/.")],
    data: DataOption = Path("."),
    overrides: OverridesOption = None,
) -> None:
    """Look for what would stop a run or spoil its result, before it is started.

    Args:
        config: YAML file.
        data: folder of the data.
        overrides: values over those of the file.
    """
    with plain_errors():
        findings = diagnose(load_config(config, overrides or ()), data)
    console.print(findings_text(findings))
    if has_errors(findings):
        raise typer.Exit(1)


def tune(
    config: Annotated[Path, typer.Argument(help="YAML file, see configs/.")],
    out: Annotated[Path, typer.Option(help="Folder for the study; goes on there.")],
    data: DataOption = Path("."),
    trials: Annotated[int, typer.Option(min=1, help="Trials in the end.")] = 20,
    overrides: OverridesOption = None,
) -> None:
    """Search lambda, proxies and the loss's parameters by validation MAP@R.

    Args:
        config: YAML file.
        out: folder for the study.
        data: folder of the data.
        trials: trials that are finished in the end.
        overrides: values over those of the file.
    """
    with plain_errors(), shown_logs("keras_ccp.app.tuning"):
        experiment = load_config(config, overrides or ())
        summary = search_values(experiment, data, out, trials)
    console.print(
        f"{summary['complete']} trials complete, {summary['pruned']} pruned. "
        f"Validation MAP@R: best {summary['map_at_r']:.4f}, with the configuration's "
        f"own values {summary['own_map_at_r']:.4f}"
    )
    for key, value in summary["values"].items():
        console.print(f"  {key}: {value:.4g}")
    files = [BEST_FILE, TABLE_FILE, PICTURE_FILE, STUDY_FILE]
    written = ", ".join(name for name in files if (out / name).exists())
    console.print(f"Written to {out}: {written}", soft_wrap=True)


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: DataOption = Path("."),
    out: Annotated[
        Path | None, typer.Option(help="HTML file. [default: RUN/report.html]")
    ] = None,
) -> None:
    """Write what a run has learned as one HTML file.

    Args:
        run: folder of the run.
        data: folder of the data.
        out: HTML file to write.
    """
    with plain_errors():
        path = write_report(run, data, out)
    console.print(f"Written to {path}", soft_wrap=True)
