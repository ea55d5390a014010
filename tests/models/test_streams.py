"""Two-stream classifiers: a subclass states only how streams are made and which layers process them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from golden_streams import with_random_heads
from vitrim.models.streams import TwoStreamClassifier

PAGE = Path(__file__).parents[2] / "docs" / "models" / "README.md"


@pytest.fixture(scope="module")
def example() -> type[TwoStreamClassifier]:
    """The class of the page, run as it stands there."""
    section = PAGE.read_text().partition("## A model with two streams of tokens")[2]
    code = "\n".join(line for line in section.splitlines() if line.startswith("    ") or not line)
    names: dict[str, Any] = {"nn": nn, "PatchEmbed": PatchEmbed, "TwoStreamClassifier": TwoStreamClassifier}
    exec(textwrap.dedent(code), names)  # our own page
    return names["TwoViews"]  # type: ignore[no-any-return]


@pytest.fixture
def model(example: type[TwoStreamClassifier]) -> Any:
    torch.manual_seed(0)
    return with_random_heads(example())


def test_the_example_of_the_page_in_plain_steps(model: Any) -> None:
    images = torch.randn(2, 3, 32, 32)
    tokens, auxiliary = model.patches(images), model.patches(images.flip(-1))
    for layer in model.layers:
        tokens = tokens + layer.mix(auxiliary).mean(1, keepdim=True)
    logits = [
        head(nn.functional.layer_norm(stream.mean(1), (64,), eps=1e-6))
        for head, stream in ((model.head, tokens), (model.auxiliary_head, auxiliary))
    ]
    for found, expected in zip(model.forward_streams(images), logits, strict=True):
        torch.testing.assert_close(found, expected)
    assert torch.equal(model(images), model.forward_streams(images)[0])


def test_checkpointing_computes_layers_again_and_changes_no_gradient(model: Any) -> None:
    images, calls = torch.randn(2, 3, 32, 32), []
    model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    gradients: list[list[Tensor]] = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        sum(logits.sum() for logits in model.forward_streams(images)).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert len(calls) == 1 + 2
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


def test_shared_parts_come_after_the_streams(example: Any) -> None:
    class Scale(nn.Module):
        def forward(self, tokens: Tensor, auxiliary: Tensor, scale: nn.Module) -> tuple[Tensor, Tensor]:
            return scale(tokens), auxiliary

    class Shared(example):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Scale(), Scale()])
            self.scale = nn.Linear(64, 64)

        @property
        def shared_parts(self) -> tuple[nn.Module, ...]:
            return (self.scale,)

    model, images = Shared(), torch.randn(1, 3, 32, 32)
    tokens, auxiliary = model.forward_features(images)
    torch.testing.assert_close(tokens, model.scale(model.scale(model.patches(images))))
    assert torch.equal(auxiliary, model.patches(images.flip(-1)))
