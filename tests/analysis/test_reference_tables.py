"""The tables of the study's own analysis code, from the decisions and features of 20 runs."""

from __future__ import annotations

import numpy as np
import torch

import golden_files as golden
from golden_files import Reference
from golden_runs import FEATURE_BLOCKS, PATCHES, STAGES, run, table
from vitrim.analysis.families.depth import depth_map, emd, js_bits, kl_bits, mean_depth, pcc, scc, sim
from vitrim.analysis.families.features import cca, cka, procrustes
from vitrim.analysis.families.patterns import completeness, homogeneity, ioa, iou, v_measure

SIDE = 14


def answer(ref: Reference, rows: list[list[float]]) -> None:
    """Compare a whole table; its columns and pairs are what made it."""
    ref.compared.update({"columns", "model_a", "model_b"})
    ref.check("values", torch.tensor(rows, dtype=torch.float64))


def moments(per_image: np.ndarray) -> list[float]:
    """Means of all stages, then population standard deviations."""
    return [*per_image.mean(0), *per_image.std(0)]


def depths(model: str) -> np.ndarray:
    kept = run(model).kept
    return depth_map(np.ones((60, 1, PATCHES), bool) if kept is None else kept, STAGES if kept is not None else [0], 12)


@golden.cases(["analysis/expected_pruning_rates_a"])
def test_overlap_across_rates(ref: Reference) -> None:
    columns, pairs = table(ref)
    assert [column.rpartition("-")[2] for column in columns] == 6 * ["IoA"] + 6 * ["IoU"]
    answer(ref, [moments(ioa(run(a).kept, run(b).kept)) + moments(iou(run(a).kept, run(b).kept)) for a, b in pairs])


@golden.cases(["analysis/expected_pruning_models_a"])
def test_overlap_across_methods(ref: Reference) -> None:
    _, pairs = table(ref)
    answer(ref, [moments(iou(run(a).kept, run(b).kept)) for a, b in pairs])


@golden.cases([("analysis/expected_cluster_rates_a", True), ("analysis/expected_cluster_models_a", False)], "reverse")
def test_clusters(ref: Reference, reverse: bool) -> None:
    """Across rates the lower rate is the truth, across methods the first one."""
    columns, pairs = table(ref)
    assert [column.partition("-")[0] for column in columns[::6]] == ["Homogeneity", "Completeness", "NMI"]
    rows = []
    for a, b in pairs:
        first, second = (run(one).labels for one in ((b, a) if reverse else (a, b)))
        rows.append([n for measure in (homogeneity, completeness, v_measure) for n in moments(measure(first, second))])
    answer(ref, rows)


@golden.cases(["analysis/expected_heatmaps_a"])
def test_averaged_maps(ref: Reference) -> None:
    columns, pairs = table(ref)
    assert columns == ["KLD12", "KLD21", "JSD", "PCC", "SCC", "EMD", "SIM"]
    rows = []
    for a, b in pairs:
        one, other = (mean_depth(depths(model)).mean.reshape(SIDE, SIDE) for model in (a, b))
        divergence = [kl_bits(one, other), kl_bits(other, one), js_bits(one, other, reference=True)]
        rows.append([*divergence, pcc(one, other), scc(one, other), emd(one, other), sim(one, other)])
    answer(ref, rows)


@golden.cases(["analysis/expected_cls_features_rates_a", "analysis/expected_cls_features_models_a"])
def test_features(ref: Reference) -> None:
    """In the table of methods the row B, A repeats the values of A, B."""
    columns, pairs = table(ref)
    measures = ("PWCCA", "mean_sq_cca_corr", "mean_cca_corr", "CKA", "Procrustes")
    assert columns == [f"{block}-{name}" for block in FEATURE_BLOCKS for name in measures]
    found: dict[tuple[str, str], list[float]] = {}
    for a, b in pairs:
        row = []
        for k in FEATURE_BLOCKS:
            one, other = run(a).features[k], run(b).features[k]
            rho, distance = cca(one, other)
            row += [distance, (rho**2).mean(), rho.mean(), cka(one, other), procrustes(one, other)]
        found[a, b] = found.get((b, a), row)
    values = torch.tensor([found[pair] for pair in pairs], dtype=torch.float64)
    weighted = torch.tensor([column.endswith("PWCCA") for column in columns])
    tolerance = ref.row["tolerance"]
    ref.compared.update({"columns", "model_a", "model_b"})
    ref.check("values", values[:, weighted], lambda stored: stored[:, weighted], tolerance=tolerance["pwcca"])
    ref.check("values", values[:, ~weighted], lambda stored: stored[:, ~weighted], tolerance=tolerance["other"])


@golden.cases(["analysis/expected_token_stats_a"])
def test_statistics_of_tokens(ref: Reference) -> None:
    for model in sorted({key.partition("/")[0] for key in ref if "/" in key}):
        method, rate = model.split("_")
        one = golden.load(f"analysis/run_{method}_{round(100 * float(rate))}")
        hit = one["top5"] == one["targets"][:, None]
        ref.check(f"{model}/acc_top1", 100 * torch.tensor(hit[:, 0].mean()).double(), tolerance=5e-5)  # four digits
        ref.check(f"{model}/acc_top5", 100 * torch.tensor(hit.any(1).mean()).double(), tolerance=5e-5)
        found = run(model)
        if found.kept is not None:
            share = found.kept.mean(-1)
        elif found.labels is not None:
            share = np.array([[len(np.unique(stage)) for stage in image] for image in found.labels]) / PATCHES
        else:
            share = np.ones((60, 12))
        ref.check(f"{model}/mean_reduction", torch.from_numpy(share.mean(0)))
        ref.check(f"{model}/std_reduction", torch.from_numpy(share.std(0)))
        if f"{model}/mean_token_depth" in ref:
            pattern = mean_depth(depths(model))
            ref.check(f"{model}/mean_token_depth", torch.tensor(pattern.overall_mean, dtype=torch.float64))
            ref.check(f"{model}/std_token_depth", torch.tensor(pattern.overall_std, dtype=torch.float64))
            ref.check(f"{model}/mean_token_depth_spatial", torch.from_numpy(pattern.mean))
            ref.check(f"{model}/std_token_depth_spatial", torch.from_numpy(pattern.std))
