"""Exported models: bytes of files in, embeddings and neighbours out, without us."""

import io
import json
import shutil
import subprocess
import sys

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from keras_ccp import CCPModel, retrieval, serving
from keras_ccp.app import search
from keras_ccp.datasets import Dataset
from keras_ccp.index import RetrievalIndex, fingerprint
from keras_ccp.index.digests import read_manifest, write_manifest
from keras_ccp.pipeline import decode_center_crop
from keras_ccp.serving import SearchInGraph

SIZE, SHORT_SIDE = 24, 27  # round(24 * 256 / 227)


def network(size=SIZE, dim=6, dtype="uint8"):
    return keras.Sequential(
        [
            keras.Input((size, size, 3), dtype=dtype),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(4, 3, strides=3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(dim),
        ]
    )


def encode(seed, kind="PNG", **options):
    rng = np.random.default_rng(seed)
    image = PIL.Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    buffer = io.BytesIO()
    image.resize((50, 40)).save(buffer, kind, **options)
    return buffer.getvalue()


def turned(orientation):
    data = PIL.Image.Exif()
    data[0x0112] = orientation
    return data


FILES = [
    encode(0),
    encode(1, "JPEG", quality=95),
    encode(2, "JPEG", exif=turned(6)),
    encode(3, "PNG"),
    encode(4, "GIF"),
    encode(5, "BMP"),
]


def reference(model, files, size=SIZE, short_side=SHORT_SIDE):
    images = [decode_center_crop(tf.constant(f), size, short_side) for f in files]
    return model(np.stack(images), training=False).numpy()


def gallery():
    """Vectors with duplicates, and whose norms matter: the query's scale is theirs."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((60, 6)).astype(np.float32)
    return np.concatenate([rows, rows[:20]])


def call(model, name, **tensors):
    tensors = {key: tf.constant(value) for key, value in tensors.items()}
    return {k: v.numpy() for k, v in model.signatures[name](**tensors).items()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Embedder, index, and the folder of the model of both."""
    keras.utils.set_random_seed(0)
    embedder = network()
    index = RetrievalIndex.build(
        gallery(),
        ids=[f"ä{row}" for row in range(80)],
        labels=np.arange(80) % 7,
        fingerprint=fingerprint(embedder),
    )
    path = tmp_path_factory.mktemp("serving") / "model"
    serving.export_serving(embedder, path, index)
    return embedder, index, path


@pytest.fixture(scope="module")
def loaded(exported):
    return tf.saved_model.load(exported[2])


# ==== What it computes ====


def test_embeddings_are_those_in_process(exported, loaded):
    expected = reference(exported[0], FILES)
    found = call(loaded, "embed_bytes", image_bytes=FILES)["embeddings"]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 1e-3  # not all the same
    images = np.random.default_rng(0).integers(0, 256, (3, SIZE, SIZE, 3), np.uint8)
    found = call(loaded, "embed", images=images)["embeddings"]
    np.testing.assert_allclose(found, exported[0](images), atol=1e-5)


def test_neighbours_are_those_of_the_index(exported, loaded):
    embedder, index, _ = exported
    found = call(loaded, "search", image_bytes=FILES, k=[9])
    distances, ids = index.search(reference(embedder, FILES), 9)
    assert [[i.decode() for i in row] for row in found["ids"]] == ids.tolist()
    np.testing.assert_allclose(found["distances"], distances, rtol=1e-5)
    np.testing.assert_array_equal(found["labels"], index.labels_of(ids))


def test_search_in_graph_orders_ties_as_retrieval_does():
    queries = np.concatenate([gallery()[:30], np.zeros((1, 6), np.float32)])
    index = SearchInGraph(RetrievalIndex.build(gallery()))
    found = tf.function(index.search)(tf.constant(queries), tf.constant([80]))
    distances, rows = retrieval.search(queries, gallery(), 80)
    np.testing.assert_array_equal(found["ids"], rows)
    np.testing.assert_array_equal(found["distances"], distances)


def test_each_row_has_its_own_k(loaded):
    found = call(loaded, "search", image_bytes=FILES[:2], k=[1, 3])
    assert np.isfinite(found["distances"]).tolist() == [
        [True, False, False],
        [True] * 3,
    ]
    for k, message in ((81, "at most the number of rows"), (0, "at least 1")):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            call(loaded, "search", image_bytes=FILES[:1], k=[k])


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("search", {"k": [1, 2]}, "`k` must hold one number, or one for each image"),
        ("search", {"k": [1, 2, 3, 4]}, "one for each image.*4.*3"),
        ("search", {"k": np.zeros(0, "int32")}, "one for each image"),
        ("search", {"image_bytes": [], "k": [1]}, "`image_bytes` must hold one image"),
        ("embed_bytes", {"image_bytes": []}, "`image_bytes` must hold one image"),
        ("embed", {"images": np.zeros((0, SIZE, SIZE, 3), "uint8")}, "`images` must"),
    ],
)
def test_wrong_batches_are_told(loaded, name, tensors, message):
    if name != "embed":
        files = tensors.get("image_bytes", FILES[:3])
        tensors = {**tensors, "image_bytes": tf.constant(files, tf.string)}
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s){message}"):
        call(loaded, name, **tensors)


def test_signatures_are_fit_for_a_server(loaded):
    assert set(loaded.signatures) == {"embed", "embed_bytes", "search"}
    for signature in loaded.signatures.values():
        positional, named = signature.structured_input_signature
        assert positional == ()
        for spec in [*named.values(), *signature.structured_outputs.values()]:
            assert spec.shape.rank >= 1 and spec.shape[0] is None


def test_loads_without_this_package(exported, tmp_path):
    embedder, index, path = exported
    for number, content in enumerate(FILES):
        (tmp_path / f"{number}").write_bytes(content)
    code = f"""
import json, sys
sys.modules["keras_ccp"] = None  # its import fails
import tensorflow as tf
model = tf.saved_model.load({str(path)!r})
files = [open(f"{{i}}", "rb").read() for i in range({len(FILES)})]
vectors = model.signatures["embed_bytes"](image_bytes=tf.constant(files))
found = model.signatures["search"](image_bytes=tf.constant(files), k=tf.constant([4]))
ids = [[i.decode() for i in row] for row in found["ids"].numpy()]
print(json.dumps([vectors["embeddings"].numpy().tolist(), ids]))
"""
    printed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        cwd=tmp_path,
        text=True,
    ).stdout
    vectors, ids = json.loads(printed)
    expected = reference(embedder, FILES)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert ids == index.search(expected, 4)[1].tolist()


def test_scann_inside(exported, tmp_path):
    pytest.importorskip("scann")
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((200, 6))[np.arange(11_000) % 200]
    rows = (centres + 0.02 * rng.standard_normal((11_000, 6))).astype(np.float32)
    index = RetrievalIndex.build(rows, backend="scann")
    assert index.parameters["leaves"]
    # In a graph as in the index itself: nearly all of the nearest.
    queries = tf.constant(rows[:100] + np.float32(0.01))
    found = SearchInGraph(index).search(queries, tf.constant([10]))["ids"].numpy()
    expected = retrieval.search(queries.numpy(), rows, 10)[1]
    shares = [np.isin(*pair).mean() for pair in zip(found, expected, strict=True)]
    assert np.mean(shares) >= 0.95
    # In a saved model, and with more than the searched partitions hold.
    path = serving.export_serving(exported[0], tmp_path / "model", index)
    found = call(tf.saved_model.load(path), "search", image_bytes=FILES[:1], k=[11_000])
    query = reference(exported[0], FILES[:1])
    np.testing.assert_array_equal(
        found["ids"], retrieval.search(query, rows, 11_000)[1]
    )


# ==== What can be exported ====


def test_embedder_may_be_a_path_or_a_saved_model(tmp_path):
    model = network(dtype="float32")
    model.save(tmp_path / "model.keras")
    model.export(tmp_path / "saved", verbose=False)
    expected = reference(model, FILES[:2])
    out = tmp_path / "out"
    for embedder in (tmp_path / "model.keras", tmp_path / "saved", out):
        serving.export_serving(embedder, out)  # the last one onto itself
        found = call(tf.saved_model.load(out), "embed_bytes", image_bytes=FILES[:2])
        np.testing.assert_allclose(found["embeddings"], expected, atol=1e-5)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_model_is_exported_normalised_and_without_proxies(tmp_path):
    model = CCPModel(network(), num_classes=50, normalization="l2")
    out = serving.export_serving(model, tmp_path / "out", size=SIZE, short_side=SIZE)
    found = tf.saved_model.load(out)
    embeddings = call(found, "embed_bytes", image_bytes=FILES)["embeddings"]
    expected = reference(model, FILES, short_side=SIZE)
    np.testing.assert_allclose(embeddings, expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1.0, rtol=1e-5)
    assert not any(50 in variable.shape for variable in found.weights)
    assert serving.read_preparation(out) == {"size": SIZE, "short_side": SIZE}


def test_size_of_an_embedder_that_takes_any(tmp_path):
    model = network(size=None)
    with pytest.raises(ValueError, match="`size` must be given"):
        serving.export_serving(model, tmp_path / "out")
    out = serving.export_serving(model, tmp_path / "out", size=16)
    found = call(tf.saved_model.load(out), "embed_bytes", image_bytes=FILES)
    expected = reference(model, FILES, 16, 18)  # round(16 * 256 / 227)
    np.testing.assert_allclose(found["embeddings"], expected, atol=1e-5)


def test_export_refuses(tmp_path):
    model = network()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"")
    file = tmp_path / "photos" / "a.jpg"
    grey = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    other = RetrievalIndex.build(gallery(), fingerprint="other")
    for error, match, embedder, arguments in (
        (ValueError, "one input and one output. Received: 3", 3, {}),
        (FileNotFoundError, "nothing.keras", tmp_path / "nothing.keras", {}),
        (ValueError, "square RGB", grey, {}),
        (ValueError, "must be 24", model, {"size": 25}),
        (ValueError, "at least 24", model, {"short_side": 23}),
        (ValueError, "of this embedder", model, {"index": other}),
        (ValueError, "new or empty", model, {"path": tmp_path / "photos"}),
        (ValueError, "new or empty", model, {"path": file}),
    ):
        with pytest.raises(error, match=match):
            serving.export_serving(embedder, **{"path": tmp_path / "o", **arguments})
    assert [p.name for p in tmp_path.iterdir()] == ["photos"]


def test_onnx_names_its_packages(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    with pytest.raises(ImportError, match="onnx"):  # Keras says it
        serving.export_onnx(network(), tmp_path / "model.onnx")


@pytest.mark.filterwarnings("ignore")  # of tf2onnx, under NumPy 2
def test_onnx_embeds_the_same(tmp_path):
    pytest.importorskip("tf2onnx")
    onnx = pytest.importorskip("onnx.reference")
    model = network()
    serving.export_onnx(model, tmp_path / "model.onnx")
    images = np.random.default_rng(0).integers(0, 256, (3, SIZE, SIZE, 3), np.uint8)
    evaluator = onnx.ReferenceEvaluator(str(tmp_path / "model.onnx"))
    (found,) = evaluator.run(None, {evaluator.input_names[0]: images})
    np.testing.assert_allclose(found, model(images), atol=1e-5)


# ==== Augmentation inside ====


def augmenting():
    """An embedder that changes its images at random while it is trained."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3), dtype="uint8"),
            layers.Rescaling(1 / 255),
            layers.RandomFlip(),
            layers.RandomRotation(0.4),
            layers.RandomZoom(0.4),
            layers.RandomBrightness(0.4, value_range=(0, 1)),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(4),
        ]
    )


def served(path, images):
    model = tf.saved_model.load(path)
    if "embed" in model.signatures:
        return call(model, "embed", images=images)["embeddings"]
    return model.serve(images).numpy()


def via_model(embedder, path, images):
    CCPModel(embedder, 3, normalization=None).export(path, verbose=False)
    return served(path, images)


def via_serving(embedder, path, images):
    return served(serving.export_serving(embedder, path), images)


def via_run(embedder, path, images):
    dataset = Dataset(images, np.arange(len(images)))
    return served(serving.export_trained(embedder, path, dataset), images)


def via_keras_file(embedder, path, images):
    embedder.save(path.with_suffix(".keras"))
    loaded = serving.load_embedder(path.with_suffix(".keras"))
    return served(serving.export_serving(loaded, path), images)


def via_saved_ccp_model(embedder, path, images):
    CCPModel(embedder, 3, normalization=None).save(path.with_suffix(".keras"))
    return CCPModel.embed(
        keras.models.load_model(path.with_suffix(".keras"), compile=False), images
    )


def via_index(embedder, path, images):
    embedder.save(path.with_suffix(".keras"))
    path.mkdir()
    for number, image in enumerate(images):
        PIL.Image.fromarray(image).save(path / f"{number}.png")
    index, out = path.with_name("index"), path.with_name("vectors.npy")
    search.index_images(path.with_suffix(".keras"), [path], index, progress=False)
    # It finds each image itself, and `embed` gives the same of the kept embedder.
    searcher = search.Searcher(index)
    found, _ = searcher.search(sorted(path.iterdir()), 1, progress=False)
    assert max(result.neighbours[0].distance for result in found) < 1e-5
    kept = searcher.index.embedder.file
    search.embed_images(kept, [path], out, progress=False)
    np.testing.assert_allclose(np.load(out), searcher.index.embeddings, atol=1e-5)
    return searcher.index.embeddings


def via_onnx(embedder, path, images):
    pytest.importorskip("tf2onnx")
    onnx = pytest.importorskip("onnx.reference")
    serving.export_onnx(embedder, path)
    evaluator = onnx.ReferenceEvaluator(str(path))
    return evaluator.run(None, {evaluator.input_names[0]: images})[0]


WAYS = [via_model, via_serving, via_run, via_keras_file, via_saved_ccp_model]


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of tf2onnx
@pytest.mark.parametrize("way", [*WAYS, via_index, via_onnx])
def test_augmentation_does_nothing_outside_of_training(tmp_path, way):
    embedder = augmenting()
    images = np.random.default_rng(0).integers(0, 256, (8, SIZE, SIZE, 3), np.uint8)
    expected = embedder.predict(images, verbose=0)
    assert np.abs(embedder(images, training=True) - expected).max() > 0.1
    embedder(images, training=True)  # moves the seeds on
    if way is via_index:
        files = [PIL.Image.fromarray(image) for image in images]
        expected = embedder.predict(np.stack(list(map(prepared, files))), verbose=0)
    found = way(embedder, tmp_path / "model", images)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_augmentation_does_nothing_in_an_embedder_of_other_images(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1)).astype("uint8")
    embedder = keras.Sequential([keras.Input((8, 8, 1), dtype="uint8")])
    for layer in (keras.layers.RandomFlip(), keras.layers.Flatten()):
        embedder.add(layer)
    embedder.add(keras.layers.Dense(4))
    found = via_run(embedder, tmp_path / "model", images)
    expected = embedder.predict(images, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def prepared(image):
    content = io.BytesIO()
    image.save(content, "PNG")
    return decode_center_crop(tf.constant(content.getvalue()), SIZE, SHORT_SIDE)


# ==== check_model ====


def test_check_model_says_what_it_is(exported):
    embedder, _, path = exported
    report = serving.check_model(path)
    assert report.pop("difference") <= 1e-6
    assert report == {
        "fingerprint": fingerprint(embedder),
        "size": SIZE,
        "short_side": SHORT_SIDE,
        "embedding_dim": 6,
        "num_rows": 80,
    }
    assert fingerprint(tf.saved_model.load(path)) == fingerprint(embedder)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_golden(path, **values):
    """What a model that computes something else would find written beside it."""
    file = path / "assets.extra" / "keras_ccp.json"
    manifest = read_manifest(file)
    manifest["golden"] |= values
    write_manifest(file, manifest)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda p: flip(p / "saved_model.pb"), "saved_model.pb is changed"),
        (
            lambda p: flip(p / "variables/variables.data-00000-of-00001"),
            "variables.data-00000-of-00001 is changed",
        ),
        (lambda p: (p / "variables/variables.index").unlink(), "index is missing"),
        (lambda p: (p / "more").write_text(""), "more is new"),
        (
            lambda p: flip(p / "assets.extra/keras_ccp.json"),
            "keras_ccp.json is changed",
        ),
        (lambda p: change_golden(p, embedding=[1.0] * 6), "differs by .* its length"),
        (lambda p: change_golden(p, ids=["a"]), "neighbours are .*, not .'a'."),
    ],
)
def test_check_model_says_what_differs(exported, tmp_path, damage, match):
    copy = shutil.copytree(exported[2], tmp_path / "copy")
    damage(copy)
    with pytest.raises(ValueError, match=match):
        serving.check_model(copy)


def test_check_model_refuses_other_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="export_serving"):
        serving.check_model(tmp_path)
    assert serving.read_preparation(tmp_path) == {}


# ==== Embedders of runs ====


def embedder_of(*shape):
    return keras.Sequential(
        [
            keras.Input(shape, dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


@pytest.mark.parametrize(
    ("dataset", "preparation"),
    [
        # Arrays are embedded as they are: nothing is cut off.
        (
            Dataset(np.zeros((2, 16, 16, 3), np.uint8), [0, 1]),
            {"size": 16, "short_side": 16},
        ),
        (
            Dataset([b"1", b"2"], [0, 1]).with_size(16, 25),
            {"size": 16, "short_side": 25},
        ),
    ],
)
def test_a_trained_embedder_prepares_as_its_data(tmp_path, dataset, preparation):
    embedder = embedder_of(16, 16, 3)
    path = serving.export_trained(embedder, tmp_path / "embedder", dataset)
    assert serving.read_preparation(path) == preparation
    about = serving.check_model(path)
    assert about["embedding_dim"] == 3 and about["difference"] < 1e-6
    assert about["fingerprint"] == fingerprint(embedder)


@pytest.mark.parametrize("shape", [(8, 8, 1), (6, 8, 3)])
def test_a_trained_embedder_of_other_images_is_checked_too(tmp_path, shape):
    images = np.random.default_rng(0).integers(0, 256, (2, *shape)).astype("uint8")
    embedder = embedder_of(*shape)
    path = serving.export_trained(embedder, tmp_path / "e", Dataset(images, [0, 1]))
    loaded = tf.saved_model.load(path)
    np.testing.assert_allclose(loaded.serve(images), embedder(images), atol=1e-6)
    assert serving.read_preparation(path) == {}
    about = serving.check_model(path)
    assert about["difference"] < 1e-6 and about["num_rows"] == 0
    # Again, in the place of the other; then a weight changes.
    serving.export_trained(embedder_of(*shape), path, Dataset(images, [0, 1]))
    assert serving.check_model(path)["fingerprint"] != about["fingerprint"]
    (weights,) = (path / "variables").glob("variables.data*")
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(ValueError, match="is changed"):
        serving.check_model(path)
