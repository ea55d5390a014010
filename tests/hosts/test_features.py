"""The tokens a head reads, and logits, of one forward: as the libraries themselves compute them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny
import vitrim
from vitrim.core.registry import ask
from vitrim.errors import VitrimError
from vitrim.tasks.step import Step
from vitrim.training.objectives import losses

TRUNKS = {
    "hf_vit": "vit",
    "hf_deit_teacher": "deit",
    "hf_beit_mean": "beit",
    "hf_dinov2": "dinov2",
    "hf_clip_classifier": "vision_model",
    "hf_siglip": "vision_model",
}
CLASSIFIERS = [*TRUNKS, "torchvision_vit", "torchvision_vit_stem"]


def tokens_of(model: Any, images: Tensor, host: str) -> Tensor:
    """What the library calls the model's last hidden states; torchvision has no name for them."""
    if host in TRUNKS:
        return getattr(model, TRUNKS[host])(images).last_hidden_state  # type: ignore[no-any-return]
    patches = model._process_input(images)
    return model.encoder(torch.cat([model.class_token.expand(len(images), -1, -1), patches], 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("host", CLASSIFIERS)
@pytest.mark.parametrize("method", [None, "random:keep_rate=0.5,blocks=[1]"])
def test_tokens_and_logits_are_those_of_the_library(host: str, method: str | None) -> None:
    model, images = tiny.HOSTS[host](), tiny.images()
    if method is not None:
        vitrim.reduce_(model, method)
    with torch.no_grad():
        torch.manual_seed(0)
        tokens, logits = ask(model).features_and_logits(model, images)
        torch.manual_seed(0)
        assert torch.equal(logits, ask(model).logits(model(images)))
        torch.manual_seed(0)
        assert torch.equal(tokens, tokens_of(model, images, host))
    assert tokens.shape == (2, tiny.num_prefix(model) + (36 if method is None else 18), 32)
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert all(type(hook).__module__.startswith("vitrim.") for hook in hooks)


@pytest.mark.parametrize("host", ["hf_vit_model", "hf_dinov3"])
def test_a_model_without_a_classifier_has_no_logits(host: str) -> None:
    model = tiny.HOSTS[host]()
    with pytest.raises(VitrimError, match="has no classifier"):
        ask(model).features_and_logits(model, tiny.images())


@pytest.mark.parametrize("host", ["hf_vit", "torchvision_vit"])
def test_a_loss_that_compares_tokens_with_a_teacher_learns(host: str) -> None:
    model: nn.Module = tiny.HOSTS[host]().train()
    teacher = tiny.HOSTS[host]()
    reduction = vitrim.reduce_(model, "dynamicvit:keep_rate=0.5,blocks=[1]")
    terms = losses(Step(model, reduction, tiny.images(), torch.tensor([0, 3]), F.cross_entropy, teacher))
    assert set(terms) == {"total", "base", "ratio", "class", "token"}
    assert torch.isfinite(terms["total"])
    assert terms["token"] > 0
    terms["total"].backward()
