"""Libraries that are older than a family, or an option, are named in one line; nothing that lists all fails for them.

`make test-oldest` runs on such libraries. Here the newest ones say that they are older.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn

import tiny
import vitrim
from tiny_other_vlms import OTHERS
from tiny_vlms import VLMS
from vitrim.cli import listing
from vitrim.core import registry, tables, versions
from vitrim.core.versions import is_older, numbers

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "constraints-oldest.txt").read_text().splitlines()
OLDEST = dict(line.split("==") for line in LINES if line[0] != "#")
LIBRARIES = ("timm", "transformers")
KEYS = [(library, key) for library in LIBRARIES for key in tables.minimum_versions(library)]


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """All libraries are as old as can be, and nothing of theirs was asked about before."""
    monkeypatch.setattr(versions, "installed", OLDEST.get)
    for table in (registry._HOSTS, registry._VISION_LANGUAGE, registry._SELECTED):
        monkeypatch.setattr(table, "entries", {})


@pytest.mark.parametrize(
    ("found", "older"),
    [
        ("5.2.0", True),
        ("5.20", False),
        ("5.20.1", False),
        ("5.19.9", True),
        ("5.20.0.dev0", False),
        ("6.0", False),
        (None, False),
    ],
)
def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch, found: str | None, older: bool) -> None:
    monkeypatch.setattr(versions, "installed", lambda package: found)
    assert is_older("transformers", "5.20") is older


def test_capabilities_are_those_that_torch_says_whatever_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else None
    monkeypatch.setattr(versions, "installed", lambda package: "2.9.0")
    before = dict(versions.cpu_capabilities())
    assert set(before) == {"amx_bf16", "avx512_bf16"}
    if known is not None:
        assert before["avx512_bf16"] == bool(known.get("avx512_bf16"))
        assert before["amx_bf16"] == bool(known.get("amx_tile"))


@pytest.mark.parametrize(("tiles", "bf16"), [(True, False), (False, True)])
def test_capabilities_of_older_torch_by_their_newer_names(
    monkeypatch: pytest.MonkeyPatch, tiles: bool, bf16: bool
) -> None:
    monkeypatch.setattr(versions, "installed", lambda package: "2.9.0")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16, raising=False)
    assert versions.cpu_capabilities() == {"amx_bf16": tiles, "avx512_bf16": bf16}


@pytest.mark.parametrize(("library", "key"), KEYS)
def test_what_is_newer_is_above_the_lower_bound_is_a_family_and_is_written_down(library: str, key: str) -> None:
    since = tables.minimum_versions(library)[key]
    assert numbers(OLDEST[library]) < numbers(since), "the difference can go"
    entries = {**tables.written_table(library, "HOSTS"), **tables.written_table(library, "SELECTED")}
    assert tables.written_table(library, key) or any(entry.startswith(f"{key}.") for entry in entries)
    assert f"| {library} {since} |" in (ROOT / "docs/deprecation.md").read_text()


@pytest.mark.usefixtures("older")
def test_families_of_newer_libraries_are_absent_from_lists_which_say_so() -> None:
    hosts = registry.hosts()
    assert hosts
    assert not registry.vision_languages()
    assert not [host for host in hosts for _, key in KEYS if host.startswith(f"{key}.")]
    lines = "\n".join(listing.heads(listing.hosts()))
    for library in LIBRARIES:
        for since in tables.minimum_versions(library).values():
            assert f"not listed, needs {library} {since}: " in lines
    assert "not listed, needs transformers 5.13: radio" in lines


def test_with_the_newest_libraries_everything_is_listed() -> None:
    if not tables.not_yet():
        assert "needs" not in "".join(line for line in listing.heads(listing.hosts()) if line.startswith("not listed"))
        entries = {**registry.hosts(), **registry._SELECTED.all()}
        assert all(any(entry.startswith(f"{key}.") for entry in entries) for _, key in KEYS if "." in key)


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("name", ["hf_owlvit", "hf_radio", "gemma4_vit"])
def test_a_model_of_such_a_family_is_refused_by_name_and_version(name: str) -> None:
    create = {**tiny.HOSTS, **tiny.FURTHER}.get(name)
    if create is None:
        pytest.skip("its library is older indeed")
    model = create()
    with pytest.raises(vitrim.UnsupportedModelError) as said:
        vitrim.reduce_(model, "tome:r=2")
    needs = {"hf_owlvit": "transformers 5.4", "hf_radio": "transformers 5.13", "gemma4_vit": "timm 1.0.30"}[name]
    assert str(said.value).startswith(f"reducing {type(model).__name__} needs {needs} or newer, and ")


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("options", [{"method": "tome:r=2", "compact": True}, {"select": "divprune:tokens=4"}])
def test_whole_vision_language_models_are_refused_by_name_and_version(options: dict[str, Any]) -> None:
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^reducing Llava.* needs transformers 5\.18 or newer"):
        vitrim.reduce_(VLMS["llava"].create(), **options)


@pytest.mark.skipif(is_older("transformers", "5.21"), reason="is older indeed")
def test_what_serves_any_model_serves_none_of_a_family_that_needs_a_newer_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "installed", lambda package: "5.20.0")
    monkeypatch.setattr(registry._SELECTED, "entries", {})
    model = OTHERS["paddleocr_vl"].create()
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^reducing PaddleOCR\w+ needs transformers 5\.21 or newer"):
        vitrim.reduce_(model, select="divprune:tokens=3")
    assert "vitrim_reduction" not in vars(model)


@pytest.mark.skipif(is_older("transformers", "5.18"), reason="whole models are refused")
def test_tokens_asked_for_row_by_row_are_refused_where_the_library_reads_no_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = VLMS["llava"].create()
    vitrim.reduce_(model, select="divprune:tokens=3")
    monkeypatch.setattr(versions, "installed", lambda package: "5.20.0")
    given = VLMS["llava"].prompt([[7, 11]], [VLMS["llava"].tokens])
    model(**given, logits_to_keep=torch.tensor([-1]))
    with pytest.raises(vitrim.VitrimError, match=r"^logits_to_keep with a row .* needs transformers 5\.21 or newer"):
        model(**given, logits_to_keep=torch.tensor([[-1]]))


def test_a_model_of_no_such_family_is_refused_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda package: "1.0")
    with pytest.raises(vitrim.UnsupportedModelError, match=r"Linear .* is not a supported host"):
        vitrim.reduce_(nn.Linear(2, 2), "tome:r=2")
    with pytest.raises(vitrim.UnsupportedModelError, match="is none that is known"):
        vitrim.reduce_(tiny.HOSTS["vit"](), "tome:r=2", compact=True)


@pytest.mark.usefixtures("older")
def test_parallel_blocks_whose_bias_stood_elsewhere_are_refused() -> None:
    """Before 1.0.25 the dense model adds the MLP's bias to other rows; with a bias of q, k and v there is no such."""
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^ParallelScalingBlock with qkv_bias=False needs timm"):
        vitrim.reduce_(tiny.vit(block_fn=ParallelScalingBlock, qkv_bias=False)(), "tome:r=2")
    vitrim.reduce_(tiny.vit(block_fn=ParallelScalingBlock)(), "tome:r=2")
