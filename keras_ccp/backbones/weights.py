"""Weights from files of PyTorch, read with NumPy alone and without running code."""

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_ccp.backbones.torch_pickle import (
    STORAGE_DTYPES,
    Storage,
    Tensor,
    read_pickle,
)

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
_ZIP_MAGIC = b"PK\x03\x04"
# What reading a damaged file raises.
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
)


# ==== From a file to arrays ====


def read_torch_weights(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads a `state_dict` that was written by `torch.save`.

    Both of PyTorch's formats are read, the zip archive of version 1.6 and later and the
    one before. Nothing in the file is executed: see `torch_pickle`. Takes about as much
    memory as the file is long.

    Args:
        path: The file.

    Returns:
        Name -> read-only array, in the order of the file. bfloat16 becomes float32.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not such a dictionary, is damaged, or refers to a
            function or class that is not needed for tensors; the message names it.
    """
    data = Path(path).read_bytes()
    try:
        read = _read_zip if data.startswith(_ZIP_MAGIC) else _read_legacy
        state, storages = read(data)
        return {
            name: _view(name, tensor, storages[tensor.storage.key])
            for name, tensor in state.items()
        }
    except _DAMAGE as error:
        reason = str(error) if isinstance(error, ValueError) else f"damaged, {error!r}"
        raise ValueError(
            "`path` must be a file that torch.save wrote of a state_dict, a dictionary "
            "of tensors; if it should be one, download it again. "
            f"Received: path={os.fspath(path)!r}: {reason[:300]}"
        ) from error


def _read_legacy(data: bytes) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """Five pickles, of which the last names the storages, then the storages."""
    stream = io.BytesIO(data)
    if read_pickle(stream) != _LEGACY_MAGIC or read_pickle(stream) != _LEGACY_VERSION:
        raise ValueError("it does not begin as a file of torch.save does")
    if read_pickle(stream)["little_endian"] is not True:
        raise ValueError("its numbers are big-endian")
    state = _check_state(read_pickle(stream))
    storages = _storages(state)
    numbers = {}
    for key in read_pickle(stream):
        if not isinstance(key, str) or key not in storages:
            raise ValueError("it holds data of which it does not say what it is")
        (size,) = struct.unpack("<q", stream.read(8))
        numbers[key] = _numbers(storages[key], size, memoryview(data)[stream.tell() :])
        stream.seek(size * storages[key].itemsize, io.SEEK_CUR)
    return state, numbers


def _read_zip(data: bytes) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """`<folder>/data.pkl` and a file for each storage, none of them compressed."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    entries = archive.infolist()
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    # Entries may lie on top of one another: what is read could outgrow the file.
    if not is_stored or sum(entry.file_size for entry in entries) > len(data):
        raise ValueError("it is a zip archive that torch.save did not write")
    names = set(archive.namelist())
    folders = {name.partition("/")[0] for name in names}
    if len(folders) != 1 or f"{min(folders)}/data.pkl" not in names:
        raise ValueError("it is a zip archive without data.pkl")
    folder = min(folders)
    if f"{folder}/byteorder" in names and archive.read(f"{folder}/byteorder") != (
        b"little"
    ):
        raise ValueError("its numbers are big-endian")
    state = _check_state(read_pickle(io.BytesIO(archive.read(f"{folder}/data.pkl"))))
    numbers = {}
    for key, storage in _storages(state).items():
        content = archive.read(f"{folder}/data/{key}")
        numbers[key] = _numbers(storage, len(content) // storage.itemsize, content)
    return state, numbers


def _check_state(state: Any) -> dict[str, Tensor]:
    if not isinstance(state, dict):
        raise ValueError("it does not hold a dictionary")
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"its entry {name[:100]!r} is not a tensor")
    return state


def _storages(state: dict[str, Tensor]) -> dict[str, Storage]:
    storages = {}
    for tensor in state.values():
        key = tensor.storage.key
        if storages.setdefault(key, tensor.storage) != tensor.storage:
            raise ValueError(f"storage {key[:100]!r} has two sizes or types")
    return storages


def _numbers(storage: Storage, size: int, content: bytes) -> np.ndarray:
    if size != storage.size or not 0 <= size * storage.itemsize <= len(content):
        raise ValueError(
            f"storage {storage.key[:100]!r} should have {storage.size} numbers and has "
            f"{min(size, len(content) // storage.itemsize)}"
        )
    numbers = np.frombuffer(content, STORAGE_DTYPES[storage.kind], size)
    if storage.kind == "torch.BFloat16Storage":  # the upper half of a float32
        numbers = (numbers.astype("<u4") << 16).view("<f4")
    return numbers


def _view(name: str, tensor: Tensor, numbers: np.ndarray) -> np.ndarray:
    """The tensor as a view, so that many of one storage take no memory."""
    _, offset, shape, strides = tensor
    if not (isinstance(shape, tuple) and isinstance(strides, tuple)) or not all(
        type(value) is int and 0 <= value < 2**48
        for value in (offset, *shape, *strides)
    ):
        raise ValueError(f"tensor {name[:100]!r} has no shape")
    steps = zip(shape, strides, strict=True)
    end = offset + sum((size - 1) * stride for size, stride in steps) + 1
    # More elements than the storage has is an expanded tensor, which no network has
    # and which a copy would not hold in memory.
    if math.prod(shape) > len(numbers) or (0 not in shape and end > len(numbers)):
        raise ValueError(f"tensor {name[:100]!r} does not fit into its storage")
    return np.lib.stride_tricks.as_strided(
        numbers[offset:],
        shape,
        [stride * numbers.itemsize for stride in strides],
        writeable=False,
    )


# ==== From arrays to a model ====


def load_torch_weights(
    model: keras.Model, path: str | os.PathLike, torch_name: Callable[[str], str]
) -> None:
    """Gives a model of convolutions and batch norms the weights of a file.

    A kernel `(out, in, height, width)` becomes `(height, width, in, out)`; batch-norm
    tensors may be `(channels,)` or `(1, channels)`. What else the file holds is left.

    Args:
        model: The model; nothing is assigned unless all of it can be.
        path: File that `read_torch_weights` reads.
        torch_name: Name of a layer -> name of the module in the file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read, or tensors are missing, have a wrong shape or
            are not finite floats; the message names them.
    """
    tensors = read_torch_weights(path)
    assignments, complaints = [], []
    for layer in model.layers:
        for weight, suffix, axes in _torch_weights(layer):
            name = f"{torch_name(layer.name)}.{suffix}"
            value = tensors.get(name)
            complaint = _complaint(value, weight, axes)
            if complaint:
                complaints.append(f"{name} {complaint}")
                continue
            value = value.transpose(axes) if axes else value.reshape(-1)
            assignments.append((weight, value))
    if complaints:
        more = f" and {len(complaints) - 8} more" if len(complaints) > 8 else ""
        raise ValueError(
            f"`weights` must be a file with the tensors of {model.name}; is it the "
            f"file of another network? Received: weights={os.fspath(path)!r}, where "
            f"{', '.join(complaints[:8])}{more}"
        )
    for weight, value in assignments:
        weight.assign(value)


def _torch_weights(layer: keras.layers.Layer) -> list[tuple]:
    """`(weight, its name in PyTorch, order of the axes of a kernel)` of a layer."""
    if isinstance(layer, keras.layers.BatchNormalization):
        return [
            (layer.gamma, "weight", None),
            (layer.beta, "bias", None),
            (layer.moving_mean, "running_mean", None),
            (layer.moving_variance, "running_var", None),
        ]
    if isinstance(layer, keras.layers.DepthwiseConv2D):
        return [(layer.kernel, "weight", (2, 3, 0, 1))]
    if isinstance(layer, keras.layers.Conv2D):
        bias = [(layer.bias, "bias", None)] if layer.use_bias else []
        return [(layer.kernel, "weight", (2, 3, 1, 0)), *bias]
    return []


def _complaint(value: np.ndarray | None, weight: Any, axes: tuple | None) -> str:
    """What is wrong with a tensor for a weight, or nothing."""
    if value is None:
        return "is missing"
    shape = tuple(weight.shape)
    expected = tuple(shape[axes.index(axis)] for axis in range(4)) if axes else shape
    if value.shape not in (expected, expected if axes else (1, *expected)):
        return f"is {value.shape} instead of {expected}"
    if value.dtype.kind != "f" or not np.isfinite(value).all():
        return "does not hold finite floats"
    return ""
