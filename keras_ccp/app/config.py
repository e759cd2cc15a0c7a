"""What an experiment is: its sections, their files and the published results."""

import contextlib
import difflib
import inspect
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import keras
import pydantic
import yaml

from keras_ccp import losses

_PACKAGE = Path(__file__).parent.parent
# A wheel has them inside of the package, a checkout beside it.
_PLACES = _PACKAGE / "configs", _PACKAGE.parent / "configs"
CONFIGS = next(path for path in _PLACES if path.is_dir())
_PAPER_NAMES = {"c1": "cosine_contrastive", "c2": "contrastive"}
_LOADERS = "cars196 cub200 emoji folder in_shop npz omniglot sop table"
# Their classes are divided here; those of the others are by publication.
_UNSPLIT = ("emoji", "folder", "npz", "omniglot", "table")
_BACKBONES = ["bn_inception", "efficientnet_lite0", "resnet20_v2", "small_cnn"]
_BACKBONES += [name for name in dir(keras.applications) if name[0].isupper()]
_Share = Annotated[float, pydantic.Field(gt=0, lt=1)]


# ==== Sections ====


class Section(pydantic.BaseModel):
    """Keys and values with a meaning; `**section` hands them on as arguments."""

    # Strict: "3" is no 3 and 1 is no True, so that a slip is not taken for a wish.
    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False
    )

    def keys(self):
        return type(self).model_fields

    def __getitem__(self, key):
        return getattr(self, key)


class DataConfig(Section):
    """Images, their split into classes, and how they are prepared.

    Attributes:
        name: which loader of `keras_ccp.datasets`.
        file: the file of `"npz"` and `"table"` below the data root; else the folder
            there, by default the root itself.
        split: `"mlrc"` class-disjoint folds, `"ablation"` 2/3 and 1/3 of the training
            classes, or `"conventional"`, which trains on all of them and chooses by
            MAP@R of the last quarter, trained on too.
        folds: number of folds, with `"mlrc"`.
        train_classes: share or number of classes that train, where the dataset has no
            published split.
        split_seed: shuffles the classes before, `None` takes them by id; by default 0
            where the dataset has no published split.
        size: side in pixels to which encoded images are brought.
        short_side: short side before the centre crop; default size * 256 / 227.
        augmentation: `"mlrc"` or `"conventional"` crops of encoded images, `"small"`
            for arrays, `"small_no_flip"` where mirror images are other things, or
            `"none"`.
        unreadable: `"raise"` or `"skip"`: looks at every image first; `None`: not.
        check_counts: whether the published counts of images and classes must hold.
    """

    name: Literal[tuple(_LOADERS.split())]
    file: str | None = None
    split: Literal["mlrc", "ablation", "conventional"] = "mlrc"
    folds: int = pydantic.Field(4, ge=2)
    train_classes: _Share | pydantic.PositiveInt = 0.5
    split_seed: int | None = None
    size: pydantic.PositiveInt = 227
    short_side: pydantic.PositiveInt | None = None
    augmentation: Literal["mlrc", "conventional", "small", "small_no_flip", "none"] = (
        "mlrc"
    )
    unreadable: Literal["raise", "skip"] | None = None
    check_counts: bool = True

    @pydantic.model_validator(mode="before")
    @classmethod
    def _shuffles(cls, values):
        if isinstance(values, dict) and values.get("name") in _UNSPLIT:
            return {"split_seed": 0, **values}
        return values

    @property
    def is_unsplit(self) -> bool:
        """Whether classes to train and to test are divided here."""
        return self.name in _UNSPLIT

    @property
    def title(self) -> str:
        """What the data are called: their file, or their kind."""
        return Path(self.file).stem if self.file else self.name

    @property
    def division(self) -> str:
        """How classes are divided into those to train and to test."""
        if not self.is_unsplit:
            return "published split"
        by = "id" if self.split_seed is None else f"seed {self.split_seed}"
        return f"classes split by {by}"

    @property
    def num_models(self) -> int:
        """Models of one repetition."""
        return self.folds if self.split == "mlrc" else 1


class EmbedderConfig(Section):
    """The network: its backbone and the arguments of `build_embedder`.

    Attributes:
        backbone: `"bn_inception"`, `"efficientnet_lite0"`, `"resnet20_v2"`,
            `"small_cnn"` or the name of a model in `keras.applications`.
        weights: file of weights below the data root, `"imagenet"` where the backbone
            brings them, or `None` for random ones.
        frozen_statistics: whether batch-norm statistics stay as they are.
        embedding_dim: width of an embedding.
        pooling: as for `build_embedder`.
        normalization: as for `build_embedder` and `CCPModel`.
    """

    backbone: Literal[tuple(_BACKBONES)] = "bn_inception"
    weights: str | None = None
    frozen_statistics: bool = True
    embedding_dim: pydantic.PositiveInt = 128
    pooling: Literal["average", "max", "average_max", "flatten"] = "average"
    normalization: Literal["lipschitz", "l2"] | None = "lipschitz"


class MemoryConfig(Section):
    """Cross-batch memory.

    Attributes:
        batches: how many past batches it holds.
        start_step: steps before it counts.
    """

    batches: pydantic.PositiveInt
    start_step: pydantic.NonNegativeInt = 1000


class LossConfig(Section):
    """The pair loss.

    Attributes:
        name: name for `losses.get`.
        arguments: arguments of that loss.
        memory: cross-batch memory around it, or `None`.
    """

    name: str
    arguments: dict[str, Any] = {}
    memory: MemoryConfig | None = None

    @pydantic.field_validator("name")
    @classmethod
    def _exists(cls, name):
        losses.get(name)
        return name

    @pydantic.field_validator("arguments")
    @classmethod
    def _are_valid(cls, arguments, info):
        name = info.data.get("name", "contrastive")
        try:
            losses.get(name, **arguments)
        except TypeError as error:
            valid = inspect.signature(type(losses.get(name))).parameters
            raise ValueError(f"{error}; {name} has {', '.join(valid)}") from None
        return arguments


class ModelConfig(Section):
    """Arguments of `CCPModel`.

    Attributes:
        proxies_per_class: 0 for pairs inside the batch.
        proximal_weight: lambda.
        in_batch_weight: weight of the pairs inside the batch, beside proxies.
        references: `"proxies"` or `"samples"`.
        proxy_learning_rate_multiplier: of the proxies' updates.
        weight_decay: L2, added to the gradients as in the published runs.
    """

    proxies_per_class: pydantic.NonNegativeInt = 0
    proximal_weight: pydantic.NonNegativeFloat = 2e-4
    in_batch_weight: pydantic.NonNegativeFloat = 0.0
    references: Literal["proxies", "samples"] = "proxies"
    proxy_learning_rate_multiplier: pydantic.NonNegativeFloat = 1.0
    weight_decay: pydantic.NonNegativeFloat = 1e-4


class CallbackConfig(Section):
    """Arguments of `CCPCallback`.

    Attributes:
        pool_size: images drawn of each class at a projection.
        patience: evaluations without improvement that end a proxy problem.
        min_delta: MAP@R must rise by more than this to count.
        stop_patience: evaluations without improvement that end the run.
        max_projections: 0 for proxies that stay, `None` for no limit.
        restore_on_projection: goes on from the best weights of the ended problem.
    """

    pool_size: pydantic.PositiveInt = 12
    patience: pydantic.PositiveInt = 3
    min_delta: pydantic.NonNegativeFloat = 1e-5
    stop_patience: pydantic.PositiveInt = 60
    max_projections: pydantic.NonNegativeInt | None = None
    restore_on_projection: bool = True


class TrainingConfig(Section):
    """Batches, optimiser and evaluations.

    Attributes:
        batch_size: images in a batch.
        samples_per_class: images of each of its classes.
        learning_rate: of Adam.
        schedule: `"constant"` or `"cosine"` to 2 % over `max_evaluations`.
        beta_1: of Adam.
        beta_2: of Adam.
        warm_up_epochs: evaluation intervals that train the head alone.
        steps_per_evaluation: steps from one evaluation to the next.
        max_evaluations: evaluations at most.
        policy: Keras dtype policy.
        jit_compile: whether steps are compiled by XLA.
    """

    batch_size: pydantic.PositiveInt = 32
    samples_per_class: pydantic.PositiveInt = 4
    learning_rate: pydantic.PositiveFloat = 1e-5
    schedule: Literal["constant", "cosine"] = "constant"
    beta_1: float = pydantic.Field(0.9, ge=0, lt=1)
    beta_2: float = pydantic.Field(0.99, ge=0, lt=1)
    warm_up_epochs: pydantic.NonNegativeInt = 0
    steps_per_evaluation: pydantic.PositiveInt = 25
    max_evaluations: pydantic.PositiveInt = 1000
    policy: Literal["float32", "mixed_float16", "mixed_bfloat16"] = "float32"
    jit_compile: bool = False

    @pydantic.model_validator(mode="after")
    def _divides(self):
        if self.batch_size % self.samples_per_class:
            raise ValueError(
                f"`batch_size` {self.batch_size} must be a multiple of "
                f"`samples_per_class` {self.samples_per_class}"
            )
        return self


class DistributionConfig(Section):
    """Devices and machines.

    Attributes:
        strategy: of TensorFlow; `"multi_worker"` takes machines from `TF_CONFIG`.
            A number of devices makes `"mirrored"` of `"none"`.
        devices: number of each machine's, `None` for all GPUs.
    """

    strategy: Literal["none", "mirrored", "multi_worker"] = "none"
    devices: pydantic.PositiveInt | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_devices(cls, values):
        if isinstance(values, dict) and values.get("devices"):
            if values.get("strategy", "none") == "none":
                return {**values, "strategy": "mirrored"}
        return values


class Config(Section):
    """A whole experiment. Sections hold the arguments of what they are named after.

    Attributes:
        method: its name in tables, such as `"C2-CCP-L"`.
        data: images and splits.
        embedder: the network.
        loss: the pair loss.
        model: proxies and lambda.
        callback: when a proxy problem and the run end.
        training: batches, optimiser and evaluations.
        distribution: devices and machines.
        seed: of everything random.
    """

    method: str
    data: DataConfig
    embedder: EmbedderConfig = EmbedderConfig()
    loss: LossConfig
    model: ModelConfig = ModelConfig()
    callback: CallbackConfig = CallbackConfig()
    training: TrainingConfig = TrainingConfig()
    distribution: DistributionConfig = DistributionConfig()
    seed: pydantic.NonNegativeInt = 0

    @pydantic.model_validator(mode="after")
    def _has_an_effect(self):
        if not self.model.proxies_per_class:
            return self
        if self.loss.memory and not self.model.in_batch_weight:
            raise ValueError(
                "`loss.memory` is compared with the batch, not with proxies: raise "
                "`model.in_batch_weight` above 0, or leave it out"
            )
        if self.callback.pool_size < self.model.proxies_per_class:
            raise ValueError(
                "`callback.pool_size` must be at least `model.proxies_per_class`, "
                f"{self.model.proxies_per_class}, which are chosen from it"
            )
        return self

    def with_values(self, values: dict[str, Any]) -> "Config":
        """The same experiment with other values, by `"section.key"`."""
        merged = self.model_dump()
        for key, value in values.items():
            merged = _merge(merged, _nested(key, value))
        return check_config(merged)

    def to_yaml(self) -> str:
        """YAML of all values, which `load_config` reads."""
        return yaml.dump(self.model_dump(), Dumper=_Dumper, sort_keys=False)

    def changes(self, now: "Config", where: str) -> str:
        """`"section.key: value `where`, value now; ..."` of what differs, or `""`.

        The devices are not compared: on others it is the same experiment.
        """
        old, new = (
            {key: json.dumps(value) for key, value in _flat(part.model_dump())}
            for part in (self, now)
        )
        return "; ".join(
            f"{key}: {old.get(key, 'not given')} {where}, "
            f"{new.get(key, 'not given')} now"
            for key in {**old, **new}
            if old.get(key) != new.get(key) and not key.startswith("distribution.")
        )


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _keys(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from _keys(kind, f"{prefix}{name}.")


# ==== Reading ====


class _Loader(yaml.SafeLoader):
    """Plain values only; what is there twice, or stands for something else, is not."""

    def compose_node(self, parent, index):
        # A few hundred bytes of aliases of aliases take gigabytes.
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("write the value out where `*` refers to it")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in getattr(node, "value", ())]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"`{key}` is there twice{node.start_mark}")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for a number."""


for _class in (_Loader, _Dumper):
    # 1e-5 is a number to everybody but YAML 1.1, which asks for a point: 1.0e-5.
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def _parse(text: str | bytes, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{source} must be YAML\n{error}") from None


class _File(pydantic.BaseModel):
    """A file's own values, what they are laid over, and what goes on top of them."""

    model_config = pydantic.ConfigDict(extra="allow")
    base: str | list[str] = []
    # Values for the company of a file of that name, such as the dataset's.
    variants: dict[str, dict[str, Any]] = pydantic.Field({}, alias="with")


def _find(name: str, folder: Path, origin: str = "") -> Path:
    """The file of a path, or of the name of one in `configs/`."""
    known = {path.stem: path for path in sorted(CONFIGS.glob("*/*.yaml"))}
    path = folder / name
    for place in (path, CONFIGS / f"{name}.yaml"):
        if place.is_file():
            return place.resolve()
    # The paper's own names of its losses, C1 and C2.
    spelled = "_".join(_PAPER_NAMES.get(part, part) for part in name.split("_"))
    if spelled in known:
        return known[spelled].resolve()
    hint = "Give a YAML file, or a dataset and a method: cub200 contrastive_ccp"
    names = {stem: stem for stem, p in known.items() if p.parent.name != "base"}
    names |= {p.stem: p.name for p in path.parent.glob("*.yaml") if p.is_file()}
    if path.is_dir():
        data = shlex.quote(str(path))
        hint = f"For images in a folder: folder contrastive_ccp --data {data}"
    elif near := difflib.get_close_matches(Path(spelled).stem, names, n=1):
        hint = f"Did you mean `{names[near[0]]}`?"
    raise FileNotFoundError(f"There is no configuration {path}{origin}\n{hint}")


def _read(path: Path, above: tuple[Path, ...] = ()) -> list[tuple[str, _File]]:
    """A file after all that it is laid over, each with its name."""
    if path in above:
        raise ValueError(f"{path} is its own `base`\nTake it out of one of them")
    with _told(path):
        file = _File.model_validate(_parse(path.read_bytes(), str(path)))
    bases = [file.base] if isinstance(file.base, str) else file.base
    origin = f", a base of {path}"
    found = [_find(base, path.parent, origin) for base in bases]
    files = [file for base in found for file in _read(base, (*above, path))]
    return [*files, (path.stem, file)]


def _merge(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Lays nested values over others; `{}` replaces what it is laid over."""
    merged = dict(lower)
    if "name" in lower and upper.get("name", lower["name"]) != lower["name"]:
        merged.pop("arguments", None)  # those of another loss
    for key, value in upper.items():
        if value and isinstance(value, dict) and isinstance(merged.get(key), dict):
            value = _merge(merged[key], value)
        merged[key] = value
    return merged


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def load_config(
    parts: str | os.PathLike | Sequence[str | os.PathLike],
    overrides: Sequence[str] = (),
) -> Config:
    """Reads a configuration.

    It consists of parts, each laid over those before: files, or names of files in
    `configs/`, such as a dataset and a method. A file may itself begin with other parts
    by `base:`, one or a list, relative to it or by name. Under `with:` it may have
    values that hold beside a file of that name only. Sections are merged, other values
    replaced; `{}` replaces what it is laid over. The arguments of a loss go with its
    name: they do not carry over to another one.

    Args:
        parts: YAML file or name, or a list of them.
        overrides: `"section.key=value"`, the value in YAML; laid over the parts in
            their order, but `loss.name` first.

    Returns:
        The validated configuration.

    Raises:
        FileNotFoundError: If there is no such file or name.
        ValueError: If a file is not YAML, is its own base, or a key or value is not
            valid; the message names the nearest valid key.

    Example:
        >>> load_config(["cub200", "contrastive_ccp"], ["seed=1"]).callback.pool_size
        12
    """
    parts = [parts] if isinstance(parts, str | os.PathLike) else parts
    paths = [_find(os.fspath(part), Path()) for part in parts]
    files = [file for path in paths for file in _read(path)]
    names, merged = {name for name, _ in files}, {}
    for _, file in files:
        merged = _merge(merged, file.model_extra)
        for name, values in file.variants.items():
            merged = _merge(merged, values if name in names else {})
    # The name first, since it clears the arguments of another.
    for override in sorted(overrides, key=lambda o: not o.startswith("loss.name=")):
        merged = _merge(merged, _nested(*_override(override)))
    return check_config(merged, " ".join(map(str, parts)))


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(
            f"An override must be `section.key=value`. Received: {text!r}\n"
            "Such as: --set training.batch_size=64"
        )
    return key, _parse(value, f"The value of {text}")


def load_grid(texts: Sequence[str]) -> dict[str, list]:
    """Values to try, of `"section.key=value,value,..."`."""
    pairs = (text.partition("=") for text in texts)
    return dict(_override(f"{key}=[{values}]") for key, _, values in pairs)


def check_config(values: dict[str, Any], source: str = "config") -> Config:
    """Validates the values of a configuration.

    Args:
        values: nested dict, as read from YAML.
        source: where they come from, for messages.

    Returns:
        The validated configuration.

    Raises:
        ValueError: If a key or value is not valid.
    """
    with _told(source):
        return Config.model_validate(values)


@contextlib.contextmanager
def _told(source: str) -> Iterator[None]:
    """Says what pydantic finds, a line for each place."""
    try:
        yield
    except pydantic.ValidationError as error:
        lines = {}
        for problem in error.errors():
            # Of the members of a union the first tells it.
            lines.setdefault(*_describe(problem))
        text = "\n".join(f"{place}: {line}" for place, line in lines.items())
        raise ValueError(f"{source} is not valid\n{text.removeprefix(': ')}") from None


def _describe(problem: dict[str, Any]) -> tuple[str, str]:
    """Key and line of what pydantic found, with the nearest valid name."""
    place, valid = "", list(_keys())
    for part in problem["loc"]:
        if place in valid and not any(key.startswith(f"{place}.") for key in valid):
            break  # the rest names members of a union
        place = f"{place}.{part}" if place else str(part)
    line, given = problem["msg"].removeprefix("Value error, "), problem["input"]
    if problem["type"] == "extra_forbidden":
        near = _nearest(place, valid)
    else:
        names = [n for n in re.findall(r"""['"](\w+)['"]""", line) if n != given]
        near = difflib.get_close_matches(str(given), names, n=1)
        if problem["type"] != "value_error":
            line += "" if isinstance(given, dict) else f". Received: {given!r}"
    return place, line + (f"; did you mean `{near[0]}`?" if near else "")


def _nearest(place: str, valid: Sequence[str]) -> list[str]:
    """The key most like a wrong one, of its own section if there is one."""
    section, _, name = place.rpartition(".")
    own = [key for key in valid if key.rpartition(".")[0] == section]
    for keys in (own, valid):
        names = {key.rpartition(".")[2]: key for key in keys}
        if near := difflib.get_close_matches(name, names, n=1, cutoff=0.5):
            return [names[near[0]]]
    return []


# ==== Published results ====


def published_row(dataset: str, method: str) -> dict[str, list[float]] | None:
    """Published results of a method by the MLRC protocol.

    Args:
        dataset: `data.name` of a configuration.
        method: name of the row, such as `"C2-CCP-L"`.

    Returns:
        P@1, P@R and MAP@R in percent: `"512D"` of the concatenated embeddings and
        `"128D"`, the mean of the single models. `None` if no such row is published.
    """
    path = Path(__file__).with_name("published.yaml")
    row = _parse(path.read_bytes(), str(path)).get(dataset, {}).get(method)
    return row and {"512D": row[:3], "128D": row[3:]}
