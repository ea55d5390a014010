"""Installed versions of libraries, and what older versions of torch lack or name differently.

A difference names the version that ends it, in one file per library (``hosts/LIBRARY/versions.py``; torch's here), and
goes when the lower bound in ``pyproject.toml`` reaches that version; see `docs/deprecation.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import torch

from vitrim.errors import VitrimError

F = TypeVar("F", bound=Callable[..., object])


def numbers(text: str) -> tuple[int, ...]:
    """The first three numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


@cache
def installed(package: str) -> str | None:
    """The version of an installed package, from its metadata; None without metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_older(package: str, than: str) -> bool:
    """True if a package is installed in a version before ``than``."""
    found = installed(package)
    return found is not None and numbers(found) < numbers(than)


def require(package: str, since: str, what: str, error: type[VitrimError] = VitrimError) -> None:
    """Refuse ``what`` if a package is older than the version ``since``.

    Example:
        >>> require("torch", "999.0", "this example")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        vitrim.errors.VitrimError: this example needs torch 999.0 or newer, and ... is installed
    """
    if is_older(package, since):
        raise error(f"{what} needs {package} {since} or newer, and {installed(package)} is installed")


def constant(function: F) -> F:
    """`torch.compiler.assume_constant_result`, without its import of the whole compiler, which takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def cpu_capabilities() -> Mapping[str, bool]:
    """The instructions of this processor that vitrim uses, by torch's names."""
    if is_older("torch", "2.11"):
        names = {"amx_bf16": "_is_amx_tile_supported", "avx512_bf16": "_is_avx512_bf16_supported"}
        return {name: getattr(torch.cpu, query)() for name, query in names.items()}
    return torch.cpu.get_capabilities()


def forget_casts() -> None:
    """Clear autocast's cache of weights cast without gradients, which before 2.13 the next forward would use."""
    if is_older("torch", "2.13"):
        torch.clear_autocast_cache()
