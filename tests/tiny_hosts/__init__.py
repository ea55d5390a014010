"""Tiny instances of every host family, one file per family: ``HOSTS``, by name a function that makes one.

The first of a file is the family's plain form: every method is tested on it. The others are variants, on which one
method of each mechanism is tested.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from torch import nn

Create = Callable[[], nn.Module]


def families() -> dict[str, dict[str, Create]]:
    """``HOSTS`` of every file of this folder whose library is there, by file name."""
    return {
        module.name: importlib.import_module(f"tiny_hosts.{module.name}").HOSTS
        for module in pkgutil.iter_modules(__path__)
        if module.name != "common"
    }
