"""Tokens at every block of a reduced model, and the multiply-accumulates (MACs) saved: the numbers a handle prints.

MACs are estimated from the sizes of the weights, without running anything; `vitrim.engines.macs` counts a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from vitrim.core.block import ReducedBlock
from vitrim.core.method import Kind, MethodConfig
from vitrim.core.plan import Grid, HostFacts
from vitrim.core.tokens import Call, Entered


class TokenRun(NamedTuple):
    """Tokens per block for images of one size, of one window, prefix included.

    Attributes:
        windows: windows of an image, which are reduced separately.
        entering: tokens that enter each block.
        left: tokens that each block computes with at its end.
        leaving: as ``left``, plus the pruned patches that come back after the last block.
    """

    images: int
    windows: int
    entering: tuple[int, ...]
    left: tuple[int, ...]
    leaving: tuple[int, ...]

    def of_images(self, way: str) -> list[int]:
        """Tokens of a whole image at every block; ``way`` is ``entering``, ``left`` or ``leaving``."""
        return [self.windows * count for count in getattr(self, way)]


def units_of(entered: Entered, facts: HostFacts) -> Grid:
    """Rows and columns of the patches that ``entered``, or of their cells; one row if no method asked for the grid."""
    own = facts.grid_size if prod(facts.grid_size) == entered.patches else (facts.cell, entered.patches // facts.cell)
    rows, columns = entered.grid or own
    return rows // facts.cell, columns // facts.cell


def planned(config: MethodConfig, facts: HostFacts, blocks: Sequence[ReducedBlock], entered: Entered) -> TokenRun:
    """The planned run of the images that ``entered``, under a method whose counts do not depend on them."""
    area, prefix, last = facts.cell**2, facts.num_prefix, blocks[-1]
    flow = config.flow(entered.patches // area, len(blocks), units_of(entered, facts), prefix, last.restore)
    assert flow is not None
    # From patches, or cells of `area` patches, to tokens with the prefix; one list for each field of `Flow`.
    ways = [[prefix + count * area for count in way] for way in zip(*flow, strict=True)]
    if last.head_rows is not None:
        ways[1][-1] = ways[2][-1] = last.head_rows
    return TokenRun(entered.rows // entered.windows, entered.windows, *map(tuple, ways))


def recorded(call: Call, blocks: Sequence[ReducedBlock]) -> list[TokenRun]:
    """The runs of the last forward of a ``call`` that kept its states."""
    states, (first, *others) = call.states, call.entered
    if others:
        images = [(1, 1, [*counts]) for counts in zip(*(state.tokens_of_images() for state in states), strict=True)]
    else:  # padding slots are computed
        images = [(first.rows // first.windows, first.windows, [state.num_tokens // first.windows for state in states])]
    rows = None if states[-1].asked.full_grids else blocks[-1].head_rows
    runs = []
    for number, windows, counts in images:
        # The last block's head may read fewer rows than tokens are left.
        left = (*counts[1:-1], rows or counts[-1])
        runs.append(TokenRun(number, windows, tuple(counts[:-1]), left, left))
    return runs


def mean(runs: Sequence[TokenRun], way: str) -> list[float]:
    """`TokenRun.of_images`, averaged over all images."""
    total = sum(run.images for run in runs)
    blocks = zip(*([run.images * count for count in run.of_images(way)] for run in runs), strict=True)
    return [sum(counts) / total for counts in blocks]


LINE = 80
"""Columns of `as_text`."""


def as_text(counts: Sequence[tuple[float, float]]) -> list[str]:
    """Lines with the tokens that enter and leave every block."""
    columns = [(depth, *each) for depth, each in enumerate(counts)]
    width = 1 + max(len(f"{number:g}") for column in columns for number in column)
    lines = []
    for first in range(0, len(columns), per_line := max((LINE - 12) // width, 1)):
        part = columns[first : first + per_line]
        for name, row in zip(("block", "tokens in", "tokens out"), zip(*part, strict=True), strict=True):
            lines.append(f"  {name:<10}" + "".join(f"{number:>{width}g}" for number in row))
    return lines


def as_html(counts: Sequence[tuple[float, float]]) -> str:
    """A table of the tokens that enter and leave every block, with a bar for those that leave."""
    most = max(map(max, counts))
    rows = "".join(
        f"<tr><td>{depth}</td><td>{before:g}</td><td>{after:g}</td><td style='text-align:left'>"
        f"<div style='background:#3b78b5;height:0.7em;width:{round(200 * after / most)}px'></div></td></tr>"
        for depth, (before, after) in enumerate(counts)
    )
    return f"<table><tr><th>block</th><th>tokens in</th><th>tokens out</th><th></th></tr>{rows}</table>"


def saved_share(runs: Sequence[TokenRun], blocks: Sequence[ReducedBlock], dim: int, kind: Kind) -> float:
    """The share of the MACs of ``blocks`` (projections, attention and MLPs only) that ``runs`` save."""
    dense = spent = 0.0
    for block, weights in [(block, _mlp_weights(block, dim)) for block in blocks]:
        for run in runs:
            entering, left, first = run.entering[block.depth], run.left[block.depth], run.entering[0]
            crossed = run.windows if block.crosses else 1
            rows = run.images * run.windows
            spent += rows * _macs(block, kind, dim, weights, entering, left, crossed)
            # Per token four projections of attention and the MLP; per pair of tokens the two products of attention.
            dense += rows * ((4 * dim * dim + weights) * first + 2 * dim * first * first * crossed)
    return 1 - spent / dense


def _mlp_weights(block: ReducedBlock, dim: int) -> int:
    """Weights of ``block`` besides the four projections of attention."""
    matrices = sum(p.numel() for name, p in block.named_parameters() if p.dim() > 1 and "reducer" not in name)
    return matrices - 4 * dim * dim


def _macs(block: ReducedBlock, kind: Kind, dim: int, mlp: int, entering: int, left: int, crossed: int) -> int:
    """MACs of ``block`` on one window whose tokens attend to those of ``crossed`` windows."""
    site, rows = block.reducer.site, block.head_rows
    # Nothing was removed, or only after everything was computed.
    if entering == left or (block.parallel and site == "between"):
        site = "after"
    keys = left if site == "before" else entering
    asked = keys if rows is None or site == "query" else rows  # queries projected
    attending = rows or (left if site == "before" or (site == "query" and kind == "prune") else entering)
    projected = rows or (left if site in ("before", "query") else entering)
    valued = left if site == "query" and block.reducer.fresh_values and rows is None else keys
    linear = dim * dim * (asked + keys + valued + projected) + mlp * (rows or (entering if site == "after" else left))
    if site == "query" and block.reducer.attends_anew:  # the deciding map is computed besides attention
        return linear + 3 * dim * dim * left + 2 * dim * (rows or left) * left * crossed
    return linear + 2 * dim * attending * keys * crossed
