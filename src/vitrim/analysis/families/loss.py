"""Loss, block by block: change of the class token, cost of reducing in one block alone, and errors of merging.

ATM is Lee and Choi, Lossless Token Merging Even Without Fine-Tuning in Vision Transformers (ECAI 2025); MCTF is Lee et
al., Multi-criteria Token Fusion with One-step-ahead Attention (CVPR 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from vitrim.analysis.family import FamilyResult, TableRow, Tables, grouped
from vitrim.analysis.figures import Panel, draws, line_panels, styles
from vitrim.analysis.record import Record
from vitrim.analysis.statistics import Floats, moments
from vitrim.analysis.subject import Observer, Subject
from vitrim.core.method import MethodConfig
from vitrim.core.plan import plan
from vitrim.errors import VitrimError
from vitrim.measure.contestants import Contestant, ModelOutput
from vitrim.measure.probes import are_logits, divergence
from vitrim.measure.records import Batch
from vitrim.measure.reducer_calls import ReducerCalls
from vitrim.plots.charts import Line, line, short
from vitrim.style import SMALL, TEXT, panels

TINY = float(np.finfo(np.float64).tiny)


class MergingError(NamedTuple):
    """The merging error of every image (...,), and its lower and upper bound."""

    error: Floats
    least: Floats
    most: Floats


def merging_error(tokens: ArrayLike, sizes: ArrayLike, groups: ArrayLike) -> MergingError:
    """The loss of one merging step, summed over its groups, and its bounds by ATM's Theorem 1, (...) float64 each.

    With tokens scaled to length 1, m the mean of a group weighted by the sizes n_i, and N the sum of these sizes,

        E = sum_i n_i (1 - cos(x_i, m)) = N (1 - |m|)        (Definition 2)
        D = sum_i n_i |x_i - m|^2 = N (1 - |m|^2)

    so that D / 2 <= E <= D. For a pair, D is 2 n_i n_j / (n_i + n_j) times the cosine distance, which is Theorem 1; the
    bounds here hold for groups of any size.

    Args:
        tokens: (..., N, C), before the step.
        sizes: (..., N), input tokens in each.
        groups: (..., N), the token that each becomes part of, -1 for none.

    Example:
        >>> found = merging_error([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [1, 3, 1], [0, 0, 1])
        >>> [round(float(number), 4) for number in found]
        [0.8377, 0.75, 1.5]
    """
    vectors, weights, labels = np.asarray(tokens, np.float64), np.asarray(sizes, np.float64), np.asarray(groups)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    # (..., G, N), the weights of the tokens of each group; its mean is 0 if it is empty
    members = weights[..., None, :] * (labels[..., None, :] == np.arange(labels.max(initial=0) + 1)[:, None])
    total = members.sum(-1)
    means = (members @ unit) / np.maximum(total, TINY)[..., None]
    # A mean of unit vectors is no longer than 1, but for rounding.
    squared = np.minimum((means**2).sum(-1), 1.0)
    error, most = ((total * (1 - one)).sum(-1) for one in (np.sqrt(squared), squared))
    return MergingError(error, most / 2, most)


def spread_in_groups(tokens: ArrayLike, sizes: ArrayLike, groups: ArrayLike, merged: ArrayLike) -> Floats:
    """The squared distance of tokens to the tokens they become, relative to their squared length, weighted by size.

    sum_i n_i |x_i - y_g(i)|^2 / sum_i n_i |x_i|^2 over the tokens with a group, (...) float64: 0 if nothing is lost,
    nan without tokens. ``merged`` (..., M, C) are the new tokens y; for the rest see `merging_error`.

    Example:
        >>> round(float(spread_in_groups([[1.0], [3.0]], [1, 1], [0, 0], [[2.0]])), 4)
        0.2
    """
    vectors, after, labels = np.asarray(tokens, np.float64), np.asarray(merged, np.float64), np.asarray(groups)
    weights = np.where(labels >= 0, np.asarray(sizes, np.float64), 0.0)
    gone = np.maximum(labels, 0)[..., None]
    apart = ((vectors - np.take_along_axis(after, gone, axis=-2)) ** 2).sum(-1)
    above, below = (weights * apart).sum(-1), (weights * (vectors**2).sum(-1)).sum(-1)
    found: Floats = np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)
    return found


# ---- tables ----------------------------------------------------------------------------------------------------------

IMAGES = 256
THRESHOLDS = (0.80, 0.85, 0.90, 0.95)
SHARES = (0.125, 0.25, 0.375, 0.5)


def class_tokens(records: Sequence[Record]) -> FamilyResult:
    """Cosine of the class token to the dense model's after every block (MCTF, Table B), from records."""
    rows = [
        {"method": record.name, "block": block, "images": len(record), **moments({"cosine": cosines})}
        for record in records
        if record.header["kind"] != "none" and "cosine" in record.arrays
        for block, cosines in enumerate(record.arrays["cosine"].T)
    ]
    if not rows:
        note = "cosines of class tokens skipped: they need a method, and a model with a class token"
        return FamilyResult(notes=[note])
    result = FamilyResult()
    result.add("class_tokens", "Cosine of the class token to the dense model's", rows)
    return result


def loss(subject: Subject) -> FamilyResult:
    """The cost of reducing in one block alone (ATM, Figure 2), and the error of merging in every block.

    ``loss_alone``: a method with a similarity threshold merges above 0.80, 0.85, 0.90 and 0.95, any other removes 1/8,
    1/4, 3/8 and 1/2 of the patches. ``cosine_distance`` is 1 - cos of the head's input, ``kl_nats`` is KL(dense ||
    reduced) of the predictions. Methods with learned parameters are left out: these belong to their blocks.
    ``merging_error``: see `merging_error` and, for ``squared_distance``, `spread_in_groups`.
    """
    result = FamilyResult(images=len(subject.places(IMAGES)))
    alone = [row for method in subject.methods for row in _alone(subject, method, result.notes)]
    result.add("loss_alone", "One block reduced alone: distance of what the head reads, and of the predictions", alone)
    means = [
        {
            **dict(zip(KEYS, key, strict=True)),
            **{name: float(np.mean([row[name] for row in rows])) for name in ("cosine_distance", "kl_nats")},
        }
        for key, rows in grouped(alone, *KEYS).items()
    ]
    result.add("loss_alone_mean", "The same, mean of all values", means)

    merging = [method for method in subject.methods if method.kind in ("merge", "mixed")]
    if not merging:
        result.notes.append("errors of merging skipped: they need a method that merges tokens into means")
        return result
    errors = [
        {
            "method": observer.name,
            "block": block,
            "images": len(error),
            "merged": float(merged.mean()),
            **moments({"error": error}),
            "error_least": float(least.mean()),
            "error_most": float(most.mean()),
            "squared_distance": float(squared.mean()),
        }
        for observer in _Errors.over(subject, merging, subject.batches(IMAGES))
        for block, (merged, error, least, most, squared) in observer.by_block().items()
    ]
    result.add(
        "merging_error", "Errors of merging, summed over the groups of an image, and the range of Theorem 1", errors
    )
    return result


KEYS = ("method", "setting", "block")


def _alone(subject: Subject, method: MethodConfig, notes: list[str]) -> list[TableRow]:
    """A row for every amount and block, with the method active in that block alone."""
    name, tunable = method.describe(), method.tunable
    if not method.traits.training_free:
        notes.append(f"{name} is left out of one block at a time: what it learned belongs to its own blocks")
        return []
    if tunable is None or tunable.per_layer is None:
        notes.append(f"{name} is left out of one block at a time: it takes no amount for each block")
        return []
    patches, num_layers = int(np.prod(subject.facts.grid_size)), subject.num_layers
    # A threshold removes what is alike, so shares cannot be asked of it.
    amounts = THRESHOLDS if tunable.similarity else SHARES
    settings: list[tuple[float, int, MethodConfig]] = []
    for amount, depth in product(amounts, range(num_layers)):
        value = amount if tunable.similarity else tunable.removing(amount, patches)
        config, problem = tunable.alone(method, depth, value, num_layers), "it does not act there"
        try:
            if config is not None:
                plan(config, subject.facts, num_layers)
                settings.append((amount, depth, config))
                continue
        except VitrimError as error:  # the model does not support it
            problem = str(error)
        if amount == amounts[0]:
            notes.append(f"{name} alone in block {depth} is left out: {problem}")
    observers = _Distances.over(subject, [config for *_, config in settings], subject.batches(IMAGES))
    rows = list[TableRow]()
    for (amount, depth, _), observer in zip(settings, observers, strict=True):
        ((distance, divergence),) = observer.by_block().values()
        row = {"method": name, "setting": "threshold" if tunable.similarity else "share removed", "value": amount}
        numbers = moments({"cosine_distance": distance, "kl_nats": divergence})
        rows.append({**row, "block": depth, "images": len(distance), **numbers})
    return rows


class _Distances(Observer):
    """Distances to the dense model for every image: of the head's input, and of the predictions."""

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        distance = kl = torch.full((len(batch),), torch.nan, dtype=torch.float64)
        if output.feature is not None and dense.feature is not None and output.feature.shape == dense.feature.shape:
            own, full = (feature.double().flatten(1) for feature in (output.feature, dense.feature))
            distance = 1 - torch.cosine_similarity(own, full)
        if are_logits(output):
            kl = divergence(output.prediction, dense.prediction)
        self.add(0, distance.cpu().numpy(), kl.cpu().numpy())


class _Errors(Observer):
    """The merging errors of one model, image by image: per block, the number of tokens merged into others, the error,
    its bounds, and the squared distance."""

    def __init__(self, contestant: Contestant) -> None:
        super().__init__(contestant)
        self.calls = ReducerCalls(self.reduction)

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        for call in self.calls.take():
            x, state, assignment = call.x, call.state, call.assignment
            if assignment is None:  # every token stays
                merged, target = x, torch.arange(state.num_tokens, device=x.device).expand(x.shape[:2])
            elif assignment.moved is not None and assignment.normalise:
                merged, target = assignment.pool(x, state.size), assignment.target(state.num_tokens)
            else:
                continue
            p, real = state.num_prefix, torch.ones_like(target, dtype=torch.bool) if state.mask is None else state.mask
            groups = torch.where(real, target, -1)[:, p:].cpu().numpy()
            tokens, sizes = (one[:, p:].detach().double().cpu().numpy() for one in (x, state.size))
            # All tokens of a group but one were merged into it.
            joined = [int((row >= 0).sum()) - len(np.unique(row[row >= 0])) for row in groups]
            squared = spread_in_groups(tokens, sizes, groups, merged.detach().double().cpu().numpy())
            self.add(call.depth, np.array(joined, np.float64), *merging_error(tokens, sizes, groups), squared)


# ---- figures ---------------------------------------------------------------------------------------------------------

METHODS_DRAWN = 4
"""Most methods that get panels."""


@draws("loss", "class_tokens", "Cosine of the class token to the dense model's")
def draw_class_tokens(tables: Tables) -> Any:
    """Lines over the blocks: cosine similarity of the class token to the dense model's, with 95 % bootstrap
    intervals as bands."""
    table = tables["class_tokens"]
    figure, (axis,) = line_panels([Panel("cosine", grouped(table.records(), "method"))], styles(tables), across=2)
    axis.set_ylim(top=1.0 + 0.02 * (1 - min(table.column("cosine"))))
    axis.set_ylabel("cosine", fontsize=TEXT)
    return figure


@draws("loss", "merging_error", "Error of merging")
def draw_merging_error(tables: Tables) -> Any:
    """Lines over the blocks: mean error of the tokens that the block merges. Dashes are the bounds of Theorem 1."""
    panel = Panel("error", grouped(tables["merging_error"].records(), "method"))
    figure, (axis,) = line_panels([panel], styles(tables), across=2)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("merging error", fontsize=TEXT)
    return figure


@draws("loss", "loss_alone", "Reducing in one block alone")
def draw_loss_alone(tables: Tables) -> Any:
    """Lines over the blocks, one column per method and one line per amount: cosine distance of the final class token
    and divergence of the prediction, if only that block reduces. Bars are the means over the amounts."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    colour, _ = styles(tables)
    groups = list(grouped(tables["loss_alone"].records(), "method", "setting").items())[:METHODS_DRAWN]
    measures = {"cosine_distance": "cosine distance", "kl_nats": "KL, nats"}
    figure, axes = panels(2 * len(groups), across=len(groups), size=(max(2.5, 6.0 / len(groups)), 2.1), above=0.2)
    shown = product(measures.items(), groups)
    for place, (axis, ((measure, label), ((method, setting), rows))) in enumerate(zip(axes, shown, strict=True)):
        known = grouped((row for row in rows if row[measure] is not None), "block")
        blocks = sorted({row["block"] for row in rows})
        means = [np.mean([row[measure] for row in known[block]]) if block in known else 0.0 for block in blocks]
        axis.bar(blocks, means, color=colour[method], alpha=0.3, width=0.8)
        values = grouped(sorted(rows, key=itemgetter("value")), "value")
        for number, (value, some) in enumerate(values.items()):
            shade = to_hex(colormaps["cividis"](0.9 * number / max(len(values) - 1, 1)))
            given = Line([row["block"] for row in some], [row[measure] for row in some])
            line(axis, given, colour=shade, label=f"{setting} = {value:g}")
        axis.set_ylim(bottom=0)
        axis.set_xticks(blocks[:: -(-len(blocks) // 6)])  # only at bars
        if place < len(groups):
            axis.set_title(short(method), fontsize=TEXT)
            axis.set_ylim(top=1.8 * axis.get_ylim()[1])  # room for the legend above the lines
            axis.legend(fontsize=SMALL, frameon=False, loc="upper right")
        else:
            axis.set_xlabel("block that reduces alone (from 0)", fontsize=TEXT)
        if place % len(groups) == 0:
            axis.set_ylabel(label, fontsize=TEXT)
    return figure
