"""MCTF's Table E: FLOPs of T2T-ViT and LV-ViT under MCTF."""

from __future__ import annotations

import csv
import warnings
from typing import Any

import pytest
import timm
import torch

import golden_models as golden
import vitrim
import vitrim.models
from full_matrix import FULL_MATRIX, cells
from vitrim.core.registry import host_of
from vitrim.engines.macs import profile_of

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "T2T-ViT_t-14": ("t2t_vit_t_14", {}),
    "T2T-ViT_t-19": ("t2t_vit_t_19", {}),
    "LV-ViT-S": ("lv_vit_small", {"dense_head": False}),  # as in the paper
}
ROWS = [str(r) for r in range(1, 21)] if FULL_MATRIX else ["20"]


def printed() -> dict[tuple[str, str], str]:
    with (golden.GOLDEN / "tables" / "mctf_table_e.csv").open() as file:
        return {(row["model"], row["r"]): row["gflops"] for row in csv.DictReader(file)}


def class_token(model: torch.nn.Module, method: vitrim.MCTF) -> int:
    """The similarities of the class token, which the published code computes, sets to -inf, and counts."""
    host = host_of(model)
    after = method.counts(196, len(host.blocks(model)))
    before = [196, *after[:-1]]
    odd = sum((count + 1) // 2 for count, left in zip(before, after, strict=True) if left < count)
    return odd * host.facts(model).dim


# a deeper one of a kind has more of the same blocks
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", cells(MODELS, ("T2T-ViT_t-14", "LV-ViT-S")))
def test_table_e(name: str) -> None:
    architecture, options = MODELS[name]
    with torch.device("meta"):
        model = timm.create_model(architecture, **options)
        images = torch.zeros(1, 3, 224, 224)
    for r in ROWS:
        method = vitrim.MCTF(r=int(r), attention_map="shared")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", vitrim.ReductionWarning)  # the last blocks cannot fuse 17 and more
            counted = profile_of(model, method, images).macs.total + class_token(model, method)
        assert f"{counted / 1e9:.2f}" == printed()[name, r]
