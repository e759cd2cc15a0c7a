"""What the commands share: the consoles, a bar, and errors without a trace."""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import TypeVar

import rich.console
import rich.markup
import rich.progress
import rich.segment
import typer

T = TypeVar("T")


def printable(text: str) -> str:
    """Text in which what would steer a terminal is written as Python writes it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class _Printable:
    """What is to be printed, without the control characters of names in it."""

    def __init__(self, content: rich.console.RenderableType):
        self.content = content

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[rich.segment.Segment]:
        for segment in console.render(self.content, options):
            if not segment.control:
                text = "\n".join(map(printable, segment.text.split("\n")))
                segment = rich.segment.Segment(text, segment.style)
            yield segment


class _PrintableHook(rich.console.RenderHook):
    def process_renderables(
        self, renderables: list[rich.console.ConsoleRenderable]
    ) -> list[rich.console.ConsoleRenderable]:
        return [_Printable(content) for content in renderables]


console = rich.console.Console()
# What is not among the results that a program may read from the output.
errors = rich.console.Console(stderr=True)
for each in (console, errors):
    each.push_render_hook(_PrintableHook())


class _ToConsole(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        errors.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


_handler = _ToConsole()


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
    """Ends the command with the message of an error of the user's, not a trace.

    What the package logs in the `with` block is printed as well.
    """
    log = logging.getLogger("keras_ccp")
    log.addHandler(_handler)
    # TensorFlow's handler at the root would print all of it once more.
    propagate, log.propagate = log.propagate, False
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        message = rich.markup.escape(str(error))
        errors.print(f"[red]Error:[/red] {message}", soft_wrap=True)
        raise typer.Exit(1) from None
    finally:
        log.removeHandler(_handler)
        log.propagate = propagate


@contextlib.contextmanager
def shown_logs(name: str) -> Iterator[None]:
    """Lets a part of the package log what it does inside the `with` block."""
    part = logging.getLogger(name)
    level = part.level
    part.setLevel(logging.INFO)
    try:
        yield
    finally:
        part.setLevel(level)
