"""What an experiment is: validated configurations and how they are read."""

import inspect
import os
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic

from keras_ccp import losses
from keras_ccp.config_sections import (
    Config,
    DataConfig,
    DistributionConfig,
    EmbedderConfig,
    LossConfig,
    MemoryConfig,
    ProxyConfig,
    Section,
    TrainingConfig,
    did_you_mean,
)
from keras_ccp.yaml_files import merge, parse_override, read_yaml, write_yaml

__all__ = [
    "Config",
    "DataConfig",
    "DistributionConfig",
    "EmbedderConfig",
    "LossConfig",
    "MemoryConfig",
    "ProxyConfig",
    "TrainingConfig",
    "check_config",
    "dump_config",
    "load_config",
    "on_devices",
]


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
        # A union has a problem for each of its members; the first one tells it.
        lines = {}
        for problem in error.errors():
            lines.setdefault(*_describe(problem))
        lines = [f"{place}: {line}" if place else line for place, line in lines.items()]
        raise ValueError(f"{source}: " + "; ".join(lines)) from None
    _check_loss(config.loss, source)
    return config


def on_devices(config: Config, devices: int) -> Config:
    """The same experiment on a number of devices of each machine.

    Args:
        config: a validated configuration.
        devices: number of devices, at least 1.

    Returns:
        A validated configuration, `"mirrored"` where it was on one device.
    """
    strategy = config.distribution.strategy
    if strategy == "none":
        strategy = "mirrored"
    distribution = DistributionConfig(strategy=strategy, devices=devices)
    return config.model_copy(update={"distribution": distribution})


def dump_config(config: Config) -> str:
    """YAML of the resolved configuration, which `load_config` reads.

    Args:
        config: a validated configuration.
    """
    return write_yaml(config.model_dump())


def _check_loss(config: LossConfig, source: str) -> None:
    """Makes the loss once, so that wrong arguments are found before time is spent."""
    try:
        valid = inspect.signature(type(losses.get(config.name))).parameters
        for name in config.arguments:
            if name not in valid:
                raise ValueError(
                    f"arguments.{name}: there is no such argument of "
                    f"{config.name}{did_you_mean(name, valid)}"
                )
        losses.get(config.name, **config.arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: loss: {error}") from None


def _describe(problem: dict[str, Any]) -> tuple[str, str]:
    """Key and line of what pydantic found, with the nearest valid name."""
    section, keys, place = Config, (), []
    for key in problem["loc"]:
        if section is None:  # the rest names members of a union
            break
        keys = section.model_fields
        place.append(str(key))
        section = _section_of(keys[key].annotation) if key in keys else None
    given = problem["input"]
    if problem["type"] == "extra_forbidden":
        line = f"there is no such key{did_you_mean(place[-1], keys)}"
    elif problem["type"] == "missing":
        line = "this key must be given"
    elif problem["type"] == "value_error":
        line = str(problem["ctx"]["error"])
    else:
        line = f"{problem['msg']}. Received: {given!r}"
    if problem["type"] == "literal_error":
        line += did_you_mean(given, re.findall("'(.*?)'", problem["ctx"]["expected"]))
    return ".".join(place), line


def _section_of(annotation: Any) -> type[Section] | None:
    """The section that a key holds, also where it may be `None`."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None
