"""PixelPrune in plain ViTs: what stays is read at its place; pixels are those of the patches, in their own scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import tiny
import vitrim
from tiny_vlms import VLMS
from vitrim.core.host import GridHook
from vitrim.core.method import Needs
from vitrim.core.registry import host_of
from vitrim.core.tokens import PatchPixels, Trace

SIDE, ROWS, COLUMNS = 4, 5, 6
PAGE = "1 1 1 1 1 1 1 1 1 1 1 1 1 1 5 5 5 1 1 1 5 5 5 1 1 1 1 1 1 1"
KEPT = [0, 14, 17, 26]
"""The worked example of the spec: patches of a page of 5 x 6, and those that stay."""


def model(**options: Any) -> VisionTransformer:
    torch.manual_seed(0)
    size = (SIDE * ROWS, SIDE * COLUMNS)
    found = VisionTransformer(
        img_size=size, patch_size=SIDE, embed_dim=32, depth=3, num_heads=2, num_classes=5, **options
    )
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.3)
    found.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.25, 0.4), "input_size": (3, *size)}
    return found.eval()


def page(numbers: str = PAGE) -> Tensor:
    """An image in which equal numbers are equal patches of noise."""
    noise = torch.randn(30, 3 * SIDE * SIDE, generator=torch.Generator().manual_seed(5))
    patches = noise[[int(number) for number in numbers.split()]].T[None]
    return F.fold(patches, (SIDE * ROWS, SIDE * COLUMNS), SIDE, stride=SIDE)


def distinct() -> Tensor:
    return page(" ".join(map(str, range(30))))


@torch.no_grad()
def by_hand(vit: Any, image: Tensor, kept: list[int]) -> Tensor:
    tokens = vit.patch_embed(image) + vit.pos_embed[:, 1:]
    x = torch.cat([vit.cls_token + vit.pos_embed[:, :1], tokens[:, kept]], dim=1)
    return vit.head(vit.norm(vit.blocks(x))[:, 0])  # type: ignore[no-any-return]


@torch.no_grad()
def test_what_stays_is_read_at_its_place_in_a_batch_as_alone() -> None:
    vit = model()
    images = torch.cat([page(), distinct(), page(" ".join("3" * 30))])
    expected = torch.cat([by_hand(vit, images[:1], KEPT), vit(images[1:2]), by_hand(vit, images[2:], [0])])
    dense = vit(images)
    reduction = vitrim.reduce_(vit, "pixelprune", record=True)
    for image, own, count in zip(images, expected, (5, 31, 2), strict=True):
        torch.testing.assert_close(vit(image[None])[0], own, atol=1e-5, rtol=1e-5)
        assert [state.num_tokens for state in reduction.states] == [31, count, count, count]
        assert reduction.states[1].mask is None
    torch.testing.assert_close(vit(images), expected, atol=1e-5, rtol=1e-5)
    assert reduction.state.tokens_of_images() == [5, 31, 2]
    assert (dense[0] - expected[0]).abs().max() > 0.1
    kept = reduction.state.position[0, :5].tolist()
    assert kept == [0, *(patch + 1 for patch in KEPT)]


@torch.no_grad()
def test_the_images_are_not_held_behind_the_first_block() -> None:
    vit = model()
    reduction = vitrim.reduce_(vit, "pixelprune")
    vit(page())
    assert reduction.state.pixels is None
    assert reduction._trace.call.pixels is None


MAKERS = [name for name in tiny.PLAIN if host_of(tiny.HOSTS[name]()).patch_maker(tiny.HOSTS[name]()) is not None]


@pytest.mark.parametrize("name", MAKERS)
def test_pixels_are_those_of_the_patches_in_the_order_of_tokens(name: str) -> None:
    """As torch cuts images; None of what takes no images."""
    found, trace, given = tiny.HOSTS[name](), Trace(), list[Tensor]()
    host = host_of(found)
    maker: Any = host.patch_maker(found)
    hook = GridHook(host.trunk_host(found), trace, Needs(grid=True, pixels=True), (SIDE, SIDE))
    maker.register_forward_hook(hook)
    maker.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    with torch.no_grad():
        tiny.run(found, tiny.images())
    pixels = trace.call.pixels
    if given[0].dim() != 4 or trace.call.grid is None:
        assert pixels is None
        return
    assert pixels is not None
    expected = F.unfold(given[0], SIDE, stride=SIDE).mT
    assert torch.equal(pixels.values.flatten(1, 2).flatten(2), expected)
    assert pixels.values.data_ptr() == given[0].data_ptr()  # not a copy


def off(share: float) -> Tensor:
    """A flat page whose last patch differs by ``share`` of what a pixel can be, in one pixel of the last channel."""
    image = torch.zeros(1, 3, SIDE * ROWS, SIDE * COLUMNS)
    image[0, 2, -1, -1] = share / 0.4
    return image


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("tau=0", 2),
        ("tau=0.0195", 2),
        ("tau=0.0198", 1),
        ("tau=0.0495,std=1", 1),  # 5 of 255, divided by 0.4
        ("tau=0.0485,std=1", 2),
        ("tau=0.0248,std=[0.1,0.1,0.5]", 1),
        ("tau=0.0242,std=[0.1,0.1,0.5]", 2),
        ("tau=0.0005,distance=mae", 1),
    ],
)
def test_a_threshold_is_of_pixels_in_their_own_scale(options: str, kept: int, dtype: torch.dtype) -> None:
    """By what the model says its images were divided by, or the option."""
    vit = model().to(dtype)
    reduction = vitrim.reduce_(vit, f"pixelprune:{options}", record=True)
    vit(off(5 / 255).to(dtype))
    assert reduction.state.num_patches == kept


@torch.no_grad()
def test_every_size_and_shape_of_image_has_its_own_grid() -> None:
    vit = model(dynamic_img_size=True, dynamic_img_pad=True)
    reduction = vitrim.reduce_(vit, "pixelprune", record=True)
    vit(page()[..., :12])
    assert reduction.states[0].grid == (5, 3)
    assert reduction.state.position[0].tolist() == [0, 1, 9, 15]  # of 1 1 1, 1 1 1, 1 1 5, 1 1 5, 1 1 1
    for rows, columns, patches in ((20, 13, 20), (9, 24, 18), (20, 9, 15)):  # padded; 9 are three times three, too
        with pytest.raises(vitrim.VitrimError, match=rf"the pixels of the {patches} patches, .* in whole patches"):
            vit(page()[..., :rows, :columns])


@torch.no_grad()
def test_images_that_are_cropped_are_refused() -> None:
    """Also if their sides are whole numbers of rows and columns of another size: 15 is three times five."""
    found: Any = tiny.HOSTS["hf_vit"]()
    vitrim.reduce_(found, "pixelprune")
    for side in (25, 15):
        with pytest.raises(vitrim.VitrimError, match="in whole patches"):
            found(torch.zeros(1, 3, side, side), interpolate_pos_encoding=True)


def test_patches_that_overlap_are_refused() -> None:
    found = tiny.FURTHER["hf_ast"]()
    with pytest.raises(vitrim.VitrimError, match=r"^pixelprune needs patches .* 6 x 6 patches .* not fill 20 x 14 "):
        vitrim.reduce_(found, "pixelprune")
    assert vitrim.get_reduction(found) is None


def test_forwards_that_do_not_show_their_pixels_are_refused() -> None:
    """Patch dropout; tokens that no embedding made; and those of several calls of the embedding."""
    vit = model(patch_drop_rate=0.5).train()
    vitrim.reduce_(vit, "pixelprune")
    with pytest.raises(vitrim.VitrimError, match=r"needs the pixels of the 15 patches, .* without patch dropout"):
        vit(page())
    with pytest.raises(vitrim.VitrimError, match="needs the pixels of the 30 patches"):
        vit.blocks(torch.zeros(1, 31, 32))
    pixels = PatchPixels(torch.zeros(1, ROWS, COLUMNS, 3, SIDE, SIDE), None)
    state = vitrim.TokenState.start(torch.zeros(2, 31, 32), 1, (ROWS, COLUMNS), pixels=pixels)
    with pytest.raises(vitrim.VitrimError, match="needs the pixels of the 30 patches"):
        state.known_pixels("pixelprune")


def test_a_block_that_is_computed_again_reads_the_same_pixels() -> None:
    gradients = []
    for checkpointing in (False, True):
        vit = model().train()
        vit.set_grad_checkpointing(checkpointing)
        vitrim.reduce_(vit, "pixelprune")
        vit(page()).sum().backward()
        gradients.append(vit.blocks[0].attn.qkv.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_deviations_that_nobody_knows_or_that_fit_no_channels_are_refused() -> None:
    clip = tiny.HOSTS["hf_vit"]()  # made from a config, without a processor
    with pytest.raises(vitrim.VitrimError, match=r"^pixelprune:tau=0\.1 compares pixels .* divided by; give std=$"):
        vitrim.reduce_(clip, "pixelprune:tau=0.1")
    assert vitrim.get_reduction(clip) is None
    vitrim.reduce_(clip, "pixelprune")
    tiny.run(clip, tiny.images())
    vit = model()
    with pytest.raises(vitrim.VitrimError, match="std has 2 numbers, and the images 3 channels"):
        vitrim.reduce_(vit, "pixelprune:tau=0.1,std=[0.5,0.5]")
    assert vitrim.get_reduction(vit) is None


@torch.no_grad()
def test_a_language_model_gets_the_patches_that_stay() -> None:
    """Of the first image the left half is blank, of the second nothing repeats."""
    llava, given = VLMS["llava"].create(), VLMS["llava"].prompt([[7, 5], [9, 5]])
    given["pixel_values"][0, :, :, :12] = 0.5
    reduction = vitrim.reduce_(llava, "pixelprune", compact=True)
    llava(**given, use_cache=False)
    assert reduction.image_tokens == [19, 36]
    kept = reduction.image_places[0].kept.view(6, 6)
    assert kept[:, 3:].all()
    assert kept[:, :3].nonzero().tolist() == [[0, 0]]
