"""What vitrim must know about a host family. One subclass per family, in ``hosts/``."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any, ClassVar

from torch import Tensor, nn

from vitrim.core.block import ReducedBlock, class_of
from vitrim.core.facts import Head, HostFacts
from vitrim.core.tokens import Trace
from vitrim.errors import UnsupportedModelError


class Host:
    """A host family. Class methods only: a host has no state of its own."""

    name: ClassVar[str] = ""
    """How `vitrim list hosts` calls the family."""
    heads: ClassVar[tuple[Head, ...]] = ("class token", "patches", "no class token")
    """What heads models of the family have; tokens that a model hands out are a head that reads patches."""
    reduced_blocks: ClassVar[tuple[type[ReducedBlock], ...]] = ()
    """The reduced form of every block class the family uses."""

    @classmethod
    def check(cls, model: nn.Module) -> None:
        """Raise `UnsupportedModelError` if this model of the family cannot be reduced faithfully."""

    @classmethod
    def blocks(cls, model: nn.Module) -> list[nn.Module]:
        """The transformer blocks in the order in which they run."""
        raise NotImplementedError

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        """Geometry of ``model``."""
        raise NotImplementedError

    @classmethod
    def form(cls, model: nn.Module) -> Hashable:
        """What the reduction rests on and calls of the library may change later: read in every forward, so cheap."""
        return None

    @classmethod
    def classifiers(cls, model: nn.Module) -> list[nn.Module]:
        """The layers that turn the feature (B, C) into logits; the feature is the mean of their inputs.

        Raises:
            UnsupportedModelError: a model without a classifier, such as a bare feature extractor.
        """
        raise UnsupportedModelError(f"{type(model).__name__} has no classifier")

    @classmethod
    def logits(cls, output: Any) -> Tensor:
        """(B, K) logits in what a call of the model returned."""
        assert isinstance(output, Tensor)
        return output

    @classmethod
    def set_fused(cls, model: nn.Module, fused: bool) -> bool:
        """Let attention run fused or written out; whether the family has that choice."""
        return False

    @classmethod
    def patch_maker(cls, model: nn.Module) -> nn.Module | None:
        """The module whose call, once in every forward, shows the grid of patches (`grid_of`); None if none does."""
        return None

    @classmethod
    def grid_of(cls, maker: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        """Rows and columns of the patches by a call of the `patch_maker`; None if it does not show them.

        By default the output is a map of patches, (B, C, rows, columns).
        """
        if not isinstance(output, Tensor) or output.dim() != 4:
            return None
        return output.shape[2], output.shape[3]

    @classmethod
    def install(cls, model: nn.Module, trace: Trace) -> None:
        """Anything besides the blocks that must change, e.g. calls that hand out dense features."""

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        """Take back what `install` did."""

    @classmethod
    def reduced_class(cls, block: nn.Module) -> type[ReducedBlock]:
        """The reduced form of ``block``.

        Raises:
            UnsupportedModelError: its class is not one of the family's. A subclass is refused too: its forward may
                do something that the reduced form would silently leave out.
        """
        for reduced in cls.reduced_blocks:
            if class_of(block) is reduced.host_class:
                return reduced
        known = ", ".join(reduced.host_class.__name__ for reduced in cls.reduced_blocks)
        raise UnsupportedModelError(
            f"blocks of class {type(block).__name__} are not supported in {cls.name}; supported: {known}"
        )


class FormOfModel:
    """The `Host.form` that a model had when it was reduced. An object, so that models can be copied and pickled."""

    def __init__(self, host: type[Host], model: nn.Module) -> None:
        self.host = host
        self.model = model
        self.form = host.form(model)

    def check(self) -> None:
        """See `vitrim.core.tokens.Form`."""
        if self.host.form(self.model) != self.form:
            raise UnsupportedModelError(
                f"the pooling or the image size of this {type(self.model).__name__} was changed after it was reduced: "
                "call vitrim.restore_(model), then vitrim.reduce_ again"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> FormOfModel:
        twin = copy.copy(self)
        twin.model = memo.get(id(self.model), self.model)  # a block copied alone still belongs to its model
        return twin


def refuse_altered(attn: nn.Module, family: str) -> None:
    """Refuse an attention module with hooks or a forward put on the instance: a reduced block does not call it.

    Hooks of the host library itself, which only record what passes, may stay.

    Raises:
        UnsupportedModelError: saying so.
    """
    library = type(attn).__module__.partition(".")[0]
    hooks = [*attn._forward_hooks.values(), *attn._forward_pre_hooks.values()]
    foreign = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith(f"{library}.")]
    if foreign or "forward" in vars(attn):
        raise UnsupportedModelError(
            f"{family}: the attention module {type(attn).__name__} has hooks or a forward of its own, and a reduced "
            "block calls its projections, not the module; put them on the block or the projections instead"
        )


class GridHook:
    """Tells the blocks, after every call of the module that makes the patches, what grid these have.

    Only on models whose method asks for it. An object and not a function, so that the model can still be copied and
    pickled.
    """

    def __init__(self, host: type[Host], trace: Trace) -> None:
        self.host = host
        self.trace = trace

    def __call__(self, maker: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.trace.see_grid(self.host.grid_of(maker, args, output))

    @staticmethod
    def remove(model: nn.Module) -> None:
        """Take all such hooks off ``model``."""
        for module in model.modules():
            for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, GridHook)]:
                del module._forward_hooks[key]


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
