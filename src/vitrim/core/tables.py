"""Tables that the files of a folder enter themselves into, so that a new method, host, task or loss is one new file.

A table is a dict; a decorator enters into it what it decorates, and whoever reads it first discovers the folder. An
import error in a file surfaces: an entry that silently does not exist is worse than a traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from vitrim.errors import VitrimError

K = TypeVar("K")
V = TypeVar("V")


@cache
def discover(package: str) -> None:
    """Import every module of ``package``, once: what they register is then known."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


@cache
def discover_naming(package: str, text: str) -> None:
    """Import the modules of ``package`` whose source has ``text``: those that register it, and no others.

    A library has many families of models, and importing one imports the library's own file of it. Modules that come
    without their source are imported.
    """
    for name, source in _sources(package).items():
        if source is None or text in source:
            importlib.import_module(name)


@cache
def _sources(package: str) -> Mapping[str, str | None]:
    """The source of every module of ``package`` by its full name; None where it is not there."""
    found: dict[str, str | None] = {}
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        loader: Any = getattr(importlib.util.find_spec(module.name), "loader", None)
        found[module.name] = loader.get_source(module.name) if hasattr(loader, "get_source") else None
    return found


def enter(table: dict[K, Any], key: K, value: object, what: str) -> None:
    """Register ``value`` under ``key``, which can be done only once.

    Raises:
        VitrimError: there is such an entry; ``what`` names it.

    Example:
        >>> enter({"tome": 1}, "tome", 2, "method 'tome'")
        Traceback (most recent call last):
        vitrim.errors.VitrimError: method 'tome' is registered twice, by 1 and 2
    """
    if key in table:
        raise VitrimError(f"{what} is registered twice, by {table[key]} and {value}")
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
