"""Omniglot: handwritten characters of many alphabets, 20 drawers each."""

import os
import re
from pathlib import Path

from keras_ccp.datasets.argument_names import DOWNLOAD, OTHER_COUNTS, ROOT
from keras_ccp.datasets.dataset import Dataset
from keras_ccp.datasets.download import download_folder

_ADDRESS = "https://github.com/brendenlake/omniglot/raw/master/python"
_SOURCE = f"{_ADDRESS}/<folder>.zip, or {DOWNLOAD} for the two small ones"
# Folder: characters in it, and the checksum where it can be downloaded here. The small
# ones are parts of the background set, and share the Greek and the Latin alphabet.
_CHARACTERS = {
    "images_background": 964,
    "images_evaluation": 659,
    "images_background_small1": 136,
    "images_background_small2": 156,
}
_SHA256 = {
    "images_background_small1": (
        "f38eb80f801274ac2b4dff5b24289016bfaba4a7d5bb50deebf27104ad6cb8a4"
    ),
    "images_background_small2": (
        "3ccaa407515a8778e5d0861875af38b17e418f301ad5bb3b5a6b65d901a41c7f"
    ),
}
_DRAWERS = 20
_CHARACTER_FOLDER = re.compile(r"character\d+")


def omniglot(
    root: str | os.PathLike, download: bool = False, check_counts: bool = True
) -> Dataset:
    """Loads Omniglot: every character is a class, 20 images of 105 x 105 each.

    Reads those of the archive's folders `images_background`, `images_evaluation`,
    `images_background_small1` and `images_background_small2` that are in `root`. A
    character that is in two of them is taken once. The two small ones give 242
    characters of eight alphabets, the two large ones 1,623 of fifty.

    Classes are sorted by alphabet, so a split by id leaves most alphabets whole.

    Args:
        root: The folder that holds the folders above.
        download: Download the two small archives and unpack them into `root`, unless
            they or the background set, whose parts they are, are there.
        check_counts: Refuse any but the published number of characters in a folder and
            of images of a character.

    Returns:
        A dataset of paths; `class_names` such as "Greek/character01".

    Raises:
        FileNotFoundError: If `root` has none of the folders.
        ValueError: If counts or files are not those of the archive.
    """
    root = Path(root).expanduser()
    if download and not (root / "images_background").is_dir():
        for name, sha256 in _SHA256.items():
            download_folder(f"{_ADDRESS}/{name}.zip", sha256, root, name)
    characters: dict[str, list[str]] = {}
    folders = [name for name in _CHARACTERS if (root / name).is_dir()]
    if not folders:
        raise FileNotFoundError(
            f"{ROOT} must hold folders of Omniglot. Missing: all of "
            f"{', '.join(_CHARACTERS)} in {root}. Get them from {_SOURCE}. "
            f"Received: root={str(root)!r}"
        )
    for name in folders:
        found = _read_folder(root / name)
        if check_counts:
            _check_folder(root / name, found)
        characters = found | characters
    names = sorted(characters)
    paths = [path for name in names for path in characters[name]]
    labels = [i for i, name in enumerate(names) for _ in characters[name]]
    return Dataset(paths, labels, names)


def _read_folder(folder: Path) -> dict[str, list[str]]:
    """The images of each character, `alphabet/character`."""
    characters = {}
    for alphabet in sorted(os.listdir(folder)):
        if not (folder / alphabet).is_dir():
            continue
        for character in sorted(os.listdir(folder / alphabet)):
            if not _CHARACTER_FOLDER.fullmatch(character):
                continue
            drawings = folder / alphabet / character
            # Copied from a Mac, `._0001_01.png` may lie beside `0001_01.png`.
            files = sorted(
                name
                for name in os.listdir(drawings)
                if name.endswith(".png") and not name.startswith(".")
            )
            if files:
                name = f"{alphabet}/{character}"
                characters[name] = [os.path.join(drawings, file) for file in files]
    if not characters:
        raise ValueError(
            f"{folder} must hold images <alphabet>/character01/*.png; unpack the "
            "archive again. Received: no image"
        )
    return characters


def _check_folder(folder: Path, characters: dict[str, list[str]]) -> None:
    wrong = [name for name, files in characters.items() if len(files) != _DRAWERS]
    expected = _CHARACTERS[folder.name]
    if len(characters) != expected or wrong:
        example = f", {len(characters[wrong[0]])} images of {wrong[0]}" if wrong else ""
        raise ValueError(
            f"{folder} must have {expected} characters of {_DRAWERS} images, as "
            f"published: unpack the archive again, or {OTHER_COUNTS} to use another "
            "one of the same form. "
            f"Received: {len(characters)} characters{example}"
        )
