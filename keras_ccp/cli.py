"""The `keras-ccp` command."""

import math
from pathlib import Path
from typing import Annotated

import rich.console
import rich.table
import typer

from keras_ccp.config import load_config
from keras_ccp.experiment import evaluate_run, train_run
from keras_ccp.published import published_row

app = typer.Typer(
    help="Deep metric learning with chance constraints.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = rich.console.Console()

DataOption = Annotated[
    Path, typer.Option("--data", help="Folder of the data; weights are relative to it.")
]


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file, see configs/.")],
    out: Annotated[Path, typer.Option(help="Folder for the run.")],
    data: DataOption = Path("."),
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value, over the file's own."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of the whole protocol.")] = 1,
    resume: Annotated[bool, typer.Option(help="Go on with the run in --out.")] = False,
) -> None:
    """Train all models of an experiment and score them on the test classes.

    Args:
        config: YAML file.
        out: folder for the run.
        data: folder of the data.
        overrides: values over those of the file.
        repeat: how often the whole protocol runs.
        resume: whether to go on with a run.
    """
    with _plain_errors():
        experiment = load_config(config, overrides or ())
        metrics = train_run(experiment, data, out, repeat, resume)
    _print_row(metrics)
    console.print(f"Written to {out}: metrics.json, metrics.csv, embedder/")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: DataOption = Path("."),
) -> None:
    """Score the finished models of a run on the test classes.

    Args:
        run: folder of the run.
        data: folder of the data.
    """
    with _plain_errors():
        metrics = evaluate_run(run, data)
    _print_row(metrics)


class _plain_errors:  # noqa: N801
    """Ends the command with the message of an error of the user's, not a trace."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, (ValueError, TypeError, OSError, ImportError)):
            console.print(f"[red]Error:[/red] {rich.markup.escape(str(error))}")
            raise typer.Exit(1) from None
        return False


def _print_row(metrics: dict) -> None:
    table = rich.table.Table(
        title=f"{metrics['dataset']}, {metrics['method']}: unseen classes, %"
    )
    for column in ("", "P@1", "P@R", "MAP@R"):
        table.add_column(column, justify="right" if column else "left")
    published = published_row(metrics["dataset"], metrics["method"]) or {}
    for name, key, reference in (
        ("each model alone", "separated", "128D"),
        ("all side by side", "concatenated", "512D"),
    ):
        cells = [_cell(metrics[key][metric]) for metric in metrics[key]]
        table.add_row(name, *cells)
        if reference in published:
            values = [f"{value:.2f}" for value in published[reference]]
            table.add_row(f"  published, {reference}", *values, style="dim")
    console.print(table)


def _cell(score: dict) -> str:
    mean, interval = 100 * score["mean"], 100 * score["interval"]
    return f"{mean:.2f}" + ("" if math.isnan(interval) else f" ± {interval:.2f}")


def main() -> None:
    """Entry point of the `keras-ccp` command."""
    app()
