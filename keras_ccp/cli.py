"""The `keras-ccp` command."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import rich.console
import rich.markup
import rich.table
import typer

from keras_ccp.config import load_config, on_devices
from keras_ccp.doctor import diagnose, findings_text, has_errors
from keras_ccp.experiment import evaluate_run, train_run
from keras_ccp.published import published_row
from keras_ccp.report import write_report
from keras_ccp.search_commands import (
    Searcher,
    embed_images,
    index_images,
    results_table,
    to_json,
    write_page,
)
from keras_ccp.serving import check_model

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

OverridesOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value, over the file's own."),
]


@app.command()
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
    with _plain_errors():
        experiment = load_config(config, overrides or ())
        if devices is not None:
            experiment = on_devices(experiment, devices)
        metrics = train_run(experiment, data, out, repeat, resume)
    _print_row(metrics)
    console.print(f"Written to {out}: metrics.json, metrics.csv, embedder/")


@app.command()
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
    with _plain_errors():
        findings = diagnose(load_config(config, overrides or ()), data)
    console.print(findings_text(findings))
    if has_errors(findings):
        raise typer.Exit(1)


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


@app.command()
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
    with _plain_errors():
        path = write_report(run, data, out)
    console.print(f"Written to {path}", soft_wrap=True)


@app.command()
def index(
    run: Annotated[Path, typer.Argument(help="Run, .keras file or SavedModel.")],
    images: Annotated[list[Path], typer.Argument(help="Folders or image files.")],
    out: Annotated[Path, typer.Option(help="Folder for the index.")],
    backend: Annotated[str, typer.Option(help="exact or scann.")] = "exact",
) -> None:
    """Make images searchable: embed them and write an index.

    Args:
        run: run of `keras-ccp train`, `.keras` file or SavedModel.
        images: folders, searched through, or image files.
        out: folder for the index.
        backend: `"exact"` or `"scann"`.
    """
    with _plain_errors():
        indexed, failures = index_images(run, images, out, backend)
        _print_failures(failures)
        console.print(f"{len(indexed.ids)} images indexed in {out}")


@app.command()
def search(
    index: Annotated[Path, typer.Argument(help="Folder of an index.")],
    images: Annotated[list[Path], typer.Argument(help="Images to look for.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Neighbours to show.")] = 10,
    html: Annotated[Path | None, typer.Option(help="Page to write.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the most similar images of an index.

    Args:
        index: folder of an index.
        images: images to look for.
        k: number of neighbours.
        html: self-contained page to write.
        json: whether to print JSON in place of a table.
    """
    with _plain_errors():
        results, failures = Searcher(index).search(images, k, progress=not json)
        if json:
            typer.echo(to_json(results))
        else:
            _print_failures(failures)
            console.print(results_table(results))
        if html is not None:
            write_page(results, html)


@app.command()
def embed(
    run: Annotated[Path, typer.Argument(help="Run, .keras file or SavedModel.")],
    images: Annotated[list[Path], typer.Argument(help="Folders or image files.")],
    out: Annotated[Path, typer.Option(help=".npy file to write.")],
) -> None:
    """Write the embeddings of images, and beside them the list of their files.

    Args:
        run: run of `keras-ccp train`, `.keras` file or SavedModel.
        images: folders, searched through, or image files.
        out: `.npy` file to write.
    """
    with _plain_errors():
        embedded = embed_images(run, images, out)
        _print_failures(embedded.failures)
        console.print(f"{len(embedded.files)} embeddings written to {out}")


@app.command()
def check(
    model: Annotated[Path, typer.Argument(help="SavedModel of an index or export.")],
) -> None:
    """Check that an exported model is undamaged and embeds as it did when written.

    Args:
        model: folder of the model.
    """
    with _plain_errors():
        for name, value in check_model(model).items():
            console.print(f"{name}: {value}")


def _print_failures(failures: dict[Path, str]) -> None:
    for path, reason in failures.items():
        console.print(
            f"[yellow]Skipped[/yellow] {path}: {reason}",
            highlight=False,
            soft_wrap=True,
        )


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Ends the command with the message of an error of the user's, not a trace."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        console.print(f"[red]Error:[/red] {rich.markup.escape(str(error))}")
        raise typer.Exit(1) from None


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
