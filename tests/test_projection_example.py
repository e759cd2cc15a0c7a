"""examples/mnist_figure.py runs, and what it prints and writes agrees with itself."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import retrieval
from keras_ccp.datasets import Dataset
from keras_ccp.monitor.projection_log import load_projections, read_lines

EXAMPLE = Path(__file__).parent.parent / "examples" / "mnist_figure.py"


def digits():
    """Noisy stripes, 40 of each of ten kinds."""
    rng = np.random.default_rng(0)
    labels = np.arange(400) % 10
    images = rng.integers(0, 50, (400, 28, 28))
    images[np.arange(400), labels * 2 + 4] = 255
    return images.astype("uint8"), labels


def test_quick_run(tmp_path, monkeypatch, capsys):
    images, labels = digits()
    np.savez(tmp_path / "digits.npz", images=images, labels=labels)
    out = tmp_path / "out"
    arguments = ["--quick", "--data", tmp_path / "digits.npz", "--out", out]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, arguments)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
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


def test_parts_share_no_image_and_hold_every_class(tmp_path):
    images, labels = digits()
    images[:, 0, 0] = np.arange(400) % 256
    images[:, 0, 1] = np.arange(400) // 256
    np.savez(tmp_path / "digits.npz", images=images, labels=labels)
    parts = runpy.run_path(str(EXAMPLE))["load"](tmp_path / "digits.npz", seed=3)
    assert [len(part) for part in parts] == [320, 40, 40]
    rows = [part.images[:, 0, :2, 0] @ np.array([1, 256]) for part in parts]
    assert sorted(np.concatenate(rows)) == list(range(400))
    for part, taken in zip(parts, rows, strict=True):
        assert isinstance(part, Dataset) and set(part.class_sizes) <= {32, 4}
        np.testing.assert_array_equal(part.labels, labels[taken])
