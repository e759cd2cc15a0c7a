"""The command, on data of a few pixels."""

import json

import numpy as np
import pytest
import tensorflow as tf
from look_alikes import write_in_shop
from typer.main import get_command
from typer.testing import CliRunner

from keras_ccp import __version__
from keras_ccp.app.cli import app

SMALL = """
method: C2
data: {name: emoji, folds: 2, train_classes: 12, augmentation: none}
embedder: {backbone: small_cnn, embedding_dim: 4, frozen_statistics: false}
loss: {name: contrastive}
training: {batch_size: 8, samples_per_class: 2, steps_per_evaluation: 1,
           max_evaluations: 1}
"""


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"keras-ccp {__version__}\n")


def test_train_then_evaluate(config, tmp_path):
    out = tmp_path / "run"
    result = invoke("train", config, "--out", out, "--set", "training.batch_size=12")
    assert result.exit_code == 0, result.output
    assert "each model alone" in result.output and "MAP@R" in result.output
    models = [line for line in result.output.splitlines() if line.startswith("model ")]
    assert models == ["model 1 of 2", "model 2 of 2"]
    metrics = json.loads((out / "metrics.json").read_text())
    shown = f"{100 * metrics['concatenated']['map_at_r']['mean']:.2f}"
    assert shown in result.output
    again = invoke("evaluate", out)
    assert again.exit_code == 0 and shown in again.output


def test_published_row_is_shown_beside_it(tmp_path):
    # In-shop has queries and a gallery; C2 on it is published: 86.32 and 83.04 P@1.
    root = tmp_path / "data"
    classes = dict.fromkeys(range(1, 9), 4)
    test = dict.fromkeys(range(20, 26), 3)
    write_in_shop(root, train=classes, query=test, gallery=test)
    path = tmp_path / "in_shop.yaml"
    path.write_text(
        SMALL.replace(
            "{name: emoji, folds: 2, train_classes: 12, augmentation: none}",
            "{name: in_shop, folds: 2, size: 16, check_counts: false}",
        )
    )
    result = invoke("train", path, "--data", root, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "86.32" in result.output and "83.04" in result.output


@pytest.mark.parametrize(
    "command", [c.name for c in get_command(app).commands.values()]
)
def test_help_describes_and_does_not_list_arguments_of_python(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0 and "--help" in result.output
    assert "Args:" not in result.output
    assert " overrides:" not in result.output


def test_errors_are_one_message(config, tmp_path):
    for arguments, message in (
        (("--set", "training.batchsize=64"), "batch_size"),
        (("--set", "training.batch_size"), "section.key=value"),
        (("--set", "data.name=cub200", "--data", tmp_path), "CUB_200_2011"),
        (("--out", config), "`out` must be a folder"),  # the last one counts
    ):
        result = invoke("train", config, "--out", tmp_path / "run", *arguments)
        assert result.exit_code == 1
        assert message in result.output.replace("\n", "")
        assert "Traceback" not in result.output
    for command in (("doctor",), ("train", "--out", tmp_path / "run")):
        result = invoke(*command, tmp_path)
        assert result.exit_code == 1
        assert "foldercontrastive_ccp--data" in "".join(result.output.split())
    result = invoke("evaluate", tmp_path / "nothing")
    assert result.exit_code == 1 and "There is no run" in result.output


def test_index_search_embed_and_check(config, tmp_path):
    # A photo folder of its own: 4 classes of 3 noise images of the class's colour.
    rng = np.random.default_rng(0)
    photos = tmp_path / "photos"
    for number in range(12):
        folder = photos / f"class{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 60, (16, 16, 3)) + 60 * (number % 4)
        data = tf.io.encode_png(pixels.astype("uint8")).numpy()
        (folder / f"{number}.png").write_bytes(data)
    (photos / "class0" / "broken.jpg").write_bytes(b"no image")
    config.write_text(
        SMALL.replace(
            "{name: emoji, folds: 2, train_classes: 12, augmentation: none}",
            "{name: folder, folds: 2, size: 16, short_side: 16, unreadable: skip}",
        ).replace(
            "batch_size: 8, samples_per_class: 2", "batch_size: 1, samples_per_class: 1"
        )
    )
    # Two of the four classes train, one in each fold: enough to see the command work.
    run = tmp_path / "run"
    result = invoke("train", config, "--data", photos, "--out", run)
    assert result.exit_code == 0, result.output

    folder = tmp_path / "index"
    result = invoke("index", run, photos, "--out", folder)
    assert result.exit_code == 0, result.output
    assert "12 images indexed" in result.output and "broken.jpg" in result.output
    query = photos / "class1" / "5.png"
    page = tmp_path / "page.html"
    result = invoke("search", folder, query, "-k", "3", "--json", "--html", page)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert "class1/5.png" in json.dumps(found)
    assert "data:image" in page.read_text("utf-8")
    result = invoke("embed", run, photos, "--out", tmp_path / "vectors.npy")
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "vectors.npy").shape == (12, 8)
    for model in (folder, run, run / "embedder"):
        assert invoke("check", model).exit_code == 0
    weights = next((run / "embedder" / "variables").glob("*.data*"))
    for file, model in ((next(folder.glob("*.keras")), folder), (weights, run)):
        file.write_bytes(file.read_bytes()[:-4] + b"abcd")
        assert invoke("check", model).exit_code == 1


def test_tune_prints_what_it_wrote(config, tmp_path, monkeypatch):
    def searched(experiment, data, out, trials, full):
        assert experiment.training.max_evaluations == 2
        assert full.training.max_evaluations == 1  # as in the file
        assert experiment.loss == full.loss and full.loss.name == "triplet"
        out.mkdir()
        for name in written:
            (out / name).touch()
        scores = {"map_at_r": 0.5, "own_map_at_r": 0.4, "complete": 1, "pruned": 0}
        scores |= {"projected": 0, "without_effect": ["model.proximal_weight"]}
        return {**scores, "values": {"model.proxies_per_class": 2}}

    monkeypatch.setattr("keras_ccp.app.tuning.tune", searched)
    for name, written in (
        ("pairs", ["best.yaml", "trials.csv", "study.db"]),
        ("proxies", ["best.yaml", "trials.csv", "lambda_proxies.png", "study.db"]),
    ):
        sets = ["--set", "training.max_evaluations=2", "--set", "loss.name=triplet"]
        result = invoke("tune", config, "--out", tmp_path / name, *sets)
        assert result.exit_code == 0, result.output
        assert f"{name}: {', '.join(written)}\n" in result.output
        shown = " ".join(result.output.split())
        assert "best 0.5000, with the configuration's own values 0.4000" in shown
        assert "model.proximal_weight had no effect on the best trial" in shown


def test_doctor_prints_findings_and_ends_by_them(config):
    sound = invoke("doctor", config)
    assert sound.exit_code == 0, sound.output
    assert "memory" in sound.output
    # 12 training classes cannot fill a batch of 20.
    wrong = invoke("doctor", config, "--set", "training.batch_size=40")
    assert wrong.exit_code == 1
    assert "training.batch_size" in wrong.output
