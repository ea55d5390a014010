"""Modules that are more than their class: parts under FSDP2, empty on the meta device, hooked, adapted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Self, TypeGuard, TypeVar

import torch
import torch.nn.modules.module as hooks_of_all
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def is_bare(module: nn.Module, kind: type[M] = nn.Linear) -> TypeGuard[M]:  # type: ignore[assignment]
    """True if reading the weights of ``module`` does what calling it does: it is a ``kind`` and nothing more.

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
    """True if ``module`` has a forward or hooks that were put on the instance.

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
    """True if a hook runs at every module, other than that by which PyTorch's counters note where they are."""
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
    """True if ``parameter`` is a tensor of PyTorch's own, or what its tracers put in the place of one."""
    kind = type(parameter).__module__
    return parameter is None or kind.startswith(("torch.nn.", "torch._subclasses.")) or kind == "torch"


def copy_into(target: Tensor, values: Tensor) -> None:
    """Copy ``values``, complete in every process, into ``target``, of which FSDP2 may leave each process a part."""
    if type(target.data).__module__.startswith("torch.distributed"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(target.data, DTensor)
        whole = values.to(device=target.device, dtype=target.dtype)
        values = distribute_tensor(whole, target.data.device_mesh, target.data.placements)
    target.copy_(values)


def sharded(block: nn.Module) -> bool:
    """True if FSDP2 (``fully_shard``) has put a class of its own above the class of ``block``."""
    return any(base.__module__.startswith("torch.distributed") for base in type(block).__bases__)


def class_of(block: nn.Module) -> type[nn.Module]:
    """The class of ``block`` as its library wrote it, which FSDP2 turns from Block to FSDPBlock(FSDPModule, Block)."""
    return type(block).__bases__[-1] if sharded(block) else type(block)


def change_class(block: nn.Module, kind: Any) -> None:
    """Give ``block`` the class ``kind`` in place of its own, below what FSDP2 may have put above it."""
    own: Any = type(block)
    block.__class__ = _shard_of(own, kind) if sharded(block) else kind


@cache  # one class for all blocks: compiled code is guarded by it
def _shard_of(wrapped: Any, kind: Any) -> type[nn.Module]:
    """The class FSDP2 would have made from ``kind``, as it made ``wrapped`` from another."""
    return type(f"FSDP{kind.__name__}", (*wrapped.__bases__[:-1], kind), {"__deepcopy__": wrapped.__deepcopy__})


class FromMeta(nn.Module):
    """A module that has its first values when it leaves the meta device.

    ``to_empty`` leaves memory as it finds it, and neither tables nor parameters of a method are in the weights of the
    host that are loaded afterwards.
    """

    def again(self) -> FromMeta:
        """Another one with the same options, with first values."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` as every module does (``to``, ``to_empty``, ...); what leaves meta gets its values."""
        was_meta = any(tensor.is_meta for tensor in self.state_tensors().values())
        super()._apply(fn, recurse)
        if was_meta and not any(tensor.is_meta for tensor in self.state_tensors().values()):
            with torch.inference_mode(False), torch.no_grad():
                first = self.again().state_tensors()
                for name, tensor in self.state_tensors().items():
                    copy_into(tensor, first[name])
        return self

    def state_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, including those that are not in the ``state_dict``."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


def access(name: str, root: str = "model") -> str:
    """The Python expression for the submodule that ``named_modules`` calls ``name``.

    Example:
        >>> access("towers.0.vision")
        'model.towers[0].vision'
    """
    if not name:
        return root
    return root + "".join(
        f".{part}" if part.isidentifier() else f"[{part}]" if part.isdigit() else f"[{part!r}]"
        for part in name.split(".")
    )


class Exchange(nn.Module):
    """Base class of modules that carry information between two streams of tokens.

    ViTTM's read and write heads and LookupViT's two-way attention are such modules. The class does nothing itself: it
    tells the MAC counter (`vitrim.measure.macs`) which products are exchange, because published figures count them
    even where they leave the self-attention of the blocks out. Only products inside ``forward`` are recognised.

    Example:
        >>> class Mean(Exchange):
        ...     def forward(self, source, target):
        ...         return target + source.mean(1, keepdim=True)
    """
