"""One picture per image: what methods leave of it block by block, the scores they go by, what the models predict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrim.core.block import ReducedBlock, Reducer
from vitrim.core.method import MethodConfig
from vitrim.core.registry import ask, host_of
from vitrim.core.tokens import TokenState
from vitrim.errors import VitrimError
from vitrim.measure.contestants import Contestant, Output, contestants
from vitrim.measure.drawing import drawing
from vitrim.plots.charts import short
from vitrim.plots.patches import Image, draw_kept, groups_of, in_colour, overlay, sources_of
from vitrim.plots.style import DENSE_COLOUR, OKABE_ITO, SMALL, TEXT, TITLE, sheet
from vitrim.tasks import make_task

__all__ = ["Row", "check_shown", "draw_show", "pixels_of", "prepared", "rows_of", "show"]

MOST_BLOCKS = 8
"""Columns of a picture where none are chosen."""
LARGE = 224
"""Images narrower than this are enlarged, so that outlines are thin."""
LABEL, PANEL, TITLES = 1.9, 1.2, 0.3
"""Inches of the text beside a row, of a panel, of what stands above one."""
DIFFERENT = OKABE_ITO[5]


class Row(NamedTuple):
    """One method and one image.

    Attributes:
        name: of the method.
        prediction: class and probability, in words.
        cost: tokens left and the share of the multiply-accumulates, in words.
        same: the prediction is the dense model's.
        sources: (L, P), the token that holds each patch after each block, -1 for none.
        scores: by block, what the method ranked its patches by, (P,), nan for those that were gone; none of a method
            that does not rank them.
    """

    name: str
    prediction: str
    cost: str
    same: bool
    sources: NDArray[np.int64]
    scores: Mapping[int, NDArray[np.float64]]

    def changed(self) -> list[int]:
        """The blocks after which tokens are others than before."""
        start = np.arange(self.sources.shape[1])
        every = [start, *(_partition(groups_of(self.sources[: depth + 1])) for depth in range(len(self.sources)))]
        return [depth for depth in range(len(self.sources)) if not np.array_equal(every[depth], every[depth + 1])]


def _partition(groups: NDArray[Any]) -> NDArray[Any]:
    """Groups by the first patch of each, so that only who is together counts; -1 stays."""
    found = np.full(len(groups), -1)
    first: dict[int, int] = {}
    for place, group in enumerate(groups.tolist()):
        if group >= 0:
            found[place] = first.setdefault(group, place)
    return found


def show(
    model: nn.Module,
    image: Tensor,
    methods: Sequence[MethodConfig | str],
    *,
    blocks: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    title: str = "",
    seed: int = 0,
) -> Any:
    """A figure of one image: what every method leaves of it block by block, and what the models predict.

    Args:
        model: a supported classifier that is not reduced; it is left as it was.
        image: (C, H, W), as the model takes it (`vitrim.data.eval_transform`).
        methods: configs or their text form.
        blocks: the columns, from 0; by default those that changed tokens under any method, at most eight.
        class_names: default: numbers.
        title: above the figure.
        seed: of methods that draw at random; the global generators stay as they were.

    Returns:
        A matplotlib figure; `vitrim.plots.style.save` writes it.

    Raises:
        VitrimError: no method, a method that does not fit, a model that is no classifier, or a block it does not have.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit", num_classes=3).eval()
        >>> figure = show(model, torch.rand(3, 160, 160), ["topk:keep_rate=0.5", "tome:r=8"], blocks=[1, 3])
        >>> [axis.get_title() for axis in figure.axes if axis.get_title()]
        ['image', 'after block 1', 'after block 3']
    """
    models = prepared(model, methods)
    rows, dense = rows_of(models, image, class_names, seed=seed)
    return draw_show(pixels_of(model, image), rows, _grid(model), dense=dense, blocks=blocks, title=title)


def prepared(
    model: nn.Module,
    methods: Sequence[MethodConfig | str],
    *,
    device: torch.device | None = None,
    learned: Any = None,
) -> list[Contestant]:
    """The dense model and its reductions, for any number of images; see `vitrim.measure.contestants.contestants`.

    Raises:
        VitrimError: no method, one that does not fit, or a model that is no classifier.
    """
    if not methods:
        raise VitrimError("there is nothing to show without a method: give one with -m, e.g. -m tome:r=8")
    check_shown(model)
    task = make_task("classification", host_of(model).facts(model).num_classes)
    return contestants(model, methods, task, device=device, learned=learned)


def check_shown(model: nn.Module) -> None:
    """Refuse a model that is no classifier.

    Raises:
        VitrimError: its head reads every patch; or it has no classes.
    """
    facts = host_of(model).facts(model)
    if facts.dense or not facts.num_classes:
        kind = "predicts places, not one class" if facts.dense else "has no classes"
        raise VitrimError(f"this model {kind}: only classifiers are shown; see vitrim.plots.dense for others")


def rows_of(
    models: Sequence[Contestant], image: Tensor, class_names: Sequence[str] | None = None, *, seed: int = 0
) -> tuple[list[Row], str]:
    """Run the models on one image: a row for every method, and the dense model's prediction in words.

    Args:
        models: of `prepared`, the dense one first.
        image: (C, H, W), as the models take it.
        class_names: default: numbers.
        seed: of methods that draw at random.

    Raises:
        VitrimError: outputs that are not finite.
    """
    like = next(models[0].forward.parameters())
    images = image[None].to(like.device, like.dtype)
    rows, dense = [], None
    for model in models:
        with torch.no_grad(), drawing(like.device, seed):
            counted = model.run(images, count=True)
        with torch.no_grad(), drawing(like.device, seed), _scores(model) as scores:
            output = model.run(images)
        dense = dense or counted
        if model.reduction is not None:
            rows.append(_row(model, output, counted, dense, scores, class_names))
    assert dense is not None
    return rows, _prediction(dense, class_names)[0]


def _row(
    model: Contestant,
    output: Output,
    counted: Output,
    dense: Output,
    scores: Mapping[int, NDArray[np.float64]],
    class_names: Sequence[str] | None,
) -> Row:
    assert model.reduction is not None
    text, chosen = _prediction(output, class_names)
    macs, full = (sum((one.macs or {}).values()) for one in (counted, dense))
    cost = f"{output.tokens_at_end} of {dense.tokens_at_end} tokens\n{100 * macs / full:.0f} % of the MACs"
    same = chosen == _prediction(dense, None)[1]
    return Row(model.name, text, cost, same, sources_of(model.reduction.states[1:]), scores)


def _prediction(output: Output, class_names: Sequence[str] | None) -> tuple[str, int]:
    """The first class in words, and its number."""
    shares = output.prediction[0].double().softmax(-1)
    chosen = int(shares.argmax())
    name = f"class {chosen}" if class_names is None or chosen >= len(class_names) else class_names[chosen]
    return f"{name} ({100 * shares[chosen].item():.0f} %)", chosen


@contextmanager
def _scores(model: Contestant) -> Iterator[dict[int, NDArray[np.float64]]]:
    """Note what the reducers rank patches by, in the forwards within."""
    found: dict[int, NDArray[np.float64]] = {}
    handles = []
    if model.reduction is not None:
        reduced = model.reduction.model
        for block in host_of(reduced).blocks(reduced):
            if isinstance(block, ReducedBlock):
                handles.append(block.reducer.register_forward_pre_hook(_noting(found, block.depth)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _noting(found: dict[int, NDArray[np.float64]], depth: int) -> Any:
    def note(reducer: Reducer[Any], args: tuple[Any, ...]) -> None:
        x, attention, state = args
        planned = reducer.layer.amount is not None and not reducer.config.is_adaptive()
        if planned and reducer.num_removed(state) == 0:  # nor does the reducer decide
            return
        cuda = [x.device] if x.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(cuda):  # so that what is drawn afterwards is the same
            scores = reducer.ranking(x, attention, state)
        if scores is not None:
            found[depth] = _on_grid(scores[0], state)

    return note


def _on_grid(scores: Tensor, state: TokenState) -> NDArray[np.float64]:
    """(P,), the scores of the tokens that stand on each patch, nan where none does."""
    grid = np.full(state.initial_patches, np.nan)
    places = (state.position[0, state.num_prefix :] - state.num_prefix).cpu().numpy()
    grid[places] = scores.double().cpu().numpy()
    return grid


def pixels_of(model: nn.Module, image: Tensor) -> Image:
    """An image as the model takes it, back as (H, W, 3) in [0, 1].

    Args:
        model: says what its images were normalised by; where it does not, the image's own range is taken.
        image: (C, H, W).

    Example:
        >>> import timm
        >>> pixels_of(timm.create_model("test_vit"), torch.zeros(3, 8, 8))[0, 0].tolist()
        [0.5, 0.5, 0.5]
    """
    told = ask(model).preprocessing(model)
    pixels = image.detach().float().cpu()
    if told.mean and told.std and len(told.mean) == len(told.std):
        mean, std = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (told.mean, told.std))
        if len(pixels) == 1:
            mean, std = mean.mean(0, keepdim=True), std.mean(0, keepdim=True)
        pixels = pixels * std + mean
    else:
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp_min(1e-12)
    return in_colour(pixels.clamp(0, 1).permute(1, 2, 0).numpy())


def _grid(model: nn.Module) -> tuple[int, int]:
    rows, columns = host_of(model).facts(model).grid_size
    return rows, columns


# ---- the figure ------------------------------------------------------------------------------------------------------


def draw_show(
    image: NDArray[Any],
    rows: Sequence[Row],
    grid: tuple[int, int],
    *,
    dense: str,
    blocks: Sequence[int] | None = None,
    title: str = "",
) -> Any:
    """A figure: the image above, then a row per method with what is left after each block, and below it its scores.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        rows: of `rows_of`.
        grid: rows and columns of the patches.
        dense: the dense model's prediction, in words.
        blocks: the columns, from 0; by default those that changed tokens under any method, at most eight.
        title: above the figure.

    Raises:
        VitrimError: a block that the model does not have, or a grid that the patches do not fill.
    """
    chosen = _columns(rows, blocks)
    kinds = [(row, kind) for row in rows for kind in ("kept", "score") if kind == "kept" or row.scores]
    ratio = image.shape[0] / image.shape[1]
    count = 1 + len(kinds)
    height = count * (PANEL * ratio + 0.1) + 2 * TITLES + (0.3 if title else 0)
    figure = sheet(LABEL + PANEL * max(len(chosen), 3), height)
    widths = [LABEL / PANEL, *[1.0] * max(len(chosen), 3)]
    axes = figure.subplots(count, len(widths), squeeze=False, width_ratios=widths)
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.03, wspace=0.01, hspace=0.01)
    for axis in axes.flat:
        axis.set_axis_off()
    _label(axes[0, 0], "dense", dense, "every token", DENSE_COLOUR)
    _picture(axes[0, 1], in_colour(image), "image")
    _key(axes[0, 2:], any(row.scores for row in rows))
    for place, (row, kind) in enumerate(kinds, 1):
        if kind == "kept":
            _label(axes[place, 0], short(row.name), row.prediction, row.cost, DENSE_COLOUR if row.same else DIFFERENT)
        else:
            _label(axes[place, 0], "", "", "its scores", DENSE_COLOUR)
        for axis, block in zip(axes[place, 1:], chosen, strict=False):
            drawn = _left(image, row, block, grid) if kind == "kept" else _scored(image, row, block, grid)
            if drawn is not None:
                _picture(axis, drawn, f"after block {block}" if place == 1 else "")
    if title:
        figure.suptitle(title, fontsize=TITLE + 1)
    return figure


def _columns(rows: Sequence[Row], blocks: Sequence[int] | None) -> list[int]:
    layers = min(len(row.sources) for row in rows)
    if blocks is not None:
        wrong = next((block for block in blocks if not 0 <= block < layers), None)
        if wrong is not None or not blocks:
            raise VitrimError(f"block {wrong} is none of the model's, 0 to {layers - 1}")
        return list(blocks)
    changed = sorted({block for row in rows for block in row.changed()}) or [layers - 1]
    places = np.linspace(0, len(changed) - 1, min(MOST_BLOCKS, len(changed))).round().astype(int)
    return [changed[place] for place in places]


def _scale(image: NDArray[Any]) -> int:
    return max(1, -(-LARGE // int(image.shape[1])))


def _left(image: NDArray[Any], row: Row, block: int, grid: tuple[int, int]) -> Image:
    return draw_kept(image, row.sources[: block + 1], grid, scale=_scale(image))


def _scored(image: NDArray[Any], row: Row, block: int, grid: tuple[int, int]) -> Image | None:
    """The scores in the colours of viridis over the faded image; None where nothing was scored in this block."""
    if block not in row.scores:
        return None
    return overlay(image, row.scores[block], grid, scale=_scale(image))


def _picture(axis: Any, picture: NDArray[Any], title: str) -> None:
    axis.imshow(picture, interpolation="antialiased", vmin=0, vmax=1)
    if title:
        axis.set_title(title, fontsize=TEXT)


def _label(axis: Any, name: str, prediction: str, note: str, colour: str) -> None:
    """Name, prediction and cost beside a row, from top to bottom."""
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    axis.text(0, 0.92, name, fontsize=TEXT, fontweight="bold", va="top")
    weight = "normal" if colour == DENSE_COLOUR else "bold"
    axis.text(0, 0.74, prediction, fontsize=TEXT, va="top", color=colour, fontweight=weight)
    axis.text(0, 0.56, note, fontsize=SMALL, va="top", linespacing=1.4)
    for text in axis.texts:
        text.set_in_layout(False)


def _key(axes: Sequence[Any], scored: bool) -> None:
    """Explain the colours, beside the image."""
    lines = ["dark blue: pruned", "orange outline: merged", "red text: another prediction"]
    lines += ["scores: dark low, yellow high"] if scored else []
    axes[0].set_xlim(0, 1)
    axes[0].set_ylim(0, 1)
    axes[0].text(0.08, 0.95, "\n".join(lines), fontsize=SMALL, va="top", linespacing=1.6).set_in_layout(False)
