"""No reduction, the baseline: every block runs vitrim's data flow and keeps all its tokens."""

from __future__ import annotations

from vitrim.core.block import Idle
from vitrim.core.method import MethodConfig
from vitrim.core.registry import register


class NoReduction(MethodConfig):
    """Keep every token.

    Measures the overhead of vitrim, and with ``last_block="class_token"`` the exact saving of a smaller last block.

    Example:
        >>> NoReduction().counts(196, 12) == [196] * 12
        True
    """

    name = "none"
    kind = "none"


register(NoReduction)(Idle)
