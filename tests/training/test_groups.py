"""The group of every parameter of every family of hosts, beside a table written by hand."""

from __future__ import annotations

import re

import pytest
from torch import nn

import tiny
import vitrim
from vitrim.training.optim import parameter_groups
from vitrim.training.recipe import Recipe

EVERY = {**tiny.HOSTS, **tiny.FURTHER}

TOKEN = (
    r"((cls|class|reg|dist|distillation|mask|register|storage|detection|cls_register|query)_tokens?|class_embedding)$"
)
POSITIONS = r"(pos_embed|pos_embedding|positional_embedding|position_embeddings?(_table)?)(\.weight)?$"
RELATIVE = r"(relative_position_bias_table|rel_pos_[hw])$"
STEM = r"patch_embed|conv_proj|conv1|patch_conv|patch_projection|embeds\.proj|embeddings\.projection"
TABLE = (
    # what the name has (the first that fits), whether it is the backbone's, whether it is decayed (None: if a matrix)
    (TOKEN, True, False),
    (POSITIONS, False, False),
    (RELATIVE, True, False),
    (STEM, False, None),
)


@pytest.mark.parametrize("host", EVERY)
def test_the_group_of_every_parameter(host: str) -> None:
    """Tokens, registers among them, learn as the backbone does and are not decayed, nor are tables of positions."""
    model = EVERY[host]()
    vitrim.reduce_(model, "tome:r=2")
    names = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
    recipe = Recipe(model="m", epochs=1, optimizer={"backbone_scale": 0.01, "lr": 1.0})
    found = {
        names[id(parameter)][0]: (group["lr"] == 0.01, group["weight_decay"] > 0)
        for group in parameter_groups(model, recipe, 1.0)
        for parameter in group["params"]
    }
    inside = {id(parameter) for block in tiny.blocks(model) for parameter in block.parameters()}
    seen = 0
    for name, (backbone, decayed) in found.items():
        parameter = dict(model.named_parameters())[name]
        if re.search(r"(^|\.)head\.", name):  # what an attention pooling looks with belongs to it
            assert not backbone, name
            continue
        for pattern, wanted, decays in TABLE:
            if re.search(pattern, name):
                assert backbone is wanted, name
                assert decayed is (parameter.ndim > 1 if decays is None else decays), name
                seen += 1
                break
        else:
            if id(parameter) in inside:
                assert backbone, name
                assert decayed is (parameter.ndim > 1 and not name.endswith(".bias")), name
    assert seen > 0


@pytest.mark.parametrize(
    "host", ["hf_dinov2_registers", "hf_dinov3", "hf_clip", "dinov2_registers", "dinov3_storage", "hf_beit"]
)
def test_tokens_and_tables_are_not_decayed_by_layers_either(host: str) -> None:
    model = EVERY[host]()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    recipe = Recipe(model="m", epochs=1, optimizer={"layer_decay": 0.5})
    groups = parameter_groups(model, recipe, 1.0)
    decayed = {names[id(parameter)] for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert not [name for name in decayed if re.search(r"_tokens?$|class_embedding$|bias_table$", name)]
    scales = {names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]}
    first = min(scales.values())
    assert all(scale == first for name, scale in scales.items() if re.search(r"_tokens?$|class_embedding$", name))


def test_registers_freeze_with_the_class_token() -> None:
    model = EVERY["hf_dinov2_registers"]()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    recipe = Recipe(model="m", epochs=2, optimizer={"freeze_epochs": 1})
    frozen = {
        names[id(parameter)]: group["frozen_at_first"]
        for group in parameter_groups(model, recipe, 1.0)
        for parameter in group["params"]
    }
    prefix = "dinov2_with_registers.embeddings."
    assert frozen[f"{prefix}register_tokens"]
    assert frozen[f"{prefix}cls_token"]
    assert not frozen[f"{prefix}position_embeddings"]


def test_a_model_of_nobodys_has_tokens_too() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_tokens = nn.Parameter(nn.init.zeros_(nn.Linear(4, 4).weight))
            self.layer = nn.Linear(4, 4)

    model = Own()
    recipe = Recipe(model="m", epochs=1, optimizer={"backbone_scale": 0.1, "lr": 1.0})
    [group] = [
        group
        for group in parameter_groups(model, recipe, 1.0)
        if any(parameter is model.register_tokens for parameter in group["params"])
    ]
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.0)
