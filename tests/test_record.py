"""A run knows its classes and files: what changed under it is refused or said."""

import json
import os
import shutil

import keras
import numpy as np
import pytest
from typer.testing import CliRunner

from keras_ccp import datasets
from keras_ccp.app.cli import app
from keras_ccp.app.config import check_config
from keras_ccp.app.fold import train_fold
from keras_ccp.app.record import changes, record
from keras_ccp.app.report import write_report
from keras_ccp.app.run import check_files, evaluate_run, train_run
from keras_ccp.app.splits import Splits, load_splits
from keras_ccp.backup import load_latest
from keras_ccp.serving import check_model

BIRDS = "coot crow duck gull hawk kite lark rook swan wren".split()


def config(name="folder", **data):
    return check_config(
        {
            "method": "C2",
            "data": {
                **{"name": name, "folds": 2, "train_classes": 6},
                **{"size": 16, "short_side": 16, "augmentation": "none", **data},
            },
            "embedder": {
                "backbone": "small_cnn",
                "embedding_dim": 4,
                "frozen_statistics": False,
            },
            "model": {"proxies_per_class": 1},
            "callback": {"patience": 1, "pool_size": 2},
            "loss": {"name": "contrastive"},
            "training": {
                "batch_size": 4,
                "samples_per_class": 2,
                "steps_per_evaluation": 1,
                "max_evaluations": 3,
            },
        }
    )


def write_class(root, name, count=4):
    rng = np.random.default_rng(list(name.encode()))
    (root / name).mkdir(parents=True)
    for number in range(count):
        pixels = rng.integers(0, 256, (16, 16, 3))
        keras.utils.save_img(root / name / f"{number}.png", pixels, scale=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on ten classes: the folder of the photos, its own, and its metrics."""
    root = tmp_path_factory.mktemp("photos") / "data"
    for name in BIRDS:
        write_class(root, name)
    out = root.parent / "run"
    return root, out, train_run(config(), root, out, verbose=0)


@pytest.fixture
def copy(whole, tmp_path):
    """Copies of the photos, with their times, and of the run, which knows them."""
    root, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(whole[0], root)
    shutil.copytree(whole[1], out)
    about = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**about, "data": str(root)}))
    return root, out


def overwrite(root):
    (root / "crow" / "2.png").write_bytes((root / "wren" / "1.png").read_bytes())


# What happens, and what is said of it.
EVENTS = {
    "renamed": (
        lambda root: (root / "coot").rename(root / "zoot"),
        "must hold the classes of the run. Received: no coot; zoot beside",
    ),
    "removed": (lambda root: shutil.rmtree(root / "swan"), "no swan; nothing beside"),
    "relabelled": (
        lambda root: (root / "coot/1.png").rename(root / "crow/9.png"),
        "1 files added: crow/9.png; 1 files removed: coot/1.png\n.*--accept-changes",
    ),
    "overwritten": (overwrite, "1 files changed: crow/2.png\n"),
    "file removed": (
        lambda root: (root / "duck/0.png").unlink(),
        "1 files removed: duck/0.png\n",
    ),
    "class added": (
        lambda root: write_class(root, "auk"),
        "1 classes added, which are left out: auk\n",
    ),
}


@pytest.mark.parametrize("event", EVENTS)
def test_resuming_on_other_data_is_refused(copy, event):
    root, out = copy
    happen, message = EVENTS[event]
    happen(root)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=message):
        train_run(config(), None, out, resume=True, verbose=0)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_accepted_changes_keep_the_classes(copy, whole):
    root, out = copy
    for number in range(30):
        write_class(root, f"bird{number}", 2)
    (root / "coot" / "3.png").rename(root / "coot" / "9.png")
    before = record(config(), load_splits(config().data, whole[0]), (), whole[0])
    metrics = train_run(config(), None, out, resume=True, accept_changes=True)
    assert metrics == whole[2]
    after = json.loads((out / "data.json").read_text())
    for part in ("training", "query"):
        assert [*after[part]] == [*before[part]]
    assert len(after["others"]) == 30
    # They are known from now on.
    train_run(config(), None, out, resume=True)


def test_classes_added_later_are_no_test_classes(copy, whole, caplog):
    root, out = copy
    for number in range(30):
        write_class(root, f"bird{number}", 2)
    assert evaluate_run(out) == whole[2]
    said = (
        "its data changed: 30 classes added, which are left out: bird0, bird1, bird10"
    )
    assert said in caplog.text
    page = write_report(out, out=out.parent / "page.html").read_text("utf-8")
    assert "16 images of 4 classes" in page and said in page


def test_a_run_remembers_how_it_was_made(copy, whole, tmp_path, monkeypatch):
    _, out = copy
    monkeypatch.chdir(tmp_path.parent)  # where there are no data
    shown = f"{100 * whole[2]['concatenated']['map_at_r']['mean']:.2f}"
    for command in (
        ("train", "--out", out, "--resume"),
        ("evaluate", out),
        ("report", out),
    ):
        result = CliRunner().invoke(app, [str(argument) for argument in command])
        assert result.exit_code == 0, result.output
        if command[0] != "report":
            assert shown in result.output
            assert "classes split by seed 0" in result.output
    nothing = CliRunner().invoke(app, ["train", "--out", str(tmp_path), "--resume"])
    assert nothing.exit_code == 1 and "There is no run" in nothing.output


def test_repetitions_are_remembered(copy, caplog):
    _, out = copy
    about = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**about, "repeats": 3}))
    evaluate_run(out)
    assert "2 of 6 models are finished" in caplog.text


# ==== What is compared ====


def test_content_is_compared_on_request(tmp_path):
    for name in BIRDS:
        write_class(tmp_path, name, 1)
    splits = load_splits(config().data, tmp_path)
    known = [record(config(), splits, (), tmp_path, c) for c in (False, True)]
    os.utime(tmp_path / "duck" / "0.png", ns=(0, 0))
    now = [record(config(), splits, (), tmp_path, c) for c in (False, True)]
    touched = ["1 files changed: " + os.path.join("duck", "0.png")]
    assert [changes(a, b) for a, b in zip(known, now, strict=True)] == [touched, []]
    # Of the same size and time, and yet another.
    path = tmp_path / "duck" / "0.png"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    again = [record(config(), splits, (), tmp_path, c) for c in (False, True)]
    assert [changes(a, b) for a, b in zip(now, again, strict=True)] == [[], touched]


def test_arrays_and_their_order_are_compared():
    images = np.arange(6 * 4 * 4 * 3).reshape(6, 4, 4, 3).astype("uint8")
    names = ["crow", "crow", "duck", "duck", "gull", "gull"]
    test = datasets.Dataset(images, ["wren"] * 6)

    def known(training):
        return record(config(), Splits(training, test), (), ".")

    then = known(datasets.Dataset(images, names))
    assert changes(then, json.loads(json.dumps(then))) == []
    relabelled = datasets.Dataset(images, [*names[:3], "crow", *names[4:]])
    said = ["2 files changed: images of crow, images of duck"]
    assert changes(then, known(relabelled)) == said
    # The same classes under other numbers: each would be trained as another.
    order = datasets.Dataset(images, names).select_classes([1, 0, 2])
    assert changes(then, known(order)) == ["the order of classes or files"]


def test_a_table_tells_files_of_another_class(tmp_path):
    write_class(tmp_path, "photos", 20)
    rows = [f"photos/{n}.png,{BIRDS[n // 2]}" for n in range(20)]
    chosen = config("table", file="photos.csv")

    def known():
        (tmp_path / "photos.csv").write_text("\n".join(["path,label", *rows]))
        splits = load_splits(chosen.data, tmp_path)
        return record(chosen, splits, (), tmp_path)

    then = known()
    rows[0], rows[2] = "photos/0.png,crow", "photos/2.png,coot"
    file = [os.path.join("photos", name) for name in ("0.png", "2.png")]
    assert changes(then, known()) == [f"2 files of another class: {', '.join(file)}"]


def test_weights_are_compared(tmp_path):
    (tmp_path / "weights.h5").write_bytes(b"weights")
    chosen = check_config(
        {
            **{"method": "C2", "data": {"name": "emoji"}},
            "embedder": {"backbone": "bn_inception", "weights": "weights.h5"},
            "loss": {"name": "contrastive"},
        }
    )
    part = datasets.Dataset(np.zeros((2, 4, 4, 3), "uint8"), [0, 1])
    then = record(chosen, Splits(part, part), (), tmp_path)
    (tmp_path / "weights.h5").write_bytes(b"others ")
    now = record(chosen, Splits(part, part), (), tmp_path)
    assert changes(then, now) == ["1 files changed: weights.h5"]


# ==== Damage ====


def noticed(out, file):
    """Whether a damaged file is noticed with a message that names one, or harmless."""
    try:
        if file.parent.name == "backup":
            load_latest(file.parent)
            return False
        if "embedder" in file.relative_to(out).parts:
            check_model(out / "embedder")
            return False
        write_report(out, out=out.parent / "page.html")
        return False
    except (ValueError, FileNotFoundError) as error:
        assert str(out.parent) in str(error), error
        return True


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damage_is_named(copy, damage):
    _, out = copy
    rng = np.random.default_rng(0)
    sealed = {"config.yaml", "data.json", "metrics.json", "metrics.csv", "fold.json"}
    sealed |= {"log.csv", "projections.jsonl", "embedder.keras", "saved_model.pb"}
    found = set()
    for file in sorted(out.rglob("*")):
        if file.name not in sealed or "fold1" in file.parts:
            continue
        content = bytearray(file.read_bytes())
        place = int(rng.integers(len(content)))
        if damage == "flip":
            content[place] ^= 1 << int(rng.integers(8))
        else:
            del content[place:]
        kept = file.read_bytes()
        file.write_bytes(content)
        assert noticed(out, file), file
        file.write_bytes(kept)
        found.add(file.name)
    assert found == sealed


def test_damage_of_a_finished_model_is_named_before_the_run_is_finished(
    whole, tmp_path
):
    root, _, _ = whole
    out = tmp_path / "run"
    assert train_run(config(), root, out, verbose=0, most=1) is None
    path = out / "repeat0/fold0/embedder.keras"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="embedder.keras must be as it was written"):
        train_run(config(), None, out, resume=True, verbose=0)


def test_damage_is_not_sealed_by_the_models_that_follow(whole, tmp_path, monkeypatch):
    out = tmp_path / "run"

    def train_beside_damage(config, fold, *arguments):
        if fold.directory.name == "fold1":
            with (out / "repeat0/fold0/log.csv").open("a") as file:
                file.write("1,1\n")
        train_fold(config, fold, *arguments)

    monkeypatch.setattr("keras_ccp.app.run.train_fold", train_beside_damage)
    train_run(config(), whole[0], out, verbose=0)
    with pytest.raises(ValueError, match="fold0/log.csv must be as it was written"):
        check_files(out)


# Files whose checksums are not written.
@pytest.mark.parametrize(
    ("name", "content", "command"),
    [
        ("metrics.json", '{"dataset": "folder"}', "report"),
        ("metrics.json", '{"dataset": ', "report"),
        ("repeat0/fold0/fold.json", "{}", "report"),
        ("repeat0/fold0/embedder.keras", "nothing", "evaluate"),
        ("repeat0/fold0/embedder.keras", None, "evaluate"),
        ("repeat0/fold0/projections.jsonl", '{"projection": 0}\n', "report"),
        ("run.json", "[]", "evaluate"),
        ("run.json", "\xff", "evaluate"),
        ("data.json", "{}", "evaluate"),
        ("config.yaml", "a: 2020-13-45", "evaluate"),
    ],
)
def test_damage_without_checksums_is_one_message(copy, name, content, command):
    _, out = copy
    about = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**about, "sha256": {}}))
    file = out / name
    file.unlink()
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    result = CliRunner().invoke(app, [command, str(out)])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert name in result.stderr.replace("\n", "")
