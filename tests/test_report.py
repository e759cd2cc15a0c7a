"""The report of a run: its numbers against loops, its page in a browser."""

import base64
import html.parser
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ccp
from keras_ccp import retrieval
from keras_ccp.app.config import check_config
from keras_ccp.app.page import environment, thumbnail
from keras_ccp.app.report import report, write_report
from keras_ccp.app.report.charts import line_chart, padded_range, round_numbers
from keras_ccp.app.report.distances import distance_histogram
from keras_ccp.app.report.history import read_histories
from keras_ccp.app.report.report import Picture, _pictures
from keras_ccp.app.report.scores import (
    Neighbors,
    choose_queries,
    class_scores,
    confused_pairs,
    confusions,
    most_confused_with,
)
from keras_ccp.app.run import evaluate_run
from keras_ccp.app.splits import Splits
from keras_ccp.datasets import Dataset

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# A name that HTML, JavaScript and a template would each take for something else.
ODD = "ü </script><b onload=x>&{{ 1 }}'\""
LONG = "counterrevolutionaries"  # wider than a third of a phone
LOG = """epoch,loss,pair_loss,projection,proximal_loss,val_map_at_r
0,0.9,0.9,0,0.0,0.25
1,0.8,0.8,0,0.0,0.75
1,0.7,0.7,0,0.0,0.5
2,0.6,0.5,1,0.1,NA
3,0.5,0.4,2,0.1,0.375
"""


# ==== Numbers, against loops ====


@pytest.fixture(scope="module")
def found():
    """31 queries of 6 classes, the last one a singleton, and 29 gallery rows."""
    rng = np.random.default_rng(3)
    labels = np.append(rng.integers(0, 5, 30), 5)
    embeddings = rng.normal(size=(31, 4)).astype(np.float32)
    gallery_labels = rng.integers(0, 5, 29)
    gallery = rng.normal(size=(29, 4)).astype(np.float32)
    return embeddings, labels, gallery, gallery_labels


def sorted_by_distance(embeddings, gallery, row, is_one_set):
    distances = [float(np.linalg.norm(embeddings[row] - g)) for g in gallery]
    others = [j for j in range(len(gallery)) if not (is_one_set and j == row)]
    return sorted(others, key=lambda j: distances[j]), distances


def test_class_scores_are_means(found):
    embeddings, labels, _, _ = found
    scores = retrieval.score_queries(embeddings, labels)
    *entries, single = class_scores(labels, scores)
    assert single[:3] == (5, 0, 0) and np.isnan(single[3:]).all()
    for label, (own_label, queries, references, hit, map_at_r) in enumerate(entries):
        own = [row for row in range(31) if labels[row] == label]
        assert (own_label, queries, references) == (label, len(own), len(own) - 1)
        assert hit == pytest.approx(sum(scores["precision_at_1"][own]) / len(own))
        assert map_at_r == pytest.approx(sum(scores["map_at_r"][own]) / len(own))


def test_confusions_are_those_of_a_loop(found):
    embeddings, labels, gallery, known = found
    scores = retrieval.score_queries(*found)
    distances, indices = retrieval.search(embeddings, gallery, k=4)
    references = scores["num_references"]
    neighbors = Neighbors(labels, distances, indices, known[indices], references)
    wrong, all_of, nearest = {}, {}, {}
    for row, a in enumerate(labels):
        order, away = sorted_by_distance(embeddings, gallery, row, False)
        for j in order[: min(4, references[row])]:
            b = known[j]
            all_of[a] = all_of.get(a, 0) + 1
            if a == b:
                continue
            wrong[a, b] = wrong.get((a, b), 0) + 1
            pair = min(a, b), max(a, b)
            nearest[pair] = min(nearest.get(pair, (9, 0, 0)), (away[j], row, j))
    shares = confusions(neighbors)
    assert shares == {
        (a, b): pytest.approx(n / all_of[a]) for (a, b), n in wrong.items()
    }
    for a, (b, share) in most_confused_with(shares).items():
        assert share == max(s for (c, _), s in shares.items() if c == a)
        assert share == shares[a, b]
    pairs = confused_pairs(shares, neighbors, 3)
    sums = {(a, b): shares.get((a, b), 0) + shares.get((b, a), 0) for a, b in nearest}
    assert [sum(p.shares) for p in pairs] == sorted(sums.values(), reverse=True)[:3]
    for pair in pairs:
        assert sum(pair.shares) == sums[pair.labels]
        assert (pair.query, pair.neighbour) == nearest[pair.labels][1:]


def test_queries_are_chosen_by_map_at_r():
    labels = np.array([0, 0, 1, 1, 2, 3])
    map_at_r = np.array([1.0, 0.9, 1.0, 0.0, 0.0, np.nan])
    near = np.array([0.2, 0.0, 0.1, 0.3, 0.1, 0.0])
    chosen = choose_queries(labels, map_at_r, near, 2, seed=1)
    assert chosen["best"] == [2, 0]  # both are 1; row 2 has the nearer neighbour
    # Three classes are scored; of two, the best are shown, and of the third the worst.
    assert chosen["worst"] == [4]
    assert len(set(chosen["random"])) == 2 and 5 not in chosen["random"]
    assert choose_queries(labels, map_at_r, near, 2, seed=1) == chosen
    for num_classes, best, worst in ((1, 1, 0), (2, 1, 1), (5, 3, 2), (20, 6, 6)):
        labels = np.arange(3 * num_classes) % num_classes
        map_at_r = np.random.default_rng(0).random(len(labels))
        chosen = choose_queries(labels, map_at_r, map_at_r, 6)
        assert (len(chosen["best"]), len(chosen["worst"])) == (best, worst)
        assert len(set(labels[chosen["best"] + chosen["worst"]])) == best + worst


@pytest.mark.parametrize("is_one_set", [True, False])
def test_histogram_counts_every_pair(found, is_one_set, monkeypatch):
    monkeypatch.setattr("keras_ccp.app.report.distances._CHUNK_VALUES", 200)  # 6 rows
    embeddings, labels, gallery, known = found
    arguments = found[:2] if is_one_set else found
    if is_one_set:
        gallery, known = embeddings, labels
    histogram = distance_histogram(*arguments, num_bins=8)
    kinds = {True: [], False: []}
    for row, label in enumerate(labels):
        order, away = sorted_by_distance(embeddings, gallery, row, is_one_set)
        for j in order:
            kinds[bool(known[j] == label)].append(away[j])
    for counts, mean, values in (
        (histogram.same, histogram.mean_same, kinds[True]),
        (histogram.other, histogram.mean_other, kinds[False]),
    ):
        expected, _ = np.histogram(values, histogram.edges)
        assert counts.tolist() == expected.tolist()
        assert counts.sum() == len(values)
        assert mean == pytest.approx(np.mean(values), rel=1e-6)
    assert 4 < len(histogram.same) <= 8 and histogram.num_queries == 31
    assert histogram.same[-1] + histogram.other[-1] > 0


def test_histogram_of_a_sample_and_of_equal_points(found):
    embeddings, labels, _, _ = found
    part = distance_histogram(embeddings, labels, max_pairs=10 * 31, seed=5)
    again = distance_histogram(embeddings, labels, max_pairs=10 * 31, seed=5)
    assert part.num_queries == 10 and part.same.tolist() == again.same.tolist()
    assert part.same.sum() + part.other.sum() == 10 * 30
    equal = distance_histogram(np.ones((4, 2)), np.array([0, 0, 1, 1]))
    assert equal.same.tolist() == [4] and equal.other.tolist() == [8]
    assert equal.mean_same == equal.mean_other == 0


# ==== Charts and thumbnails ====


def test_axes_have_room_and_round_numbers():
    assert round_numbers(0, 1, 4) == [0, 0.5, 1]  # a step of 1/4 becomes 0.5
    assert round_numbers(0.5, 30.5, 6) == [5, 10, 15, 20, 25, 30]
    assert round_numbers(0.243, 0.51, 4) == [0.3, 0.4, 0.5]
    assert padded_range([np.nan, 1.0, 2.0, np.inf]) == (0.92, 2.08)
    assert padded_range([]) == padded_range([0.0, 1.0]) == (0.0, 1.08)
    low, high = padded_range([3.0, 3.0])
    assert low < 3 < high


def test_line_has_a_gap_where_a_value_is_missing():
    series = {"<a>": ([1, 2, 3, 4], [0.0, 1.0, np.nan, 1.0])}
    chart = line_chart("a & b", "", "x", 4, series, y_range=(0.0, 1.0), best=(2, 1.0))
    chart.x_range = 1, 4
    template = "{% from 'app/report/parts.html.j2' import chart %}{{ chart(one) }}"
    svg = environment.from_string(template).render(one=chart)
    path = re.search(r' d="(.+?)"', svg)[1]
    assert [part for part in path if part in "ML"] == ["M", "L", "M"]
    # The plot lies between 46 and 330, 10 and 164 (`Chart`): a third of it is 94.7.
    assert path.startswith("M46.0 164.0 L140.7 10.0 M330.0 10.0")
    assert svg.count("data-tip") == 3 and "<a>" not in svg and "a &amp; b" in svg


@pytest.mark.parametrize("channels, kept", [(1, 1), (2, 1), (3, 3), (4, 3)])
def test_thumbnail_is_a_small_jpeg(channels, kept):
    for image, shape, value in (
        (
            np.full((300, 600, channels), 0.5, np.float32),
            (96, 192, kept),
            128,
        ),  # 0.5 of 255
        (np.full((8, 8, channels), 200.0), (8, 8, kept), 200),  # floats up to 255
    ):
        prefix, _, data = thumbnail(image).partition(",")
        assert prefix == "data:image/jpeg;base64"
        decoded = tf.io.decode_jpeg(base64.b64decode(data)).numpy()
        assert decoded.shape == shape and abs(int(decoded[0, 0, 0]) - value) <= 1


# ==== Logs ====


def chosen(data, method="C2", loss="contrastive"):
    values = {"method": method, "data": data, "loss": {"name": loss}}
    values["embedder"] = {"backbone": "small_cnn", "embedding_dim": 3}
    return check_config(values)


def write_model(directory, shape, projections=None, seed=0):
    """A finished model as `train_fold` leaves it, with a network of random weights."""
    directory.mkdir(parents=True)
    keras.utils.set_random_seed(seed)
    images = keras.Input(shape, dtype="uint8")
    pooled = keras.layers.AveragePooling2D(4)(keras.layers.Rescaling(1 / 255)(images))
    flat = keras.layers.Flatten()(pooled)
    embedder = keras.Model(images, keras.layers.Dense(3)(flat))
    embedder.save(directory / "embedder.keras")
    (directory / "log.csv").write_text(LOG)
    summary = {"validation": {"map_at_r": 0.75}, "num_projections": 2, "num_steps": 8}
    (directory / "fold.json").write_text(json.dumps(summary | {"seconds": 90.0}))
    if projections:
        lines = "".join(f"{json.dumps(line)}\n" for line in projections)
        (directory / "projections.jsonl").write_text(lines)


def projection(number, radius, after):
    names = ("mean_covering_radius", "max_covering_radius", "proxy_usage")
    values = {**dict.fromkeys(names, radius), "mean_inter_class_distance": 1.0}
    line = {"projection": number, "epoch": 2 * number + 1, "val_map_at_r": 0.5}
    before = {**values, "proxy_spread": np.inf}
    after = {**before, "proxy_spread": 0.5} if after else None
    return {**line, "is_last": after is None, "before": before, "after": after}


def test_history_is_read(tmp_path):
    lines = [projection(0, 0.5, True), projection(1, 0.25, False)]
    write_model(tmp_path / "repeat0" / "fold1", (8, 8, 3), lines)
    (tmp_path / "repeat0" / "fold0").mkdir()  # not finished
    (history,) = read_histories(tmp_path)
    assert (history.repeat, history.fold) == (0, 1)
    assert history.epochs.tolist() == [0, 1, 2, 3]
    # Epoch 1 was run again, and only that counts.
    assert history.columns["val_map_at_r"].tolist()[:2] == [0.25, 0.5]
    assert np.isnan(history.columns["val_map_at_r"][2])
    assert history.name == "repeat0/fold1"
    assert history.projection_epochs == [2, 3]
    assert history.losses == ["loss", "pair_loss", "proximal_loss"]
    assert history.projections == lines


# ==== The page ====


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two repetitions on eight classes, four of them for the test."""
    root = tmp_path_factory.mktemp("report")
    rng = np.random.default_rng(0)
    # Seven classes of six images about a colour, and one of a single image.
    labels = np.append(np.repeat(np.arange(7), 6), 7)
    coarse = rng.integers(0, 160, (43, 4, 4, 3)) + 13 * labels[:, None, None, None]
    images = coarse.repeat(4, axis=1).repeat(4, axis=2)
    names = [f"{letter} {LONG}" for letter in "ABCDEFG"]
    images = images.clip(0, 255).astype("uint8")
    np.savez(root / "data.npz", images=images, labels=labels, class_names=[*names, ODD])
    out = root / "run"
    data = {"name": "npz", "file": "data.npz", "folds": 2, "train_classes": 4}
    data["split_seed"] = None
    config = chosen(data, "MS-CCP", "multi_similarity")
    lines = [projection(0, 0.5, True), projection(1, 0.25, False)]
    for seed in range(4):
        directory = out / f"repeat{seed // 2}" / f"fold{seed % 2}"
        write_model(directory, (16, 16, 3), lines if seed % 2 else None, seed)
    (out / "config.yaml").write_text(config.to_yaml(), "utf-8")
    # Metrics that are not there are made.
    return write_report(out, root), evaluate_run(out, root)


class Page(html.parser.HTMLParser):
    """What a page loads, shows and says to a screen reader."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.faults, self.images = [], [], [], []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.links += [attributes[k] for k in ("src", "href") if k in attributes]
        if tag == "img":
            self.images.append(attributes)
        needed = {"img": "alt", "th": "scope", "svg": "aria-label", "html": "lang"}
        if tag in needed and not attributes.get(needed[tag]):
            self.faults.append((tag, attributes))

    def handle_data(self, data):
        self.text += data


def test_page_holds_all_it_needs(run):
    path, metrics = run
    text = path.read_text("utf-8")
    page = Page(text)
    assert path.name == "report.html" and page.faults == []
    assert page.links and all(link.startswith(("data:", "#")) for link in page.links)
    assert not re.search(r"https?://|url\(|@import|srcset", text)
    assert page.tags.count("script") == 1
    # Two models of three charts, twice; three of projections, twice; distances.
    assert page.tags.count("svg") == 2 * 2 * 3 + 2 * 3 + 1
    for kind in ("separated", "concatenated"):
        score = metrics[kind]["map_at_r"]
        mean, half = 100 * score["mean"], 100 * score["interval"]
        assert f"{mean:.2f} ±\xa0{half:.2f}" in page.text
    assert ODD in page.text and "<b onload" not in text
    assert "The paper has no row MS-CCP on npz" in page.text
    assert "models are finished" not in page.text
    # In the table of models, over its charts and over those of its projections.
    assert page.text.count("repeat1/fold1") == 3
    assert "class_names" not in page.text and "inf" in page.text


def test_galleries_show_neighbours_and_whether_they_are_right(run):
    path, _ = run
    text = path.read_text("utf-8")
    # Three test classes have queries: best of two, worst of the third, six at random.
    assert text.count('<li class="gallery">') == 2 + 1 + 6
    frames = re.findall(
        r'<figure class="(right|wrong)"><img src="data:\S+" '
        r'alt="Neighbour \d, (\w+): (.+?)".+?<figcaption>(.+?)</figcaption>',
        text,
    )
    assert len(frames) == 9 * 5
    for kind, said, name, caption in frames:
        assert kind == said
        assert caption == ("✓" if kind == "right" else f"✗ {name}")
    shown = re.search(
        r'alt="Query: (.+?)".+?MAP@R ([\d.]+).+?<ol>(.+?)</ol>', text, re.S
    )
    own = re.findall(r'alt="Neighbour \d, \w+: (.+?)"', shown[3])
    kinds = re.findall(r'<figure class="(\w+)">', shown[3])
    assert kinds == ["right" if name == shown[1] else "wrong" for name in own]
    # Five true references: the neighbours shown are those of MAP@R.
    hits = [kind == "right" for kind in kinds]
    value = sum(sum(hits[: j + 1]) / (j + 1) for j in range(5) if hits[j]) / 5
    assert float(shown[2]) == pytest.approx(100 * value, abs=0.006)


def test_published_row_and_gallery_of_its_own(tmp_path, monkeypatch, caplog):
    # In-shop has queries and a gallery; C2 on it is published: 86.32 and 83.04 P@1.
    # As arrays, since the graph that decodes files takes seconds to build.
    rng = np.random.default_rng(0)
    parts = [
        Dataset(rng.integers(0, 256, (count, 8, 8, 3)).astype("uint8"), labels)
        for count, labels in (
            (4, [0, 0, 1, 1]),
            (8, [0, 1, 2, 3] * 2),
            (12, [3, 2, 1, 0] * 3),
        )
    ]
    monkeypatch.setattr(
        "keras_ccp.app.run.load_recorded", lambda *_: (Splits(*parts), ())
    )
    out = tmp_path / "run"
    write_model(out / "repeat0" / "fold0", (8, 8, 3))
    (out / "config.yaml").write_text(chosen({"name": "in_shop"}).to_yaml())
    names = ("precision_at_1", "precision_at_r", "map_at_r")
    single = dict.fromkeys(names, {"mean": 0.125, "interval": None})
    metrics = {"dataset": "in_shop", "method": "C2", "separated": single}
    metrics |= {"concatenated": single, "models": [dict.fromkeys(names, 0.125)]}
    (out / "metrics.json").write_text(json.dumps(metrics))
    with caplog.at_level("WARNING"):
        path = write_report(out, ".", tmp_path / "elsewhere" / "page.html")
    # Its four folds are the default of `data.folds`.
    said = "1 of 4 models are finished: not the protocol's result"
    logs = [r.getMessage() for r in caplog.records if r.name.startswith("keras_ccp")]
    assert logs == [f"{out}: it has no record of its data", f"{out}: {said}"]
    page = Page(path.read_text("utf-8"))
    assert path == tmp_path / "elsewhere" / "page.html"
    assert f"{said}." in page.text.split("Metrics")[0]
    assert "86.32" in page.text and "83.04" in page.text
    assert "12.50" in page.text and "12.50 ±" not in page.text
    # 8 queries x 12 images: 3 of the own class each.
    assert "All 8 queries\nagainst the whole gallery:\n24 pairs of one" in page.text
    assert "20 images of 4 classes" in page.text and "#projections" not in page.links
    assert page.text.count("✓") + page.text.count("✗") == 2 + (2 + 2 + 6) * 5


def test_number_of_models_of_a_repetition():
    data = {"name": "emoji", "folds": 3}
    assert chosen({**data, "split": "mlrc"}).data.num_models == 3
    assert chosen({**data, "split": "conventional"}).data.num_models == 1


def test_pictures_name_their_files(tmp_path):
    other = tmp_path / "other" / "b.png"
    for path in (tmp_path / "data" / "thing" / "a.png", other):
        path.parent.mkdir(parents=True)
        keras.utils.save_img(path, np.zeros((8, 8, 3)), scale=False)
    files = [str(tmp_path / "data" / "thing" / "a.png"), str(other)]
    dataset = Dataset(files, [0, 0]).with_size(8)
    pictures = _pictures(dataset, [1, 0, 1], tmp_path / "data")
    assert {row: picture.file for row, picture in pictures.items()} == {
        0: os.path.join("thing", "a.png"),
        1: str(other),
    }
    arrays = Dataset(np.zeros((1, 8, 8, 3), np.uint8), [0])
    assert _pictures(arrays, [0], tmp_path)[0].file == ""


def test_files_are_escaped_where_they_stand(run, tmp_path, monkeypatch):
    # As if the images of the run were files with a name that is markup.
    file = 'thing/<i>"&.jpg'
    monkeypatch.setattr(report, "Picture", lambda uri, _: Picture(uri, file))
    path = write_report(run[0].parent, run[0].parents[1], tmp_path / "page.html")
    images = Page(path.read_text("utf-8")).images
    assert len(images) == 9 * 6 + 3 * 2  # galleries, pairs of three classes
    for image in images:
        assert file in image["title"] and image["alt"].endswith(f", {file}")


def test_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no run"):
        write_report(tmp_path, ".")


def test_colours_have_contrast():
    # Web Content Accessibility Guidelines 2.1: relative luminance, and 4.5 for text.
    def luminance(colour):
        values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(
            values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4
        )
        return linear @ (0.2126, 0.7152, 0.0722)

    template = Path(keras_ccp.__file__).parent / "app" / "page.html.j2"
    schemes = re.findall(r":root \{(.+?)\}", template.read_text("utf-8"), re.S)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        light = {name: luminance(value) for name, value in colours.items()}
        for back in ("back", "panel"):
            for name in light.keys() - {"back", "panel", "line"}:
                low, high = sorted([light[name], light[back]])
                assert (high + 0.05) / (low + 0.05) >= 4.5, (name, back, colours)


# ==== In a browser ====

# Looks at the page it is added to, and says on the console what it sees.
PROBE = """<script>{
const tip = document.querySelector("#tip");
const heads = [...document.querySelectorAll("#classes thead th")];
const column = (i) => [...document.querySelectorAll("#classes tbody tr")]
  .map((row) => row.cells[i].textContent);
const sorts = [1, 1, 0].map((place) => {
  heads[place].querySelector("button").click();
  return [heads[place].ariaSort, column(place)];
});
const hover = (part) => {
  part.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  return tip.hidden ? "" : tip.textContent;
};
const tips = [hover(document.querySelector(".strip")), hover(document.body)];
for (const part of document.querySelectorAll("details")) part.open = true;
const lines = (name) => {
  const text = name.firstChild, word = document.createRange();
  word.setStart(text, text.data.indexOf(" ") + 1);
  word.setEnd(text, text.length);
  return word.getClientRects().length;
};
const names = [...document.querySelectorAll("#classes tbody th")].slice(0, 3);
const table = document.querySelector("#metrics .scroll");
console.log("PROBE" + JSON.stringify({
  width: innerWidth, scrolls: document.documentElement.scrollWidth, sorts, tips,
  broken_words: names.filter((name) => lines(name) > 1).length,
  fits: table.scrollWidth <= table.clientWidth,
  images: [...document.images].filter((i) => i.naturalWidth).length,
  back: getComputedStyle(document.body).backgroundColor,
}));
}</script></body>"""


def browse(folder, page, *options):
    """Opens a page 360 and 1200 pixels wide: what it probes, and its other messages.

    In frames, since a window of Chromium is at least 500 pixels wide.
    """
    (folder / "page.html").write_text(page.replace("</body>", PROBE), "utf-8")
    frames = "".join(
        f'<iframe src="page.html" style="border:0; width:{width}px; height:2400px">'
        "</iframe>"
        for width in (360, 1200)
    )
    (folder / "frames.html").write_text(f"<!doctype html>{frames}", "utf-8")
    flags = (
        "--headless --no-sandbox --disable-gpu --enable-logging=stderr --v=0".split()
    )
    flags += ["--window-size=1600,2400", f"--screenshot={folder / 'page.png'}"]
    flags += [f"--user-data-dir={folder / 'profile'}", *options]
    command = [CHROMIUM, *flags, (folder / "frames.html").as_uri()]
    result = subprocess.run(command, capture_output=True, timeout=120, check=True)
    messages = re.findall(
        r'CONSOLE:\d+\] "(.*)", source: ', result.stderr.decode("utf-8", "replace")
    )
    probes = [m.removeprefix("PROBE") for m in messages if m.startswith("PROBE")]
    others = [m for m in messages if not m.startswith("PROBE")]
    return sorted(map(json.loads, probes), key=lambda p: p["width"]), others


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"
)


@needs_chromium
@pytest.mark.parametrize(
    ("options", "back"),
    [
        ((), "rgb(255, 255, 255)"),
        (("--blink-settings=preferredColorScheme=0",), "rgb(20, 24, 29)"),  # #14181d
    ],
)
def test_page_in_a_browser(run, tmp_path, options, back):
    probes, others = browse(tmp_path, run[0].read_text("utf-8"), *options)
    assert others == []
    assert [probe["width"] for probe in probes] == [360, 1200]
    for probe in probes:
        assert probe["back"] == back and probe["scrolls"] <= probe["width"]
        assert probe["images"] == 9 * 6 + 3 * 2
        assert probe["tips"] == ["evaluation 1: Validation MAP@R 25 %", ""]
        down, up, names = probe["sorts"]
        # The singleton has no MAP@R and comes last from the top down.
        assert down[0] == "descending" and down[1][-1] == "–"
        values = [float(value) for value in down[1][:-1]]
        assert values == sorted(values, reverse=True) and len(values) == 3
        assert up == ["ascending", down[1][::-1]]
        assert names == ["ascending", [*(f"{a} {LONG}" for a in "EFG"), ODD]]
        assert probe["broken_words"] == 0 and probe["fits"]
    pixels = tf.io.decode_png((tmp_path / "page.png").read_bytes()).numpy()
    for part in (pixels[:, :360], pixels[:, 380:1560]):
        assert part.std() > 20  # text and pictures, not one colour


@needs_chromium
def test_faults_of_a_page_are_seen(run, tmp_path):
    faults = '<script>nonsense()</script><img src="https://example.org/a.png" alt="">'
    page = run[0].read_text("utf-8").replace("<main>", f"<main>{faults}")
    _, others = browse(tmp_path, page)
    for said in ("nonsense is not defined", "Content Security Policy"):
        assert any(said in message for message in others)
