"""Tables that the files of a folder enter themselves into, so that a new method, host, task or loss is one new file.

A table is a dict; a decorator enters into it what it decorates, and whoever reads it first discovers the folder. An
import error in a file surfaces: an entry that silently does not exist is worse than a traceback.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@cache
def discover(package: str) -> None:
    """Import every module of ``package``, once: what they register is then known."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


def enter(table: dict[K, Any], key: K, value: object, what: str) -> None:
    """Register ``value`` under ``key``, which can be done only once.

    Raises:
        ValueError: there is such an entry; ``what`` names it.

    Example:
        >>> enter({"tome": 1}, "tome", 2, "method 'tome'")
        Traceback (most recent call last):
        ValueError: method 'tome' is registered twice, by 1 and 2
    """
    if key in table:
        raise ValueError(f"{what} is registered twice, by {table[key]} and {value}")
    table[key] = value


def entry_of(table: Mapping[Any, V], kind: type) -> V | None:
    """The entry of a class, or else of the first that has one among those it inherits from; None if none has.

    Example:
        >>> entry_of({int: "number"}, bool)
        'number'
    """
    for base in kind.__mro__:
        if base in table:
            return table[base]
    return None
