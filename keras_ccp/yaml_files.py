"""YAML files that start from other files."""

import re
from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader that takes 1e-5 for a number, as everybody but YAML 1.1 does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads a file over its bases.

    Args:
        path: YAML file. Its key `base` names a file, or a list of them, relative to
            it; later ones override earlier ones, and the file overrides them all.
        seen: files that led here.

    Returns:
        Nested dict without `base`.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a file is no YAML mapping or leads back to itself.
    """
    path = path.resolve()
    if path in seen:
        raise ValueError(f"`base` must not lead back to the file. Received: {path}")
    try:
        values = yaml.load(path.read_text("utf-8"), _Loader)  # noqa: S506
    except FileNotFoundError:
        origin = f", the base of {seen[-1]}" if seen else ""
        raise FileNotFoundError(f"There is no config {path}{origin}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be YAML. Received: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} must hold `key: value` pairs. Received: {type(values).__name__}"
        )
    bases = values.pop("base", [])
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        merged = merge(merged, read_yaml(path.parent / base, (*seen, path)))
    return merge(merged, values)


def merge(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Lays one nested dict over another.

    Args:
        lower: values that hold where `upper` has none.
        upper: values that replace them; dicts are merged.

    Returns:
        A new dict.
    """
    merged = dict(lower)
    for key, value in upper.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            value = merge(merged[key], value)
        merged[key] = value
    return merged


def parse_override(override: str) -> dict[str, Any]:
    """Nested dict of one `section.key=value`.

    Args:
        override: the key, and the value in YAML.

    Raises:
        ValueError: If it has another form.
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ValueError(
            "An override must be `section.key=value`, such as "
            f"training.batch_size=64. Received: {override!r}"
        )
    try:
        value = yaml.load(text, _Loader)  # noqa: S506
    except yaml.YAMLError:
        raise ValueError(
            f"The value of an override must be YAML. Received: {override!r}"
        ) from None
    for key in reversed(path.split(".")):
        value = {key: value}
    return value
