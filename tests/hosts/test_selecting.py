"""Image tokens selected behind a tower: the language model gets those, and nothing else changes.

What is right is what the library makes of a prompt shortened by hand: its own features of the images, cut, its own
forward on the shorter prompt, and its own positions where they have three axes.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import tiny
import vitrim
from tiny_other_vlms import OTHERS, SMALLER
from tiny_vlms import IMAGE, SECOND, TEXT, VLMS
from vitrim.core.selection import Choice, Seen
from vitrim.core.tables import not_yet
from vitrim.hosts.shared.compact import trimmed
from vitrim.hosts.shared.selecting import Candidates, attended
from vitrim.hosts.transformers.vlms_selected import FOUR_ROWS

TEXTS = [[7, 11, 13], [17, 19]]
"""Two prompts: the first with two images, the second with one."""
ALL = {**VLMS, **OTHERS}
if transformers.__version__.startswith("5.24."):  # whose Llama 4 fails by itself; see the test of what is refused
    del ALL["llama4"]
every_model = pytest.mark.parametrize("name", ALL)
PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "labels")


def prompt(name: str, texts: list[list[int]] = TEXTS) -> dict[str, Tensor]:
    tokens = ALL[name].tokens
    sizes = [tokens, {**SECOND, **SMALLER}.get(name, tokens)] * 3
    return ALL[name].prompt(texts, sizes[: sum(len(row) - 1 for row in texts)])


@torch.no_grad()
def logits(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model(**given).logits  # type: ignore[no-any-return]


def greedy(model: Any, given: dict[str, Tensor], new: int = 6) -> Tensor:
    out: Tensor = model.generate(**given, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return out[:, -new:]


def encode(model: Any, given: dict[str, Tensor], kind: str = "image") -> Any:
    """The output of the library's own encoder."""
    encoder = getattr(model.base_model, f"get_{kind}_features")
    names = ("pixel_values", "image_sizes", "image_grid_thw", "image_position_ids", "qformer_input_ids")
    names += ("pixel_values_videos", "video_grid_thw", "target_sizes", "image_token_pooling", "image_grids")
    with torch.no_grad():
        return encoder(**{key: given[key] for key in names if key in given}, return_dict=True)


def features(name: str, model: Any, given: dict[str, Tensor], output: Any) -> list[Tensor]:
    """(n, D) of every image."""
    pooled = output.pooler_output if name != "llama4" else model.multi_modal_projector(output.last_hidden_state)
    images = [image.flatten(0, -2) for image in pooled]
    if name in ("idefics2", "idefics3", "smolvlm"):  # those of a prompt together
        images = list(torch.cat(images).split(ALL[name].tokens))
    return [image.detach() for image in images]


class ByHand:
    """The library on a prompt shortened by hand.

    Args:
        kept: (Q,) bool for every image.
    """

    def __init__(
        self, name: str, model: Any, given: dict[str, Tensor], kept: Sequence[Tensor], original: bool = False
    ) -> None:
        self.model, self.given = model, given
        output = encode(model, given)
        if name == "llama4":
            cut = torch.cat([x[own] for x, own in zip(output.last_hidden_state, kept, strict=True)])
            output.last_hidden_state = cut[None]
        else:
            images = [x[own] for x, own in zip(features(name, model, given, output), kept, strict=True)]
            tensor = isinstance(output.pooler_output, Tensor)
            output.pooler_output = torch.stack(images) if tensor else images
        if getattr(output, "deepstack_features", None) is not None:
            output.deepstack_features = [
                [x[own] for x, own in zip(layer, kept, strict=True)] for layer in output.deepstack_features
            ]
        self.output = output
        ids, mask = given["input_ids"], given["attention_mask"]
        flags = iter(torch.cat(list(kept)).tolist())
        stay = [[place for place, token in enumerate(row) if token != IMAGE or next(flags)] for row in ids.tolist()]
        stay = [[place for place in places if mask[row, place]] for row, places in enumerate(stay)]
        longest = max(map(len, stay))
        self.short = {}
        for key in PER_TOKEN:
            if key in given:
                fill = -100 if key == "labels" else 0
                rows = [[fill] * (longest - len(own)) + given[key][row][own].tolist() for row, own in enumerate(stay)]
                self.short[key] = torch.tensor(rows)
        positions = None
        if hasattr(model.base_model, "get_rope_index"):
            own = {key: given[key] for key in ("mm_token_type_ids", "image_grid_thw")}
            whole = model.base_model.get_rope_index(ids, attention_mask=mask, **own)[0]
            text = torch.arange(ids.shape[1]).expand(1, len(ids), -1)  # renumbered below
            positions = torch.cat([text, whole])
        elif original:
            positions = (mask.cumsum(1) - 1)[None]
        if positions is not None:
            own_rows = []
            for row, places in enumerate(stay):
                own_positions = positions[:, row, places]
                if len(positions) == 4:
                    own_positions[0] = torch.arange(len(places))
                own_rows.append(torch.nn.functional.pad(own_positions, (longest - len(places), 0)))
            stacked = torch.stack(own_rows, dim=1)
            self.short["position_ids"] = stacked if len(stacked) > 1 else stacked[0]

    def inputs(self) -> dict[str, Any]:
        """For the library's forward: its encoder gives what was cut."""
        return {**self.short, "mm_encoder_outputs": {"image": copy.copy(self.output)}}

    def logits(self) -> Tensor:
        given = self.inputs()
        if "Blip" in type(self.model).__name__:
            given |= {"pixel_values": None}
        if "InstructBlip" in type(self.model).__name__:
            given |= {"qformer_input_ids": None}
        return logits(self.model, given)


def masks(name: str, model: Any, given: dict[str, Tensor], selector: str) -> list[Tensor]:
    """The places that a selector of features keeps of every image."""
    config = vitrim.parse_selector(selector)
    return [config.mask(image) for image in features(name, model, given, encode(model, given))]


@pytest.mark.sampled(4)
@every_model
def test_nothing_selected_is_the_library_and_a_selection_is_a_prompt_shortened_by_hand(name: str) -> None:
    """Logits to 1e-5 and 6 greedy tokens; several images of several sizes, padding on the left; back, bit for bit."""
    model, given = ALL[name].create(), prompt(name)
    dense, spoken = logits(model, given), greedy(model, given)
    reduction = vitrim.reduce_(model, select="divprune:keep=1")
    torch.testing.assert_close(logits(model, given), dense, atol=1e-5, rtol=1e-5)
    assert torch.equal(greedy(model, given), spoken)

    vitrim.restore_(model)
    assert "generate" not in vars(model)
    hand = ByHand(name, model, given, masks(name, model, given, "divprune:tokens=3"))
    expected = hand.logits()
    reduction = vitrim.reduce_(model, select="divprune:tokens=3")
    found = logits(model, given)
    assert reduction.image_tokens == [3, 3, 3]
    assert reduction.compact
    real = hand.short["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)
    new = greedy(model, given, 5)
    vitrim.restore_(model)
    if "Blip" not in type(model).__name__:  # which generates without the library's way
        assert torch.equal(greedy(model, hand.inputs(), 5), new)
    assert torch.equal(logits(model, given), dense)


# ---- one model, in depth ---------------------------------------------------------------------------------------------

SELECTORS = [
    *("fastervlm:tokens=9", "vispruner:tokens=9", "visionzip:tokens=9", "divprune:tokens=9", "dart:tokens=9"),
    *("cdpruner:tokens=9", "cdpruner:tokens=9,text=none", "prumerge:tokens=9", "prumerge", "prumerge:plus=true"),
    *("scope:tokens=9", "scope:tokens=9,saliency=none", "otprune:tokens=9", "vidcom2:tokens=9"),
]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("method", [None, "tome:r=2", "evit:keep_rate=0.8,blocks=[1]"])
def test_every_selector_on_a_tower_as_it_is_and_reduced(selector: str, method: str | None) -> None:
    """A prompt alone gives what it gives in a batch."""
    model, given = VLMS["llava"].create().double(), prompt("llava")
    given["pixel_values"] = given["pixel_values"].double()
    reduction = vitrim.reduce_(model, method, select=selector)
    together = logits(model, given)
    counts = reduction.image_tokens
    if "tokens=" in selector:
        assert counts == [9, 9, 9]
    assert all(0 < count <= 36 for count in counts)
    ids = given["input_ids"][1][given["attention_mask"][1].bool()][None]
    alone = logits(model, {"input_ids": ids, "pixel_values": given["pixel_values"][2:]})
    assert reduction.image_tokens == counts[2:]
    torch.testing.assert_close(together[1, -alone.shape[1] :], alone[0], atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def eyes() -> dict[str, Any]:
    """LLaVA with what its tower computes by the library's written-out attention."""
    model: Any = VLMS["llava"].create()
    given = VLMS["llava"].prompt([[7, 11], [13, 17]])
    model.set_attn_implementation("eager")
    tower, keys, queries = model.model.vision_tower, [], []
    layers = [module for module in tower.modules() if type(module).__name__ == "CLIPEncoderLayer"]
    hooks = [x.self_attn.k_proj.register_forward_hook(lambda m, a, out: keys.append(out)) for x in layers]
    hooks += [x.self_attn.q_proj.register_forward_hook(lambda m, a, out: queries.append(out)) for x in layers]
    with torch.no_grad():
        out = tower(given["pixel_values"], output_attentions=True, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    return {"model": model, "given": given, "out": out, "keys": keys, "queries": queries}


def handed(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """What the language model gets of every image, by embedding the prompt and looking where it changed."""
    seen: list[Tensor] = []

    def watch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.extend(kwargs["mm_encoder_outputs"]["image"].pooler_output)

    hook = model.model.register_forward_pre_hook(watch, with_kwargs=True)
    logits(model, given)
    hook.remove()
    return seen


def lfm2_vl() -> nn.Module:
    text = transformers.Lfm2Config(
        **{key: value for key, value in TEXT.items() if key != "head_dim"}, layer_types=["conv", "full_attention"]
    )
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.Siglip2VisionConfig(**size, patch_size=4, num_patches=36, vision_use_head=False)
    made = transformers.Lfm2VlForConditionalGeneration(
        transformers.Lfm2VlConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, downsample_factor=2)
    )
    return made.eval()


def wide(name: str) -> dict[str, Tensor]:
    """An image of 4 x 6 patches, and a square one beside it, in the form of each model."""
    patches = torch.randn(2, 36, 48, generator=torch.Generator().manual_seed(5))
    if name in ("pixtral", "mistral3"):
        return {"pixel_values": tiny.images(2), "image_sizes": torch.tensor([[16, 24], [24, 24]])}
    if name == "qwen2_vl":
        pixels = torch.randn(24 + 36, 96, generator=torch.Generator().manual_seed(5))
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 6], [1, 6, 6]])}
    rows = torch.tensor([[4, 6], [6, 6]])
    real = torch.arange(36) < rows.prod(dim=1)[:, None]
    if name == "lfm2_vl":
        return {"pixel_values": patches, "pixel_attention_mask": real.long(), "spatial_shapes": rows}
    places = torch.stack([torch.arange(36) % 6, torch.arange(36) // 6], dim=-1)  # gemma4: columns, then rows
    return {"pixel_values": patches.sigmoid(), "image_position_ids": places.where(real[..., None], -1)}


@pytest.mark.parametrize(
    ("name", "rows", "columns", "few"),
    [("pixtral", 4, 6, (2, 3)), *((name, 2, 3, (1, 2)) for name in ("mistral3", "qwen2_vl", "lfm2_vl", "gemma4"))],
)
def test_pool_knows_the_rows_of_an_image_that_is_not_square(
    name: str, rows: int, columns: int, few: tuple[int, int]
) -> None:
    """The means that ten plain lines take of the library's own features; positions of the middles of the cells."""
    model: Any = lfm2_vl() if name == "lfm2_vl" else ALL[name].create()
    images = wide(name)
    with torch.no_grad():
        output = model.base_model.get_image_features(**images, return_dict=True)
    pooled = output.pooler_output
    first = rows * columns
    whole = list(pooled.split([first, len(pooled) - first]) if isinstance(pooled, Tensor) else pooled)
    assert [len(image) for image in whole] == [first, first * 3 // 2]
    ids = torch.tensor([[7, *[IMAGE] * len(whole[0]), 9, *[IMAGE] * len(whole[1]), 11]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}
    if ALL.get(name) is not None and ALL[name].types is not None:
        given[str(ALL[name].types)] = (ids == IMAGE).long()
    reduction = vitrim.reduce_(model, select=f"pool:tokens={few[0] * few[1]}")
    found = handed(model, given)[0]
    places = reduction.image_places[0]
    expected = []
    for row in range(few[0]):
        for column in range(few[1]):
            own = [
                whole[0][r * columns + c]
                for r in range(rows)
                for c in range(columns)
                if r * few[0] // rows == row and c * few[1] // columns == column
            ]
            expected.append(torch.stack(own).mean(dim=0))
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-6, rtol=1e-6)
    middles = {(4, 6): [0, 2, 4, 12, 14, 16], (2, 3): [0, 2]}[(rows, columns)]
    assert places.kept.nonzero().squeeze(1).tolist() == middles


def test_sizes_of_whole_images_are_no_grids_of_their_tiles() -> None:
    """LLaVA-NeXT's tokens are of tiles, with one that ends every row: image_sizes, of the image, do not say where."""
    from vitrim.hosts.transformers.vlm_prompt import ImagePrompt

    model = ALL["llava_next"].create()
    given = prompt("llava_next")
    assert "image_sizes" in given
    assert ImagePrompt(None, model, given, None).patches("image") == []  # type: ignore[arg-type]


def test_visionzip_is_the_attention_of_the_block_that_the_projector_reads(eyes: dict[str, Any]) -> None:
    """Class token in front, most attended patches as they are, means added to anchors; then the projector."""
    model, given, out = eyes["model"], eyes["given"], eyes["out"]
    scores = out.attentions[-2].mean(dim=1)[:, 0, 1:]
    keys = eyes["keys"][-2].unflatten(2, (2, -1)).mean(dim=2)[:, 1:]
    hidden = out.hidden_states[-2]
    vitrim.reduce_(model, select="visionzip:tokens=10,contextual=3,order=appended")
    found = handed(model, given)
    vitrim.restore_(model)
    for image in range(2):
        order = scores[image].argsort(descending=True, stable=True)
        dominant = sorted(order[:6].tolist())
        rest = [place for place in range(36) if place not in dominant]
        anchors = rest[:: len(rest) // 3][:3]
        unit = torch.nn.functional.normalize(keys[image], dim=-1)
        merged = []
        for anchor in anchors:
            members = [
                place
                for place in rest
                if place not in anchors and max(anchors, key=lambda one: float(unit[one] @ unit[place])) == anchor
            ]
            own = hidden[image, 1:]
            merged.append(own[anchor] + (own[members].mean(dim=0) if members else 0))
        tokens = torch.cat([hidden[image, :1], hidden[image, 1:][dominant], torch.stack(merged)])
        with torch.no_grad():
            expected = model.model.multi_modal_projector(tokens)
        torch.testing.assert_close(found[image], expected, atol=1e-5, rtol=1e-5)


def test_fastervlm_and_prumerge_read_their_blocks(eyes: dict[str, Any]) -> None:
    model, given, out = eyes["model"], eyes["given"], eyes["out"]
    vitrim.reduce_(model, select="fastervlm:tokens=5")
    found = handed(model, given)
    vitrim.reduce_(model, select="prumerge:tokens=5,order=appended")
    pruned = handed(model, given)
    vitrim.restore_(model)
    scores = out.attentions[-2].mean(dim=1)[:, 0, 1:]
    wide = (eyes["queries"][-1][:, :1] @ eyes["keys"][-1].transpose(1, 2) * 32**-0.5).softmax(-1)[:, 0, 1:]
    for image in range(2):
        kept = sorted(scores[image].argsort(descending=True)[:5].tolist())
        own = out.hidden_states[-2][image, 1:]
        with torch.no_grad():
            torch.testing.assert_close(found[image], model.model.multi_modal_projector(own[kept]))
        best = wide[image].argsort(descending=True)[:4].tolist()
        unit = torch.nn.functional.normalize(eyes["keys"][-1][image, 1:], dim=-1)
        rows = []
        for place in best:
            near = [one for one in (unit @ unit[place]).argsort(descending=True).tolist() if one != place][:32]
            rows.append(own[place] + (wide[image, near, None] * own[near]).sum(0))
        others = [place for place in range(36) if place not in best]
        rows.append((wide[image, others, None] * own[others]).sum(0))
        with torch.no_grad():
            expected = model.model.multi_modal_projector(torch.stack(rows))
        torch.testing.assert_close(pruned[image], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("selector", ["fastervlm:tokens=4", "visionzip:tokens=4,contextual=1", "vispruner:tokens=4"])
def test_attention_of_a_windowed_tower_is_that_of_its_last_whole_map(selector: str) -> None:
    """By the library's written-out attention: mean over heads, sum over queries, mean over the four patches of a cell,
    and back from the order of windows. Images of two sizes; windows of 2 x 2 cells cut the larger one in four."""
    model: Any = OTHERS["qwen2_5_vl"].create()
    given = prompt("qwen2_5_vl")
    grids, tower = given["image_grid_thw"], model.model.visual
    assert (grids[0] != grids[1]).any()
    keys: list[Tensor] = []
    maps: list[Tensor] = []

    def eager(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, scaling: float, **kwargs: Any) -> Any:
        weights = (q @ k.transpose(2, 3) * scaling).softmax(-1)
        if module is tower.blocks[3].attn:
            maps.append(weights[0])
            keys.append(k[0])
        return (weights @ v).transpose(1, 2), weights

    transformers.AttentionInterface.register("written_out", eager)
    tower.config._attn_implementation = "written_out"
    images = features("qwen2_5_vl", model, given, encode(model, given))
    tower.config._attn_implementation = "sdpa"
    assert len(maps) == 3
    vitrim.reduce_(model, select=selector)
    found = handed(model, given)
    config = vitrim.parse_selector(selector)
    for own, image, weights, key, grid in zip(found, images, maps, keys, grids.tolist(), strict=True):
        rows, columns = grid[1] // 2, grid[2] // 2
        # cells in windows of 2 x 2: their raster numbers, window by window
        order = sorted(range(rows * columns), key=lambda cell: (cell // columns // 2, cell % columns // 2, cell))
        scores, metric = torch.empty(rows * columns), torch.empty(rows * columns, key.shape[2])
        for place, cell in enumerate(order):
            patches = slice(4 * place, 4 * place + 4)
            scores[cell] = weights.mean(dim=0).sum(dim=0)[patches].mean()
            metric[cell] = key.mean(dim=0)[patches].mean(dim=0)
        (choice,) = config.select(Seen(image[None], None, scores[None], metric[None]))
        torch.testing.assert_close(own, choice.of(image))


def test_dart_and_cdpruner_read_the_text_of_their_own_prompt() -> None:
    model, given = VLMS["llava"].create(), prompt("llava")
    images = features("llava", model, given, encode(model, given))
    ids, mask = given["input_ids"], given["attention_mask"].bool()
    embed = model.get_input_embeddings()
    words = [embed(row[own & (row != IMAGE)]).detach() for row, own in zip(ids, mask, strict=True)]
    for name in ("dart:tokens=6", "cdpruner:tokens=6"):
        config = vitrim.parse_selector(name)
        expected = [config.mask(x, text=words[row]) for x, row in zip(images, (0, 0, 1), strict=True)]
        vitrim.reduce_(model, select=name)
        found = handed(model, given)
        for few, image, own in zip(found, images, expected, strict=True):
            assert torch.equal(few, image[own])


def positions_of(name: str, given: dict[str, Tensor], side: str, selector: str) -> list[Tensor]:
    """The positions that the language model gets, (B, M) or four rows of them, and its mask, padded on a ``side``."""
    model, seen = ALL[name].create(), []
    if side == "right":
        order = given["attention_mask"].argsort(dim=1, descending=True, stable=True)
        per_token = {key: given[key].gather(1, order) for key in PER_TOKEN if key in given}
        given = {**given, **per_token}
    vitrim.reduce_(model, select=f"{selector},positions=original" if name == "llava" else selector)
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.extend([kwargs["position_ids"], kwargs["attention_mask"]]), with_kwargs=True
    )
    logits(model, given)
    return seen


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("selector", ["divprune:tokens=4", "divprune:keep=1"])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_padding_has_no_part_in_positions(name: str, selector: str, side: str) -> None:
    """Rotary angles do not show it: they see distances alone. The first real token of a row is at 0, and the last one
    at the number of those before it in the whole prompt. No position is negative, of padding neither."""
    given = prompt(name)
    positions, mask = positions_of(name, given, side, selector)
    assert not mask.all()
    whole = given["attention_mask"].sum(dim=1).tolist()
    first = positions if name == "llava" else positions[0]
    for row, (own, real) in enumerate(zip(first, mask.bool(), strict=True)):
        found = own[real].tolist()
        assert found[0] == 0
        assert found == sorted(set(found))
        # of three axes, the first of four rows numbers the tokens that are left
        assert found[-1] == (whole[row] if name == "llava" else int(real.sum())) - 1
    assert int(positions.min()) >= 0


@pytest.mark.parametrize("name", [name for name in ALL if name != "molmo2"])  # which refuses them
def test_kept_positions_cut_no_prompt_in_pieces(name: str) -> None:
    """Without a mask and a cache the library takes a gap in positions for the start of another prompt in the row: in a
    forward, in generation, and in what a user decodes by hand on a cache. And logits are those of the tokens asked for,
    and hidden states those of the model without its head."""
    model, given = ALL[name].create(), prompt(name, [[7, 11]])
    hand = ByHand(name, model, given, masks(name, model, given, "divprune:tokens=3"), original=True)
    expected, length = hand.logits(), given["input_ids"].shape[1]
    vitrim.reduce_(model, select="divprune:tokens=3,positions=original")
    bare = {key: value for key, value in given.items() if key != "attention_mask"}
    near = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    near(logits(model, {**bare, "use_cache": False}), expected)
    near(logits(model, bare), expected)
    if "Blip" in type(model).__name__:  # has no such arguments, and generates by its language model alone
        return
    asked = torch.tensor([0, length - 2, -1])
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        near(logits(model, {**given, "logits_to_keep": asked}), expected[:, [0, -2, -1]])
    with pytest.raises(vitrim.VitrimError, match="image tokens that went"):
        logits(model, {**given, "logits_to_keep": torch.arange(length)})
    with torch.no_grad():
        inner = model.base_model(**bare, use_cache=False)
    assert getattr(inner, "last_hidden_state", inner[0]).shape[:2] == expected.shape[:2]  # Llama 4's has a head
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "output_logits": True}
    whole = model.generate(**given, **options, return_dict_in_generate=True)
    spoken = torch.stack(whole.logits, dim=1)
    near(spoken[:, 0], expected[:, -1])
    again = model.generate(**given, **options, return_dict_in_generate=True, use_cache=False)
    near(torch.stack(again.logits, dim=1), spoken)
    types = {key: torch.zeros(1, 1, dtype=torch.long) for key in given if key.endswith("token_type_ids")}
    with torch.no_grad():
        step = model(**bare, use_cache=True)
        for place in range(2):
            token = whole.sequences[:, length + place, None]
            step = model(input_ids=token, past_key_values=step.past_key_values, use_cache=True, **types)
            near(step.logits[:, -1], spoken[:, place + 1])


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("keep", ["divprune:keep=1", "divprune:tokens=3"])
def test_answers_continue_behind_the_whole_image_where_a_prompt_ends_in_one(name: str, keep: str) -> None:
    """However they are made. Each step is a forward of the library on all tokens, at the positions that they have.

    In generation, transformers itself continues rows and columns of the last token, but not in a forward.
    """
    model, given = ALL[name].create(), prompt(name, [[7, 11, 5]])
    given = {key: value[:, :-2] if key in PER_TOKEN else value for key, value in given.items()}
    own = {key: given[key] for key in ("mm_token_type_ids", "image_grid_thw") if key in given}
    ids, mask, new = given["input_ids"], given["attention_mask"], 4
    assert ids[0, -1] == IMAGE
    axes = hasattr(model.base_model, "get_rope_index")
    behind = (
        int(model.base_model.get_rope_index(ids, attention_mask=mask, **own)[0].max()) + 1 if axes else ids.shape[1]
    )
    hand = ByHand(name, model, given, masks(name, model, given, keep), original=True)
    assert keep == "divprune:keep=1" or hand.short["position_ids"][-1].flatten()[-1] + 1 < behind
    inputs, words, expected = hand.inputs() | {"use_cache": False}, torch.zeros(1, 0, dtype=torch.long), []
    for step in range(new):
        expected.append(logits(model, {**inputs, "mm_encoder_outputs": {"image": copy.copy(hand.output)}})[:, -1])
        words = torch.cat([words, expected[-1].argmax(dim=-1, keepdim=True)], dim=1)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], words[:, -1:]], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for types in inputs.keys() & {"mm_token_type_ids"}:
            inputs[types] = torch.nn.functional.pad(inputs[types], (0, 1))
        place = inputs["position_ids"][..., -1:] * 0 + behind + step
        if axes:
            place[0] = inputs["position_ids"][0, :, -1:] + 1
        inputs["position_ids"] = torch.cat([inputs["position_ids"], place], dim=-1)

    near = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    vitrim.reduce_(model, select=keep if axes else f"{keep},positions=original")
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "output_logits": True}
    for cached in (True, False):
        out = model.generate(**given, **options, return_dict_in_generate=True, use_cache=cached)
        assert torch.equal(out.sequences[:, -new:], words)
        near(torch.stack(out.logits, dim=1), torch.stack(expected, dim=1))
    one = options | {"max_new_tokens": 1, "min_new_tokens": 1}
    first = model.generate(**given, **one, return_dict_in_generate=True)
    with torch.no_grad():
        for step in (model(**given, use_cache=True), first):
            for place in range(new - 1):
                token = words[:, place, None]
                step = model(input_ids=token, past_key_values=step.past_key_values, use_cache=True)
                near(step.logits[:, -1], expected[place + 1])
    likeliest = options | {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "output_logits": False}
    twice = {key: torch.cat([value, value]) for key, value in given.items()}
    assert torch.equal(model.generate(**twice, **likeliest)[:, -new:], words.expand(4, -1))


def test_images_that_touch_are_refused_where_the_library_takes_them_for_one() -> None:
    model, given = ALL["qwen2_vl"].create(), prompt("qwen2_vl", [[7, 11, 5]])
    first = int((given["input_ids"][0] == 11).nonzero())
    given = {
        key: torch.cat([value[:, :first], value[:, first + 2 :]], dim=1) if key in PER_TOKEN else value
        for key, value in given.items()
    }
    vitrim.reduce_(model, select="divprune:tokens=3")
    with pytest.raises(vitrim.VitrimError, match=r"^images touch in the prompt, .* put a token between them"):
        logits(model, given)


def packed_row(name: str) -> dict[str, Tensor]:
    """Two prompts of one image each, packed in one row: positions begin again."""
    tokens = VLMS[name].tokens
    rows = [[7, *[IMAGE] * tokens, 8, 9, 10], [11, 12, *[IMAGE] * tokens, 13]]
    positions = [place for row in rows for place in range(len(row))]
    ids = torch.tensor([[token for row in rows for token in row]])
    return {"input_ids": ids, "position_ids": torch.tensor([positions]), "pixel_values": tiny.images(2)}


@pytest.mark.parametrize("name", ["llava", "internvl"])
@pytest.mark.parametrize("options", [("tome:r=2", None), (None, "divprune:tokens=4")])
def test_packed_prompts_give_what_each_gives_alone(name: str, options: tuple[str | None, str | None]) -> None:
    model, given = VLMS[name].create(), packed_row(name)
    half = VLMS[name].tokens + 4
    vitrim.reduce_(model, options[0], select=options[1], compact=True)
    together = logits(model, {**given, "use_cache": False})
    parts = zip(given["input_ids"].split([half, half - 1], dim=1), given["pixel_values"].split(1), strict=True)
    alone = [logits(model, {"input_ids": ids, "pixel_values": image}) for ids, image in parts]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)
    vitrim.reduce_(model, select="divprune:tokens=4,positions=original")
    with pytest.raises(vitrim.VitrimError, match=r"^prompts packed in one row cannot be told apart"):
        logits(model, {**given, "use_cache": False})


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_four_rows_of_positions_give_what_the_model_counts_itself(name: str) -> None:
    """Without mask and cache, where the first row says which prompts are packed."""
    model, given = ALL[name].create(), prompt(name, [[7, 11]])
    own = {key: given[key] for key in ("mm_token_type_ids", "image_grid_thw")}
    three = model.model.get_rope_index(given["input_ids"], **own)[0]
    four = torch.cat([torch.arange(three.shape[2]).view(1, 1, -1), three])
    vitrim.reduce_(model, select="divprune:tokens=4")
    expected = logits(model, given)
    bare = {key: value for key, value in given.items() if key != "attention_mask"} | {"use_cache": False}
    for positions in (three, four):
        found = logits(model, {**bare, "position_ids": positions})
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_logits_are_those_of_the_tokens_asked_for() -> None:
    """Places in every row, row by row, or a mask, of a batch whose rows lose different numbers of tokens."""
    model, given = VLMS["llava"].create(), prompt("llava")
    vitrim.reduce_(model, select="divprune:tokens=4")
    full, mask, length = logits(model, given), given["attention_mask"].bool(), given["input_ids"].shape[1]
    near = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    near(logits(model, {**given, "logits_to_keep": torch.tensor([length - 1, -2])}), full[:, [-1, -2]])
    first = mask.long().argmax(dim=1, keepdim=True)
    rows = torch.cat([first, torch.full_like(first, length - 1)], dim=1)
    starts = full.shape[1] - torch.tensor([7 + 6, 3 + 4])  # text and images of each row
    near(
        logits(model, {**given, "logits_to_keep": rows}),
        torch.stack([full[row, [int(start), -1]] for row, start in enumerate(starts)]),
    )
    words = mask & (given["input_ids"] != IMAGE)
    texts = logits(model, {**given, "logits_to_keep": words})
    assert len(texts) == int(words.sum())
    near(texts[-1], full[1, -1])
    with pytest.raises(vitrim.VitrimError, match="expected logits_to_keep among"):
        logits(model, {**given, "logits_to_keep": torch.tensor([length])})
    ids = torch.tensor([[IMAGE, IMAGE, 6, 7], [6, 7, IMAGE, IMAGE]])
    kept = torch.tensor([[False, True, True, True], [True, True, False, True]])
    with pytest.raises(vitrim.VitrimError, match="stand at different places"):
        trimmed({"input_ids": ids, "logits_to_keep": torch.tensor([1])}, ["input_ids"], kept, 0)
    with pytest.raises(vitrim.VitrimError, match=r"^cu_seq_lens_q counts the tokens of the whole prompt"):
        model(**given, cu_seq_lens_q=torch.tensor([0, length]))


def test_tokens_in_front_have_the_first_places() -> None:
    """A class token and four patches, of which the second and the last go on."""
    features = torch.arange(10.0).view(5, 2)
    taken = Candidates(features, torch.ones(5, dtype=torch.bool), front=1).chosen(Choice(torch.tensor([1, 3])))
    assert torch.equal(taken.features, features[[0, 2, 4]])
    assert taken.rows.tolist() == [0, 2, 4]
    assert taken.flags.tolist() == taken.places.kept.tolist() == [True, False, True, False, True]


def test_features_without_a_place_of_their_own_have_the_first_free_ones() -> None:
    """Of six tokens behind a class token the third, a merged one, and one without a place go on."""
    features = torch.arange(14.0).view(7, 2)
    places = torch.tensor([True, False, True, True, False, True, True, True, True])
    choice = Choice(torch.tensor([1, 3]), end=torch.zeros(1, 2), merged=torch.tensor([False, True]))
    taken = Candidates(features, places, front=1).chosen(choice)
    assert taken.rows.tolist() == [0, 2, 4, 1]
    assert taken.flags.nonzero().flatten().tolist() == [0, 2, 3, 6]
    assert taken.places.kept.nonzero().flatten().tolist() == [0, 3, 6]
    assert taken.places.merged.nonzero().flatten().tolist() == [6]
    assert taken.places.extra == 1


class Noted:
    """What a block computed, of one image: a class token and patches."""

    def __init__(self, scores: list[float], keys: list[float]) -> None:
        self.scores = torch.tensor([scores])
        self.k = torch.tensor([keys])[:, None, :, None]
        self.q = self.k * 10

    def class_mean(self) -> Tensor:
        return self.scores


def test_attention_is_the_mean_over_a_cell_s_patches_and_is_read_at_survivors() -> None:
    """A grid of 4 x 4 in cells of 2 x 2: three patches stand in the first, one in the third, and one is padding."""
    state: Any = SimpleNamespace(
        num_prefix=1,
        initial_patches=16,
        position=torch.tensor([[0, 1, 2, 5, 9, 16]]),
        mask=torch.tensor([[True, True, True, True, True, False]]),
    )
    note: Any = Noted([9.0, 1.0, 3.0, 8.0, 5.0, 70.0], [7.0, 2.0, 4.0, 9.0, 6.0, 50.0])
    found = attended([(0, note, state, (3,))], class_token=True, wide=True, cell=2, raster=True)
    assert list(found) == [3]
    assert found[3].scores.tolist() == [4.0, 0.0, 5.0, 0.0]
    assert found[3].keys.flatten().tolist() == [5.0, 0.0, 6.0, 0.0]
    seen = found[3].at(torch.tensor([2, 0]))
    assert seen["scores"].tolist() == [5.0, 4.0]
    assert seen["keys"].flatten().tolist() == [6.0, 5.0]
    assert seen["query"].tolist() == [70.0]
    assert seen["wide_keys"].flatten().tolist() == [7.0, 6.0, 5.0]


def test_an_error_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A selector in front of the connector fails in one forward; the next one, and the model restored, are right."""
    model, given = VLMS["llava"].create(), prompt("llava")
    dense = logits(model, given)
    vitrim.reduce_(model, select="visionzip:tokens=9")
    expected = logits(model, given)
    with monkeypatch.context() as failing:
        failing.setattr("vitrim.selectors.visionzip.VisionZip.select", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(model, given)
    assert not model.model.multi_modal_projector._forward_pre_hooks
    assert torch.equal(logits(model, given), expected)
    vitrim.restore_(model)
    assert torch.equal(logits(model, given), dense)


def shown(model: Any, given: dict[str, Tensor]) -> list[Seen]:
    """What selectors see in a forward."""
    seen: list[Seen] = []
    kind = type(vitrim.get_reduction(model).select)

    def select(self: Any, one: Seen) -> Any:
        seen.append(one)
        return original(self, one)

    original = kind.select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "select", select)
        logits(model, given)
    return seen


def test_two_videos_of_one_size_have_their_own_grids() -> None:
    """4 frames of 3 x 3 cells, and 2 of 3 x 6: 36 tokens each, and another choice by frames."""
    model = OTHERS["qwen2_5_vl"].create()
    grids = torch.tensor([[4, 6, 6], [2, 6, 12]])
    patches = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(5))
    ids = torch.tensor([[7, *[3] * 36, 8, *[3] * 36, 9]])
    given = {"input_ids": ids, "mm_token_type_ids": 2 * (ids == 3).long(), "pixel_values_videos": patches}
    vitrim.reduce_(model, select="evs:keep=0.4")
    seen = shown(model, {**given, "video_grid_thw": grids})
    assert sorted(one.grid for one in seen if one.grid) == [(2, 3, 6), (4, 3, 3)]


@pytest.mark.parametrize("name", ["llava_full", "qwen2_vl"])
def test_images_of_a_batch_are_chosen_from_as_each_alone(name: str) -> None:
    """Attention and places are those of the image itself: of two sizes, and with a class token in front."""
    model, given = VLMS[name].create().double(), prompt(name, [[7, 11, 13, 17]])
    given["pixel_values"] = given["pixel_values"].double()
    reduction = vitrim.reduce_(model, "tome:r=1", select="fastervlm:tokens=5")
    logits(model, given)
    together = [image.kept for image in reduction.image_places]
    class_token = int(name == "llava_full")  # has a place, too; each of 4 blocks takes one patch, or cell of patches
    wanted = [min(5, len(kept) - class_token - 4) + class_token for kept in together]
    assert [int(kept.sum()) for kept in together] == wanted
    first = 0
    for number, kept in enumerate(together):
        one = prompt(name, [[7, 11]])
        one["input_ids"] = torch.tensor([[7, *[IMAGE] * len(kept), 11]])
        one["attention_mask"] = torch.ones_like(one["input_ids"])
        if "image_grid_thw" in one:
            grid = given["image_grid_thw"][number : number + 1]
            patches = int(grid.prod())
            one |= {"image_grid_thw": grid, "mm_token_type_ids": (one["input_ids"] == IMAGE).long()}
            one["pixel_values"] = given["pixel_values"][first : first + patches]
            first += patches
        else:
            one["pixel_values"] = given["pixel_values"][number : number + 1]
        logits(model, one)
        assert torch.equal(reduction.image_places[0].kept, kept)


FORMS = [
    name
    for name in ("llava", "internvl", "qwen2_5_vl", "qwen3_vl_moe", "idefics2", "llama4", "glm4v", "llava_next")
    if name in ALL
]
"""One family for every form in which features are handed on."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORMS)
def test_labels_give_the_loss_and_the_gradients_of_the_shorter_prompt(name: str) -> None:
    model, given = ALL[name].create(), prompt(name)
    given["labels"] = torch.where(given["attention_mask"].bool(), given["input_ids"], -100)
    kept = masks(name, model, given, "divprune:tokens=3")
    expected = model(**ByHand(name, model, given, kept).inputs()).loss
    expected.backward()
    words = model.get_input_embeddings().weight
    right, words.grad = words.grad, None
    vitrim.reduce_(model, select="divprune:tokens=3")
    loss = model(**given).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    torch.testing.assert_close(words.grad, right, atol=1e-6, rtol=1e-4)
    assert any("vision" in name or "visual" in name for name, p in model.named_parameters() if given_gradient(p))


def given_gradient(parameter: Tensor) -> bool:
    """True if a gradient that is not zero reached it: through what was kept."""
    return parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORMS)
def test_half_precision_is_that_of_the_shorter_prompt(name: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        model, given = ALL[name].create().to(dtype), prompt(name)
        given["pixel_values"] = given["pixel_values"].to(dtype)
        hand = ByHand(name, model, given, masks(name, model, given, "divprune:tokens=3"))
        expected = hand.logits()
        vitrim.reduce_(model, select="divprune:tokens=3")
        found, real = logits(model, given), hand.short["attention_mask"].bool()
        assert found.dtype == dtype
        torch.testing.assert_close(found[real], expected[real])


def test_threads_share_a_model() -> None:
    """A selector in front of the connector cuts the tokens of its own thread alone."""
    model = VLMS["llava"].create()
    one, two = VLMS["llava"].prompt([[7, 11]]), VLMS["llava"].prompt([[7, 11, 13], [17, 19]])
    vitrim.reduce_(model, select="visionzip:tokens=9")
    prompts = [one, two] * 6
    expected = [logits(model, given) for given in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda given: logits(model, given), prompts))
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right)


def test_merged_tokens_carry_gradients_too() -> None:
    model, given = VLMS["llava"].create(), prompt("llava")
    vitrim.reduce_(model, select="visionzip:tokens=6")
    model(**given, labels=given["input_ids"]).loss.backward()
    assert model.model.vision_tower.get_submodule("embeddings").class_embedding.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_text_only_and_two_turns_on_a_cache(name: str) -> None:
    model, given = ALL[name].create(), prompt(name)
    words = {"input_ids": torch.tensor([[7, 8, 9]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    expected = logits(model, words)
    one = prompt(name, [[7, 11]])
    vitrim.reduce_(model, select="divprune:tokens=4")
    torch.testing.assert_close(logits(model, words), expected)
    with torch.no_grad():
        first = model(**one, use_cache=True)
        length = first.logits.shape[1]
        assert length == 4 + 3
        more = torch.tensor([[21, 22]])
        second = model(input_ids=more, past_key_values=first.past_key_values).logits
    longer = {key: value for key, value in one.items() if key not in PER_TOKEN}
    longer["input_ids"] = torch.cat([one["input_ids"], more], dim=1)
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    if "mm_token_type_ids" in one:
        longer["mm_token_type_ids"] = (longer["input_ids"] == IMAGE).long()
    torch.testing.assert_close(second, logits(model, longer)[:, -2:], atol=1e-5, rtol=1e-5)
    assert logits(model, given).shape[0] == 2


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "internvl"])
def test_beams_and_sampling_are_those_of_the_shorter_prompt(name: str) -> None:
    model, given = ALL[name].create(), prompt(name)
    hand = ByHand(name, model, given, masks(name, model, given, "divprune:tokens=4"))
    for options in ({"num_beams": 2}, {"do_sample": True}):
        vitrim.restore_(model)
        torch.manual_seed(0)
        expected = model.generate(**hand.inputs(), max_new_tokens=4, **options)[:, -4:]
        vitrim.reduce_(model, select="divprune:tokens=4")
        torch.manual_seed(0)
        found = model.generate(**given, max_new_tokens=4, **options)
        assert torch.equal(found[:, : given["input_ids"].shape[1]], given["input_ids"])
        assert torch.equal(found[:, -4:], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_selector_in_half_precision(dtype: torch.dtype) -> None:
    model = VLMS["llava"].create().to(dtype)
    given = prompt("llava")
    given["pixel_values"] = given["pixel_values"].to(dtype)
    for selector in SELECTORS[:8]:
        reduction = vitrim.reduce_(model, select=selector)
        assert logits(model, given).dtype == dtype
        assert reduction.image_tokens == [9, 9, 9]


def video(frames: int = 4) -> dict[str, Tensor]:
    """A prompt with one video of 6 x 6 patches a frame, in Qwen's form."""
    patches = torch.randn(frames * 36, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(5))
    ids = torch.tensor([[7, *[3] * (frames * 9), 8, 9]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": 2 * (ids == 3).long(),
        "pixel_values_videos": patches,
        "video_grid_thw": torch.tensor([[frames, 6, 6]]),
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("selector", ["evs:keep=0.4", "divprune:keep=0.4", "vidcom2:keep=0.4", "vcast:keep=0.4"])
def test_videos_of_qwen_are_cut_and_keep_time_rows_and_columns(name: str, selector: str) -> None:
    model, given = ALL[name].create(), video()
    if name == "qwen3_vl":  # a timestamp before every frame
        ids = torch.tensor([[7, *[token for frame in range(4) for token in (20 + frame, *[3] * 9)], 8, 9]])
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": 2 * (ids == 3).long()}
    dense = logits(model, given)
    output = encode(model, given, "video")
    config = vitrim.parse_selector(selector)
    mask = config.mask(output.pooler_output[0], (4, 3, 3))
    assert int(mask.sum()) == config.count((4, 3, 3))
    flags = iter(mask.tolist())
    stay = [place for place, token in enumerate(given["input_ids"][0].tolist()) if token != 3 or next(flags)]
    own = {key: given[key] for key in ("mm_token_type_ids", "video_grid_thw", "attention_mask")}
    places, _ = model.model.get_rope_index(given["input_ids"], **own)
    output.pooler_output = [output.pooler_output[0][mask]]
    if getattr(output, "deepstack_features", None) is not None:
        output.deepstack_features = [[layer[0][mask]] for layer in output.deepstack_features]
    short = {key: given[key][:, stay] for key in ("input_ids", "attention_mask", "mm_token_type_ids")}
    positions = torch.cat([torch.arange(len(stay))[None, None], places[:, :, stay]])
    expected = logits(model, {**short, "position_ids": positions, "mm_encoder_outputs": {"video": output}})
    reduction = vitrim.reduce_(model, select=selector)
    torch.testing.assert_close(logits(model, given), expected, atol=1e-5, rtol=1e-5)
    assert reduction.image_tokens == [config.count((4, 3, 3))]
    assert greedy(model, given, 3).shape == (1, 3)
    vitrim.reduce_(model, select="evs:keep=1")
    torch.testing.assert_close(logits(model, given), dense, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("selector", ["divprune:tokens=6", "evs:keep=0.5", "vidcom2:keep=0.3", "pool:keep=0.4"])
def test_videos_of_llava_onevision(selector: str) -> None:
    """Frames of 3 x 3 tokens, of 5 x 5 patches, and one that ends them and stays; two rows, one of them padded."""
    usual = OTHERS["llava_onevision"].create()
    usual.config.vision_config.image_size = 20
    model = type(usual)(usual.config).eval()
    ids = torch.tensor([[7, *[3] * 28, 8, 9], [0, 7, *[3] * 28, 8]])
    frames = torch.randn(2, 3, 3, 20, 20, generator=torch.Generator().manual_seed(4))
    given = {"input_ids": ids, "attention_mask": (ids != 0).long(), "pixel_values_videos": frames}
    dense = logits(model, given)
    output = encode(model, given, "video")
    config, grid = vitrim.parse_selector(selector), (3, 3, 3)
    choices = [config.select(Seen(one[None, :27], grid))[0] for one in output.pooler_output]
    kept = [torch.zeros(28).bool().index_fill(0, torch.cat([own.kept, torch.tensor([27])]), True) for own in choices]
    flags = iter(torch.cat(kept).tolist())
    stay = [[place for place, token in enumerate(row) if token != 3 or next(flags)] for row in ids.tolist()]
    short = torch.stack([row[own] for row, own in zip(ids, stay, strict=True)])
    videos = zip(output.pooler_output, choices, strict=True)
    output.pooler_output = torch.stack([torch.cat([own.of(one[:27]), one[27:]]) for one, own in videos])
    by_hand = {"input_ids": short, "attention_mask": (short != 0).long(), "mm_encoder_outputs": {"video": output}}
    expected = logits(model, by_hand)
    reduction = vitrim.reduce_(model, select=selector)
    found = logits(model, given)
    real = by_hand["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)
    assert reduction.image_tokens == [config.count(grid) + 1] * 2
    assert all(places.kept[27] and not places.merged[27] for places in reduction.image_places)
    new = greedy(model, given, 3)
    vitrim.reduce_(model, select="divprune:keep=1")
    torch.testing.assert_close(logits(model, given), dense, atol=1e-5, rtol=1e-5)
    vitrim.restore_(model)
    assert torch.equal(greedy(model, by_hand, 3), new)


def test_videos_behind_a_reduced_tower_are_refused() -> None:
    model = VLMS["qwen2_vl"].create()
    for method, selector in (("tome:r=1", "evs"), (None, "fastervlm")):
        vitrim.reduce_(model, method, select=selector)
        with pytest.raises(vitrim.VitrimError, match="selected behind a tower as it is"):
            logits(model, video())


# ---- the handle ------------------------------------------------------------------------------------------------------


def test_the_handle_says_what_is_selected_and_goes_with_copies() -> None:
    model, given = OTHERS["qwen2_5_vl"].create(), prompt("qwen2_5_vl")
    reduction = vitrim.reduce_(model, select="divprune:tokens=4")
    assert str(reduction) == "none, select divprune:tokens=4 on Qwen2_5_VLForConditionalGeneration"
    assert reduction.select == vitrim.parse_selector("divprune:tokens=4")
    assert vitrim.get_reduction(model) is reduction
    expected = logits(model, given)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other, given), expected)
        assert vitrim.get_reduction(other).image_tokens == [4, 4, 4]
        vitrim.restore_(other)
        assert logits(other, given).shape[1] > expected.shape[1]
    for ask in (lambda: reduction.tokens_per_block, lambda: reduction.set(r=3), lambda: reduction.config_with(r=3)):
        with pytest.raises(vitrim.VitrimError):
            ask()
    with vitrim.reduced(model, select="divprune:tokens=2"):
        assert logits(model, given).shape[1] < expected.shape[1]
    assert torch.equal(logits(model, given), expected)
    assert vitrim.get_reduction(model) is reduction
    with pytest.raises(vitrim.UnsupportedModelError):
        vitrim.reduce_(model, "tome:r=1", select="divprune")
    assert torch.equal(logits(model, given), expected)


@pytest.mark.parametrize("method", [None, "tome:r=2"])
def test_a_selector_is_replaced_between_forwards(method: str | None) -> None:
    """Also with options of the method; one that asks other things of the model is refused, and nothing changes."""
    model, given = VLMS["llava"].create(), prompt("llava")
    vitrim.reduce_(model, "tome:r=3" if method else None, select="cdpruner:tokens=7")
    expected = logits(model, given)
    reduction = vitrim.reduce_(model, method, select="divprune:tokens=4")
    assert logits(model, given).shape[1] < expected.shape[1]
    reduction.set(select="cdpruner:tokens=7", **({"r": 3} if method else {}))
    assert torch.equal(logits(model, given), expected)
    assert reduction.image_tokens == [7, 7, 7]
    assert reduction.select == vitrim.parse_selector("cdpruner:tokens=7")
    for wrong in ("fastervlm:tokens=7", "divprune:tokens=7,positions=original", "divprune:token=7"):
        with pytest.raises(vitrim.VitrimError):
            reduction.set(select=wrong)
    assert torch.equal(logits(model, given), expected)
    with pytest.raises(vitrim.VitrimError, match="no selector is behind this tower"):
        vitrim.reduce_(model, "tome:r=2", compact=True).set(select="divprune")


@pytest.mark.parametrize(
    ("method", "select"), [(None, "divprune:tokens=4"), ("tome:r=2", "divprune:tokens=4"), ("tome:r=2", None)]
)
def test_a_saved_selection_is_loaded(method: str | None, select: str | None, tmp_path: Path) -> None:
    model, given = VLMS["llava"].create(), prompt("llava")
    saved = vitrim.reduce_(model, method, select=select, compact=True)
    expected = logits(model, given)
    model.save_pretrained(tmp_path)
    fresh = type(model).from_pretrained(tmp_path).eval()
    reduction = vitrim.Reduction.load(fresh, tmp_path)
    torch.testing.assert_close(logits(fresh, given), expected)
    assert (reduction.select, reduction.compact) == (saved.select, True)


@pytest.mark.parametrize(
    ("name", "method", "selector", "message"),
    [
        ("llava", None, None, "expected a method such as"),
        ("llava", None, "divprun", "unknown selector 'divprun'"),
        ("paligemma", None, "prumerge", "needs the attention of a class token"),
        ("qwen2_vl", None, "divprune:positions=closed", "have three axes"),
        ("molmo2", None, "divprune:positions=original", "takes gaps in positions for the starts of packed prompts"),
        ("qwen2_vl", None, "visionzip:order=appended", "no original positions"),
        ("qwen2_5_vl", "tome:r=1", "visionzip", "Qwen2.5-VL attends within windows"),
        ("qwen2_5_vl", None, "prumerge", "no original positions"),
        ("qwen3_vl_moe", None, "fastervlm", "needs no attention"),
        ("llava_next", "tome:r=1", "divprune", "use compact=False"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_stays(
    name: str, method: str | None, selector: str | None, message: str
) -> None:
    model = ALL[name].create()
    with pytest.raises(vitrim.VitrimError, match=message):
        vitrim.reduce_(model, method, select=selector)
    assert "vitrim_reduction" not in vars(model)
    assert "generate" not in vars(model)


def mllama() -> nn.Module:
    vision = {"hidden_size": 16, "attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_global_layers": 1, "image_size": 24, "patch_size": 4, "vision_output_dim": 32}
    text = {**TEXT, "cross_attention_layers": [1]}
    config = transformers.MllamaConfig(
        vision_config={**vision, "intermediate_layers_indices": [0]}, text_config=text, image_token_index=IMAGE
    )
    return transformers.MllamaForConditionalGeneration(config)


def florence2() -> nn.Module:
    sizes = {"embed_dim": [8, 8, 8, 16], "num_heads": [2] * 4, "num_groups": [2] * 4, "depths": [1] * 4}
    text = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    text |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 60, "model_type": "bart"}
    config = transformers.Florence2Config(
        vision_config={**sizes, "projection_dim": 16}, text_config=text, image_token_id=IMAGE
    )
    return transformers.Florence2ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (tiny.vit, "select is for vision-language models"),
        (mllama, r"^MllamaForConditionalGeneration attends to images from layers of its own .*such as LLaVA"),
        (florence2, r"^Florence2ForConditionalGeneration takes no features in place .*Selector.mask"),
    ],
)
@pytest.mark.parametrize("selector", ["divprune", "fastervlm"])
def test_other_models_are_refused(create: Callable[[], nn.Module], message: str, selector: str) -> None:
    """In one line that says what to use."""
    model = create()
    with pytest.raises(vitrim.UnsupportedModelError, match=message):
        vitrim.reduce_(model, select=selector)
    assert "vitrim_reduction" not in vars(model)


@pytest.mark.slow
def test_the_form_of_positions_is_known_of_every_family() -> None:
    """Of all in the library that give positions axes: four rows where its code says so, and a refusal elsewhere."""
    four, families, borrowed = set(), {}, {"glm46v": "Glm4vTextModel", "minicpmv4_7": "Qwen3_5TextModel"}
    refused = {"cosmos3_omni", "hunyuan_vl"}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = file.read_text()
        if "def get_rope_index" not in text or "mm_encoder_outputs" not in text:
            continue
        parts = re.split(r"^class (\w+)", text, flags=re.MULTILINE)
        own = {
            name for name, body in zip(parts[1::2], parts[2::2], strict=True) if "position_ids.shape[0] == 4" in body
        }
        own = {name for name in own if name.endswith("TextModel")}  # others make speech
        four |= own
        families[file.parent.name] = own
    assert {"qwen2_vl", "glm4v", "paddleocr_vl"} <= set(families)
    # a family of a newer release is in no table, and so is refused by name
    assert not {name for own in families.values() for name in own & FOUR_ROWS} - four
    assert {"Qwen2VLTextModel", "Glm4vTextModel", "PaddleOCRTextModel"} <= four & FOUR_ROWS
    unknown = {name for name, own in families.items() if not own and borrowed.get(name) not in FOUR_ROWS}
    assert refused & set(families) <= unknown
    for kind in (getattr(transformers, name) for name in FOUR_ROWS & set(dir(transformers))):
        assert kind.__name__ in four or kind.__module__ in not_yet(), f"the code of {kind} reads no four rows"


@pytest.mark.parametrize("options", [{"method": "tome:r=2", "compact": True}, {"select": "divprune:tokens=3"}])
def test_what_speaks_without_taking_features_is_refused(options: dict[str, Any]) -> None:
    """As T5Gemma 2 does; the model in it would be given another prompt than what speaks around it knows."""

    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = VLMS["llava"].create().model

        def generate(self) -> None: ...

    Deaf.__module__ = "transformers.models.deaf"
    model = Deaf()
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^Deaf takes no features .* as the LlavaModel in it does"):
        vitrim.reduce_(model, **options)
    model.inner.generate = model.generate  # as in Qwen's Omni models, whose part speaks by itself
    vitrim.reduce_(model, **options)
    vitrim.restore_(model)
    Deaf.__module__ = __name__  # a user's own may do as it likes
    vitrim.reduce_(model, **options)


def around(name: str) -> nn.Module:
    """A class of the library around a tiny vision-language model."""
    config: Any = VLMS["gemma3"].create().config
    if name == "ShieldGemma2ForImageClassification":
        parts = {key: getattr(config, key) for key in ("text_config", "vision_config", "image_token_id")}
        config = transformers.ShieldGemma2Config(**parts, mm_tokens_per_image=config.mm_tokens_per_image)
        config.yes_token_index, config.no_token_index = 3, 4
    config.pad_token_id = 0
    return getattr(transformers, name)(config).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{"method": "tome:r=1", "compact": True}, {"select": "divprune:tokens=3"}])
def test_what_reads_the_prompt_around_a_model_is_refused(options: dict[str, Any]) -> None:
    """Before the first edit, in one line; with the whole prompt it works as ever."""
    name = "Gemma3ForSequenceClassification"  # reads the last token by the whole prompt
    model = around(name)
    before = {key: dict(vars(part)) for key, part in model.named_modules()}
    with pytest.raises(vitrim.UnsupportedModelError) as error:
        vitrim.reduce_(model, **options)
    message = str(error.value)
    assert message.startswith(f"{name} takes no features in place of images")
    assert message.endswith("leave the selector out" if "select" in options else "which reduces the tower")
    assert {key: dict(vars(part)) for key, part in model.named_modules()} == before
    vitrim.reduce_(model, "tome:r=1")
    assert vitrim.get_reduction(model) is not None
    vitrim.restore_(model)


def test_what_reads_the_last_logits_alone_may_be_around_a_model() -> None:
    """ShieldGemma 2's two answers are those of the last logits that its model gives for the shorter prompt."""
    model: Any = around("ShieldGemma2ForImageClassification")
    given = prompt("gemma3")
    reduction = vitrim.reduce_(model, select="divprune:tokens=3")
    found = logits(model, given)
    assert reduction.image_tokens == [3, 3, 3]
    torch.testing.assert_close(found, logits(model.model, given)[:, -1, [3, 4]])


def test_a_family_that_a_new_release_adds_is_refused_by_name() -> None:
    """Positions with axes of a form that no table knows; and the Llama 4 that fails by itself, on that version."""

    class NewTextModel(nn.Module):
        pass

    model = OTHERS["glm4v"].create()
    model.get_decoder = NewTextModel  # type: ignore[assignment]
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^positions of Glm4vForConditionalGeneration have axes"):
        vitrim.reduce_(model, select="divprune:tokens=3")
    assert "vitrim_reduction" not in vars(model)
    if "llama4" not in ALL:
        with pytest.raises(vitrim.UnsupportedModelError, match=r"^the forward of Llama 4 fails by itself"):
            vitrim.reduce_(OTHERS["llama4"].create(), select="divprune:tokens=3")
