"""Fewer image tokens for a language model: prompts follow the tower, and everything else stays as it was."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

import tiny
import vitrim
from tiny_vlms import IMAGE, SECOND, VLMS, llava
from vitrim.hosts.shared.compact import trimmed

TEXTS = [[7, 11, 13], [17, 19]]
"""Two prompts: the first with two images, the second with one."""

every_model = pytest.mark.parametrize("name", VLMS)


def sizes(name: str, images: int, less: int = 0) -> list[int]:
    """Image tokens of some images, of which every second may be smaller."""
    own = [VLMS[name].tokens, SECOND.get(name, VLMS[name].tokens)] * images
    return [size - less for size in own[:images]]


def prompt(name: str) -> dict[str, Tensor]:
    return VLMS[name].prompt(TEXTS, sizes(name, 3))


def logits(model: Any, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**given).logits  # type: ignore[no-any-return]


def greedy(model: Any, given: dict[str, Tensor], new: int = 6) -> Tensor:
    return model.generate(**given, max_new_tokens=new, min_new_tokens=new, do_sample=False)  # type: ignore[no-any-return]


class Prefill:
    """Counts the tokens that the language model gets in its first forward."""

    def __init__(self, model: Any) -> None:
        self.lengths: list[int] = []
        decoder = model.get_decoder()
        self.hook = decoder.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.lengths.append(kwargs["inputs_embeds"].shape[1])


@pytest.mark.sampled(4)
@every_model
def test_reducing_nothing_is_the_unreduced_model_and_merging_shortens_the_prompt(name: str) -> None:
    """Logits to 1e-5 and 6 greedy tokens; then as many image tokens less as were asked for; then back, bit for bit."""
    model, given = VLMS[name].create(), prompt(name)
    dense, spoken = logits(model, given), greedy(model, given)
    reduction = vitrim.reduce_(model, "tome:r=0", compact=True)
    torch.testing.assert_close(logits(model, given), dense, atol=1e-5, rtol=1e-5)
    assert torch.equal(greedy(model, given), spoken)
    assert reduction.image_tokens == sizes(name, 3)
    vitrim.restore_(model)

    reduction = vitrim.reduce_(model, "tome:r=1", compact=True)
    less = VLMS[name].blocks
    assert reduction.compact
    prefill = Prefill(model)
    out = logits(model, given)
    assert reduction.image_tokens == sizes(name, 3, less)
    length = given["input_ids"].shape[1] - 2 * less
    assert prefill.lengths == [length]
    assert out.shape[:2] == (2, length)
    assert out.isfinite().all()
    whole = greedy(model, given, 3)
    assert prefill.lengths == [length, length, 1, 1]
    prefill.hook.remove()
    assert torch.equal(whole[:, :-3], given["input_ids"])

    vitrim.restore_(model)
    assert "generate" not in vars(model)
    assert torch.equal(logits(model, given), dense)
    assert torch.equal(greedy(model, given), spoken)


@pytest.mark.sampled(4)
@every_model
def test_a_prompt_alone_gives_what_it_gives_in_a_batch(name: str) -> None:
    """Images of different sizes and rows of different lengths: padding and other images play no part."""
    model = VLMS[name].create().double()
    vitrim.reduce_(model, "tome:r=1", compact=True)
    together = {key: x.double() if x.is_floating_point() else x for key, x in prompt(name).items()}
    rows = logits(model, together)
    spoken = greedy(model, together, 4)
    images = iter(split(name, together))
    for row, texts in enumerate(TEXTS):
        number = len(texts) - 1
        own = [next(images) for _ in range(number)]
        ids = together["input_ids"][row][together["attention_mask"][row].bool()][None]
        alone = {"input_ids": ids, **joined(name, own)}
        if VLMS[name].types is not None:
            alone[VLMS[name].types] = (ids == IMAGE).long()
        single = logits(model, alone)
        torch.testing.assert_close(rows[row, -single.shape[1] :], single[0], atol=1e-6, rtol=1e-6)
        assert torch.equal(greedy(model, alone, 4)[0, -4:], spoken[row, -4:])


def split(name: str, given: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The inputs of every image."""
    pixels = given["pixel_values"]
    if "image_grid_thw" in given:
        parts = pixels.split(given["image_grid_thw"].prod(-1).tolist())
        return [
            {"pixel_values": x, "image_grid_thw": g[None]} for x, g in zip(parts, given["image_grid_thw"], strict=True)
        ]
    if "image_sizes" in given:
        return [
            {"pixel_values": x[None], "image_sizes": s[None]} for x, s in zip(pixels, given["image_sizes"], strict=True)
        ]
    if pixels.dim() == 5:
        return [{"pixel_values": x[None, None]} for x in pixels.flatten(0, 1) if x.any()]
    return [{"pixel_values": x[None]} for x in pixels]


def joined(name: str, images: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The inputs of several images of one prompt."""
    nested = name in ("idefics3", "smolvlm")
    return {key: torch.cat([image[key] for image in images], dim=int(nested)) for key in images[0]}


def features(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """What the connector makes of all images, (n, D) each, by the library's own call."""
    names = ("pixel_values", "image_grid_thw", "image_sizes")
    with torch.no_grad():
        output = model.model.get_image_features(**{key: given[key] for key in names if key in given}, return_dict=True)
    return [image for part in output.pooler_output for image in (part if part.dim() == 3 else part[None])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["tome:r=1", "topk:keep_rate=0.6,score=column_mean"])
@pytest.mark.parametrize("name", [name for name in VLMS if name not in ("llava_layers", "vipllava")])
def test_the_language_model_gets_what_the_connector_makes_of_the_anchors(name: str, method: str) -> None:
    """Called by itself, the connector of a merged tower gives a feature for every place: those of a group are equal."""
    model = VLMS[name].create().double()
    given = {key: x.double() if x.is_floating_point() else x for key, x in prompt(name).items()}
    reduction = vitrim.reduce_(model, method, compact=True, record=True)
    seen: list[Tensor] = []

    def watch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(torch.cat([part.flatten(0, -2) for part in kwargs["mm_encoder_outputs"]["image"].pooler_output]))

    model.model.register_forward_pre_hook(watch, with_kwargs=True)
    logits(model, given)
    found = seen[0].split(reduction.image_tokens)
    assert len(found) == 3
    if not method.startswith("tome"):
        assert reduction.image_tokens[0] < sizes(name, 3)[0]
        return
    whole = torch.cat(features(model, given)).split(sizes(name, 3))
    for few, all_places in zip(found, whole, strict=True):
        same = (all_places[:, None] - few[None]).abs().amax(dim=-1) < 1e-9
        assert same.any(dim=1).all()  # every place has its token
        assert same.any(dim=0).all()
        assert len(few) < len(all_places)
        place = -1
        for column in same.T:  # in raster order of anchors: each token finds a place of its group behind the last one's
            later = [int(found) for found in column.nonzero() if found > place]
            assert later
            place = later[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("config", tiny.configs(), ids=lambda config: config.describe())
def test_a_tower_without_a_class_token_keeps_some_tokens_or_refuses(config: vitrim.MethodConfig) -> None:
    model, given = VLMS["paligemma"].create(), prompt("paligemma")
    if config.kind == "soft" or config.needs().class_token or config.needs().prefix:
        with pytest.raises(vitrim.UnsupportedModelError):
            vitrim.reduce_(model, config, compact=True)
        return
    reduction = vitrim.reduce_(model, config, compact=True)
    logits(model, given)
    assert min(reduction.image_tokens) > 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize("config", tiny.configs(), ids=lambda config: config.describe())
def test_every_method_shortens_the_prompt_or_is_refused(config: vitrim.MethodConfig) -> None:
    """Projectors read tokens one by one: methods that need a weighted pool, or counts per image, work as well."""
    model, given = VLMS["llava_full"].create(), VLMS["llava_full"].prompt([[7, 11], [13, 17]])
    if config.kind == "soft":
        with pytest.raises(vitrim.UnsupportedModelError, match="belong to no place"):
            vitrim.reduce_(model, config, compact=True)
        return
    reduction = vitrim.reduce_(model, config, compact=True)
    out = logits(model, given)
    assert out.isfinite().all()
    assert out.shape[1] == max(reduction.image_tokens) + 3
    returns = config.kind == "none" or config.name in ("cropr", "evo_vit")  # these bring their patches back
    assert (min(reduction.image_tokens) == 37) is returns


def test_counts_that_differ_per_image_pad_the_rows() -> None:
    """ATM merges by a threshold, image by image; ATS prunes to as many as it samples."""
    for method in ("atm:granularity=image", "ats:keep_rate=0.6"):
        model = VLMS["llava"].create()
        reduction = vitrim.reduce_(model, method, compact=True)
        given = VLMS["llava"].prompt([[7, 11], [13, 17], [19, 23]])
        del given["attention_mask"]
        out = logits(model, given)
        counts = reduction.image_tokens
        assert len(set(counts)) > 1, method
        assert out.shape[1] == max(counts) + 3
        spoken = greedy(model, given, 3)
        for row in range(3):
            alone = {key: value[row : row + 1] for key, value in given.items()}
            torch.testing.assert_close(logits(model, alone)[0, -1], out[row, -1], atol=1e-5, rtol=1e-5)
            assert torch.equal(greedy(model, alone, 3)[0], spoken[row])


def test_beams_and_lengths_count_the_prompt_as_it_was_given() -> None:
    model, given = VLMS["llava"].create(), prompt("llava")
    beams: dict[str, Any] = {"max_new_tokens": 4, "num_beams": 2, "num_return_sequences": 2}
    dense, whole = model.generate(**given, **beams), given["input_ids"].shape[1]
    vitrim.reduce_(model, "tome:r=0", compact=True)
    assert torch.equal(model.generate(**given, **beams), dense)
    vitrim.get_reduction(model).set(r=2)
    out = model.generate(**given, **beams)
    assert torch.equal(out[:, :whole], given["input_ids"].repeat_interleave(2, 0))
    lengths: dict[str, Any] = {"max_length": whole + 3, "min_length": whole + 3}
    limits = GenerationConfig(**lengths, do_sample=False, pad_token_id=0)
    assert model.generate(**given, **lengths).shape[1] == whole + 3
    assert model.generate(**given, generation_config=limits).shape[1] == whole + 3
    assert model.generate(**given, generation_config=limits, max_new_tokens=2, min_new_tokens=2).shape[1] == whole + 2
    model = VLMS["paligemma"].create()
    vitrim.reduce_(model, "atm:granularity=image", compact=True)
    with pytest.raises(vitrim.VitrimError, match="equal numbers of tokens"):
        model.generate(**prompt("paligemma"), **beams)


@pytest.mark.parametrize("name", ["llava", "paligemma"])
def test_the_smallest_length_counts_the_prompt_as_it_was_given(name: str) -> None:
    """A model that would end at once ends where the unreduced one does."""
    model, given = VLMS[name].create(), prompt(name)
    end = torch.zeros(60).index_fill(0, torch.tensor(59), 1e4)
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: out + end[: out.shape[-1]])
    whole = given["input_ids"].shape[1]
    options: dict[str, Any] = {"min_length": whole + 3, "max_new_tokens": 12, "do_sample": False, "eos_token_id": 59}
    dense = model.generate(**given, **options).shape[1]
    assert dense == whole + 4
    vitrim.reduce_(model, "tome:r=2", compact=True)
    assert model.generate(**given, **options).shape[1] == dense


@pytest.mark.parametrize("placeholder", [0, 1])
def test_rows_are_never_padded_with_places_for_images(placeholder: int) -> None:
    """Whichever id stands for images, the language model gets as many of it as there are features."""
    model: Any = VLMS["llava"].create()
    model.config.image_token_id = placeholder
    given = VLMS["llava"].prompt([[7, 11], [13, 17], [19, 23]])
    del given["attention_mask"]
    given["input_ids"] = torch.where(given["input_ids"] == IMAGE, placeholder, given["input_ids"])
    reduction = vitrim.reduce_(model, "atm:granularity=image", compact=True)
    seen: list[Tensor] = []
    model.model.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["input_ids"]), with_kwargs=True)
    out = logits(model, given)
    assert len(set(reduction.image_tokens)) > 1
    assert [int((row == placeholder).sum()) for row in seen[0]] == reduction.image_tokens
    assert out.shape[1] == max(reduction.image_tokens) + 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", VLMS)
def test_a_model_is_pickled_after_a_forward(name: str) -> None:
    """Also one that ran before it was reduced: then hooks of the library's own are on it already."""
    model, given = VLMS[name].create(), prompt(name)
    dense = logits(model, given)
    vitrim.reduce_(model, "tome:r=1", compact=True)
    out = logits(model, given)
    twin = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model))))
    assert torch.equal(logits(twin, given), out)
    states = [each(**given, output_hidden_states=True).hidden_states for each in (model, twin)]
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))
    vitrim.restore_(twin)
    assert torch.equal(logits(twin, given), dense)


def test_a_tower_that_was_restored_by_itself_leaves_prompts_alone() -> None:
    model: Any = VLMS["llava"].create()
    given = prompt("llava")
    dense = logits(model, given)
    vitrim.restore_(vitrim.reduce_(model, "tome:r=2", compact=True).model)
    assert torch.equal(logits(model, given), dense)
    vitrim.reduce_(model, "tome:r=2", compact=False)  # every place is read
    assert logits(model, given).shape == dense.shape
    vitrim.restore_(model)
    vitrim.reduce_(model, "tome:r=2", compact=True)
    assert logits(model, given).shape != dense.shape
    short = logits(model, given)
    with pytest.raises(vitrim.VitrimError, match="tokens that belong to no place"):
        vitrim.reduce_(model, "patchmerger", compact=True)
    assert torch.equal(logits(model, given), short)
    vitrim.reduce_(model, "tome:r=2", compact=True)
    assert torch.equal(logits(model, given), short)
    vitrim.restore_(model)
    assert torch.equal(logits(model, given), dense)


def test_recomputed_blocks_hand_out_what_they_did() -> None:
    """Under gradient checkpointing blocks run again after the call that asked for fewer tokens."""
    given = {**prompt("llava_full"), "labels": prompt("llava_full")["input_ids"]}
    gradients = []
    for checkpointed in (False, True):
        model: Any = VLMS["llava_full"].create().train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        vitrim.reduce_(model, "tome:r=2", compact=True)
        model(**given, use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) > 20
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*gradients, strict=True))


def test_the_places_of_a_prompt_that_stay() -> None:
    given = {
        "input_ids": torch.tensor([[0, 0, 7, 1, 1, 8], [7, 1, 1, 1, 1, 8]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
        "position_ids": torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]),
        "labels": torch.tensor([[-100, -100, 7, -100, -100, 8], [7, -100, -100, -100, -100, 8]]),
    }
    kept = torch.tensor([[True] * 4 + [False, True], [True, False, True, False, False, True]])
    out = trimmed(given, tuple(given), kept, filler=0)
    assert out["input_ids"].tolist() == [[7, 1, 8], [7, 1, 8]]
    assert out["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert out["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
    kept[1, 1] = True
    out = trimmed(given, tuple(given), kept, filler=0)
    assert out["input_ids"].tolist() == [[0, 7, 1, 8], [7, 1, 1, 8]]
    assert out["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert out["labels"].tolist() == [[-100, 7, -100, 8], [7, -100, -100, 8]]
    flipped = {name: value.flip(1) for name, value in given.items()}  # padded on the right
    out = trimmed(flipped, tuple(given), kept.flip(1), filler=0)
    assert out["input_ids"].tolist() == [[8, 1, 7, 0], [8, 1, 1, 7]]


def test_positions_of_three_axes_are_those_of_the_anchors() -> None:
    """Text behind an image stands where it stood; tokens that stay keep row and column."""
    model: Any = VLMS["qwen2_vl"].create()
    given = VLMS["qwen2_vl"].prompt([[7, 11]])
    seen: list[Tensor] = []
    decoder = model.get_decoder()
    decoder.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["position_ids"][-3:]), with_kwargs=True)
    logits(model, given)
    reduction = vitrim.reduce_(model, "topk:keep_rate=0.5,score=column_mean,blocks=[1]", compact=True)
    logits(model, given)
    dense, few = seen
    assert torch.equal(few[..., [0, -2, -1]], dense[..., [0, -2, -1]])
    (number,) = reduction.image_tokens
    anchors = reduction.state.position[0, ::4] // 4
    assert torch.equal(few[..., 1 : 1 + number], dense[..., 1 + anchors.sort().values])
    assert model.generate(**given, max_new_tokens=2).shape == (1, given["input_ids"].shape[1] + 2)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_positions_of_padded_prompts_and_of_new_tokens(name: str) -> None:
    """Text positions count the real tokens of a row from 0; new tokens go on where the whole prompt would."""
    model: Any = VLMS[name].create()
    given = VLMS[name].prompt([[7, 11, 13], [17, 19]], sizes(name, 3))
    seen: list[tuple[Tensor, Tensor | None]] = []
    model.get_decoder().register_forward_pre_hook(
        lambda m, a, kw: seen.append((kw["position_ids"], kw.get("attention_mask"))), with_kwargs=True
    )
    greedy(model, given, 3)
    dense = [position[-3:] for position, _ in seen[1:]]
    seen.clear()
    vitrim.reduce_(model, "tome:r=1", compact=True)
    greedy(model, given, 3)
    assert [position[-3:].tolist() for position, _ in seen[1:]] == [position.tolist() for position in dense]
    seen.clear()
    logits(model, given)
    position, mask = seen[0]
    assert mask is not None
    assert not mask.all()
    for row, real in zip(position[0], mask.bool(), strict=True):
        assert row[real].tolist() == list(range(int(real.sum())))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_a_later_turn_on_a_cache_goes_on_where_the_whole_prompt_would(name: str) -> None:
    model: Any = VLMS[name].create()
    given = VLMS[name].prompt([[7, 11, 13]], sizes(name, 2))
    seen: list[Tensor] = []
    model.get_decoder().register_forward_pre_hook(
        lambda m, a, kw: seen.append(kw["position_ids"][-3:]), with_kwargs=True
    )
    for method in (None, "tome:r=1"):
        if method is not None:
            vitrim.reduce_(model, method, compact=True)
        with torch.no_grad():
            cache = model(**given, use_cache=True).past_key_values
            model(input_ids=torch.tensor([[23, 29]]), past_key_values=cache)
    assert torch.equal(seen[3], seen[1])
    assert seen[2].shape != seen[0].shape


@pytest.mark.parametrize(
    ("name", "method", "says"),
    [
        ("llava", "sit:keep_rate=0.5", "belong to no place"),
        ("llava", "topk:keep_rate=0.5,restore=end", "give one of them"),
        ("internvl", "mctf", "joins cells of patches"),
        ("internvl", "l2:keep_rate=0.5", "joins cells of patches"),
        ("paligemma", "topk:keep_rate=0.5", "use score=column_mean"),
    ],
)
def test_methods_that_cannot_be_compact_are_refused(name: str, method: str, says: str) -> None:
    model = VLMS[name].create()
    with pytest.raises(vitrim.VitrimError, match=says):
        vitrim.reduce_(model, method, compact=True)
    assert not vars(model).keys() & {"vitrim_compact", "generate"}
    vitrim.reduce_(model, "tome:r=1", compact=True)


def test_calls_that_cannot_be_compact_are_refused() -> None:
    model: Any = llava().eval()
    vitrim.reduce_(model, "tome:r=2", compact=True)
    given = VLMS["llava"].prompt([[7, 11]])
    with pytest.raises(vitrim.VitrimError, match="expected 36 image tokens in the prompt"):
        model(**{**given, "input_ids": given["input_ids"][:, :-5]})
    with pytest.raises(vitrim.VitrimError, match="needs input_ids beside pixel_values"):
        model(inputs_embeds=torch.zeros(1, 3, 16), pixel_values=given["pixel_values"])
    with pytest.raises(vitrim.VitrimError, match="one number per token"):
        model(**{**given, "attention_mask": torch.ones(1, 1, 39, 39)})
    packed: Any = VLMS["pixtral"].create()
    vitrim.reduce_(packed, "tome:r=2", compact=True)
    two = VLMS["pixtral"].prompt([[7, 11, 13]], [36, 36])
    with pytest.raises(vitrim.VitrimError, match="give image_sizes"):
        packed(input_ids=two["input_ids"], pixel_values=two["pixel_values"])
    cache = model(**given, use_cache=True).past_key_values
    with pytest.raises(vitrim.VitrimError, match="call generate without past_key_values"):
        model.generate(**given, past_key_values=cache, max_new_tokens=2)
    with pytest.raises(vitrim.VitrimError, match="expected an attention_mask for the"):
        model(**given, past_key_values=cache)
    with pytest.raises(vitrim.UnsupportedModelError, match="is none that is known: see 'Fewer image tokens"):
        vitrim.reduce_(model.model.vision_tower, "tome:r=2", compact=True)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a short mask": (
        {"attention_mask": torch.ones(2, 4)},
        r"expected attention_mask for the \d+ tokens of input_ids, got 4",
    ),
    "short labels": ({"labels": torch.ones(2, 3)}, r"expected labels for the \d+ tokens of input_ids, got 3"),
    "a mask of rows and columns": ({"attention_mask": torch.ones(2, 1, 9, 9)}, "one number per token"),
    "a prompt without rows": (
        {"input_ids": torch.ones(9)},
        r"expected input_ids \(B, L\) beside pixel_values, got \(9,\)",
    ),
    "no image": ({"pixel_values": torch.ones(0, 3, 24, 24)}, "holds no image: leave it out where a prompt has none"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_a_prompt_that_does_not_fit_is_one_line(name: str, what: str) -> None:
    model, given = VLMS[name].create(), prompt(name)
    vitrim.reduce_(model, "tome:r=1", compact=True)
    wrong, message = WRONG[what]
    with pytest.raises(vitrim.VitrimError, match=message):
        logits(model, {**given, **wrong})
    logits(model, given)


def test_images_that_keep_different_numbers_of_cells() -> None:
    """ATS, which scores by the lengths of values, samples cells of a tower with a class token."""
    model = VLMS["internvl"].create()
    given = prompt("internvl")
    reduction = vitrim.reduce_(model, "ats:keep_rate=0.5", compact=True)
    out = logits(model, given)
    assert all(0 < number < 9 for number in reduction.image_tokens)
    assert out.shape[1] == max(len(TEXTS[0]) * 2 - 1 + sum(reduction.image_tokens[:2]), 3 + reduction.image_tokens[2])


def test_a_restoration_that_is_refused_leaves_the_prompts_short() -> None:
    model, given = VLMS["llava"].create(), prompt("llava")
    reduction = vitrim.reduce_(model, "topk:keep_rate=0.5", compact=True)
    short = logits(model, given)
    inside, done = threading.Event(), threading.Event()
    hook = reduction.model.register_forward_hook(lambda *_: (inside.set(), done.wait(60))[:0] or None)
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(logits, model, given)
        assert inside.wait(60)
        with pytest.raises(vitrim.VitrimError, match="runs in another thread"):
            vitrim.restore_(model)
        done.set()
        assert torch.equal(served.result(60), short)
    hook.remove()
    assert torch.equal(logits(model, given), short)
