"""The model of a recipe that pre-trains: every parameter the recipe trains gets a gradient, and no other."""

from __future__ import annotations

import timm
import torch
from torch.nn import functional as F

import vitrim.models  # registers the model with timm
from vitrim.training.learner import Objective
from vitrim.training.optim import select_trainable
from vitrim.training.recipe import load_recipe


def test_the_recipe_trains_what_the_loss_reads() -> None:
    options = {"embed_dim": 48, "num_heads": 2, "depth": 2, "img_size": 56, "num_classes": 7}
    model = timm.create_model(load_recipe("vittm_base_mae").recipe.model, **options)
    assert model.num_classes == 7  # what the loop asks about; the encoder has no classifier
    Objective(model, F.cross_entropy)(torch.rand(2, 3, 56, 56), torch.zeros(2, dtype=torch.int64))["total"].backward()
    reads = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    select_trainable(model, load_recipe("vittm_base_mae").recipe.trainable)
    unread = {name for name, parameter in model.named_parameters() if parameter.requires_grad} - reads
    assert unread == set()
    assert reads == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_images_are_those_of_the_encoder() -> None:
    from vitrim.data.transforms import geometry_of

    model = timm.create_model("vittm_base_28_28_mae", embed_dim=48, num_heads=2, depth=1)
    assert geometry_of(model) == geometry_of(model.encoder)
    assert vitrim.models.vittm_mae.vittm_base_28_28_mae.__name__ in timm.list_models("vittm*")
