"""SigLIP 2 (NaFlex), whose images come as patches with a mask."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_hf_towers import TEXT
from torch import Tensor
from transformers import (
    Siglip2Config,
    Siglip2Model,
)

import tiny
import vitrim
from tiny_hosts.common import seeded
from tiny_siglip2 import CLASSIFIER, TOWER, VISION

# ---- padding --------------------------------------------------------------------------------------------------------

SHAPES = ((4, 8), (6, 6), (8, 4), (3, 5), (6, 6), (1, 7))
"""Rows and columns of images that the processor puts in one batch."""
MAKERS = pytest.mark.parametrize("make", [CLASSIFIER, TOWER], ids=["mean", "map"])


def padded(shapes: Sequence[tuple[int, int]] = SHAPES, length: int = 40) -> dict[str, Tensor]:
    """A batch of images of these shapes, with padding that must not be seen."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.zeros(len(shapes), length, dtype=torch.int32)
    patches = torch.randn(len(shapes), length, 48, generator=generator, dtype=torch.float64)
    for image, (rows, columns) in enumerate(shapes):
        mask[image, : rows * columns] = 1
        patches[image, rows * columns :] = 1e3
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes)}


def alone(batch: dict[str, Tensor], image: int) -> dict[str, Tensor]:
    """One image of a batch, without padding and mask."""
    count = int(batch["pixel_attention_mask"][image].sum())
    return {
        "pixel_values": batch["pixel_values"][image : image + 1, :count],
        "pixel_attention_mask": None,  # type: ignore[dict-item]
        "spatial_shapes": batch["spatial_shapes"][image : image + 1],
    }


def all_alone(model: Any, batch: dict[str, Tensor]) -> list[Any]:
    return [model(**alone(batch, image)) for image in range(len(batch["spatial_shapes"]))]


def close(a: Tensor, b: Tensor, relative: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, atol=relative * max(1.0, b.abs().max().item()), rtol=relative)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@MAKERS
def test_padding_of_the_dense_model_is_what_alone_means(make: Any, kind: str) -> None:
    """What transformers computes with its masks is what the reduced model computes that reduces nothing."""
    model, batch = make().double(), padded()
    model.set_attn_implementation(kind)
    with torch.no_grad():
        dense = model(**batch)
        vitrim.reduce_(model, "tome:r=0")
        found = model(**batch)
    real = batch["pixel_attention_mask"].bool()
    rounding = 1e-6 if kind == "eager" else 1e-9  # written out, the library's softmax is of float32
    if "logits" in dense:
        close(found.logits, dense.logits, rounding)
    else:
        close(found.pooler_output, dense.pooler_output, rounding)
        assert found.last_hidden_state.shape == dense.last_hidden_state.shape
        close(found.last_hidden_state[real], dense.last_hidden_state[real], rounding)


# the tower has the same layers: it differs in its head
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("make", "config"),
    [
        pytest.param(make, config, id=f"{name}-{config.describe()}", marks=marks)
        for config in tiny.configs()
        for make, name, marks in (
            (CLASSIFIER, "mean", ()),
            (TOWER, "map", () if config.name in tiny.FEW else pytest.mark.slow),
        )
    ],
)
def test_every_image_of_a_padded_batch_equals_itself_alone(make: Any, config: vitrim.MethodConfig) -> None:
    """Every amount is of the image's own patches: 15 patches and 36 keep other numbers."""
    model = make().double()
    batch = padded([(6, 6)] * 3) if config.kind == "soft" else padded()
    fitting = tiny.fits(config, model)
    reduction = vitrim.reduce_(model, fitting)
    with torch.no_grad():
        try:
            whole = model(**batch)
        except vitrim.VitrimError:
            with pytest.raises(vitrim.VitrimError):  # a method that takes no such grid takes it nowhere
                all_alone(model, batch)
            return
        state = reduction.state
        for image in range(len(batch["spatial_shapes"])):
            own = model(**alone(batch, image))
            if config.traits.batch_dependent and getattr(config, "granularity", "batch") == "batch":
                continue  # by its definition an image depends on its batch mates
            real = slice(None) if state.mask is None else state.mask[image]
            assert state.size[image, real].shape[0] == reduction.state.num_tokens
            if config.name == "random":
                continue
            close(state.size[image, real], reduction.state.size[0])
            assert torch.equal(state.position[image, real], reduction.state.position[0])
            inputs = int(batch["pixel_attention_mask"][image].sum())
            assert torch.equal(state.source[image, :inputs], reduction.state.source[0])
            assert (state.source[image, inputs:] == -1).all()
            if "logits" in own:
                close(whole.logits[image], own.logits[0])
            else:
                close(whole.pooler_output[image], own.pooler_output[0])
                rows = own.last_hidden_state.shape[1]
                close(whole.last_hidden_state[image, :rows], own.last_hidden_state[0])
                assert not whole.last_hidden_state[image, rows:].any()


@pytest.mark.parametrize("config", ["tome:r=4", "topk:score=column_mean"])
def test_one_image_padded_to_the_processors_length(config: str) -> None:
    """A 640 x 480 image gives 252 patches, padded to 256."""
    model, batch = CLASSIFIER().double(), padded([(4, 8)], 36)
    reduction = vitrim.reduce_(model, config, record=True)
    with torch.no_grad():
        logits = model(**batch).logits
        assert reduction.states[0].num_tokens == 32  # padding is not computed
        assert reduction.state.source.shape == (1, 36)
        close(logits, model(**alone(batch, 0)).logits)


@pytest.mark.parametrize("config", ["tome:r=4", "topk:score=column_mean", "cropr"])
def test_hidden_states_of_padded_batches(config: str) -> None:
    model, batch = TOWER().double(), padded()
    dense = model(**batch, output_hidden_states=True).hidden_states
    reduction = vitrim.reduce_(model, config, record=True)
    hidden = model(**batch, output_hidden_states=True).hidden_states
    assert [layer.shape for layer in hidden] == [layer.shape for layer in dense]
    assert [state.num_tokens for state in reduction.states] == [36, *reduction.tokens_per_block]
    for image in range(len(SHAPES)):
        own = model(**alone(batch, image), output_hidden_states=True).hidden_states
        for layer, single in zip(hidden, own, strict=True):
            close(layer[image, : single.shape[1]], single[0])


def test_gradients_of_padded_batches_are_those_of_the_images() -> None:
    model, batch = CLASSIFIER().double(), padded()
    vitrim.reduce_(model, "tome:r=4")
    model(**batch).logits.square().sum().backward()
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    for image in range(len(SHAPES)):
        model(**alone(batch, image)).logits.square().sum().backward()
    # the library resizes the table of positions in float32
    rounding = 1e-9 * max(value.abs().max().item() for value in found.values())
    for name, value in model.named_parameters():
        if value.grad is not None:
            torch.testing.assert_close(found[name], value.grad, atol=rounding, rtol=1e-9)
    assert model.vision_model.embeddings.patch_embedding.weight.grad is not None


def test_the_loss_of_a_padded_batch_and_copies_of_the_model() -> None:
    model, batch = CLASSIFIER().double(), padded()
    before = inspect.signature(model.vision_model.forward)
    vitrim.reduce_(model, "topk:score=column_mean")
    assert inspect.signature(model.vision_model.forward) == before
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    out = model(**batch, labels=labels)
    close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(twin(**batch).logits, out.logits)
        vitrim.restore_(twin)
        assert "forward" not in vars(twin.vision_model)
    positional = model(batch["pixel_values"], batch["pixel_attention_mask"], batch["spatial_shapes"])
    close(positional.logits, out.logits)


@MAKERS
def test_padding_that_is_not_at_the_end_is_refused(make: Any) -> None:
    model, batch = make().double(), padded()
    vitrim.reduce_(model, "tome:r=4")
    batch["pixel_attention_mask"][0, 3] = 0
    with pytest.raises(vitrim.UnsupportedModelError, match="takes padding behind an image's patches only"):
        model(**batch)
    batch["pixel_attention_mask"][0] = 0
    with pytest.raises(vitrim.UnsupportedModelError, match="no image without patches"):
        model(**batch)


def test_parameters_for_one_number_of_patches_refuse_others() -> None:
    model = CLASSIFIER().double()
    vitrim.reduce_(model, "patchmerger")
    with pytest.raises(vitrim.VitrimError, match="learned parameters for 6 x 6 = 36 patches, and this image has 32"):
        model(**padded())


def test_auxiliary_outputs_with_one_entry_per_patch_need_images_of_one_grid() -> None:
    model = CLASSIFIER().double().train()
    reduction = vitrim.reduce_(model, "dynamicvit")
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^'decision' of images of different grids cannot be put"):
        model(**padded())
    model(**padded([(4, 8), (4, 8)]))
    assert reduction.aux("decision")[0].shape == (2, 32)


def test_auxiliary_outputs_with_one_entry_per_image_are_in_the_order_of_the_batch() -> None:
    model, batch = CLASSIFIER().double().train(), padded()
    reduction = vitrim.reduce_(model, "cropr:r=2")
    model(**batch)
    found = reduction.aux("auxiliary_logits")[0]
    for image in range(len(SHAPES)):
        model(**alone(batch, image))
        close(found[image], reduction.aux("auxiliary_logits")[0][0])


def test_both_towers() -> None:
    model = seeded(lambda: Siglip2Model(Siglip2Config(text_config=TEXT, vision_config=VISION)))()
    given = {**padded([(4, 8)] * 2), "input_ids": torch.tensor([[0, 4, 7, 19], [0, 5, 2, 19]])}
    given["pixel_values"] = given["pixel_values"].float()
    with torch.no_grad():
        dense = model(**given)
        vitrim.reduce_(model, "topk:score=column_mean")
        reduced = model(**given)
    assert torch.equal(reduced.text_embeds, dense.text_embeds)
    assert not torch.equal(reduced.image_embeds, dense.image_embeds)
