"""In-shop Clothes Retrieval: photos of 7,982 pieces of clothing."""

import os
from pathlib import Path

from keras_ccp.datasets.archive import (
    as_ids,
    check_files,
    compare_counts,
    find_folder,
    read_rows,
)
from keras_ccp.datasets.dataset import Dataset

_NAME = "In-shop Clothes Retrieval Benchmark"
_PARTITION = "Eval/list_eval_partition.txt"
_SOURCE = (
    "http://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html "
    "(list_eval_partition.txt and img.zip, unpacked)"
)
_PUBLISHED = {"train": (25_882, 3_997), "query": (14_218, 3_985)}
_PUBLISHED["gallery"] = (12_612, 3_985)


def in_shop(
    root: str | os.PathLike, check_counts: bool = True
) -> tuple[Dataset, Dataset, Dataset]:
    """Loads the In-shop Clothes Retrieval Benchmark of DeepFashion.

    Query and gallery hold the same items, and number them the same.

    Args:
        root: The folder that holds `Eval/list_eval_partition.txt` and `img/` (or
            `Img/img/`), or the one that holds this as
            "In-shop Clothes Retrieval Benchmark".
        check_counts: Refuse any but the published numbers of images and items.

    Returns:
        Training, query and gallery images as paths: 25,882 of 3,997 items, 14,218 and
        12,612 of 3,985 others; `class_names` such as "id_00000001".

    Raises:
        FileNotFoundError: If a file is missing, with its name and where to get it.
        ValueError: If counts or files are not those of the archive, query and gallery
            differ in their items, or training shares one with them.
    """
    folder = find_folder(root, _NAME, _PARTITION, _SOURCE)
    parts = _read_parts(folder)
    _check_items({part: set(items) for part, (_, items) in parts.items()})
    datasets = {part: Dataset(*columns) for part, columns in parts.items()}
    if check_counts:
        for part, counts in _PUBLISHED.items():
            compare_counts(f"In-shop's {part} part", datasets[part], *counts)
    check_files([path for paths, _ in parts.values() for path in paths], _SOURCE)
    return datasets["train"], datasets["query"], datasets["gallery"]


def _read_parts(folder: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Paths and item ids of each part."""
    path = folder / _PARTITION
    # Two lines of header: the number of images, the names of the columns.
    rows = read_rows(path, 3, skip=2, from_right=True)
    first = path.read_text(encoding="utf-8").split("\n", 1)[0].strip()
    if as_ids([first], path)[0] != len(rows):
        raise ValueError(
            f"{path} must list as many images as its first line says; get it again "
            f"from {_SOURCE}. Received: {first} in the first line, {len(rows)} images"
        )
    base = folder if (folder / "img").is_dir() else folder / "Img"
    parts = {part: ([], []) for part in _PUBLISHED}
    for name, item, part in rows:
        if part not in parts:
            raise ValueError(
                f"{path} must say train, query or gallery in its third column; get it "
                f"again from {_SOURCE}. Received: {part!r} for {name}"
            )
        parts[part][0].append(os.path.join(base, *name.split("/")))
        parts[part][1].append(item)
    return parts


def _check_items(items: dict[str, set[str]]) -> None:
    for part in items:
        if not items[part]:
            raise ValueError(
                "the In-shop list must have images to train, query and gallery; get "
                f"it again from {_SOURCE}. Received: none for {part}"
            )
    lone = sorted(items["query"] ^ items["gallery"])
    if lone:
        raise ValueError(
            "query and gallery of In-shop must hold the same items, or they could not "
            f"number them the same. Received: {lone[0]} in one of them only "
            f"({len(lone)} in total)"
        )
    shared = sorted(items["train"] & items["query"])
    if shared:
        raise ValueError(
            "training and test of In-shop must not share items. Received: "
            f"{shared[0]} in both ({len(shared)} in total)"
        )
