"""The values of a recipe as a person writes them, nested by section: YAML, and ``key=value`` with dotted keys.

OmegaConf is not used: docs/architecture.md says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import yaml

from vitrim.errors import VitrimError

MAX_DEPTH = 32
MAX_VALUES = 100_000
"""Limits of a recipe: how deeply its values may nest, and how many there may be with aliases written out."""


class _UniqueKeys(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys: the first value would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        named = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=True) for key in named]
        twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


@lru_cache(maxsize=16)
def parsed(text: str) -> Any:
    """`_read_yaml`, cached by text: many recipes have the same base."""
    return _read_yaml(text)


def _read_yaml(text: str) -> Any:
    """Parse YAML that a person could plausibly have written.

    Raises:
        yaml.YAMLError: it is no YAML, or its values lie too deep, within themselves, or are too many.
        ValueError: a date that does not exist, or a number of thousands of digits.
    """
    try:
        value = yaml.load(text, _UniqueKeys)
    except RecursionError:
        raise yaml.YAMLError(f"values lie more than {MAX_DEPTH} deep within each other") from None
    level, count = [value], 1
    for _ in range(MAX_DEPTH):
        level = list(islice((inner for outer in level for inner in _inside(outer)), MAX_VALUES + 1))
        count += len(level)
        if count > MAX_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_VALUES} values, its aliases written out")
        if not level:
            return value
    raise yaml.YAMLError(f"values lie more than {MAX_DEPTH} deep within each other, or within themselves")


def _inside(value: Any) -> Iterable[Any]:
    """The values directly within a value."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set) else ()


def nested(changes: Sequence[str]) -> dict[str, Any]:
    """The values of ``key=value`` texts; of a key that is given twice the last counts.

    Raises:
        VitrimError: a text without key or ``=``, or whose value is not YAML; one line.

    Example:
        >>> nested(["epochs=5", "optimizer.lr=1e-4"])
        {'epochs': 5, 'optimizer': {'lr': 0.0001}}
    """
    values: dict[str, Any] = {}
    for text in changes:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise VitrimError(f"cannot read '{short(text)}': write key=value, e.g. optimizer.lr=1e-4")
        inner: Any = _scalar(text, value)
        if key.count(".") >= MAX_DEPTH:
            raise VitrimError(f"cannot read '{short(text)}': no key has more than {MAX_DEPTH} parts")
        for part in reversed(key.split(".")):
            inner = {part: inner}
        merge(values, inner)
    return values


def _scalar(text: str, value: str) -> Any:
    if value.startswith("@"):  # a file, e.g. of a method; YAML keeps the sign for itself
        return value
    try:
        read = _read_yaml(value)
    except yaml.MarkedYAMLError:
        raise VitrimError(f"cannot read '{short(text)}': its value is not YAML") from None
    except (yaml.YAMLError, ValueError) as error:
        raise VitrimError(f"cannot read '{short(text)}': {line(str(error))}") from None
    if isinstance(read, str):  # YAML 1.1 takes 1e-4 for a text
        try:
            return float(read)
        except ValueError:
            return read
    return read


def merge(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Write ``given`` over ``values``, section by section."""
    for key, value in given.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), dict):
            merge(values[key], value)
        else:
            values[key] = dict(value) if isinstance(value, Mapping) else value


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted name.

    Example:
        >>> dict(flat({"epochs": 5, "optimizer": {"lr": 0.1}}))
        {'epochs': 5, 'optimizer.lr': 0.1}
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def short(value: Any, most: int = 100) -> str:
    """A value in one line, cut where it is long."""
    text = line(str(value))
    return text if len(text) <= most else f"{text[:most]}..."


def line(text: str) -> str:
    """A text without line breaks."""
    return " ".join(text.split())
