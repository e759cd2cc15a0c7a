"""Files of others run nothing: weights, arrays, checkpoints, indexes and models.

Each file here holds code that writes a marker. A test first shows that the code is
real: by the reader that does run it. `tests/test_backbones.py` has more for the reader
of PyTorch files, `tests/test_config.py` for configurations.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import pickle
import shutil
import warnings
import zipfile

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
import typer.testing

from keras_ccp import Backup, CCPModel, build_embedder, datasets, losses
from keras_ccp.app.cli import app
from keras_ccp.app.console import plain_errors
from keras_ccp.backbones import bn_inception, small_cnn
from keras_ccp.backup import load_latest
from keras_ccp.index import RetrievalIndex
from keras_ccp.index.digests import read_manifest, write_manifest
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
# Name of the file, who reads it in its folder, and what is said.
READERS = [
    ("data.npz", lambda folder: datasets.npz(folder / "data.npz"), "plain arrays"),
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


def test_pickles_are_no_checkpoints(tmp_path, marker):
    for content in CONTENTS:
        (tmp_path / "checkpoint-00000000.npz").write_bytes(content(Bomb(marker)))
        # What is no array NumPy gives as bytes; it stays that.
        expected = contextlib.nullcontext()
        if content is not bare_npz:
            expected = pytest.raises(ValueError, match="undamaged")
        for read in (load_latest, lambda folder: Backup(folder).num_epochs):
            with expected:
                read(tmp_path)


def test_arrays_of_projections(tmp_path, marker):
    keys = ("projection", "epoch", "val_map_at_r", "is_last", "before", "after")
    line = dict.fromkeys(keys, 0)
    (tmp_path / "projections.jsonl").write_text(json.dumps(line) + "\n")
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
    with pytest.raises((ValueError, TypeError), match="Lambda|lambda"):
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


def own_loss(labels, embeddings, *references, exclude_self=False):
    return keras.ops.sum(embeddings, axis=1)


@pytest.fixture
def saved_model(tmp_path):
    model = CCPModel(build_embedder(small_cnn(), embedding_dim=4), 3)
    model.compile("sgd", losses.FunctionLoss(own_loss))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the loss is not registered
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


# ==== SavedModels, and indexes with them ====


SIZE = 8


class Writer(tf.Module):
    """An embedder whose graph writes a file when it runs, and when it is loaded."""

    def __init__(self, path):
        super().__init__()
        self.path = str(path)

    @tf.function(input_signature=[tf.TensorSpec((None, SIZE, SIZE, 3), tf.uint8)])
    def embed(self, images):
        tf.io.write_file(self.path, "run")
        return {"embeddings": tf.reduce_mean(tf.cast(images, tf.float32), [1, 2])}


@pytest.fixture
def program(tmp_path):
    """A SavedModel that touches a file when it runs, and that file."""
    ran = tmp_path / "ran"
    writer = Writer(ran)
    tf.saved_model.save(writer, tmp_path / "program", {"embed": writer.embed})
    ran.unlink(missing_ok=True)
    return tmp_path / "program", ran


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("a", "b"):
        pixels = np.random.default_rng(ord(name)).integers(0, 256, (9, 9, 3), "uint8")
        PIL.Image.fromarray(pixels).save(tmp_path / "photos" / f"{name}.png")
    return tmp_path / "photos"


def invoke(*arguments):
    return typer.testing.CliRunner().invoke(app, [str(value) for value in arguments])


def refused(result, message):
    """Whether a command ended with an error of two lines that says so."""
    assert isinstance(result.exception, SystemExit) and result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 2, result.stderr
    return message in result.stderr


def test_saved_models_run_only_when_trusted(tmp_path, program, photos):
    model, ran = program
    index, vectors, query = tmp_path / "index", tmp_path / "v.npy", photos / "a.png"
    commands = [("index", model, photos, "--out", index)]
    commands += [("embed", model, photos, "--out", vectors)]
    for command in commands:
        assert refused(invoke(*command), "--trust") and not ran.exists()
    for command in commands:
        assert invoke(*command, "--trust").exit_code == 0
        assert ran.exists()
        ran.unlink()
    # The index keeps the program, which needs trust there too.
    for command in (("search", index, query), ("check", index)):
        assert refused(invoke(*command), "--trust") and not ran.exists()
    assert invoke("check", index, "--trust").exit_code == 0
    result = invoke("search", index, query, "--trust")
    assert result.exit_code == 0 and "0.0000" in result.stdout and ran.exists()


@pytest.fixture
def index(tmp_path, photos):
    images = keras.Input((SIZE, SIZE, 3), dtype="uint8")
    pooled = keras.layers.GlobalAveragePooling2D()(keras.layers.Rescaling(1.0)(images))
    keras.Model(images, pooled).save(tmp_path / "model.keras")
    result = invoke("index", tmp_path / "model.keras", photos, "--out", tmp_path / "i")
    assert result.exit_code == 0, result.output
    return tmp_path / "i"


def test_what_is_put_into_an_index_is_not_run(index, program, photos):
    """By someone who writes all of it, checksums too."""
    model, ran = program
    whole = RetrievalIndex.load(index)
    # Where earlier versions had it, and named by the index.
    shutil.copytree(model, index / "embedder")
    for name in (None, "embedder", "../program", str(model)):
        manifest = read_manifest(index / "index.json")
        if name is not None:
            manifest["embedder"]["name"] = name
        write_manifest(index / "index.json", manifest)
        for command in (("search", index, photos / "a.png"), ("check", index)):
            result = invoke(*command)
            assert not ran.exists()
            if name is not None:
                assert refused(result, "changed or missing")
            else:
                assert result.exit_code == 0
    # In a .keras file, as a layer of Keras.
    code = f"lambda x: __import__('pathlib').Path({str(ran)!r}).touch() or x[:, 0, 0]"
    images = keras.Input((SIZE, SIZE, 3), dtype="uint8")
    layers = [
        keras.layers.TFSMLayer(str(model), call_endpoint="embed"),
        keras.layers.Lambda(eval(code), output_shape=(3,)),
        Foreign(),
    ]
    for layer in layers:
        file = index.parent / "hostile.keras"
        outputs = layer(images)
        keras.Model(images, outputs).save(file)
        ran.unlink(missing_ok=True)
        whole.embedder = whole.embedder._replace(file=file)
        whole.save(index)
        for command in (("search", index, photos / "a.png"), ("check", index)):
            assert refused(invoke(*command), "layers of Keras and keras_ccp")
            assert not ran.exists()
        assert refused(invoke("embed", file, photos, "--out", "v.npy"), "of Keras and")
        assert not ran.exists()


class Foreign(keras.layers.Layer):
    """A layer of somebody's own."""

    def call(self, images):
        return keras.ops.cast(images[:, 0, 0], "float32")


@pytest.mark.parametrize("name", ["../secret.png", "/secret.png", "a/../../secret.png"])
def test_images_outside_of_the_folder_of_an_index_are_not_shown(
    index, photos, tmp_path, name
):
    name = str(tmp_path / "secret.png") if name[0] == "/" else name
    PIL.Image.new("RGB", (9, 9)).save(tmp_path / "secret.png")
    whole = RetrievalIndex.load(index)
    RetrievalIndex.build(
        whole.embeddings,
        [name, "b.png"],
        None,
        "exact",
        whole.fingerprint,
        whole.metadata,
    ).save(index)
    page = tmp_path / "page.html"
    result = invoke("search", index, photos / "a.png", "--json", "--html", page)
    found = json.loads(result.stdout)[0]["neighbours"]
    assert [each["path"] for each in found] == [None, str(photos / "b.png")]
    # The query and b.png.
    assert page.read_text().count("data:image") == 2


def test_pipes_and_devices_in_the_place_of_files(index, photos, tmp_path):
    for file in [*index.iterdir()]:
        content = file.read_bytes()
        for place in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            file.unlink()
            place(file)
            for command in (("search", index, photos / "a.png"), ("check", index)):
                assert invoke(*command).exit_code == 1
            file.unlink()
            file.write_bytes(content)
    assert invoke("check", index).exit_code == 0
    (photos / "b.png").unlink()
    os.mkfifo(photos / "b.png")
    result = invoke("search", index, photos / "a.png", "--html", tmp_path / "p.html")
    assert result.exit_code == 0 and "not found" in (tmp_path / "p.html").read_text()


def test_flips_in_an_index_are_noticed(index, photos):
    rng = np.random.default_rng(0)
    files = sorted(index.iterdir())
    for number in range(12):
        file = files[number % len(files)]
        content = bytearray(file.read_bytes())
        changed = content.copy()
        changed[rng.integers(len(content))] ^= 1 << rng.integers(8)
        file.write_bytes(changed)
        command = (
            ("search", index, photos / "a.png") if number % 2 else ("check", index)
        )
        assert refused(invoke(*command), "is changed")
        file.write_bytes(content)


def archive_of(shape, compress=False):
    """Rows whose header claims a shape."""
    content, header = io.BytesIO(), io.BytesIO()
    descr = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, descr)
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(content, "w", kind) as archive:
        for name in ("embeddings", "ids"):
            archive.writestr(f"{name}.npy", header.getvalue() + bytes(64))
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (archive_of((4, 4), compress=True), "they are compressed"),
        (archive_of((10**9, 10**6)), "Unable to allocate"),
        (archive_of((-4, 4)), "ValueError"),
        (b"PK", "BadZipFile"),
    ],
)
def test_rows_that_claim_what_they_do_not_hold_are_refused(
    content, reason, index, photos
):
    manifest = read_manifest(index / "index.json")
    checksum = hashlib.sha256(content).hexdigest()
    manifest["rows"] = {"name": f"rows-{checksum[:16]}.npz", "sha256": checksum}
    (index / manifest["rows"]["name"]).write_bytes(content)
    write_manifest(index / "index.json", manifest)
    result = invoke("search", index, photos / "a.png")
    assert refused(result, "must hold the rows of an index") and reason in result.output


def test_names_cannot_steer_the_terminal(index, photos):
    name = "\x1b]0;title\x07\x9b31m\rb\nError: x\u202e.png"
    (photos / name).write_bytes(b"broken")
    shutil.copy(photos / "a.png", photos / f"a{name}")
    result = invoke("search", index, photos / name, photos / f"a{name}")
    assert "Skipped" in result.stderr
    missing = invoke("embed", index, photos / "no" / name, "--out", "v.npy")
    assert missing.exit_code == 1
    indexed = invoke("index", index.parent / "model.keras", photos, "--out", index)
    assert "Skipped" in indexed.stderr and indexed.exit_code == 0
    again = invoke("search", index, photos / "a.png")
    shown = [result.output, missing.output, indexed.output, again.output]
    assert "\\x1b" in result.stderr
    for text in shown:
        assert all(c.isprintable() or c == "\n" for c in text)
    assert "\nError: x" not in result.output + indexed.output + again.output


def test_logged_names_cannot_steer_the_terminal(capsys):
    with plain_errors():
        logging.getLogger("keras_ccp.part").warning("%s", "a\x1b[31m")
    assert "a\\x1b[31m" in capsys.readouterr().err
