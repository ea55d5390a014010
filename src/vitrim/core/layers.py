"""Answers that are read off a model's layers, whatever its library: channels, strides, sizes."""

from __future__ import annotations

from typing import Any, TypeGuard, TypeVar

import torch.nn.modules.module as hooks_of_all
from torch import nn

M = TypeVar("M", bound=nn.Module)


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


def is_bare(module: nn.Module, kind: type[M] = nn.Linear) -> TypeGuard[M]:  # type: ignore[assignment]
    """Return whether reading the weights of ``module`` does what calling it does: it is a ``kind`` and nothing more.

    The one place that knows how a module can be more than its weights: a subclass (an adapter, a quantised layer, a
    parametrisation), a forward or hooks put on the instance (LoRA patches, offloading), hooks put on all modules, or
    weights of a class of their own (quantised, sharded). Such a module must be called.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> is_bare(layer), is_bare(nn.Identity())
        (True, False)
        >>> handle = layer.register_forward_hook(lambda module, args, output: 2 * output)
        >>> is_bare(layer)
        False
    """
    return (
        type(module) is kind
        and not is_altered(module)
        and not _all_are_hooked()
        and all(_is_plain(parameter) for parameter in module._parameters.values())
    )


def is_altered(module: nn.Module, library: str | None = None) -> bool:
    """Return whether ``module`` has a forward or hooks that were put on the instance.

    Args:
        library: whose own hooks do not count, by the name of its package: they only record what passes.

    Example:
        >>> is_altered(nn.Linear(2, 2))
        False
    """
    if "forward" in module.__dict__:
        return True
    found = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if not (found[0] or found[1] or found[2] or found[3]):  # asked of every block in every forward
        return False
    return any(
        library is None or not getattr(hook, "__module__", "").startswith(f"{library}.")
        for hooks in found
        for hook in hooks.values()
    )


def _all_are_hooked() -> bool:
    """Return whether a hook runs at every module, other than that by which PyTorch's counters note where they are."""
    found = (
        hooks_of_all._global_forward_hooks,
        hooks_of_all._global_forward_pre_hooks,
        hooks_of_all._global_backward_hooks,
        hooks_of_all._global_backward_pre_hooks,
    )
    return any(
        getattr(hook, "__module__", "") != "torch.utils.module_tracker" for hooks in found for hook in hooks.values()
    )


def _is_plain(parameter: Any) -> bool:
    """Return whether ``parameter`` is a tensor of PyTorch's own, or what its tracers put in the place of one."""
    kind = type(parameter).__module__
    return parameter is None or kind.startswith(("torch.nn.", "torch._subclasses.")) or kind == "torch"
