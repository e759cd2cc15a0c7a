"""Archives of the web: download, check, and unpack inside of one folder."""

import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

import keras

from keras_ccp.files import check_folder, replaced_folder


def download_folder(url: str, sha256: str, folder: Path) -> None:
    """Downloads an archive and unpacks the folder of that name in it."""
    check_folder("root", folder.parent)  # get_file would take /tmp instead
    folder.parent.mkdir(parents=True, exist_ok=True)
    archive = keras.utils.get_file(
        origin=url, file_hash=sha256, cache_dir=folder.parent, cache_subdir=""
    )
    unpack_folder(Path(archive), folder)
    Path(archive).unlink()


def unpack_folder(archive: Path, folder: Path) -> None:
    """Unpacks the folder of that name of a tar or zip file, whole or not at all.

    Only plain files are written, and no links: so whatever the archive holds, and
    whatever Python knows of links, nothing is written outside of `folder`.
    """
    with replaced_folder(folder) as partial:
        for member, file in _files(archive):
            top, *parts = PurePosixPath(member).parts
            if top != folder.name:
                continue
            path = partial.joinpath(*parts).resolve()
            if file is None or not path.is_relative_to(partial.resolve()):
                raise ValueError(
                    f"{archive} must hold plain files inside of its folder. "
                    f"Received: {member!r}\nGet it again from where it is published"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as target:
                shutil.copyfileobj(file, target)


def _files(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    """Names and contents of what is no folder, without contents what is no file."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                if not info.is_dir():
                    yield info.filename, file.open(info)
    else:
        with tarfile.open(archive) as file:
            for info in file:
                if not info.isdir():
                    yield info.name, file.extractfile(info) if info.isreg() else None
