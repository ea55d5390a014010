"""Loss, block by block: change of the class token, cost of reducing in one block alone, and errors of merging.

ATM is Lee and Choi, Lossless Token Merging Even Without Fine-Tuning in Vision Transformers (ECAI 2025); MCTF is Lee et
al., Multi-criteria Token Fusion with One-step-ahead Attention (CVPR 2024)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from vitrim.analysis.family import FamilyResult, Tables, by_method, draws, line_panels, styles
from vitrim.analysis.record import Record
from vitrim.analysis.statistics import BAND, columns_of, summary
from vitrim.analysis.subject import Observer, Subject, Watch
from vitrim.core.method import MethodConfig
from vitrim.core.plan import plan
from vitrim.errors import VitrimError
from vitrim.measure.contestants import Contestant, ModelOutput
from vitrim.measure.probes import are_logits, divergence
from vitrim.measure.records import Batch
from vitrim.plots.charts import Line, line, short
from vitrim.report import Table
from vitrim.style import BOUND, SMALL, TEXT, panels

Floats = NDArray[np.float64]


class MergingError(NamedTuple):
    """The merging error of every image (...,), and its lower and upper bound."""

    error: Floats
    least: Floats
    most: Floats


def cosine_distance(a: ArrayLike, b: ArrayLike) -> Floats:
    """1 - a . b / (|a| |b|) of vectors (..., C), in [0, 2]; nan if a vector is zero. ATM, section 3.2 (Figure 2).

    Example:
        >>> cosine_distance([[1.0, 0.0], [1.0, 1.0]], [[0.0, 2.0], [3.0, 3.0]]).round(12).tolist()
        [1.0, 0.0]
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    lengths = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    product = (first * second).sum(-1)
    found: Floats = 1 - np.divide(product, lengths, out=np.full_like(product, np.nan), where=lengths > 0)
    return found


def merging_error(tokens: ArrayLike, sizes: ArrayLike, groups: ArrayLike) -> MergingError:
    """The loss of one merging step, summed over its groups, and its bounds by ATM's Theorem 1.

    With tokens scaled to length 1, m the mean of a group weighted by the sizes n_i, and N the sum of these sizes,

        E = sum_i n_i (1 - cos(x_i, m)) = N (1 - |m|)        (Definition 2)
        D = sum_i n_i |x_i - m|^2 = N (1 - |m|^2)

    so that D / 2 <= E <= D. For a pair, D is 2 n_i n_j / (n_i + n_j) times the cosine distance, which is Theorem 1; the
    bounds here hold for groups of any size. Results are (...) float64.

    Args:
        tokens: (..., N, C), before the step.
        sizes: (..., N), input tokens in each.
        groups: (..., N), the token that each becomes part of, -1 for none.

    Raises:
        VitrimError: different numbers of tokens, sizes and groups.

    Example:
        >>> found = merging_error([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [1, 3, 1], [0, 0, 1])
        >>> [round(float(number), 4) for number in found]
        [0.8377, 0.75, 1.5]
    """
    vectors, weights, labels = _checked(tokens, sizes, groups)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)

    # weighted means of the groups, and their sums of weights; zeros for empty groups
    shape, (num_tokens, channels) = labels.shape[:-1], unit.shape[-2:]
    rows, num_groups = labels.reshape(-1, num_tokens), int(labels.max(initial=0)) + 1
    image, token = np.nonzero(rows >= 0)
    group, weight = rows[image, token], weights.reshape(-1, num_tokens)[image, token]
    sums, total = np.zeros((len(rows), num_groups, channels)), np.zeros((len(rows), num_groups))
    np.add.at(sums, (image, group), weight[:, None] * unit.reshape(-1, num_tokens, channels)[image, token])
    np.add.at(total, (image, group), weight)
    means = np.divide(sums, total[..., None], out=np.zeros_like(sums), where=total[..., None] > 0)

    squared = np.minimum((means**2).sum(-1), 1.0)
    error, most = ((total * (1 - one)).sum(-1).reshape(shape) for one in (np.sqrt(squared), squared))
    return MergingError(error, most / 2, most)


def spread_in_groups(tokens: ArrayLike, sizes: ArrayLike, groups: ArrayLike, merged: ArrayLike) -> Floats:
    """The squared distance of tokens to the tokens they become, relative to their squared length, weighted by size.

    sum_i n_i |x_i - y_g(i)|^2 / sum_i n_i |x_i|^2 over the tokens with a group, (...) float64: 0 if nothing is lost,
    nan without tokens.

    Args:
        tokens, sizes, groups: see `merging_error`, also for errors.
        merged: (..., M, C), the new tokens y.

    Example:
        >>> round(float(spread_in_groups([[1.0], [3.0]], [1, 1], [0, 0], [[2.0]])), 4)
        0.2
    """
    vectors, weights, labels = _checked(tokens, sizes, groups)
    after = np.asarray(merged, dtype=np.float64)
    weights = np.where(labels >= 0, weights, 0.0)
    gone = np.maximum(labels, 0)[..., None]
    apart = ((vectors - np.take_along_axis(after, gone, axis=-2)) ** 2).sum(-1)
    above, below = (weights * apart).sum(-1), (weights * (vectors**2).sum(-1)).sum(-1)
    found: Floats = np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)
    return found


def _checked(tokens: ArrayLike, sizes: ArrayLike, groups: ArrayLike) -> tuple[Floats, Floats, NDArray[np.int64]]:
    vectors, weights = np.asarray(tokens, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    labels = np.asarray(groups, dtype=np.int64)
    if not vectors.shape[:-1] == weights.shape == labels.shape or labels.ndim == 0:
        raise VitrimError(
            f"expected a size and a group of every token, got tokens {vectors.shape}, sizes {weights.shape} and groups "
            f"{labels.shape}"
        )
    return vectors, weights, labels


# ---- tables ----------------------------------------------------------------------------------------------------------

IMAGES = 256
THRESHOLDS = (0.80, 0.85, 0.90, 0.95)
SHARES = (0.125, 0.25, 0.375, 0.5)

TOKENS = ("method", "block", "images", *columns_of("cosine"))
ALONE = (
    *("method", "setting", "value", "block", "images"),
    *columns_of("cosine_distance"),
    *columns_of("kl_nats"),
)
ALONE_SHOWN = (*ALONE[:4], "cosine_distance", "kl_nats", "kl_nats_low", "kl_nats_high")
OVERALL = ("method", "setting", "block", "cosine_distance", "kl_nats")
ERRORS = (
    *("method", "block", "images", "merged"),
    *columns_of("error"),
    *("error_least", "error_most", "squared_distance"),
)
ERRORS_SHOWN = (*ERRORS[:5], "error_least", "error_most", "squared_distance")


def class_tokens(records: Sequence[Record]) -> FamilyResult:
    """Cosine of the class token to the dense model's after every block (MCTF, Table B), from records."""
    rows = []
    for record in records:
        if record.header["kind"] == "none" or "cosine" not in record.arrays:
            continue
        for block, numbers in enumerate(summary(record.arrays["cosine"])):
            rows.append((record.name, block, len(record), *numbers))
    if not rows:
        return FamilyResult(
            notes=["cosines of class tokens skipped: they need a method, and a model with a class token"]
        )
    return FamilyResult([Table("class_tokens", "Cosine of the class token to the dense model's", TOKENS, rows)])


def loss(subject: Subject) -> FamilyResult:
    """The cost of reducing in one block alone (ATM, Figure 2), and the error of merging in every block."""
    result = FamilyResult(images=len(subject.places(IMAGES)))
    alone = [row for method in subject.methods for row in _alone(subject, method, result.notes)]
    if alone:
        title = "One block reduced alone: distance of what the head reads, and of the predictions"
        table = Table("loss_alone", title, ALONE, alone, ALONE_SHOWN)
        groups: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
        for row in table.rows:
            named = dict(zip(ALONE, row, strict=True))
            groups[row[0], row[1], row[3]].append((named["cosine_distance"], named["kl_nats"]))
        means = [(*key, *np.mean(numbers, axis=0).tolist()) for key, numbers in groups.items()]
        result.tables += [table, Table("loss_alone_mean", "The same, mean of all values", OVERALL, means)]

    merging = [method for method in subject.methods if method.kind in ("merge", "mixed")]
    if not merging:
        result.notes.append("errors of merging skipped: they need a method that merges tokens into means")
        return result
    rows: list[tuple[object, ...]] = []
    for watch in _Errors.over(subject, merging, subject.batches(IMAGES)):
        for depth, parts in sorted(watch.found.items()):
            numbers = np.concatenate(parts)
            merged, _, least, most, squared = numbers.mean(0).tolist()
            error = summary(numbers[:, 1:2])[0]
            rows.append((watch.name, depth, len(numbers), merged, *error, least, most, squared))
    if rows:
        title = "Errors of merging, summed over the groups of an image, and the range of Theorem 1"
        result.tables.append(Table("merging_error", title, ERRORS, rows, ERRORS_SHOWN))
    return result


def _alone(subject: Subject, method: MethodConfig, notes: list[str]) -> list[tuple[object, ...]]:
    """A row for every amount and block, with the method active in that block alone."""
    name, tunable = method.describe(), method.tunable
    if not method.traits.training_free:
        notes.append(f"{name} is left out of one block at a time: what it learned belongs to its own blocks")
        return []
    if tunable is None or tunable.per_layer is None:
        notes.append(f"{name} is left out of one block at a time: it takes no amount for each block")
        return []
    patches, num_layers = int(np.prod(subject.facts.grid_size)), subject.num_layers
    settings: list[tuple[float, int, MethodConfig]] = []
    for amount in THRESHOLDS if tunable.similarity else SHARES:
        value = amount if tunable.similarity else tunable.removing(amount, patches)
        for depth in range(num_layers):
            config, problem = tunable.alone(method, depth, value, num_layers), "it does not act there"
            try:
                if config is not None:
                    plan(config, subject.facts, num_layers)
                    settings.append((amount, depth, config))
                    continue
            except VitrimError as error:  # the model does not support it
                problem = str(error)
            if amount in (THRESHOLDS[0], SHARES[0]):
                notes.append(f"{name} alone in block {depth} is left out: {problem}")
    watched = _Distances.over(subject, [config for *_, config in settings], subject.batches(IMAGES))
    kind = "threshold" if tunable.similarity else "share removed"
    rows: list[tuple[object, ...]] = []
    for (amount, depth, _), watch in zip(settings, watched, strict=True):
        numbers = np.concatenate(watch.found)
        distance, divergence = summary(numbers)
        rows.append((name, kind, amount, depth, len(numbers), *distance, *divergence))
    return rows


class _Distances(Observer):
    """Distances to the dense model for every image: of the head's input, and of the predictions."""

    def __init__(self, contestant: Contestant) -> None:
        super().__init__(contestant)
        self.found: list[NDArray[Any]] = []

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        distance = kl = np.full(len(batch), np.nan)
        if output.feature is not None and dense.feature is not None and output.feature.shape == dense.feature.shape:
            pair = (feature.detach().double().cpu().flatten(1).numpy() for feature in (output.feature, dense.feature))
            distance = cosine_distance(*pair)
        if are_logits(output):
            kl = divergence(output.prediction, dense.prediction).cpu().numpy()
        self.found.append(np.stack([distance, kl], 1))


class _Errors(Observer):
    """The merging errors of one model, image by image: per block, the number of tokens merged into others, the error,
    its bounds, and the squared distance."""

    def __init__(self, contestant: Contestant) -> None:
        super().__init__(contestant)
        self.watch = Watch(self.reduction)
        self.found: dict[int, list[NDArray[np.float64]]] = defaultdict(list)

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        for decision in self.watch.take():
            x, state, assignment = decision.x, decision.state, decision.assignment
            if assignment is None:  # every token stays
                merged, target = x, torch.arange(state.num_tokens, device=x.device).expand(x.shape[:2])
            elif assignment.moved is not None and assignment.normalise:
                merged, target = assignment.pool(x, state.size), assignment.target(state.num_tokens)
            else:
                continue
            p, real = state.num_prefix, torch.ones_like(target, dtype=torch.bool) if state.mask is None else state.mask
            groups = torch.where(real, target, -1)[:, p:].cpu().numpy()
            tokens, sizes = (one[:, p:].detach().double().cpu().numpy() for one in (x, state.size))
            joined = [int((row >= 0).sum()) - len(np.unique(row[row >= 0])) for row in groups]
            squared = spread_in_groups(tokens, sizes, groups, merged.detach().double().cpu().numpy())
            errors = merging_error(tokens, sizes, groups)
            self.found[decision.depth].append(np.stack([np.array(joined, np.float64), *errors, squared], 1))


# ---- figures ---------------------------------------------------------------------------------------------------------

METHODS_DRAWN = 4
"""Most methods that get panels."""


@draws("loss", "class_tokens", "Cosine of the class token to the dense model's")
def draw_class_tokens(tables: Tables) -> Any:
    """Lines over the blocks: cosine similarity of the class token to the dense model's, with 95 % bootstrap
    intervals as bands."""
    table = tables["class_tokens"]
    figure, (axis,) = line_panels(tables, table.name, [columns_of("cosine", BAND)], across=2)
    axis.set_ylim(top=1.0 + 0.02 * (1 - min(table.column("cosine"))))
    axis.set_ylabel("cosine", fontsize=TEXT)
    return figure


@draws("loss", "merging_error", "Error of merging")
def draw_merging_error(tables: Tables) -> Any:
    """Lines over the blocks: mean error of the tokens that the block merges. Dashes are the bounds of Theorem 1."""
    figure, (axis,) = line_panels(tables, "merging_error", [columns_of("error", BAND)], across=2)
    colour, _ = styles(tables)
    for name, rows in by_method(tables["merging_error"]).items():
        for bound in ("error_least", "error_most"):
            values = [float("nan") if row[bound] is None else row[bound] for row in rows]
            axis.plot([row["block"] for row in rows], values, color=colour[name], linestyle=BOUND, linewidth=1)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("merging error", fontsize=TEXT)
    return figure


@draws("loss", "loss_alone", "Reducing in one block alone")
def draw_loss_alone(tables: Tables) -> Any:
    """Lines over the blocks, one column per method and one line per amount: cosine distance of the final class token
    and divergence of the prediction, if only that block reduces. Bars are the means over the amounts."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    rows = tables["loss_alone"].records()
    groups = list(dict.fromkeys((row["method"], row["setting"]) for row in rows))[:METHODS_DRAWN]
    colour, _ = styles(tables)
    measures = {"cosine_distance": "cosine distance", "kl_nats": "KL, nats"}
    figure, axes = panels(2 * len(groups), across=len(groups), size=(max(2.5, 6.0 / len(groups)), 2.1), above=0.2)
    for place, axis in enumerate(axes):
        (measure, label), (method, setting) = list(measures.items())[place // len(groups)], groups[place % len(groups)]
        own = [row for row in rows if (row["method"], row["setting"]) == (method, setting)]
        values = sorted({row["value"] for row in own})
        blocks = sorted({row["block"] for row in own})
        known = {block: [row[measure] for row in own if row["block"] == block] for block in blocks}
        known = {block: [number for number in numbers if number is not None] for block, numbers in known.items()}
        means = [sum(numbers) / len(numbers) if numbers else 0.0 for numbers in known.values()]
        axis.bar(blocks, means, color=colour[method], alpha=0.3, width=0.8)
        for number, value in enumerate(values):
            some = [row for row in own if row["value"] == value]
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
