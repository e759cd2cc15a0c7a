"""Neighbours of images as a table, as JSON and as a page."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import rich.table
import rich.text


class Neighbour(NamedTuple):
    """An image of the index.

    Args:
        id: its path below the folder that was indexed.
        path: where it was when it was indexed.
        label: str, or `None` in an index without labels.
        distance: Euclidean, to the query.
    """

    id: str
    path: str
    label: str | None
    distance: float


class SearchResult(NamedTuple):
    """What was found for a query.

    Args:
        query: path of the image.
        neighbours: nearest first.
    """

    query: str
    neighbours: list[Neighbour]


def results_table(results: Sequence[SearchResult]) -> rich.table.Table:
    """A table with a row a neighbour.

    Args:
        results: what was found.
    """
    table = rich.table.Table()
    for name, justify in (
        ("query", "left"),
        ("rank", "right"),
        ("distance", "right"),
        ("label", "left"),
        ("image", "left"),
    ):
        table.add_column(name, justify=justify)
    for result in results:
        for rank, found in enumerate(result.neighbours, 1):
            # Text, since file names may look like markup.
            cells = (
                result.query if rank == 1 else "",
                str(rank),
                f"{found.distance:.4f}",
                found.label or "",
                found.id,
            )
            table.add_row(*(rich.text.Text(cell) for cell in cells))
        table.add_section()
    return table


def to_json(results: Sequence[SearchResult]) -> str:
    """A JSON list of `{"query": ..., "neighbours": [{"rank": 1, "id": ...}, ...]}`.

    Args:
        results: what was found.
    """
    values = [
        {
            "query": result.query,
            "neighbours": [
                {"rank": rank, **found._asdict()}
                for rank, found in enumerate(result.neighbours, 1)
            ],
        }
        for result in results
    ]
    return json.dumps(values, indent=2)


def check_writable_file(name: str, path: str | os.PathLike) -> None:
    """Refuses a folder in the place of a file, before time is spent.

    Args:
        name: name of the argument.
        path: file to write.

    Raises:
        ValueError: If it is a folder.
    """
    if Path(path).is_dir():
        raise ValueError(
            f"`{name}` must be a file to write; name one in the folder. "
            f"Received: {name}={str(path)!r}, which is a folder"
        )


def write_file(path: str | os.PathLike, content: bytes) -> None:
    """Writes a file: all of it, or none if the process dies.

    Args:
        path: where to.
        content: what.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
