"""Modules that a host is given before its weights are: on the meta device, where tensors have a shape and no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from vitrim.core.sharding import copy_into


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
