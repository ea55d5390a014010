"""Tiny instances of every host family, one file per family: ``HOSTS``, by name a function that makes one.

The first of a file is the family's plain form: every method is tested on it. The others are variants, on which one
method of each mechanism is tested.

A family of a later date says ``FURTHER = True``: its layers are built like those of another, so that in `make test` a
few methods run on it (`tests/hosts/test_further_hosts.py`), and everything in the full matrix. ``INPUTS`` has functions
from a batch size to the input of those that take no images of 24 x 24 pixels.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

Create = Callable[[], nn.Module]

RECREATED = str(Path(__file__).parents[1] / "recreated")
if RECREATED not in sys.path:  # processes that tests start do not read pytest's `pythonpath`
    sys.path.append(RECREATED)


def families(further: bool = False) -> dict[str, dict[str, Create]]:
    """``HOSTS`` of every file of this folder, by file name; those of ``further`` families or of the others."""
    return {name: module.HOSTS for name, module in _modules().items() if getattr(module, "FURTHER", False) is further}


def inputs() -> dict[str, Callable[[int], Tensor]]:
    """``INPUTS`` of all files: of hosts that take something else than small images."""
    return {host: make for module in _modules().values() for host, make in getattr(module, "INPUTS", {}).items()}


def _modules() -> dict[str, Any]:
    return {
        module.name: importlib.import_module(f"tiny_hosts.{module.name}")
        for module in pkgutil.iter_modules(__path__)
        if module.name != "common"
    }
