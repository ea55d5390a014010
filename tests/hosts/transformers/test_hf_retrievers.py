"""Retrievers of document pages: fewer image tokens are fewer vectors, those of the library on a prompt cut by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchFeature

import vitrim
from tiny_retrievers import RETRIEVERS, WIDTH
from tiny_vlms import IMAGE
from vitrim.core.registry import ask, find_vision_language
from vitrim.engines.macs import profile_of
from vitrim.engines.prefill import Prefill

TEXTS = [[7, 11, 13], [17, 19]]
"""Two pages: the first of two images, the second of one."""
every_model = pytest.mark.parametrize("name", RETRIEVERS)


def prompt(name: str) -> dict[str, Tensor]:
    return RETRIEVERS[name].prompt(TEXTS, [9, 6, 9] if name == "colqwen2" else None)


@torch.no_grad()
def vectors(model: Any, given: dict[str, Any]) -> Tensor:
    return model(**given).embeddings  # type: ignore[no-any-return]


@torch.no_grad()
def features(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """(n, D) of every image, by the library's own encoder."""
    pixels = given["pixel_values"]
    if "image_grid_thw" in given:
        grids = given["image_grid_thw"]
        pixels = torch.cat([row[: int(grid.prod())] for row, grid in zip(pixels, grids, strict=True)])
        return list(model.vlm.get_image_features(pixels, grids).pooler_output)
    pooled = model.vlm.get_image_features(pixels).pooler_output
    if isinstance(pooled, Tensor):
        return list(pooled)
    whole = torch.cat(pooled)
    return list(whole.split(len(whole) // 3))


def by_hand(
    model: Any, given: dict[str, Tensor], images: list[Tensor], kept: list[Tensor], original: bool = False
) -> Tensor:
    """The library on the embeddings of the prompt without the image tokens that are not ``kept``."""
    flags, rows = iter(torch.cat(kept).tolist()), iter(torch.cat([x[own] for x, own in zip(images, kept, strict=True)]))
    words = model.get_input_embeddings()
    cut, places = [], []
    for ids, mask in zip(given["input_ids"], given["attention_mask"], strict=True):
        own = []
        for place, (token, real) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
            if real and (token != IMAGE or next(flags)):
                own.append(next(rows) if token == IMAGE else words(torch.tensor(token)))
                places.append(place - int((mask == 0).sum()))
        cut.append(torch.stack(own))
    longest = max(map(len, cut))
    embeds = torch.stack([torch.nn.functional.pad(own, (0, 0, longest - len(own), 0)) for own in cut])
    mask = torch.stack([torch.arange(longest) >= longest - len(own) for own in cut]).long()
    given = {"inputs_embeds": embeds, "attention_mask": mask}
    if original:
        given["position_ids"] = torch.zeros_like(mask)
        given["position_ids"][mask.bool()] = torch.tensor(places)
    return vectors(model, given)


@every_model
@pytest.mark.parametrize(
    "select", ["divprune:tokens=4", "random:keep=0.5", "dart:tokens=4", "divprune:tokens=4,positions=original"]
)
def test_selected_pages_have_the_vectors_of_prompts_cut_by_hand(name: str, select: str) -> None:
    model, given = RETRIEVERS[name].create(), prompt(name)
    dense, own = vectors(model, given), features(model, given)
    reduction = vitrim.reduce_(model, select=select)
    found = vectors(model, given)
    kept = [image.kept for image in reduction.image_places]
    assert [len(flags) for flags in kept] == [len(image) for image in own]
    assert found.shape[1] == given["input_ids"].shape[1] - sum(int((~flags).sum()) for flags in kept[:2])
    if select.startswith("divprune"):
        for image, flags in zip(own, kept, strict=True):
            assert torch.equal(vitrim.parse_selector(select).mask(image), flags)
    vitrim.restore_(model)
    assert torch.equal(vectors(model, given), dense)
    expected = by_hand(model, given, own, kept, original="original" in select)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@every_model
def test_pooled_image_tokens_are_the_means_that_the_prompt_gets(name: str) -> None:
    model, given = RETRIEVERS[name].create(), prompt(name)
    images = features(model, given)
    vitrim.reduce_(model, select="pool:tokens=1")
    found = vectors(model, given)
    vitrim.restore_(model)
    first = [torch.arange(len(image)) == 0 for image in images]
    means = [image.mean(dim=0).expand(len(image), -1) for image in images]
    torch.testing.assert_close(found, by_hand(model, given, means, first), atol=1e-5, rtol=1e-5)


@every_model
@pytest.mark.parametrize("method", ["tome:r=0", "tome:r=1", "topk:keep_rate=0.7,score=column_mean"])
def test_a_reduced_tower_leaves_the_vectors_of_prompts_cut_by_hand(name: str, method: str) -> None:
    """The tower alone fills every place of an image; of these, the places whose tokens stay are kept by hand."""
    model, given = RETRIEVERS[name].create(), prompt(name)
    joined: list[Tensor] = []
    if name == "colmodernvbert":  # alone, its tower is reduced by patches, and not by cells
        model.vlm.connector.register_forward_hook(lambda module, args, output: joined.append(output))
    else:
        vitrim.reduce_(model, method)
        images = features(model, given)
        vitrim.restore_(model)
    reduction = vitrim.reduce_(model, method, compact=True)
    found = vectors(model, given)
    images = list(joined[0]) if joined else images
    kept = [image.kept for image in reduction.image_places]
    if method.startswith("tome"):
        less = RETRIEVERS[name].blocks if method == "tome:r=1" else 0
        assert reduction.image_tokens == [len(image) - less for image in images]
    vitrim.restore_(model)
    torch.testing.assert_close(found, by_hand(model, given, images, kept), atol=1e-5, rtol=1e-5)


@every_model
def test_a_selector_behind_a_reduced_tower_and_one_that_reads_its_attention(name: str) -> None:
    model, given = RETRIEVERS[name].create(), prompt(name)
    text = 5  # of the first page, which has two images
    for select in ("divprune:tokens=2", "fastervlm:tokens=2"):
        reduction = vitrim.reduce_(model, "tome:r=1", select=select)
        assert vectors(model, given).shape == (2, text + 2 * 2, WIDTH)
        reduction.set(select=select.replace("2", "1"))
        assert vectors(model, given).shape == (2, text + 2 * 1, WIDTH)
        assert reduction.image_tokens == [1, 1, 1]


@every_model
def test_queries_have_the_vectors_that_they_had(name: str) -> None:
    model = RETRIEVERS[name].create()
    given = {"input_ids": torch.tensor([[0, 7, 8], [9, 10, 11]]), "attention_mask": torch.tensor([[0, 1, 1], [1] * 3])}
    dense = vectors(model, given)
    vitrim.reduce_(model, "tome:r=1", select="divprune:tokens=3")
    assert torch.equal(vectors(model, given), dense)
    vitrim.reduce_(model, select="divprune:tokens=3")
    assert torch.equal(vectors(model, given), dense)


@every_model
def test_the_model_within_stays_what_it_is(name: str) -> None:
    """Called by itself, Qwen2-VL numbers its tokens along three axes, and not one by one."""
    model, given = RETRIEVERS[name].create(), prompt(name)
    if name == "colqwen2":
        rows = zip(given["pixel_values"], given["image_grid_thw"].prod(dim=1).tolist(), strict=True)
        given["pixel_values"] = torch.cat([row[:number] for row, number in rows])
        given["mm_token_type_ids"] = (given["input_ids"] == IMAGE).long()
    with torch.no_grad():
        dense = model.vlm(**given)[0]
        vitrim.reduce_(model, select="divprune:tokens=3")
        assert torch.equal(model.vlm(**given)[0], dense)


@every_model
def test_vectors_of_items_are_without_padding(name: str) -> None:
    """The processor pads pages of a batch; a page alone has as many vectors, and the same."""
    model, given = RETRIEVERS[name].create(), prompt(name)
    model.processor = SimpleNamespace(process_images=lambda images: BatchFeature(given))
    found = ask(model).token_vectors(model, [None, None])  # what a processor would read
    assert list(map(len, found)) == given["attention_mask"].sum(dim=1).tolist()
    assert len(found[0]) > len(found[1])
    for own, row, mask in zip(found, vectors(model, given), given["attention_mask"].bool(), strict=True):
        assert torch.equal(own, row[mask])


@every_model
def test_smaller_images_where_the_tower_takes_them(name: str) -> None:
    model, given = RETRIEVERS[name].create(), prompt(name)
    if name == "colmodernvbert":
        with pytest.raises(vitrim.VitrimError, match="cannot be made smaller behind its processor"):
            vitrim.reduce_(model, select="resize:tokens=4")
        return
    reduction = vitrim.reduce_(model, select="resize:tokens=4")
    assert vectors(model, given).shape[1] == 2 * 4 + given["input_ids"].shape[1] - (2 * 36 if name == "colpali" else 15)
    assert reduction.image_tokens == [4, 4, 4]


def test_repeated_cells_of_a_page_are_left_out() -> None:
    """A white margin: what `kept_cells` keeps of the pixels, and no more, gets vectors."""
    model, given = RETRIEVERS["colqwen2"].create(), RETRIEVERS["colqwen2"].prompt([[7, 11]])
    given["pixel_values"][0, 12:] = 1.0  # all cells from the fourth on
    reduction = vitrim.reduce_(model, select="pixelprune")
    found = vectors(model, given)
    assert reduction.image_tokens[0] < 9
    assert found.shape[1] == 3 + reduction.image_tokens[0]


@every_model
def test_reductions_are_saved_with_the_model(name: str, tmp_path: Path) -> None:
    model, given = RETRIEVERS[name].create(), prompt(name)
    reduction = vitrim.reduce_(model, "tome:r=1", select="divprune:tokens=3")
    found = vectors(model, given)
    reduction.save(tmp_path)
    other = RETRIEVERS[name].create()
    assert vitrim.Reduction.load(other, tmp_path).select == reduction.select
    assert torch.equal(vectors(other, given), found)


@every_model
def test_costs_of_pages_count_the_layer_of_vectors(name: str) -> None:
    """The share of the language model is that of its layers and of the projection, a product per token."""
    model: Any = RETRIEVERS[name].create()
    family = find_vision_language(model)
    assert family is not None
    assert family.in_cells is (family.cell(model) > 1)
    prefill = Prefill(model, text=4)
    assert prefill.places == (256 if name == "colqwen2" else RETRIEVERS[name].tokens)
    images = torch.zeros(1, *prefill.shape)
    whole = profile_of(prefill, None, images).prefill
    model.embedding_proj_layer = torch.nn.Linear(16, 3 * WIDTH)
    wider = profile_of(Prefill(model, text=4), None, images).prefill
    assert whole is not None
    assert wider is not None
    tokens = prefill.places + 4
    assert wider.shares["language model"].total - whole.shares["language model"].total == 2 * tokens * 16 * WIDTH
