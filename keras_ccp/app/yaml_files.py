"""YAML files that start from other files."""

import difflib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

# 1e-5 is a number to everybody but YAML 1.1, which asks for a point: 1.0e-5.
_FLOAT = (
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


class _Loader(yaml.SafeLoader):
    """Plain values only; a key that is there twice is an error."""

    def construct_mapping(self, node, deep=False):
        if isinstance(node, yaml.MappingNode):
            keys = Counter((key.tag, str(key.value)) for key, _ in node.value)
            twice = [key for (_, key), count in keys.items() if count > 1]
            if twice:
                raise yaml.constructor.ConstructorError(
                    None, None, f"`{twice[0]}` is there twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for a number."""


_Loader.add_implicit_resolver(*_FLOAT)
_Dumper.add_implicit_resolver(*_FLOAT)


def read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads a file over its bases.

    Args:
        path: YAML file. Its key `base` names a file, or a list of them, relative to
            it; later ones override earlier ones, and the file overrides them all.
        seen: files that led here.

    Returns:
        Nested dict without `base`.

    Raises:
        FileNotFoundError: If a file does not exist; the message names one with nearly
            that name.
        IsADirectoryError: If it is a folder.
        ValueError: If a file is no YAML mapping or leads back to itself.
    """
    path = path.resolve()
    if path in seen:
        raise ValueError(f"`base` must not lead back to the file. Received: {path}")
    origin = f", a base of {seen[-1]}" if seen else ""
    if path.is_dir():
        raise IsADirectoryError(f"There is no file {path}{origin}: it is a folder")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}{origin}{_nearest(path)}")
    try:
        values = yaml.load(path.read_text("utf-8"), _Loader)  # noqa: S506
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be YAML. Received: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} must hold `key: value` pairs. Received: {type(values).__name__}"
        )
    bases = values.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(b, str) for b in bases):
        raise ValueError(
            f"`base` of {path} must be a path or a list of them. Received: {bases!r}"
        )
    merged: dict[str, Any] = {}
    for base in bases:
        merged = merge(merged, read_yaml(path.parent / base, (*seen, path)))
    return merge(merged, values)


def _nearest(path: Path) -> str:
    # Stems, since ".yaml" would make all names alike.
    stems = [other.stem for other in path.parent.glob("*.yaml") if other.is_file()]
    near = difflib.get_close_matches(path.stem, stems, n=1)
    return f"; did you mean `{near[0]}.yaml`?" if near else ""


def write_yaml(values: dict[str, Any]) -> str:
    """YAML text that `read_yaml` reads.

    Args:
        values: nested dict of plain values.
    """
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def merge(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Lays one nested dict over another.

    Args:
        lower: values that hold where `upper` has none.
        upper: values that replace them. Dicts are merged, unless it is empty here.
            `arguments` beside a `name` are left out under another `name`.

    Returns:
        A new dict.
    """
    merged = dict(lower)
    if "name" in lower and upper.get("name", lower["name"]) != lower["name"]:
        merged.pop("arguments", None)  # those of another
    for key, value in upper.items():
        if value and isinstance(value, dict) and isinstance(merged.get(key), dict):
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
