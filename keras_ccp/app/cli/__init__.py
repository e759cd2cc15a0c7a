"""The `keras-ccp` command."""

import inspect

import typer

from keras_ccp.app.cli import runs, searches

app = typer.Typer(
    help="Deep metric learning with chance constraints.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    runs.doctor,
    runs.train,
    runs.evaluate,
    runs.report,
    runs.tune,
    searches.index,
    searches.search,
    searches.embed,
    searches.check,
):
    # What follows in a docstring is for readers of Python; typer lists the options.
    app.command(help=inspect.getdoc(command).split("\n\nArgs:")[0])(command)


def main() -> None:
    """Entry point of the `keras-ccp` command."""
    app()
