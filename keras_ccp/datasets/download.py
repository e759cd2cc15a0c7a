"""Downloads an archive, goes on where it stopped, checks and unpacks it."""

import hashlib
import http.client
import logging
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import keras

from keras_ccp.datasets.unpack import unpack_folder

_CHUNK = 1 << 20
_ATTEMPTS = 5
_TIMEOUT_SECONDS = 60.0
_NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    ssl.SSLError,
)
_log = logging.getLogger(__name__)


def download_folder(
    url: str, sha256: str, root: str | os.PathLike, name: str, marker: str = "."
) -> None:
    """Downloads an archive and unpacks a folder of it, unless the folder is there.

    Args:
        url: Address of the archive.
        sha256: Its checksum.
        root: Folder to unpack it in, made if need be.
        name: Name of the folder in the archive.
        marker: Path of a file below the folder that tells it.

    Raises:
        FileExistsError: If the folder is there without that file.
        ValueError: If the checksum differs.
        ConnectionError: If the server cannot be reached.
    """
    root = Path(root).expanduser()
    if (root / name / marker).exists() or (marker != "." and (root / marker).exists()):
        return
    if (root / name).exists():
        raise FileExistsError(
            f"{root / name} lacks {marker}: remove it to download it anew. "
            f"Received: root={str(root)!r}"
        )
    archive = root / Path(urlsplit(url).path).name
    download(url, sha256, archive)
    unpack_folder(archive, name)
    archive.unlink()


def download(url: str, sha256: str, path: Path) -> None:
    """Downloads a file, with a progress bar.

    What has come is kept in `<path>.part`; the next attempt, or the next call after a
    kill, goes on from there if the server can do so.

    Args:
        url: Address of the file.
        sha256: Its checksum.
        path: Where to put it; there is nothing there until it is whole and checked.

    Raises:
        ValueError: If the checksum differs. What has come is removed.
        ConnectionError: If the server cannot be reached or has no such file.
    """
    if path.is_file() and _sha256(path) == sha256:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _continue(url, part)
            break
        except _NETWORK_ERRORS as error:
            is_final = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if is_final or attempt == _ATTEMPTS:
                size = part.stat().st_size if part.exists() else 0
                raise ConnectionError(
                    f"{url} could not be downloaded: {error}. Call again to go on "
                    f"after the {size:,} bytes that are in {part}, or put the file "
                    f"there by other means as {path}"
                ) from error
            _log.warning("%s: %s; attempt %d follows", url, error, attempt + 1)
            time.sleep(attempt)
    received = _sha256(part)
    if received != sha256:
        part.unlink()
        raise ValueError(
            f"{url} must have the SHA-256 checksum {sha256}; what came was removed, "
            f"call again to download it anew. Received: {received}"
        )
    os.replace(part, path)


def _continue(url: str, part: Path) -> None:
    """Downloads what is missing of a file."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "keras-ccp"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            if have and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                return  # Nothing is missing; if it is another file the checksum tells.
        raise
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            have = 0  # The server starts anew.
        length = response.headers["Content-Length"]
        total = have + int(length) if length else None
        bar = _Progress(total)
        with part.open("ab" if have else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                have += len(chunk)
                bar.show(have)
    if total is not None and have != total:
        raise ConnectionError(f"{have:,} of {total:,} bytes came")


class _Progress:
    """A bar in megabytes; in a log file a line every half minute."""

    def __init__(self, total: int | None) -> None:
        self._total = None if total is None else -(-total // 10**6)
        interval = 0.2 if sys.stdout.isatty() else 30.0
        self._bar = keras.utils.Progbar(
            self._total, interval=interval, unit_name="megabyte"
        )

    def show(self, size: int) -> None:
        self._bar.update(-(-size // 10**6))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
