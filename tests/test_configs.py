"""The files in configs/ say what the paper says, here typed a second time."""

import re
from pathlib import Path

import pytest

from keras_ccp.app.config import Config, load_config
from keras_ccp.app.published import published_row

CONFIGS = {
    path.stem: load_config(path)
    for path in sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
}
DATASETS = ("cub200", "cars196", "in_shop", "sop")
BY_DATASET = "|".join(DATASETS)
SCHEME = re.compile(
    rf"(?P<dataset>{BY_DATASET})_"
    r"(?:(?P<loss>c1|c2|ms|triplet)(?:_(?P<form>xbm|ccp))?"
    r"|(?P<proxies>proxy_anchor|proxy_nca|soft_triple))"
    r"(?:_conventional_(?P<backbone>bn_inception|resnet50))?"
)
OWN = {
    "emoji_ms": "emoji",
    "emoji_ms_ccp": "emoji",
    "folder_c2_ccp": "folder",
    "grocery_c2_ccp": "npz",
    "omniglot_ms_ccp": "npz",
}
LOSS_NAMES = {
    "c1": "cosine_contrastive",
    "c2": "contrastive",
    "ms": "multi_similarity",
    "proxy_anchor": "proxy_anchor",
    "proxy_nca": "proxy_nca",
    "soft_triple": "soft_triple",
    "triplet": "triplet",
}

# ==== The paper's hyper-parameters, row by row: CUB, Cars196, In-shop, SOP ====

ARGUMENTS = {
    "c1": ("margin", [(0.5,)] * 4),
    "c2": (
        "positive_margin negative_margin",
        [(0, 0.3841), (0.2652, 0.5409), (0.2858, 0.5130), (0.2858, 0.5130)],
    ),
    "triplet": ("margin", [(0.0961,), (0.1190,), (0.0451,), (0.0451,)]),
    "ms": (
        "alpha beta base",
        [(2, 40, 0.5), (14.35, 75.83, 0.66), (8.49, 57.38, 0.41), (2, 40, 0.5)],
    ),
    "proxy_anchor": ("margin alpha", [(0.1, 32)] * 4),
    "proxy_nca": ("temperature", [(0.1,)] * 4),
    "soft_triple": (
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


def published_configs():
    for name, config in CONFIGS.items():
        if name not in OWN:
            parts = SCHEME.fullmatch(name)
            yield name, config, parts, DATASETS.index(parts["dataset"])


def test_names_follow_the_scheme():
    for name in CONFIGS:
        assert name in OWN or SCHEME.fullmatch(name), name
    for name, dataset in OWN.items():
        assert CONFIGS[name].data.name == dataset
    for _, config, parts, _ in published_configs():
        assert config.data.name == parts["dataset"]


def test_none_is_missing():
    expected = set(OWN)
    for dataset in DATASETS:
        for loss in ("c1", "c2", "ms", "triplet"):
            expected |= {f"{dataset}_{loss}{form}" for form in ("", "_xbm", "_ccp")}
        for loss in ("proxy_anchor", "proxy_nca", "soft_triple"):
            expected.add(f"{dataset}_{loss}")
        for loss in ("c2", "ms"):
            for backbone in ("bn_inception", "resnet50"):
                expected.add(f"{dataset}_{loss}_ccp_conventional_{backbone}")
    assert set(CONFIGS) == expected


def test_loss_arguments():
    for name, config, parts, column in published_configs():
        loss = parts["loss"] or parts["proxies"]
        keys, rows = ARGUMENTS[loss]
        expected = dict(zip(keys.split(), rows[column], strict=True))
        # Distances have no such choice; similarities are dot products in the paper.
        if loss not in ("c2", "triplet"):
            expected["similarity"] = "dot"
        assert config.loss.name == LOSS_NAMES[loss], name
        assert config.loss.arguments == expected, name


def test_memory():
    for name, config, parts, column in published_configs():
        if parts["form"] == "xbm":
            memory = config.loss.memory
            expected = (MEMORY_BATCHES[column], 1000)
            assert (memory.batches, memory.start_step) == expected, name
        else:
            assert config.loss.memory is None, name


def test_proxies():
    for name, config, parts, column in published_configs():
        proxies = config.proxies
        if parts["form"] == "ccp":
            values = proxies.per_class, proxies.pool_size, proxies.proximal_weight
            assert values == CCP[column], name
            assert proxies.patience == 3 and proxies.learning_rate_multiplier == 1, name
        elif parts["proxies"]:
            centers = SOFT_TRIPLE_CENTERS[column]
            expected = centers if parts["proxies"] == "soft_triple" else 1
            assert proxies.per_class == expected, name
            assert proxies.learning_rate_multiplier == 100, name
        else:
            assert proxies.per_class == 0, name
        assert proxies.switching == (parts["form"] == "ccp"), name
        # As the paper's formula: proxies only, and back to the best at a switch.
        assert proxies.in_batch_weight == 0 and proxies.restore_on_projection, name
        assert proxies.references == "proxies", name


def test_training():
    for name, config, parts, column in published_configs():
        training = config.training
        batch = {None: 32, "bn_inception": 128, "resnet50": 96}[parts["backbone"]]
        assert training.batch_size == batch, name
        assert training.samples_per_class == (1 if parts["proxies"] else 4), name
        assert training.learning_rate == 1e-5 and training.schedule == "constant", name
        assert training.weight_decay == 1e-4, name
        assert (training.beta_1, training.beta_2) == (0.9, 0.99), name
        interval = STEPS_PER_EVALUATION[column]
        assert training.steps_per_evaluation == interval, name
        assert training.stop_patience == 60, name
        epoch = (
            0.75 * TRAINING_IMAGES[column] / 32 / interval if parts["proxies"] else 0
        )
        # At least an epoch, and less than an interval more.
        assert epoch <= training.warm_up_epochs < epoch + 1, name


def test_protocols():
    for name, config, parts, _ in published_configs():
        data, embedder = config.data, config.embedder
        assert embedder.frozen_statistics, name
        assert embedder.normalization == "lipschitz", name
        assert data.check_counts and data.short_side == 256, name
        if parts["backbone"] is None:
            assert (data.split, data.folds, data.size) == ("mlrc", 4, 227), name
            assert data.augmentation == "mlrc", name
            assert (embedder.embedding_dim, embedder.pooling) == (128, "average"), name
        else:
            assert (data.split, data.size) == ("conventional", 224), name
            assert data.augmentation == "conventional", name
            head = (embedder.embedding_dim, embedder.pooling)
            assert head == (512, "average_max"), name
        if parts["backbone"] == "resnet50":
            expected = ("ResNet50", "imagenet")
        else:
            expected = ("bn_inception", "bn_inception-52deb4733.pth")
        assert (embedder.backbone, embedder.weights) == expected, name


def test_methods_are_named_as_in_the_published_tables():
    for name, config, parts, column in published_configs():
        if parts["proxies"]:
            size = "LLSS"[column]
            names = {"proxy_anchor": "ProxyAnchor", "proxy_nca": "ProxyNCA++"}
            expected = names.get(parts["proxies"], f"SoftTriple-{size}")
        else:
            loss = parts["loss"].upper() if len(parts["loss"]) == 2 else "Triplet"
            expected = loss + (f"-{parts['form'].upper()}-L" if parts["form"] else "")
        if parts["backbone"]:
            network = {"bn_inception": "BN-Inception", "resnet50": "ResNet50"}
            expected += f", conventional, {network[parts['backbone']]}"
        assert config.method == expected, name
        # The paper's tables have neither MS and Triplet with XBM nor, in these units,
        # the conventional protocol: no row may stand beside those.
        is_published = not parts["backbone"] and not (
            parts["form"] == "xbm" and parts["loss"] in ("ms", "triplet")
        )
        assert (published_row(config.data.name, config.method) is not None) == (
            is_published
        ), name


def test_no_two_are_the_same_experiment():
    seen = {}
    for name, config in CONFIGS.items():
        values = config.model_dump()
        del values["method"]
        same = seen.setdefault(repr(values), name)
        assert same == name, f"{name} and {same} are the same experiment"


def test_files_are_short_and_bases_all_used():
    folder = Path(__file__).parent.parent / "configs"
    texts = {
        path.relative_to(folder).as_posix(): path.read_text("utf-8")
        for path in folder.rglob("*.yaml")
    }
    used = set()
    for name, text in texts.items():
        for base in re.findall(r"[\w/]+\.yaml", text.split("method:")[0]):
            used.add((folder / name).parent.joinpath(base).relative_to(folder))
        if "/" not in name:
            assert len(text.splitlines()) <= 12, name
    bases = {Path(name) for name in texts if "/" in name}
    assert bases <= used, bases - used


@pytest.mark.parametrize("name", ["emoji_ms", "emoji_ms_ccp", "omniglot_ms_ccp"])
def test_small_images(name):
    config = CONFIGS[name]
    assert config.embedder.backbone == "small_cnn"
    # Random weights learn their statistics.
    assert config.embedder.weights is None and not config.embedder.frozen_statistics
    # A mirrored emoji is the same emoji, a mirrored character another one.
    flips = config.data.name == "emoji"
    assert config.data.augmentation == ("small" if flips else "small_no_flip")


def test_emoji_differ_in_proxies_only():
    plain, ccp = CONFIGS["emoji_ms"].model_dump(), CONFIGS["emoji_ms_ccp"].model_dump()
    assert [key for key in plain if plain[key] != ccp[key]] == ["method", "proxies"]


@pytest.mark.parametrize("name", ["folder_c2_ccp", "grocery_c2_ccp"])
def test_photos(name):
    config = CONFIGS[name]
    assert isinstance(config, Config)
    assert config.proxies.switching and config.loss.name == "contrastive"
    embedder = config.embedder
    assert (embedder.backbone, embedder.weights) == ("efficientnet_lite0", "imagenet")
