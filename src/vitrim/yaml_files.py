"""YAML of strangers, with one line of error. Apart from `files`, because the command line starts without yaml."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from vitrim.errors import VitrimError, first_line, os_errors


class _UniqueKeys(yaml.SafeLoader):
    """Refuses duplicate keys, whose first value would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        named = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=True) for key in named]
        twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(file: Path) -> Any:
    """The content of a YAML file; `VitrimError` if it cannot be read or is not valid."""
    with os_errors(f"cannot read {file}"):
        return parse_yaml(file.read_bytes(), file)


def parse_yaml(text: str | bytes, name: object) -> Any:
    """The content of a YAML text called ``name``; `VitrimError` if it is not valid, also for a repeated key.

    Example:
        >>> parse_yaml("r: 8\\nr: 9", "recipe.yaml")
        Traceback (most recent call last):
        vitrim.errors.VitrimError: cannot read recipe.yaml: it is not valid YAML (line 1: the key r comes twice)
    """
    try:
        return copy.deepcopy(_yaml(text))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise VitrimError(f"cannot read {name}: it is not valid YAML ({line}{error.problem})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that does not exist, lists nested too deep
        raise VitrimError(f"cannot read {name}: it is not valid YAML ({first_line(error)})") from None


@lru_cache(maxsize=16)
def _yaml(text: str | bytes) -> Any:  # many recipes share a base
    return yaml.load(text, _UniqueKeys)
