"""Pictures of a classifier: the patches left after each block, their scores, and the predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.registry import host_of
from vitrim.engines.machine import seeded_draws
from vitrim.errors import VitrimError
from vitrim.measure.contestants import Contestant, ModelOutput, contestants
from vitrim.measure.reducer_calls import ReducerCalls
from vitrim.plots.charts import short
from vitrim.plots.patches import draw_kept, groups_of, in_colour, overlay, sources_of
from vitrim.style import DENSE_COLOUR, OKABE_ITO, SMALL, TEXT, TITLE, sheet
from vitrim.tasks import make_task

LARGE = 224
"""Narrower images are enlarged, so that outlines are thin."""
MOST_BLOCKS = 8
"""Default number of columns, at most."""
LABEL, PANEL, TITLES = 1.9, 1.2, 0.3
"""Inches of the label of a row, of a panel, and of the title of a panel."""
DIFFERENT = OKABE_ITO[5]


class MethodRow(NamedTuple):
    """One method and one image.

    Attributes:
        prediction: class and probability, as text.
        cost: tokens left and share of the MACs, as text.
        sources: (L, P), the token that holds each patch after each block, -1 for none.
        scores: by block, the method's ranking of the patches (P,), nan for removed ones; empty if it does not rank.
    """

    name: str
    prediction: str
    cost: str
    same: bool
    sources: NDArray[np.int64]
    scores: Mapping[int, NDArray[np.float64]]

    def changed(self) -> list[int]:
        """The blocks that change the tokens."""
        depths = range(len(self.sources))
        # Before the first block every patch is its own group.
        every = [np.arange(self.sources.shape[1]), *(groups_of(self.sources[: depth + 1]) for depth in depths)]
        members = []  # groups by their first patch, so that only membership counts
        for groups in every:
            _, first, place = np.unique(groups, return_index=True, return_inverse=True)
            members.append(np.where(groups < 0, -1, first[place]))
        return [depth for depth in depths if not np.array_equal(members[depth], members[depth + 1])]


def prepared(
    model: nn.Module,
    methods: Sequence[MethodConfig | str],
    *,
    device: torch.device | None = None,
    learned: Any = None,
) -> list[Contestant]:
    """A dense classifier and its reductions, see `vitrim.measure.contestants.contestants`."""
    if not methods:
        raise VitrimError("there is nothing to show without a method: give one, e.g. tome:r=8")
    check_shown(model)
    task = make_task("classification", host_of(model).facts(model).num_classes)
    return contestants(model, methods, task, device=device, learned=learned)


def check_shown(model: nn.Module) -> None:
    """Refuse models for dense tasks, and models without classes."""
    facts = host_of(model).facts(model)
    if facts.dense or not facts.num_classes:
        kind = "predicts places, not one class" if facts.dense else "has no classes"
        raise VitrimError(
            f"this model {kind}: only classifiers are shown; see `vitrim show MODEL --data SOURCE` for others"
        )


def rows_of(
    models: Sequence[Contestant], image: Tensor, class_names: Sequence[str] | None = None, *, seed: int = 0
) -> tuple[list[MethodRow], str]:
    """Run the models on one ``image`` (C, H, W): a row for every method, and the dense model's prediction as text."""
    like = next(models[0].model.parameters())
    images = image[None].to(like.device, like.dtype)
    rows, dense = [], None
    for model in models:
        # The same draws in both forwards: the picture shows what was counted.
        with torch.no_grad(), seeded_draws(like.device, seed):
            counted = model.run(images, count=True)
        dense = dense or counted
        if model.reduction is not None:
            # without the count of MACs, to which the rankings would add
            with torch.no_grad(), seeded_draws(like.device, seed), ReducerCalls(model.reduction, scores=True) as calls:
                output = model.run(images)
            text, chosen = _prediction(output, class_names)
            macs, full = (sum((one.macs or {}).values()) for one in (counted, dense))
            cost = f"{output.tokens_at_end} of {dense.tokens_at_end} tokens\n{100 * macs / full:.0f} % of the MACs"
            same = chosen == _prediction(dense, None)[1]
            sources = sources_of(model.reduction.states[1:])
            scores = {call.depth: call.on_grid()[0][0] for call in calls.take() if call.scores is not None}
            rows.append(MethodRow(model.name, text, cost, same, sources, scores))
    assert dense is not None
    return rows, _prediction(dense, class_names)[0]


def _prediction(output: ModelOutput, class_names: Sequence[str] | None) -> tuple[str, int]:
    """The predicted class as text, and its number."""
    shares = output.prediction[0].double().softmax(-1)
    # Names may be fewer than the classes of a head.
    chosen = int(shares.argmax())
    name = f"class {chosen}" if class_names is None or chosen >= len(class_names) else class_names[chosen]
    return f"{name} ({100 * shares[chosen].item():.0f} %)", chosen


# ---- the figure ------------------------------------------------------------------------------------------------------


def draw_show(
    image: NDArray[Any],
    rows: Sequence[MethodRow],
    grid: tuple[int, int],
    *,
    dense: str,
    blocks: Sequence[int] | None = None,
    title: str = "",
) -> Any:
    """A figure: the image on top, then a row per method with the patches left after each block, and a row of scores.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        rows: from `rows_of`.
        grid: rows and columns of the patches.
        dense: the dense model's prediction, as text.
        blocks: the columns, from 0; default: at most eight blocks in which any method changes tokens.
    """
    chosen = _columns(rows, blocks)
    kinds = [(row, kind) for row in rows for kind in ("kept", "score") if kind == "kept" or row.scores]
    ratio = image.shape[0] / image.shape[1]
    count = 1 + len(kinds)
    # Small images are enlarged by a whole factor: -(-a // b) rounds up.
    scale = -(-LARGE // int(image.shape[1]))
    height = count * (PANEL * ratio + 0.1) + 2 * TITLES + (0.3 if title else 0)
    figure = sheet(LABEL + PANEL * max(len(chosen), 3), height)
    widths = [LABEL / PANEL, *[1.0] * max(len(chosen), 3)]
    axes = figure.subplots(count, len(widths), squeeze=False, width_ratios=widths)
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.03, wspace=0.01, hspace=0.01)
    for axis in axes.flat:
        axis.set_axis_off()
    _label(axes[0, 0], "dense", dense, "every token", DENSE_COLOUR)
    _picture(axes[0, 1], in_colour(image), "image")
    # legend, beside the image
    lines = ["grey, hatched: pruned", "orange outline: merged", "red text: another prediction", "blocks count from 0"]
    lines += ["scores: dark low, yellow high"] if any(row.scores for row in rows) else []
    axes[0, 2].set_xlim(0, 1)
    axes[0, 2].set_ylim(0, 1)
    axes[0, 2].text(0.08, 0.95, "\n".join(lines), fontsize=SMALL, va="top", linespacing=1.6).set_in_layout(False)
    for place, (row, kind) in enumerate(kinds, 1):
        if kind == "kept":
            _label(axes[place, 0], short(row.name), row.prediction, row.cost, DENSE_COLOUR if row.same else DIFFERENT)
        else:
            _label(axes[place, 0], "", "", "its scores", DENSE_COLOUR)
        for axis, block in zip(axes[place, 1:], chosen, strict=False):
            if kind == "kept":
                drawn = draw_kept(image, row.sources[: block + 1], grid, scale=scale)
            elif block in row.scores:
                drawn = overlay(image, row.scores[block], grid, scale=scale)
            else:  # no scores in this block
                continue
            _picture(axis, drawn, f"after block {block}" if place == 1 else "")
    if title:
        figure.suptitle(title, fontsize=TITLE + 1)
    return figure


def _columns(rows: Sequence[MethodRow], blocks: Sequence[int] | None) -> list[int]:
    layers = min(len(row.sources) for row in rows)
    if blocks is not None:
        wrong = next((block for block in blocks if not 0 <= block < layers), None)
        if wrong is not None or not blocks:
            raise VitrimError(f"block {wrong} is none of the model's, 0 to {layers - 1}")
        return list(blocks)
    changed = sorted({block for row in rows for block in row.changed()}) or [layers - 1]
    # Spread evenly over the blocks that change tokens, the first and the last among them.
    places = np.linspace(0, len(changed) - 1, min(MOST_BLOCKS, len(changed))).round().astype(int)
    return [changed[place] for place in places]


def _picture(axis: Any, picture: NDArray[Any], title: str) -> None:
    axis.imshow(picture, interpolation="antialiased", vmin=0, vmax=1)
    if title:
        axis.set_title(title, fontsize=TEXT)


def _label(axis: Any, name: str, prediction: str, note: str, colour: str) -> None:
    """Write name, prediction and cost beside a row, from top to bottom."""
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    axis.text(0, 0.92, name, fontsize=TEXT, fontweight="bold", va="top")
    weight = "normal" if colour == DENSE_COLOUR else "bold"
    axis.text(0, 0.74, prediction, fontsize=TEXT, va="top", color=colour, fontweight=weight)
    axis.text(0, 0.56, note, fontsize=SMALL, va="top", linespacing=1.4)
    # Long texts must not widen the column, or the pictures shrink.
    for text in axis.texts:
        text.set_in_layout(False)
