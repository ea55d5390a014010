"""Readers of datasets as their authors lay them out on disk, by name: `nabirds:PATH`.

A reader is a function in one file of this folder:

    @register_reader("nabirds")
    def read_nabirds(path: str, *, split: str | None = None) -> ImageDataset:
        ...

Its further keyword-only parameters are options of `load_data`. It reads labels and paths, refuses what does not fit
with a `DataError` of one line, and decodes no image.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from vitrim.data.dataset import ImageDataset, MultiLabelDataset

Reader = Callable[..., ImageDataset | MultiLabelDataset]
R = TypeVar("R", bound=Reader)

_READERS: dict[str, Reader] = {}


def register_reader(name: str) -> Callable[[R], R]:
    """Decorator: register a reader under a name. A name can be registered only once.

    Args:
        name: what stands before the colon in `name:path`.

    Raises:
        ValueError: there is a reader of this name.

    Example:
        >>> "coco" in readers()
        True
        >>> @register_reader("coco")
        ... def read_mine(path, *, split=None): ...
        Traceback (most recent call last):
        ValueError: reader 'coco' is registered twice
    """

    def enter(reader: R) -> R:
        if name in _READERS:
            raise ValueError(f"reader '{name}' is registered twice")
        _READERS[name] = reader
        return reader

    return enter


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def readers() -> dict[str, Reader]:
    """Every reader by name, sorted.

    Example:
        >>> list(readers())
        ['coco', 'imagenet', 'nabirds', 'nus_wide', 'webdataset']
    """
    _discover()
    return dict(sorted(_READERS.items()))
