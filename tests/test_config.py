import re

import pytest
import yaml

from keras_ccp.app.config import (
    Config,
    changed_values,
    check_config,
    dump_config,
    load_config,
)
from keras_ccp.app.yaml_files import merge, parse_override, read_yaml

SMALL = {"method": "C2", "data": {"name": "emoji"}, "loss": {"name": "contrastive"}}


@pytest.fixture
def write(tmp_path):
    """Writes `{file name: text}`; returns the folder."""

    def write_files(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        return tmp_path

    return write_files


def with_values(*overrides):
    values = SMALL
    for override in overrides:
        values = merge(values, parse_override(override))
    return values


def check(*overrides):
    return check_config(with_values(*overrides))


# ==== Defaults and values ====


def test_small_config_has_the_defaults_of_its_sections():
    config = check_config(SMALL)
    assert config.training.batch_size == 32
    assert config.embedder.backbone == "bn_inception"
    assert config.loss.memory is None
    assert config.data.check_counts is True


def test_values_keep_their_types():
    config = check("training.learning_rate=1", "data.train_classes=40")
    assert type(config.training.learning_rate) is float
    assert type(config.data.train_classes) is int
    assert type(check("data.train_classes=0.5").data.train_classes) is float


def test_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        check_config(SMALL).seed = 3


# ==== Unknown keys and wrong types ====


@pytest.mark.parametrize(
    ("override", "place", "near"),
    [
        ("sed=1", "sed", "seed"),
        ("training.batchsize=64", "training.batchsize", "batch_size"),
        ("training.learningrate=1", "training.learningrate", "learning_rate"),
        ("proxies.poolsize=3", "proxies.poolsize", "pool_size"),
        # Behind a section that may be null.
        ("loss.memory.batchs=3", "loss.memory.batchs", "batches"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(override, place, near):
    message = f"{place}: there is no such key; did you mean `{near}`?"
    with pytest.raises(ValueError, match=f"^config: .*{re.escape(message)}"):
        check(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.batch_size='64'", "training.batch_size: .*integer.*'64'"),
        ("training.batch_size=64.0", "training.batch_size: .*integer.*64.0"),
        ("training.batch_size=true", "training.batch_size: .*integer.*True"),
        ("training.batch_size=0", "training.batch_size: .*greater.*0"),
        ("training.learning_rate=fast", "training.learning_rate: .*number.*'fast'"),
        ("training.learning_rate=.nan", "training.learning_rate: .*nan"),
        ("training.learning_rate=.inf", "training.learning_rate: .*finite.*inf"),
        ("training.learning_rate=-1e-5", "training.learning_rate: .*greater"),
        ("training.beta_1=1.0", "training.beta_1: .*less than 1"),
        ("training.jit_compile=1", "training.jit_compile: .*boolean.*1"),
        ("data.check_counts=yes please", "data.check_counts: .*boolean"),
        ("data.name=cub", "data.name: .*'cub'; did you mean `cub200`"),
        ("data.split=mlcr", "data.split: .*'mlcr'; did you mean `mlrc`"),
        ("data.folds=1", "data.folds: .*greater than or equal to 2"),
        ("data.train_classes=half", "data.train_classes: .*number.*'half'"),
        ("data.train_classes=true", "data.train_classes: .*number.*True"),
        ("data.train_classes=1.0", "data: `train_classes` must.*1.0"),
        ("data.train_classes=0", "data: `train_classes` must.*0"),
        ("data.short_side=100", "data: `short_side` must.*short_side=100, size=227"),
        ("data.file=a.npz", "data: `file` must be null.*'a.npz'"),
        ("data.name=npz", "data: `file` must name the npz file"),
        ("embedder.normalization=l3", "embedder.normalization: .*did you mean `l2`"),
        ("embedder.backbone=resnet50", "embedder: .*did you mean `ResNet50`"),
        ("embedder.backbone=bninception", "embedder: .*did you mean `bn_inception`"),
        ("embedder.backbone=3", "embedder.backbone: .*string.*3"),
        ("loss.memory=25", "loss.memory: .*MemoryConfig.*25"),
        ("loss.memory.batches=0", "loss.memory.batches: .*greater"),
        ("loss.arguments=[0.5]", r"loss.arguments: .*dictionary.*\[0.5\]"),
        ("proxies.switching=true", "proxies: `per_class`.*--set proxies.per_class=4"),
        # Nothing is near: no guess, but what there is.
        ("proxies.xyz=1", "proxies.xyz: there is no such key; there are per_class, sw"),
        ("data.split=xyz", "data.split: .*Received: 'xyz'$"),
        ("embedder.backbone=xyz", "embedder: .*bn_inception, .*backbone='xyz'$"),
        ("loss.arguments.xyz=1", "loss: arguments.xyz: .*; there are positive_margin"),
        ("proxies.per_class=13", "proxies: `pool_size` must.*=12, per_class=13"),
        ("seed=-1", "seed: .*greater"),
        ("seed=null", "seed: .*integer.*None"),
        ("method=2024-01-01", "method: .*string"),
        # A section that is there and empty is a slip.
        ("training=", "training: .*TrainingConfig.*None"),
        ("training=fast", "training: .*TrainingConfig.*'fast'"),
    ],
)
def test_wrong_values_are_refused(override, message):
    with pytest.raises(ValueError, match=f"^config: {message}"):
        check(override)


def test_missing_keys_are_named():
    with pytest.raises(ValueError, match="method: this key must be given; data: this"):
        check_config({"loss": {"name": "triplet"}})
    with pytest.raises(ValueError, match="loss.name: this key must be given$"):
        check_config({**SMALL, "loss": {}})


def test_every_problem_is_named_once():
    with pytest.raises(ValueError) as caught:
        check("seed=x", "data.train_classes=x", "training.bach_size=1")
    lines = str(caught.value).removeprefix("config: ").split("; ")
    assert [line.split(":")[0] for line in lines if ":" in line] == [
        "data.train_classes",
        "training.bach_size",
        "seed",
    ]


def test_batches_hold_whole_classes():
    assert check("training.batch_size=12").training.batch_size == 12
    with pytest.raises(ValueError, match="batch_size=30, samples_per_class=4"):
        check("training.batch_size=30")


def test_memory_must_be_of_use():
    memory = "loss.memory.batches=3"
    proxies = "proxies.per_class=2"
    assert check(memory).loss.memory.start_step == 1000
    assert check(memory, proxies, "proxies.in_batch_weight=0.1").loss.memory
    with pytest.raises(ValueError, match="`proxies.in_batch_weight` must be above 0"):
        check(memory, proxies)


def test_weights_of_networks_without_any():
    random = "embedder.backbone=small_cnn"
    assert check(random).embedder.weights is None
    with pytest.raises(ValueError, match="`weights` must be null: small_cnn"):
        check(random, "embedder.weights=imagenet")


# ==== Loss arguments ====


def test_loss_arguments():
    assert check("loss.arguments.positive_margin=0.1").loss.arguments == {
        "positive_margin": 0.1
    }
    message = (
        "config: loss: arguments.margn: there is no such argument of triplet; did you "
        "mean `margin`?"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check("loss.name=triplet", "loss.arguments.margn=0.1")
    message = "config: loss: `loss` must be one of .*; did you mean `triplet`"
    with pytest.raises(ValueError, match=message):
        check("loss.name=tripplet")
    with pytest.raises(ValueError, match="config: loss: .*Received: loss='xyz'$"):
        check("loss.name=xyz")
    with pytest.raises(ValueError, match="config: loss: `margin` must be a number"):
        check("loss.name=triplet", "loss.arguments.margin=wide")
    with pytest.raises(ValueError, match="config: loss: `negative_margin` must be"):
        check("loss.arguments.negative_margin=-1")


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
    write(top="base: base/middle.yaml\nc: 3")
    (tmp_path / "base" / "middle.yaml").write_text("base: lowest.yaml\nb: 2\nc: 2")
    (tmp_path / "base" / "lowest.yaml").write_text("a: 1\nb: 1")
    assert read_yaml(tmp_path / "top.yaml") == {"a": 1, "b": 2, "c": 3}


def test_one_base_may_be_reached_twice(write):
    folder = write(
        lowest="a: 1\nb: 1",
        left="base: lowest.yaml\nb: 2",
        right="base: lowest.yaml",
        top="base: [left.yaml, right.yaml]",
    )
    # The right one brings the lowest's value back: later ones override.
    assert read_yaml(folder / "top.yaml") == {"a": 1, "b": 1}


def test_base_cycle_is_refused(write):
    folder = write(a="base: b.yaml", b="base: a.yaml", c="base: c.yaml")
    for name in "ac":
        with pytest.raises(ValueError, match=f"lead back to the file.*{name}.yaml"):
            read_yaml(folder / f"{name}.yaml")


@pytest.mark.parametrize("base", ["null", "3", "{a: b}", "[a.yaml, 3]"])
def test_base_must_be_paths(write, base):
    folder = write(a="x: 1", top=f"base: {base}")
    with pytest.raises(ValueError, match="must be a path or a list of them"):
        read_yaml(folder / "top.yaml")


def test_missing_files_are_named(write):
    folder = write(top="base: midle.yaml", middle="a: 1")
    with pytest.raises(FileNotFoundError, match="topp.yaml; did you mean `top.yaml`"):
        load_config(folder / "topp.yaml")
    with pytest.raises(
        FileNotFoundError,
        match="midle.yaml, a base of .*top.yaml; did you mean `middle.yaml`",
    ):
        load_config(folder / "top.yaml")
    # No name is near; nor is the name itself one, that of a link to nothing.
    (folder / "gone.yaml").symlink_to("gone.yaml.txt")
    for name in ("emoji.yaml", "gone.yaml.txt"):
        with pytest.raises(FileNotFoundError, match=f"{name}$"):
            load_config(folder / name)
    with pytest.raises(FileNotFoundError, match="x.yaml$"):
        load_config(folder / "no" / "x.yaml")


def test_folder_is_no_file(write, tmp_path):
    (tmp_path / "my photos").mkdir()
    command = "configs/folder_c2_ccp.yaml --data '.*my photos'$"
    with pytest.raises(IsADirectoryError, match=f"must be a YAML file.*{command}"):
        load_config(tmp_path / "my photos")
    folder = write(top="base: my photos")
    with pytest.raises(IsADirectoryError, match="a base of .*top.yaml: it is a folder"):
        load_config(folder / "top.yaml")


@pytest.mark.parametrize("text", ["", "- a\n- b", "text", "3"])
def test_file_must_be_a_mapping(write, text):
    with pytest.raises(ValueError, match="top.yaml must hold `key: value` pairs"):
        load_config(write(top=text) / "top.yaml")


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\ta: 1", "a: @"])
def test_file_must_be_yaml(write, text):
    with pytest.raises(ValueError, match="top.yaml must be YAML"):
        load_config(write(top=text) / "top.yaml")


def test_file_must_be_text(tmp_path):
    path = tmp_path / "top.yaml"
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ValueError, match="top.yaml must be YAML"):
        load_config(path)


def test_key_that_is_there_twice_is_refused(write):
    folder = write(top="a: {b: 1, c: 2, b: 3}", fine="a: {b: 1}\nc: {b: 1}")
    with pytest.raises(ValueError, match="`b` is there twice"):
        read_yaml(folder / "top.yaml")
    assert read_yaml(folder / "fine.yaml") == {"a": {"b": 1}, "c": {"b": 1}}


def test_message_names_the_file(write):
    text = yaml.safe_dump({**SMALL, "sed": 1})
    with pytest.raises(ValueError, match=r"top\.yaml: sed: there is no such key"):
        load_config(write(top=text) / "top.yaml")


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


# ==== Numbers ====


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-2e+3", -2000.0),
        ("1.5e-3", 1.5e-3),
        ("1.e3", 1000.0),
        ("2e-4", 2e-4),
        (".5", 0.5),
        ("3", 3),
        ("1e5x", "1e5x"),
        ("'1e5'", "1e5"),
    ],
)
def test_numbers_are_what_they_look_like(text, value):
    read = parse_override(f"a={text}")["a"]
    assert read == value and type(read) is type(value)


def test_other_users_of_yaml_are_not_touched():
    assert yaml.safe_load("1e-5") == "1e-5"


# ==== Overrides ====


def test_overrides(write):
    path = write(top=yaml.safe_dump(SMALL)) / "top.yaml"
    config = load_config(
        path,
        [
            "training.batch_size=64",
            "training.learning_rate=1e-4",
            "loss.memory.batches=3",
            "method=a=b",
            "loss.arguments={negative_margin: 0.4}",
            "training.batch_size=16",  # the last one counts
        ],
    )
    assert config.training.batch_size == 16
    assert config.training.learning_rate == 1e-4
    assert config.loss.memory.batches == 3
    assert config.method == "a=b"
    assert config.loss.arguments == {"negative_margin": 0.4}
    null = load_config(path, ["loss.memory.batches=3", "loss.memory=null"])
    assert null.loss.memory is None


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


def test_changed_values():
    lower = check(
        "loss.arguments.negative_margin=0.4", "distribution.strategy=mirrored"
    )
    upper = check("training.learning_rate=0.01", "loss.memory.batches=3", "method=C1")
    assert changed_values(lower, lower, "then") == ""
    assert (
        changed_values(check(), check("distribution.strategy=mirrored"), "then") == ""
    )
    assert changed_values(lower, upper, "in the run").split("; ") == [
        'method: "C2" in the run, "C1" now',
        "loss.arguments.negative_margin: 0.4 in the run, not given now",
        'loss.memory: null in the run, {"batches": 3, "start_step": 1000} now',
        "training.learning_rate: 1e-05 in the run, 0.01 now",  # 1e-5: the default
    ]


@pytest.mark.parametrize("override", ["training.batch_size", "=3", "", "--seed 3"])
def test_override_must_have_its_form(override):
    with pytest.raises(ValueError, match="must be `section.key=value`"):
        parse_override(override)


def test_override_must_be_yaml():
    with pytest.raises(ValueError, match="must be YAML.*a=\\[1"):
        parse_override("a=[1")


def test_merge_leaves_its_arguments_alone():
    lower, upper = {"a": {"b": 1}, "c": 1}, {"a": {"d": 2}, "c": {"e": 3}}
    assert merge(lower, upper) == {"a": {"b": 1, "d": 2}, "c": {"e": 3}}
    assert lower == {"a": {"b": 1}, "c": 1} and upper == {"a": {"d": 2}, "c": {"e": 3}}


# ==== Round trip ====


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["training.learning_rate=1e-5", "proxies.proximal_weight=2e-4"],
        ["loss.memory.batches=3", "data.train_classes=40", "data.split_seed=7"],
        # Text that looks like something else, and letters beyond ASCII.
        ["data.name=npz", "data.file='1e5'", "method='null'"],
        ["method='Größe: 3 # x'", "embedder.normalization=null"],
    ],
)
def test_dumped_config_loads_as_the_same(tmp_path, overrides):
    config = check(*overrides)
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    loaded = load_config(path)
    assert isinstance(loaded, Config)
    assert loaded == config
    assert dump_config(loaded) == dump_config(config)
