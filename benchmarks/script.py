"""Shared by the scripts: errors in one line, records, tables in Markdown, and methods at a share of the MACs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.registry import make_method
from vitrim.errors import VitrimError, one_line
from vitrim.files import json_text, write_text
from vitrim.measure.latency import Budget
from vitrim.tuning.cost import MacsCost, within
from vitrim.tuning.space import Space

Row = dict[str, Any]


def from_shell(main: Callable[[], object]) -> None:
    """Call ``main``; a `VitrimError` ends the process with its message alone, any other is a defect and is raised."""
    try:
        main()
    except VitrimError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)


def write_json(target: str | Path | None, record: Mapping[str, Any]) -> None:
    """Write a record to a file, whole or not at all; for None, none."""
    if target is not None:
        write_text(Path(target), json_text(record, indent=2) + "\n")


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown.

    Example:
        >>> print(table(["method", "ms"], [("dense", 2), ("tome", 1)]))
        | method | ms |
        |---|---|
        | dense | 2 |
        | tome | 1 |
    """
    names = list(head)
    lines = [names, *rows]
    text = [f"| {' | '.join(map(str, cells))} |" for cells in lines]
    return "\n".join([text[0], "|---" * len(names) + "|", *text[1:]])


def spread(median: float, low: float, high: float) -> str:
    """A ratio with its quartiles.

    Example:
        >>> spread(1.5, 1.4, 1.625)
        '1.50 [1.40, 1.62]'
    """
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def exactly(rounds: int, warmup: int = 1) -> Budget:
    """A budget of so many rounds, whatever they take."""
    return Budget(rounds, 0.0, max_rounds=rounds, warmup_rounds=warmup)


def at_share(model: nn.Module, method: str, images: Tensor, share: float) -> MethodConfig:
    """The mildest setting of ``method`` with at most ``share`` of the dense MACs on ``images``, else the strongest."""
    config = make_method(method)
    if config.tunable is None:
        return config
    space = Space.of(model, config)
    cost = MacsCost(model, space, [images])
    strongest = space.constant(1.0)
    return within(space, None, cost, max(share, cost.share(strongest))) or strongest
