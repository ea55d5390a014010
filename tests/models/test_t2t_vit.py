"""T2T-ViT against its reference vectors; its counts, its table of positions, its checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import timm
import torch

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
import vitrim.models
from tiny_hosts.vitrim_t2t import SPLITS
from vitrim.engines.macs import count_macs
from vitrim.models.t2t_vit import T2TViT, TokensToToken, checkpoint_filter_fn, sinusoid_table

NAMES = ["t2tvit_transformer", "t2tvit_performer"]
both_modules = pytest.mark.parametrize("name", NAMES)


def t2t_vit(ref: dict[str, Any]) -> T2TViT:
    """The T2T-ViT behind a reference file with its checkpoint in the authors' names, float64, eval mode."""
    model = T2TViT(**golden.geometry(ref, "token_dim"), token_module=ref["config"]["model"]["tokens_type"])
    state = {f"module.{name}": value for name, value in golden.published(ref).items()}
    model.load_state_dict(checkpoint_filter_fn({"state_dict_ema": state}, model), strict=True)
    return model.double().eval()


@golden.cases([f"backbones/{name}" for name in NAMES])
def test_reference(ref: golden.Reference) -> None:
    model = t2t_vit(ref)
    found: list[torch.Tensor] = []
    for module in (model.patch_embed.attention1, model.patch_embed.attention2, model.patch_embed):
        module.register_forward_hook(lambda module, args, out: found.append(out))
    reduction = vitrim.reduce_(model, "none", record=True)
    learned.check_outputs(ref, model, reduction)
    strides = [*ref["config"]["token_module_strides"], 1]
    for tokens, stride, key in zip(found, strides, ("token_module_1", "token_module_2", "tokens"), strict=False):
        ref.check(key, tokens[:, ::stride])
    vitrim.restore_(model)
    with torch.no_grad():
        ref.check("logits", model(golden.images(ref)))
    learned.check_float32(ref, model)


@both_modules
def test_fixed_table_is_that_of_the_reference(name: str) -> None:
    stored = golden.load(f"backbones/{name}")["fixed/pos_embed"]
    np.testing.assert_allclose(sinusoid_table(17, 96).numpy(), stored, atol=1e-7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "params", "trained", "gmacs"),
    [
        ("t2t_vit_14", 21.546e6, 21.466e6, 4.800),
        ("t2t_vit_19", 39.177e6, 39.085e6, 8.503),
        ("t2t_vit_t_14", 21.541e6, 21.465e6, 6.1055),
        ("t2t_vit_t_19", 39.173e6, 39.085e6, 9.8080),
    ],
)
def test_counts_of_the_tables(name: str, params: float, trained: float, gmacs: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
        images = torch.zeros(1, 3, 224, 224)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(params, abs=600)
    learned_ones = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert learned_ones == pytest.approx(trained, abs=600)
    assert count_macs(model, images).total / 1e9 == pytest.approx(gmacs, abs=6e-4 if "_t_" not in name else 6e-5)


def test_only_the_table_and_the_random_features_are_not_trained() -> None:
    model = tiny.HOSTS["t2t_vit_performer_avg"]().train()
    model(tiny.images()).square().sum().backward()
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert fixed == {"pos_embed", "patch_embed.attention1.w", "patch_embed.attention2.w"}
    # the class token's own output is not read where patches are averaged, yet it is attended to
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_random_features_are_orthogonal_and_init_weights_restores_the_table() -> None:
    model = T2TViT(embed_dim=32, depth=1, num_heads=2, token_module="performer")
    w = model.patch_embed.attention1.w
    torch.testing.assert_close(w @ w.T, 32 * torch.eye(32), atol=1e-4, rtol=0)
    expected = model.pos_embed.clone()
    with torch.no_grad():
        model.pos_embed.zero_()
    model.init_weights()
    assert torch.equal(model.pos_embed, expected)


def test_random_features_approximate_the_kernel_of_softmax_attention() -> None:
    torch.manual_seed(0)
    module = TokensToToken(token_module="performer").attention1.double()
    module.w = torch.nn.Parameter(torch.randn(20000, 64, dtype=torch.float64), requires_grad=False)
    q, k = (0.1 * torch.randn(2, 9, 64, dtype=torch.float64)).unbind(0)
    found = module.features(q) @ module.features(k).T
    torch.testing.assert_close(found, (q @ k.T).exp(), atol=0, rtol=0.06)


def test_other_image_sizes() -> None:
    small = tiny.HOSTS["t2t_vit"]()
    large = T2TViT(**{**tiny.GEOMETRY, "img_size": 32, "splits": SPLITS, "token_dim": 8}).eval()
    large.load_state_dict(checkpoint_filter_fn(small.state_dict(), large))
    small.set_input_size(32)
    assert torch.equal(small.pos_embed, large.pos_embed)
    assert not small.pos_embed.requires_grad
    images = tiny.images(size=32)
    assert torch.equal(small(images), large(images))
    dynamic = T2TViT(**{**tiny.GEOMETRY, "splits": SPLITS, "token_dim": 8, "dynamic_img_size": True}).eval()
    assert dynamic(tiny.images(size=32)[:, :, :20]).shape == (2, 5)
    maps = dynamic.forward_intermediates(tiny.images(size=32)[:, :, :20], intermediates_only=True)
    assert maps[0].shape == (2, 32, 5, 8)
    with pytest.raises(ValueError, match="do not multiply to patch_size=8"):
        TokensToToken(patch_size=8, splits=SPLITS)


@pytest.mark.parametrize(("token_dim", "features"), [(64, 32), (96, 48), (8, 4)])
def test_the_performer_has_half_as_many_features_as_channels(token_dim: int, features: int) -> None:
    module = TokensToToken(token_module="performer", token_dim=token_dim)
    assert module.attention1.w.shape == module.attention2.w.shape == (features, token_dim)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", ["none", "topk:blocks=[1]", "tome:r=3", "mctf:r=3"])
@pytest.mark.parametrize("fused", [True, False])
def test_qk_scale_is_the_factor_of_the_logits(method: str, fused: bool) -> None:
    """As if the weights of the queries had the factor: the root of the head's width is 4, so 0.5 is twice the scale."""
    geometry = {**tiny.GEOMETRY, "splits": SPLITS, "token_dim": 8}
    assert geometry["embed_dim"] // geometry["num_heads"] == 16
    scaled, plain = T2TViT(**geometry, qk_scale=0.5).eval(), T2TViT(**geometry).eval()
    plain.load_state_dict(scaled.state_dict())
    images = tiny.images()
    with torch.no_grad():
        assert (scaled(images) - plain(images)).abs().max() > 1e-5
        for model, factor in ((scaled, 1.0), (plain, 2.0)):
            for block in model.blocks:
                block.attn.fused_attn = fused
                block.attn.qkv.weight[: geometry["embed_dim"]] *= factor
            vitrim.reduce_(model, method)
        torch.testing.assert_close(scaled(images), plain(images), atol=1e-6, rtol=1e-5)


def test_qk_scale_can_be_given_to_the_registered_models() -> None:
    model = timm.create_model("t2t_vit_t_14", qk_scale=384**-0.5, img_size=64, num_classes=2)
    assert model.blocks[3].attn.q_norm.factor == pytest.approx((64 / 384) ** 0.5)
    with pytest.raises(ValueError, match="qk_scale and qk_norm do not go together"):
        timm.create_model("t2t_vit_t_14", qk_scale=0.1, qk_norm=True)
