"""The names in configs/ say what the paper says, here typed a second time."""

import hashlib
import itertools
import json

import pytest
import yaml

from keras_ccp import losses
from keras_ccp.app.config import CONFIGS, load_config, published_row

DATASETS = ("cub200", "cars196", "in_shop", "sop")
BACKBONES = {"bn_inception": "BN-Inception", "resnet50": "ResNet50"}
PROXY_METHODS = ("proxy_anchor", "proxy_nca", "soft_triple")

# ==== The paper's hyper-parameters, row by row: CUB, Cars196, In-shop, SOP ====

# The name of a loss in the paper and for `losses.get`, and its arguments.
ARGUMENTS = {
    "cosine_contrastive": ("C1", "cosine_contrastive", "margin", [(0.5,)] * 4),
    "contrastive": (
        "C2",
        "contrastive",
        "positive_margin negative_margin",
        [(0, 0.3841), (0.2652, 0.5409), (0.2858, 0.5130), (0.2858, 0.5130)],
    ),
    "triplet": (
        "Triplet",
        "triplet",
        "margin",
        [(0.0961,), (0.1190,), (0.0451,), (0.0451,)],
    ),
    "ms": (
        "MS",
        "multi_similarity",
        "alpha beta base",
        [(2, 40, 0.5), (14.35, 75.83, 0.66), (8.49, 57.38, 0.41), (2, 40, 0.5)],
    ),
    "proxy_anchor": ("ProxyAnchor", "proxy_anchor", "margin alpha", [(0.1, 32)] * 4),
    "proxy_nca": ("ProxyNCA++", "proxy_nca", "temperature", [(0.1,)] * 4),
    "soft_triple": (
        "SoftTriple",
        "soft_triple",
        "scale gamma tau margin",
        [
            (20, 0.1, 0.2, 0.01),
            (17.69, 19.18, 0.0669, 0.3588),
            (20, 0.1, 0.2, 0.01),
            (100, 47.9, 0.2, 0.3145),
        ],
    ),
}
CCP = [(8, 12, 2e-4), (8, 12, 2e-4), (4, 7, 2e-4), (4, 7, 2e-4)]
MEMORY_BATCHES = [25, 25, 400, 1400]  # "L"
SOFT_TRIPLE_CENTERS = [10, 10, 1, 1]  # of the rows that are published: L, L, S, S
STEPS_PER_EVALUATION = [25, 25, 250, 250]
TRAINING_IMAGES = [5_864, 8_054, 25_882, 59_551]


def published_experiments():
    """Names by dataset, loss, form (`""`, `"xbm"`, `"ccp"`) and backbone."""
    for dataset, loss in itertools.product(DATASETS, ARGUMENTS):
        forms = [""] if loss in PROXY_METHODS else ["", "xbm", "ccp"]
        for form in forms:
            method = f"{loss}_{form}" if form else loss
            yield [dataset, method], loss, form, None
            if form == "ccp" and loss in ("contrastive", "ms"):
                for backbone in BACKBONES:
                    parts = [dataset, method, f"conventional_{backbone}"]
                    yield parts, loss, form, backbone


PUBLISHED = [pytest.param(*e, id="-".join(e[0])) for e in published_experiments()]


@pytest.mark.parametrize(("parts", "loss", "form", "backbone"), PUBLISHED)
def test_published_experiments(parts, loss, form, backbone):
    config, column = load_config(parts), DATASETS.index(parts[0])
    has_proxies = loss in PROXY_METHODS
    title, name, keys, rows = ARGUMENTS[loss]
    arguments = dict(zip(keys.split(), rows[column], strict=True))
    # Distances have no such choice; similarities are dot products in the paper.
    if loss not in ("contrastive", "triplet"):
        arguments["similarity"] = "dot"
    assert (config.loss.name, config.loss.arguments) == (name, arguments)
    memory = config.loss.memory and dict(config.loss.memory)
    expected = {"batches": MEMORY_BATCHES[column], "start_step": 1000}
    assert memory == (expected if form == "xbm" else None)

    model, callback = config.model, config.callback
    if form == "ccp":
        values = model.proxies_per_class, callback.pool_size, model.proximal_weight
        assert values == CCP[column]
        assert callback.max_projections is None and callback.patience == 3
    else:
        count = SOFT_TRIPLE_CENTERS[column] if loss == "soft_triple" else 1
        assert model.proxies_per_class == (count if has_proxies else 0)
        assert callback.max_projections == (0 if has_proxies else None)
    assert model.proxy_learning_rate_multiplier == (100 if has_proxies else 1)
    # As the paper's formula: proxies only, and back to the best at a projection.
    assert model.in_batch_weight == 0 and callback.restore_on_projection
    assert model.references == "proxies"

    training, interval = config.training, STEPS_PER_EVALUATION[column]
    batch = {None: 32, "bn_inception": 128, "resnet50": 96}[backbone]
    assert training.batch_size == batch
    assert training.samples_per_class == (1 if has_proxies else 4)
    assert (training.learning_rate, training.schedule) == (1e-5, "constant")
    assert (training.beta_1, training.beta_2, model.weight_decay) == (0.9, 0.99, 1e-4)
    assert training.steps_per_evaluation == interval and callback.stop_patience == 60
    # At least an epoch, and less than an interval more.
    epoch = has_proxies * 0.75 * TRAINING_IMAGES[column] / 32 / interval
    assert epoch <= training.warm_up_epochs < epoch + 1

    data, embedder = config.data, config.embedder
    assert data.name == parts[0] and data.check_counts and data.short_side == 256
    assert embedder.frozen_statistics and embedder.normalization == "lipschitz"
    head = embedder.embedding_dim, embedder.pooling
    if backbone is None:
        assert (data.split, data.folds, data.size) == ("mlrc", 4, 227)
        assert data.augmentation == "mlrc" and head == (128, "average")
    else:
        assert (data.split, data.size) == ("conventional", 224)
        assert data.augmentation == "conventional" and head == (512, "average_max")
    if backbone == "resnet50":
        expected = ("ResNet50", "imagenet")
    else:
        expected = ("bn_inception", "bn_inception-52deb4733.pth")
    assert (embedder.backbone, embedder.weights) == expected

    size = f"-{'LLSS'[column]}" if loss == "soft_triple" else ""
    method = title + size + (f"-{form.upper()}-L" if form else "")
    if backbone:
        method += f", conventional, {BACKBONES[backbone]}"
    assert config.method == method
    # The paper's tables have neither MS and Triplet with XBM nor, in these units, the
    # conventional protocol: no row may stand beside those.
    is_published = not backbone and not (form == "xbm" and loss in ("ms", "triplet"))
    assert (published_row(parts[0], method) is not None) == is_published


# The first digits of SHA-256 of all values that version 0.1 had, in sorted JSON: 76
# published experiments in one sum, then the own ones.
SUMS = {
    "cub200 cars196 in_shop sop": "a34f73852ff4",
    "emoji ms": "f1a3657787e2",
    "emoji ms_ccp": "ae063de414b9",
    "omniglot ms_ccp": "b17603c80556",
    "folder contrastive_ccp": "812809fd0684",
    "grocery contrastive_ccp": "5f25a10e7442",
}


def test_values_are_those_of_before():
    published = sorted(parts for parts, *_ in published_experiments())
    assert len(published) == 76
    for names, expected in SUMS.items():
        parts = [names.split()] if " ms" in names or "_ccp" in names else published
        # Version 0.1 took folders by their names.
        change = ["data.split_seed=null"] if names.startswith("folder") else []
        values = [load_config(part, change).model_dump() for part in parts]
        text = json.dumps(values, sort_keys=True)
        assert hashlib.sha256(text.encode()).hexdigest()[:12] == expected, names


def test_classes_are_shuffled_where_no_split_is_published(tmp_path):
    assert load_config(["folder", "ms"]).data.split_seed == 0
    file = tmp_path / "own.yaml"
    for name, seed in (("folder", 0), ("table", 0), ("npz", 0), ("cub200", None)):
        file.write_text(f"method: C2\ndata: {{name: {name}}}\nloss: {{name: triplet}}")
        assert load_config(file).data.split_seed == seed
        assert load_config(file, ["data.split_seed=null"]).data.split_seed is None


def test_any_method_goes_with_any_dataset():
    seen = set()
    for dataset in CONFIGS.glob("datasets/*.yaml"):
        for method in CONFIGS.glob("methods/*.yaml"):
            overrides = ["model.in_batch_weight=0.1"] if "xbm" in method.stem else []
            config = load_config([dataset.stem, method.stem], overrides)
            losses.get(config.loss.name, **config.loss.arguments)
            text = config.model_dump_json(exclude={"method"})
            assert text not in seen, "the same experiment twice"
            seen.add(text)


def test_files():
    paths = sorted(CONFIGS.glob("*/*.yaml"))
    stems = {path.stem for path in paths}
    assert len(stems) == len(paths) <= 35  # a name stands for one file
    assert {path.parent.name for path in paths} == {
        "base",
        "datasets",
        "methods",
        "protocols",
    }
    used = set()
    for path in paths:
        values = yaml.safe_load(path.read_text("utf-8"))
        base = values.get("base", [])
        used |= {base} if isinstance(base, str) else set(base)
        assert set(values.get("with", {})) <= stems, path
    bases = {path.stem for path in paths if path.parent.name == "base"}
    assert bases - {"proxies"} <= used <= stems  # which is added to a loss by name


def test_small_images():
    for parts, augmentation in (
        (["emoji", "ms"], "small"),
        # A mirrored emoji is the same emoji, a mirrored character another one.
        (["omniglot", "ms_ccp"], "small_no_flip"),
    ):
        config = load_config(parts)
        assert config.data.augmentation == augmentation
        # Random weights learn their statistics.
        assert not (config.embedder.weights or config.embedder.frozen_statistics)
    plain, ccp = (load_config(["emoji", m]).model_dump() for m in ("ms", "ms_ccp"))
    changed = [key for key in plain if plain[key] != ccp[key]]
    assert changed == ["method", "model", "callback"]
