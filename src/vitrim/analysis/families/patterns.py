"""Patterns: which patches methods keep, and how they group them, for every pair of records, block by block.

"Which Tokens to Use?" is Haurum et al., Which Tokens to Use? Investigating Token Reduction in Vision Transformers (ICCV
workshops 2023); algorithms and sections are those of its supplement. Two sets or clusterings of different numbers of
patches raise `VitrimError`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.analysis.family import (
    FamilyResult,
    PairMap,
    TableRow,
    Tables,
    draw_pair_maps,
    draws,
    fullest,
    names_of,
    styles,
    whole_numbers,
)
from vitrim.analysis.proxies import ANCHORS as PROXY_ANCHORS
from vitrim.analysis.proxies import anchor_rows, draw_anchors, scores_of
from vitrim.analysis.record import Record, check_comparable
from vitrim.analysis.statistics import BAND, columns_of, summary
from vitrim.errors import VitrimError
from vitrim.plots.charts import Line, line, short
from vitrim.report import Table
from vitrim.style import TEXT, TITLE, method_of, names_below, panels

# ---- overlap of sets -------------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]


def iou(a: ArrayLike, b: ArrayLike) -> Floats:
    """Intersection over union of sets of patches, |A & B| / |A | B|, (...) float64; 0 if both are empty. Symmetric.

    Source: "Which Tokens to Use?", section 5.

    Args:
        a, b: (..., P) bool, True for the patches of the set.

    Example:
        >>> float(iou([True, True, False, False], [True, False, True, False]))
        0.3333333333333333
    """
    first, second = _sets(a, b)
    return _ratio((first & second).sum(-1), (first | second).sum(-1))


def ioa(a: ArrayLike, b: ArrayLike) -> Floats:
    """Share of the second set that lies in the first, |A & B| / |B|, (...) float64; 0 if B is empty.

    Source: "Which Tokens to Use?", section 5; there B is the set of the lower keep rate, so 1 means that the higher
    rate keeps all of it.

    Args:
        a, b: see `iou`.

    Example:
        >>> float(ioa([True, True, True, False], [True, False, False, True]))
        0.5
    """
    first, second = _sets(a, b)
    return _ratio((first & second).sum(-1), second.sum(-1))


def _sets(a: ArrayLike, b: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    first, second = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    if first.shape[-1:] != second.shape[-1:]:
        raise VitrimError(f"expected two sets of the same patches, got sets over {first.shape} and {second.shape}")
    return first, second


def _ratio(part: ArrayLike, whole: ArrayLike) -> Floats:
    """``part / whole``, 0 if ``whole`` is 0."""
    above, below = np.asarray(part, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    return np.divide(above, below, out=np.zeros(np.broadcast_shapes(above.shape, below.shape)), where=below != 0)


# ---- lower bounds ----------------------------------------------------------------------------------------------------


def least_ioa(patches: int, a: int, b: int) -> float:
    """The tight lower bound on `ioa` of sets of ``a`` and ``b`` patches, max(0, a + b - P) / b; 0 for ``b == 0``.

    "Which Tokens to Use?", Algorithm 1, with ``a`` and ``b`` as floor(P r^s) after s stages at keep rate r. It holds
    for methods that keep exactly these counts, not for merging or for counts that depend on the image.

    Example:
        >>> round(least_ioa(196, 176, 137), 3)
        0.854
    """
    return max(0, a + b - patches) / b if b else 0.0


def least_iou(patches: int, a: int, b: int) -> float:
    """The tight lower bound on `iou` of sets of ``a`` and ``b`` patches, max(0, a + b - P) / P.

    Algorithm 2, see `least_ioa`. If two sets with the least overlap intersect at all, their union is all P patches.

    Example:
        >>> least_iou(196, 24, 24), round(least_iou(196, 158, 96), 3)
        (0.0, 0.296)
    """
    return max(0, a + b - patches) / patches


# ---- chance ----------------------------------------------------------------------------------------------------------


def chance_iou(patches: int, a: int, b: int) -> float:
    """The mean `iou` of two random sets of ``a`` and ``b`` patches, in closed form; the mean `ioa` is a / P.

    sum over k of Hypergeometric(k; P, a, b) k / (a + b - k): the intersection k of two independent sets of fixed sizes
    is hypergeometric.

    Example:
        >>> round(chance_iou(4, 2, 2), 4)  # 1/6 * 0 + 4/6 * 1/3 + 1/6 * 1
        0.3889
    """
    from scipy.stats import hypergeom

    overlap = np.arange(max(0, a + b - patches), min(a, b) + 1)
    return float(hypergeom.pmf(overlap, patches, a, b) @ _ratio(overlap, a + b - overlap))


# ---- agreement of clusters -------------------------------------------------------------------------------------------

Labels = NDArray[np.int64]
EPS = float(np.finfo(np.float64).eps)


def homogeneity(a: ArrayLike, b: ArrayLike) -> Floats:
    """The degree to which every cluster of ``b`` holds patches of a single cluster of ``a``: 1 - H(A|B) / H(A).

    (...) float64 in [0, 1]; 1 if ``a`` is a single cluster. The same as scikit-learn's
    ``homogeneity_score(labels_true=a, labels_pred=b)``, which takes a millisecond per image, or minutes for the pairs
    and blocks of one analysis; this one is vectorised.

    Rosenberg and Hirschberg, V-Measure (EMNLP 2007). "Which Tokens to Use?" compares a higher rate M1 with a lower rate
    M2 by 1 - H(M2|M1) / H(M2), which is ``homogeneity(M2, M1)``; the formula in section E of its supplement is what its
    code calls completeness.

    Args:
        a, b: (..., P) integers, the cluster of every patch; -1, a removed patch, counts as a cluster.

    Example:
        >>> homogeneity([[0, 0, 1, 1], [0, 1, 2, 3]], [[0, 1, 2, 3], [0, 0, 1, 1]]).round(4).tolist()
        [1.0, 0.5]
    """
    of_a, of_b, of_both = _entropies(a, b)
    return _share(of_a + of_b - of_both, of_a)


def completeness(a: ArrayLike, b: ArrayLike) -> Floats:
    """The degree to which every cluster of ``a`` lies in a single cluster of ``b``: ``homogeneity(b, a)``.

    Example:
        >>> round(float(completeness([0, 0, 1, 1], [0, 1, 2, 3])), 4)
        0.5
    """
    return homogeneity(b, a)


def v_measure(a: ArrayLike, b: ArrayLike) -> Floats:
    """The harmonic mean of `homogeneity` h and `completeness` c, 2 h c / (h + c); 0 if both are 0. Symmetric.

    This is the normalised mutual information 2 I(A; B) / (H(A) + H(B)) with the arithmetic mean, the NMI of "Which
    Tokens to Use?". It is not corrected for chance; see `ami`. Arguments and range: see `homogeneity`.

    Example:
        >>> round(float(v_measure([0, 0, 1, 1], [0, 1, 2, 3])), 4)
        0.6667
    """
    of_a, of_b, of_both = _entropies(a, b)
    return _share(2 * (of_a + of_b - of_both), of_a + of_b)


def ami(a: ArrayLike, b: ArrayLike) -> Floats:
    """Adjusted mutual information, (I - E[I]) / ((H(A) + H(B)) / 2 - E[I]): about 0 for unrelated clusterings.

    (...) float64, at most 1; 1 if both are a single cluster, 0 if only one is. I is the mutual information, and E[I]
    its mean over all pairs of clusterings with clusters of the same sizes. Vinh et al., Information Theoretic Measures
    for Clusterings Comparison (JMLR 2010). The same as scikit-learn's ``adjusted_mutual_info_score``, vectorised over
    images.

    Args:
        a, b: see `homogeneity`.

    Example:
        >>> float(ami([0, 0, 1, 1], [1, 1, 0, 0]))
        1.0
    """
    from scipy.stats import hypergeom

    of_a, of_b, of_both = _entropies(a, b)
    first, second = (one.reshape(-1, one.shape[-1]) for one in _labels(a, b))
    images, patches = first.shape
    counts: list[NDArray[np.int64]] = []  # (I, P + 1), clusters of each size, of a and b
    for labels in (first, second):
        wide = int(labels.max(initial=0)) + 2
        cluster, size = np.unique(np.arange(images)[:, None] * wide + labels + 1, return_counts=True)
        found = np.bincount(cluster // wide * (patches + 1) + size, minlength=images * (patches + 1))
        counts.append(found.reshape(images, patches + 1))
    sizes_a, sizes_b = (np.flatnonzero(one.any(0)) for one in counts)
    # E[I] is a sum over pairs of clusters of a term that depends only on their sizes a and b, so it is computed once
    # per pair of sizes: the mean of n / P log(P n / (a b)), with n the overlap of random clusters of a and b patches
    table = np.zeros((len(sizes_a), len(sizes_b)))
    for (row, column), _ in np.ndenumerate(table):
        one, other = int(sizes_a[row]), int(sizes_b[column])
        overlap = np.arange(max(1, one + other - patches), min(one, other) + 1)
        terms = overlap / patches * np.log(patches * overlap / (one * other))
        table[row, column] = hypergeom.pmf(overlap, patches, one, other) @ terms
    expected = np.einsum("ki,ij,kj->k", counts[0][:, sizes_a], table, counts[1][:, sizes_b]).reshape(of_a.shape)
    gained, possible = of_a + of_b - of_both - expected, (of_a + of_b) / 2 - expected
    gained, possible = (np.where(one < 0, np.minimum(one, -EPS), np.maximum(one, EPS)) for one in (gained, possible))
    single = np.where((of_a == 0) & (of_b == 0), 1.0, 0.0)
    return np.where((of_a == 0) | (of_b == 0), single, gained / possible)


def _labels(a: ArrayLike, b: ArrayLike) -> tuple[Labels, Labels]:
    first, second = np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64)
    if first.shape[-1:] != second.shape[-1:] or first.ndim == 0:
        raise VitrimError(f"expected clusters of the same patches, got labels {first.shape} and {second.shape}")
    one, other = np.broadcast_arrays(first, second)
    return one, other


def _entropies(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """H(A), H(B) and H(A, B) of every image, in nats."""
    first, second = _labels(a, b)
    shape, patches = first.shape[:-1], first.shape[-1]
    first, second = (one.reshape(-1, patches) - min(0, one.min(initial=0)) for one in (first, second))
    wide = int(second.max(initial=0)) + 1
    found = (_entropy(one).reshape(shape) for one in (first, second, first * wide + second))
    return next(found), next(found), next(found)


def _entropy(labels: Labels) -> Floats:
    """Entropies of rows (I, P) of labels from 0, in nats: log P - sum over clusters of n log n / P."""
    images, patches = labels.shape
    wide = int(labels.max(initial=0)) + 1
    cluster, size = np.unique(np.arange(images)[:, None] * wide + labels, return_counts=True)
    total = np.bincount(cluster // wide, weights=size * np.log(size), minlength=images)
    found: Floats = np.log(patches) - total / patches
    found[total == patches * np.log(patches)] = 0.0  # exactly 0 for a single cluster
    return found


def _share(shared: Floats, of: Floats) -> Floats:
    """``shared / of`` clipped to [0, 1]; 1 if ``of`` is 0."""
    return np.clip(np.divide(shared, of, out=np.ones_like(shared), where=of > 0), 0.0, 1.0)


# ---- tables ----------------------------------------------------------------------------------------------------------

AMI_IMAGES = 200
"""Most images for adjusted mutual information."""

PAIR = ("method_a", "method_b", "block", "images")


def patterns(records: Sequence[Record]) -> FamilyResult:
    """Overlap of kept patches, and agreement of clusters, of every pair of records of the same images, by block."""
    reduced = [record for record in records if record.blocks]
    if len(reduced) < 2:
        return FamilyResult(notes=["patterns skipped: they need two records of methods that reduce"])
    check_comparable(reduced)
    result = FamilyResult()
    standing = [record for record in reduced if "kept" in record.arrays]
    rows = [row for pair in combinations(standing, 2) for row in _overlap(*pair)]
    if rows:
        result.tables.append(Table("overlap", "Overlap of the kept patches", OVERLAP, rows, OVERLAP_SHOWN))
    grouping = [record for record in reduced if record.header["kind"] != "prune"]
    rows = [row for pair in combinations(grouping, 2) for row in _clusters(*pair)]
    if rows:
        result.tables.append(Table("clusters", "Agreement of the clusters", CLUSTERS, rows, CLUSTERS_SHOWN))
    else:
        result.notes.append("clusters skipped: they need two records of methods that merge")
    result.tables += _proxies(reduced, result.tables)
    if len(standing) < len(reduced):
        result.notes.append("methods with soft tokens keep no patches, and are left out of the overlap")
    return result


PROXIES = (*PAIR, "iou", "v_measure", "difference", "signed")
AT_END = "end"
"""Value of the block column in rows about the end of the model."""


def _proxies(records: Sequence[Record], found: Sequence[Table]) -> list[Table]:
    """The similarity of patterns after the last block and the difference in accuracy, for every pair, and their rank
    correlation for each anchor ("Which Tokens to Use?", Figures 18 to 23); empty without labels or logits."""
    scores, kind = scores_of(records)
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for table in found:  # rows of a pair come block by block
        for row in table.records():
            pair = (row["method_a"], row["method_b"])
            kept = pair if pair in last or pair[::-1] not in last else pair[::-1]
            measures = {name: row[name] for name in PROXIES[4:6] if name in row}
            last[kept] = {**last.get(kept, {}), "images": row["images"], **measures}
    rows = []
    for (a, b), own in last.items() if scores else ():
        signed = scores[b] - scores[a]
        rows.append((a, b, AT_END, own["images"], own.get("iou"), own.get("v_measure"), abs(signed), signed))
    pairs = Table("pattern_proxies", f"Likeness of patterns at the end; difference in {kind}", PROXIES, rows)
    anchors = list(anchor_rows(pairs.records(), PROXIES[4:6], records))
    title = f"Rank correlation of likeness to one record with the signed difference in {kind}"
    return [pairs, Table("pattern_anchors", title, PROXY_ANCHORS, anchors)] if anchors else []


OVERLAP = (
    *(*PAIR, "kept_a", "kept_b"),
    *(*columns_of("iou"), "iou_least", "iou_chance", *columns_of("ioa"), "ioa_least", "ioa_chance"),
)
OVERLAP_SHOWN = (*PAIR[:3], "iou", "iou_low", "iou_high", "iou_least", "iou_chance", "ioa", "ioa_least", "ioa_chance")


def _overlap(a: Record, b: Record) -> list[tuple[object, ...]]:
    """Rows of a pair; IoA divides by the second set, so the record that keeps fewer patches is second."""
    a, b = sorted((a, b), key=lambda one: (-int(one.kept()[:, -1].sum()), one.name))
    of_a, of_b = a.kept(), b.kept()
    rows: list[tuple[object, ...]] = []
    blocks = sorted({*a.blocks, *b.blocks})
    every = np.ones(a.num_patches, dtype=bool)
    pairs_of_sets = [(_after(of_a, a.blocks, block, every), _after(of_b, b.blocks, block, every)) for block in blocks]
    numbers_of = summary(np.stack([measure(*sets) for sets in pairs_of_sets for measure in (iou, ioa)], 1))
    for place, (block, (one, other)) in enumerate(zip(blocks, pairs_of_sets, strict=True)):
        union, within = numbers_of[2 * place : 2 * place + 2]
        patches = a.num_patches
        sizes = np.stack([np.broadcast_to(mask.sum(-1), len(a)) for mask in (one, other)], 1)
        pairs, counts = np.unique(sizes, axis=0, return_counts=True)
        of_sizes = [
            (least_iou(patches, m, n), least_ioa(patches, m, n), chance_iou(patches, m, n), m / patches if n else 0.0)
            for m, n in pairs.tolist()
        ]
        levels = np.average(of_sizes, axis=0, weights=counts).tolist()
        static = all(record.header["kind"] == "prune" and not record.header.get("adaptive") for record in (a, b))
        least = levels[:2] if static else (None, None)
        numbers = (*union, least[0], levels[2], *within, least[1], levels[3])
        rows.append((a.name, b.name, block, len(a), *map(float, sizes.mean(0)), *numbers))
    return rows


CLUSTERS = (
    *(*PAIR, "clusters_a", "clusters_b"),
    *(*columns_of("homogeneity"), *columns_of("completeness"), *columns_of("v_measure"), "v_chance", "ami"),
)
CLUSTERS_SHOWN = (*PAIR[:3], "homogeneity", "completeness", *columns_of("v_measure", BAND), "v_chance", "ami")


def _clusters(a: Record, b: Record) -> list[tuple[object, ...]]:
    """Rows of a pair; homogeneity (Eq. 3) uses the record that keeps more tokens as the truth, so it is first."""
    a, b = sorted((a, b), key=lambda one: (-sum(len(np.unique(image)) for image in one.labels()[:, -1]), one.name))
    of_a, of_b = a.labels(), b.labels()
    rows: list[tuple[object, ...]] = []
    blocks, measures = sorted({*a.blocks, *b.blocks}), (homogeneity, completeness, v_measure)
    apart = np.arange(of_a.shape[-1], dtype=np.int32)  # each patch is its own cluster
    pairs = [(_after(of_a, a.blocks, block, apart), _after(of_b, b.blocks, block, apart)) for block in blocks]
    numbers_of = summary(np.stack([measure(*pair) for pair in pairs for measure in measures], 1))
    for place, (block, (one, other)) in enumerate(zip(blocks, pairs, strict=True)):
        numbers = [number for numbers in numbers_of[3 * place : 3 * place + 3] for number in numbers]
        few = np.linspace(0, len(a) - 1, min(len(a), AMI_IMAGES)).astype(int)
        dealt = np.random.default_rng(0).permuted(other, axis=-1)  # the same sizes, unrelated to the image
        chance = float(v_measure(one, dealt).mean())
        adjusted = float(ami(one[few], other[few]).mean())
        ordered = (np.sort(labels, axis=1) for labels in (one, other))
        sizes = [float(1 + (labels[:, 1:] != labels[:, :-1]).sum(1).mean()) for labels in ordered]
        rows.append((a.name, b.name, block, len(a), *sizes, *numbers, chance, adjusted))
    return rows


def _after(found: NDArray[Any], blocks: Sequence[int], block: int, start: NDArray[Any]) -> NDArray[Any]:
    """(I, P) of ``found`` (I, S, P) after a block: that of the last changing block up to it, else ``start`` (P,)."""
    stage = int(np.searchsorted(blocks, block, side="right")) - 1
    return found[:, stage] if stage >= 0 else np.broadcast_to(start, found[:, 0].shape)


# ---- figures ---------------------------------------------------------------------------------------------------------

STAGES = 4
"""Blocks with a heat map."""
ANCHORS = 6
"""Most records that get a panel as the anchor."""


@draws("patterns", "overlap", "Overlap of the kept patches (IoU)")
def draw_overlap(tables: Tables) -> Any:
    """Heat maps, one per stage, blocks from 0: intersection over union of the patches that each pair of methods keeps.
    Grey: neither method changes tokens in that block."""
    return _maps(tables["overlap"], "iou", "iou", "IoU")


@draws("patterns", "overlap", "Overlap block by block")
def draw_overlap_blocks(tables: Tables) -> Any:
    """Lines over the blocks: intersection over union with an anchor, one panel per anchor. Bands are 95 % bootstrap
    intervals, dashes lower bounds, dots the overlap of random patches."""
    return _against(tables, tables["overlap"], "iou", "IoU")


@draws("patterns", "overlap", "Overlap across rates")
def draw_overlap_rates(tables: Tables) -> Any:
    """Lines over the number of patches kept: the share of a stronger setting's patches that a milder setting of the
    same method keeps too (IoA), and their IoU. Dashes are lower bounds, dots the overlap of random patches."""
    table = tables["overlap"]
    same = [row for row in table.records() if method_of(row["method_a"]) == method_of(row["method_b"])]
    if not same:
        return None
    blocks = fullest((row["block"] for row in same), STAGES)
    colour, _ = styles(tables)
    figure, axes = panels(2 * len(blocks), across=len(blocks), size=(2.3, 2.1), above=0.6)
    for place, axis in enumerate(axes):
        measure, block = ("ioa", "iou")[place // len(blocks)], blocks[place % len(blocks)]
        own: dict[str, list[TableRow]] = defaultdict(list)
        for row in same:
            if row["block"] == block:
                own[method_of(row["method_a"])].append(row)
        for method, rows in own.items():
            mildest = max(rows, key=lambda row: row["kept_a"])["method_a"]
            points = sorted((row for row in rows if row["method_a"] == mildest), key=lambda row: row["kept_b"])
            given, label = _line(points, measure, "kept_b"), f"{method}, with {short(mildest)}"
            line(axis, given, colour=colour[mildest], label=label)
        axis.set_ylim(-0.02, 1.03)
        axis.set_xlim(0, 1.05 * max(row["kept_a"] for rows in own.values() for row in rows))
        axis.set_title(f"{'IoA' if measure == 'ioa' else 'IoU'}, block {block}", fontsize=TITLE)
    for axis in axes[len(blocks) :]:
        axis.set_xlabel("patches kept", fontsize=TEXT)
    names_below(figure, axes)
    return figure


@draws("patterns", "clusters", "Agreement of the clusters (NMI)")
def draw_clusters(tables: Tables) -> Any:
    """Heat maps, one per stage, blocks from 0: normalised mutual information of the clusters of each pair of methods.
    Grey: neither method changes tokens in that block."""
    return _maps(tables["clusters"], "v_measure", "v_measure", "NMI")


@draws("patterns", "clusters", "Homogeneity of the clusters")
def draw_homogeneity(tables: Tables) -> Any:
    """Heat maps, one per stage, blocks from 0: homogeneity, the degree to which each cluster of the column's method
    lies within one cluster of the row's method."""
    return _maps(tables["clusters"], "homogeneity", "completeness", "homogeneity")


@draws("patterns", "clusters", "Agreement of the clusters block by block")
def draw_clusters_blocks(tables: Tables) -> Any:
    """Lines over the blocks: normalised mutual information of clusters with an anchor, one panel per anchor. Bands are
    95 % bootstrap intervals, dots the level of random clusters."""
    return _against(tables, tables["clusters"], "v_measure", "NMI")


@draws("patterns", "pattern_anchors", "Overlap with every anchor against accuracy")
def draw_overlap_anchors(tables: Tables) -> Any:
    """Scatter plots, one panel per anchor: intersection over union of the patches kept at the end with the anchor's,
    and the difference in accuracy from the anchor. Titles give rank correlations."""
    return draw_anchors(tables, "pattern_proxies", "pattern_anchors", "iou", "IoU", AT_END)


@draws("patterns", "pattern_anchors", "Clusters of every anchor against accuracy")
def draw_clusters_anchors(tables: Tables) -> Any:
    """Scatter plots, one panel per anchor: normalised mutual information of the clusters at the end with the anchor's,
    and the difference in accuracy from the anchor. Titles give rank correlations."""
    return draw_anchors(tables, "pattern_proxies", "pattern_anchors", "v_measure", "NMI", AT_END)


def _maps(table: Table, column: str, turned: str, label: str) -> Any:
    """Heat maps per stage: of ``column``, and of ``turned`` for reversed pairs."""
    rows = table.records()
    stages = fullest((row["block"] for row in rows), STAGES)
    maps = [
        PairMap(f"after block {block}", [row for row in rows if row["block"] == block], column, turned)
        for block in stages
    ]
    return draw_pair_maps(names_of(table), maps, STAGES, label)


def _against(tables: Tables, table: Table, measure: str, label: str) -> Any:
    """A panel per anchor with a line for each other record."""
    names = names_of(table)
    colour, marker = styles(tables)
    anchors = names[:ANCHORS] if len(names) > 2 else names[:1]
    figure, axes = panels(len(anchors), across=3, size=(2.7, 2.2), above=0.4 + 0.17 * len(names))
    for axis, anchor in zip(axes, anchors, strict=True):
        pairs: dict[str, list[TableRow]] = defaultdict(list)
        for row in table.records():
            if anchor in (row["method_a"], row["method_b"]):
                pairs[row["method_b"] if row["method_a"] == anchor else row["method_a"]].append(row)
        for name in sorted(pairs, key=names.index):
            given = _line(sorted(pairs[name], key=lambda row: row["block"]), measure, "block")
            line(axis, given, colour=colour[name], marker=marker[name], label=name)
        axis.set_title(f"with {short(anchor)}", fontsize=TEXT)
        axis.set_ylim(-0.02, 1.03)
        whole_numbers(axis, "after block (from 0)")
    axes[0].set_ylabel(label, fontsize=TEXT)
    names_below(figure, axes, names)
    return figure


def _line(rows: Sequence[TableRow], measure: str, over: str) -> Line:
    """A measure with its interval, lower bound and chance level, as far as the table has them."""
    stem = measure.removesuffix("_measure")  # the chance level of the V measure is v_chance
    names = (over, measure, f"{measure}_low", f"{measure}_high", f"{measure}_least", f"{stem}_chance")
    columns: list[list[Any]] = [[row.get(name) for row in rows] for name in names]
    return Line(*columns)
