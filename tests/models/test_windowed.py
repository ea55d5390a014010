"""Windows inside a plain trunk: against the plain model on crops and on the whole image; weights; a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import vitrim
from vitrim.loading import create_model
from vitrim.models.vitdet import Detector
from vitrim.models.windowed import windowed
from vitrim.tasks import make_task
from vitrim.tasks.options import Loss
from vitrim.tasks.step import Step
from vitrim.training.objectives import cropr
from vitrim.weights import load_backbone

TINY: dict[str, Any] = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
SMALL = {"channels": 8, "hidden": 8, "rpn_layers": 1, "box_layers": 1, "samples": 16, "num_classes": 3}
PLAIN = {"num_classes": 0, "global_pool": "", "dynamic_img_size": True}
ROPE = {"ref_feat_shape": (4, 4), "use_abs_pos_emb": False, "class_token": False}


def shaken(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def eva(**options: Any) -> Any:
    torch.manual_seed(0)
    return shaken(timm.create_model("eva02_tiny_patch14_224", **{**TINY, **PLAIN, **ROPE, **options}))


def image(height: int = 64, width: int = 96) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(5))


def test_blocks_that_all_cross_windows_are_the_plain_models() -> None:
    expected = eva()(image())
    torch.testing.assert_close(windowed(eva(), 4, (1, 2))(image()), expected)


def test_blocks_in_windows_are_the_plain_model_on_every_crop() -> None:
    """Without a table of positions, and with rotary ones that count within the window."""
    plain, x = eva(), image()
    crops = [x[:, :, 32 * row : 32 * row + 32, 32 * column : 32 * column + 32] for row in (0, 1) for column in range(3)]
    expected = torch.zeros(2, 8, 12, 32)
    for place, crop in enumerate(crops):
        top, left = 4 * (place // 3), 4 * (place % 3)
        expected[:, top : top + 4, left : left + 4] = plain(crop).view(2, 4, 4, 32)
    torch.testing.assert_close(windowed(eva(), 4, ())(x), expected.flatten(1, 2))


def test_padding_that_windows_do_not_fill_is_zero_behind_the_norm() -> None:
    """ViTDet's: a window that the image fills in part attends to zeros there, here by twenty plain lines."""
    model = windowed(eva(depth=1, ref_feat_shape=None, use_rot_pos_emb=False), 4, ())
    x = image(40, 32)  # 5 x 4 patches: the second window has one row of four
    block = model.blocks[0]
    tokens = model.patch_embed(x).flatten(1, 2)
    normed = torch.cat([block.norm1(tokens), torch.zeros(2, 12, 32)], dim=1)
    halves = [block.attn(part.view(2, 4, 4, 32)) for part in normed.split(16, dim=1)]
    attended = torch.cat([half.flatten(1, 2) for half in halves], dim=1)[:, :20]
    tokens = tokens + attended
    tokens = tokens + block.mlp(block.norm2(tokens))
    torch.testing.assert_close(model(x), model.norm(tokens))


def test_weights_with_a_class_token_fit_and_leave_it_out(tmp_path: Path) -> None:
    whole = shaken(timm.create_model("vit_tiny_patch16_224", **{**TINY, "img_size": 64}, num_classes=5))
    save_file(whole.state_dict(), tmp_path / "vit.safetensors")
    model = create_model("vitdet:vit_tiny_patch16_224", options={**TINY, **SMALL, "window_size": 4})
    load_backbone(model, tmp_path / "vit.safetensors")
    backbone: Any = model.backbone
    assert torch.equal(backbone.pos_embed, whole.pos_embed[:, 1:])
    assert "cls_token" not in backbone.state_dict()
    larger = create_model("vitdet:vit_tiny_patch16_224", options={**TINY, **SMALL, "img_size": 128, "window_size": 4})
    load_backbone(larger, tmp_path / "vit.safetensors")
    assert larger.backbone.pos_embed.shape == (1, 256, 32)  # type: ignore[union-attr]


def test_routers_in_windows_learn_the_classes_of_the_image() -> None:
    torch.manual_seed(0)
    options = {**TINY, **SMALL, "depth": 4, "window_size": 4, "global_blocks": [2, 4]}
    model = create_model("vitdet:vit_tiny_patch16_224", options=options).train()
    assert isinstance(model, Detector)
    reduction = vitrim.reduce_(model, "cropr:r=4,per=16,first_extra=0")
    images = image(64, 64)
    objects = {"boxes": torch.tensor([[8.0, 8.0, 28.0, 28.0]]), "labels": torch.tensor([1])}
    targets: Any = [objects, {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}]
    task = make_task("detection", 3)
    loss = Loss(name="rcnn")
    step = Step(model, reduction, images, targets, task.criterion(loss), auxiliary=task.auxiliary(loss))
    losses = cropr.losses(step, reduction)
    outputs = reduction.aux("auxiliary_logits")
    assert [tuple(output.shape) for output in outputs] == [(8, 3)] * 2  # two routers, four windows an image
    present = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    largest = [torch.stack([output[:4].max(0).values, output[4:].max(0).values]) for output in outputs]
    expected = [torch.nn.functional.binary_cross_entropy_with_logits(one, present) for one in largest]
    torch.testing.assert_close(losses["auxiliary"], torch.stack(expected).mean())
