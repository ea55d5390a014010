"""Reference vectors: outputs of the published implementations, in float64 to 1e-9 and in float32 to 5e-5."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import golden_models as golden
import vitrim

CASES: list[tuple[str, vitrim.MethodConfig, dict[str, Any], str]] = [
    ("merging/vit_plain", vitrim.NoReduction(), {}, ""),
    ("haurum/deit_p64_r100", vitrim.NoReduction(), {}, ""),
    ("merging/tome_r8_prop", vitrim.ToMe(r=8), {}, ""),
    ("merging/tome_r2_noprop", vitrim.ToMe(r=2, proportional=False), {}, ""),
    ("merging/tome_r40clamp_prop", vitrim.ToMe(r=40), {}, ""),
    ("merging/tome_r8_dec_prop", vitrim.ToMe(r=8, inflect=-1.0), {}, ""),
    ("merging/tome_r8_inc_noprop", vitrim.ToMe(r=8, inflect=1.0, proportional=False), {}, ""),
    ("merging/tome_mae_gap_r8", vitrim.ToMe(r=8, proportional=False), {"global_pool": "avg"}, "_noprop"),
    ("merging/tome_mae_gap_r8", vitrim.ToMe(r=8), {"global_pool": "avg"}, "_prop"),
    ("haurum/tome_p64_r50", vitrim.ToMe(keep_rate=0.5, blocks=(1, 3, 5)), {}, ""),
    ("haurum/tome_p196_r70", vitrim.ToMe(keep_rate=0.7), {}, ""),
    ("haurum/topk_p64_r50", vitrim.TopK(keep_rate=0.5, blocks=(1, 3, 5)), {}, ""),
    ("haurum/topk_p196_r70", vitrim.TopK(keep_rate=0.7), {}, ""),
    ("haurum/evit_p64_r50", vitrim.EViT(keep_rate=0.5, blocks=(1, 3, 5), rule="floor_initial_power"), {}, ""),
    ("haurum/evit_p196_r70", vitrim.EViT(keep_rate=0.7, rule="floor_initial_power"), {}, ""),
    ("pruning/evit_kr0.7_fuse", vitrim.EViT(keep_rate=0.7, blocks=(1, 3, 4)), {}, ""),
    ("pruning/evit_kr0.7_nofuse", vitrim.EViT(keep_rate=0.7, blocks=(1, 3, 4), fuse_token=False), {}, ""),
    ("pruning/evit_kr0.5_nofuse", vitrim.EViT(keep_rate=0.5, blocks=(1, 3, 4), fuse_token=False), {}, ""),
    ("haurum/heuristic_p64_r50_l1", vitrim.L1(keep_rate=0.5, blocks=(1, 3, 5), float32_rings=True), {}, ""),
    ("haurum/heuristic_p64_r50_l2", vitrim.L2(keep_rate=0.5, blocks=(1, 3, 5), float32_rings=True), {}, ""),
    ("haurum/heuristic_p64_r50_linf", vitrim.Linf(keep_rate=0.5, blocks=(1, 3, 5), float32_rings=True), {}, ""),
    ("haurum/heuristic_p196_r70_l1", vitrim.L1(keep_rate=0.7, float32_rings=True), {}, ""),
    ("haurum/heuristic_p196_r70_l2", vitrim.L2(keep_rate=0.7, float32_rings=True), {}, ""),
    ("haurum/heuristic_p196_r70_linf", vitrim.Linf(keep_rate=0.7, float32_rings=True), {}, ""),
    ("haurum/heuristic_p64_r50_l2_contiguous", vitrim.L2(blocks=(1, 3, 5), contiguous=True), {}, ""),
]

ATM = {"alpha": 0.6, "beta": 0.08, "theta_min": 0.3, "splitting_layer": 3}
ATM_CASES: list[tuple[str, dict[str, Any]]] = [
    ("atm/atm_default", {}),
    ("atm/atm_image0", {}),
    ("atm/atm_image0", {"granularity": "image"}),
    ("atm/atm_round_nearest", {"rounding": "nearest"}),
    ("atm/atm_mae", {"proportional": False, "last_block": "full"}),
]

every_case = pytest.mark.parametrize(
    ("name", "config", "host", "suffix"), CASES, ids=[f"{name}{suffix}" for name, _, _, suffix in CASES]
)


@every_case
def test_float64(name: str, config: vitrim.MethodConfig, host: dict[str, Any], suffix: str) -> None:
    ref = golden.load(name)
    model = golden.vit(ref, **host)
    reduction = reduce_quietly(model, config)
    with torch.no_grad():
        logits = model(golden.images(ref))
    torch.testing.assert_close(logits, golden.tensor(ref, f"logits{suffix}"), atol=1e-9, rtol=0)
    if "heuristic" not in name:  # the published code only masks there, so its sequence stays long
        assert reduction.tokens_per_block == ref["tokens_per_block"].tolist()
    if f"source{suffix}" in ref:
        assert torch.equal(reduction.state.source, golden.tensor(ref, f"source{suffix}").long())
        size = golden.tensor(ref, f"size{suffix}").double().view_as(reduction.state.size)
        torch.testing.assert_close(reduction.state.size, size, atol=1e-9, rtol=0)
    compare_class_tokens(model, ref, f"cls_per_block{suffix}")
    for key in ref:
        if key.startswith("kept_abs/") or ("heuristic" in name and key.startswith("kept/")):
            compare_kept(reduction, ref, key)


@every_case
def test_float32(name: str, config: vitrim.MethodConfig, host: dict[str, Any], suffix: str) -> None:
    ref = golden.load(name)
    model = golden.vit(ref, **host).float()
    reduce_quietly(model, config)
    with torch.no_grad():
        logits = model(golden.images(ref).float())
    torch.testing.assert_close(logits, golden.tensor(ref, f"logits_f32{suffix}"), atol=5e-5, rtol=0)


def reduce_quietly(model: torch.nn.Module, config: vitrim.MethodConfig) -> vitrim.Reduction:
    if getattr(config, "r", 0) == 40:  # this file asks for more than there is, on purpose
        with pytest.warns(vitrim.ReductionWarning, match=r"the blocks remove \[32, 16, 8, 4, 2, 1\], 63 in all"):
            return vitrim.reduce_(model, config, record=True)
    return vitrim.reduce_(model, config, record=True)


def compare_class_tokens(model: torch.nn.Module, ref: dict[str, Any], key: str) -> None:
    """The class token after every block shows where a deviation starts; stored as float32."""
    found: list[torch.Tensor] = []
    hooks = [block.register_forward_hook(lambda m, i, out: found.append(out[:, 0])) for block in model.blocks]
    with torch.no_grad():
        model(golden.images(ref))
    for hook in hooks:
        hook.remove()
    expected = golden.tensor(ref, key).double()
    for depth, token in enumerate(found):
        atol = 2e-6 * expected[depth].abs().max().item()
        torch.testing.assert_close(token, expected[depth], atol=atol, rtol=0, msg=f"class token after block {depth}")


def compare_kept(reduction: vitrim.Reduction, ref: dict[str, Any], key: str) -> None:
    """The same original patches as a set; -1 is a fused token, which stands for what it swallowed."""
    state = reduction.states[int(key.split("/")[1]) + 1]
    for image, expected in enumerate(golden.tensor(ref, key).long()):
        own = set((state.position[image, 1:][state.size[image, 1:] == 1] - 1).tolist())
        assert own == set(expected[expected >= 0].tolist())


@pytest.mark.parametrize(("name", "options"), ATM_CASES, ids=[f"{n}-{o}" for n, o in ATM_CASES])
def test_atm(name: str, options: dict[str, Any]) -> None:
    ref = golden.load(name)
    model = golden.vit(golden.load("merging/vit_plain"))
    config = vitrim.ATM(**ATM, **options)
    reduction = vitrim.reduce_(model, config, record=True)
    images = golden.images(ref)[ref["config"].get("images", slice(None))]
    with torch.no_grad():
        logits = model(images)
    torch.testing.assert_close(logits, golden.tensor(ref, "logits"), atol=1e-9, rtol=0)
    torch.testing.assert_close(torch.tensor(config.thresholds(6)), golden.tensor(ref, "thetas").float())
    assert reduction.tokens_per_block == ref["tokens_per_block"].tolist()
    assert torch.equal(reduction.state.source, golden.tensor(ref, "source").long())
