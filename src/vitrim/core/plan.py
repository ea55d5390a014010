"""The plan of a reduction: what a method does in every block of a model, worked out once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vitrim.core.config import MethodConfig
from vitrim.core.facts import HostFacts
from vitrim.core.schedule import Amount, effective_keep


@dataclass(frozen=True)
class Layer:
    """One block of a plan: where it stands, what the model is like, and how much is reduced there.

    Attributes:
        depth: 0-based index of the block.
        num_layers: number of blocks.
        dim: channels C.
        num_heads: attention heads H.
        num_classes: classes of the host's head (0 without one).
        num_prefix: protected tokens at the front.
        has_class_token: whether token 0 is a class token.
        grid_size: rows and columns of patches, or of cells of them, at the model's own image size.
        amounts: the amounts of all blocks, None where the method does not act.
    """

    depth: int
    num_layers: int
    dim: int
    num_heads: int
    num_classes: int
    num_prefix: int
    has_class_token: bool
    grid_size: tuple[int, int]
    amounts: tuple[Amount | None, ...] = ()
    _kept: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def keep(self, config: MethodConfig, initial: int, current: int) -> int:
        """The number of patch tokens that this block keeps of ``current`` ones, ``initial`` at first.

        Remembered, as it is asked for several times in every forward; ``config`` is always that of the plan.
        """
        if torch.compiler.is_compiling():  # which would compile again when something new is remembered
            return self._keep(config, initial, current)
        if (initial, current) not in self._kept:
            self._kept[initial, current] = self._keep(config, initial, current)
        return self._kept[initial, current]

    def _keep(self, config: MethodConfig, initial: int, current: int) -> int:
        amount = self.amount
        return current if amount is None else effective_keep(amount, config.least_kept(current), initial, current)

    @property
    def amount(self) -> Amount | None:
        """The amount of patch tokens this block keeps; None where nothing is planned."""
        return self.amounts[self.depth] if self.amounts else None

    @property
    def is_last(self) -> bool:
        """Tell whether this is the last block."""
        return self.depth == self.num_layers - 1

    @property
    def initial_patches(self) -> int:
        """Patch tokens that enter the first block at the model's own image size."""
        return self.grid_size[0] * self.grid_size[1]


def plan(config: MethodConfig, facts: HostFacts, num_layers: int) -> tuple[Layer, ...]:
    """Plan ``config`` for a model: one `Layer` per block. The amounts are evaluated here and nowhere else.

    Raises:
        VitrimError: the options do not fit a model of ``num_layers`` blocks.

    Example:
        >>> import timm, vitrim
        >>> from vitrim.core.registry import host_of
        >>> model = timm.create_model("vit_tiny_patch16_224")
        >>> layers = plan(vitrim.ToMe(r=8), host_of(model).facts(model), 12)
        >>> layers[3].amount.keep(196, 172)
        164
    """
    config.check(num_layers)
    amounts = tuple(config.planned(num_layers, facts.num_prefix))
    return tuple(
        Layer(
            depth=depth,
            num_layers=num_layers,
            dim=facts.dim,
            num_heads=facts.num_heads,
            num_classes=facts.num_classes,
            num_prefix=facts.num_prefix,
            has_class_token=facts.has_class_token,
            grid_size=facts.units,
            amounts=amounts,
        )
        for depth in range(num_layers)
    )
