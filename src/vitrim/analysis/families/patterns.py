"""Patterns: which patches methods keep, and how they group them, for every pair of records, block by block.

"Which Tokens to Use?" is Haurum et al., Which Tokens to Use? Investigating Token Reduction in Vision Transformers (ICCV
workshops 2023); algorithms and sections are those of its supplement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.analysis.family import FamilyResult, TableRow, Tables, fullest, grouped, names_of
from vitrim.analysis.figures import PairMap, Panel, draw_pair_maps, draws, line_panels, styles
from vitrim.analysis.proxies import anchor_rows, draw_anchors, scores_of
from vitrim.analysis.record import Record, check_comparable
from vitrim.analysis.statistics import Floats, moments
from vitrim.plots.charts import short
from vitrim.report import Table
from vitrim.style import TEXT, method_of

# ---- overlap of sets -------------------------------------------------------------------------------------------------


def iou(a: ArrayLike, b: ArrayLike) -> Floats:
    """Intersection over union of sets of patches (..., P), |A & B| / |A | B|, (...) float64; 0 if both are empty.
    Symmetric.

    Source: "Which Tokens to Use?", section 5.

    Example:
        >>> float(iou([True, True, False, False], [True, False, True, False]))
        0.3333333333333333
    """
    first, second = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    return _ratio((first & second).sum(-1), (first | second).sum(-1))


def ioa(a: ArrayLike, b: ArrayLike) -> Floats:
    """Share of the second set that lies in the first, |A & B| / |B|, (...) float64; 0 if B is empty. Sets as of `iou`.

    Source: "Which Tokens to Use?", section 5; there B is the set of the lower keep rate, so 1 means that the higher
    rate keeps all of it.

    Example:
        >>> float(ioa([True, True, True, False], [True, False, False, True]))
        0.5
    """
    first, second = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    return _ratio((first & second).sum(-1), second.sum(-1))


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

    # All intersections that two sets of these sizes can have.
    overlap = np.arange(max(0, a + b - patches), min(a, b) + 1)
    return float(hypergeom.pmf(overlap, patches, a, b) @ _ratio(overlap, a + b - overlap))


# ---- agreement of clusters -------------------------------------------------------------------------------------------

Labels = NDArray[np.int64]
EPS = float(np.finfo(np.float64).eps)


def homogeneity(a: ArrayLike, b: ArrayLike) -> Floats:
    """The degree to which every cluster of ``b`` holds patches of a single cluster of ``a``: 1 - H(A|B) / H(A).

    ``a`` and ``b`` are (..., P) clusters; -1, a removed patch, counts as one. (...) float64 in [0, 1]; 1 if ``a`` is a
    single cluster. scikit-learn's ``homogeneity_score(labels_true=a, labels_pred=b)`` takes a millisecond per image, or
    minutes for the pairs and blocks of one analysis; this one is vectorised.

    Rosenberg and Hirschberg, V-Measure (EMNLP 2007). "Which Tokens to Use?" compares a higher rate M1 with a lower rate
    M2 by 1 - H(M2|M1) / H(M2), which is ``homogeneity(M2, M1)``; the formula in section E of its supplement is what its
    code calls completeness.

    Example:
        >>> homogeneity([[0, 0, 1, 1], [0, 1, 2, 3]], [[0, 1, 2, 3], [0, 0, 1, 1]]).round(4).tolist()
        [1.0, 0.5]
    """
    of_a, of_b, of_both = _entropies(a, b)
    return _share(of_a + of_b - of_both, of_a)


def completeness(a: ArrayLike, b: ArrayLike) -> Floats:
    """The degree to which every cluster of ``a`` lies in a single cluster of ``b``: ``homogeneity(b, a)``."""
    return homogeneity(b, a)


def v_measure(a: ArrayLike, b: ArrayLike) -> Floats:
    """The harmonic mean of `homogeneity` h and `completeness` c, 2 h c / (h + c); 0 if both are 0. Symmetric.

    This is the normalised mutual information 2 I(A; B) / (H(A) + H(B)) with the arithmetic mean, the NMI of "Which
    Tokens to Use?". It is not corrected for chance; see `ami`. Arguments and range: see `homogeneity`.
    """
    of_a, of_b, of_both = _entropies(a, b)
    return _share(2 * (of_a + of_b - of_both), of_a + of_b)


def ami(a: ArrayLike, b: ArrayLike) -> Floats:
    """Adjusted mutual information, (I - E[I]) / ((H(A) + H(B)) / 2 - E[I]): about 0 for unrelated clusterings.

    (...) float64, at most 1; 1 if both are a single cluster, 0 if only one is. I is the mutual information, and E[I]
    its mean over all pairs of clusterings with clusters of the same sizes. Vinh et al., Information Theoretic Measures
    for Clusterings Comparison (JMLR 2010). The same as scikit-learn's ``adjusted_mutual_info_score``, vectorised over
    images; arguments as of `homogeneity`.

    Example:
        >>> float(ami([0, 0, 1, 1], [1, 1, 0, 0]))
        1.0
    """
    from scipy.stats import hypergeom

    of_a, of_b, of_both = _entropies(a, b)
    first, second = (one.reshape(-1, one.shape[-1]) for one in np.broadcast_arrays(a, b))
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
    # As scikit-learn: never 0 in the denominator, and the sign stays.
    gained, possible = (np.where(one < 0, np.minimum(one, -EPS), np.maximum(one, EPS)) for one in (gained, possible))
    single = np.where((of_a == 0) & (of_b == 0), 1.0, 0.0)
    return np.where((of_a == 0) | (of_b == 0), single, gained / possible)


def _entropies(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """H(A), H(B) and H(A, B) of every image, in nats."""
    first, second = np.broadcast_arrays(np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64))
    shape, patches = first.shape[:-1], first.shape[-1]
    first, second = (one.reshape(-1, patches) - min(0, one.min(initial=0)) for one in (first, second))
    # A pair of labels as one number: the entropy of the pairs is the joint entropy.
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

AT_END = "end"
"""Value of the block column in rows about the end of the model."""
LIKENESS = {"iou": "IoU", "v_measure": "NMI"}
"""The measures that are compared with accuracy, with their names in figures."""


def patterns(records: Sequence[Record]) -> FamilyResult:
    """Overlap of kept patches, and agreement of clusters, of every pair of records of the same images, by block."""
    reduced = [record for record in records if record.blocks]
    if len(reduced) < 2:
        return FamilyResult(notes=["patterns skipped: they need two records of methods that reduce"])
    check_comparable(reduced)
    result = FamilyResult()
    standing = [record for record in reduced if "kept" in record.arrays]
    overlap = [row for pair in combinations(standing, 2) for row in _overlap(*pair)]
    result.add("overlap", "Overlap of the kept patches", overlap)
    grouping = [record for record in reduced if record.header["kind"] != "prune"]
    clusters = [row for pair in combinations(grouping, 2) for row in _clusters(*pair)]
    result.add("clusters", "Agreement of the clusters", clusters)
    if not clusters:
        result.notes.append("clusters skipped: they need two records of methods that merge")
    _add_proxies(result, reduced, [*overlap, *clusters])
    if len(standing) < len(reduced):
        result.notes.append("methods with soft tokens keep no patches, and are left out of the overlap")
    return result


def _add_proxies(result: FamilyResult, records: Sequence[Record], rows: Sequence[TableRow]) -> None:
    """Add the similarity of patterns after the last block and the difference in accuracy, for every pair, and their
    rank correlation for each anchor ("Which Tokens to Use?", Figures 18 to 23); nothing without labels or logits."""
    scores, kind = scores_of(records)
    last: dict[frozenset[str], TableRow] = {}
    for row in rows if scores else ():  # rows of a pair come block by block
        a, b = row["method_a"], row["method_b"]
        start = {"method_a": a, "method_b": b, "block": AT_END, "images": row["images"], **dict.fromkeys(LIKENESS)}
        pair = last.setdefault(frozenset((a, b)), start)
        pair |= {measure: row[measure] for measure in LIKENESS if measure in row}
    pairs = list(last.values())
    for pair in pairs:
        signed = scores[pair["method_b"]] - scores[pair["method_a"]]
        pair |= {"difference": abs(signed), "signed": signed}
    anchors = anchor_rows(pairs, list(LIKENESS), records)
    if anchors:
        result.add("pattern_proxies", f"Likeness of patterns at the end; difference in {kind}", pairs)
        title = f"Rank correlation of likeness to one record with the signed difference in {kind}"
        result.add("pattern_anchors", title, anchors)


def _overlap(a: Record, b: Record) -> Iterator[TableRow]:
    """Yield the rows of a pair; IoA divides by the second set, so the record that keeps fewer patches is second."""
    a, b = sorted((a, b), key=lambda one: (-int(one.kept()[:, -1].sum()), one.name))
    of_a, of_b, patches = a.kept(), b.kept(), a.num_patches
    static = all(record.header["kind"] == "prune" and not record.header.get("adaptive") for record in (a, b))
    every = np.ones(patches, dtype=bool)
    for block in sorted({*a.blocks, *b.blocks}):
        sets = (_after(of_a, a.blocks, block, every), _after(of_b, b.blocks, block, every))
        sizes = np.stack([np.broadcast_to(mask.sum(-1), len(a)) for mask in sets], 1)
        pairs, counts = np.unique(sizes, axis=0, return_counts=True)
        # Counts may differ from image to image: bounds and chance are means over the pairs of counts that occur.
        levels = [
            (least_iou(patches, m, n), chance_iou(patches, m, n), least_ioa(patches, m, n), m / patches if n else 0.0)
            for m, n in pairs.tolist()
        ]
        iou_least, iou_chance, ioa_least, ioa_chance = np.average(levels, axis=0, weights=counts).tolist()
        numbers = moments({"iou": iou(*sets), "ioa": ioa(*sets)})
        yield {
            **_pair(a, b, block, "kept", sizes.mean(0)),
            **numbers,
            "iou_least": iou_least if static else None,
            "iou_chance": iou_chance,
            "ioa_least": ioa_least if static else None,
            "ioa_chance": ioa_chance,
        }


def _clusters(a: Record, b: Record) -> Iterator[TableRow]:
    """Yield the rows of a pair; homogeneity (Eq. 3) uses the record that keeps more tokens as the truth, so it is
    first."""
    a, b = sorted((a, b), key=lambda one: (-sum(len(np.unique(image)) for image in one.labels()[:, -1]), one.name))
    of_a, of_b = a.labels(), b.labels()
    few = np.linspace(0, len(a) - 1, min(len(a), AMI_IMAGES)).astype(int)
    apart = np.arange(of_a.shape[-1], dtype=np.int32)  # each patch is its own cluster
    for block in sorted({*a.blocks, *b.blocks}):
        one, other = _after(of_a, a.blocks, block, apart), _after(of_b, b.blocks, block, apart)
        ordered = (np.sort(labels, axis=1) for labels in (one, other))
        sizes = [1 + (labels[:, 1:] != labels[:, :-1]).sum(1).mean() for labels in ordered]
        measures = {measure.__name__: measure(one, other) for measure in (homogeneity, completeness, v_measure)}
        dealt = np.random.default_rng(0).permuted(other, axis=-1)  # the same sizes, unrelated to the image
        chance, adjusted = float(v_measure(one, dealt).mean()), float(ami(one[few], other[few]).mean())
        yield {**_pair(a, b, block, "clusters", sizes), **moments(measures), "v_chance": chance, "ami": adjusted}


def _pair(a: Record, b: Record, block: int, what: str, sizes: Sequence[Any]) -> TableRow:
    """The first columns of a row about two records."""
    named = {"method_a": a.name, "method_b": b.name, "block": block, "images": len(a)}
    return {**named, f"{what}_a": float(sizes[0]), f"{what}_b": float(sizes[1])}


def _after(found: NDArray[Any], blocks: Sequence[int], block: int, start: NDArray[Any]) -> NDArray[Any]:
    """(I, P) of ``found`` (I, S, P) after a block: that of the last changing block up to it, else ``start`` (P,)."""
    # The last stored block that is not behind this one.
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
    return _against(tables, tables["overlap"], "iou")


@draws("patterns", "overlap", "Overlap across rates")
def draw_overlap_rates(tables: Tables) -> Any:
    """Lines over the number of patches kept: the share of a stronger setting's patches that a milder setting of the
    same method keeps too (IoA), and their IoU. Dashes are lower bounds, dots the overlap of random patches."""
    rows = [row for row in tables["overlap"].records() if method_of(row["method_a"]) == method_of(row["method_b"])]
    if not rows:
        return None
    colour, _ = styles(tables)
    colour, given = dict(colour), list[Panel]()
    blocks = fullest((row["block"] for row in rows), STAGES)
    for (measure, title), block in product((("ioa", "IoA"), ("iou", "IoU")), blocks):
        lines = {}
        own = ({**row, "method": method_of(row["method_a"])} for row in rows if row["block"] == block)
        for method, pairs in grouped(own, "method").items():
            mildest = max(pairs, key=itemgetter("kept_a"))["method_a"]
            label = f"{method}, with {short(mildest)}"
            lines[label], colour[label] = [row for row in pairs if row["method_a"] == mildest], colour[mildest]
        given.append(Panel(measure, lines, f"{title}, block {block}", "kept_b", "patches kept"))
    figure, axes = line_panels(given, (colour, dict.fromkeys(colour, "o")), across=len(blocks))
    for axis in axes:
        axis.set_ylim(-0.02, 1.03)
        axis.set_xlim(0, 1.05 * max(row["kept_a"] for row in rows))
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
    return _against(tables, tables["clusters"], "v_measure")


@draws("patterns", "pattern_anchors", "Likeness to every anchor against accuracy")
def draw_pattern_anchors(tables: Tables) -> Any:
    """Scatter plots, one panel per measure and anchor: intersection over union of the patches kept at the end with the
    anchor's, or normalised mutual information of the clusters, and the difference in accuracy from the anchor. Titles
    give rank correlations."""
    return draw_anchors(tables, "pattern_proxies", "pattern_anchors", LIKENESS, AT_END)


def _maps(table: Table, column: str, turned: str, label: str) -> Any:
    """Heat maps per stage: of ``column``, and of ``turned`` for reversed pairs."""
    rows = grouped(table.records(), "block")
    stages = fullest(table.column("block"), STAGES)
    maps = [PairMap(f"after block {block}", rows[block], column, turned) for block in stages]
    return draw_pair_maps(names_of(table), maps, STAGES, label)


def _against(tables: Tables, table: Table, measure: str) -> Any:
    """A panel per anchor with a line for each other record."""
    names, given = names_of(table), list[Panel]()
    for anchor in names[:ANCHORS] if len(names) > 2 else names[:1]:
        pairs = [
            {**row, "method": row["method_b"] if row["method_a"] == anchor else row["method_a"]}
            for row in table.records()
            if anchor in (row["method_a"], row["method_b"])
        ]
        lines = grouped(sorted(pairs, key=lambda row: names.index(row["method"])), "method")
        given.append(Panel(measure, lines, f"with {short(anchor)}", label="after block (from 0)"))
    figure, axes = line_panels(given, styles(tables))
    for axis in axes:
        axis.set_ylim(-0.02, 1.03)
    axes[0].set_ylabel(LIKENESS[measure], fontsize=TEXT)
    return figure
