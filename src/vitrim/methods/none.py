"""No reduction: every block passes through the same data flow and keeps all its tokens. The baseline of comparisons."""

from __future__ import annotations

from vitrim.core.block import Idle
from vitrim.core.method import MethodConfig
from vitrim.core.registry import register


class NoReduction(MethodConfig):
    """Keep every token.

    For measuring what vitrim itself costs, and, with ``last_block="class_token"``, for the exact saving of a last block
    that computes only what the head reads.

    Example:
        >>> NoReduction().counts(196, 12) == [196] * 12
        True
    """

    name = "none"
    kind = "none"


register(NoReduction)(Idle)
