"""Commands around a search: index, search, embed, check."""

from pathlib import Path
from typing import Annotated

import typer

from keras_ccp.cli.console import console, plain_errors
from keras_ccp.search_commands import (
    Searcher,
    embed_images,
    index_images,
    results_table,
    to_json,
    write_page,
)
from keras_ccp.serving import check_model


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
        console.print(f"{len(indexed.ids)} images indexed in {out}")


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
    with plain_errors():
        results, failures = Searcher(index).search(images, k, progress=not json)
        if json:
            typer.echo(to_json(results))
        else:
            _print_failures(failures)
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
        console.print(f"{len(embedded.files)} embeddings written to {out}")


def check(
    model: Annotated[Path, typer.Argument(help="SavedModel of an index or export.")],
) -> None:
    """Check that an exported model is undamaged and embeds as it did when written.

    Args:
        model: folder of the model.
    """
    with plain_errors():
        for name, value in check_model(model).items():
            console.print(f"{name}: {value}")


def _print_failures(failures: dict[Path, str]) -> None:
    for path, reason in failures.items():
        console.print(
            f"[yellow]Skipped[/yellow] {path}: {reason}",
            highlight=False,
            soft_wrap=True,
        )
