"""Files of others run nothing: weights, arrays, checkpoints, indexes and models.

Each file here holds code that writes a marker. A test first shows that the code is
real: by the reader that does run it. `tests/test_backbones.py` has more for the reader
of PyTorch files, `tests/test_config.py` for configurations.
"""

import io
import json
import os
import pickle
import zipfile

import keras
import numpy as np
import pytest

from keras_ccp import Backup, CCPModel, build_embedder, datasets, losses
from keras_ccp.backbones import bn_inception, small_cnn
from keras_ccp.backup import load_latest
from keras_ccp.monitor.projection_log import load_projections
from keras_ccp.serving import load_embedder


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"echo > {self.path}",)


@pytest.fixture
def marker(tmp_path):
    """A file that is not there unless code was run."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


def array_of(bomb):
    values = np.empty(4, object)
    values[:] = bomb
    return values


def saved(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


# ==== Pickles ====


def test_the_pickles_are_real(tmp_path):
    path = tmp_path / "exploded"
    pickle.loads(pickle.dumps(Bomb(path)))
    assert path.exists()
    path.unlink()
    np.load(io.BytesIO(saved(array_of(Bomb(path)))), allow_pickle=True)
    assert path.exists()


@pytest.mark.parametrize("name", ["images", "labels", "class_names", "data"])
def test_npz(tmp_path, marker, name):
    arrays = {"images": np.zeros((4, 2, 2, 3), "uint8"), "labels": np.arange(4) // 2}
    if name == "data":
        del arrays["images"]
        arrays["offsets"] = np.arange(5)
    arrays[name] = array_of(Bomb(marker))
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(ValueError, match="without Python objects.*allow_pickle=False"):
        datasets.npz(tmp_path / "data.npz")


def bare_npz(bomb):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("images.npy", pickle.dumps(bomb))
        archive.writestr("labels.npy", saved(np.arange(4)))
    return content.getvalue()


CONTENTS = [pickle.dumps, lambda bomb: saved(array_of(bomb)), bare_npz]
CHECKPOINT = "checkpoint-00000000.npz"
# Name of the file, who reads it in its folder, and what is said.
READERS = [
    ("data.npz", lambda folder: datasets.npz(folder / "data.npz"), "plain arrays"),
    (CHECKPOINT, load_latest, "damaged"),
    (CHECKPOINT, lambda folder: Backup(folder).num_epochs, "damaged"),
    ("w.pth", lambda folder: bn_inception(weights=folder / "w.pth"), r"w\.pth"),
]


@pytest.mark.parametrize(("name", "read", "message"), READERS)
def test_pickles_are_not_read(tmp_path, marker, name, read, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    for content in CONTENTS:
        (folder / name).write_bytes(content(Bomb(marker)))
        with pytest.raises(ValueError, match=message):
            read(folder)


def test_arrays_of_projections(tmp_path, marker):
    (tmp_path / "projections.jsonl").write_text('{"projection": 0}\n')
    (tmp_path / "projections").mkdir()
    np.savez(tmp_path / "projections" / "0.npz", embeddings=array_of(Bomb(marker)))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_projections(tmp_path)


# ==== Keras models ====


@pytest.mark.parametrize("load", [keras.models.load_model, load_embedder])
@pytest.mark.parametrize("is_nested", [False, True])
def test_lambda_layers_are_refused(tmp_path, load, is_nested):
    path = tmp_path / "exploded"
    code = f"lambda x: __import__('pathlib').Path({str(path)!r}).touch() or x"
    inputs = keras.Input((2,))
    layer = keras.layers.Lambda(eval(code), output_shape=(2,))
    model = keras.Model(inputs, layer(inputs))
    if is_nested:
        model = CCPModel(model, 3)
    model.save(tmp_path / "model.keras")
    path.unlink(missing_ok=True)
    with pytest.raises((ValueError, TypeError), match="Lambda"):
        load(tmp_path / "model.keras")
    assert not path.exists()
    # It is real: whoever says that the file is trusted runs it.
    loaded = keras.models.load_model(tmp_path / "model.keras", safe_mode=False)
    loaded(np.zeros((1, 2), "float32"))
    assert path.exists()


def changed_config(path, change):
    """Rewrites the configuration inside a .keras file."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(members["config.json"])
    change(config)
    members["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.fixture
def saved_model(tmp_path):
    model = CCPModel(build_embedder(small_cnn(), embedding_dim=4), 3)
    model.compile("sgd", losses.FunctionLoss(losses.ContrastiveLoss().pairs))
    model.save(tmp_path / "model.keras")
    return tmp_path / "model.keras"


# `os.system` as a configuration of Keras may name a function or class, and where.
FORMS = {"function": "system", "system": {"command": "echo"}}
PLACES = [
    "config embedder",
    "config embedder config layers -1",
    "compile_config loss config function",
    "compile_config optimizer",
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("module", ["os", "posix", "subprocess", "builtins"])
@pytest.mark.parametrize("place", PLACES)
def test_names_of_other_modules_are_not_called(
    saved_model, monkeypatch, place, module, form
):
    def change(config):
        *parents, key = (-1 if word == "-1" else word for word in place.split())
        for parent in parents:
            config = config[parent]
        named = {"class_name": form, "config": FORMS[form], "registered_name": form}
        config[key] = {**config[key], **named, "module": module}

    def explode(*args, **kwargs):
        raise AssertionError("os.system was called")

    changed_config(saved_model, change)
    monkeypatch.setattr(os, "system", explode)
    with pytest.raises((ValueError, TypeError)):
        keras.models.load_model(saved_model)
