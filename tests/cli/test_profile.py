"""``vitrim profile`` as a user meets it: table, record, notes, one-line errors."""

from __future__ import annotations

import errno
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPModel

import vitrim
from cli_runs import Run, refused, runner, succeeded
from vitrim.data import ImageDataset, load_images
from vitrim.errors import VitrimError
from vitrim.measure import profile


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``vitrim profile`` with the given arguments: exit code, standard output, standard error."""
    return runner(monkeypatch, capsys, "profile")


@pytest.fixture
def record(run: Run, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What ``--json FILE`` holds."""

    def call(*arguments: str) -> dict[str, Any]:
        succeeded(run, *arguments, "--json", str(tmp_path / "profile.json"))
        return json.loads((tmp_path / "profile.json").read_text())

    return call


def cells(table: str) -> list[list[str]]:
    """The rows of a printed table, header left out."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if line[:1] == "│"]


@pytest.mark.parametrize(("convention", "total"), [("all", "17.58"), ("no-attention", "16.87"), ("no-norm", "17.56")])
def test_conventions(run: Run, convention: str, total: str) -> None:
    _, out, _ = run("vit_base_patch16_224", "--convention", convention)
    assert cells(out)[0][-3:-1] == [total, "0.0"]


def test_record(record: Callable[..., dict[str, Any]]) -> None:
    found = record("test_vit", "-m", "tome:r=10", "-m", "topk:keep_rate=0.5", "--seed", "3")
    assert found["command"] == "profile"
    assert {"vitrim", "torch", "timm", "device", "dtype", "threads", "seed"} <= set(found["environment"])
    assert found["environment"]["device"] == "meta"
    assert found["environment"]["seed"] == 3
    assert (found["weights"], found["images"], found["model_options"]) == ("random", None, {})
    assert [row["method"] for row in found["rows"]] == ["dense", "tome:r=10", "topk:keep_rate=0.5"]
    for row in found["rows"]:
        assert set(row) == {
            *("model", "method", "params", "unused_params"),
            *("gmacs", "exchange_gmacs", "tokens_per_block"),
        }
        assert row["model"] == "test_vit"
        assert row["params"] == sum(p.numel() for p in timm.create_model("test_vit").parameters())
        assert set(row["gmacs"]) == {"linear", "attention", "matching", "norm"}
        assert len(row["tokens_per_block"]) == 6
    assert found["rows"][0]["tokens_per_block"] == [101] * 6
    assert found["rows"][1]["tokens_per_block"] == [91, 81, 71, 61, 51, 41]
    assert found["rows"][0]["gmacs"]["matching"] == 0 < found["rows"][1]["gmacs"]["matching"]


def test_model_options(record: Callable[..., dict[str, Any]]) -> None:
    found = record("test_vit", "--model-option", "img_size=96", "--model-option", "num_classes=7")
    assert found["rows"][0]["tokens_per_block"] == [37] * 6
    assert found["model_options"] == {"img_size": 96, "num_classes": 7}


ATM = "atm:alpha=0.9,beta=0.2,theta_min=0.1"


@pytest.mark.slow
def test_random_images_for_methods_that_adapt_and_it_says_so(run: Run, record: Callable[..., dict[str, Any]]) -> None:
    arguments = ("test_vit", "-m", ATM, "--limit", "3", "--batch-size", "2", "--model-option", "img_size=96")
    out = succeeded(run, *arguments)
    assert "counts depend on the images; means over 3 random images" in out
    assert "random weights" in out
    found = record(*arguments)
    assert found["environment"]["device"] == "cpu"
    assert found["images"] == {"source": "random", "count": 3, "batch_size": 2}
    assert found["rows"] == record(*arguments)["rows"]
    assert found["rows"] != record(*arguments, "--seed", "1")["rows"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, name in enumerate(("a/0", "a/1", "b/0")):
        path = tmp_path / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").resize((40, 40)).rotate(90 * index).convert("RGB").save(path)
    return tmp_path / "images"


def test_a_dataset_that_nothing_needs_is_not_read() -> None:
    data = ImageDataset([b"no image"], [0], source="mine")
    report = vitrim.profile(timm.create_model("test_vit", num_classes=3), "tome:r=5", images=data)
    assert any(note.startswith("mine was not read") for note in report.notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tst_vit"], "did you mean 'test_vit'"),
        (["test_vit", "-m", "tome:r=90,strict=true"], "refused because strict=true"),
        (
            ["test_vit", "--convention", "no-atention"],
            "convention=no-atention: must be 'all', 'no-attention' or 'no-norm'",
        ),
        (["test_vit", "test_vit2", "--checkpoint", "x.safetensors"], "the weights of one model; 2 models are given"),
        (["test_vit", "-m", "tome:r=2", "--model-option", "depth=0"], "has no blocks"),
        ([], "MODEL"),
    ],
)
def test_errors_are_one_line(run: Run, arguments: list[str], message: str) -> None:
    refused(run, message, *arguments)


class Full(io.StringIO):
    """A standard output that nothing more goes to."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_behind_standard_output_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    code, _, err = run("test_vit", "--json", "-")
    assert code == 2
    assert err.endswith("error: No space left on device\n")


def test_a_folder_without_permission_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/secret/images")

    monkeypatch.setattr("vitrim.measure.profile.load_images", refuses)
    code, _, err = run("test_vit", "-m", ATM, "--images", "/secret/images")
    assert (code, err) == (2, "error: /secret/images: Permission denied\n")


# ---- the same from Python


@pytest.mark.slow
def test_models_that_are_there_are_counted_as_by_name_and_stay_as_they_were() -> None:
    torch.manual_seed(0)
    models = [timm.create_model(name, img_size=96).train() for name in ("test_vit", "test_vit2")]
    weights = [value.clone() for model in models for value in model.state_dict().values()]
    methods = ["tome:r=3", vitrim.parse_method("topk:keep_rate=0.5,score=column_mean")]
    found = profile.profile(models, methods)
    named = profile.profile(vitrim.ModelSpec(["test_vit", "test_vit2"], options={"img_size": 96}), methods)
    assert found.rows == named.rows
    assert (found.facts["weights"], named.facts["weights"]) == ("given", "random")
    assert (found.facts["environment"]["device"], named.facts["environment"]["device"]) == ("cpu", "meta")
    left = [value for model in models for value in model.state_dict().values()]
    assert all(torch.equal(value, other) for value, other in zip(left, weights, strict=True))
    assert [(model.training, type(model)) for model in models] == [(True, timm.models.VisionTransformer)] * 2


def test_a_dataset_keeps_its_transform(folder: Path) -> None:
    data = load_images(folder)
    transform = data.transform
    model = vitrim.ModelSpec("test_vit", options={"img_size": 96})
    assert profile.profile(model, ATM, images=vitrim.DataSpec(data, limit=2)).record == (
        profile.profile(model, ATM, images=vitrim.DataSpec(str(folder), limit=2)).record
    )
    assert data.transform is transform


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ([], {}, "name at least one model"),
        ("test_vit", {"convention": "some"}, "convention=some: must be 'all'"),
        (5, {}, "models=5: must be a torch.nn.Module, or a text"),
        (["test_vit", 5], {}, "models=5: must be a torch.nn.Module, or a text"),
        ("test_vit", {"images": 5}, "expected a source of images or a dataset"),
        (
            "test_vit",
            {"images": vitrim.DataSpec(None, split="val")},
            "say how to read a source of images, and none is given",
        ),
    ],
)
def test_arguments_that_say_nothing_are_refused(models: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        profile.profile(models, **options)


def test_a_model_that_reads_text_beside_the_images_names_its_tower() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config={**sizes, "vocab_size": 50}, vision_config=vision))
    with pytest.raises(VitrimError, match=r"CLIPModel reads text .*: give its tower of images, model\.vision_model$"):
        profile.profile(model)
    assert profile.profile(model.vision_model, "tome:r=2").rows[1]["tokens_per_block"] == [15, 13]


def test_a_wrapper_names_what_it_holds() -> None:
    with pytest.raises(VitrimError, match=r"Sequential is not a supported host itself: reduce model\[0\]"):
        profile.profile(torch.nn.Sequential(timm.create_model("test_vit")))
