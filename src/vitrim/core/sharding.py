"""Models under FSDP2 (``fully_shard``): the classes it puts above those of blocks, the parts it leaves of tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn


def copy_into(target: Tensor, values: Tensor) -> None:
    """Copy ``values``, complete in every process, into ``target``, of which FSDP2 may leave each process a part."""
    if type(target.data).__module__.startswith("torch.distributed"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(target.data, DTensor)
        whole = values.to(device=target.device, dtype=target.dtype)
        values = distribute_tensor(whole, target.data.device_mesh, target.data.placements)
    target.copy_(values)


def sharded(block: nn.Module) -> bool:
    """Return whether FSDP2 (``fully_shard``) has put a class of its own above the class of ``block``."""
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
