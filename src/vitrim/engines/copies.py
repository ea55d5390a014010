"""Copies of a model that share its weights: unchanged, per attention kernel, or reduced."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import Reduction, get_reduction, reduce_, refuse_reduced, restore_
from vitrim.core.registry import ask
from vitrim.core.saving import saved_method
from vitrim.core.selection import Selector
from vitrim.engines.prefill import Prefill


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that shares its parameters and buffers, so it needs almost no memory."""
    # `deepcopy` takes what its memo names for copied already.
    weights = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(weight): weight for weight in weights})


def take_learned(reduction: Reduction, learned: Path | None) -> None:
    """Load the parameters in ``learned``, a folder of `Reduction.save`, if they are of the same method."""
    if learned is not None and reduction.config.name == saved_method(learned):
        reduction.load_parameters(learned)


def reduced_copy(model: nn.Module, method: MethodConfig | str, learned: Path | None = None) -> nn.Module:
    """A copy of ``model`` that shares its weights and is reduced by ``method``; a `Prefill` with ``compact=True``."""
    refuse_reduced(model)
    reduced = shared_copy(model)
    select = model.select if isinstance(model, Prefill) else None
    take_learned(reduce_(reduced, method, compact=isinstance(model, Prefill), select=select), learned)
    return reduced


@dataclass(frozen=True)
class Apart:
    """A dense model and how it was reduced: by which method and selector, with the parameters in a folder."""

    model: nn.Module
    method: MethodConfig | None = None
    select: Selector | None = None
    learned: Path | None = None

    def with_own(self, methods: Sequence[MethodConfig]) -> list[MethodConfig]:
        """The model's own method and then ``methods``, without duplicates."""
        every = [*([] if self.method is None else [self.method]), *methods]
        return list({config.describe(): config for config in every}.values())


@contextmanager
def apart(model: nn.Module) -> Iterator[Apart]:
    """Separate ``model`` from its reduction; the dense model is a copy that shares its weights.

    The folder of learned parameters exists within the ``with`` statement only. An error if several parts are reduced.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit")
        >>> _ = reduce_(model, "tome:r=8")
        >>> with apart(model) as found:
        ...     print(found.method.describe(), get_reduction(found.model))
        tome:r=8 None
    """
    reduction = get_reduction(model)
    if reduction is None:
        yield Apart(model)
        return
    dense = shared_copy(model)
    restore_(dense)
    with TemporaryDirectory() as folder:
        reduction.save(folder)
        yield Apart(dense, reduction.config, reduction.select, Path(folder))


def dense_copies(model: nn.Module) -> dict[str, nn.Module]:
    """Copies of the unreduced model, one for each attention kernel of its library, which share its weights.

    The keys are "fused" and "unfused" for hosts with both, else "host".
    """
    # The faster kernel depends on device, dtype and shape, so a fair baseline measures both.
    library = ask(model)
    fused, unfused = shared_copy(model), shared_copy(model)
    if not library.set_fused(fused, True):
        return {"host": fused}
    library.set_fused(unfused, False)
    return {"fused": fused, "unfused": unfused}
