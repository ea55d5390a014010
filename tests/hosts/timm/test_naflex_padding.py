"""timm's NaFlexVit on padded batches of patches: every image equals itself alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
import vitrim

SHAPES = ((4, 8), (6, 6), (8, 4), (3, 5), (6, 6), (1, 7))
HOSTS = ("naflex", "naflex_map_registers", "naflex_rope", "naflex_rope_mixed")
PAIRS = pytest.mark.parametrize(
    ("host", "config"),
    tiny.matrix(tiny.configs(), HOSTS, thorough=["naflex"], others=("tome", "topk", "mctf", "cropr"), full=HOSTS),
)


def padded(shapes: Sequence[tuple[int, int]] = SHAPES, length: int = 40) -> dict[str, Tensor]:
    """As timm's collator makes them, with padding that must not be seen."""
    generator = torch.Generator().manual_seed(3)
    patches = torch.randn(len(shapes), length, 48, generator=generator, dtype=torch.float64)
    coord = torch.zeros(len(shapes), length, 2, dtype=torch.int64)
    valid = torch.zeros(len(shapes), length, dtype=torch.bool)
    for image, (rows, columns) in enumerate(shapes):
        count = rows * columns
        coord[image, :count] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        valid[image, :count] = True
        patches[image, count:] = 1e3
    return {"patches": patches, "patch_coord": coord, "patch_valid": valid}


def alone(batch: dict[str, Tensor], image: int) -> dict[str, Tensor]:
    count = int(batch["patch_valid"][image].sum())
    return {name: value[image : image + 1, :count] for name, value in batch.items()}


def all_alone(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    return [model(alone(batch, image)) for image in range(len(batch["patches"]))]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("host", HOSTS)
def test_padding_of_the_dense_model_is_what_alone_means(host: str) -> None:
    """What timm computes with its masks is what the reduced model computes that reduces nothing."""
    model, batch = tiny.HOSTS[host]().double(), padded()
    with torch.no_grad():
        dense, features = model(batch), model.forward_features(**batch)
        vitrim.reduce_(model, "tome:r=0")
        close(model(batch), dense)
        found = model.forward_features(**batch)
        assert torch.equal(found["patch_valid"], batch["patch_valid"])
        prefix = tiny.num_prefix(model)
        real = torch.cat([torch.ones(len(SHAPES), prefix, dtype=torch.bool), batch["patch_valid"]], dim=1)
        close(found["patches"][real], features["patches"][real])
        assert found["patches"].shape == features["patches"].shape
        vitrim.restore_(model)
        assert torch.equal(model(batch), dense)


@pytest.mark.sampled(7)
@PAIRS
def test_every_image_of_a_padded_batch_equals_itself_alone(host: str, config: vitrim.MethodConfig) -> None:
    model = tiny.HOSTS[host]().double()
    batch = padded([(6, 6)] * 3) if config.kind == "soft" else padded()
    reduction = vitrim.reduce_(model, tiny.fits(config, model))
    with torch.no_grad():
        try:
            whole = model(batch)
        except vitrim.VitrimError:
            with pytest.raises(vitrim.VitrimError):  # a method that takes no such grid takes it nowhere
                all_alone(model, batch)
            return
        state = reduction.state
        for image in range(len(batch["patches"])):
            own = model(alone(batch, image))
            if config.traits.batch_dependent and getattr(config, "granularity", "batch") == "batch":
                continue  # by its definition an image depends on its batch mates
            real = slice(None) if state.mask is None else state.mask[image]
            assert state.size[image, real].shape[0] == reduction.state.num_tokens
            if config.name == "random":
                continue
            close(whole[image], own[0])
            close(state.size[image, real], reduction.state.size[0])
            assert torch.equal(state.position[image, real], reduction.state.position[0])
            inputs = own_inputs = reduction.state.source.shape[1]
            assert torch.equal(state.source[image, :inputs], reduction.state.source[0])
            assert (state.source[image, own_inputs:] == -1).all()


@pytest.mark.parametrize("config", ["tome:r=4", "topk", "tome:r=4,last_block=class_token"])
def test_the_head_takes_what_forward_features_gives(config: str) -> None:
    model, batch = tiny.HOSTS["naflex"]().double(), padded()
    vitrim.reduce_(model, config)
    with torch.no_grad():
        close(model.forward_head(**model.forward_features(**batch)), model(batch))
        close(copy.deepcopy(model)(batch), model(batch))


@pytest.mark.parametrize("config", ["tome:r=4", "topk", "cropr"])
def test_dense_features_of_padded_batches(config: str) -> None:
    model, batch = tiny.HOSTS["naflex"]().double(), padded()
    kinds: dict[str, Any] = {"output_fmt": "NLC", "return_prefix_tokens": True}
    with torch.no_grad():
        dense = model.forward_intermediates(batch, **kinds, output_dict=True)
        vitrim.reduce_(model, config)
        found = model.forward_intermediates(batch, **kinds, output_dict=True)
        final, pairs = model.forward_intermediates(batch, **kinds)
        assert found.keys() == dense.keys()
        assert torch.equal(found["patch_valid"], batch["patch_valid"])
        assert found["image_features"].shape == dense["image_features"].shape
        for image in range(len(SHAPES)):
            own = model.forward_intermediates(alone(batch, image), **kinds, output_dict=True)
            for kind in ("image_intermediates", "image_intermediates_prefix"):
                for layer, single, like in zip(found[kind], own[kind], dense[kind], strict=True):
                    assert layer.shape == like.shape
                    close(layer[image, : single.shape[1]], single[0])
        assert torch.equal(final, found["image_features"])
        assert all(torch.equal(a, b) for (a, _), b in zip(pairs, found["image_intermediates"], strict=True))


def test_an_attention_mask_of_the_users_own_is_refused() -> None:
    model, batch = tiny.HOSTS["naflex"]().double(), padded([(6, 6)] * 2, 36)
    vitrim.reduce_(model, "tome:r=4")
    with pytest.raises(ValueError, match="a reduced model takes no attn_mask"):
        model({**batch, "attn_mask": torch.zeros(2, 1, 37, 37)})


def test_traced_and_exported_models_refuse_padded_batches() -> None:
    model, batch = tiny.HOSTS["naflex"]().double(), padded([(6, 6)] * 2, 36)
    vitrim.reduce_(model, "tome:r=4")
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^torch.export and torch.jit.trace take no padded batches"):
        torch.jit.trace(lambda patches: model({**batch, "patches": patches}), batch["patches"])
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^torch.export and torch.jit.trace take no padded batches"):
        torch.export.export(model, (batch,), strict=False)


@pytest.mark.slow  # eager batches are split above
def test_a_compiled_model_splits_padded_batches_outside_of_its_graphs() -> None:
    model, batch = tiny.HOSTS["naflex"]().double(), padded(SHAPES[:2])
    vitrim.reduce_(model, "tome:r=4")
    torch.compiler.reset()
    with torch.no_grad():
        close(torch.compile(model, backend="eager")(batch), model(batch))
