"""``vitrim list``: what it names can be used, and unknown words get one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
import timm

import tiny
import vitrim
from cli_runs import Run, refused, runner, succeeded
from tiny_vlms import VLMS
from vitrim.cli import listing
from vitrim.core import registry, tables
from vitrim.core.plan import Purpose
from vitrim.core.registry import find_vision_language, host_of, hosts, vision_languages
from vitrim.core.registry import methods as registered


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``vitrim list`` with the given arguments: exit code, standard output, standard error."""
    return runner(monkeypatch, capsys, "list")


def test_every_method_with_its_class_attributes() -> None:
    rows = {row["name"]: row for row in listing.methods()}
    assert set(rows) == set(registered())
    for name, config in registered().items():
        assert rows[name]["kind"] == config.kind
        assert rows[name]["adaptive"] is config().is_adaptive()
        assert rows[name]["needs_class_token"] is config().needs().class_token
    assert rows["atm"]["adaptive"]
    assert not rows["tome"]["adaptive"]
    assert "Token Merging" in rows["tome"]["paper"]


def test_without_an_argument_it_says_what_there_is(run: Run) -> None:
    out = succeeded(run)
    assert [line.split()[2] for line in out.splitlines()] == list(listing.LISTS)


def test_the_marked_methods_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text(encoding="utf-8")
    untrained, trained = page.split("## With training")
    for name, how in listing.RECOMMENDED.items():
        part = untrained if how == "untrained" else trained.partition("\n## ")[0]
        assert f"`{name}" in part, name
        assert registered()[name].traits.training_free or how == "trained"


def test_hosts(run: Run) -> None:
    out = succeeded(run, "hosts")
    rows = listing.hosts()
    assert sorted(key for row in rows for key in row["model_classes"]) == list(hosts())
    assert all(f"│ {row['name']} " in out for row in rows)
    assert max(map(len, out.splitlines())) <= 120
    assert "work with score=column_mean: bat, evit" in out
    assert "refused, since it scores tokens by the attention of a class token, and this model has none: ats" in out


def test_every_module_of_timm_is_supported_or_refused_with_a_reason(run: Run, tmp_path: Path) -> None:
    """The reason is a sentence that says what to use instead, of names that timm has and vitrim supports."""
    out = succeeded(run, "hosts", "--all", "--json", str(tmp_path / "list.json"))
    assert max(map(len, out.splitlines())) <= 120
    rows = {row["name"]: row for row in json.loads((tmp_path / "list.json").read_text())["modules"]}
    own = {module for module in timm.list_modules() if timm.list_models(module=module)}
    assert own - set(rows) <= {path.stem for path in (Path(vitrim.__file__).parent / "models").glob("*.py")}
    for name, row in rows.items():
        assert f"│ {name} " in out
        assert bool(row["families"]) is not bool(row["reason"]), name
        assert not row["reason"] or "; use " in row["reason"] or "; for classification use " in row["reason"], name
    assert "timm VisionTransformer" in rows["vision_transformer"]["families"]
    assert rows["deit"]["families"] == ["timm VisionTransformer"]
    assert rows["convnext"]["reason"].startswith("its layers are convolutions over a map")
    assert "channels" in rows["xcit"]["reason"]
    assert sum(int(row["models"]) for row in rows.values()) > 1000


def test_what_is_used_instead_is_a_supported_model() -> None:
    known = {row["name"] for row in listing.models()}
    for row in listing.modules():
        for word in re.findall(r"\b(?:deit|vit|samvit)[a-z0-9]*_[a-z0-9_.]+\b", row["reason"]):
            assert word.split(".")[0] in known, (row["name"], word)


def test_all_is_for_hosts_and_a_word_filters(run: Run) -> None:
    code, out, _ = run("hosts", "swin", "--all")
    assert code == 0
    assert "swin_transformer_v2_cr" in out
    assert "convnext" not in out
    code, _, err = run("methods", "--all")
    assert (code, err) == (2, "error: --all is for `vitrim list hosts`, not for methods\n")


def test_hosts_come_in_groups(run: Run) -> None:
    """By purpose: the first table says what they all are, each is headed by its group."""
    out = succeeded(run, "hosts")
    places = [out.index(f"\n{purpose}") for purpose in get_args(Purpose)]
    assert places == sorted(places)
    for row in listing.hosts():
        group = get_args(Purpose).index(row["purpose"])
        end = places[group + 1] if group + 1 < len(places) else len(out)
        assert places[group] < out.index(f"│ {row['name']} ") < end


@pytest.mark.slow
def test_families_in_cells_and_compact_ones_are_named(run: Run) -> None:
    """The marks of a class are what its models answer, and one line each says which they are."""
    for name, vlm in VLMS.items():
        model = vlm.create()
        family = find_vision_language(model)
        assert family is not None
        assert not family.refused, name
        assert family.in_cells is (family.cell(model) > 1), name
        tower = family.tower(model)
        assert host_of(tower).in_cells is (host_of(tower).facts(tower).cell > 1), name
    refused = {family.name for family in vision_languages().values() if family.refused}
    assert refused == {"LLaVA-NeXT", "LLaVA-OneVision", "Qwen2.5-VL"}
    _, out, _ = run("hosts", "qwen")
    lines = " ".join(out.split())
    assert "as wholes (docs/hosts.md, cells): transformers Qwen2-VL, transformers Qwen3-VL" in lines
    assert "image tokens one by one: ColPali; LLaVA; PaliGemma; ViP-LLaVA" in lines
    assert "refused: LLaVA-NeXT; LLaVA-OneVision; Qwen2.5-VL" in lines


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_a_family_lists_the_heads_of_its_models(host: str) -> None:
    model = tiny.HOSTS[host]()
    family = host_of(model)
    assert family.facts(model).head in family.heads


@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore::vitrim.ReductionWarning")  # some defaults ask for more than 36 patches allow
@pytest.mark.parametrize("method", registered())
@pytest.mark.parametrize("host", ["vit", "avg_fc_norm", "no_class_token_avg"])
def test_methods_do_as_they_are_listed(host: str, method: str) -> None:
    model = tiny.HOSTS[host]()
    head = host_of(model).facts(model).head
    listed = next(row for row in listing.hosts() if row["name"] == "timm VisionTransformer")["methods"][method][head]
    if listed == listing.YES:
        vitrim.reduce_(model, method)
    elif listed == listing.SUBSTITUTE:
        with pytest.raises(vitrim.UnsupportedModelError, match="use score=column_mean"):
            vitrim.reduce_(model, method)
        vitrim.reduce_(model, f"{method}:score=column_mean")
    else:
        with pytest.raises(vitrim.UnsupportedModelError) as error:
            vitrim.reduce_(model, method)
        assert listed.startswith("refused, since it ")
        assert "score=column_mean" in str(error.value) or listed.removeprefix("refused, since it ") in str(error.value)


def test_a_library_that_is_missing_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "missing_libraries", lambda: ("transformers",))
    _, out, _ = run("hosts")
    assert "not installed, so their families are not listed: transformers" in out


def test_models_are_those_of_the_modules_with_a_host_class() -> None:
    names = [row["name"] for row in listing.models()]
    assert names == sorted(set(names))
    assert {"deit_small_patch16_224", "deit_tiny_distilled_patch16_224", "vit_base_patch16_224"} <= set(names)
    assert {"vit_base_resnet50d_224", "test_vit"} <= set(names)  # hybrids are built by another module
    assert {"lv_vit_small", "t2t_vit_14"} <= set(names)
    assert not {"resnet50", "swin_tiny_patch4_window7_224", "cait_s24_224", "hiera_tiny_224"} & set(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method"], "unknown list 'method'; did you mean 'methods'? valid: hosts, methods, models"),
        (["methods", "zzz"], "no name in the list of methods contains 'zzz'; `vitrim list methods` prints all"),
    ],
)
def test_errors_are_one_line(run: Run, arguments: list[str], message: str) -> None:
    refused(run, message, *arguments)


@pytest.mark.slow
def test_recipes_that_differ_in_their_keep_rate_are_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the table; the record has a row for each."""
    monkeypatch.setenv("COLUMNS", "240")  # nothing is folded
    out = succeeded(run, "recipes", "study/imagenet/t")
    lines = [line for line in out.splitlines() if "@" in line and line.startswith("│")]
    assert len(lines) == 2
    assert "study/imagenet/tome@{50,70,90}" in lines[0]
    assert "tome:keep_rate=..." in lines[0]
    assert "study/imagenet/topk@{25,50,70,90}" in lines[1]
    assert run("recipes", "study/imagenet/t", "--json", tmp_path / "list.json")[0] == 0
    names = [row["name"] for row in json.loads((tmp_path / "list.json").read_text())["rows"]]
    assert len(names) == 7
    assert {"study/imagenet/tome@50", "study/imagenet/topk@25"} <= set(names)
    _, out, _ = run("recipes", "topk@25")
    assert "topk:keep_rate=0.25" in out
    assert "{" not in out.partition("┏")[2]


# ---- presets ---------------------------------------------------------------------------------------------------------


def test_every_preset_is_a_setting_of_a_model_that_there_is() -> None:
    rows = listing.presets()
    assert sum(row["source"].startswith("ATM, Table A") for row in rows) == 132  # Tables A2, A4 and A5 of ATM
    assert len({(row["name"], row["model"], row["source"]) for row in rows}) == len(rows)
    for row in rows:
        config = registry.parse_method(row["name"])
        assert registry.parse_method(config.describe()) == config
        assert row["gflops"] == "" or 0.5 < float(row["gflops"]) < 100
        assert 25 < float(row["top1"]) < 90
    known = {row["name"] for row in listing.models()}
    assert {row["model"].partition(".")[0] for row in rows} <= known  # without the tag of timm's weights, as .mae


def test_presets_are_printed_as_text_to_paste(run: Run) -> None:
    code, out, _ = run("presets", "deit_tiny")
    own = [row for row in listing.presets() if "deit_tiny" in row["model"]]
    assert code == 0
    assert len(own) > 10
    assert all(f" {row['name']} " in f" {out} ".replace("\n", " ") for row in own)  # on one line, not cut
    assert "deit_small" not in out
