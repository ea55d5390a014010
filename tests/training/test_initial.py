"""Mimetic initialisation gives the products that the paper asks for, and touches nothing else."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import nn

import tiny
from vitrim.errors import VitrimError
from vitrim.training.build import mimetic_


def small() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=2, num_classes=3)


def test_products_of_the_weights() -> None:
    """Value and projection near minus the identity, query and key near it, as far as the head's rank goes."""
    model = small()
    mimetic_(model)
    for block in model.blocks:
        attention = block.attn
        dim, head_dim = attention.qkv.in_features, attention.head_dim
        query, key, value = attention.qkv.weight.detach().double().split(dim)
        product = value.T @ attention.proj.weight.detach().double().T
        assert product.diagonal().mean() == pytest.approx(-0.4, abs=0.02)
        off_diagonal = product - product.diagonal().diag()
        assert off_diagonal.std() == pytest.approx(0.4 / dim**0.5, rel=0.05)
        for head in range(attention.num_heads):
            place = slice(head * head_dim, (head + 1) * head_dim)
            product = query[place].T @ key[place]
            assert torch.linalg.matrix_rank(product) == head_dim
            # the largest part of 0.7 (I + Z / sqrt(C)) has more than its share of the trace
            assert product.diagonal().mean() > 0.7 * head_dim / dim


def test_nothing_else_changes() -> None:
    torch.manual_seed(0)
    model = small()
    before = copy.deepcopy(model.state_dict())
    mimetic_(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    expected = {f"blocks.{depth}.attn.{name}.weight" for depth in range(2) for name in ("qkv", "proj")}
    assert changed == expected | {"pos_embed"}
    assert torch.equal(model.pos_embed[:, 0], before["pos_embed"][:, 0])  # the class token's


def test_it_follows_the_seed() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(small())
        mimetic_(models[-1])
    assert torch.equal(models[0].blocks[1].attn.qkv.weight, models[1].blocks[1].attn.qkv.weight)


def test_other_models_are_refused() -> None:
    with pytest.raises(VitrimError, match=r"^init=mimetic sets one projection .*: this Linear does not have both"):
        mimetic_(nn.Linear(3, 2))
    with pytest.raises(VitrimError, match="this ViTForImageClassification does not have both"):
        mimetic_(tiny.HOSTS["hf_vit"]())
