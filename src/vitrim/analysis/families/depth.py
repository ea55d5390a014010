"""Depth: how deep patches get, as a mean map per record, and the similarity of two such maps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vitrim.analysis.family import FamilyResult, TableRow, Tables, grouped, names_of
from vitrim.analysis.figures import PairMap, draw_pair_maps, draws
from vitrim.analysis.record import Record
from vitrim.analysis.statistics import Floats
from vitrim.errors import VitrimError
from vitrim.plots.charts import colour_bar, heat, short
from vitrim.style import SMALL, sheet


class MeanDepth(NamedTuple):
    """Mean and population standard deviation of depth: per patch (P,), and over all patches and images."""

    mean: Floats
    std: Floats
    overall_mean: float
    overall_std: float


def depth_map(kept: ArrayLike, blocks: Sequence[int], num_layers: int) -> Floats:
    """The block in which each patch is dropped, (..., P) float64; ``num_layers`` if it never is.

    ``kept`` (..., S, P) are the patches left after each of the S ``blocks``, ascending. A patch that returns counts
    from its first removal. Source: "Which Tokens to Use?", averaged depth of patches.

    Example:
        >>> depth_map([[True, True, False], [True, False, False]], [3, 6], 12).tolist()
        [12.0, 6.0, 3.0]
    """
    left = np.asarray(kept, dtype=bool)
    if left.ndim < 2 or left.shape[-2] != len(blocks):
        raise VitrimError(f"expected kept patches (..., {len(blocks)}, P) for {len(blocks)} blocks, got {left.shape}")
    depth = np.full((*left.shape[:-2], left.shape[-1]), float(num_layers))
    # From the last block to the first: the earliest removal is written last.
    for stage in reversed(range(len(blocks))):
        depth[~left[..., stage, :]] = blocks[stage]
    return depth


def mean_depth(depths: ArrayLike) -> MeanDepth:
    """Mean and population standard deviation of depths (I, P) over images, per patch and overall."""
    depth = np.asarray(depths, dtype=np.float64)
    return MeanDepth(depth.mean(0), depth.std(0), float(depth.mean()), float(depth.std()))


# ---- two maps --------------------------------------------------------------------------------------------------------


def kl_bits(a: ArrayLike, b: ArrayLike) -> float:
    """Kullback-Leibler divergence KL(q || p) = sum q log2(q / p) in bits of the normalised maps p = a, q = b, of one
    shape.

    The first map is the reference, as in the study's code: its "KLD12" is KL(2 || 1). Entries with q = 0 contribute 0;
    infinite if p = 0 where q > 0. `VitrimError` for maps that are negative, or all zero.

    Example:
        >>> kl_bits([1, 1], [1, 0])
        1.0
    """
    from scipy.stats import entropy

    p, q = _maps(a, b, masses=True)
    return float(entropy(q, p, base=2))


def js_bits(a: ArrayLike, b: ArrayLike, *, reference: bool = False) -> float:
    """Jensen-Shannon divergence in bits, (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2; in [0, 1]. Symmetric.

    With ``reference``, the arguments are reversed, (KL(m || p) + KL(m || q)) / 2, as in the study's code; unbounded.

    Example:
        >>> js_bits([1, 0], [0, 1]), js_bits([1, 0], [0, 1], reference=True)
        (1.0, inf)
    """
    from scipy.stats import entropy

    p, q = _maps(a, b, masses=True)
    middle = (p + q) / 2
    pairs = ((middle, p), (middle, q)) if reference else ((p, middle), (q, middle))
    return float(sum(entropy(one, other, base=2) for one, other in pairs) / 2)


def pcc(a: ArrayLike, b: ArrayLike) -> float:
    """Pearson's correlation of two maps, in [-1, 1]; nan if a map is constant."""
    first, second = _maps(a, b)
    if _constant(first, second):
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def scc(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's correlation of two maps: `pcc` of the ranks, ties at their mean rank."""
    from scipy.stats import rankdata

    return pcc(*(rankdata(one) for one in _maps(a, b)))


def sim(a: ArrayLike, b: ArrayLike) -> float:
    """Histogram intersection: the sum of minima of two maps, each scaled to [0, 1] and then divided by its sum.

    In [0, 1]; nan if a map is constant. Source: Bylinskii et al., What Do Different Evaluation Metrics Tell Us About
    Saliency Models? (TPAMI 2019).

    Example:
        >>> sim([0, 1, 1], [0, 0, 5])
        0.5
    """
    first, second = _maps(a, b)
    if _constant(first, second):
        return float("nan")
    scaled = ((one - one.min()) / (one.max() - one.min()) for one in (first, second))
    return float(np.minimum(*(one / one.sum() for one in scaled)).sum())


def emd(a: ArrayLike, b: ArrayLike) -> float:
    """Earth mover's distance of two normalised maps (rows, columns): the least mean Euclidean distance, in patches.

    Solved exactly by POT's network simplex. Errors as of `kl_bits`.

    Example:
        >>> emd([[1, 0, 0]], [[0, 0, 1]])
        2.0
    """
    import ot

    shape = np.shape(a)
    if len(shape) != 2:
        raise VitrimError(f"expected maps (rows, columns), got {shape}")
    p, q = _maps(a, b, masses=True)
    # Row and column of every patch: mass moves by straight lines.
    places = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1).reshape(-1, 2).astype(np.float64)
    return float(ot.emd2(p, q, ot.dist(places, metric="euclidean")))


def _maps(a: ArrayLike, b: ArrayLike, *, masses: bool = False) -> tuple[Floats, Floats]:
    """Both maps as vectors, normalised to sum 1 for ``masses``."""
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape != second.shape:
        raise VitrimError(f"expected two maps of one shape, got {first.shape} and {second.shape}")
    if not masses:
        return first.ravel(), second.ravel()
    for one in (first, second):
        if one.min(initial=0.0) < 0 or not 0 < one.sum() < np.inf:
            raise VitrimError("expected maps of non-negative numbers that are not all zero")
    return first.ravel() / first.sum(), second.ravel() / second.sum()


def _constant(*maps: Floats) -> bool:
    """True if a map is constant."""
    return any(bool((values == values[:1]).all()) for values in maps)


# ---- tables ----------------------------------------------------------------------------------------------------------


def depth(records: Sequence[Record]) -> FamilyResult:
    """Mean depth of every patch over the images, and the similarity of these maps for every pair of records.

    The records may be of different images, such as different data sets: only the means are compared. A pair is left out
    if its models differ in grid or number of layers.
    """
    maps = {
        record.name: (record, mean_depth(depth_map(record.kept(), record.blocks, record.header["num_layers"])))
        for record in records
        if record.blocks and "kept" in record.arrays
    }
    if not maps:
        return FamilyResult(notes=["depth skipped: it needs a record of a method that keeps patches"])
    result, places, alike = FamilyResult(), list[TableRow](), list[TableRow]()
    overall = [
        {
            "method": name,
            "images": len(record),
            "depth": one.overall_mean,
            "depth_std": one.overall_std,
            "shallowest_patch": float(one.mean.min()),
            "deepest_patch": float(one.mean.max()),
        }
        for name, (record, one) in maps.items()
    ]
    result.add("depth", "Depth at which patches are dropped; blocks of the model where they never are", overall)
    for name, (record, one) in maps.items():
        for place, (mean, std) in enumerate(zip(one.mean.tolist(), one.std.tolist(), strict=True)):
            row, column = divmod(place, record.header["grid"][1])
            places.append({"method": name, "row": row, "column": column, "depth": mean, "depth_std": std})
    result.add("depth_maps", "Depth of every patch", places, ())
    for (first, of_first), (second, of_second) in combinations(maps.values(), 2):
        if all(first.header[key] == second.header[key] for key in ("grid", "num_layers")):
            a, b = (pattern.mean.reshape(first.header["grid"]) for pattern in (of_first, of_second))
            divergences = {"kl_bits_ab": kl_bits(a, b), "kl_bits_ba": kl_bits(b, a), "js_bits": js_bits(a, b)}
            likeness = {"pcc": pcc(a, b), "scc": scc(a, b), "sim": sim(a, b), "emd_patches": emd(a, b)}
            alike.append({"method_a": first.name, "method_b": second.name, **divergences, **likeness})
    result.add("depth_pairs", "Similarity of the mean maps of depth", alike)
    if alike:
        note = "Jensen-Shannon divergences are the textbook's; those of the study have reversed arguments"
        result.notes.append(note)
    return result


# ---- figures ---------------------------------------------------------------------------------------------------------

ACROSS = 5
"""Most maps in a row."""
LIKENESS = (
    *(("PCC", "pcc", "pcc", 1.0), ("SCC", "scc", "scc", 1.0), ("SIM", "sim", "sim", 1.0)),
    *(("KL, bits", "kl_bits_ab", "kl_bits_ba", 0.0), ("JS, bits", "js_bits", "js_bits", 0.0)),
    ("EMD, patches", "emd_patches", "emd_patches", 0.0),
)
"""Label, column, column with the pair reversed, and value of a map with itself, for every measure."""


@draws("depth", "depth_maps", "Depth that patches reach")
def draw_depth_maps(tables: Tables) -> Any:
    """Maps over the image, in pairs of rows: the mean over the images of the block at which each patch is dropped, and
    below it the standard deviation. All means share one colour scale, and all deviations another."""
    grids = {}
    for name, rows in grouped(tables["depth_maps"].records(), "method").items():
        grids[name] = np.full((2, 1 + max(row["row"] for row in rows), 1 + max(row["column"] for row in rows)), np.nan)
        for row in rows:
            grids[name][:, row["row"], row["column"]] = row["depth"], row["depth_std"]
    names, every = list(grids), np.concatenate([grid.reshape(2, -1) for grid in grids.values()], 1)
    limits = [(float(values.min()), float(values.max())) for values in every]
    across = min(ACROSS, len(names))
    chunks = [names[start : start + across] for start in range(0, len(names), across)]
    figure = sheet(1.6 * across + 1.1, 3.5 * len(chunks) + 0.1)
    axes = figure.subplots(2 * len(chunks), across, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for place, chunk in enumerate(chunks):
        for kind, (label, cmap) in enumerate((("mean depth", "viridis"), ("std", "cividis"))):
            row = axes[2 * place + kind]
            for axis, name in zip(row, chunk, strict=False):
                image = heat(axis, grids[name][kind], limits=limits[kind], cmap=cmap)
                if kind == 0:
                    axis.set_title(short(name).replace(" ", "\n", 1), fontsize=SMALL)
            colour_bar(figure, image, row.tolist(), label)
    return figure


@draws("depth", "depth_pairs", "Similarity of the maps of depth")
def draw_depth_pairs(tables: Tables) -> Any:
    """Heat maps of the similarity of the mean depth maps for every pair: Pearson and Spearman correlation and histogram
    intersection, which are 1 for equal maps; Kullback-Leibler and Jensen-Shannon divergence and earth mover's distance,
    which are 0."""
    table = tables["depth_pairs"]
    rows = table.records()
    maps = [PairMap(title, rows, column, turned, own) for title, column, turned, own in LIKENESS]
    return draw_pair_maps(names_of(table), maps, 3)
