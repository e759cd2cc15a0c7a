"""What a run knows of its data: the files of each class, and what changed since."""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from keras_ccp.app.config import Config
from keras_ccp.app.images import relative
from keras_ccp.app.splits import PARTS, Splits, shown
from keras_ccp.datasets import Dataset
from keras_ccp.files import read_json, write_file

logger = logging.getLogger(__name__)

DATA_FILE = "data.json"

# Of each part by class and file: size, time and, on request, SHA-256.
Record = dict[str, dict[str, dict[str, list]]]


def record(
    config: Config,
    splits: Splits,
    others: Sequence[str],
    root: str | os.PathLike,
    content: bool = False,
) -> Record:
    """Classes and files of each part, names of the other classes, and the weights.

    With `content` the bytes of files are hashed; those of arrays always are.
    """
    root, found = Path(root), {}
    for name in PARTS:
        if (part := getattr(splits, name)) is not None:
            found[name] = _files(part, root, content)
    found["others"] = {name: {} for name in others}
    weights = config.embedder.weights
    if weights and (root / weights).is_file():
        found["weights"] = {"": {weights: _fingerprint(str(root / weights), content)}}
    return found


def _files(dataset: Dataset, root: Path, content: bool) -> dict[str, dict[str, list]]:
    classes: dict[str, dict[str, list]] = {name: {} for name in dataset.class_names}
    if isinstance(dataset.images[0], str):
        for path, label in zip(dataset.images, dataset.labels, strict=True):
            file = relative(path, root)
            classes[dataset.class_names[label]][file] = _fingerprint(path, content)
        return classes
    hashes = [hashlib.sha256() for _ in classes]
    for image, label in zip(dataset.images, dataset.labels, strict=True):
        hashes[label].update(image if isinstance(image, bytes) else image.tobytes())
    for (name, files), size, own in zip(
        classes.items(), dataset.class_sizes.tolist(), hashes, strict=True
    ):
        files[f"images of {name}"] = [size, 0, own.hexdigest()]
    return classes


def _fingerprint(path: str, content: bool) -> list:
    status = os.stat(path)
    values = [status.st_size, status.st_mtime_ns]
    if content:
        values.append(sha256(path))
    return values


def sha256(path: str | os.PathLike) -> str:
    """Of the bytes of a file, in hexadecimal digits."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def is_hashed(then: Record) -> bool:
    """Whether the bytes of the files were hashed."""
    files = [f for part in then.values() for own in part.values() for f in own.values()]
    return bool(files) and all(len(fingerprint) == 3 for fingerprint in files)


def changes(then: Record, now: Record) -> list[str]:
    """What changed, a line for each kind; none where all is as it was."""
    (old, old_names), (new, new_names) = _by_file(then), _by_file(now)
    both = [file for file in old if file in new]
    kinds = {
        "classes added, which are left out": sorted(new_names - old_names),
        "files added": sorted(new.keys() - old.keys()),
        "files removed": sorted(old.keys() - new.keys()),
        "files changed": [f for f in both if _differ(old[f][1], new[f][1])],
        "files of another class": [f for f in both if old[f][0] != new[f][0]],
    }
    lines = [
        f"{len(names):,} {kind}: {shown(names)}"
        for kind, names in kinds.items()
        if names
    ]
    if not lines and [*old] != [*new]:
        return ["the order of classes or files"]
    return lines


def _by_file(parts: Record) -> tuple[dict[str, tuple[str, list]], set[str]]:
    files = {
        file: (name, fingerprint)
        for part in parts.values()
        for name, own in part.items()
        for file, fingerprint in own.items()
    }
    return files, {name for part in parts.values() for name in part}


def _differ(old: list, new: list) -> bool:
    """Whether content differs, or where it is not known size or time."""
    if len(old) == len(new) == 3:
        return old[2] != new[2]
    return old[:2] != new[:2]


def read_record(folder: Path) -> Record:
    """What `keep_record` wrote into a folder; nothing where it wrote nothing."""
    path = folder / DATA_FILE
    return read_json(path, "training", "query", "others") if path.exists() else {}


def keep_record(folder: Path, then: Record, now: Record, remedy: str | None) -> None:
    """Writes down what the data are; with a remedy, refuses those that changed."""
    said = changes(then, now) if then else []
    if said and remedy is not None:
        raise ValueError(
            f"The data must be those that {folder} began with. Received: "
            f"{'; '.join(said)}\n{remedy}"
        )
    for line in said:
        logger.warning("accepted: %s", line)
    write_file(folder / DATA_FILE, json.dumps(now))
