"""Methods that read the grid of patches read that of the forward at hand, on every host, or say that they cannot."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import tiny
import vitrim
from tiny_siglip2 import CLASSIFIER
from vitrim.core.host import GridHook
from vitrim.core.registry import host_of

PATTERN = vitrim.Linf(keep_rate=0.5)
DYNAMIC = tiny.vit(dynamic_img_size=True)
# models that take images of other sizes, and how they are called with them; patches have 4 pixels
ANY_SIZE: dict[str, tuple[Any, dict[str, Any]]] = {
    "timm": (DYNAMIC, {}),
    "timm, padded": (tiny.vit(dynamic_img_size=True, dynamic_img_pad=True), {}),
    "naflex": (tiny.HOSTS["naflex"], {}),
    "hf_vit": (tiny.HOSTS["hf_vit"], {"interpolate_pos_encoding": True}),
    "hf_clip": (tiny.HOSTS["hf_clip"], {"interpolate_pos_encoding": True}),
    "hf_siglip": (tiny.HOSTS["hf_siglip"], {"interpolate_pos_encoding": True}),
    "hf_dinov2": (tiny.HOSTS["hf_dinov2"], {}),
    "hf_dinov3": (tiny.HOSTS["hf_dinov3"], {}),
}


def hooks(model: nn.Module) -> list[GridHook]:
    return [hook for module in model.modules() for hook in module._forward_hooks.values() if isinstance(hook, GridHook)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("host", tiny.HOSTS)
def test_every_host_shows_the_grid_of_its_own_images(host: str) -> None:
    model = tiny.HOSTS[host]()
    reduction = vitrim.reduce_(model, "tome:r=1")
    with torch.no_grad():
        model(tiny.images())
    assert reduction.state.grid is None  # only where a method asks for it
    vitrim.restore_(model)
    assert not hooks(model)
    reduction = vitrim.reduce_(model, PATTERN)
    with torch.no_grad():
        model(tiny.images())
    assert reduction.state.grid == (6, 6) == tuple(host_of(model).facts(model).grid_size)
    vitrim.restore_(model)
    assert not hooks(model)


@pytest.mark.parametrize("host", ANY_SIZE)
def test_as_many_patches_on_another_grid_are_not_taken_for_the_own_one(host: str) -> None:
    make, options = ANY_SIZE[host]
    model = make()
    reduction = vitrim.reduce_(model, PATTERN)
    pattern = reduction.config.amounts(4)[3]
    prefix = host_of(model).facts(model).num_prefix
    for grid in ((4, 9), (9, 4), (6, 6), (3, 8)):
        size = (4 * grid[0], 4 * grid[1] - (host == "timm, padded"))
        with torch.no_grad():
            model(torch.randn(2, 3, *size), **options)
        assert reduction.state.grid == grid
        assert (reduction.state.position[0, prefix:] - prefix).tolist() == pattern.patches(grid)


def test_shapes_that_come_beside_the_patches() -> None:
    model = CLASSIFIER()
    reduction = vitrim.reduce_(model, PATTERN)
    given = {"pixel_values": torch.randn(2, 36, 48), "pixel_attention_mask": torch.ones(2, 36, dtype=torch.int32)}
    with torch.no_grad():
        for grid in ((4, 9), (6, 6)):
            model(**given, spatial_shapes=torch.tensor([grid] * 2))
            assert reduction.state.grid == grid
        with pytest.raises(vitrim.VitrimError, match="linf needs the rows and columns of the 36 patches"):
            model(**given, spatial_shapes=torch.tensor([[4, 9], [9, 4]]))
    vitrim.restore_(model)
    vitrim.reduce_(model, "gtp:graph=semantic")  # needs no grid
    with torch.no_grad():
        model(**given, spatial_shapes=torch.tensor([[4, 9], [9, 4]]))
        first = host_of(model).blocks(model)[0]
        first.register_forward_pre_hook(lambda block, args: (torch.cat([args[0], args[0][:, -1:]], dim=1), *args[1:]))
        with pytest.raises(vitrim.UnsupportedModelError, match=r"^1 tokens of this \w+ are neither patches"):
            model(**given, spatial_shapes=torch.tensor([[4, 9], [9, 4]]))


@pytest.mark.parametrize("method", ["gtp:num_prop=4", "l1", "l2", "linf"])
def test_unknown_grids_are_refused_in_one_line(method: str) -> None:
    name = method.partition(":")[0]
    model = tiny.vit(patch_drop_rate=0.75)()
    reduction = vitrim.reduce_(model, method)
    with torch.no_grad():
        model(tiny.images())
        model.train()
        with pytest.raises(vitrim.VitrimError, match=f"^{name} needs the rows and columns of the 9 patches"):
            model(tiny.images())  # 9 of 36 are no 3 x 3 grid
        model.eval()
        model(tiny.images())
        assert reduction.state.grid == (6, 6)
        with pytest.raises(vitrim.VitrimError, match=f"^{name} needs the rows and columns of the 36 patches"):
            model.blocks(torch.zeros(1, 37, 32))  # tokens that no patch embedding made


@pytest.mark.parametrize("method", ["gtp:num_prop=4", "l2"])
def test_a_model_without_a_patch_embedding_is_refused_before_any_edit(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.HOSTS["vit"]()
    monkeypatch.setattr(host_of(model), "patch_maker", lambda model: None)
    with pytest.raises(vitrim.UnsupportedModelError, match="has no patch embedding that shows them"):
        vitrim.reduce_(model, method)
    assert vitrim.get_reduction(model) is None
    vitrim.reduce_(model, "gtp:graph=semantic")
    vitrim.restore_(model)
    vitrim.reduce_(model, "gtp:propagation=none")


class Foreign(nn.Module):
    """A patch embedding that nobody knows."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.proj, self.grid_size, self.img_size = own.proj, own.grid_size, own.img_size

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


def test_a_foreign_patch_embedding_says_no_grid() -> None:
    model = tiny.HOSTS["vit"]()
    model.patch_embed = Foreign(model.patch_embed)
    vitrim.reduce_(model, PATTERN)
    with pytest.raises(vitrim.VitrimError, match="linf needs the rows and columns of the 36 patches"):
        model(tiny.images())


def test_copies_see_their_own_grids() -> None:
    model = DYNAMIC()
    reduction = vitrim.reduce_(model, PATTERN)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own = vitrim.get_reduction(other)
        with torch.no_grad():
            model(tiny.images())
            other(torch.randn(2, 3, 16, 36))
        assert (reduction.state.grid, own.state.grid) == ((6, 6), (4, 9))
        assert len(hooks(other)) == 1
        vitrim.restore_(other)
        assert not hooks(other)
    assert len(hooks(model)) == 1


def test_a_recomputed_forward_has_the_grid_it_had() -> None:
    """Two forwards of other shapes before one backward: the first block runs again, the patch embedding does not."""
    model = DYNAMIC().double()
    vitrim.reduce_(model, "gtp:num_prop=4")
    shapes = [(16, 36), (24, 24)]

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        generator = torch.Generator().manual_seed(0)
        images = [torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
        sum(model(image).square().sum() for image in images).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    model.set_grad_checkpointing(True)
    for a, b in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_threads_see_their_own_grids() -> None:
    model = DYNAMIC()
    vitrim.reduce_(model, "l2:keep_rate=0.5,last_block=class_token")
    images = [torch.randn(1, 3, *shape) for shape in ((16, 36), (36, 16), (24, 24), (8, 72))]

    def run(image: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(image)

    expected = [run(image) for image in images]
    with ThreadPoolExecutor(4) as pool:
        for found, each in zip(pool.map(run, images * 25), expected * 25, strict=True):
            assert torch.equal(found, each)
