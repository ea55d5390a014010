"""Two-stream classifiers: a subclass states only how streams are made and which layers process them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from golden_streams import with_random_heads
from vitrim.models.lookupvit import LookupViT
from vitrim.models.rev_vit import RevViT
from vitrim.models.streams import TwoStreamClassifier
from vitrim.models.vittm import ViTTM

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


@pytest.mark.slow  # `core/test_contract.py` compiles and exports a ViT
@pytest.mark.parametrize(
    "create",
    [
        partial(ViTTM, 32, process_patch_size=8, memory_patch_size=4),
        partial(LookupViT, 32, patch_size=8, compressed_grid=3),
        partial(RevViT, 32, patch_size=8),
    ],
    ids=["vittm", "lookupvit", "rev_vit"],
)
def test_models_of_our_own_compile_and_export_with_any_batch(create: Callable[..., nn.Module]) -> None:
    model = create(num_classes=5, embed_dim=32, depth=2, num_heads=2).eval()
    images, more = torch.randn(2, 3, 32, 32), torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager")(images), model(images))
        exported = torch.export.export(
            model, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},), strict=False
        )
        torch.testing.assert_close(exported.module()(more), model(more))
