"""Folders that vitrim 0.1.0 wrote before its rooms were sorted load as before.

`old_folders/run` is a run of ``vitrim train`` (Cropr on a small ViT), `old_folders/reduction` what `Reduction.save`
wrote (PatchMerger); both were made by that code, as was the output in `expected.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import vitrim
from vitrim.loading import create_model

OLD = Path(__file__).with_name("old_folders")
SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 4, "num_heads": 2}


def test_a_run_computes_what_it_computed() -> None:
    model = create_model(f"run:{OLD / 'run'}")
    reduction = vitrim.Reduction.load(model, OLD / "run")
    assert reduction.config == vitrim.Cropr(r=1)
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    with torch.no_grad():
        logits = model(images)
    expected = torch.tensor(json.loads((OLD / "expected.json").read_text())["run"]).view(2, 3)
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=0)


def test_a_saved_reduction_has_its_parameters() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL).eval()
    reduction = vitrim.Reduction.load(model, OLD / "reduction")
    assert reduction.config == vitrim.PatchMerger(keep_rate=0.5, blocks=(1, 2))
    stored = load_file(OLD / "reduction" / "reducers.safetensors")
    assert sorted(stored) == sorted(
        f"{depth}.{name}" for depth in (1, 2) for name in model.blocks[depth].reducer.state_dict()
    )
    for name, value in stored.items():
        depth, _, key = name.partition(".")
        assert torch.equal(model.blocks[int(depth)].reducer.state_dict()[key], value)


@pytest.mark.parametrize("text", ["tome:r=8,inflect=-1.0", "evit:keep_rate=0.7,fuse_token=false", "mctf:r=0.35"])
def test_old_texts_of_methods_are_read(text: str) -> None:
    assert vitrim.parse_method(text).describe() == text
