"""The example runs, and what it leaves behind agrees with itself."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from keras_ccp import retrieval

ROOT = Path(__file__).parent.parent
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
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_emoji_example(tmp_path):
    printed = run("examples/train_emoji.py", "--quick", "--out", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    metrics = {"precision_at_1", "precision_at_r", "map_at_r"}
    for row in ("raw_pixels", "untrained", "trained"):
        assert set(results[row]) == metrics
    assert results["seed"] == 0
    assert results["seconds"] > 0
    assert results["num_projections"] >= 0
    assert results["trained"]["map_at_r"] > results["untrained"]["map_at_r"]
    assert f"{100 * results['trained']['map_at_r']:.1f}" in printed
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
        np.testing.assert_allclose(again[metric], results["trained"][metric], atol=1e-3)
