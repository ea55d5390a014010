"""t-SNE of pruned tokens before the head: does the block that pruned them still show? (Cropr, Figure 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor, nn

from vitrim.analysis.family import FamilyResult, TableRow, Tables
from vitrim.analysis.figures import draws
from vitrim.analysis.subject import Observer, Subject
from vitrim.core.method import MethodConfig
from vitrim.core.saving import read_reduction
from vitrim.measure.contestants import Contestant, ModelOutput
from vitrim.measure.records import Batch
from vitrim.measure.reducer_calls import ReducerCalls, reduced_blocks
from vitrim.plots.charts import colour_bar, short
from vitrim.style import SMALL, panels

POINTS = 5000
PERPLEXITY = 30
ALL = "all"


@runtime_checkable
class Rejoins(Protocol):
    """A method that returns pruned tokens to the head."""

    def rejoining(self) -> Mapping[str, MethodConfig]:
        """Its configs by fusion: tokens return before the last block (``last_layer``) or after it (``concat``)."""
        ...


def tsne(subject: Subject) -> FamilyResult:
    """Map pruned tokens before the head, with fusion before the last block and after it.

    The map is scikit-learn's t-SNE, initialised by principal components: van der Maaten and Hinton, Visualizing Data
    using t-SNE (JMLR 2008). Per image and router it shows the pruned token with the highest score, as it leaves the
    last block (or as a dense head reads it). The silhouette by block, of the tokens and on the map, measures the
    separation: near 0 the blocks mix, near 1 they form clusters.

    Arrays, per method and fusion: ``NAME/FUSION/points`` (T, 2) and ``NAME/FUSION/blocks`` (T,).
    """
    from sklearn.manifold import TSNE

    result, rows = FamilyResult(), list[TableRow]()
    for method in subject.methods:
        if not isinstance(method, Rejoins):
            continue
        name, forms = method.describe(), own_forms(subject, method) if subject.beside else method.rejoining()
        if not method.traits.training_free and subject.learned is None:
            result.notes.append(f"{name} has not learned its routers: it prunes at random")
        # A point per image and router: so many images give the points that the map can hold.
        blocks = sum(amount is not None for amount in method.amounts(subject.num_layers)) - 1  # less the return
        most = POINTS // max(blocks, 1)
        observers = _PrunedTokens.over(subject, list(forms.values()), subject.batches(most))
        result.images = len(subject.places(most))
        for fusion, observer in zip(forms, observers, strict=True):
            parts = {block: tokens for block, (tokens,) in observer.by_block().items() if len(tokens)}
            labels = np.repeat(list(parts), list(map(len, parts.values())))
            if len(labels) <= 3 * PERPLEXITY:
                needed = f"tsne needs more than {3 * PERPLEXITY} points"
                result.notes.append(f"{needed}, got {len(labels)}: give more images")
                break
            tokens = np.concatenate(list(parts.values()))
            mapping = TSNE(perplexity=PERPLEXITY, init="pca", random_state=subject.seed % 2**32)
            points = np.asarray(mapping.fit_transform(tokens), dtype=np.float64)
            numbers = zip((ALL, *parts), *(silhouettes(space, labels) for space in (tokens, points)), strict=True)
            for block, of_tokens, on_map in numbers:
                share = len(labels if block == ALL else parts[block])
                row = {"method": name, "fusion": fusion, "block": block, "images": result.images, "points": share}
                rows.append({**row, "silhouette_tokens": of_tokens, "silhouette_map": on_map})
            result.arrays[f"{name}/{fusion}/points"] = points.astype(np.float32)
            result.arrays[f"{name}/{fusion}/blocks"] = labels
    result.add("tsne", "Separation of pruned tokens by the block that pruned", rows)
    if not result.tables and not result.notes:
        result.notes.append("tsne skipped: it needs a method whose pruned tokens come back, such as cropr")
    return result


def own_forms(subject: Subject, method: Rejoins) -> dict[str, MethodConfig]:
    """The config with the fusion of the subject's training run or, without one, of ``method``; the paper compares
    separately trained models, each with its own fusion."""
    assert isinstance(method, MethodConfig)
    learned = {} if subject.learned is None else read_reduction(subject.learned)
    options = learned["options"] if learned.get("method") == method.name else {}
    wanted = options.get("fusion", getattr(method, "fusion", None))
    return {name: form for name, form in method.rejoining().items() if name == wanted} or dict(method.rejoining())


def silhouettes(points: ArrayLike, labels: ArrayLike) -> list[float]:
    """The mean silhouette of all points (T, C), then of the points of each label (T,) in ascending order, in [-1, 1].

    For a point (b - a) / max(a, b), where a is its mean distance to the other points of its label, and b to those of
    the nearest other label; 0 if it is alone in its label; all nan with fewer than two labels, or with as many as
    points. Rousseeuw, Silhouettes (J. Comput. Appl. Math. 1987).

    Example:
        >>> [round(number, 3) for number in silhouettes([[0.0], [1.0], [10.0], [11.0]], [0, 0, 1, 1])]
        [0.9, 0.9, 0.9]
    """
    from sklearn.metrics import silhouette_samples

    values, groups = np.asarray(points, dtype=np.float64), np.asarray(labels)
    different = np.unique(groups)
    if not 1 < len(different) < len(groups):
        return [float("nan")] * (1 + len(different))
    each = silhouette_samples(values, groups)
    return [float(each.mean()), *(float(each[groups == label].mean()) for label in different)]


class _PrunedTokens(Observer):
    """The best pruned token of each image and router of one model, as the head receives it."""

    def __init__(self, contestant: Contestant) -> None:
        super().__init__(contestant)
        self.calls = ReducerCalls(self.reduction, scores=True)
        self.tokens: Tensor | None = None
        reduced_blocks(self.reduction)[-1].register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.tokens = output.detach()

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        assert self.tokens is not None
        state, images = self.reduction.state, np.arange(len(batch))
        p, feature = state.num_prefix, output.feature
        by_place = state.asked.full_grids or (feature is not None and feature.ndim == 3)
        tokens = feature if feature is not None and feature.ndim == 3 else self.tokens[:, p:]
        found = tokens.double().cpu().numpy()
        place = np.arange(state.initial_patches) if by_place else (state.source[:, p:] - p).cpu().numpy()
        place = np.broadcast_to(place, (len(batch), state.initial_patches))
        for call in self.calls.take():
            if call.scores is None or call.assignment is None:
                continue
            scores, stays = call.on_grid()
            # Tokens that stay are no pruned ones: only the others compete.
            scores[stays] = np.nan
            # An image may lose no patch in this block.
            some = np.isfinite(scores).any(1)
            best = np.where(np.isfinite(scores), scores, -np.inf).argmax(1)
            self.add(call.depth, found[images, place[images, best]][some])


# ---- figure ----------------------------------------------------------------------------------------------------------


@draws("tsne", "tsne", "Pruned tokens before the head")
def draw_tsne(tables: Tables) -> Any:
    """Scatter plots, one per fusion: t-SNE of the pruned tokens, coloured by the block that pruned them. Titles give
    the silhouette by block, in the space of the tokens."""
    arrays = tables.arrays.get("tsne")
    if not arrays:
        return None
    overall = {
        (row["method"], row["fusion"]): row["silhouette_tokens"]
        for row in tables["tsne"].records()
        if row["block"] == ALL
    }
    names = [name.removesuffix("/points") for name in arrays if name.endswith("/points")]
    blocks = [arrays[f"{name}/blocks"] for name in names]
    limits = {"vmin": min(own.min() for own in blocks), "vmax": max(own.max() for own in blocks)}
    figure, axes = panels(len(names), across=2, size=(3.4, 3.2), above=0.1)
    for axis, name, own in zip(axes, names, blocks, strict=True):
        points = arrays[f"{name}/points"]
        drawn = axis.scatter(*points.T, c=own, cmap="viridis", s=5, linewidths=0, **limits)
        method, _, fusion = name.rpartition("/")
        number = overall.get((method, fusion))
        silhouette = "" if number is None else f"\nsilhouette {number:.2f}"
        axis.set_title(f"{short(method)}, {fusion.replace('_', ' ')}{silhouette}", fontsize=SMALL)
        axis.set(xticks=[], yticks=[])
    colour_bar(figure, drawn, axes, "block that pruned")
    figure.axes[-1].yaxis.get_major_locator().set_params(integer=True)
    return figure
