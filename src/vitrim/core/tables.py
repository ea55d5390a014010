"""Tables by name or class: dicts that files fill when they are imported, and a `Registry` over all host libraries.

Methods, tasks and losses register themselves: the first reader imports all files of the folder. Hosts are listed:
``hosts/LIBRARY/__init__.py`` maps model classes to files, and only the file needed is imported, with its library. An
import error propagates: an entry that is silently missing is worse than a traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from vitrim.core.versions import is_older
from vitrim.errors import VitrimError

K = TypeVar("K")
R = TypeVar("R")
T = TypeVar("T")
Value = TypeVar("Value")


@cache
def discover(package: str) -> None:
    """Import every module of ``package``, once, so that they register their contents."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


def itself(value: Any) -> Any:
    """``value``."""
    return value


def enter(table: dict[K, Any], key: K, value: object, what: str, code: Callable[[Any], Any] = itself) -> None:
    """Register ``value`` under ``key``; the message calls the entry ``what``.

    Args:
        what: the entry is, for the message.
        code: the class or function that an entry is made from; by default the entry itself.

    Example:
        >>> enter({"tome": 1}, "tome", 2, "method 'tome'")
        Traceback (most recent call last):
        vitrim.errors.VitrimError: method 'tome' is registered twice, by 1 and 2
    """
    # From the same place is a cell of a notebook that runs again, or a module that is loaded again.
    if key in table and not _same_place(code(table[key]), code(value)):
        raise VitrimError(f"{what} is registered twice, by {table[key]} and {value}")
    table[key] = value


def _same_place(one: object, other: object) -> bool:
    """True if two classes or functions have one module and one qualified name; lambdas have no name of their own."""
    places = [(getattr(each, "__module__", None), getattr(each, "__qualname__", "")) for each in (one, other)]
    return places[0] == places[1] and places[0][1] != "" and "<lambda>" not in places[0][1]


def entry_of(table: Mapping[Any, Value], kind: type) -> Value | None:
    """The entry of a class or of its nearest base class that has one; None if none has.

    Example:
        >>> entry_of({int: "number"}, bool)
        'number'
    """
    for base in kind.__mro__:
        if base in table:
            return table[base]
    return None


@cache
def libraries() -> tuple[str, ...]:
    """The host libraries vitrim knows, installed or not: the folders of ``hosts/``."""
    folder = Path(__file__).parents[1] / "hosts"
    return tuple(sorted({module.name for module in pkgutil.iter_modules([str(folder)])} - {"shared"}))


def missing_libraries() -> tuple[str, ...]:
    """The `libraries` that are not installed. A folder of such a name, say of weights, has no origin: no library."""
    found = {library: importlib.util.find_spec(library) for library in libraries()}
    return tuple(library for library, spec in found.items() if spec is None or spec.origin is None)


def written_table(library: str, table: str) -> Mapping[str, str]:
    """A table of ``hosts/LIBRARY/__init__.py``, whose values are places, ``file:name`` in that folder."""
    if library not in libraries():
        return {}
    # The tables are text: importing them imports no library.
    found: Mapping[str, str] = getattr(importlib.import_module(f"vitrim.hosts.{library}"), table, {})
    return found


def number_of_families() -> int:
    """The number of host families, whatever is installed."""
    return sum(len(set(written_table(library, "HOSTS").values())) for library in libraries())


@cache
def of_versions(library: str, table: str) -> Mapping[str, str]:
    """A table of ``hosts/LIBRARY/versions.py``; empty if there is none, or the library is not installed."""
    file = f"vitrim.hosts.{library}.versions"
    known = library in libraries() and library not in missing_libraries() and importlib.util.find_spec(file) is not None
    return getattr(importlib.import_module(file), table, {}) if known else {}


def minimum_versions(library: str) -> Mapping[str, str]:
    """The version of ``library`` from which its families work, by module or table."""
    return of_versions(library, "SINCE")


def needed_version(key: str, table: str = "") -> str | None:
    """The library version that a class, module or table needs, if an older one is installed."""
    library = library_of(key)
    since = minimum_versions(library)
    found = since.get(key) or since.get(key.rpartition(".")[0]) or since.get(table)
    return f"{library} {found}" if found is not None and is_older(library, found) else None


def not_yet() -> dict[str, str]:
    """The library versions needed by families that the installed libraries are too old for, by module or table."""
    found = {key: needed_version(library, key) for library in libraries() for key in minimum_versions(library)}
    return {key: needs for key, needs in found.items() if needs is not None}


def library_of(name: str) -> str:
    """The library of a module or class, from its dotted name."""
    return name.partition(".")[0]


def load_entry(library: str, place: str) -> Any:
    """The entry at a place ``file:name``."""
    file, _, name = place.partition(":")
    return getattr(importlib.import_module(f".{file}", f"vitrim.hosts.{library}"), name)


@dataclass
class Registry(Generic[T]):
    """A table over all libraries: their tables called ``name``, and ``entries`` of users and imported files."""

    name: str
    what: str
    entries: dict[str, T] = field(default_factory=dict)

    def register(self, keys: tuple[str, ...]) -> Callable[[R], R]:
        """Class decorator: register a user's entry. It must not be in the written tables either."""

        def register(value: R) -> R:
            for key in keys:
                written = written_table(library_of(key), self.name)
                enter({**written, **self.entries}, key, value, f"{self.what} '{key}'")
                self.entries[key] = cast(T, value)
            return value

        return register

    def entry(self, key: str) -> T | None:
        """The entry ``key``, imported if it is in a written table; None if there is none."""
        if key not in self.entries:
            library = library_of(key)
            place = written_table(library, self.name).get(key) or of_versions(library, self.name).get(key)
            if place is None or needed_version(key, self.name) is not None:
                return None
            self.entries[key] = load_entry(library, place)
        return self.entries[key]

    def find(self, kind: type, wider: Callable[[str], str] | None = None) -> T | None:
        """The entry of a class or of its nearest base class that has one; None if none has.

        ``wider`` maps a module's name to the key of an entry for all its classes without their own.
        """
        for base in kind.__mro__:
            found = self.entry(f"{base.__module__}.{base.__qualname__}")
            if found is None and wider is not None:
                found = self.entry(wider(base.__module__))
            if found is not None:
                return found
        return None

    def all(self) -> dict[str, T]:
        """All entries of the installed libraries and of users, sorted."""
        missing = missing_libraries()
        for library in (library for library in libraries() if library not in missing):
            for key in (*written_table(library, self.name), *of_versions(library, self.name)):
                self.entry(key)
        return dict(sorted(self.entries.items()))
