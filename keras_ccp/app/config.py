"""What an experiment is: validated configurations and how they are read."""

import inspect
import json
import os
import re
import shlex
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic

from keras_ccp import losses
from keras_ccp.app.config_sections import (
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
from keras_ccp.app.yaml_files import merge, parse_override, read_yaml, write_yaml

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


_NOT_GIVEN = "not given"


def load_config(path: str | os.PathLike, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration.

    A file may start from others by `base:`, one path or a list of them relative to the
    file; later ones override earlier ones, and the file overrides them all. Sections
    are merged, other values replaced; `{}` replaces what it is laid over. The arguments
    of a loss go with its name: they do not carry over to another one.

    Args:
        path: YAML file.
        overrides: `"section.key=value"`, the value in YAML; laid over the file in
            their order, but `loss.name` first.

    Returns:
        The validated configuration.

    Raises:
        FileNotFoundError: If a file does not exist.
        IsADirectoryError: If it is a folder.
        ValueError: If a file is no YAML mapping, names itself as its base, or a key or
            value is not valid; the message names the nearest valid key.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(
            "The configuration must be a YAML file. Received: "
            f"{os.fspath(path)}, a folder; for the images in it: "
            f"configs/folder_c2_ccp.yaml --data {shlex.quote(os.fspath(path))}"
        )
    values = read_yaml(Path(path))
    # The name first, since it clears the arguments of another.
    for override in sorted(overrides, key=lambda o: not o.startswith("loss.name=")):
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


def changed_values(then: Config, now: Config, where: str) -> str:
    """The keys in which two experiments differ, each with both values.

    The devices are not compared: on others it is the same experiment.

    Args:
        then: the experiment of before.
        now: the experiment that is to be the same.
        where: where the former is, such as `"in the run"`.

    Returns:
        `"section.key: value in the run, value now; ..."`, or `""`.
    """
    values = (config.model_dump(exclude={"distribution"}) for config in (then, now))
    return "; ".join(_changes("", *values, where))


def _changes(key: str, then: Any, now: Any, where: str) -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for name in {**then, **now}:
            values = (part.get(name, _NOT_GIVEN) for part in (then, now))
            yield from _changes(f"{key}.{name}" if key else name, *values, where)
    elif then != now:
        old, new = (
            value if value is _NOT_GIVEN else json.dumps(value, default=str)
            for value in (then, now)
        )
        yield f"{key}: {old} {where}, {new} now"


def _check_loss(config: LossConfig, source: str) -> None:
    """Makes the loss once, so that wrong arguments are found before time is spent."""
    try:
        loss = losses.get(config.name)
    except ValueError as error:
        names = re.findall('"(.*?)"', str(error))
        line = f"{error}{did_you_mean(config.name, names)}"
        raise ValueError(f"{source}: loss: {line}") from None
    try:
        valid = inspect.signature(type(loss)).parameters
        for name in config.arguments:
            if name not in valid:
                raise ValueError(
                    f"arguments.{name}: there is no such argument of "
                    f"{config.name}{_near_or_all(name, valid)}"
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
        line = f"there is no such key{_near_or_all(place[-1], keys)}"
    elif problem["type"] == "missing":
        line = "this key must be given"
    elif problem["type"] == "value_error":
        line = str(problem["ctx"]["error"])
    else:
        line = f"{problem['msg']}. Received: {given!r}"
    if problem["type"] == "literal_error":
        line += did_you_mean(given, re.findall("'(.*?)'", problem["ctx"]["expected"]))
    return ".".join(place), line


def _near_or_all(name: str, valid: Iterable[str]) -> str:
    return did_you_mean(name, valid) or f"; there are {', '.join(valid)}"


def _section_of(annotation: Any) -> type[Section] | None:
    """The section that a key holds, also where it may be `None`."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None
