"""RetrievalIndex: what it finds, keeps and refuses."""

import builtins
import io
import logging
import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import checks, retrieval
from keras_ccp.index import KeptEmbedder, RetrievalIndex, fingerprint
from keras_ccp.index.digests import digest, read_manifest, write_manifest
from keras_ccp.index.scann_backend import Tuning, exact_order, sampled_recall


def vectors(count, dim=8, seed=0):
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def build(count=6, **arguments):
    return RetrievalIndex.build(vectors(count), **arguments)


def small_index():
    return RetrievalIndex.build(
        [[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]],
        ids=["origin", "far", "ü/near"],
        labels=[7, 8, 7],
        fingerprint="f",
        metadata={"root": "photos"},
    )


# ==== Search ====


def test_search_finds_the_nearest():
    index = small_index()
    # From (0, 0.75): 0.25 to (0, 1), 0.75 to (0, 0), sqrt(9 + 3.25^2) to (3, 4).
    distances, ids = index.search([[0.0, 0.75]], 3)
    assert ids.tolist() == [["ü/near", "origin", "far"]]
    np.testing.assert_allclose(distances, [[0.25, 0.75, 4.4229515]], rtol=1e-6)
    assert distances.dtype == np.float32
    assert index.labels_of(ids).tolist() == [[7, 7, 8]]
    assert index.is_exact and index.parameters == {} and len(index) == 3


def test_search_is_that_of_retrieval():
    embeddings, queries = vectors(50), vectors(9, seed=1)
    distances, ids = RetrievalIndex.build(embeddings).search(queries, 7)
    expected = retrieval.search(queries, embeddings, 7)
    np.testing.assert_array_equal(distances, expected[0])
    np.testing.assert_array_equal(ids, expected[1])


def test_add_appends():
    index = small_index()
    index.add([[9.0, 9.0]], ["new"], labels=[1])
    distances, ids = index.search([[9.0, 9.0]], 1)
    assert (ids.tolist(), distances.tolist()) == ([["new"]], [[0.0]])
    assert index.labels_of(ids).tolist() == [[1]]


def test_remove_forgets():
    index = small_index()
    index.search([[3.0, 4.0]], 1)
    index.remove(["far"])
    distances, ids = index.search([[3.0, 4.0]], 2)
    # sqrt(9 + 9) to (0, 1) and 5 to (0, 0).
    np.testing.assert_allclose(distances, [[18**0.5, 5.0]])
    assert index.labels_of(ids).tolist() == [[7, 7]] and len(index) == 2
    with pytest.raises(ValueError, match="`ids` must be ids of the index.*'far'"):
        index.remove(["origin", "far"])
    with pytest.raises(ValueError, match="n at least 1"):
        index.remove(["origin", "ü/near"])
    assert index.search([[0.0, 0.0]], 1)[1].tolist() == [["origin"]]


def test_what_is_too_far_has_no_distance():
    distances, _ = small_index().search([[0.0, 0.0]], 3, max_distance=1.0)
    assert distances.tolist() == [[0.0, 1.0, np.inf]]


def test_replace_keeps_places():
    index = RetrievalIndex.build([[0.0], [1.0], [2.0]], ["a", "b", "c"], [7, 8, 9])
    index.search([[0.0]], 1)
    index.replace([[5.0], [6.0]], ["c", "a"])
    assert index.embeddings[:, 0].tolist() == [6.0, 1.0, 5.0]
    assert index.search([[5.9]], 3)[1].tolist() == [["a", "c", "b"]]
    assert index.labels.tolist() == [7, 8, 9]
    index.replace(np.float64([[1e-9]]), ["b"], labels=[4])
    assert index.labels.tolist() == [7, 4, 9]
    assert index.embeddings[1, 0] == 1e-9 and index.embeddings.dtype == np.float64
    for arguments, match in (
        (([[1.0]], ["d"]), "ids of the index. Received: 'd'"),
        (([[1.0], [1.0]], ["a", "a"]), "2 ids, 1 different"),
        (([[1.0], [1.0]], ["a"]), "for 2 rows"),
        (([[np.nan]], ["a"]), "finite"),
        (([[1.0]], ["a"], ["x"]), "`labels` must hold"),
    ):
        with pytest.raises(ValueError, match=match):
            index.replace(*arguments)
    assert index.embeddings[0, 0] == 6.0
    with pytest.raises(ValueError, match="left out of an index without"):
        RetrievalIndex.build([[0.0]], ["a"]).replace([[1.0]], ["a"], [1])


def test_search_among_some_rows():
    index = RetrievalIndex.build([[0.0], [1.0], [2.0], [3.0]], labels=[0, 1, 0, 1])
    distances, ids = index.search([[0.0]], 2, where=index.labels == 1)
    assert (ids.tolist(), distances.tolist()) == ([[1, 3]], [[1.0, 3.0]])
    for where in ([True] * 3, [1, 0, 0, 0], [False] * 4):
        with pytest.raises(ValueError, match="`where` must be one bool for each of 4"):
            index.search([[0.0]], 1, where=where)
    with pytest.raises(ValueError, match="k"):
        index.search([[0.0]], 3, where=index.labels == 1)


def test_classify_by_a_vote():
    rows = [[0.0], [1.0], [2.0], [3.0], [10.0]]
    index = RetrievalIndex.build(rows, labels=["b", "a", "a", "b", "c"])
    # Of 0.4: b, a. Of 1.4, three: a, a, b. Of 9: c, then b far away.
    assert index.classify([[0.4]], k=2).tolist() == ["b"]
    assert index.classify([[1.4], [9.0]], k=3).tolist() == ["a", "c"]
    found = index.classify([[9.0], [6.0], [2.6]], k=4, max_distance=1.0)
    assert found.tolist() == ["c", None, "b"]
    # More neighbours than rows: b and a twice, b is nearer.
    assert index.classify([[0.4]], k=9).tolist() == ["b"]
    with pytest.raises(ValueError, match="needs an index with labels"):
        RetrievalIndex.build(rows).classify([[0.0]])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"ids": ["far"], "labels": [1]}, "unique.*'far'"),
        ({"ids": [5], "labels": [1]}, "all of one kind"),
        ({"ids": ["x"], "labels": ["a"]}, "`labels` must .* all of one kind"),
        ({"ids": ["x"]}, "`labels` must be given for all rows"),
        ({"ids": ["x"], "labels": [1], "embeddings": [[1.0] * 3]}, r"\(n, 2\)"),
    ],
)
def test_add_that_fails_changes_nothing(arguments, match):
    index = small_index()
    with pytest.raises(ValueError, match=match):
        index.add(**{"embeddings": [[9.0, 9.0]], **arguments})
    assert len(index) == 3 and index.search([[9.0, 9.0]], 1)[1].tolist() == [["far"]]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"embeddings": np.zeros((0, 3))}, "n at least 1"),
        ({"embeddings": [[np.nan, 1.0]]}, "1 of 1 rows"),
        ({"ids": [1, 1]}, "unique.*1 more than once"),
        ({"ids": [1]}, "int64 of shape .* for 2 rows"),
        ({"ids": ["a", 1]}, "all of one kind"),
        ({"ids": [True, False]}, "bool of shape"),
        ({"ids": [0.5, 1.5]}, "float64 of shape"),
        ({"ids": [2**63, 1]}, "float64 of shape"),
        ({"labels": [None, None]}, "`labels` must .*object"),
        ({"backend": "faiss"}, "'faiss'"),
    ],
)
def test_build_refuses(arguments, match):
    with pytest.raises(ValueError, match=match):
        RetrievalIndex.build(**{"embeddings": [[1.0], [2.0]], **arguments})


@pytest.mark.parametrize(
    ("queries", "k", "match"),
    [
        ([[1.0, 2.0, 3.0]], 1, r"shape \(n, 2\)"),
        ([[np.inf, 0.0]], 1, "finite"),
        ([[0.0, 0.0]], 4, "at most 3.*k=4"),
        ([[0.0, 0.0]], 0, "at least 1"),
    ],
)
def test_search_refuses(queries, k, match):
    with pytest.raises(ValueError, match=match):
        small_index().search(queries, k)


def test_vectors_of_another_embedder_are_refused():
    index = small_index()
    index.search([[0.0, 0.0]], 1, fingerprint="f")
    with pytest.raises(ValueError, match="fingerprint='g', the index has 'f'"):
        index.search([[0.0, 0.0]], 1, fingerprint="g")


def test_labels_of_refuses():
    for ids, message in ((["far", "nothing"], "'nothing'"), ([[0]], "Received: 0")):
        with pytest.raises(ValueError, match=message):
            small_index().labels_of(ids)


# ==== Files ====


@pytest.mark.parametrize("ids", [None, [3, -5, 2**62], ["a", "", "nö\udcff"]])
def test_save_and_load(tmp_path, ids):
    index = RetrievalIndex.build(
        vectors(3), ids, ["x", "y", "x"], fingerprint="f", metadata={"a": [1, "b"]}
    )
    index.save(tmp_path / "index")
    read = RetrievalIndex.load(tmp_path / "index")
    np.testing.assert_array_equal(read.embeddings, index.embeddings)
    assert read.embeddings.dtype == np.float32
    assert read.ids.tolist() == index.ids.tolist()
    assert read.labels.tolist() == ["x", "y", "x"]
    assert (read.fingerprint, read.metadata) == ("f", {"a": [1, "b"]})
    read.add(vectors(1, seed=1), [9] if ids is None or ids[0] == 3 else ["z"], ["y"])


def test_save_replaces(tmp_path):
    build(6).save(tmp_path)
    build(4).save(tmp_path)
    assert len(RetrievalIndex.load(tmp_path)) == 4
    assert len(list(tmp_path.iterdir())) == 2


def saved(folder, count=3):
    """The manifest of a saved index."""
    build(count).save(folder)
    return folder / "index.json"


def test_save_that_dies_leaves_the_old_index(tmp_path, monkeypatch):
    saved(tmp_path / "index", 6)
    replace, moved = pathlib.Path.replace, []

    def die(path, target):
        if target.name == deadly:
            builtins.exit("killed")
        moved.append(target.name)
        return replace(path, target)

    # While the rows are written, and just before the rename that decides.
    rows = read_manifest(saved(tmp_path / "other", 4))["rows"]["name"]
    for deadly in (rows, "index.json"):  # noqa: B007
        with monkeypatch.context() as patch:
            patch.setattr(pathlib.Path, "replace", die)
            with pytest.raises(SystemExit):
                build(4).save(tmp_path / "index")
        assert len(RetrievalIndex.load(tmp_path / "index")) == 6
    assert moved == [rows]
    build(4).save(tmp_path / "index")
    assert len(list((tmp_path / "index").iterdir())) == 2


def test_save_keeps_clear_of_other_files(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_bytes(b"")
    for path in (tmp_path / "photos", tmp_path / "photos" / "1.jpg"):
        with pytest.raises(ValueError, match="`path` must be a new or empty folder"):
            build().save(path)
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["1.jpg"]
    # What lies beside an index stays there, and a killed first `save` is no obstacle.
    saved(tmp_path / "index", 6)
    (tmp_path / "index" / "page.html").write_text("mine")
    saved(tmp_path / "index", 4)
    assert (tmp_path / "index" / "page.html").read_text() == "mine"
    (tmp_path / "killed").mkdir()
    for name in ("partial_rows-1.npz", "rows-0.npz"):
        (tmp_path / "killed" / name).write_bytes(b"half")
    build().save(tmp_path / "killed")
    assert len(list((tmp_path / "killed").iterdir())) == 2


def test_every_changed_byte_is_found(tmp_path):
    build(2, metadata={"root": "photos"}).save(tmp_path)
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        for position in range(0, len(content), 7):
            changed = bytearray(content)
            changed[position] ^= 1
            for damaged in (changed, content[:position]):
                file.write_bytes(damaged)
                with pytest.raises(ValueError, match=r"where .* is changed"):
                    RetrievalIndex.load(tmp_path)
        file.write_bytes(content)
    assert len(RetrievalIndex.load(tmp_path)) == 2
    next(tmp_path.glob("rows-*")).unlink()
    with pytest.raises(ValueError, match="changed or missing"):
        RetrievalIndex.load(tmp_path)


def test_load_refuses_what_is_no_index(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder of an index"):
        RetrievalIndex.load(tmp_path / "nothing")
    manifest = read_manifest(saved(tmp_path))
    write_manifest(tmp_path / "index.json", manifest | {"format": 2})
    with pytest.raises(ValueError, match="the format is 2"):
        RetrievalIndex.load(tmp_path)
    # Objects would be unpickled, which runs what their writer likes.
    buffer = io.BytesIO()
    np.savez(buffer, embeddings=np.zeros((1, 1)), ids=np.array([None], object))
    (tmp_path / manifest["rows"]["name"]).write_bytes(buffer.getvalue())
    manifest["rows"]["sha256"] = digest(buffer.getvalue())
    write_manifest(tmp_path / "index.json", manifest)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        RetrievalIndex.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": None},
        {"rows": {}},
        {"embedder": 3},
        {"metadata": None, "tuning": 4, "backend": []},
        [],
        "index",
    ],
)
def test_a_manifest_of_something_else_is_refused(tmp_path, change):
    """With right checksums, which anyone can write."""
    manifest = read_manifest(saved(tmp_path))
    changed = manifest | change if isinstance(change, dict) else change
    write_manifest(tmp_path / "index.json", changed)
    with pytest.raises(
        ValueError, match="must be undamaged|must hold the rows"
    ) as error:
        RetrievalIndex.load(tmp_path)
    assert str(error.value).count("\n") == 1
    content = "[" * 100_000
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ValueError, match="index.json is changed"):
        RetrievalIndex.load(tmp_path)


def test_an_index_hands_its_embedder_on(tmp_path):
    (tmp_path / "model.keras").write_text("weights")
    index = build(3, fingerprint="f")
    index.embedder = KeptEmbedder(tmp_path / "model.keras", 8, 9)
    index.save(tmp_path / "index")
    for fingerprint_, kept in (("f", "weights"), ("g", None)):
        build(4, fingerprint=fingerprint_).save(tmp_path / "index")
        read = RetrievalIndex.load(tmp_path / "index")
        assert len(read) == 4
        assert (read.embedder and read.embedder.file.read_text()) == kept
    assert len(list((tmp_path / "index").iterdir())) == 2


# ==== ScaNN ====


def grouped(count):
    """Points around 200 centres: neighbours lie in few partitions."""
    centres = 4 * vectors(200, 16)
    return centres[np.arange(count) % 200] + vectors(count, 16, seed=1)


@pytest.fixture(scope="module")
def scann_index():
    pytest.importorskip("scann")
    return RetrievalIndex.build(grouped(12_000), backend="scann")


def test_scann_finds_nearly_all(scann_index):
    assert not scann_index.is_exact and scann_index.backend == "scann"
    assert 0 < scann_index.parameters["leaves"] < 40
    assert scann_index.recall["recall"] >= 0.99
    queries = grouped(14_000)[-100:]
    distances, ids = scann_index.search(queries, 10)
    true_distances, true_ids = retrieval.search(queries, scann_index.embeddings, 10)
    found = [len(np.intersect1d(*pair)) for pair in zip(ids, true_ids, strict=True)]
    assert np.mean(found) >= 9.9
    # Where the same are found their distances are the same to the last bit.
    whole = np.array(found) == 10
    np.testing.assert_array_equal(ids[whole], true_ids[whole])
    np.testing.assert_array_equal(distances[whole], true_distances[whole])


def test_scann_finds_more_than_its_partitions_hold(scann_index):
    # 200 groups of 60: what is beyond lies in partitions that are not searched.
    distances, ids = scann_index.search(grouped(2), 11_000)
    expected = retrieval.search(grouped(2), scann_index.embeddings, 11_000)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_array_equal(distances, expected[0])


def test_scann_index_is_the_same_when_loaded(tmp_path, scann_index):
    scann_index.save(tmp_path)
    read = RetrievalIndex.load(tmp_path)
    assert read.parameters == scann_index.parameters
    assert read.recall == scann_index.recall and not read.is_exact
    queries = grouped(50)
    np.testing.assert_array_equal(
        read.search(queries, 5)[1], scann_index.search(queries, 5)[1]
    )


def test_small_scann_index_and_add():
    pytest.importorskip("scann")
    index = build(6, backend="scann")
    assert index.parameters == Tuning(reorder=0, leaves=0)._asdict()
    index.add(vectors(3, seed=1), [10, 11, 12])
    queries = vectors(5, seed=2)
    expected = retrieval.search(queries, index.embeddings, 9)
    distances, ids = index.search(queries, 9)
    np.testing.assert_array_equal(distances, expected[0])
    np.testing.assert_array_equal(ids, index.ids[expected[1]])
    with pytest.raises(ValueError, match="below 1e18"):
        RetrievalIndex.build([[1e20]], backend="scann")


@pytest.mark.parametrize(
    "error", [ImportError("no module"), tf.errors.NotFoundError(None, None, "symbol")]
)
def test_without_scann_the_index_is_exact(monkeypatch, caplog, error, tmp_path):
    def fail(name):
        raise error

    monkeypatch.setattr(checks.importlib, "import_module", fail)
    with caplog.at_level(logging.WARNING, "keras_ccp"):
        index = build(backend="scann")
        index.add(vectors(1, seed=1), [9])
    (record,) = caplog.records
    assert "searches exactly" in record.getMessage()
    assert index.is_exact and index.search(vectors(1), 1)[1].tolist() == [[0]]
    # Where there is ScaNN, it is used again.
    index.save(tmp_path)
    monkeypatch.undo()
    if "scann" in sys.modules:
        assert not RetrievalIndex.load(tmp_path).is_exact


def test_recall_counts_what_is_missed():
    embeddings = vectors(40)

    def half(queries, k):  # the query itself and every second neighbour
        distances, rows = retrieval.search(queries, embeddings, 2 * k)
        keep = [0, *range(2, 2 * k, 2)][:k]
        return distances[:, keep], rows[:, keep]

    # Of the neighbours 1 to 10 it has 2, 4, 6, 8 and 10.
    assert sampled_recall(half, retrieval.ExactSearch(embeddings), 10, 40) == 0.5
    assert build().measured_recall(3, 10) == 1.0


def test_exact_order_puts_ties_by_row():
    embeddings = np.array([[1.0], [-1.0], [0.5], [1.0]])
    distances, rows = exact_order(
        np.zeros((1, 1)), embeddings, np.array([[3, 1, 2, 0]])
    )
    assert rows.tolist() == [[2, 0, 1, 3]]
    assert distances.tolist() == [[0.5, 1.0, 1.0, 1.0]]


# ==== Fingerprint ====


def network(units=3, activation=None):
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(units, activation=activation)]
    )


def test_fingerprint_is_that_of_the_saved_model(tmp_path):
    model = network()
    model.save(tmp_path / "model.keras")
    keras.backend.clear_session()
    network()  # names are counted on
    read = keras.models.load_model(tmp_path / "model.keras")
    copy = network()
    copy.set_weights(model.get_weights())
    assert fingerprint(model) == fingerprint(read) == fingerprint(copy)
    assert len(fingerprint(model)) == 64


def test_fingerprint_tells_models_apart(tmp_path):
    model, relu = network(), network(activation="relu")
    relu.set_weights(model.get_weights())
    before = fingerprint(model)
    assert before != fingerprint(relu)
    for name, exported in (("linear", model), ("relu", relu)):
        exported.export(tmp_path / name, verbose=False)
    first, second, again = (
        fingerprint(tf.saved_model.load(tmp_path / name))
        for name in ("linear", "relu", "linear")
    )
    assert first == again != second
    model.set_weights([w + 1e-6 for w in model.get_weights()])
    assert fingerprint(model) != before
