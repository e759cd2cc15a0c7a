"""Unpacks an archive, whole or not at all, and nowhere but where it should."""

import os
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path, PurePosixPath, PureWindowsPath


def unpack_folder(archive: Path, name: str) -> None:
    """Unpacks one folder of a tar or zip file beside the file.

    It is unpacked under another name and renamed at the end: a folder of that name is
    whole.

    Args:
        archive: The file.
        name: Name of the folder in it.

    Raises:
        ValueError: If the archive has no such folder, is neither tar nor zip, or would
            write outside of the folder it is unpacked in.
    """
    temporary = archive.parent / f"{name}.unpacking"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _unpack(archive, temporary)
        if not (temporary / name).is_dir():
            raise ValueError(
                f"{archive} must hold a folder {name}. "
                f"Received: {', '.join(sorted(os.listdir(temporary))[:5])}"
            )
        os.replace(temporary / name, archive.parent / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unpack(archive: Path, folder: Path) -> None:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            _check_members(archive, file)
            file.extractall(folder)
    elif tarfile.is_tarfile(archive):
        if not hasattr(tarfile, "data_filter"):  # Python 3.10 before 3.10.12
            raise ValueError(
                f"{archive} cannot be unpacked safely by this version of Python: take "
                "a newer one, or unpack it with `tar`"
            )
        try:
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
        except tarfile.FilterError as error:
            raise ValueError(
                f"{archive} must not write outside of its folder; get it anew. "
                f"Received: {error}"
            ) from error
    else:
        raise ValueError(
            f"{archive} must be a tar or zip file. Received: something else"
        )


def _check_members(archive: Path, file: zipfile.ZipFile) -> None:
    # `extractall` would quietly put such a file somewhere else than it says.
    for member in file.infolist():
        name = PurePosixPath(member.filename.replace("\\", "/"))
        is_outside = ".." in name.parts or name.is_absolute()
        is_outside |= bool(PureWindowsPath(member.filename).drive)
        if is_outside or stat.S_ISLNK(member.external_attr >> 16):
            raise ValueError(
                f"{archive} must not write outside of its folder; get it anew. "
                f"Received: member {member.filename!r}"
            )
