"""Configurations: their keys and values, files, names and overrides."""

import pytest
import yaml

from keras_ccp.app.config import (
    Config,
    DistributionConfig,
    check_config,
    load_config,
)

SMALL = {"method": "C2", "data": {"name": "emoji"}, "loss": {"name": "contrastive"}}


@pytest.fixture
def write(tmp_path):
    """Writes `{file name: text}`; returns the folder."""

    def write_files(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        return tmp_path

    return write_files


@pytest.fixture
def load(write):
    """Loads the small experiment with overrides."""
    path = write(small=yaml.safe_dump(SMALL)) / "small.yaml"
    return lambda *overrides: load_config(path, overrides)


# ==== Defaults and values ====


def test_small_config_has_the_defaults_of_its_sections():
    config = check_config(SMALL)
    assert config.training.batch_size == 32
    assert config.embedder.backbone == "bn_inception"
    assert config.loss.memory is None
    assert config.data.check_counts is True


def test_values_keep_their_types(load):
    config = load("training.learning_rate=1", "data.train_classes=40")
    assert type(config.training.learning_rate) is float
    assert type(config.data.train_classes) is int
    assert type(load("data.train_classes=0.5").data.train_classes) is float


def test_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        check_config(SMALL).seed = 3


def test_sections_are_handed_on_as_arguments():
    assert dict(**check_config(SMALL).distribution) == dict(
        strategy="none", devices=None
    )


# ==== Unknown keys and wrong types ====


@pytest.mark.parametrize(
    ("override", "place", "near"),
    [
        ("sed=1", "sed", "seed"),
        ("training.batchsize=64", "training.batchsize", "training.batch_size"),
        # Of another section, and of one that may be null.
        ("training.weight_decay=1", "training.weight_decay", "model.weight_decay"),
        ("proxies.per_class=3", "proxies", "model.proxies_per_class"),
        ("loss.memory.batchs=3", "loss.memory.batchs", "loss.memory.batches"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(load, override, place, near):
    message = rf"small.yaml is not valid\n.*^{place}: .*; did you mean `{near}`\?"
    with pytest.raises(ValueError, match=f"(?ms){message}$"):
        load(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.batch_size='64'", "training.batch_size: .*integer.*'64'"),
        ("training.batch_size=true", "training.batch_size: .*integer.*True"),
        ("training.batch_size=30", "training: .*30 must be a multiple .* 4$"),
        ("training.learning_rate=fast", "training.learning_rate: .*number.*'fast'"),
        ("training.learning_rate=.nan", "training.learning_rate: .*nan"),
        ("data.name=cub", "data.name: .*'cub'; did you mean `cub200`"),
        ("data.split=xyz", "data.split: .*Received: 'xyz'$"),  # no guess
        ("data.train_classes=1.0", "data.train_classes: .*less than 1.*1.0"),
        ("data.train_classes=0", "data.train_classes: .*greater than 0.*0"),
        ("embedder.backbone=resnet50", "embedder.*did you mean `ResNet50`"),
        ("loss.arguments=[0.5]", r"loss.arguments: .*dictionary.*\[0.5\]"),
        ("loss.arguments.xyz=1", "loss.arguments: .*'xyz'.* has positive_margin, "),
        ("loss.arguments.negative_margin=-1", "loss.arguments: `negative_margin` must"),
        ("loss.name=tripplet", 'loss.name: .*"triplet"'),
        ("model.proxies_per_class=13", "`callback.pool_size` must be at least .* 13,"),
        ("distribution.strategy=miror", "distribution.*; did you mean `mirrored`"),
        ("method=2024-01-01", "method: .*string"),
        # A section that is there and empty is a slip.
        ("training=", "training: .*TrainingConfig.*None"),
    ],
)
def test_wrong_values_are_refused(load, override, message):
    with pytest.raises(ValueError, match=f"small.yaml is not valid\n{message}"):
        load(override)


def test_every_problem_is_named_once():
    with pytest.raises(ValueError) as caught:
        check_config(
            {
                "data": {"name": "emoji", "train_classes": "x"},
                "loss": {},
                "training": {"bach_size": 1},
                "seed": "x",
            }
        )
    title, *lines = str(caught.value).splitlines()
    assert title == "config is not valid"
    assert [line.split(":")[0] for line in lines] == [
        "method",
        "data.train_classes",
        "loss.name",
        "training.bach_size",
        "seed",
    ]


def test_memory_must_be_of_use(load):
    memory, proxies = "loss.memory.batches=3", "model.proxies_per_class=2"
    assert load(memory).loss.memory.start_step == 1000
    assert load(memory, proxies, "model.in_batch_weight=0.1").loss.memory
    with pytest.raises(ValueError, match="`model.in_batch_weight` above 0"):
        load(memory, proxies)


def test_devices(load):
    for strategy, expected in (
        ("none", "mirrored"),
        ("mirrored", "mirrored"),
        ("multi_worker", "multi_worker"),
    ):
        config = load(f"distribution.strategy={strategy}", "distribution.devices=2")
        assert config.distribution == DistributionConfig(strategy=expected, devices=2)


# ==== Files ====


def test_bases_merge_in_order(write):
    folder = write(
        first="method: a\nseed: 1\ntraining: {batch_size: 8, beta_1: 0.1}",
        second="seed: 2\nloss: {name: triplet}\ntraining: {batch_size: 16}",
        top="base: [first.yaml, second.yaml]\ndata: {name: emoji}\ntraining: "
        "{samples_per_class: 2}",
    )
    config = load_config(folder / "top.yaml")
    assert (config.method, config.seed) == ("a", 2)
    training = config.training
    assert (training.batch_size, training.samples_per_class) == (16, 2)
    assert training.beta_1 == 0.1


def test_base_is_relative_to_its_file_and_may_have_bases(write, tmp_path):
    (tmp_path / "base").mkdir()
    write(top="base: base/middle.yaml\nseed: 3")
    (tmp_path / "base" / "middle.yaml").write_text("base: low.yaml\nseed: 2\nmethod: m")
    (tmp_path / "base" / "low.yaml").write_text(yaml.safe_dump({**SMALL, "seed": 1}))
    config = load_config(tmp_path / "top.yaml")
    assert (config.seed, config.method, config.loss.name) == (3, "m", "contrastive")


def test_names_of_the_package_are_bases_and_parts(write):
    folder = write(
        named="base: [cub200, contrastive_ccp]\nseed: 1",
        placed="base: [datasets/cub200, methods/c2_ccp]\nseed: 1",
        seed="seed: 1",
        sop="base: sop\nseed: 1",  # its own name, and not itself
    )
    config = load_config(["cub200", "contrastive_ccp"], ["seed=1"])
    assert config.loss.arguments == {"positive_margin": 0.0, "negative_margin": 0.3841}
    assert load_config(["cub200", "c2_ccp"], ["seed=1"]) == config
    assert load_config(["cub200", "c2_ccp", folder / "seed.yaml"]) == config
    assert load_config(folder / "named.yaml") == config
    assert load_config(["sop", "c1_xbm"]).loss.name == "cosine_contrastive"


def test_values_for_the_company_of_a_file(write):
    folder = write(
        data=yaml.safe_dump(SMALL),
        method="method: m\nwith: {data: {seed: 1}, other: {seed: 2}}",
        last="seed: 3",
    )
    data, method, last = (folder / f"{n}.yaml" for n in ("data", "method", "last"))
    config = load_config([data, method])
    assert (config.method, config.seed) == ("m", 1)
    assert load_config([data, method, last]).seed == 3


def test_base_cycle_is_refused(write):
    folder = write(a="base: b.yaml", b="base: a.yaml", c="base: c.yaml")
    for name in "ac":
        with pytest.raises(ValueError, match=f"{name}.yaml is its own `base`\n"):
            load_config(folder / f"{name}.yaml")


@pytest.mark.parametrize(
    "text", ["", "- a\n- b", "text", "base: 3", "base: [a.yaml, 3]", "with: {a: 3}"]
)
def test_file_must_have_its_form(write, text):
    with pytest.raises(ValueError, match="top.yaml is not valid\n.*Received: "):
        load_config(write(top=text) / "top.yaml")


def test_missing_files_are_named(write, tmp_path):
    folder = write(top="base: midle.yaml", middle="seed: 1")
    (tmp_path / "my photos").mkdir()
    (folder / "gone.yaml").symlink_to("gone.yaml.txt")
    for part, message in (
        (folder / "topp.yaml", "topp.yaml\nDid you mean `top.yaml`"),
        (folder / "top.yaml", "midle.yaml, a base of .*top.yaml\nDid .* `middle.yaml`"),
        (folder / "gone.yaml", "gone.yaml\nGive a YAML file"),
        (folder / "my photos", "For images in a folder: .* --data '.*my photos'"),
        ("cub20", "cub20\nDid you mean `cub200`"),
        ("c2_cpp", "c2_cpp\nDid you mean `contrastive_ccp`"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            load_config(part)


@pytest.mark.parametrize(
    "text", ["a: [1", "a: b: c", "\ta: 1", "a: @", b"a: \xff", "a: {b: 1, b: 3}"]
)
def test_file_must_be_yaml(tmp_path, text):
    path = tmp_path / "top.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="top.yaml must be YAML"):
        load_config(path)


def test_aliases_are_refused(write):
    # Ten levels of ten times the level below: 10^10 values.
    levels = ["a0: &a0 x"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 11)]
    with pytest.raises(ValueError, match="must be YAML\nwrite the value out"):
        load_config(write(top="\n".join(levels)) / "top.yaml")


def test_untrusted_yaml_runs_nothing(write, tmp_path):
    witness = tmp_path / "witness"
    payload = f"!!python/object/apply:pathlib.Path.touch [{witness}]"
    folder = write(top=f"method: {payload}", good=yaml.safe_dump(SMALL))
    with pytest.raises(ValueError, match="must be YAML"):
        load_config(folder / "top.yaml")
    with pytest.raises(ValueError, match="must be YAML"):
        load_config(folder / "good.yaml", [f"method={payload}"])
    for tag in ("!!python/name:os.system", "!!python/module:os", "!own 3"):
        with pytest.raises(ValueError, match="must be YAML"):
            load_config(write(top=f"method: {tag}") / "top.yaml")
    assert not witness.exists()


# ==== Overrides ====


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("2e+3", 2000.0),
        ("1.e3", 1000.0),
        (".5", 0.5),
        ("3", 3),
        ("1e5x", "1e5x"),
        ("'1e5'", "1e5"),
    ],
)
def test_numbers_are_what_they_look_like(load, text, value):
    key = "method" if isinstance(value, str) else "loss.arguments.negative_margin"
    config = load(f"{key}={text}")
    read = config.method if key == "method" else config.loss.arguments
    expected = value if key == "method" else {"negative_margin": value}
    assert read == expected
    # Other users of YAML are not touched.
    assert yaml.safe_load("1e-5") == "1e-5"


def test_overrides(load):
    config = load(
        "training.batch_size=64",
        "training.learning_rate=1e-4",
        "loss.memory.batches=3",
        "method=a=b",
        "loss.arguments={negative_margin: 0.4}",
        "training.batch_size=16",  # the last one counts
    )
    assert config.training.batch_size == 16
    assert config.training.learning_rate == 1e-4
    assert config.loss.memory.batches == 3
    assert config.method == "a=b"
    assert config.loss.arguments == {"negative_margin": 0.4}
    assert load("loss.memory.batches=3", "loss.memory=null").loss.memory is None


def test_arguments_of_another_loss_do_not_carry_over(write):
    folder = write(
        base="loss: {name: contrastive, arguments: {negative_margin: 0.4}}",
        arguments="loss: {arguments: {scale: 3.0}}",  # of a loss that is named later
        same="base: base.yaml\nmethod: m\ndata: {name: emoji}",
        other="base: [same.yaml, arguments.yaml]\nloss: {name: soft_triple}",
        named="base: arguments.yaml\nmethod: m\ndata: {name: emoji}\nloss: {name: "
        "soft_triple}",
    )

    def arguments(name, *overrides):
        return load_config(folder / f"{name}.yaml", overrides).loss.arguments

    assert arguments("same") == {"negative_margin": 0.4}
    assert arguments("same", "loss.name=contrastive") == {"negative_margin": 0.4}
    assert arguments("same", "loss.name=triplet") == {}
    margin = "loss.arguments.margin=0.2"
    for overrides in ((margin, "loss.name=triplet"), ("loss.name=triplet", margin)):
        assert arguments("same", *overrides) == {"margin": 0.2}
    # {} clears those of the same loss.
    assert arguments("same", "loss.arguments={}") == {}
    assert arguments("other", "loss.arguments={}") == {}
    # Both lie below the name that changes; where no other name is below, none does.
    assert arguments("other") == {}
    assert arguments("named") == {"scale": 3.0}


def test_changed_values(load):
    lower = load("loss.arguments.negative_margin=0.4", "distribution.devices=2")
    upper = load("training.learning_rate=0.01", "loss.memory.batches=3", "method=C1")
    assert lower.changes(lower, "then") == ""
    assert load().changes(load("distribution.devices=2"), "then") == ""
    assert lower.changes(upper, "in the run").split("; ") == [
        'method: "C2" in the run, "C1" now',
        "loss.arguments.negative_margin: 0.4 in the run, not given now",
        "loss.memory: null in the run, not given now",
        "training.learning_rate: 1e-05 in the run, 0.01 now",  # 1e-5: the default
        "loss.arguments: not given in the run, {} now",
        "loss.memory.batches: not given in the run, 3 now",
        "loss.memory.start_step: not given in the run, 1000 now",
    ]


@pytest.mark.parametrize("override", ["training.batch_size", "=3", "", "--seed 3"])
def test_override_must_have_its_form(load, override):
    with pytest.raises(ValueError, match="must be `section.key=value`"):
        load(override)
    with pytest.raises(ValueError, match=r"value of a=\[1 must be YAML"):
        load("a=[1")


def test_other_values_of_a_config():
    config = check_config(SMALL)
    changed = config.with_values(
        {"loss.arguments.negative_margin": 0.4, "loss.memory.batches": 2}
    )
    assert changed.loss.arguments == {"negative_margin": 0.4}
    assert changed.loss.memory.batches == 2
    assert config == check_config(SMALL)


# ==== Round trip ====


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["training.learning_rate=1e-5", "model.proximal_weight=2e-4"],
        ["loss.memory.batches=3", "data.train_classes=40", "data.split_seed=7"],
        # Text that looks like something else, and letters beyond ASCII.
        ["data.name=npz", "data.file='1e5'", "method='null'"],
        ["method='Größe: 3 # x'", "embedder.normalization=null"],
    ],
)
def test_dumped_config_loads_as_the_same(load, tmp_path, overrides):
    config = load(*overrides)
    path = tmp_path / "dumped.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    loaded = load_config(path)
    assert isinstance(loaded, Config)
    assert loaded == config
    assert loaded.to_yaml() == config.to_yaml()
