"""The `keras-ccp` command."""

import importlib.metadata
from pathlib import Path
from typing import Annotated, Any

import rich.table
import rich.text
import typer

from keras_ccp.app.console import (
    console,
    errors,
    plain_errors,
    printable,
    shown_logs,
)

# Commands import what they run when they are called: TensorFlow takes seconds.

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NamesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="DATASET METHOD | FILE.yaml",
        help="Names of files in configs/, or a file of your own.",
    ),
]
RunArgument = Annotated[Path, typer.Argument(help="Folder of a run.")]
ModelArgument = Annotated[
    Path, typer.Argument(help="Run of `keras-ccp train`, .keras file or SavedModel.")
]
ImagesArgument = Annotated[list[Path], typer.Argument(help="Folders or image files.")]
DataOption = Annotated[
    Path, typer.Option("--data", help="Folder of the data; weights are relative to it.")
]
RunDataOption = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data. [default: that of the run]"),
]
OverridesOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value, over those of the names or file."),
]

TrustOption = Annotated[
    bool, typer.Option("--trust", help="Run a SavedModel: it is a program.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"keras-ccp {importlib.metadata.version('keras-ccp')}")
        raise typer.Exit()


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Deep metric learning with chance constraints."""


# ==== Runs ====


@app.command()
def doctor(
    names: NamesArgument,
    data: DataOption = Path("."),
    overrides: OverridesOption = None,
) -> None:
    """Look for what would stop a run or spoil its result, before it is started."""
    with plain_errors():
        from keras_ccp.app.config import load_config
        from keras_ccp.app.doctor import diagnose, findings_text, has_errors

        findings = diagnose(load_config(names, overrides or ()), data)
    console.print(findings_text(findings))
    if has_errors(findings):
        raise typer.Exit(1)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder for the run.")],
    names: NamesArgument = (),
    data: RunDataOption = None,
    overrides: OverridesOption = None,
    repeat: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of the whole protocol. [default: 1]"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --out, as it was begun."),
    ] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on though files changed.")
    ] = False,
    hash_files: Annotated[
        bool, typer.Option("--hash", help="Tell changed files by content, not time.")
    ] = False,
    devices: Annotated[
        int | None, typer.Option(min=1, help="GPUs of each machine to train on.")
    ] = None,
) -> None:
    """Train all models of an experiment and score them on the test classes."""
    with plain_errors(), shown_logs("keras_ccp.app.run"):
        from keras_ccp.app.config import load_config
        from keras_ccp.app.run import CONFIG_FILE, load_run_config, train_run

        if resume and not names:
            load_run_config(out)  # which says where there is none
            names = [str(out / CONFIG_FILE)]
        if devices is not None:
            overrides = [*(overrides or ()), f"distribution.devices={devices}"]
        experiment = load_config(names, overrides or ())
        metrics = train_run(
            experiment,
            data,
            out,
            repeat,
            resume,
            accept_changes=accept_changes,
            hash_files=hash_files,
        )
    console.print(_score_table(metrics))
    console.print(f"Written to {out}: metrics.json, metrics.csv, embedder/")


@app.command()
def evaluate(
    run: RunArgument,
    data: RunDataOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the scores and the embedder.")
    ] = None,
) -> None:
    """Score the finished models of a run on the test classes."""
    with plain_errors():
        from keras_ccp.app.run import evaluate_run

        metrics = evaluate_run(run, data, out)
    console.print(_score_table(metrics))


@app.command()
def report(
    run: RunArgument,
    data: RunDataOption = None,
    out: Annotated[
        Path | None, typer.Option(help="HTML file. [default: RUN/report.html]")
    ] = None,
) -> None:
    """Write what a run has learned as one HTML file."""
    with plain_errors():
        from keras_ccp.app.report import write_report

        path = write_report(run, data, out)
    _print_plainly(f"Written to {path}")


@app.command()
def tune(
    names: NamesArgument,
    out: Annotated[Path, typer.Option(help="Folder for the study; goes on there.")],
    data: DataOption = Path("."),
    trials: Annotated[int, typer.Option(min=1, help="Trials in the end.")] = 20,
    overrides: OverridesOption = None,
) -> None:
    """Search lambda, proxies and the loss's parameters by validation MAP@R."""
    with plain_errors(), shown_logs("keras_ccp.app.tuning"):
        from keras_ccp.app import tuning
        from keras_ccp.app.config import load_config

        overrides = overrides or []
        experiment = load_config(names, overrides)
        # A schedule that is shortened for the trials is not that of the best.
        kept = [o for o in overrides if o.partition("=")[0] not in tuning.SCHEDULE]
        full = load_config(names, kept)
        summary = tuning.tune(experiment, data, out, trials, full=full)
    console.print(
        f"{summary['complete']} trials complete, {summary['pruned']} pruned. "
        f"Validation MAP@R: best {summary['map_at_r']:.4f}, with the configuration's "
        f"own values {summary['own_map_at_r']:.4f}"
    )
    for key, value in summary["values"].items():
        console.print(f"  {key}: {value:.4g}")
    for key in summary["without_effect"]:
        console.print(
            f"{key} had no effect on the best trial, which made no projection "
            f"({summary['projected']} trials did): it is not recommended. Let problems "
            "end: more evaluations, or --set callback.patience=1"
        )
    written = ", ".join(name for name in tuning.FILES if (out / name).exists())
    _print_plainly(f"Written to {out}: {written}")


@app.command()
def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="DATASET METHOD METHOD ... | RUN RUN ...",
            help="Names of files in configs/, such as: grocery contrastive "
            "contrastive+proxies contrastive+ccp; or folders of finished runs.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for runs and page; goes on there.")],
    data: DataOption = Path("."),
    folds: Annotated[int, typer.Option(min=2, help="Models of a repetition.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions.")] = 2,
    tried: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            help="section.key=value,value,... to choose from by validation. [default: "
            "a third, one and three times training.learning_rate]",
        ),
    ] = None,
    overrides: OverridesOption = None,
) -> None:
    """Compare methods on the same folds, seeds and steps; or runs that are there."""
    with plain_errors(), shown_logs("keras_ccp.app"):
        from keras_ccp.app import compare
        from keras_ccp.app.config import load_config, load_grid
        from keras_ccp.app.run import CONFIG_FILE

        if any((Path(name) / CONFIG_FILE).exists() for name in names):
            comparison = compare.compare_runs({name: name for name in names})
            out.mkdir(parents=True, exist_ok=True)
            compare.write_comparison(comparison, out)
        else:
            dataset, *methods = names
            split = ["data.split=mlrc", f"data.folds={folds}"]
            options = [*split, *(overrides or ())]
            configs = {
                name: load_config([dataset, *name.split("+")], options)
                for name in methods
            }
            grid = load_grid(tried) if tried else None
            comparison = compare.compare_methods(configs, data, out, seeds, grid)
    console.print(_comparison_table(comparison))
    for line in (*comparison.sentences, *comparison.notes):
        console.print(line, markup=False)
    written = ", ".join(compare.FILES)
    _print_plainly(f"Written to {out}: {written}")


def _comparison_table(comparison: Any) -> rich.table.Table:
    """Methods with their scores, and differences to the first."""
    table = rich.table.Table(
        title=f"{comparison.dataset}: {comparison.num_models} models of each method on "
        f"{comparison.num_classes} unseen classes, %",
        caption="± 95 % interval over models; diff.: MAP@R less that of "
        f"{comparison.methods[0].name}",
    )
    table.add_column("")
    for column in ("MAP@R", "diff.", "P@1", "proj.", "steps", "min"):
        table.add_column(column, justify="right", no_wrap=True)
    differences = {each.first: each for each in comparison.differences}
    for method in comparison.methods:
        difference = differences.get(method.name)
        table.add_row(
            method.name,
            _percent(method.map_at_r),
            f"{100 * difference.mean:+.2f}" if difference else "",
            _percent(method.precision_at_1),
            f"{method.projections:.1f}",
            f"{method.steps:,.0f}",
            f"{method.seconds / 60:.1f}",
        )
    if comparison.untrained:
        cells = [
            f"{100 * comparison.untrained[key]:.2f}"
            for key in ("map_at_r", "precision_at_1")
        ]
        table.add_row("no training", cells[0], "", cells[1], "", "0", "", style="dim")
    return table


def _percent(score: dict) -> str:
    half = score["interval"]
    width = "" if half is None else f" ± {100 * half:.2f}"
    return f"{100 * score['mean']:.2f}{width}"


def _score_table(metrics: dict) -> rich.table.Table:
    """The row of a run beside the published one."""
    from keras_ccp.app.config import published_row

    table = rich.table.Table(
        title=f"{metrics['dataset']}, {metrics['method']}: unseen classes, %",
        caption=metrics["classes"],
    )
    for column in ("", "P@1", "P@R", "MAP@R"):
        table.add_column(column, justify="right" if column else "left")
    published = published_row(metrics["dataset"], metrics["method"]) or {}
    for name, key, reference in (
        ("each model alone", "separated", "128D"),
        ("all side by side", "concatenated", "512D"),
    ):
        table.add_row(name, *map(_percent, metrics[key].values()))
        if reference in published:
            values = [f"{value:.2f}" for value in published[reference]]
            table.add_row(f"  published, {reference}", *values, style="dim")
    if untrained := metrics.get("untrained"):
        values = [f"{100 * untrained[key]:.2f}" for key in metrics["separated"]]
        table.add_row("no training", *values, style="dim")
    return table


# ==== Searches ====


@app.command()
def index(
    run: ModelArgument,
    images: ImagesArgument,
    out: Annotated[Path, typer.Option(help="Folder for the index.")],
    backend: Annotated[str, typer.Option(help="exact or scann.")] = "exact",
    trust: TrustOption = False,
) -> None:
    """Make images searchable: embed them and write an index."""
    with plain_errors():
        from keras_ccp.app.search import index_images

        indexed, failures = index_images(run, images, out, backend, trust=trust)
        _print_failures(failures)
        _print_plainly(f"{len(indexed.ids)} images indexed in {out}")


@app.command()
def search(
    index: Annotated[Path, typer.Argument(help="Folder of an index.")],
    images: Annotated[list[Path], typer.Argument(help="Image files to look for.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Neighbours to show.")] = 10,
    html: Annotated[Path | None, typer.Option(help="Page to write.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    threshold: Annotated[
        float | None, typer.Option(min=0, help="Leave out what is farther.")
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Show the most similar images of an index."""
    with plain_errors():
        from keras_ccp.app import search

        if html is not None:
            search.check_file("html", html)
        searcher = search.Searcher(index, trust)
        results, failures = searcher.search(images, k, not json, threshold)
        _print_failures(failures)
        if json:
            typer.echo(search.to_json(results))
        else:
            console.print(search.results_table(results))
        if html is not None:
            search.write_page(results, html)


@app.command()
def embed(
    run: ModelArgument,
    images: ImagesArgument,
    out: Annotated[Path, typer.Option(help=".npy file to write.")],
    trust: TrustOption = False,
) -> None:
    """Write the embeddings of images, and beside them the list of their files."""
    with plain_errors():
        from keras_ccp.app.search import embed_images

        embedded = embed_images(run, images, out, trust=trust)
        _print_failures(embedded.failures)
        _print_plainly(f"{len(embedded.files)} embeddings written to {out}")


@app.command()
def check(
    model: Annotated[Path, typer.Argument(help="Exported model, run or index.")],
    trust: TrustOption = False,
) -> None:
    """Check that a model is undamaged and, with --trust, embeds as when written."""
    with plain_errors():
        from keras_ccp.app.search import about_model

        for name, value in about_model(model, trust).items():
            _print_plainly(f"{name}: {value}")


def _print_failures(failures: dict[Path, str]) -> None:
    """Says what was left out, on the standard error stream, apart from results."""
    for path, reason in failures.items():
        line = printable(f" {path}: {reason}")
        text = rich.text.Text.assemble(("Skipped", "yellow"), line)
        errors.print(text, soft_wrap=True)


def _print_plainly(text: str) -> None:
    """Without a look for markup, which a path may hold, and in one line."""
    console.print(text, markup=False, soft_wrap=True)


def main() -> None:
    """Entry point of the `keras-ccp` command."""
    app()
