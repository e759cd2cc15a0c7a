"""What the commands share: the consoles, a bar, and errors without a trace."""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import TypeVar

import rich.console
import rich.markup
import rich.progress
import typer

T = TypeVar("T")

console = rich.console.Console()
# What is not among the results that a program may read from the output.
errors = rich.console.Console(stderr=True)


def progress(
    iterable: Iterable[T], description: str, total: int | None = None
) -> Iterator[T]:
    """Passes values on, with a bar on the standard error stream of a terminal."""
    return rich.progress.track(
        iterable,
        description,
        total=total,
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Ends the command with the message of an error of the user's, not a trace."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        message = rich.markup.escape(str(error))
        errors.print(f"[red]Error:[/red] {message}", soft_wrap=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def shown_logs(name: str) -> Iterator[None]:
    """Prints what a part of the package logs inside the `with` block."""
    part, handler = logging.getLogger(name), logging.StreamHandler()
    level = part.level
    part.addHandler(handler)
    part.setLevel(logging.INFO)
    try:
        yield
    finally:
        part.removeHandler(handler)
        part.setLevel(level)
