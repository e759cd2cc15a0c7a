"""Methods side by side: what is trained, what is concluded, what is refused."""

import json

import keras
import numpy as np
import pytest
from test_cli import SMALL, invoke
from test_run import small_config

from keras_ccp.app.compare import compare_methods, compare_runs
from keras_ccp.app.config import load_config
from keras_ccp.app.run import train_run


def written_run(folder, map_at_r, classes=40, steps=100):
    """A finished run with scores of its models, alike in all classes or `(m, c)`."""
    by_class = np.array(map_at_r, float)
    if by_class.ndim == 1:
        by_class = np.repeat(by_class[:, None], classes, axis=1)
    for fold, own in enumerate(by_class):
        directory = folder / "repeat0" / f"fold{fold}"
        directory.mkdir(parents=True)
        summary = {
            "validation": {"map_at_r": float(own.mean())},
            "num_steps": steps,
            "seconds": 60.0,
            "num_projections": 2 * fold,
        }
        (directory / "fold.json").write_text(json.dumps(summary))
    metrics = {
        "models": [{"map_at_r": own.mean(), "precision_at_1": 0.5} for own in by_class],
        "by_class": {
            "names": [f"class {i}" for i in range(by_class.shape[1])],
            "queries": [2] * by_class.shape[1],
            "map_at_r": by_class.tolist(),
        },
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
    icons = small_config().with_values({"data.name": "npz", "data.file": "a/icons.npz"})
    (folder / "config.yaml").write_text(icons.to_yaml())
    return folder


def test_differences_are_paired_over_models(tmp_path):
    first = written_run(tmp_path / "a", [0.20, 0.30, 0.40])
    second = written_run(tmp_path / "b", [0.22, 0.33, 0.44])
    comparison = compare_runs({"a": first, "b": second})
    (found,) = comparison.differences
    # .02, .03, .04: mean .03, deviation .01, so .01 / sqrt(3) times t = 4.302653.
    half = 4.302653 * 0.01 / np.sqrt(3)
    assert found.mean == pytest.approx(0.03)
    assert found.models == pytest.approx((0.03 - half, 0.03 + half), rel=1e-6)
    assert found.classes == pytest.approx((0.03, 0.03))  # alike in all classes
    method = comparison.methods[1]
    assert comparison.dataset == "icons"
    assert method.scores == pytest.approx([0.22, 0.33, 0.44])
    assert method.map_at_r["mean"] == pytest.approx(0.33)
    assert (method.steps, method.seconds, method.projections) == (100, 60, 2)
    (sentence,) = comparison.sentences
    assert sentence.startswith("b is above a by 3.00 points of MAP@R: +0.52 to +5.48")


@pytest.mark.parametrize("which", ["models", "classes"])
def test_nothing_is_concluded_where_one_of_the_intervals_holds_zero(which, tmp_path):
    rng = np.random.default_rng(0)
    first = np.full((4, 40), 0.4)
    # Models or classes that differ much in their difference, which is .01 on average.
    size = (4, 1) if which == "models" else (1, 40)
    noise = rng.normal(0, 0.1, size)
    second = first + 0.01 + noise - noise.mean()
    runs = written_run(tmp_path / "a", first), written_run(tmp_path / "b", second)
    comparison = compare_runs(dict(zip("ab", runs, strict=True)))
    (found,) = comparison.differences
    low, high = getattr(found, which)
    assert low < 0 < found.mean < high and not found.is_known
    assert "cannot be concluded: +1.00 points" in comparison.sentences[0]


def test_one_pair_of_models_is_not_enough(tmp_path):
    runs = {n: written_run(tmp_path / n, [v]) for n, v in (("a", 0.3), ("b", 0.2))}
    comparison = compare_runs(runs)
    assert comparison.differences[0].models is None
    assert "One pair says nothing" in comparison.sentences[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": [{"map_at_r": 0.1, "precision_at_1": 0.1}]}, "number of models"),
        ({"by_class": {"names": ["x"], "queries": [1]}}, "same test classes"),
        ({"by_class": None}, "scores by class"),
    ],
)
def test_runs_that_cannot_be_compared(change, message, tmp_path):
    runs = {name: written_run(tmp_path / name, [0.1, 0.2]) for name in "ab"}
    path = runs["b"] / "metrics.json"
    metrics = {**json.loads(path.read_text()), **change}
    kept = {key: value for key, value in metrics.items() if value is not None}
    path.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=message):
        compare_runs(runs)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="train --resume --out"):
        compare_runs(runs)


# ==== Training ====


@pytest.fixture(scope="module")
def methods():
    ccp = small_config()
    pairs = ccp.with_values({"model.proxies_per_class": 0, "method": "MS"})
    return {"ms": pairs, "ms+ccp": ccp}


GRID = {
    "training.learning_rate": [0.02, 1e-6],
    "model.proxy_learning_rate_multiplier": [1.0, 10.0],
}


@pytest.fixture(scope="module")
def compared(methods, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "emoji"
    return out, compare_methods(methods, ".", out, 1, GRID, verbose=0)


def test_each_method_is_tuned_on_validation_and_trained_on_all_folds(compared):
    _, comparison = compared
    pairs, ccp = comparison.methods
    # A key of the proxies is not tried where there are none.
    assert [len(method.trials) for method in (pairs, ccp)] == [2, 4]
    for method in (pairs, ccp):
        scores = [trial.map_at_r for trial in method.trials]
        assert scores == sorted(scores, reverse=True)
        assert method.run == str(method.trials[0].run)
        assert method.steps == 10  # 5 evaluations of 2 steps, whatever the patience
    assert comparison.num_models == 2
    assert comparison.untrained["num_queries"] == 6 * comparison.num_classes


def test_scores_are_those_of_a_run_with_the_chosen_values(compared, methods, tmp_path):
    _, comparison = compared
    best = comparison.methods[1]
    config = methods["ms+ccp"].with_values(
        {**best.trials[0].values, "callback.stop_patience": 5}
    )
    alone = train_run(config, ".", tmp_path / "alone", verbose=0)
    assert best.map_at_r == alone["separated"]["map_at_r"]
    assert comparison.untrained == alone["untrained"]


def test_it_goes_on_where_it_was_stopped(compared, methods, tmp_path):
    out, comparison = compared
    times = {p: p.stat().st_mtime_ns for p in out.glob("*/*/repeat*/fold*/fold.json")}
    (lost,) = [p for p in times if str(p).startswith(f"{comparison.methods[0].run}/")][
        1:
    ]
    lost.unlink()
    (lost.parents[2] / "metrics.json").unlink()
    again = compare_methods(methods, ".", out, 1, GRID, verbose=0)
    assert again.methods[0].map_at_r == comparison.methods[0].map_at_r
    assert {p for p in times if p.stat().st_mtime_ns != times[p]} == {lost}


def test_a_value_at_the_end_of_what_was_tried_is_told(compared):
    _, comparison = compared
    text = "\n".join(comparison.notes)
    assert "at the end of what was tried (1e-06, 0.02)" in text
    assert "chosen by validation MAP@R of the first model" in text


def test_proxies_that_were_never_chosen_again_are_told_of(methods, tmp_path):
    patient = {
        name: config.with_values({"callback.patience": 5})
        for name, config in methods.items()
    }
    grid = {"training.learning_rate": [0.02]}
    comparison = compare_methods(patient, ".", tmp_path, 1, grid, verbose=0)
    assert "ms+ccp made no projection in 10 steps" in comparison.notes[-1]
    assert not any("ms made" in note for note in comparison.notes)


def test_the_page_holds_all_methods_and_sentences(compared):
    out, comparison = compared
    page = (out / "compare.html").read_text()
    for text in ("ms+ccp", "no training", "What was tried", "learning_rate=1e-06"):
        assert text in page
    for sentence in comparison.sentences:
        assert sentence in page
    written = json.loads((out / "compare.json").read_text())
    assert written["sentences"] == comparison.sentences
    assert len(written["methods"][0]["trials"]) == 2


@pytest.mark.parametrize(
    "values", [{"training.batch_size": 8}, {"data.folds": 3}, {"seed": 1}]
)
def test_methods_must_be_alike_in_what_is_not_compared(values, methods, tmp_path):
    (key,) = values
    unlike = {**methods, "other": methods["ms"].with_values(values)}
    with pytest.raises(ValueError, match=f"(?s){key}.*in other\nGive them one value"):
        compare_methods(unlike, ".", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_trains_and_then_compares_its_runs(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    out = tmp_path / "out"
    options = ["--folds", "2", "--seeds", "1", "--try", "training.learning_rate=1e-3"]
    names = [path, "contrastive", "contrastive+proxies"]
    small = ["--set", "model.proxies_per_class=0", "--set", "callback.pool_size=1"]
    result = invoke("compare", *names, "--out", out, *options, *small)
    assert result.exit_code == 0, result.output
    assert "contrastive+proxies" in result.output and "no training" in result.output
    runs = [out / name / "training.learning_rate=0.001" for name in names[1:]]
    result = invoke("compare", *runs, "--out", tmp_path / "again")
    assert result.exit_code == 0, result.output
    first, again = (
        json.loads((folder / "compare.json").read_text())["differences"][0]["mean"]
        for folder in (out, tmp_path / "again")
    )
    assert first == again
    result = invoke("compare", runs[0], tmp_path / "nothing", "--out", tmp_path / "c")
    assert result.exit_code == 1 and "There are no scores in" in result.output


def test_data_that_changed_in_between_are_refused(methods, tmp_path):
    root = tmp_path / "photos"
    for number in range(12):
        (root / f"kind {number}").mkdir(parents=True)
        for image in range(4):
            pixels = np.full((16, 16, 3), 20 * number + image)
            path = root / f"kind {number}" / f"{image}.png"
            keras.utils.save_img(path, pixels, scale=False)
    photos = {
        "data.name": "folder",
        "data.train_classes": 8,
        "data.size": 16,
        "data.augmentation": "none",
        "training.batch_size": 4,
        "training.max_evaluations": 1,
    }
    small = {name: config.with_values(photos) for name, config in methods.items()}
    grid = {"training.learning_rate": [0.02]}
    compare_methods(small, root, tmp_path / "out", 1, grid, verbose=0)
    (root / "kind 3" / "0.png").unlink()
    with pytest.raises(ValueError, match="1 files removed: kind 3/0.png"):
        compare_methods(small, root, tmp_path / "out", 1, grid, verbose=0)


@pytest.mark.parametrize("key", ["training.learnin_rate", "callback.pool_size"])
def test_values_that_are_not_valid_cost_no_time(key, methods, tmp_path):
    # The second is refused by the method with proxies alone, which comes last.
    with pytest.raises(ValueError, match=key.rpartition(".")[2]):
        compare_methods(methods, ".", tmp_path / "out", 1, {key: [0]}, verbose=0)
    assert not (tmp_path / "out").exists()


def test_one_method_is_not_enough(tmp_path):
    result = invoke("compare", "emoji", "contrastive", "--out", tmp_path / "out")
    assert result.exit_code == 1 and "two methods or runs" in result.output
    assert not (tmp_path / "out").exists()


def test_proxies_that_stay_are_those_of_ccp():
    stay = load_config(["omniglot", "contrastive", "proxies"])
    ccp = load_config(["omniglot", "contrastive", "ccp"])
    assert stay == ccp.with_values({"callback.max_projections": 0})
