"""Methods of soft tokens, PatchMerger, Sinkhorn clustering and SiT, against their vectors, and what they share."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.methods.sinkhorn import transport

HALF = {"keep_rate": 0.5, "blocks": (1, 3, 5)}
MERGER = ("haurum/patchmerger_p64_r50", vitrim.PatchMerger(**HALF))
SINKHORN = ("haurum/sinkhorn_p64_r50_eps005", vitrim.Sinkhorn(**HALF))
SLIMMING = {"weight.0": "norm", "weight.1": "hidden", "weight.3": "weights"}
"""Names of SiT's parameters in its release, and here."""


@golden.cases(
    [
        MERGER,
        ("haurum/patchmerger_p196_r70", vitrim.PatchMerger(keep_rate=0.7)),
        ("haurum/sinkhorn_p64_r50", vitrim.Sinkhorn(**HALF, eps=1.0)),
        SINKHORN,
        ("haurum/sinkhorn_p196_r70", vitrim.Sinkhorn(keep_rate=0.7, eps=1.0)),
        ("haurum/sit_p64_r50", vitrim.SiT(**HALF)),
        ("haurum/sit_p196_r70", vitrim.SiT()),
    ],
    "config",
)
def test_reference(ref: golden.Reference, config: vitrim.MethodConfig) -> None:
    model, reduction = learned.reduced(ref, config, SLIMMING if config.name == "sit" else {})
    learned.check_outputs(ref, model, reduction)
    learned.check_soft(ref, model, reduction)
    learned.check_float32(ref, model)


def test_sizes_are_shared_out_and_keys_lie_under_the_reducer() -> None:
    ref = golden.load(MERGER[0])
    model, reduction = learned.reduced(ref, MERGER[1], {})
    with torch.no_grad():
        model(golden.images(ref))
    assert torch.allclose(reduction.state.size.sum(1), torch.tensor(65.0, dtype=torch.float64))
    assert next(key for key in model.state_dict() if "reducer" in key) == "blocks.1.reducer.queries"


def test_learned_parameters_are_saved_without_the_host(tmp_path) -> None:
    model, reduction = learned.reduced(golden.load(MERGER[0]), MERGER[1], {})
    reduction.save(tmp_path)
    saved = load_file(tmp_path / "reducers.safetensors")
    assert sorted(saved) == sorted(f"{d}.{n}" for d in (1, 3, 5) for n in ("queries", "norm.weight", "norm.bias"))
    assert saved["3.queries"].shape == (16, 96)
    assert torch.equal(saved["3.queries"], model.blocks[3].reducer.queries)


@pytest.mark.parametrize("config", [vitrim.PatchMerger(), vitrim.SiT(), vitrim.Sinkhorn()], ids=lambda c: c.name)
def test_other_image_sizes_and_other_amounts_are_refused(config: vitrim.MethodConfig) -> None:
    model = tiny.HOSTS["dynamic_img_size"]()
    reduction = vitrim.reduce_(model, config)
    with pytest.raises(vitrim.VitrimError, match=f"{config.name} has learned parameters for 6 x 6 = 36 patches"):
        model(tiny.images(size=32))
    with pytest.raises(vitrim.VitrimError, match="cannot change keep_rate at run time"):
        reduction.set(keep_rate=0.5)
    assert model(tiny.images()).shape == (2, 5)


@pytest.mark.parametrize("config", [vitrim.PatchMerger(), vitrim.SiT(), vitrim.Sinkhorn()], ids=lambda c: c.name)
def test_pooling_heads_average_the_mixed_tokens(config: vitrim.MethodConfig) -> None:
    model = tiny.vit(class_token=False, global_pool="avg", fc_norm=False)()
    vitrim.reduce_(model, config)
    tokens = []
    hook = model.blocks[-1].register_forward_hook(lambda m, i, out: tokens.append(out))
    with torch.no_grad():
        logits = model(tiny.images())
        hook.remove()
        assert tokens[0].shape == (2, 12, 32)
        torch.testing.assert_close(logits, model.head(model.norm(tokens[0]).mean(1)))


def test_keep_rate_one_makes_no_parameters() -> None:
    model = tiny.HOSTS["vit"]()
    keys = list(model.state_dict())
    vitrim.reduce_(model, vitrim.PatchMerger(keep_rate=1.0))
    assert list(model.state_dict()) == keys


@golden.cases(["haurum/grads_sinkhorn_p64_r50"])
def test_published_gradients_are_those_of_the_unit_centres(ref: golden.Reference) -> None:
    config = vitrim.Sinkhorn(**HALF, eps=1.0, in_place=True)
    model, _ = learned.reduced(ref, config, {})
    learned.cross_entropy_backward(ref, model)
    names = {f"cluster_layers.{stage}.": f"blocks.{block}.reducer." for stage, block in enumerate((1, 3, 5))}
    learned.check_gradients(ref, model, names)
    for block in (1, 3, 5):
        norm = model.blocks[block].reducer.v.norm(dim=1)
        torch.testing.assert_close(norm, torch.ones_like(norm))
    learned.check_float32(ref, model)


def test_by_default_the_centres_stay_and_the_output_is_the_same() -> None:
    ref = golden.load(SINKHORN[0])
    model, _ = learned.reduced(ref, SINKHORN[1], {})
    before = model.blocks[1].reducer.v.clone()
    with torch.no_grad():
        model(golden.images(ref))
    assert torch.equal(model.blocks[1].reducer.v, before)


def test_transport_is_balanced() -> None:
    scores = torch.randn(2, 4, 12, dtype=torch.float64)
    plan = transport(scores, iterations=200)
    torch.testing.assert_close(plan.sum(1), torch.ones(2, 12, dtype=torch.float64))
    torch.testing.assert_close(plan.sum(2), torch.full((2, 4), 3.0, dtype=torch.float64))


def test_iterations_matter() -> None:
    scores = torch.randn(1, 4, 12, dtype=torch.float64) / 0.05
    assert (transport(scores, 1) - transport(scores, 3)).abs().max() > 1e-3


@golden.cases(["haurum/grads_sit_p64_r50"])
def test_gradients_of_slimming(ref: golden.Reference) -> None:
    model, _ = learned.reduced(ref, vitrim.SiT(**HALF), SLIMMING)
    learned.cross_entropy_backward(ref, model)
    names = {
        f"cluster_layers.{stage}.{old}": f"blocks.{block}.reducer.{new}"
        for stage, block in enumerate((1, 3, 5))
        for old, new in {**SLIMMING, "scale": "scale"}.items()
    }
    learned.check_gradients(ref, model, names)
    learned.check_float32(ref, model)


def test_untrained_slimming_averages_the_patches() -> None:
    config = vitrim.SiT(keep_rate=8 / 36, blocks=(3,))
    reducer = tiny.reducer(config, vitrim.Layer(3, 12, 32, 2, 5, 1, True, (6, 6)))
    matrix = reducer.mix(torch.randn(2, 36, 32)).matrix
    torch.testing.assert_close(matrix, torch.full((2, 8, 36), 1 / 36), atol=5e-3, rtol=0)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 8))
