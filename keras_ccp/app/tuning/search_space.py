"""The search space: what is tuned of a configuration, and between which values."""

import dataclasses
from typing import Any

from keras_ccp import losses
from keras_ccp.app.config import Config, check_config
from keras_ccp.app.yaml_files import merge, parse_override

PROXIMAL_WEIGHT = "proxies.proximal_weight"
PER_CLASS = "proxies.per_class"


@dataclasses.dataclass(frozen=True)
class Range:
    """Values between which a parameter is searched, both ends included.

    Args:
        low: smallest value.
        high: largest value.
        is_log: whether each factor counts the same, in place of each difference.
    """

    low: float
    high: float
    is_log: bool = False


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the search.

    Args:
        own: value that the configuration has.
        range: values to try; it includes `own`.
        is_int: whether it is a whole number.
    """

    own: float
    range: Range
    is_int: bool = False


# Around every value that the paper and its sources use for any dataset.
_PROXIMAL_WEIGHTS = Range(1e-5, 1e-1, is_log=True)
LOSS_RANGES = {
    "contrastive": {
        "positive_margin": Range(0.0, 0.3),
        "negative_margin": Range(0.3, 0.8),
    },
    "cosine_contrastive": {"margin": Range(0.2, 0.8)},
    "multi_similarity": {
        "alpha": Range(1.0, 20.0, is_log=True),
        "beta": Range(20.0, 100.0, is_log=True),
        "base": Range(0.3, 0.8),
    },
    "proxy_anchor": {
        "margin": Range(0.0, 0.3),
        "alpha": Range(16.0, 64.0, is_log=True),
    },
    "proxy_nca": {"temperature": Range(0.03, 0.3, is_log=True)},
    "soft_triple": {
        "scale": Range(10.0, 100.0, is_log=True),
        "gamma": Range(0.05, 50.0, is_log=True),
        "tau": Range(0.0, 0.3),
        "margin": Range(0.0, 0.4),
    },
    "triplet": {"margin": Range(0.02, 0.5, is_log=True)},
}


def search_space(config: Config) -> dict[str, Parameter]:
    """What there is to tune of an experiment.

    The parameters of its loss; where it has proxies, how many of each class, up to
    `proxies.pool_size`; and where they are switched, lambda. Ranges reach as far as the
    configuration's own values, so that they are among what is searched.

    Args:
        config: the experiment.

    Returns:
        Parameters by key, `"section.key"` as in an override.

    Raises:
        ValueError: If a value is 0 that is searched by factors.
    """
    proxies = config.proxies
    space = {}
    if proxies.switching:
        space[PROXIMAL_WEIGHT] = Parameter(proxies.proximal_weight, _PROXIMAL_WEIGHTS)
    if proxies.per_class and proxies.pool_size > 1:
        counts = Range(1, proxies.pool_size)
        space[PER_CLASS] = Parameter(proxies.per_class, counts, is_int=True)
    loss = losses.get(config.loss.name, **config.loss.arguments)
    for argument, values in LOSS_RANGES[config.loss.name].items():
        own = getattr(loss, argument)
        space[f"loss.arguments.{argument}"] = Parameter(own, values)
    return {key: _with_own(key, parameter) for key, parameter in space.items()}


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """The same experiment with other values of some parameters.

    Args:
        config: the experiment.
        values: by key, as `search_space` names them.

    Returns:
        A validated configuration.
    """
    merged = config.model_dump()
    for key, value in values.items():
        merged = merge(merged, parse_override(f"{key}={value!r}"))
    return check_config(merged)


def _with_own(key: str, parameter: Parameter) -> Parameter:
    own, values = parameter.own, parameter.range
    if values.is_log and own <= 0:
        raise ValueError(
            f"`{key}` must be above 0 to be tuned, since it is searched by factors; "
            f"begin within the range: --set {key}={values.low:g}. Received: {key}={own}"
        )
    reaching = dataclasses.replace(
        values, low=min(values.low, own), high=max(values.high, own)
    )
    return dataclasses.replace(parameter, range=reaching)
