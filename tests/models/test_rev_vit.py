"""Rev-ViT: gradients of the reversible computation, what it keeps, its counts, its checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import tiny
import vitrim.models
from vitrim.engines.macs import count_macs
from vitrim.errors import VitrimError
from vitrim.models.rev_vit import RevViT, checkpoint_filter_fn
from vitrim.models.reversible import reversible

DROPS = {"drop_path_rate": 0.4, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2, "pos_drop_rate": 0.2}


def rev_vit(**kwargs: Any) -> RevViT:
    """A tiny one whose branches change the streams a lot."""
    torch.manual_seed(1)
    model = RevViT(**{**tiny.GEOMETRY, **kwargs})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def step(model: RevViT, images: Tensor, reversibly: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of one training step that always draws the same numbers."""
    model.reversible = reversibly
    model.zero_grad()
    torch.manual_seed(3)
    logits = model(images)
    logits.square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logits.detach(), {name: grad.clone() for name, grad in found.items()}


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any gradient, in units of its own largest entry."""
    assert found.keys() == expected.keys()
    # a bias of the keys has no effect: its gradient is rounding noise and its scale meaningless
    return max((found[n] - g).abs().max().item() / max(g.abs().max().item(), 1e-3) for n, g in expected.items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
@pytest.mark.parametrize("drops", [{}, DROPS], ids=["plain", "drop path and dropout"])
def test_gradients_equal_the_plain_ones(drops: dict[str, float], dtype: torch.dtype, tolerance: float) -> None:
    model = rev_vit(depth=12, **drops).to(dtype).train()
    images = tiny.images().to(dtype)
    logits, found = step(model, images, reversibly=True)
    expected_logits, expected = step(model, images, reversibly=False)
    assert torch.equal(logits, expected_logits)
    assert len(found) == len(list(model.parameters()))
    assert relative(found, expected) < tolerance


def test_random_numbers_after_backward_are_those_of_the_plain_computation() -> None:
    model = rev_vit(**DROPS).train()
    drawn = []
    for reversibly in (True, False):
        step(model, tiny.images(), reversibly)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_two_forwards_before_one_backward_and_frozen_parameters() -> None:
    model = rev_vit(**DROPS).double().train()
    model.blocks[1].requires_grad_(False)
    model.blocks[2].mlp.fc1.weight.requires_grad_(False)
    gradients = []
    for model.reversible in (True, False):
        model.zero_grad()
        torch.manual_seed(3)
        loss = sum(model(tiny.images(seed=seed).double()).square().sum() for seed in (1, 2))
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert "blocks.1.attn.qkv.weight" not in gradients[0]
    assert relative(*gradients) < 1e-11


def test_gradient_of_the_image() -> None:
    model = rev_vit().double().eval().requires_grad_(False)
    gradients = []
    for model.reversible in (True, False):
        images = tiny.images().double().requires_grad_()
        (gradient,) = torch.autograd.grad(model(images).square().sum(), images)
        gradients.append(gradient)
    torch.testing.assert_close(*gradients, atol=1e-11, rtol=1e-9)


def test_autocast() -> None:
    model = rev_vit().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, found = step(model, tiny.images(), reversibly=True)
        _, expected = step(model, tiny.images(), reversibly=False)
    for name, gradient in expected.items():
        if gradient.norm() > 1e-2:
            assert torch.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0) > 0.99, name


def test_second_derivatives_are_refused() -> None:
    model = rev_vit().double()
    x = torch.randn(1, 5, 32, dtype=torch.float64, requires_grad=True)
    y1, y2 = reversible(list(model.blocks), x, x)
    (gradient,) = torch.autograd.grad((y1 + y2).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def kept_bytes(model: RevViT, images: Tensor) -> int:
    """What autograd keeps for backward, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(images).sum()
    del loss
    return sum(kept.values())


def test_activation_memory_does_not_grow_with_depth() -> None:
    images = tiny.images(4, size=48)
    kept = {}
    for depth in (4, 12):
        model = rev_vit(depth=depth, img_size=48).train()
        for model.reversible in (True, False):
            kept[depth, model.reversible] = kept_bytes(model, images)
    assert kept[12, True] == kept[4, True]
    assert kept[12, False] > 2.5 * kept[4, False]
    assert kept[12, False] > 20 * kept[12, True]


def test_counts_of_table_8() -> None:
    """With the class token and its position that the published model has and does not use: 85,800,192 without head."""
    with torch.device("meta"):
        model = timm.create_model("rev_vit_base")
        images = torch.zeros(1, 3, 224, 224)
        unused = 2 * model.embed_dim
        assert sum(parameter.numel() for parameter in model.parameters()) + unused == 87_337_192
        assert count_macs(model, images).total == 17_490_450_432 + 1536 * 1000
        model.reset_classifier(0)
        assert sum(parameter.numel() for parameter in model.parameters()) + unused == 85_800_192
        assert count_macs(model, images).total == 17_490_450_432


def mmpretrain_names(model: RevViT) -> dict[str, Tensor]:
    """A checkpoint in the names of mmpretrain, with the unused class token."""
    names = {}
    for name, value in model.state_dict().items():
        for ours, theirs in (
            ("blocks.", "layers."),
            ("norm1.", "ln1."),
            ("norm2.", "ln2."),
            ("mlp.fc1.", "ffn.layers.0.0."),
            ("mlp.fc2.", "ffn.layers.1."),
            ("patch_embed.proj.", "patch_embed.projection."),
        ):
            name = name.replace(ours, theirs)
        name = name.replace("norm.", "ln1.") if name.startswith("norm.") else name
        names[f"head.layers.{name}" if name.startswith("head.") else f"backbone.{name}"] = torch.rand_like(value)
    table = names["backbone.pos_embed"]
    names["backbone.pos_embed"] = torch.cat([torch.full_like(table[:, :1], 9.0), table], dim=1)
    names["backbone.cls_token"] = torch.ones(1, 1, model.embed_dim)
    return names


def test_checkpoints() -> None:
    model = rev_vit()
    published = mmpretrain_names(model)
    model.load_state_dict(checkpoint_filter_fn({"state_dict": published}, model), strict=True)
    assert torch.equal(model.blocks[3].mlp.fc2.weight, published["backbone.layers.3.ffn.layers.1.weight"])
    assert torch.equal(model.pos_embed, published["backbone.pos_embed"][:, 1:])
    assert torch.equal(model.norm.bias, published["backbone.ln1.bias"])
    again = rev_vit(img_size=32)
    again.load_state_dict(checkpoint_filter_fn(model.state_dict(), again))
    model.set_input_size(32)
    assert torch.equal(model.pos_embed, again.pos_embed)
    assert torch.equal(model(tiny.images(size=32)), again(tiny.images(size=32)))


def test_as_a_timm_model() -> None:
    model = timm.create_model("rev_vit_base", img_size=32, depth=1, num_classes=4)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 4)
    assert model.forward_head(model.forward_features(torch.zeros(1, 3, 32, 32)), pre_logits=True).shape == (1, 1536)
    model.reset_classifier(0, "")
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 4, 1536)
    with pytest.raises(VitrimError, match="not by 'token'"):
        model.reset_classifier(3, "token")
    model.set_grad_checkpointing(False)
    with pytest.raises(VitrimError, match="nothing to save"):
        model.set_grad_checkpointing()


def test_methods_refuse_it() -> None:
    with pytest.raises(vitrim.UnsupportedModelError, match="RevViT"):
        vitrim.reduce_(rev_vit(), "tome:r=4")
