"""Settings of the vLLM plugin, and its arithmetic, without vLLM: counts, pools, hashes and positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vitrim
from vitrim.core.registry import selectors
from vitrim.serving.vllm import plugin, selecting

SET = {"vitrim": {"select": "pool:tokens=9"}}


def test_additional_config_goes_before_the_environment() -> None:
    environment = {"VITRIM_SELECT": "divprune:keep=0.5"}
    assert plugin.asked_for({}, {}) is None
    assert plugin.asked_for({}, {"VITRIM_SELECT": ""}) is None
    found = plugin.asked_for({}, environment)
    assert found is not None
    assert found.describe() == "divprune:keep=0.5"
    found = plugin.asked_for(SET, environment)
    assert found is not None
    assert found.describe() == "pool:tokens=9"


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        ({"vitrim": "divprune"}, "expected --additional-config"),
        ({"vitrim": {"selct": "divprune"}}, "expected --additional-config"),
        ({"vitrim": {"select": "divprun"}}, "did you mean 'divprune'"),
        ({"vitrim": {"select": "fastervlm"}}, "needs the tower's attention"),
        ({"vitrim": {"select": "dart"}}, "give text_pivots=0"),
        ({"vitrim": {"select": "cdpruner"}}, "give text=none"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_line(additional: dict[str, Any], message: str) -> None:
    with pytest.raises(vitrim.VitrimError) as error:
        plugin.asked_for(additional, {})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", selectors())
def test_every_selector_is_taken_or_refused(name: str) -> None:
    """Those that need features alone are taken; what the message suggests is taken, too."""
    selector = vitrim.parse_selector(name)
    if selector.needs() == type(selector.needs())():
        assert plugin.checked(selector) is selector
        return
    with pytest.raises(vitrim.VitrimError) as error:
        plugin.checked(selector)
    if " give " in str(error.value):
        plugin.checked(vitrim.parse_selector(f"{name}:{str(error.value).rsplit(' give ', 1)[1]}"))


def config(architecture: str = "LlavaForConditionalGeneration", **changes: Any) -> Any:
    model = SimpleNamespace(
        architecture=architecture,
        hf_config=SimpleNamespace(architectures=[architecture]),
        multimodal_config=SimpleNamespace(is_multimodal_pruning_enabled=lambda: changes.get("pruning", False)),
    )
    graphs = SimpleNamespace(cudagraph_mm_encoder=changes.get("graphs", False))
    return SimpleNamespace(
        model_config=model, additional_config=changes.get("additional", SET), compilation_config=graphs
    )


def test_the_setting_is_written_into_the_models_configuration() -> None:
    own = config()
    plugin.activate(own)
    assert own.model_config.hf_config.vitrim_select == "pool:tokens=9"
    assert own.model_config.hf_config.architectures == ["VitrimLlavaForConditionalGeneration"]


def test_without_a_setting_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    own = config(additional={})
    plugin.activate(own)
    assert vars(own.model_config.hf_config) == {"architectures": ["LlavaForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (config("MllamaForConditionalGeneration"), "only those of LlavaForConditionalGeneration, LlavaNext"),
        (config(pruning=True), "leave --video-pruning-rate out"),
        (config(graphs=True), "leave cudagraph_mm_encoder out"),
        (config(additional={"vitrim": {"select": "divprune:positions=original"}}), "leave positions out"),
        (
            config("Qwen2VLForConditionalGeneration", additional={"vitrim": {"select": "divprune:positions=closed"}}),
            "leave positions out",
        ),
    ],
)
def test_models_and_options_that_cannot_follow_are_refused(own: Any, message: str) -> None:
    before = dict(vars(own.model_config.hf_config))
    with pytest.raises(vitrim.VitrimError, match=message) as error:
        plugin.activate(own)
    assert "\n" not in str(error.value)
    assert vars(own.model_config.hf_config) == before


@dataclass
class Details:
    full: list[int]
    is_embed: Any = None


@dataclass
class Update:
    content: Details
    modality: str = "image"

    def with_content(self, content: Details) -> Update:
        return replace(self, content=content)


class Processor:
    info = SimpleNamespace(
        ctx=SimpleNamespace(
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(
                    vitrim_select="random:tokens=2", vision_config=SimpleNamespace(spatial_merge_size=2)
                )
            )
        )
    )

    def __init__(self, content: Details) -> None:
        self.content = content

    def _get_mm_prompt_updates(self, *args: Any) -> Any:
        return {"image": [[Update(self.content)]]}

    def _get_mm_hashes(self, inputs: Any) -> Any:
        return {"image": ["abc", None]}


def shortened(content: Details, tile: int | None = None, item: Any = None) -> Details:
    made = selecting.joined(selecting.SelectingProcessor, Processor, lambda config: tile)(content)
    found: Details = made._get_mm_prompt_updates(None, None, {"image": [item or {}]})["image"][0][0].content
    return found


def test_placeholders_follow_counts_and_other_tokens_stay() -> None:
    """By hand: 4 is an image's start, 7 ends a row, 1 stands for a feature."""
    assert shortened(Details([1] * 6)).full == [1, 1]
    told = Details([4, 1, 1, 1, 7, 1, 1, 1, 5], lambda full: torch.tensor(full) == 1)
    found = shortened(told)
    assert found.full == [4, 1, 1, 7, 5]
    assert found.is_embed(found.full).tolist() == [False, True, True, False, False]
    assert shortened(told, tile=3).full == [4, 1, 1, 7, 1, 1, 5]  # two of every tile


def test_the_setting_is_part_of_every_key() -> None:
    made = selecting.joined(selecting.SelectingProcessor, Processor, lambda config: None)(Details([1]))
    first = made._get_mm_hashes(None)["image"]
    assert first[1] is None
    assert first[0] != "abc"
    other = SimpleNamespace(
        ctx=SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(vitrim_select="random:tokens=3")))
    )
    made.info = other
    assert made._get_mm_hashes(None)["image"][0] != first[0]


@pytest.mark.parametrize("text", ["random:tokens=5", "pool:tokens=6", "divprune:keep=0.3", "evs:keep=0.2"])
@pytest.mark.parametrize(("tile", "grid"), [(None, None), (12, None), (None, (2, 3, 4)), (None, (1, 4, 6))])
def test_placeholders_and_features_are_equally_many(text: str, tile: int | None, grid: Any) -> None:
    selector = vitrim.parse_selector(text)
    if text.startswith("evs"):
        grid = grid or (1, 4, 6)
        tile = None
    chosen, parts = selecting.choices(selector, torch.randn(24, 8), tile, grid)
    places = selecting.kept_places(selector, 24, tile, grid)
    assert sum(choice.number for choice in chosen) == len(places)
    assert len(parts) == len(chosen) == (2 if tile else 1)


def test_tokens_that_are_no_whole_tiles_are_refused() -> None:
    with pytest.raises(vitrim.VitrimError, match="whole tiles of 5"):
        selecting.pools(12, 5)


# ---- positions with three axes ---------------------------------------------------------------------------------------


class Model:
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.config = vllm_config.model_config.hf_config


class AxesModel(selecting.SelectingAxes, Model):
    tile = staticmethod(lambda config: None)


def axes_model(text: str) -> Any:
    hf = SimpleNamespace(
        vitrim_select=text,
        image_token_id=1,
        vision_config=SimpleNamespace(spatial_merge_size=2),
        get_text_config=lambda: SimpleNamespace(hidden_size=8),
    )
    mm = SimpleNamespace(is_multimodal_pruning_enabled=lambda: False)
    made = AxesModel(vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=hf, multimodal_config=mm)))
    assert mm.is_multimodal_pruning_enabled()
    return made


def feature(offset: int, length: int, rows: int, columns: int) -> Any:
    return SimpleNamespace(
        mm_position=SimpleNamespace(offset=offset, length=length),
        data={"image_grid_thw": SimpleNamespace(data=torch.tensor([1, 2 * rows, 2 * columns]))},
    )


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("last", ["text", "image"])
def test_image_tokens_keep_their_places_in_any_chunks(chunk: int, last: str) -> None:
    """Against positions of the whole prompt, counted by loops, of which those of dropped tokens are left out."""
    model = axes_model("random:tokens=4")
    grids = [(1, 3, 5), (1, 200, 2)]
    items = [torch.randn(rows * columns, 12) for _, rows, columns in grids]
    narrowed = [model.narrowed(item, grid) for item, grid in zip(items, grids, strict=True)]
    ids, expected, start = [], [], 0
    for text, grid, seed_item in zip((2, 3), grids, items, strict=True):
        for _ in range(text):
            ids.append(9)
            expected.append((start,) * 3)
            start += 1
        kept = vitrim.parse_selector("random:tokens=4").mask(seed_item).nonzero().squeeze(1).tolist()
        for place in kept:
            ids.append(1)
            expected.append((start, start + place // grid[2], start + place % grid[2]))
        start += max(grid)
    if last == "text":
        ids.append(9)
        expected.append((start,) * 3)
        start += 1
    features = [feature(2, 4, 3, 5), feature(9, 4, 200, 2)]
    positions, delta = model.get_mrope_input_positions(ids, features)
    assert delta == start - len(ids)
    rows = torch.cat(narrowed).to(torch.bfloat16)
    for begin in [*range(0, len(ids), chunk), 0]:  # the last one over again, as after a preemption
        part = range(begin, min(begin + chunk, len(ids)))
        before = sum(one == 1 for one in ids[:begin])
        own = rows[before : before + sum(ids[place] == 1 for place in part)]
        plain, positions, delta = model.recompute_mrope_positions(ids, [own] if len(own) else [], positions, begin)
        assert all(one.shape[1] == 12 for one in plain)
        if part.stop == len(ids):
            assert delta == start - len(ids)
    assert positions.T.tolist() == [list(one) for one in expected]


def test_images_without_a_token_between_them_are_refused() -> None:
    with pytest.raises(ValueError, match="between two images"):
        axes_model("random:tokens=4").get_mrope_input_positions(
            [9] + [1] * 8, [feature(1, 4, 3, 5), feature(5, 4, 3, 5)]
        )


def test_features_of_further_layers_are_those_of_the_same_places() -> None:
    model, item = axes_model("divprune:tokens=3"), torch.randn(15, 24)
    kept = vitrim.parse_selector("divprune:tokens=3").mask(item[:, :8])
    assert torch.equal(model.narrowed(item, (1, 3, 5))[:, :24], item[kept])
