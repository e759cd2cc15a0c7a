"""Weights from files of PyTorch, without PyTorch and without running code."""

import collections
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import keras
import numpy as np

_MAGIC = 0x1950A86A20F9469CFC6C  # of torch.save before PyTorch 1.6
_DTYPES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}
# The first is that before PyTorch 0.4.
_REBUILD_TENSOR = ("_rebuild_tensor", "_rebuild_tensor_v2")
# Name of a weight in Keras -> in PyTorch.
_SUFFIXES = {
    "kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype
    size: int

    def read(self, file: BinaryIO) -> bytes:
        length = self.size * self.dtype.itemsize
        content = file.read(length)
        # np.ndarray takes an empty buffer for none, and memory that is not set.
        if not content or len(content) != length:
            raise ValueError(f"it ends early, in storage {self.key}")
        return content


class _Reader(pickle._Unpickler):
    """Knows tensors, storages and dictionaries, and refuses all other names.

    The unpickler written in Python: that in C takes as much memory as a damaged file
    tells it to.
    """

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name that the file refers to."""
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name in _DTYPES:
            return np.dtype(_DTYPES[name])
        if module == "torch._utils" and name in _REBUILD_TENSOR:
            return lambda *arguments: arguments[:4]
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, which could run code and is not needed"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        """Numbers that lie elsewhere in the file."""
        _, dtype, key, _, size, *_ = pid
        return _Storage(key, dtype, size)


def read_torch_weights(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads a `state_dict` that was written by `torch.save`.

    Both of PyTorch's formats are read, the zip archive of version 1.6 and later and the
    one before. Nothing in the file is executed.

    Args:
        path: The file.

    Returns:
        Name -> read-only array, in the order of the file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not such a dictionary, is damaged, or refers to a
            function or class that is not needed for tensors; the message names it.
    """
    content = io.BytesIO(Path(path).read_bytes())
    try:
        is_zip = content.getvalue().startswith(b"PK")
        state, storages = (_read_zip if is_zip else _read_legacy)(content)
        arrays = {}
        for name, (storage, offset, shape, strides) in state.items():
            step = storage.dtype.itemsize
            # NumPy refuses what does not lie within the storage.
            arrays[name] = np.ndarray(
                shape,
                storage.dtype,
                storages[storage.key],
                offset * step,
                [stride * step for stride in strides],
            )
        return arrays
    except Exception as error:  # damage raises all sorts
        raise ValueError(
            "`path` must be a file that torch.save wrote of a state_dict, a dictionary "
            f"of tensors. Received: {os.fspath(path)}: {str(error)[:200]}\n"
            "Download it again, or write it with torch.save(model.state_dict(), path)"
        ) from error


def _read_zip(content: BinaryIO) -> tuple[dict[str, tuple], dict[str, bytes]]:
    with zipfile.ZipFile(content) as archive:
        (pickled,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
        state = _Reader(archive.open(pickled)).load()
        folder = pickled.removesuffix("data.pkl") + "data/"
        storages = {storage.key: storage for storage, *_ in state.values()}
        return state, {
            key: storage.read(archive.open(folder + key))
            for key, storage in storages.items()
        }


def _read_legacy(content: BinaryIO) -> tuple[dict[str, tuple], dict[str, bytes]]:
    """Five pickles, of which the last names the storages, then the storages."""
    magic, _, system, state, keys = (_Reader(content).load() for _ in range(5))
    if magic != _MAGIC or not system["little_endian"]:
        raise ValueError("it does not begin as a file of torch.save does")
    storages = {storage.key: storage for storage, *_ in state.values()}
    numbers = {}
    for key in keys:
        content.seek(8, os.SEEK_CUR)  # the size once more
        numbers[key] = storages[key].read(content)
    return state, numbers


def load_torch_weights(
    model: keras.Model, path: str | os.PathLike, torch_name: Callable[[str], str] = str
) -> None:
    """Gives a model of convolutions and batch norms the weights of a file.

    A kernel (out, in, height, width) becomes (height, width, in, out); batch-norm
    tensors may be (channels,) or (1, channels). `torch_name` maps the name of a layer
    to that of the module in the file; what else the file holds is left.
    """
    tensors = read_torch_weights(path)
    for layer in model.layers:
        is_depthwise = isinstance(layer, keras.layers.DepthwiseConv2D)
        for weight in layer.weights:
            name = f"{torch_name(layer.name)}.{_SUFFIXES[weight.name]}"
            value = tensors.get(name, np.zeros(0))
            if weight.name == "kernel" and value.ndim == 4:
                value = value.transpose((2, 3, 0, 1) if is_depthwise else (2, 3, 1, 0))
            elif value.shape == (1, *weight.shape):
                value = value[0]
            if value.shape != weight.shape or not np.isfinite(value).all():
                raise ValueError(
                    f"`weights` must be a file of {model.name}. Received: "
                    f"{os.fspath(path)}, whose {name} is missing, not finite or not of "
                    f"shape {tuple(weight.shape)}\nIs it the file of another network?"
                )
            weight.assign(value)
