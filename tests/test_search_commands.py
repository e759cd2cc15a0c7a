"""From a run and a folder of images to similar images."""

import html.parser
import io
import json
import os
import shutil

import keras
import numpy as np
import PIL.Image
import pytest
import rich.console
import tensorflow as tf
import typer.testing

from keras_ccp import serving
from keras_ccp.app import search as search_commands
from keras_ccp.app.cli import app
from keras_ccp.app.images import find_images, look_at
from keras_ccp.app.run import join_embedders
from keras_ccp.app.search import (
    Neighbour,
    Searcher,
    SearchResult,
    about_model,
    run_embedder,
)
from keras_ccp.files import write_file
from keras_ccp.images import decode_center_crop, decode_image, read_file
from keras_ccp.index import RetrievalIndex

SIZE = 16
# A name that markup, HTML and a URL would each take for something else.
ODD = "ü [bold]<b> &#%.png"


def network():
    images = keras.Input((SIZE, SIZE, 3), dtype="uint8")
    pooled = keras.layers.AveragePooling2D(4)(keras.layers.Rescaling(1 / 255)(images))
    return keras.Model(images, keras.layers.Dense(5)(keras.layers.Flatten()(pooled)))


def picture(seed, height=20, width=30):
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    pixels = tf.image.resize(coarse, (height, width))
    return tf.io.encode_png(tf.cast(pixels, tf.uint8)).numpy()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, a folder of seven images and three broken ones, and their index."""
    place = tmp_path_factory.mktemp("search")
    keras.utils.set_random_seed(0)
    network().save(place / "model.keras")
    photos, odd = place / "photos", f"dog/{ODD}"
    names = ["cat/1.png", "cat/2.PNG", odd, "dog/deep/4.png", "5.png", "6.png"]
    contents = {name: picture(number) for number, name in enumerate(names)}
    contents |= {
        "cat/turned.jpg": tf.io.encode_jpeg(tf.io.decode_png(picture(9))).numpy(),
        "cat/empty.png": b"",
        "cut.png": picture(7)[:200],
        "no image.jpg": b"hello",
        "notes.txt": b"hello",
        ".hidden.png": picture(8),
        ".thumbs/1.png": picture(8),
    }
    for name, content in contents.items():
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_bytes(content)
    done = search_commands.index_images(
        place / "model.keras", [photos], place / "index", progress=False
    )
    return place, done


@pytest.fixture(scope="module")
def searcher(place):
    return Searcher(place[0] / "index")


IDS = ["5.png", "6.png", "cat/1.png", "cat/2.PNG", "cat/turned.jpg"]
IDS += ["dog/deep/4.png", f"dog/{ODD}"]


# ==== index ====


def test_index_holds_what_can_be_read(place):
    folder, done = place
    assert done.index.ids.tolist() == IDS
    # Those beside the folders have the name of their own folder.
    labels = ["photos", "photos", *["cat"] * 3, "dog/deep", "dog"]
    assert done.index.labels.tolist() == labels
    failed = sorted(path.name for path in done.failures)
    assert failed == ["cut.png", "empty.png", "no image.jpg"]
    assert all(done.failures.values())
    # The whole way by hand: 16 * 256 / 227 = 18.04.
    model = keras.models.load_model(folder / "model.keras")
    for name, embedding in zip(IDS, done.index.embeddings, strict=True):
        encoded = tf.io.read_file(str(folder / "photos" / name))
        image = decode_center_crop(encoded, SIZE, 18)
        np.testing.assert_allclose(model(image[None])[0], embedding, atol=1e-5)


def test_index_needs_nothing_else(place, tmp_path):
    folder, _ = place
    shutil.copytree(folder / "index", tmp_path / "copy")
    results, _ = Searcher(tmp_path / "copy").search([folder / "photos" / "5.png"])
    assert results[0].neighbours[0].id == "5.png"


def test_index_is_replaced_with_scann_and_of_single_files(place, tmp_path):
    pytest.importorskip("scann")
    photos = place[0] / "photos"
    files = [photos / "cat" / "1.png", photos / "cat" / "2.PNG", photos / "cat/1.png"]
    shutil.copytree(place[0] / "index", tmp_path, dirs_exist_ok=True)
    done = search_commands.index_images(
        place[0] / "model.keras", files, tmp_path, "scann", progress=False
    )
    assert done.index.ids.tolist() == ["1.png", "2.PNG"] and done.index.labels is None
    assert not RetrievalIndex.load(tmp_path).is_exact
    (result,), _ = Searcher(tmp_path).search([photos / "cat" / "2.PNG"], k=1)
    assert result.neighbours[0].path == str(photos / "cat" / "2.PNG")


def test_index_refuses(place, tmp_path):
    folder, _ = place
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    model, photos = folder / "model.keras", folder / "photos"
    for error, match, run, images in (
        (FileNotFoundError, "nothing", model, [photos, tmp_path / "nothing"]),
        (ValueError, "must hold images", model, [tmp_path / "empty"]),
        (ValueError, "no JPEG", model, [photos / "cat" / "empty.png"]),
        (FileNotFoundError, "SavedModel", tmp_path / "empty", [photos]),
        (FileNotFoundError, "finished", tmp_path / "run", [photos]),
    ):
        with pytest.raises(error, match=match):
            search_commands.index_images(run, images, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_index_refuses_its_place_before_it_embeds(place, tmp_path, monkeypatch):
    monkeypatch.setattr(search_commands, "run_embedder", None)  # not called
    model, photos = place[0] / "model.keras", place[0] / "photos"
    (tmp_path / "run" / "embedder").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    for out, message in (
        (tmp_path / "run", "where 'embedder' is and no index"),
        (tmp_path / "file", "where 'file' is"),
        (photos, "and no index"),
    ):
        with pytest.raises(ValueError, match=f"`out` must be a new .*{message}"):
            search_commands.index_images(model, [photos], out)
    with pytest.raises(ValueError, match="`backend` must be"):
        search_commands.index_images(model, [photos], tmp_path / "new", "faiss")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of two models."""
    run = tmp_path_factory.mktemp("run")
    (run / "config.yaml").write_text("method: C2\n")
    for fold in ("fold0", "fold1"):
        (run / "repeat0" / fold).mkdir(parents=True)
        network().save(run / "repeat0" / fold / "embedder.keras")
        (run / "repeat0" / fold / "fold.json").write_text("{}")
    embedder = join_embedders([run / "repeat0" / fold for fold in ("fold0", "fold1")])
    serving.export_serving(embedder, run / "embedder", short_side=21)
    return run


def test_run_says_how_images_are_prepared(place, run, tmp_path):
    embedder, sizes = run_embedder(run)
    assert sizes == {"size": SIZE, "short_side": 21}
    photos = [place[0] / "photos" / "5.png"]
    index, _ = search_commands.index_images(run, photos, tmp_path, progress=False)
    # The SavedModel of the run would give the same, and is not loaded.
    assert index.fingerprint == serving.check_model(run / "embedder")["fingerprint"]
    files = tf.constant([photos[0].read_bytes()])
    exported = tf.saved_model.load(run / "embedder").signatures["embed_bytes"]
    expected = exported(image_bytes=files)["embeddings"]
    np.testing.assert_allclose(index.embeddings, expected, atol=1e-5)
    assert Searcher(tmp_path).search(photos)[0][0].neighbours[0].distance < 1e-5


def test_run_of_an_earlier_version_says_what_to_do(run, tmp_path):
    (tmp_path / "config.yaml").write_text("method: C2\n")
    with pytest.raises(FileNotFoundError, match="Go on with `keras-ccp train"):
        run_embedder(tmp_path)
    shutil.copytree(run / "repeat0", tmp_path / "repeat0")
    network().export(tmp_path / "embedder", verbose=False)
    with pytest.raises(FileNotFoundError, match="keras-ccp train --out .* --resume"):
        run_embedder(tmp_path)


def test_images_are_found_once_and_in_order(place):
    photos = place[0] / "photos"
    found = find_images([photos / "6.png", photos])
    assert found[0] == photos / "6.png" and len(found) == 10
    assert found[1:] == sorted(set(found) - {photos / "6.png"})


def test_only_files_are_opened(place, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")  # reading it would never end
    # A palette that is cut short upsets the decoder; the file is named all the same.
    broken = PIL.Image.new("P", (4, 4))
    broken.putpalette(range(48))
    broken.save(tmp_path / "palette.bmp")
    content = (tmp_path / "palette.bmp").read_bytes()
    (tmp_path / "palette.bmp").write_bytes(content[:20] + content[50:])
    files = [place[0] / "photos" / "5.png", *tmp_path.iterdir()]
    looks = look_at(lambda file: decode_image(read_file(file)), files, "", False)
    assert [bool(why) for _, why in looks] == [False, True, True]


# ==== embed ====


def test_embed_writes_vectors_and_paths(place, tmp_path):
    folder, done = place
    out = tmp_path / "new" / "vectors.npy"
    search_commands.embed_images(
        folder / "model.keras", [folder / "photos"], out, progress=False
    )
    np.testing.assert_array_equal(np.load(out), done.index.embeddings)
    lines = out.with_suffix(".jsonl").read_text("utf-8").splitlines()
    names = [str(folder / "photos" / name) for name in IDS]
    assert [json.loads(line) for line in lines] == names
    assert len(list(out.parent.iterdir())) == 2
    with pytest.raises(ValueError, match="end in .npy"):
        search_commands.embed_images(folder / "model.keras", ["x"], tmp_path / "v.txt")
    (tmp_path / "v.jsonl").mkdir()
    (tmp_path / "w.npy").mkdir()
    for name in ("v.npy", "w.npy"):
        with pytest.raises(ValueError, match="`out` must be a file .* is a folder"):
            search_commands.embed_images(folder / "model.keras", ["x"], tmp_path / name)


def test_embed_keeps_names_of_several_lines(place, tmp_path):
    name, out = tmp_path / "two\nlines \udcff.png", tmp_path / "v.npy"
    shutil.copy(place[0] / "photos" / "5.png", name)
    search_commands.embed_images(
        place[0] / "model.keras", [tmp_path], out, progress=False
    )
    (line,) = out.with_suffix(".jsonl").read_text().splitlines()
    assert json.loads(line) == str(name) and len(np.load(out)) == 1


def test_embed_that_dies_leaves_no_names_of_other_vectors(place, tmp_path, monkeypatch):
    def embed(*images):
        search_commands.embed_images(
            place[0] / "model.keras", images, tmp_path / "v.npy", progress=False
        )

    def write_then_die(path, content):
        write_file(path, content)
        raise KeyboardInterrupt

    photos = place[0] / "photos"
    embed(photos / "5.png", photos / "6.png")
    monkeypatch.setattr(search_commands, "write_file", write_then_die)
    with pytest.raises(KeyboardInterrupt):
        embed(photos / "5.png")
    assert len(np.load(tmp_path / "v.npy")) == 1
    assert not (tmp_path / "v.jsonl").exists()


def test_places_that_may_not_be_written_are_found_first(place, tmp_path, monkeypatch):
    monkeypatch.setattr(search_commands, "run_embedder", None)  # not called
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    model, photos = place[0] / "model.keras", [place[0] / "photos"]
    for work in (search_commands.index_images, search_commands.embed_images):
        for out in (tmp_path / "out.npy", tmp_path / "new" / "out.npy"):
            with pytest.raises(OSError, match=f"where {tmp_path} may not be written"):
                work(model, photos, out)
    with pytest.raises(OSError, match="may not be written"):
        serving.export_serving(None, tmp_path / "model")


# ==== search ====


def test_search_finds_the_image_itself(place, searcher):
    photos = place[0] / "photos"
    queries = [photos / name for name in IDS] + [photos / "cut.png", photos / "no.png"]
    results, failures = searcher.search(queries, k=3, progress=False)
    assert [result.query for result in results] == [str(q) for q in queries[:7]]
    assert [result.neighbours[0].id for result in results] == IDS
    first = results[6].neighbours[0]
    assert first == Neighbour(IDS[6], str(photos / IDS[6]), "dog", first.distance)
    assert first.distance < 1e-5
    assert set(failures) == {photos / "cut.png", photos / "no.png"}
    assert failures[photos / "no.png"] == "No such file or directory"


def test_search_shows_all_there_are_and_refuses(place, searcher):
    photos = place[0] / "photos"
    (result,), _ = searcher.search([photos / "5.png"], k=50)
    distances = [found.distance for found in result.neighbours]
    assert len(distances) == 7 and distances == sorted(distances)
    for k, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="`k`"):
            searcher.search([photos / "5.png"], k=k)
    reason = "device, not a file"
    _, failures = searcher.search([photos, photos / "5.png"], progress=False)
    assert list(failures) == [photos] and reason in failures[photos]
    for images, message in (([], "at least"), ([photos], reason)):
        with pytest.raises(ValueError, match=message):
            searcher.search(images, progress=False)


def test_search_refuses_what_is_no_index(place, tmp_path):
    for path in (tmp_path, place[0] / "photos" / "5.png", place[0] / "model.keras"):
        with pytest.raises(FileNotFoundError, match="folder of an index"):
            Searcher(path)
    RetrievalIndex.build([[1.0]]).save(tmp_path)
    with pytest.raises(FileNotFoundError, match="index with its embedder"):
        Searcher(tmp_path)


def test_index_with_another_embedder_is_refused(place, tmp_path):
    shutil.copytree(place[0] / "index", tmp_path / "index")
    keras.utils.set_random_seed(1)
    network().save(tmp_path / "other.keras")
    index = RetrievalIndex.load(tmp_path / "index")
    index.embedder = index.embedder._replace(file=tmp_path / "other.keras")
    index.save(tmp_path / "index")
    for read in (Searcher, about_model):
        with pytest.raises(ValueError, match="its own embedder"):
            read(tmp_path / "index")


@pytest.mark.parametrize("label", ["x", 0])
def test_index_of_numbers_works_in_the_command(place, tmp_path, label):
    old = RetrievalIndex.load(place[0] / "index")
    shutil.copytree(place[0] / "index", tmp_path / "index")
    # The embedder stays, as that of the same fingerprint.
    RetrievalIndex.build(
        old.embeddings, range(7), [label] * 7, fingerprint=old.fingerprint
    ).save(tmp_path / "index")
    query = place[0] / "photos" / "5.png"
    found = invoke("search", tmp_path / "index", query, "--json")
    (result,) = json.loads(found.stdout)
    first = {"rank": 1, "id": 0, "path": None, "label": label}
    assert result["neighbours"][0].items() >= first.items()
    table = invoke("search", tmp_path / "index", query, "--html", tmp_path / "p.html")
    assert table.exit_code == 0 and f" {label} " in table.stdout


# ==== check ====


def test_check_takes_a_model_a_run_or_an_index(place, run):
    model = about_model(run / "embedder", trust=True)
    assert model == serving.check_model(run / "embedder") and model["num_rows"] == 0
    not_run = model | {"difference": "not computed without --trust"}
    assert about_model(run / "embedder") == about_model(run) == not_run
    assert about_model(place[0] / "index") == {
        "fingerprint": place[1].index.fingerprint,
        "size": SIZE,
        "short_side": 18,
        "embedding_dim": 5,
        "num_rows": 7,
    }
    with pytest.raises(FileNotFoundError, match="`embedder`"):
        about_model(place[0] / "photos")
    result = invoke("check", place[0] / "index")
    assert result.exit_code == 0 and "num_rows: 7\n" in result.stdout
    result = invoke("check", run, "--trust")
    assert result.exit_code == 0 and "difference: 0.0\n" in result.stdout


def test_check_looks_at_the_rows_of_an_index_too(place, tmp_path):
    shutil.copytree(place[0] / "index", tmp_path / "index")
    (file,) = (tmp_path / "index").glob("rows-*.npz")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="`path` must be undamaged"):
        about_model(tmp_path / "index")


# ==== The commands ====


def invoke(*arguments):
    return typer.testing.CliRunner().invoke(app, [str(value) for value in arguments])


def test_json_is_all_that_is_printed(place, tmp_path):
    photos = place[0] / "photos"
    broken = tmp_path / "[bold]cut.png"
    shutil.copy(photos / "cut.png", broken)
    result = invoke("search", place[0] / "index", photos / "5.png", broken, "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert found["neighbours"][0]["id"] == "5.png"
    assert found["neighbours"][0]["label"] == "photos"
    assert f"Skipped {broken}: " in result.stderr


def test_page_in_the_place_of_a_folder_is_refused_before_the_search(place, tmp_path):
    result = invoke("search", tmp_path / "no index", "1.png", "--html", tmp_path)
    assert result.exit_code == 1 and "`html` must be a file" in result.output


# ==== What is shown ====

RESULTS = [
    SearchResult(
        "q[b].png",
        [
            Neighbour("cat/[red]1.png", "/p/1.png", "[i]cat", 0.5),
            Neighbour("2", "/p/2", None, 2.0),
        ],
    ),
    SearchResult("second", [Neighbour("3", "/p/3", None, 0.25)]),
]


def test_table_shows_names_as_they_are():
    console = rich.console.Console(width=100, record=True, file=io.StringIO())
    console.print(search_commands.results_table(RESULTS))
    text = console.export_text()
    for shown in ("q[b].png", "cat/[red]1.png", "[i]cat", "0.5000", "2.0000", "second"):
        assert text.count(shown) == 1


def test_json():
    first, second = json.loads(search_commands.to_json(RESULTS))
    names = ("rank", "id", "path", "label", "distance")
    rows = [
        (1, "cat/[red]1.png", "/p/1.png", "[i]cat", 0.5),
        (2, "2", "/p/2", None, 2.0),
        (1, "3", "/p/3", None, 0.25),
    ]
    *expected, last = [dict(zip(names, row, strict=True)) for row in rows]
    assert first == {"query": "q[b].png", "neighbours": expected}
    assert second == {"query": "second", "neighbours": [last]}


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.kinds, self.sources, self.text = [], [], ""

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "figure":
            self.kinds.append(attributes["class"])
        if tag == "img":
            self.sources.append(attributes["src"])
        assert tag not in ("b", "script", "link")

    def handle_data(self, data):
        self.text += data


def test_page_holds_its_images(place, searcher, tmp_path):
    query = place[0] / "photos" / IDS[6]
    results, _ = searcher.search([query], k=2)
    neighbours = [*results[0].neighbours, Neighbour("gone.png", "/gone.png", None, 9.0)]
    search_commands.write_page(
        [SearchResult(str(query), neighbours)], tmp_path / "p.html"
    )
    page = Page()
    page.feed((tmp_path / "p.html").read_text("utf-8"))
    assert page.kinds == ["query", "neighbour", "neighbour", "neighbour"]
    assert len(page.sources) == 3  # the fourth is gone
    assert "not found" in page.text and ODD in page.text
    assert all(s.startswith("data:image/jpeg;base64,") for s in page.sources)
    assert f'<a href="{query.as_uri()}">' in (tmp_path / "p.html").read_text("utf-8")
    assert ", dog" in page.text  # the class of what was found


def test_threshold_leaves_out_what_is_farther(place, tmp_path):
    query, page = place[0] / "photos" / "5.png", tmp_path / "p.html"
    arguments = "search", place[0] / "index", query, "--html", page, "--threshold"
    result = invoke(*arguments, "1e-4", "--json")
    (found,) = json.loads(result.stdout)
    assert [neighbour["id"] for neighbour in found["neighbours"]] == ["5.png"]
    other = place[0] / "photos" / "cat" / "1.png"
    nearest = json.loads(invoke("search", place[0] / "index", other, "--json").stdout)
    beyond = nearest[0]["neighbours"][1]["distance"] / 2
    assert beyond > 1e-4, "says nothing"
    searcher = Searcher(place[0] / "index")
    searcher.index.remove(["cat/1.png"])
    results, _ = searcher.search([other], max_distance=beyond)
    search_commands.write_page(results, page)
    assert "Nothing is near enough." in page.read_text("utf-8")
    cells = search_commands.results_table(results).columns[-1].cells
    assert list(map(str, cells)) == ["none"]


def test_nothing_but_broken_images_is_an_error_that_lists_them(place, tmp_path):
    broken = [tmp_path / "1.png", tmp_path / "2.jpg"]
    for file in broken:
        file.write_bytes(b"hello")
    listed = f"2 that cannot\n{broken[0]}: .*\n{broken[1]}: "
    with pytest.raises(ValueError, match=listed):
        Searcher(place[0] / "index").search(broken, progress=False)
    missing = [tmp_path / f"{number}.gif" for number in range(25)]
    with pytest.raises(ValueError, match="25 that cannot.*\n.*(?s:.*)\nand 5 more"):
        Searcher(place[0] / "index").search(missing, progress=False)
