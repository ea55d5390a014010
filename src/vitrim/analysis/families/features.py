"""Features: how far class tokens move from those of other models, and whether that tells how good a method is.

The distances are those of Ding et al., Grounding Representation Similarity with Statistical Testing (NeurIPS 2021),
which "Which Tokens to Use?" applies to class tokens. All of them take features (I, C) of the same I images in the same
order, which may have different widths, and centre and scale them themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.analysis.family import FamilyResult, TableRow, Tables, draws, names_of, styles
from vitrim.analysis.record import Record, check_comparable
from vitrim.analysis.statistics import spearman_ci, spearman_kendall
from vitrim.errors import VitrimError
from vitrim.plots.charts import Line, line, short
from vitrim.plots.style import DENSE, SMALL, TEXT, below, method_of, panels
from vitrim.report import Table

Floats = NDArray[np.float64]


def center(features: ArrayLike) -> Floats:
    """Features (I, C) minus their mean over images, divided by their Frobenius norm; of constant ones zeros.

    Raises:
        VitrimError: no matrix.

    Example:
        >>> center([[0.0], [2.0]]).round(4).tolist()
        [[-0.7071], [0.7071]]
    """
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

    The squared distance after the best rotation: 0 for features that are rotated and scaled alike.

    Args:
        a: (I, C), I images.
        b: (I, D).

    Raises:
        VitrimError: features of other images.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 4))
        >>> abs(procrustes(a, 3 * a[:, ::-1])) < 1e-12
        True
    """
    first, second = _pair(a, b)
    nuclear = np.linalg.svd(first.T @ second, compute_uv=False).sum()
    return float((first**2).sum() + (second**2).sum() - 2 * nuclear)


opd = procrustes
"""The name of `procrustes` in Ding et al."""


def cka(a: ArrayLike, b: ArrayLike) -> float:
    """Distance by linear centred kernel alignment, 1 - ||A'B||_F^2 / (||A'A||_F ||B'B||_F), in [0, 1]. Symmetric.

    Kornblith et al., Similarity of Neural Network Representations Revisited (ICML 2019). nan for constant features.

    Args:
        a: (I, C), I images.
        b: (I, D).

    Raises:
        VitrimError: features of other images.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 4))
        >>> abs(cka(a, 3 * a[:, ::-1])) < 1e-12
        True
    """
    first, second = _pair(a, b)
    below = np.linalg.norm(first.T @ first) * np.linalg.norm(second.T @ second)
    return float(1 - np.linalg.norm(first.T @ second) ** 2 / below) if below > 0 else float("nan")


def cca(a: ArrayLike, b: ArrayLike) -> Floats:
    """The min(C, D) canonical correlations of two features, descending, in [0, 1].

    The singular values of S_AA^(-1/2) S_AB S_BB^(-1/2), with symmetric roots by eigendecomposition in which eigenvalues
    that are not positive count as 0.

    Args:
        a: (I, C), I images.
        b: (I, D).

    Raises:
        VitrimError: features of other images, or no more images than channels: every correlation would then be 1.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 2))
        >>> cca(a, a).round(6).tolist()
        [1.0, 1.0]
    """
    return _canonical(*_pair(a, b))[1]


def mean_cca(a: ArrayLike, b: ArrayLike) -> float:
    """The mean of the canonical correlations; see `cca`.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 2))
        >>> round(mean_cca(a, a), 6)
        1.0
    """
    return float(cca(a, b).mean())


def mean_sq_cca(a: ArrayLike, b: ArrayLike) -> float:
    """The mean of the squared canonical correlations; see `cca`.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 2))
        >>> round(mean_sq_cca(a, a), 6)
        1.0
    """
    return float((cca(a, b) ** 2).mean())


def pwcca(a: ArrayLike, b: ArrayLike) -> float:
    """Distance by projection-weighted CCA, 1 - sum w_i rho_i, in [0, 1]. Not symmetric: ``a`` gives the weights.

    w_i is the sum over the channels of ``a`` of |<h_i, channel>|, h_i being the i-th canonical variate of ``a``,
    divided by the sum over all C of them; the first min(C, D) meet a correlation. Morcos et al., Insights on
    Representational Similarity (NeurIPS 2018).

    Args:
        a: (I, C), I images.
        b: (I, D). With C > D, the directions of ``a`` beyond the D-th are a basis that the linear algebra library
            chooses, and the weights depend on it.

    Raises:
        VitrimError: as for `cca`.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 2))
        >>> abs(pwcca(a, 2 * a)) < 1e-6
        True
    """
    first, second = _pair(a, b)
    variates, correlations, _ = _canonical(first, second)
    return _weighted(first, variates, correlations)


def cca_measures(a: ArrayLike, b: ArrayLike) -> tuple[float, float, float]:
    """`pwcca` of a and b, `pwcca` of b and a, and `mean_cca`, from one decomposition.

    Args:
        a, b: as for `pwcca`.

    Raises:
        VitrimError: as for `cca`.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 2))
        >>> [abs(round(number, 6)) for number in cca_measures(a, 2 * a)]
        [0.0, 0.0, 1.0]
    """
    first, second = _pair(a, b)
    of_a, correlations, of_b = _canonical(first, second)
    distances = (_weighted(first, of_a, correlations), _weighted(second, of_b, correlations))
    return (*distances, float(correlations.mean()))


def _weighted(features: Floats, variates: Floats, correlations: Floats) -> float:
    """1 minus the mean correlation, weighted by how much of the features lies along each variate."""
    weight = np.abs(variates.T @ features).sum(1)
    return float(1 - (weight[: len(correlations)] / weight.sum()) @ correlations)


def _canonical(a: Floats, b: Floats) -> tuple[Floats, Floats, Floats]:
    """All C canonical variates (I, C) of centred ``a``, the min(C, D) correlations, and all variates (I, D) of b."""
    images, widest = len(a), max(a.shape[1], b.shape[1])
    if images <= widest:
        raise VitrimError(f"CCA needs more images than channels, got {images} images and {widest} channels")
    root_a, root_b = _inverse_root(a.T @ a), _inverse_root(b.T @ b)
    # the full SVD: weights of PWCCA run over all directions of a
    left, correlations, right = np.linalg.svd(root_a @ (a.T @ b) @ root_b, full_matrices=True)
    return a @ (root_a @ left), correlations, b @ (root_b @ right.T)


def _inverse_root(matrix: Floats) -> Floats:
    """The symmetric inverse square root of a symmetric matrix; eigenvalues that are not positive give 0."""
    values, vectors = np.linalg.eigh(matrix)
    roots = np.zeros_like(values)
    roots[values > 0] = values[values > 0] ** -0.5
    found: Floats = (vectors * roots) @ vectors.T
    return found


def _pair(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    first, second = center(a), center(b)
    if len(first) != len(second):
        raise VitrimError(f"expected features of the same images, got {len(first)} and {len(second)}")
    return first, second


# ---- tables ----------------------------------------------------------------------------------------------------------

ANY = {"procrustes": procrustes, "cka_distance": cka}
WIDE = ("pwcca_distance_ab", "pwcca_distance_ba", "mean_cca")
"""Those that need twice as many images as channels."""
MEASURES = (*ANY, *WIDE)
PAIRS = ("method_a", "method_b", "block", "images", *MEASURES, "difference", "signed")
SHOWN = PAIRS[:-1]
PROXY = ("block", "measure", "pairs", "spearman", "spearman_low", "spearman_high", "spearman_p", "kendall", "kendall_p")
ANCHORS = ("method", "block", "measure", "others", "spearman", "spearman_p", "kendall", "kendall_p")
HEAD = "head"
"""The block of what the classifier reads."""
FEWEST_PAIRS = 3


def features(records: Sequence[Record]) -> FamilyResult:
    """Distances between the features of every pair of records, and their rank correlation with the difference of the
    pair in accuracy or, without labels, in agreement with the dense model: over all pairs, and over those with each
    record, the anchor, where the difference has a sign.

    CCA needs twice as many images as channels, and is left out below.

    Raises:
        VitrimError: records of different images, or fewer images than classes.
    """
    return pooled([records])


def pooled(groups: Sequence[Sequence[Record]]) -> FamilyResult:
    """The same over pairs within each group; their rank correlations are over the pairs of all groups.

    Args:
        groups: records of the same images each, such as those of one analysis, with different names throughout.

    Raises:
        VitrimError: as `features`.
    """
    having = [[record for record in group if "head" in record.arrays] for group in groups]
    having = [group for group in having if len(group) > 1]
    if not having:
        return FamilyResult(notes=["features skipped: they need two records with features"])
    result, rows, kinds = FamilyResult(), [], []
    for group in having:
        check_comparable(group)
        classes = max((record.arrays["logits"].shape[1] for record in group if "logits" in record.arrays), default=0)
        widest, count = max(record.arrays["head"].shape[1] for record in group), len(group[0].feature(None))
        if count < classes:
            raise VitrimError(f"features need at least as many images as classes, got {count} for {classes}")
        scores, score = _scores(group)
        kinds.append(score)
        rows += _pairs(group, scores)
        if count < 2 * widest:
            note = f"CCA and PWCCA need {2 * widest} images, twice the {widest} channels, and there are {count}"
            result.notes.append(note)
    score = " or ".join(dict.fromkeys(kinds))
    table = Table("features", f"Distance of features; difference in {score}", PAIRS, rows, SHOWN)
    result.tables.append(table)
    proxy = _proxy(table)
    if not proxy:
        result.notes.append("proxy skipped: it needs three pairs of records, and labels or logits")
        return result
    result.tables.append(Table("proxy", f"Rank correlation of distances with the difference in {score}", PROXY, proxy))
    anchored = [row for group in having for record in group for row in _anchored(table, record.name)]
    if anchored:
        title = f"Rank correlation of distances from one record with the signed difference in {score}"
        result.tables.append(Table("proxy_anchors", title, ANCHORS, anchored))
    if max(map(len, having)) > 3 or len(having) > 1:
        result.notes.append("pairs of the same records are not independent: p-values and intervals are too narrow")
    return result


def _pairs(group: Sequence[Record], scores: Mapping[str, float]) -> list[tuple[object, ...]]:
    """A row of `PAIRS` for every pair at every block that all have."""
    rows: list[tuple[object, ...]] = []
    common = set.intersection(*(set(record.header["feature_blocks"]) for record in group))
    for a, b in combinations(group, 2):
        signed = scores[b.name] - scores[a.name] if scores else None
        differences = (None if signed is None else abs(signed), signed)
        for block in (*sorted(common), None):
            one, other = a.feature(block), b.feature(block)
            place = HEAD if block is None else block
            rows.append((a.name, b.name, place, len(one), *_measures(one, other), *differences))
    return rows


def _measures(a: NDArray[Any], b: NDArray[Any]) -> list[float | None]:
    from threadpoolctl import threadpool_limits

    enough = len(a) >= 2 * max(a.shape[1], b.shape[1])
    with threadpool_limits(limits=1, user_api="blas"):  # matrices this small take many times longer on busy cores
        return [*(measure(a, b) for measure in ANY.values()), *(cca_measures(a, b) if enough else (None,) * len(WIDE))]


def _scores(records: Sequence[Record]) -> tuple[dict[str, float], str]:
    """Top-1 of each record or, without labels, agreement with the first dense one; by its name."""
    correct = {record.name: record.correct() for record in records}
    if all(one is not None for one in correct.values()):
        return {name: float(np.mean(one)) for name, one in correct.items() if one is not None}, "top-1"
    dense = next((record.first() for record in records if record.header["kind"] == "none"), None)
    firsts = {record.name: record.first() for record in records}
    if dense is None or any(first is None for first in firsts.values()):
        return {}, "nothing: no labels and no dense model"
    return {name: float(np.mean(first == dense)) for name, first in firsts.items()}, "agreement"


def _proxy(table: Table) -> list[tuple[object, ...]]:
    """Rank correlations of each measure at each block, with a bootstrap interval over the pairs."""
    rows: list[tuple[object, ...]] = []
    blocks, differences = table.column("block"), table.column("difference")
    for block in dict.fromkeys(blocks):
        for measure in MEASURES:
            values = zip(blocks, table.column(measure), differences, strict=True)
            pairs = np.array([(x, y) for place, x, y in values if place == block and None not in (x, y)])
            if len(pairs) < FEWEST_PAIRS:
                continue
            found = spearman_kendall(*pairs.T)
            low, high = spearman_ci(pairs)
            rho, tau = (found.spearman, float(low), float(high), found.spearman_p), (found.kendall, found.kendall_p)
            rows.append((block, measure, len(pairs), *rho, *tau))
    return rows


def _anchored(table: Table, anchor: str) -> list[tuple[object, ...]]:
    """Rank correlations of each measure at each block over the pairs with one record."""
    rows: list[tuple[object, ...]] = []
    own = [row for row in table.records() if anchor in (row["method_a"], row["method_b"])]
    for block in dict.fromkeys(row["block"] for row in own):
        for measure in MEASURES:
            pairs = [
                (row[measure], row["signed"] if row["method_a"] == anchor else -row["signed"])
                for row in own
                if row["block"] == block and row[measure] is not None and row["signed"] is not None
            ]
            if len(pairs) >= FEWEST_PAIRS:
                found = spearman_kendall(*np.array(pairs).T)
                rows.append((anchor, block, measure, len(pairs), *found))
    return rows


# ---- figures ---------------------------------------------------------------------------------------------------------

TITLES = {
    "procrustes": "Procrustes",
    "cka_distance": "CKA distance",
    "pwcca_distance_ab": "PWCCA distance",
    "pwcca_distance_ba": "PWCCA distance, reversed",
    "mean_cca": "mean CCA",
}
DISTANCES = ("procrustes", "cka_distance", "pwcca_distance_ab")
MOST_ANCHORS = 9
GREY = "#9a9a9a"
RHO, TAU = "\N{GREEK SMALL LETTER RHO}", "\N{GREEK SMALL LETTER TAU}"


@draws(
    "features",
    "features",
    title="Distance of the features from the dense model's",
    alt="Lines over the blocks, one panel per measure: distance of the class token, and at the end of what the "
    "classifier reads, from the dense model's.",
)
def draw_features(tables: Tables) -> Any:
    """Distance from the dense model block by block; None where there is no dense model."""
    table = tables["features"]
    rows = [row for row in table.records() if DENSE in map(method_of, (row["method_a"], row["method_b"]))]
    rows = [row for row in rows if method_of(_other(row)) != DENSE]
    if not rows:
        return None
    measures = [name for name in DISTANCES if any(row[name] is not None for row in rows)]
    colour, marker = styles(tables)
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    names = [name for name in names_of({table.name: table}) if name in {_other(row) for row in rows}]
    figure, axes = panels(len(measures), across=3, size=(2.9, 2.5), above=0.3 + 0.17 * -(-len(names) // 3))
    handles: dict[str, Any] = {}
    for axis, measure in zip(axes, measures, strict=True):
        for name in names:
            own = {row["block"]: row[measure] for row in rows if _other(row) == name}
            given = Line(range(len(blocks)), [own.get(block) for block in blocks])  # type: ignore[misc]
            handles[name] = line(axis, given, colour=colour[name], marker=marker[name], label=name)
        axis.set_title(TITLES[measure], fontsize=TEXT)
        axis.set_ylim(bottom=0)
        axis.set_xticks(range(len(blocks)), [str(block) for block in blocks])
        axis.set_xlabel("class token after block; head", fontsize=TEXT)
    below(figure, [handles[name] for name in names])
    return figure


@draws(
    "features",
    "features",
    title="Distance of features against the difference in accuracy",
    alt="Scatter plots, one panel per measure: for each pair of records the distance of what the classifier reads, and "
    "the difference in accuracy. Pairs with the dense model have the other method's colour, all others are grey. "
    "Spearman's and Kendall's rank correlations over all pairs stand above, with a 95 % bootstrap interval.",
)
def draw_proxy(tables: Tables) -> Any:
    """Every pair of records as a point; None without labels and logits."""
    table = tables["features"]
    rows = [row for row in table.records() if row["block"] == HEAD and row["difference"] is not None]
    measures = [name for name in (*MEASURES[:2], "pwcca_distance_ab") if any(row[name] is not None for row in rows)]
    if len(rows) < 3 or not measures:
        return None
    colour, marker = styles(tables)
    figure, axes = panels(len(measures), across=3, size=(2.9, 2.8), above=0.8)
    handles: dict[str, Any] = {}
    for axis, measure in zip(axes, measures, strict=True):
        measured = (row for row in rows if row[measure] is not None)  # features that are all the same have no distance
        for row in sorted(measured, key=lambda row: DENSE in map(method_of, (row["method_a"], row["method_b"]))):
            dense = DENSE in map(method_of, (row["method_a"], row["method_b"]))
            name = _other(row)
            look = {"color": colour[name], "marker": marker[name]} if dense else {"color": GREY, "marker": "."}
            (drawn,) = axis.plot(row[measure], 100 * row["difference"], linestyle="none", markersize=5, **look)
            if dense:
                drawn.set_label(name)
                handles[name] = drawn
        axis.set_title(f"{TITLES[measure]}\n{_correlation(tables, HEAD, measure)}", fontsize=SMALL)
        axis.set_xlabel("distance of features", fontsize=TEXT)
    axes[0].set_ylabel("difference, points", fontsize=TEXT)
    below(figure, list(handles.values()))
    return figure


def _correlation(tables: Tables, block: object, measure: str) -> str:
    """The rank correlations of a table, in words."""
    found = tables["proxy"].records() if "proxy" in tables else []
    row = next((row for row in found if (row["block"], row["measure"]) == (block, measure)), None)
    if row is None or row["spearman"] is None:
        return "too few pairs"
    low, high = row["spearman_low"], row["spearman_high"]
    between = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{RHO} = {row['spearman']:.2f}{between}, {TAU} = {row['kendall']:.2f}, n = {row['pairs']}"


@draws(
    "features",
    "proxy_anchors",
    title="The same against every anchor",
    alt="Scatter plots, one panel per anchor: Procrustes distance of what the classifier reads from the anchor's, and "
    "how much more or less accurate than the anchor each other record is. Rank correlations stand above.",
)
def draw_proxy_anchors(tables: Tables) -> Any:
    """Procrustes distance from each anchor against the signed difference in accuracy."""
    rows = [row for row in tables["features"].records() if row["block"] == HEAD and row["difference"] is not None]
    found = [
        row for row in tables["proxy_anchors"].records() if row["measure"] == "procrustes" and row["block"] == HEAD
    ]
    if not rows or not found:
        return None
    colour, marker = styles(tables)
    figure, axes = panels(
        len(found[:MOST_ANCHORS]), across=3, size=(2.6, 2.3), above=0.2 + 0.17 * -(-len(names_of(tables)) // 3)
    )
    handles: dict[str, Any] = {}
    for axis, anchor in zip(axes, found, strict=False):
        own = [row for row in rows if anchor["method"] in (row["method_a"], row["method_b"])]
        own = [row for row in own if row["procrustes"] is not None]
        for row in own:
            sign, name = (1, row["method_b"]) if row["method_a"] == anchor["method"] else (-1, row["method_a"])
            look = {"color": colour[name], "marker": marker[name], "linestyle": "none", "markersize": 5}
            (handles[name],) = axis.plot(row["procrustes"], 100 * sign * row["signed"], label=name, **look)
        axis.axhline(0, color=GREY, linewidth=0.7)
        rho = "" if anchor["spearman"] is None else f"{RHO} = {anchor['spearman']:.2f}, {TAU} = {anchor['kendall']:.2f}"
        axis.set_title(f"{short(anchor['method'])}\n{rho}", fontsize=SMALL)
    for axis in axes[-3:]:
        axis.set_xlabel("Procrustes distance", fontsize=TEXT)
    for axis in axes[::3]:
        axis.set_ylabel("difference, points", fontsize=TEXT)
    below(figure, [handles[name] for name in names_of(tables) if name in handles])
    return figure


def _other(row: TableRow) -> str:
    """Of a pair with the dense model the other one; else the second."""
    names: Sequence[str] = (row["method_a"], row["method_b"])
    return str(names[0] if method_of(names[1]) == DENSE else names[1])
