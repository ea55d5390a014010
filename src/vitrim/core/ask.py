"""Questions about a model go to its host family, or to the code that knows its library in general.

    ask(model).roles(model)

A model need not be one that vitrim can reduce: it may be trained and measured as it is, and what must be known for that
(its head, its positions, how its images are prepared) a host says here, so that nobody else need know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from vitrim.core.host import Host
from vitrim.core.registry import find_host, libraries
from vitrim.core.tables import discover_naming, enter

H = TypeVar("H", bound=Host)

OWN = "vitrim"
"""The folder of hosts that answers for models of no library: users' models are treated like vitrim's own."""

_GENERAL: dict[str, type[Host]] = {}


def register_library(*libraries: str) -> Callable[[type[H]], type[H]]:
    """Class decorator: register a host that answers for all models of some libraries without a family of their own."""

    def register(host: type[H]) -> type[H]:
        for library in libraries:
            enter(_GENERAL, library, host, f"library '{library}'")
        return host

    return register


def ask(model: nn.Module) -> type[Host]:
    """The host that answers questions about ``model``, which may be any model.

    Example:
        >>> import timm, torch
        >>> ask(timm.create_model("test_vit")).name
        'timm VisionTransformer'
        >>> ask(timm.create_model("test_resnet")).logits(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    host = find_host(model)
    if host is not None:
        return host
    for base in type(model).__mro__:
        library = base.__module__.partition(".")[0]
        if library in libraries():
            discover_naming(f"vitrim.hosts.{library}", "@register_library(")
        if library in _GENERAL:
            return _GENERAL[library]
    discover_naming(f"vitrim.hosts.{OWN}", "@register_library(")
    return _GENERAL[OWN]
