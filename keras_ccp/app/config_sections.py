"""The sections of a configuration: keys, defaults and the ranges of their values."""

import difflib
from collections.abc import Iterable
from typing import Any, Literal

import keras
import pydantic

_OWN_BACKBONES = ("bn_inception", "efficientnet_lite0", "resnet20_v2", "small_cnn")


def did_you_mean(name: Any, valid: Iterable[str]) -> str:
    """End of a message about a wrong name, empty where none is near.

    Args:
        name: what was given.
        valid: names that exist.
    """
    near = difflib.get_close_matches(str(name), list(valid), n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else ""


class Section(pydantic.BaseModel):
    """Keys and values with a meaning; any other is refused."""

    # Strict: "3" is no 3 and 1 is no True, so that a slip is not taken for a wish.
    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False
    )


class DataConfig(Section):
    """Images, their split into classes, and how they are prepared.

    Attributes:
        name: which loader of `keras_ccp.datasets`.
        file: file or folder below the data root, for `"folder"` (default: the root
            itself), `"npz"`, `"table"`.
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
            for arrays, `"small_no_flip"` where mirror images are other things, or
            `"none"`.
        unreadable: `"raise"` or `"skip"`: looks at every image first; `None`: not.
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
    augmentation: Literal["mlrc", "conventional", "small", "small_no_flip", "none"] = (
        "mlrc"
    )
    unreadable: Literal["raise", "skip"] | None = None
    check_counts: bool = True

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> "DataConfig":
        if self.file is None and self.name in ("npz", "table"):
            raise ValueError(f"`file` must name the {self.name} file below the root")
        if self.file is not None and self.name not in ("folder", "npz", "table"):
            raise ValueError(
                f'`file` must be null with name="{self.name}", whose files have their '
                f"names. Received: file={self.file!r}"
            )
        is_share = isinstance(self.train_classes, float)
        if not (0 < self.train_classes < 1 if is_share else self.train_classes >= 1):
            raise ValueError(
                "`train_classes` must be a share between 0 and 1 or a number of "
                f"classes. Received: train_classes={self.train_classes}"
            )
        if self.short_side is not None and self.short_side < self.size:
            raise ValueError(
                "`short_side` must not be smaller than `size`. Received: "
                f"short_side={self.short_side}, size={self.size}"
            )
        return self


class EmbedderConfig(Section):
    """The network.

    Attributes:
        backbone: `"bn_inception"`, `"efficientnet_lite0"`, `"resnet20_v2"`,
            `"small_cnn"` or the name of a model in `keras.applications`.
        weights: file of weights below the data root, `"imagenet"` where the backbone
            brings them, or `None` for random ones.
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

    @pydantic.model_validator(mode="after")
    def _exists(self) -> "EmbedderConfig":
        models = [name for name in dir(keras.applications) if name[0].isupper()]
        if self.backbone not in (names := [*_OWN_BACKBONES, *models]):
            near = did_you_mean(self.backbone, names)
            raise ValueError(
                f"`backbone` must be {', '.join(_OWN_BACKBONES)} or a model of "
                f"keras.applications. Received: backbone={self.backbone!r}{near}"
            )
        if self.weights and self.backbone in ("resnet20_v2", "small_cnn"):
            raise ValueError(
                f"`weights` must be null: {self.backbone} is trained from random ones. "
                f"Received: weights={self.weights!r}"
            )
        return self


class MemoryConfig(Section):
    """Cross-batch memory.

    Attributes:
        batches: how many past batches it holds.
        start_step: steps before it counts.
    """

    batches: int = pydantic.Field(ge=1)
    start_step: int = pydantic.Field(1000, ge=0)


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


class ProxyConfig(Section):
    """Proxies and CCP.

    Attributes:
        per_class: proxies of each class, 0 for pairs inside the batch.
        switching: whether projections switch (CCP).
        pool_size: images drawn of each class at a switch.
        patience: evaluations without improvement that end a problem.
        proximal_weight: lambda.
        in_batch_weight: weight of the pairs inside the batch.
        references: `"proxies"` or `"samples"`.
        restore_on_projection: as for `CCPCallback`.
        learning_rate_multiplier: of the proxies' updates.
    """

    per_class: int = pydantic.Field(0, ge=0)
    switching: bool = False
    pool_size: int = pydantic.Field(12, ge=1)
    patience: int = pydantic.Field(3, ge=1)
    proximal_weight: float = pydantic.Field(2e-4, ge=0)
    in_batch_weight: float = pydantic.Field(0.0, ge=0)
    references: Literal["proxies", "samples"] = "proxies"
    restore_on_projection: bool = True
    learning_rate_multiplier: float = pydantic.Field(1.0, ge=0)

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> "ProxyConfig":
        if self.switching and not self.per_class:
            raise ValueError(
                "`per_class` must be at least 1 with `switching`: --set "
                "proxies.per_class=4, or proxies.switching=false. Received: per_class=0"
            )
        if self.pool_size < self.per_class:
            raise ValueError(
                "`pool_size` must be at least `per_class`, which are chosen from it. "
                f"Received: pool_size={self.pool_size}, per_class={self.per_class}"
            )
        return self


class TrainingConfig(Section):
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


class DistributionConfig(Section):
    """Devices and machines, which share out each batch.

    Attributes:
        strategy: of TensorFlow; `"multi_worker"` takes machines from `TF_CONFIG`.
        devices: number of each machine's, `None` for all GPUs.
    """

    strategy: Literal["none", "mirrored", "multi_worker"] = "none"
    devices: int | None = pydantic.Field(None, ge=1)

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> "DistributionConfig":
        if self.devices and self.strategy == "none":
            raise ValueError('`devices` must be null with strategy="none"')
        return self


class Config(Section):
    """A whole experiment.

    Attributes:
        method: its name in tables, such as `"C2-CCP-L"`.
        data: images and splits.
        embedder: the network.
        loss: the pair loss.
        proxies: proxies and CCP.
        training: batches, optimiser and evaluations.
        distribution: devices and machines.
        seed: of everything random.
    """

    method: str
    data: DataConfig
    embedder: EmbedderConfig = EmbedderConfig()
    loss: LossConfig
    proxies: ProxyConfig = ProxyConfig()
    training: TrainingConfig = TrainingConfig()
    distribution: DistributionConfig = DistributionConfig()
    seed: int = pydantic.Field(0, ge=0)

    @pydantic.model_validator(mode="after")
    def _uses_memory(self) -> "Config":
        has_pairs = not self.proxies.per_class or self.proxies.in_batch_weight > 0
        if self.loss.memory and not has_pairs:
            raise ValueError(
                "`proxies.in_batch_weight` must be above 0 with `loss.memory`, which "
                "is compared with the batch and not with proxies"
            )
        return self
