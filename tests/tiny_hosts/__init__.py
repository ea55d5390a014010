"""Tiny instances of every host family, one file per family: ``HOSTS``, by name a function that makes one.

The first of a file is the family's plain form: every method is tested on it. The others are variants, on which one
method of each mechanism is tested.

A family of a later date says ``FURTHER = True``: its layers are built like those of another, so that in `make test` a
few methods run on it (`tests/hosts/test_further_hosts.py`), and all in `make test-full`. ``INPUTS`` has functions from
a batch size to the input of those that take no images of 24 x 24 pixels.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from older import has_host
from vitrim.core.registry import find_host
from vitrim.core.tables import not_yet

Create = Callable[[], nn.Module]

RECREATED = str(Path(__file__).parents[1] / "recreated")
if RECREATED not in sys.path:  # processes that tests start do not read pytest's `pythonpath`
    sys.path.append(RECREATED)


class Hosts(dict[str, Create]):
    """Hosts by name; a test that asks for one that the installed libraries are too old for is skipped."""

    def __missing__(self, name: str) -> Create:
        if not not_yet():
            raise KeyError(name)
        pytest.skip(f"the installed libraries are too old for {name}")


def families(further: bool = False) -> dict[str, dict[str, Create]]:
    """``HOSTS`` of every file of this folder, by file name; those of ``further`` families or of the others."""
    files = {name: file for name, file in _modules().items() if getattr(file, "FURTHER", False) is further}
    return {name: hosts for name, file in files.items() if (hosts := _served(file))}


def inputs() -> dict[str, Callable[[int], Tensor]]:
    """``INPUTS`` of all files: of hosts that take something else than small images."""
    return {host: make for module in _modules().values() for host, make in getattr(module, "INPUTS", {}).items()}


@cache
def _modules() -> dict[str, Any]:
    found = {}
    for module in pkgutil.iter_modules(__path__):
        try:
            found[module.name] = importlib.import_module(f"tiny_hosts.{module.name}")
        except ModuleNotFoundError as error:
            if not any(key.startswith(f"{error.name}.") or key == error.name for key in not_yet()):
                raise
    del found["common"]
    return found


def _served(module: Any) -> dict[str, Create]:
    """The hosts of a file whose families work with the installed library."""
    hosts: dict[str, Create] = {name: create for name, create in module.HOSTS.items() if has_host(name)}
    if not any(getattr(value, "__module__", None) in not_yet() for value in vars(module).values()):
        return hosts
    return {name: create for name, create in hosts.items() if find_host(create()) is not None}
