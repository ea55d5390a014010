"""Reference vectors of plain models, ToMe, Top-K, EViT, the fixed patterns and ATM."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import golden_learned as learned
import golden_models as golden
import vitrim
from vitrim.core.attention import Attention
from vitrim.core.schedule import square_of
from vitrim.core.scoring import patch_score
from vitrim.methods.fixed_radial import WithinLine, WithinRing, _float32_distances

HALF = {"keep_rate": 0.5, "blocks": (1, 3, 5)}


def scores(model: torch.nn.Module, blocks: Any) -> dict[int, Tensor]:
    """The class attention (B, P) by which some blocks will have decided, filled by a forward."""
    return learned.caught(model, blocks, lambda m, x, attention, state: patch_score(attention, state, "class_token"))


# ---- plain models and merging ----------------------------------------------------------------------------------------


@golden.cases(["merging/vit_plain", "haurum/deit_p64_r100"])
def test_plain(ref: golden.Reference) -> None:
    model = golden.vit(ref)
    learned.check_outputs(ref, model, vitrim.reduce_(model, vitrim.NoReduction(), record=True))
    learned.check_float32(ref, model)


@golden.cases(
    [
        ("merging/tome_r8_prop", vitrim.ToMe(r=8)),
        ("merging/tome_r2_noprop", vitrim.ToMe(r=2, proportional=False)),
        ("merging/tome_r40clamp_prop", vitrim.ToMe(r=40)),
        ("merging/tome_r8_dec_prop", vitrim.ToMe(r=8, inflect=-1.0)),
        ("merging/tome_r8_inc_noprop", vitrim.ToMe(r=8, inflect=1.0, proportional=False)),
        ("merging/tofu_ratio09", vitrim.ToFu(keep_rate=0.9, norm_of="destination")),
        ("merging/pitome_ratio09", vitrim.PiToMe(keep_rate=0.9)),
        # the ToMe baseline of PiToMe's repository is ToMe with a rate in every block
        (
            "merging/pitome_tome_ratio09",
            vitrim.ToMe(keep_rate=0.9, blocks=tuple(range(6)), rule="ceil_current", proportional=False),
        ),
    ],
    "config",
)
def test_merging(ref: golden.Reference, config: vitrim.MethodConfig) -> None:
    learned.check_dense(ref)
    model = golden.vit(ref)
    learned.check_outputs(ref, model, reduce_quietly(model, config))
    learned.check_float32(ref, model)


def reduce_quietly(model: torch.nn.Module, config: vitrim.MethodConfig) -> vitrim.Reduction:
    if config == vitrim.ToMe(r=40):  # this file asks for more than there is, on purpose
        with pytest.warns(vitrim.ReductionWarning, match=r"the blocks remove \[32, 16, 8, 4, 2, 1\], 63 in all"):
            return vitrim.reduce_(model, config, record=True)
    return vitrim.reduce_(model, config, record=True)


@golden.cases(["merging/tome_mae_gap_r8"])
def test_tome_under_a_head_that_averages(ref: golden.Reference) -> None:
    learned.check_dense(ref, global_pool="avg")
    for proportional, suffix in ((False, "_noprop"), (True, "_prop")):
        model = golden.vit(ref, global_pool="avg")
        reduction = vitrim.reduce_(model, vitrim.ToMe(r=8, proportional=proportional), record=True)
        learned.check_outputs(ref, model, reduction, suffix=suffix)
        learned.check_float32(ref, model, suffix)


@golden.cases(
    [("haurum/tome_p64_r50", vitrim.ToMe(**HALF)), ("haurum/tome_p196_r70", vitrim.ToMe(keep_rate=0.7))], "config"
)
def test_tome_of_the_study(ref: golden.Reference, config: vitrim.ToMe) -> None:
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, config, record=True)
    learned.check_outputs(ref, model, reduction)
    learned.check_assignments(ref, reduction)
    for block, key in learned.keys(ref, "size").items():
        ref.check(key, reduction.states[block + 1].size)
    learned.check_float32(ref, model)


# ---- Top-K and EViT --------------------------------------------------------------------------------------------------


@golden.cases(
    [("haurum/topk_p64_r50", vitrim.TopK(**HALF)), ("haurum/topk_p196_r70", vitrim.TopK(keep_rate=0.7))], "config"
)
def test_topk(ref: golden.Reference, config: vitrim.TopK) -> None:
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, config, record=True)
    found = scores(model, ref["config"]["args"]["blocks"])
    learned.check_outputs(ref, model, reduction)
    learned.check_kept(ref, reduction)
    for block, key in learned.keys(ref, "scores").items():
        ref.check(key, found[block])
    learned.check_float32(ref, model)


EVIT = {"blocks": (1, 3, 4)}
POWERS = {"rule": "floor_initial_power"}


@golden.cases(
    [
        ("haurum/evit_p64_r50", vitrim.EViT(**HALF, **POWERS)),
        ("haurum/evit_p196_r70", vitrim.EViT(keep_rate=0.7, **POWERS)),
        ("pruning/evit_kr0.7_fuse", vitrim.EViT(keep_rate=0.7, **EVIT)),
        ("pruning/evit_kr0.7_nofuse", vitrim.EViT(keep_rate=0.7, **EVIT, fuse_token=False)),
        ("pruning/evit_kr0.5_nofuse", vitrim.EViT(keep_rate=0.5, **EVIT, fuse_token=False)),
    ],
    "config",
)
def test_evit(ref: golden.Reference, config: vitrim.EViT) -> None:
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, config, record=True)
    found = scores(model, ref["config"]["args"]["blocks"])
    learned.check_outputs(ref, model, reduction)
    for block in ref["config"]["args"]["blocks"]:
        ref.check(f"scores/{block}", found[block])
        kept = [places(reduction, block, image) for image in range(3)]
        if config.fuse_token and f"fused/{block}" in ref:  # the study lists the new token, by -1
            count = reduction.states[block].num_patches
            ref.check(f"kept/{block}", [[*row, -1] for row in kept], Tensor.tolist)
            ref.check(f"fused/{block}", [set(range(count)) - set(row) for row in kept], learned.as_sets)
            ref.check(f"kept_abs/{block}", original(reduction.states[block + 1]), Tensor.tolist)
        else:
            ref.check(f"kept/{block}", kept, Tensor.tolist)
    learned.check_float32(ref, model)


def places(reduction: vitrim.Reduction, block: int, image: int) -> list[int]:
    """The place, among the patch tokens that entered ``block``, of each that left it; not of the new fused one."""
    before, after = (state.source[image] for state in reduction.states[block : block + 2])
    into: dict[int, set[int]] = {}
    for old, new in zip(before.tolist(), after.tolist(), strict=True):
        if new >= 0:
            into.setdefault(new, set()).add(old)
    fused = reduction.states[block + 1].num_tokens - 1 if reduction.config.fuse_token else -1
    assert all(len(old) == 1 for new, old in into.items() if new != fused)
    return [min(old) - 1 for new, old in sorted(into.items()) if new not in (0, fused)]


def original(state: vitrim.TokenState) -> list[list[int]]:
    """The original patch of every patch token, -1 for a fused one: one that swallowed others."""
    position = (state.position - 1).masked_fill(state.size > 1, -1)
    return position[:, 1:].tolist()


@golden.cases(
    [
        ("haurum/grads_deit_p64_r50", vitrim.NoReduction()),
        ("haurum/grads_topk_p64_r50", vitrim.TopK(**HALF)),
    ],
    "config",
)
def test_gradients(ref: golden.Reference, config: vitrim.MethodConfig) -> None:
    model = golden.vit(ref)
    vitrim.reduce_(model, config)
    learned.cross_entropy_backward(ref, model)
    learned.check_gradients(ref, model, {})
    learned.check_float32(ref, model)


# ---- fixed patterns --------------------------------------------------------------------------------------------------

FIXED = {"l1": vitrim.L1, "l2": vitrim.L2, "linf": vitrim.Linf}


@golden.cases(
    [
        *((f"haurum/heuristic_p64_r50_{n}", kind(**HALF, float32_rings=True)) for n, kind in FIXED.items()),
        *((f"haurum/heuristic_p196_r70_{n}", kind(keep_rate=0.7, float32_rings=True)) for n, kind in FIXED.items()),
        ("haurum/heuristic_p64_r50_l2_contiguous", vitrim.L2(blocks=(1, 3, 5), contiguous=True)),
    ],
    "config",
)
def test_fixed_patterns(ref: golden.Reference, config: vitrim.L1 | vitrim.L2 | vitrim.Linf) -> None:
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, config, record=True)
    # the published code only masks, so its sequence stays as long as it was
    patches = len(model.pos_embed[0]) - 1
    ref.check("tokens_per_block", [1 + patches] * len(model.blocks), Tensor.tolist)
    assert reduction.config.counts(patches, len(model.blocks))[-1] < patches
    learned.check_outputs(ref, model, reduction, lengths=False)
    for block, key in learned.keys(ref, "kept").items():
        ref.check(key, learned.rows(reduction.states[block + 1]), Tensor.tolist)
    distances = torch.tensor(_float32_distances((int(patches**0.5),) * 2, config.norm), dtype=torch.float64)
    ref.check("heuristic/distances", distances, Tensor.flatten)
    radii = thresholds(config, distances, len(ref["heuristic/thresholds"]))
    ref.check("heuristic/thresholds", radii, Tensor.float)  # numbers of float32, whatever their type
    learned.check_float32(ref, model)


def thresholds(config: vitrim.L1 | vitrim.L2 | vitrim.Linf, distances: Tensor, count: int) -> Tensor:
    """The radius of every block; the line of radii ends behind the last block that it reduces."""
    radius, found = distances.max(), []
    for amount in config.amounts(count):
        if isinstance(amount, WithinRing):
            radius = distances[amount.patches(square_of(len(distances)))].max()
        elif isinstance(amount, WithinLine):
            radius = distances[0] + amount.step * (amount.min_radius - distances[0])
        elif config.contiguous and found and radius < distances[0]:
            radius = torch.tensor(config.min_radius, dtype=torch.float64)
        found.append(radius)
    return torch.stack(found)


# ---- ATM -------------------------------------------------------------------------------------------------------------

ATM = {"alpha": 0.6, "beta": 0.08, "theta_min": 0.3, "splitting_layer": 3}


@golden.cases(
    [
        ("atm/atm_default", {}),
        ("atm/atm_image0", {}),
        ("atm/atm_image0", {"granularity": "image"}),
        ("atm/atm_round_nearest", {"rounding": "nearest"}),
        ("atm/atm_mae", {"proportional": False, "last_block": "full"}),
    ],
    "options",
)
def test_atm(ref: golden.Reference, options: dict[str, Any]) -> None:
    model = golden.vit(golden.load("merging/vit_plain"))
    config = vitrim.ATM(**ATM, **options)
    reduction = vitrim.reduce_(model, config, record=True)
    images = golden.images(ref)[ref["config"].get("images", slice(None))]
    with torch.no_grad():
        ref.check("logits", model(images))
    ref.check("thetas", torch.tensor(config.thresholds(6), dtype=torch.float64))
    ref.check("tokens_per_block", reduction.tokens_per_block, Tensor.tolist)
    ref.check("source", reduction.state.source)
    lengths = [state.num_tokens for state in reduction.states]
    merged = [before - after for before, after in pairwise(lengths)]
    if config.last_block != "full":  # only the class token is computed there
        assert merged.pop() == 0
        merged.append(-1)
    ref.check("merged_per_block", merged, Tensor.tolist)


def test_scores_are_the_attention_of_the_class_token() -> None:
    """What the files' scores are compared with is the row itself."""
    q, k = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64)
    attention = Attention(q, k, k, 0.5)
    state = vitrim.TokenState.start(torch.zeros(1, 5, 8), 1)
    expected = (0.5 * q @ k.transpose(-1, -2)).softmax(-1)[:, :, 0, 1:].mean(1)
    torch.testing.assert_close(patch_score(attention, state, "class_token"), expected)
