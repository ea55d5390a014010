"""Answers that are read off a model's layers, whatever its library: channels, strides, sizes."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import nn


def input_channels(model: nn.Module) -> int:
    """Channels of the images a model takes, 3 where nothing says otherwise.

    Example:
        >>> input_channels(nn.Sequential(nn.Conv2d(1, 8, 4))), input_channels(nn.Linear(3, 2))
        (1, 3)
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return 3 if first is None else first.in_channels


def stride_of(maker: nn.Module | None) -> tuple[int, int] | None:
    """The stride of the one convolution in ``maker``; None if there is none, or several.

    Example:
        >>> stride_of(nn.Sequential(nn.Conv2d(3, 8, 16, stride=16))), stride_of(nn.Linear(2, 2))
        ((16, 16), None)
    """
    found = [] if maker is None else [module for module in maker.modules() if isinstance(module, nn.Conv2d)]
    return pair(found[0].stride) if len(found) == 1 else None


def pair(size: Any) -> tuple[int, int] | None:
    """Height and width from one number for both, or from two; None stays None.

    Example:
        >>> pair(224), pair([32, 48]), pair(None)
        ((224, 224), (32, 48), None)
    """
    if size is None or isinstance(size, int):
        return None if size is None else (size, size)
    return int(size[0]), int(size[1])


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether using a part of the weight equals calling the module: no adapter, quantiser or hook.

    Example:
        >>> is_plain_linear(nn.Linear(2, 2)), is_plain_linear(nn.Identity())
        (True, False)
    """
    return type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks)
