"""Commands around a search: index, search, embed, check."""

from pathlib import Path
from typing import Annotated

import rich.text
import typer

from keras_ccp.app.cli.console import console, errors, plain_errors
from keras_ccp.app.search import (
    Searcher,
    about_model,
    check_file,
    embed_images,
    index_images,
    results_table,
    to_json,
    write_page,
)


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
    with plain_errors():
        indexed, failures = index_images(run, images, out, backend)
        _print_failures(failures)
        _print_plainly(f"{len(indexed.ids)} images indexed in {out}")


def search(
    index: Annotated[Path, typer.Argument(help="Folder of an index.")],
    images: Annotated[list[Path], typer.Argument(help="Image files to look for.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Neighbours to show.")] = 10,
    html: Annotated[Path | None, typer.Option(help="Page to write.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the most similar images of an index.

    Args:
        index: folder of an index.
        images: image files to look for.
        k: number of neighbours.
        html: self-contained page to write.
        json: whether to print JSON in place of a table.
    """
    with plain_errors():
        if html is not None:
            check_file("html", html)
        results, failures = Searcher(index).search(images, k, progress=not json)
        _print_failures(failures)
        if json:
            typer.echo(to_json(results))
        else:
            console.print(results_table(results))
        if html is not None:
            write_page(results, html)


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
    with plain_errors():
        embedded = embed_images(run, images, out)
        _print_failures(embedded.failures)
        _print_plainly(f"{len(embedded.files)} embeddings written to {out}")


def check(
    model: Annotated[Path, typer.Argument(help="Exported model, run or index.")],
) -> None:
    """Check that a model is undamaged and embeds as it did when written.

    Args:
        model: folder of an exported model, or of a run or index with its embedder.
    """
    with plain_errors():
        for name, value in about_model(model).items():
            _print_plainly(f"{name}: {value}")


def _print_failures(failures: dict[Path, str]) -> None:
    """Says what was left out, on the standard error stream, apart from results."""
    for path, reason in failures.items():
        text = rich.text.Text.assemble(("Skipped", "yellow"), f" {path}: {reason}")
        errors.print(text, soft_wrap=True)


def _print_plainly(text: str) -> None:
    """Without a look for markup, which a path may hold, and in one line."""
    console.print(text, markup=False, soft_wrap=True)
