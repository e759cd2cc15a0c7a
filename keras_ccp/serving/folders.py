"""A folder that is written whole or not at all."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_replaceable(path: Path) -> None:
    """Refuses a file, and a folder that holds something else than a SavedModel.

    Args:
        path: folder to write.

    Raises:
        ValueError: If it is one.
    """
    if not path.exists() or (path / "saved_model.pb").exists():
        return
    if not path.is_dir() or any(path.iterdir()):
        raise ValueError(
            "`path` must be a new or empty folder, or a SavedModel to replace. "
            f"Received: path={str(path)!r}"
        )


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Gives a folder to write, which takes the place of another at the end.

    Args:
        path: folder that is replaced, if it is there, once the new one is complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield partial
        partial.chmod(0o755)  # a temporary folder is its owner's alone
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
            path.replace(old / "old")
            partial.replace(path)
            shutil.rmtree(old)
        else:
            partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
