"""LookupViT: reference vectors with losses and gradients, Table 8, any image size and compressed grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import golden_models
from full_matrix import cells
from golden_models import published
from golden_streams import check_gradients, loaded, table_8, with_random_heads
from vitrim.engines.macs import profile_of
from vitrim.errors import VitrimError
from vitrim.models import lookupvit
from vitrim.models.lookupvit import (
    LookupBase,
    LookupLayer,
    LookupViT,
    SharedGather,
    SharedLookupViT,
    checkpoint_filter_fn,
)
from vitrim.models.streams import objective

VECTORS = ("vittm/vittm_lookup_c3", "vittm/vittm_lookup_c4_nocls")
BOTH = (LookupViT, SharedLookupViT)


def build(ref: dict[str, Any]) -> SharedLookupViT:
    return SharedLookupViT(**golden_models.geometry(ref, "patch_size"), **ref["config"]["args"])


def tiny(kind: type[LookupBase], **options: Any) -> Any:
    geometry = {"patch_size": 8, "compressed_grid": 3, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return with_random_heads(kind(48, num_classes=5, **{**geometry, **options}))


# ---- reference vectors -----------------------------------------------------------------------------------------------


@golden_models.cases(VECTORS, arrays=("logits_*", "*_features", "tokens_*"))
@torch.no_grad()
def test_logits_and_tokens(ref: golden_models.Reference) -> None:
    model, images = loaded(ref, build(ref), checkpoint_filter_fn), golden_models.images(ref)
    compressed, lookup = model.forward_streams(images)
    ref.check("logits_compressed", compressed)
    ref.check("logits_lookup", lookup)
    assert torch.equal(model(images), compressed)
    tokens, many = model.forward_features(images)
    ref.check("tokens_lookup", many.shape[1], torch.Tensor.item)
    ref.check("compressed_features", tokens)
    ref.check("lookup_features", many[:, :: ref["config"]["feature_stride"]])
    compressed, lookup = model.float().forward_streams(images.float())
    ref.check("logits_compressed_f32", compressed)
    ref.check("logits_lookup_f32", lookup)


@golden_models.cases(
    [(VECTORS[0], False), (VECTORS[0], True), (VECTORS[1], False)], "checkpointing", arrays=("train/*",)
)
def test_loss_and_gradients(ref: golden_models.Reference, checkpointing: bool) -> None:
    model = loaded(ref, build(ref), checkpoint_filter_fn).train()
    model.set_grad_checkpointing(checkpointing)
    losses = objective(model.forward_streams(golden_models.images(ref)), torch.tensor(ref["config"]["targets"]))
    losses["total"].backward()
    ref.check("train/loss", losses["total"])
    check_gradients(ref, model, checkpoint_filter_fn)


# ---- counts ----------------------------------------------------------------------------------------------------------

SIDES = (3, 5, 7, 10)
IMAGE = torch.empty(1, 3, 224, 224, device="meta")
D, LAYERS, PATCHES = 768, 12, 196


def counted(name: str) -> Any:
    with torch.device("meta"):
        return profile_of(timm.create_model(name), None, IMAGE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("side", cells(SIDES, (3, 10)))
def test_table_8(side: int) -> None:
    row = table_8()[f"LookupViT {side}x{side}"]
    found = counted(f"lookupvit_shared_base_{side}")
    few, many = side**2, PATCHES + 1
    layer = (3 * many + 14 * few) * D**2 + 3 * many * few * D + 5 * D * (2 * many + 6 * few)
    # as fvcore counts the authors' code, less pooling (one per element) and the second classifier with its norm
    closed = LAYERS * layer + PATCHES * D * D + 5 * D + 1000 * D
    assert found.macs.under("no-attention") == closed
    assert f"{closed / 1e9:.2f}" == row["gflops"]
    assert f"{found.params / 1e6:.0f}" == row["params_m"]
    assert found.macs.attention - found.macs.exchange == LAYERS * 2 * few**2 * D
    exchange = 3 * (D**2 + D) + 6 * D
    mlp = D**2 + 3 * D // 2
    assert found.params == 86_567_656 + exchange + mlp + 2 * 2 * D + (2 * D + 1000 * D + 1000) + few * D


@pytest.mark.parametrize(("side", "gmacs"), [(5, "8.47"), (10, "17.0")])
def test_the_paper_s_block(side: int, gmacs: str) -> None:
    found = counted(f"lookupvit_base_{side}")
    few = side**2
    layer = (4 * PATCHES + 15 * few) * D**2 + 3 * PATCHES * few * D + 2 * few**2 * D
    assert found.macs.under("no-norm") == LAYERS * layer + PATCHES * D * D + 1000 * D
    digits = len(gmacs.partition(".")[2])
    assert f"{found.macs.under('no-norm') / 1e9:.{digits}f}" == gmacs
    assert f"{found.params / 1e6:.0f}" == "137"


# ---- any size --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
@torch.no_grad()
def test_other_images_and_compressed_grids(kind: type[LookupBase]) -> None:
    model = tiny(kind).eval()
    images = torch.randn(2, 3, 64, 40)
    compressed, lookup = model.forward_features(images)
    assert compressed.shape[1] == 9
    assert lookup.shape[1] == 40 + getattr(model, "num_prefix_tokens", 0)
    before = model(images)
    parameters = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.set_compressed_grid((5, 4))
    assert model.forward_features(images)[0].shape[1] == 20
    assert parameters == {name: parameter.shape for name, parameter in model.named_parameters()}
    assert not torch.equal(model(images), before)
    model.set_compressed_grid(3)
    assert torch.equal(model(images), before)


@torch.no_grad()
def test_patches_and_positions_are_resized_alike() -> None:
    model, images = tiny(LookupViT, depth=0), torch.randn(1, 3, 48, 48)
    nn.init.normal_(model.pos_embed)
    compressed, lookup = model.forward_features(images)
    patches, table = model.patch_embed(images), model.pos_embed.transpose(1, 2).unflatten(2, (6, 6))
    parts = [nn.functional.interpolate(x, (3, 3), mode="bilinear", antialias=True) for x in (patches, table)]
    torch.testing.assert_close(compressed, sum(parts).flatten(2).transpose(1, 2))
    model.set_compressed_grid(6)
    torch.testing.assert_close(model.forward_features(images)[0], lookup)


@torch.no_grad()
def test_the_layer_of_the_paper_in_plain_steps() -> None:
    """Against softmax attention by PyTorch for the way there, and a loop over heads for the way back."""
    layer = tiny(LookupViT).layers[0].double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    compressed, lookup = torch.randn(2, 9, 32).double(), torch.randn(2, 36, 32).double()
    found = layer(compressed, lookup)
    c, t = layer.compressed_norm(compressed), layer.lookup_norm(lookup)
    q, k, v = layer.gather.q(c), *layer.gather.kv(t).split(32, -1)
    gathered = torch.cat(
        [
            nn.functional.scaled_dot_product_attention(*(x.unsqueeze(1) for x in head)).squeeze(1)
            for head in zip(q.split(16, -1), k.split(16, -1), v.split(16, -1), strict=True)
        ],
        -1,
    )
    c = layer.block(compressed + layer.gather_proj(gathered))
    values = layer.infuse_values(layer.infuse_norm(c)).split(16, -1)
    weights = [(a @ b.transpose(1, 2) / 4).softmax(-1) for a, b in zip(q.split(16, -1), k.split(16, -1), strict=True)]
    infused = torch.cat([w.transpose(1, 2) @ x for w, x in zip(weights, values, strict=True)], -1)
    t = lookup + layer.infuse_proj(infused)
    t = t + layer.mlp(layer.mlp_norm(t))
    torch.testing.assert_close(found, (c, t))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_timm_loads_an_authors_checkpoint_at_another_size(tmp_path: Path) -> None:
    ref = golden_models.load(VECTORS[0])
    torch.save({"state_dict": published(ref)}, tmp_path / "lookup.pth")
    geometry = {"patch_size": 8, "embed_dim": 96, "depth": 6, "num_heads": 3, "num_classes": 10}
    model = timm.create_model(
        "lookupvit_shared_base_5",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(tmp_path / "lookup.pth"), "num_classes": 10},
        img_size=96,
        **geometry,
    ).eval()
    assert model.pos_embed.shape == (1, 145, 96)
    assert model.compressed_pos_embed.shape == (1, 25, 96)
    same = loaded(ref, build(ref), checkpoint_filter_fn).float()
    same.set_compressed_grid(5)
    images = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(model(images), same(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", BOTH)
def test_own_checkpoints_at_another_size(kind: type[LookupBase]) -> None:
    model, larger = tiny(kind), kind(96, 8, 4, num_classes=5, embed_dim=32, depth=2, num_heads=2)
    larger.load_state_dict(checkpoint_filter_fn(model.state_dict(), larger))
    assert "surprise" in checkpoint_filter_fn({**model.state_dict(), "surprise": torch.zeros(1)}, larger)


# ---- as a timm model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_every_parameter_gets_a_gradient_and_the_mode_changes_nothing(kind: type[LookupBase]) -> None:
    model, images = tiny(kind), torch.randn(2, 3, 48, 48)
    objective(model.forward_streams(images), torch.tensor([0, 1]))["total"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert torch.equal(model.train()(images), model.eval()(images))


def test_registered() -> None:
    names = [f"{family}_{side}" for family in ("lookupvit_base", "lookupvit_shared_base") for side in SIDES]
    assert all(timm.is_model(name) for name in names)
    for name in names:
        entrypoint = getattr(lookupvit, name)
        assert timm.model_entrypoint(name) is entrypoint
        assert entrypoint.__name__ == name in lookupvit.__all__
        assert entrypoint(embed_dim=32, num_heads=2, depth=1).compressed_grid == (int(name.split("_")[-1]),) * 2
    model = timm.create_model("lookupvit_base_3", embed_dim=32, num_heads=2, depth=1, num_classes=7, drop_path_rate=0.1)
    assert isinstance(model.layers[0], LookupLayer)
    assert model.get_classifier().out_features == 7
    model.reset_classifier(0)
    assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 32)


@pytest.mark.parametrize("kind", BOTH)
def test_bad_input_is_one_line(kind: type[LookupBase]) -> None:
    with pytest.raises(VitrimError, match="48x44 px do not divide into patches of 8 px"):
        tiny(kind)(torch.zeros(1, 3, 48, 44))
    with pytest.raises(VitrimError, match="at least one row"):
        tiny(kind, compressed_grid=0)
    with pytest.raises(VitrimError, match="not 'token'"):
        tiny(kind, global_pool="token")
    with pytest.raises(VitrimError, match="do not divide"):
        tiny(kind, patch_size=7)


def test_a_shared_projection_that_is_more_than_its_weights_is_called() -> None:
    """The oracle: the same function as weights."""
    torch.manual_seed(0)
    gather = SharedGather(8, 2)
    compressed = torch.randn(2, 3, 8)
    own = gather.kv.forward
    gather.kv.forward = lambda x: 2 * own(x)  # type: ignore[method-assign]
    called = gather.values(compressed)
    del gather.kv.forward
    plain = gather.values(compressed)
    with torch.no_grad():
        gather.kv.weight.mul_(2)
        gather.kv.bias.mul_(2)
    torch.testing.assert_close(called, gather.values(compressed))
    torch.testing.assert_close(plain[0, 0], gather.v_norm((gather.kv(compressed) / 2)[0, 0, 8:]))
