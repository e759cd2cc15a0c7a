"""What an experiment is: validated configurations and how they are read."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
import yaml

from keras_ccp import losses
from keras_ccp.yaml_files import merge, parse_override, read_yaml


class _Section(pydantic.BaseModel):
    # Strict: "3" is no 3 and 1 is no True, so that a slip is not taken for a wish.
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


class DataConfig(_Section):
    """Images, their split into classes, and how they are prepared.

    Attributes:
        name: which loader of `keras_ccp.datasets`.
        file: file or folder below the data root, for `"folder"`, `"npz"`, `"table"`.
        split: `"mlrc"` class-disjoint folds, `"ablation"` 2/3 and 1/3 of the training
            classes, or `"conventional"`, which trains on all of them and chooses by
            MAP@R of the last quarter, trained on too.
        folds: number of folds, with `"mlrc"`.
        train_classes: share or number of classes that train, where the dataset has no
            published split.
        split_seed: shuffles the classes before, `None` takes them by id.
        size: side in pixels to which encoded images are brought.
        short_side: short side before the centre crop; default size * 256 / 227.
        augmentation: `"mlrc"` or `"conventional"` crops of encoded images, `"small"`
            for arrays, or `"none"`.
        unreadable: `"raise"` or `"skip"`: looks at every image first; `None` trusts
            them.
        check_counts: whether the published counts of images and classes must hold.
    """

    name: Literal[
        "cars196",
        "cub200",
        "emoji",
        "folder",
        "in_shop",
        "npz",
        "omniglot",
        "sop",
        "table",
    ]
    file: str | None = None
    split: Literal["mlrc", "ablation", "conventional"] = "mlrc"
    folds: int = pydantic.Field(4, ge=2)
    train_classes: float | int = 0.5
    split_seed: int | None = None
    size: int = pydantic.Field(227, ge=1)
    short_side: int | None = pydantic.Field(None, ge=1)
    augmentation: Literal["mlrc", "conventional", "small", "none"] = "mlrc"
    unreadable: Literal["raise", "skip"] | None = None
    check_counts: bool = True


class EmbedderConfig(_Section):
    """The network.

    Attributes:
        backbone: `"bn_inception"`, `"efficientnet_lite0"`, `"resnet20_v2"`,
            `"small_cnn"` or the name of a model in `keras.applications`.
        weights: file of weights, `"imagenet"` where the backbone brings them, or
            `None` for random ones.
        frozen_statistics: whether batch-norm statistics stay as they are.
        embedding_dim: width of an embedding.
        pooling: as for `build_embedder`.
        normalization: as for `build_embedder`.
    """

    backbone: str = "bn_inception"
    weights: str | None = None
    frozen_statistics: bool = True
    embedding_dim: int = pydantic.Field(128, ge=1)
    pooling: Literal["average", "max", "average_max", "flatten"] = "average"
    normalization: Literal["lipschitz", "l2"] | None = "lipschitz"


class MemoryConfig(_Section):
    """Cross-batch memory.

    Attributes:
        batches: how many past batches it holds.
        start_step: steps before it counts.
    """

    batches: int = pydantic.Field(ge=1)
    start_step: int = pydantic.Field(1000, ge=0)


class LossConfig(_Section):
    """The pair loss.

    Attributes:
        name: name for `losses.get`.
        arguments: arguments of that loss.
        memory: cross-batch memory around it, or `None`.
    """

    name: str
    arguments: dict[str, Any] = {}
    memory: MemoryConfig | None = None


class ProxyConfig(_Section):
    """Proxies and CCP.

    Attributes:
        per_class: proxies of each class, 0 for pairs inside the batch.
        switching: whether projections switch (CCP).
        pool_size: images drawn of each class at a switch.
        patience: evaluations without improvement that end a problem.
        proximal_weight: lambda.
        in_batch_weight: weight of the pairs inside the batch.
        references: `"proxies"` or `"samples"`.
        restore_on_switch: as for `CCPCallback`.
        learning_rate_multiplier: of the proxies' updates.
    """

    per_class: int = pydantic.Field(0, ge=0)
    switching: bool = False
    pool_size: int = pydantic.Field(12, ge=1)
    patience: int = pydantic.Field(3, ge=1)
    proximal_weight: float = pydantic.Field(2e-4, ge=0)
    in_batch_weight: float = pydantic.Field(0.0, ge=0)
    references: Literal["proxies", "samples"] = "proxies"
    restore_on_switch: bool = True
    learning_rate_multiplier: float = pydantic.Field(1.0, ge=0)


class TrainingConfig(_Section):
    """Batches, optimiser and evaluations.

    Attributes:
        batch_size: images in a batch.
        samples_per_class: images of each of its classes.
        learning_rate: of Adam.
        schedule: `"constant"` or `"cosine"` to 2 % over `max_evaluations`.
        weight_decay: L2, added to the gradients as in the published runs.
        beta_1: of Adam.
        beta_2: of Adam.
        warm_up_epochs: evaluation intervals that train the head alone.
        steps_per_evaluation: steps from one evaluation to the next.
        max_evaluations: evaluations at most.
        stop_patience: evaluations without improvement that end the run.
        policy: Keras dtype policy.
        jit_compile: whether steps are compiled by XLA.
    """

    batch_size: int = pydantic.Field(32, ge=1)
    samples_per_class: int = pydantic.Field(4, ge=1)
    learning_rate: float = pydantic.Field(1e-5, gt=0)
    schedule: Literal["constant", "cosine"] = "constant"
    weight_decay: float = pydantic.Field(1e-4, ge=0)
    beta_1: float = pydantic.Field(0.9, ge=0, lt=1)
    beta_2: float = pydantic.Field(0.99, ge=0, lt=1)
    warm_up_epochs: int = pydantic.Field(0, ge=0)
    steps_per_evaluation: int = pydantic.Field(25, ge=1)
    max_evaluations: int = pydantic.Field(1000, ge=1)
    stop_patience: int = pydantic.Field(60, ge=1)
    policy: Literal["float32", "mixed_float16", "mixed_bfloat16"] = "float32"
    jit_compile: bool = False

    @pydantic.model_validator(mode="after")
    def _divides(self) -> "TrainingConfig":
        if self.batch_size % self.samples_per_class:
            raise ValueError(
                "`batch_size` must be a multiple of `samples_per_class`. Received: "
                f"batch_size={self.batch_size}, "
                f"samples_per_class={self.samples_per_class}"
            )
        return self


class Config(_Section):
    """A whole experiment.

    Attributes:
        method: its name in tables, such as `"C2-CCP-L"`.
        data: images and splits.
        embedder: the network.
        loss: the pair loss.
        proxies: proxies and CCP.
        training: batches, optimiser and evaluations.
        seed: of everything random.
    """

    method: str
    data: DataConfig
    embedder: EmbedderConfig = EmbedderConfig()
    loss: LossConfig
    proxies: ProxyConfig = ProxyConfig()
    training: TrainingConfig = TrainingConfig()
    seed: int = pydantic.Field(0, ge=0)


def load_config(path: str | os.PathLike, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration.

    A file may start from others by `base:`, one path or a list of them relative to the
    file; later ones override earlier ones, and the file overrides them all. Sections
    are merged, other values replaced.

    Args:
        path: YAML file.
        overrides: `"section.key=value"`, the value in YAML.

    Returns:
        The validated configuration.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a file is no YAML mapping, names itself as its base, or a key or
            value is not valid; the message names the nearest valid key.
    """
    values = read_yaml(Path(path))
    for override in overrides:
        values = merge(values, parse_override(override))
    return check_config(values, str(path))


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
    try:
        config = Config.model_validate(values)
    except pydantic.ValidationError as error:
        lines = [_describe(problem) for problem in error.errors()]
        raise ValueError(f"{source}: " + "; ".join(lines)) from None
    _check_loss(config, source)
    return config


def dump_config(config: Config) -> str:
    """YAML of the resolved configuration, which `load_config` reads.

    Args:
        config: a validated configuration.
    """
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def _check_loss(config: Config, source: str) -> None:
    """Makes the loss once, so that wrong arguments are found before time is spent."""
    try:
        losses.get(config.loss.name, **config.loss.arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: loss: {error}") from None


def _describe(problem: dict[str, Any]) -> str:
    """One line of what pydantic found, with the nearest valid key."""
    place = problem["loc"]
    name = ".".join(map(str, place))
    if problem["type"] != "extra_forbidden":
        return f"{name}: {problem['msg']}. Received: {problem.get('input')!r}"
    section: Any = Config
    for part in place[:-1]:
        section = section.model_fields[part].annotation
        if not hasattr(section, "model_fields"):  # a section or None
            section = section.__args__[0]
    keys = list(section.model_fields)
    near = difflib.get_close_matches(str(place[-1]), keys, n=1, cutoff=0.0)
    return f"{name}: there is no such key; did you mean `{near[0]}`?"
