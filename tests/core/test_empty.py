"""Where a method finds nothing to do, its graph has no step for it: OpenVINO does not compile products of no rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiny
import vitrim
from vitrim.core.registry import make_method, methods

STRENGTHS = (0.03, 0.4, 0.8, 0.95, 1.0)
OTHERS = {"atc": {"linkage": "single"}}
"""Options with which a method has a graph."""
SETTINGS = [
    make_method(name, **{**config.tunable.fixed, **OTHERS.get(name, {}), config.tunable.option: value})
    for name, config in methods().items()
    if config.tunable is not None
    for value in (config.tunable.value(strength, 36) for strength in STRENGTHS)
]
STATIC = [config for config in SETTINGS if config.obstacle() is None]
NOT_EMPTY = ("bmm", "mm", "sort", "topk", "max", "amax", "argmax", "argsort", "scatter_add", "scatter_reduce")


class Empty(TorchDispatchMode):
    """Names of operations among `NOT_EMPTY` that gave a tensor without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__  # type: ignore[attr-defined]
        if name in NOT_EMPTY and any(not one.numel() for one in tree_leaves(out) if isinstance(one, torch.Tensor)):
            self.found.add(name)
        return out


@pytest.mark.sampled(5)
@pytest.mark.parametrize("config", STATIC, ids=lambda config: config.describe())
def test_no_step_without_rows(config: vitrim.MethodConfig) -> None:
    model = tiny.vit(depth=12)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vitrim.ReductionWarning)  # of amounts that are not reached
        vitrim.reduce_(model, config)
        with torch.no_grad(), Empty() as empty:
            model(tiny.images())
    assert not empty.found
