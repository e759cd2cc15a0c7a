"""The examples run, and what they print and leave behind agrees with itself."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import retrieval
from keras_ccp.monitor.projection_log import load_projections, read_lines

EXAMPLES = Path(__file__).parent.parent / "examples"
LOAD_ALONE = """
import sys
import numpy as np
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
images = np.load(sys.argv[2])["images"]
parts = np.split(images, 6)
np.save(sys.argv[3], np.concatenate([model.serve(part) for part in parts]))
print("keras_ccp" in sys.modules)
"""


def run(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ==== train_emoji.py ====


def test_emoji_example(tmp_path):
    printed = run(EXAMPLES / "train_emoji.py", "--quick", "--out", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    metrics = {"precision_at_1", "precision_at_r", "map_at_r"}
    for row in ("raw pixels", "CCP"):
        assert set(results[row]) == metrics
    assert results["seed"] == 0
    assert results["seconds"] > 0
    assert results["num_projections"] >= 0
    assert results["CCP"]["map_at_r"] > results["raw pixels"]["map_at_r"]
    assert f"{100 * results['CCP']['map_at_r']:.1f}" in printed
    assert "val_map_at_r" in printed

    with np.load(tmp_path / "test_set.npz") as test:
        images, labels = test["images"], test["labels"]
    # 231 unseen classes of six drawings.
    assert images.shape == (1386, 32, 32, 3) and images.dtype == np.uint8
    assert len(np.unique(labels)) == 231

    picture = tf.io.decode_png((tmp_path / "neighbours.png").read_bytes()).numpy()
    # 16 queries in 8 rows of 2. At scale 2 a tile is 2 * (32 + 4 + 2) = 76 wide; a
    # row is six of them and gaps of 12 and 16.
    assert picture.shape == (8 * 76, 2 * (6 * 76 + 28), 3)

    # The SavedModel alone, in a process that does not know keras_ccp.
    paths = [tmp_path / name for name in ("embedder", "test_set.npz", "e.npy")]
    assert run("-c", LOAD_ALONE, *paths).strip() == "False"
    again = retrieval.evaluate(np.load(tmp_path / "e.npy"), labels)
    for metric in metrics:
        np.testing.assert_allclose(again[metric], results["CCP"][metric], atol=1e-3)


# ==== train_text.py ====


def test_text_example():
    printed = run(EXAMPLES / "train_text.py", "--steps", "150")
    scores = {
        name: float(re.search(rf"{name} .*MAP@R +([0-9.]+)", printed)[1])
        for name in ("equal trigrams", "trained")
    }
    assert scores["trained"] > scores["equal trigrams"] > 20


# ==== mnist_figure.py ====

MNIST = str(EXAMPLES / "mnist_figure.py")


@pytest.fixture
def digits(tmp_path):
    """Noisy stripes, 40 of each of ten kinds, numbered by their first two pixels."""
    rng = np.random.default_rng(0)
    labels = np.arange(400) % 10
    images = rng.integers(0, 50, (400, 28, 28))
    images[np.arange(400), labels * 2 + 4] = 255
    images[:, 0, 0] = np.arange(400) % 256
    images[:, 0, 1] = np.arange(400) // 256
    path = tmp_path / "digits.npz"
    np.savez(path, images=images.astype("uint8"), labels=labels)
    return path


def test_mnist_example(digits, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    arguments = ["--quick", "--data", str(digits), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [MNIST, *arguments])
    runpy.run_path(MNIST, run_name="__main__")
    printed = capsys.readouterr().out

    results = json.loads((out / "results.json").read_text())
    lines, kept = read_lines(out), load_projections(out)
    assert len(results["problems"]) == len(lines) == len(kept) >= 1
    for row, line, projection in zip(results["problems"], lines, kept, strict=True):
        # A tenth of the digits, none of which chose anything.
        assert projection.embeddings.shape == (40, 2)
        assert projection.proxies.shape == (10, 4, 2)
        found = retrieval.evaluate(projection.embeddings, projection.labels)
        assert row["map_at_r"] == pytest.approx(found["map_at_r"])
        assert row["mean_covering_radius"] == line["before"]["mean_covering_radius"]
        assert f"{row['mean_covering_radius']:9.2f}" in printed
    # The figures of the paper stand beside.
    assert "0.87     0.54     0.92" in printed
    picture = tf.io.decode_png((out / "projections.png").read_bytes()).numpy()
    assert picture.shape[0] > 400 and picture.shape[1] > 400


def test_mnist_parts_share_no_image_and_hold_every_class(digits):
    parts = runpy.run_path(MNIST)["load"](digits, seed=3)
    assert [len(part) for part in parts] == [320, 40, 40]
    rows = [part.images[:, 0, :2, 0] @ np.array([1, 256]) for part in parts]
    assert sorted(np.concatenate(rows)) == list(range(400))
    for part, taken in zip(parts, rows, strict=True):
        assert set(part.class_sizes) <= {32, 4}
        np.testing.assert_array_equal(part.labels, taken % 10)
