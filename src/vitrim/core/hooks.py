"""Parts that `reduce_` puts on a model besides its blocks: objects, so that it can still be copied and pickled."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.block import ReducedBlock, reduced_in
from vitrim.core.host import Host
from vitrim.core.method import MethodConfig, Restore
from vitrim.core.modules import is_altered
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


class ZeroHook:
    """Hook that leaves rows of zeros zeros behind a norm, which would make its bias of them: those of pruned patches.

    On the norms behind the blocks of a model. A row is told by its zeros and not by
    the state, since a host may norm the outputs of several blocks when all of them have run, or cut them first.
    """

    def __init__(self, trace: Trace, always: bool) -> None:
        self.trace = trace
        self.always = always  # pruned patches are zeros in every forward, and not on full grids alone

    def __call__(self, norm: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        latest = self.trace.latest
        if latest is None or not (self.always or latest[1].full_grid) or args[0].dim() != 3:
            return None
        return output.masked_fill((args[0] == 0).all(-1, keepdim=True), 0.0)

    @classmethod
    def install(
        cls, model: nn.Module, block: nn.Module, trace: Trace, config: MethodConfig, restore: Restore | None
    ) -> None:
        """Put the hook on every norm of ``model`` that comes behind ``block``, its last one, if the method prunes."""
        for norm in norms_behind(model, block) if config.kind in ("prune", "mixed") else []:
            norm.register_forward_hook(cls(trace, restore == "zeros"))

    @classmethod
    def remove(cls, model: nn.Module) -> None:
        """Undo `install`, if it was done, whatever became of the blocks since then."""
        for norm in model.modules():
            for key in [key for key, hook in norm._forward_hooks.items() if isinstance(hook, cls)]:
                del norm._forward_hooks[key]


def norms_behind(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """The layers with a weight and a bias per channel that stand behind ``block``, or behind a module it is in.

    Example:
        >>> model = nn.Sequential(nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4)), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> norms_behind(model, model[1][0]) == [model[2]]
        True
    """
    name = next(name for name, module in model.named_modules() if module is block)
    found: list[nn.Module] = []
    holder = model
    for part in name.split("."):
        children = list(holder._modules)
        behind = [holder._modules[child] for child in children[children.index(part) + 1 :]]
        found += [layer for layer in behind if isinstance(layer, nn.Module) and _is_norm(layer)]
        holder = holder.get_submodule(part)
    return found


def _is_norm(layer: nn.Module) -> bool:
    affine = [getattr(layer, name, None) for name in ("weight", "bias")]
    return not layer._modules and all(isinstance(vector, Tensor) and vector.dim() == 1 for vector in affine)


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
    """The blocks of a model when it was reduced, what they bypass, and its `Host.form`.

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
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _changed_blocks(self) -> str | None:
        """Say what is no longer as it was about the blocks; None where nothing is."""
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
    """True if a bypassed module (`ReducedBlock.bypassed`) has hooks or a forward put on the instance.

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
