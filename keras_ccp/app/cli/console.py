"""What the commands share: the console, options, and errors without a trace."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import rich.console
import rich.markup
import typer

console = rich.console.Console()
# What is not among the results that a program may read from the output.
errors = rich.console.Console(stderr=True)

DataOption = Annotated[
    Path, typer.Option("--data", help="Folder of the data; weights are relative to it.")
]

OverridesOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value, over the file's own."),
]


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Ends the command with the message of an error of the user's, not a trace."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        errors.print(f"[red]Error:[/red] {rich.markup.escape(str(error))}")
        raise typer.Exit(1) from None


@contextlib.contextmanager
def shown_logs(name: str) -> Iterator[None]:
    """Prints what a part of the package logs inside the `with` block.

    Args:
        name: name of the logger.
    """
    part, handler = logging.getLogger(name), logging.StreamHandler()
    level = part.level
    part.addHandler(handler)
    part.setLevel(logging.INFO)
    try:
        yield
    finally:
        part.removeHandler(handler)
        part.setLevel(level)
