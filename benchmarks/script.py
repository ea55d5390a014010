"""Shared by the scripts: errors in one line, records, tables in Markdown, and methods at a share of the MACs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.registry import host_of, make_method, methods
from vitrim.engines.macs import profile_of
from vitrim.errors import VitrimError, one_line
from vitrim.files import json_text, write_text
from vitrim.measure.latency import Budget
from vitrim.tuning import match_macs

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
    """The setting of ``method`` whose MACs on ``images`` come nearest to ``share`` of the dense model's."""
    tunable = methods()[method].tunable
    if tunable is None:
        return make_method(method)
    if not make_method(method).is_adaptive():
        images = images[:1]  # counts are the same for all
    height, width = host_of(model).facts(model).grid_size
    value = partial(tunable.value, patches=height * width)

    def setting(strength: float) -> MethodConfig:
        return make_method(method, **{**tunable.fixed, tunable.option: value(strength)})

    dense = profile_of(model, None, images).macs.total
    ends = [profile_of(model, setting(strength), images).macs.total / dense for strength in (0.0, 1.0)]
    within = min(max(share, min(ends)), max(ends))  # a method that cannot reach the share gets as near as it can
    return match_macs(model, images, setting, within, low=0.0, high=1.0, max_steps=12)
