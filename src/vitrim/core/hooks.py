"""Parts that `reduce_` puts on a model besides its blocks: objects, so that it can still be copied and pickled."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vitrim.core.block import ReducedBlock, reduced_in
from vitrim.core.host import Host
from vitrim.core.layers import is_altered
from vitrim.core.trace import Trace
from vitrim.errors import UnsupportedModelError


class GridHook:
    """Hook that tells the blocks the grid of the patches after every call of the module that makes them.

    Only on models whose method asks for it. An object and not a function, so that the model can still be copied and
    pickled.
    """

    def __init__(self, host: type[Host], trace: Trace) -> None:
        self.host = host
        self.trace = trace

    def __call__(self, maker: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.trace.see_grid(self.host.grid_of(maker, args, output))

    @staticmethod
    def remove(maker: nn.Module | None) -> None:
        """Remove all such hooks from ``maker``, the module that makes the patches."""
        hooks = {} if maker is None else maker._forward_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, GridHook)]:
            del hooks[key]


class DenseCall:
    """A method of a reduced model whose tokens come out on the full grid of patches, un-merged after every block.

    Stored on the instance under the method's own name. An object rather than a function, so that the model can still
    be copied and pickled.
    """

    def __init__(self, model: nn.Module, name: str, trace: Trace) -> None:
        self.model = model
        self.name = name
        self.trace = trace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.trace.dense():
            return getattr(type(self.model), self.name)(self.model, *args, **kwargs)


class FormOfModel:
    """What a model was like when it was reduced: its blocks, what they bypass, and its `Host.form`.

    An object, so that models can be copied and pickled.
    """

    def __init__(self, host: type[Host], model: nn.Module, reduced: Sequence[type[ReducedBlock]]) -> None:
        self.host = host
        self.model = model
        self.form = host.form(model)
        bypassed = [kind.bypassed(block) for block, kind in zip(host.blocks(model), reduced, strict=True)]
        self.kinds: list[list[type[nn.Module]]] | None = [[type(part) for part in parts] for parts in bypassed]

    def check(self) -> None:
        """See `vitrim.core.trace.Form`."""
        if (problem := self._changed_blocks()) is not None:
            raise UnsupportedModelError(problem)
        if self.host.form(self.model) != self.form:
            raise UnsupportedModelError(self._changed("the pooling or the image size"))

    # a compiler asks once, and need not follow: it may come to the block that it compiles through what wraps it
    @torch.compiler.assume_constant_result
    def _changed_blocks(self) -> str | None:
        """What is no longer as it was about the blocks; None where nothing is."""
        if self.kinds is None:
            return None
        blocks = self.host.blocks(self.model)
        if len(blocks) != len(self.kinds):
            return self._changed("the number of blocks")
        for depth, (found, kinds) in enumerate(zip(blocks, self.kinds, strict=True)):
            block = reduced_in(found)
            if block is None or block.depth != depth or block.trace.form is not self:
                return self._changed(f"block {depth}")
            for part, kind in zip(block.bypassed(block), kinds, strict=True):
                if type(part) is not kind:
                    return self._changed(f"the {kind.__name__} in block {depth}")
                if is_foreign(part):
                    return altered(part, f"block {depth} of this {type(self.model).__name__}")
        return None

    def _changed(self, what: str) -> str:
        return (
            f"{what} of this {type(self.model).__name__} was changed after it was reduced: call "
            "vitrim.restore_(model), then vitrim.reduce_ again"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FormOfModel:
        twin = copy.copy(self)
        if id(self.model) in memo:
            twin.model = memo[id(self.model)]
        else:  # a block copied alone still belongs to its model, but is not one of its blocks
            twin.kinds = None
        return twin


def is_foreign(part: nn.Module) -> bool:
    """Return whether a bypassed module (`ReducedBlock.bypassed`) has hooks or a forward put on the instance.

    Hooks of the host library itself, which only record what passes, do not count.
    """
    return is_altered(part, library=type(part).__module__.partition(".")[0])


def altered(part: nn.Module, where: str) -> str:
    """The refusal of a bypassed module that `is_foreign`."""
    return (
        f"{where}: the module {type(part).__name__} has hooks or a forward of its own, and a reduced block calls what "
        "is in it, not the module; put them on the block or its projections instead"
    )


def refuse_own_forward(block: nn.Module, depth: int, then: str) -> None:
    """Refuse a block whose forward is not that of its class: accelerate's hooks keep the one that they found.

    Raises:
        UnsupportedModelError: saying so.
    """
    if "forward" in vars(block):
        raise UnsupportedModelError(
            f"block {depth} has a forward of its own, put on the instance, which would go on calling the one that it "
            f"replaced; take it off (accelerate.hooks.remove_hook_from_module does that with accelerate's), then {then}"
        )
