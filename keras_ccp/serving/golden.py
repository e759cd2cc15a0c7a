"""Whether an exported model is whole and computes what it did.

Beside the model lies a list of its files with their checksums, and a golden image with
the embedding that it had when the model was written.
"""

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_ccp.index import fingerprint

# TensorFlow leaves this folder of a SavedModel to others.
_MANIFEST = Path("assets.extra") / "keras_ccp.json"
# Between processors and versions of TensorFlow, in parts of the embedding's length.
_TOLERANCE = 1e-4
_GOLDEN_NEIGHBOURS = 5


def check_model(path: str | os.PathLike) -> dict[str, Any]:
    """Tells whether an exported model is whole and computes what it did.

    Args:
        path: folder that `export_serving` or a run wrote.

    Returns:
        `fingerprint` of the embedder, `size` and `short_side` if it decodes files,
        `embedding_dim`, `num_rows` of the index inside, and `difference`, the length of
        the difference of the golden embedding, in parts of its own length.

    Raises:
        FileNotFoundError: If there is no such model.
        ValueError: If files are changed or missing, the model cannot be loaded, or its
            embedding or neighbours of the golden image are others; it says which.
    """
    path = Path(path)
    about = _read_manifest(path)["about"]
    return about | {"difference": load_checked(path)[1]}


def load_checked(path: str | os.PathLike) -> tuple[Any, float]:
    """Loads an exported model if it is whole and computes what it did.

    Args:
        path: folder that `export_serving` or a run wrote.

    Returns:
        The model as of `tf.saved_model.load`, and the difference of its golden
        embedding as in `check_model`.

    Raises:
        FileNotFoundError: As `check_model`.
        ValueError: As `check_model`.
    """
    path = Path(path)
    golden = _check_files(path)["golden"]
    try:
        model = tf.saved_model.load(path)
        results = _golden_results(model, golden["image"])
    except (tf.errors.OpError, OSError, ValueError) as error:
        _refuse(path, [f"it does not run here: {error}"])
    return model, _check_golden(path, golden, results)


def _check_files(path: Path) -> dict[str, Any]:
    """What is written beside a model, if its files have their checksums."""
    manifest = _read_manifest(path)
    found = _checksums(path)
    wrong = [
        f"{name} is {'changed' if name in found else 'missing'}"
        for name, digest in manifest["files"].items()
        if found.get(name) != digest
    ]
    wrong += [f"{name} is new" for name in found if name not in manifest["files"]]
    if wrong:
        _refuse(path, wrong)
    return manifest


def read_preparation(path: str | os.PathLike) -> dict[str, int]:
    """How a model prepares images.

    Args:
        path: folder of a SavedModel.

    Returns:
        `size` and `short_side`, nothing if the model does not decode files.

    Raises:
        ValueError: If what is written beside the model is damaged.
    """
    if not (Path(path) / _MANIFEST).exists():
        return {}
    about = _read_manifest(Path(path))["about"]
    return {name: about[name] for name in ("size", "short_side") if name in about}


def _read_manifest(path: Path) -> dict[str, Any]:
    if not (path / _MANIFEST).exists():
        raise FileNotFoundError(
            "`path` must be a model that `export_serving` wrote, or the folder "
            f"`embedder` of a run or index. Received: path={str(path)!r}, which has "
            f"no {_MANIFEST.as_posix()}"
        )
    try:
        written = json.loads((path / _MANIFEST).read_text("utf-8"))
        manifest = written["manifest"]
        is_whole = _digest_of(manifest) == written["sha256"]
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        _refuse(path, [f"{_MANIFEST.as_posix()} is changed"])
    return manifest


def _check_golden(path: Path, golden: dict[str, Any], results: dict[str, Any]) -> float:
    expected = np.array(golden["embedding"])
    difference = np.linalg.norm(np.array(results["embedding"]) - expected)
    difference /= max(np.linalg.norm(expected), 1e-12)
    wrong = []
    if not difference <= _TOLERANCE:
        wrong.append(
            f"the embedding of the golden image differs by {difference:.2g} of its "
            f"length, allowed are {_TOLERANCE:g}"
        )
    if results["ids"] != golden["ids"]:
        wrong.append(
            f"the golden image's neighbours are {results['ids']}, not {golden['ids']}"
        )
    if wrong:
        _refuse(path, wrong)
    return float(difference)


def _refuse(path: Path, reasons: list[str]) -> None:
    raise ValueError(
        "`path` must be a model as it was exported; export it anew, or copy it again. "
        f"Received: path={str(path)!r}: {'; '.join(reasons)}"
    )


def write_manifest(path: Path, preparation: dict[str, int]) -> None:
    """Adds the list of files, and the golden image, to a model.

    Args:
        path: folder of the SavedModel.
        preparation: `size` and `short_side` of its images; nothing if it takes none
            that are encoded.
    """
    loaded = tf.saved_model.load(path)
    image = _golden_image(preparation["size"]) if preparation else None
    golden = {"image": image, **_golden_results(loaded, image)}
    about = {
        "fingerprint": fingerprint(loaded),
        **preparation,
        "embedding_dim": len(golden["embedding"]),
        "num_rows": _num_rows(loaded),
    }
    manifest = {"about": about, "golden": golden, "files": _checksums(path)}
    text = {"sha256": _digest_of(manifest), "manifest": manifest}
    (path / _MANIFEST).parent.mkdir(exist_ok=True)
    (path / _MANIFEST).write_text(json.dumps(text), "utf-8")


def _golden_image(size: int) -> str:
    """A JPEG in base64, larger than needed and not square: all steps have work."""
    pixels = _golden_pixels(3 * size // 2 + 8, 2 * size + 16, 3, size)
    encoded = tf.io.encode_jpeg(pixels.astype(np.uint8), quality=95)
    return base64.b64encode(encoded.numpy()).decode()


def _golden_pixels(height: int, width: int, channels: int, scale: int) -> np.ndarray:
    """`(height, width, channels)` waves of 0 to 255."""
    rows, columns = np.mgrid[:height, :width] / scale
    waves = [np.sin(9 * rows + 5 * columns), np.cos(7 * rows * columns), rows - columns]
    waves = np.stack([waves[i % 3] for i in range(channels)], -1)
    return 255 * (waves / 4 + 0.5).clip(0, 1)


def _golden_results(model: Any, image: str | None) -> dict[str, Any]:
    """Embedding and neighbours of a JPEG in base64, without one of an array."""
    if image is None:
        signature = model.signatures["serving_default"]
        ((name, spec),) = signature.structured_input_signature[1].items()
        height, width, channels = (side or 32 for side in spec.shape[1:])
        pixels = _golden_pixels(height, width, channels, height)
        (embeddings,) = signature(**{name: tf.cast(pixels[None], spec.dtype)}).values()
        return {"embedding": [float(x) for x in embeddings[0].numpy()], "ids": None}
    files = tf.constant([base64.b64decode(image)])
    embeddings = model.signatures["embed_bytes"](image_bytes=files)["embeddings"]
    ids = None
    if "search" in model.signatures:
        k = tf.constant([min(_GOLDEN_NEIGHBOURS, _num_rows(model))])
        found = model.signatures["search"](image_bytes=files, k=k)["ids"][0].numpy()
        ids = [
            i.decode("utf-8", "replace") if isinstance(i, bytes) else i
            for i in found.tolist()
        ]
    return {"embedding": [float(x) for x in embeddings[0].numpy()], "ids": ids}


def _checksums(path: Path) -> dict[str, str]:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    names = [file.relative_to(path).as_posix() for file in files]
    return {
        name: _digest(file.read_bytes())
        for name, file in zip(names, files, strict=True)
        if name != _MANIFEST.as_posix()
    }


def _num_rows(model: Any) -> int:
    return int(model.index.ids.shape[0]) if "search" in model.signatures else 0


def _digest_of(manifest: dict[str, Any]) -> str:
    return _digest(json.dumps(manifest).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
