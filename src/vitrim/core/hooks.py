"""Parts that `reduce_` puts on a model besides its blocks: objects, so that it can still be copied and pickled."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from vitrim.core.host import Host
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
    """The `Host.form` that a model had when it was reduced. An object, so that models can be copied and pickled."""

    def __init__(self, host: type[Host], model: nn.Module) -> None:
        self.host = host
        self.model = model
        self.form = host.form(model)

    def check(self) -> None:
        """See `vitrim.core.trace.Form`."""
        if self.host.form(self.model) != self.form:
            raise UnsupportedModelError(
                f"the pooling or the image size of this {type(self.model).__name__} was changed after it was reduced: "
                "call vitrim.restore_(model), then vitrim.reduce_ again"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> FormOfModel:
        twin = copy.copy(self)
        twin.model = memo.get(id(self.model), self.model)  # a block copied alone still belongs to its model
        return twin
