"""PatchMerger against its reference vectors, and what all soft methods share."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim

RENAME: dict[str, str] = {}
CASES = [
    ("haurum/patchmerger_p64_r50", vitrim.PatchMerger(keep_rate=0.5, blocks=(1, 3, 5))),
    ("haurum/patchmerger_p196_r70", vitrim.PatchMerger(keep_rate=0.7)),
]


@golden.cases(CASES, "config")
def test_reference(ref: golden.Reference, config: vitrim.MethodConfig) -> None:
    model, reduction = learned.reduced(ref, config, RENAME)
    learned.check_outputs(ref, model, reduction)
    learned.check_soft(ref, model, reduction)
    learned.check_float32(ref, model)


def test_sizes_are_shared_out_and_keys_lie_under_the_reducer() -> None:
    ref = golden.load(CASES[0][0])
    model, reduction = learned.reduced(ref, CASES[0][1], RENAME)
    with torch.no_grad():
        model(golden.images(ref))
    assert torch.allclose(reduction.state.size.sum(1), torch.tensor(65.0, dtype=torch.float64))
    assert next(key for key in model.state_dict() if "reducer" in key) == "blocks.1.reducer.queries"


def test_learned_parameters_are_saved_without_the_host(tmp_path) -> None:
    model, reduction = learned.reduced(golden.load(CASES[0][0]), CASES[0][1], RENAME)
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


def test_ill_formed_options_are_refused() -> None:
    with pytest.raises(vitrim.VitrimError, match="keep_rate"):
        vitrim.parse_method("patchmerger:keep_rate=1.5")
    with pytest.raises(vitrim.VitrimError, match="do not exist"):
        vitrim.reduce_(tiny.HOSTS["vit"](), vitrim.PatchMerger(blocks=(4,)))
