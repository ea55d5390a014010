"""Features: how far class tokens move from those of other models, and if that predicts accuracy.

The distances are those of Ding et al., Grounding Representation Similarity with Statistical Testing (NeurIPS 2021),
which "Which Tokens to Use?" applies to class tokens. They compare features (I, C) and (I, D) of the same I images in
the same order, and centre and scale them first; `VitrimError` for different numbers of images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vitrim.analysis.family import FamilyResult, TableRow, Tables, grouped
from vitrim.analysis.figures import Panel, draws, line_panels, styles
from vitrim.analysis.proxies import (
    FEWEST_PAIRS,
    GREY,
    RHO,
    TAU,
    anchor_rows,
    draw_anchors,
    scores_of,
    with_differences,
)
from vitrim.analysis.record import Record, check_comparable
from vitrim.analysis.statistics import Floats, spearman_ci, spearman_kendall
from vitrim.errors import VitrimError
from vitrim.report import DENSE
from vitrim.style import SMALL, TEXT, method_of, names_below, panels


def center(features: ArrayLike) -> Floats:
    """Features (I, C) minus their mean over images, divided by their Frobenius norm; zeros for constant features."""
    values = np.asarray(features, dtype=np.float64)
    if values.ndim != 2 or not values.size:
        raise VitrimError(f"expected features (images, channels), got {values.shape}")
    found: Floats = values - values.mean(0)
    norm = np.linalg.norm(found)
    if norm > 0:
        found /= norm
    return found


def procrustes(a: ArrayLike, b: ArrayLike) -> float:
    """Orthogonal Procrustes distance, ||A||^2 + ||B||^2 - 2 ||A'B||_* of `center` features, in [0, 2]. Symmetric.

    "OPD" in Ding et al. The squared distance after the best rotation: 0 if the features differ in rotation and scale
    only.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 4))
        >>> abs(procrustes(a, 3 * a[:, ::-1])) < 1e-12
        True
    """
    first, second = _pair(a, b)
    nuclear = np.linalg.svd(first.T @ second, compute_uv=False).sum()
    return float((first**2).sum() + (second**2).sum() - 2 * nuclear)


def cka(a: ArrayLike, b: ArrayLike) -> float:
    """Distance by linear centred kernel alignment, 1 - ||A'B||_F^2 / (||A'A||_F ||B'B||_F), in [0, 1]. Symmetric.

    nan for constant features. Kornblith et al., Similarity of Neural Network Representations Revisited (ICML 2019).

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 4))
        >>> abs(cka(a, 3 * a[:, ::-1])) < 1e-12
        True
    """
    first, second = _pair(a, b)
    below = np.linalg.norm(first.T @ first) * np.linalg.norm(second.T @ second)
    return float(1 - np.linalg.norm(first.T @ second) ** 2 / below) if below > 0 else float("nan")


class CCA(NamedTuple):
    """Canonical correlations (min(C, D),) of two features, descending, in [0, 1], and their projection-weighted
    distance."""

    correlations: Floats
    pwcca_ab: float


def cca(a: ArrayLike, b: ArrayLike) -> CCA:
    """Canonical correlation analysis of two features, and the projection-weighted distance (PWCCA).

    The correlations are the singular values of S_AA^(-1/2) S_AB S_BB^(-1/2), with symmetric roots by eigendecomposition
    in which eigenvalues that are not positive count as 0. There must be more images than channels (else `VitrimError`),
    or every correlation would be 1.

    The distance is 1 - sum w_i rho_i, in [0, 1], and not symmetric: ``a`` gives the weights. w_i is the sum over the
    channels of ``a`` of |<h_i, channel>|, where h_i is the i-th canonical variate of ``a``, divided by the sum of all C
    of them; the first min(C, D) have a correlation. Morcos et al., Insights on Representational Similarity (NeurIPS
    2018). If C > D, the linear algebra library chooses a basis for the directions of ``a`` beyond the D-th, and the
    weights depend on it.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 2))
        >>> cca(a, 2 * a).correlations.round(6).tolist(), abs(cca(a, 2 * a).pwcca_ab) < 1e-6
        ([1.0, 1.0], True)
    """
    first, second = _pair(a, b)
    images, widest = len(first), max(first.shape[1], second.shape[1])
    if images <= widest:
        raise VitrimError(f"CCA needs more images than channels, got {images} images and {widest} channels")
    # Whitened features: their products are correlations.
    root, other_root = (_inverse_root(one.T @ one) for one in (first, second))
    # full SVD: the weights of PWCCA run over all directions
    directions, correlations, _ = np.linalg.svd(root @ (first.T @ second) @ other_root, full_matrices=True)
    variates = first @ (root @ directions)
    weights = np.abs(variates.T @ first).sum(1)  # share of the features along each variate
    return CCA(correlations, float(1 - (weights[: len(correlations)] / weights.sum()) @ correlations))


def _inverse_root(matrix: Floats) -> Floats:
    """The symmetric inverse square root; eigenvalues that are not positive give 0."""
    values, vectors = np.linalg.eigh(matrix)
    roots = np.zeros_like(values)
    # Directions without variance have no correlation.
    roots[values > 0] = values[values > 0] ** -0.5
    found: Floats = (vectors * roots) @ vectors.T
    return found


def _pair(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    first, second = center(a), center(b)
    if len(first) != len(second):
        raise VitrimError(f"expected features of the same images, got {len(first)} and {len(second)}")
    return first, second


# ---- tables ----------------------------------------------------------------------------------------------------------

MEASURES = ("procrustes", "cka_distance", "pwcca_distance_ab", "mean_cca")
"""The last two need twice as many images as channels; the weights of PWCCA are those of the first record."""
HEAD = "head"
"""Value of the block column in rows about the classifier's input."""


def features(*groups: Sequence[Record]) -> FamilyResult:
    """Distances between the features of every pair of records, and their rank correlation with the pair's difference in
    accuracy or, without labels, in agreement with the dense model: over all pairs, and with each record (the anchor),
    signed.

    CCA is left out if there are fewer than twice as many images as channels. For several ``groups``, each of the same
    images, pairs are within groups, and rank correlations are over the pairs of all. `VitrimError` for different images
    in a group, or fewer images than classes.
    """
    every = [[record for record in group if "head" in record.arrays] for group in groups]
    having = [group for group in every if len(group) > 1]
    if not having:
        return FamilyResult(notes=["features skipped: they need two records with features"])
    result, rows, kinds = FamilyResult(), list[TableRow](), list[str]()
    for group in having:
        result.notes += _images_needed(group)
        scores, kind = scores_of(group)
        kinds.append(kind)
        rows += _distances(group, scores)
    score = " or ".join(dict.fromkeys(kinds))
    result.add("features", f"Distance of features; difference in {score}", rows)
    known = result.tables[0].records()  # without the distances of constant features
    proxy = [
        {"block": block, "measure": measure, "pairs": len(pairs)}
        | spearman_kendall(*pairs.T)._asdict()
        | dict(zip(("spearman_low", "spearman_high"), spearman_ci(pairs), strict=True))
        for block, measure, pairs in with_differences(known, MEASURES)
    ]
    if not proxy:
        result.notes.append("proxy skipped: it needs four pairs of records, and labels or logits")
        return result
    result.add("proxy", f"Rank correlation of distances with the difference in {score}", proxy)
    anchored = [row for group in having for row in anchor_rows(known, MEASURES, group)]
    title = f"Rank correlation of distances from one record with the signed difference in {score}"
    result.add("proxy_anchors", title, anchored)
    if max(map(len, having)) > 3 or len(having) > 1:
        result.notes.append("pairs of the same records are not independent: p-values and intervals are too narrow")
    return result


def _images_needed(group: Sequence[Record]) -> Iterator[str]:
    """Refuse a group of different images, or of too few; yield a note if there are too few for CCA."""
    check_comparable(group)
    classes = max((record.arrays["logits"].shape[1] for record in group if "logits" in record.arrays), default=0)
    widest, count = max(record.arrays["head"].shape[1] for record in group), len(group[0].feature(None))
    if count < classes:
        raise VitrimError(f"features need at least as many images as classes, got {count} for {classes}")
    if count < 2 * widest:
        yield f"CCA and PWCCA need {2 * widest} images, twice the {widest} channels, and there are {count}"


def _distances(group: Sequence[Record], scores: Mapping[str, float]) -> Iterator[TableRow]:
    """Yield the rows of every pair of records, at every block that all have, and at the classifier's input."""
    from threadpoolctl import threadpool_limits

    # Records may keep features of other blocks: only shared ones can be compared.
    common = set.intersection(*(set(record.header["feature_blocks"]) for record in group))
    for (a, b), block in product(combinations(group, 2), (*sorted(common), None)):
        one, other = a.feature(block), b.feature(block)
        row: TableRow = {"method_a": a.name, "method_b": b.name, "block": HEAD if block is None else block}
        row |= {"images": len(one), **dict.fromkeys(MEASURES)}
        with threadpool_limits(limits=1, user_api="blas"):  # threads slow small matrices down on busy cores
            row |= {"procrustes": procrustes(one, other), "cka_distance": cka(one, other)}
            if len(one) >= 2 * max(one.shape[1], other.shape[1]):
                correlations, distance = cca(one, other)
                row |= {"pwcca_distance_ab": distance, "mean_cca": float(correlations.mean())}
        signed = scores[b.name] - scores[a.name] if scores else None
        yield {**row, "difference": None if signed is None else abs(signed), "signed": signed}


# ---- figures ---------------------------------------------------------------------------------------------------------

DISTANCES = {"procrustes": "Procrustes", "cka_distance": "CKA distance", "pwcca_distance_ab": "PWCCA distance"}
"""The measures that are drawn, with their titles."""


@draws("features", "features", "Distance of the features from the dense model's")
def draw_features(tables: Tables) -> Any:
    """Lines over the blocks, one panel per measure: distance from the dense model of the class token, and at the end of
    the classifier's input."""
    pairs = [row for row in tables["features"].records() if _with_dense(row) and method_of(_other(row)) != DENSE]
    if not pairs:  # no dense model
        return None
    blocks = list(dict.fromkeys(row["block"] for row in pairs))
    rows = [{**row, "method": _other(row), "place": blocks.index(row["block"])} for row in pairs]
    shown = [measure for measure in DISTANCES if any(row[measure] is not None for row in rows)]
    label, lines = "class token after block (from 0); head", grouped(rows, "method")
    given = [Panel(measure, lines, DISTANCES[measure], "place", label) for measure in shown]
    figure, axes = line_panels(given, styles(tables))
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.set_xticks(range(len(blocks)), [str(block) for block in blocks])
    return figure


@draws("features", "features", "Distance of features against the difference in accuracy")
def draw_proxy(tables: Tables) -> Any:
    """Scatter plots, one panel per measure: for each pair of records, the distance between the classifier's inputs and
    the difference in accuracy. Pairs with the dense model have the other method's colour; all others are grey. Titles
    give Spearman's and Kendall's rank correlations over all pairs, with a 95 % bootstrap interval."""
    rows = [row for row in tables["features"].records() if row["block"] == HEAD and row["difference"] is not None]
    shown = [measure for measure in DISTANCES if any(row[measure] is not None for row in rows)]
    if len(rows) < FEWEST_PAIRS or not shown:  # too few pairs, or neither labels nor logits
        return None
    proxy = tables["proxy"].records() if "proxy" in tables else []
    numbers = {row["measure"]: row for row in proxy if row["block"] == HEAD and row["spearman"] is not None}
    colour, marker = styles(tables)
    figure, axes = panels(len(shown), across=3, size=(2.9, 2.8), above=0.8)
    for axis, measure in zip(axes, shown, strict=True):
        known = (row for row in rows if row[measure] is not None)  # constant features have no distance
        for row in sorted(known, key=_with_dense):
            name = _other(row)
            named = {"color": colour[name], "marker": marker[name], "label": name}
            look = named if _with_dense(row) else {"color": GREY, "marker": "."}
            axis.plot(row[measure], 100 * row["difference"], linestyle="none", markersize=5, **look)
        words, found = "too few pairs", numbers.get(measure)
        if found is not None:
            low, high = found["spearman_low"], found["spearman_high"]
            between = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
            words = f"{RHO} = {found['spearman']:.2f}{between}, {TAU} = {found['kendall']:.2f}, n = {found['pairs']}"
        axis.set_title(f"{DISTANCES[measure]}\n{words}", fontsize=SMALL)
        axis.set_xlabel("distance of features", fontsize=TEXT)
    axes[0].set_ylabel("difference, points", fontsize=TEXT)
    names_below(figure, axes)
    return figure


@draws("features", "proxy_anchors", "Distance from every anchor against accuracy")
def draw_proxy_anchors(tables: Tables) -> Any:
    """Scatter plots, one panel per measure and anchor: distance of a record's classifier input from the anchor's
    (Procrustes, linear CKA, and projection-weighted CCA, weighted by the first record of a pair), and its difference in
    accuracy from the anchor. Titles give rank correlations."""
    return draw_anchors(tables, "features", "proxy_anchors", DISTANCES, HEAD)


def _with_dense(row: TableRow) -> bool:
    """True for a pair with the dense model."""
    return DENSE in map(method_of, (row["method_a"], row["method_b"]))


def _other(row: TableRow) -> str:
    """The name of a pair that is not the dense model's; the second of two methods."""
    names: Sequence[str] = (row["method_a"], row["method_b"])
    return str(names[0] if method_of(names[1]) == DENSE else names[1])
