"""Weights are loaded whole or not at all, whatever is in their file."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cli_runs import exit_code
from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.weights import convert_weights, holds_encoder, load_checkpoint, load_encoder, load_host, weights_file

OPTIONS = {"img_size": 16, "patch_size": 4}
OTHERS = {
    "int64": lambda value: value.to(torch.int64),
    "bool": lambda value: value > 0,
    "complex64": lambda value: value.to(torch.complex64),
    "nan": lambda value: value.index_fill(0, torch.tensor([0]), float("nan")),
    "inf": lambda value: value.index_fill(0, torch.tensor([0]), float("inf")),
    "too large": lambda value: value.double().index_fill(0, torch.tensor([0]), 1e300),
}


class Evil:
    """What it does when it is unpickled is seen in the folder it stands in."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def tiny(classes: int = 3) -> nn.Module:
    return timm.create_model("test_vit", num_classes=classes, **OPTIONS)


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    """The one line a call is refused with."""
    with pytest.raises(VitrimError) as refused:
        call(*arguments, **options)
    return str(refused.value)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", ["head.weight", "blocks.1.mlp.fc1.bias"])
@pytest.mark.parametrize("classes", [3, 5])
def test_weights_that_are_no_finite_real_numbers_are_refused(
    kind: str, name: str, classes: int, tmp_path: Path
) -> None:
    """Torch would cast them; the model, its head too, stays as it was."""
    weights = copies(tiny())
    save_file({**weights, name: OTHERS[kind](weights[name]).contiguous()}, tmp_path / "bad.safetensors")
    model = tiny(classes)
    head, before = model.head, copies(model)
    for load in (load_host, load_checkpoint) if classes == 3 else (load_host,):
        text = refusal(load, model, tmp_path / "bad.safetensors")
        assert name in text
        assert ("not finite" in text) == (kind in ("nan", "inf", "too large"))
    assert model.head is head
    assert model.num_classes == classes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_head_of_another_width_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    weights = copies(tiny())
    save_file({**weights, "head.weight": torch.zeros(3, 7)}, tmp_path / "bad.safetensors")
    model = tiny(5)
    assert "head.weight has shape (3, 7)" in refusal(load_host, model, tmp_path / "bad.safetensors")
    assert model.num_classes == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_another_precision_are_taken(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = copies(tiny())
    save_file({key: value.to(dtype) for key, value in weights.items()}, tmp_path / "other.safetensors")
    model = tiny()
    load_checkpoint(model, tmp_path / "other.safetensors")
    assert all(torch.equal(value, weights[key].to(dtype).float()) for key, value in model.state_dict().items())


def test_weights_that_are_too_large_for_the_model_s_precision_are_refused(tmp_path: Path) -> None:
    """Half precision ends at 65,504: torch would load infinity."""
    model = tiny().half()
    weights = {key: value.float() for key, value in copies(model).items()}
    weights["blocks.1.mlp.fc1.bias"][3] = 1e5
    save_file(weights, tmp_path / "large.safetensors")
    before = copies(model)
    said = refusal(load_checkpoint, model, tmp_path / "large.safetensors")
    assert "blocks.1.mlp.fc1.bias has values that are not finite numbers in float16" in said
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    load_checkpoint(tiny().bfloat16(), tmp_path / "large.safetensors")  # whose range is that of float32


def test_a_detector_of_other_classes_brings_its_heads(tmp_path: Path) -> None:
    """They have a row more than classes, for the background."""
    options: dict[str, Any] = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    options |= {"channels": 8, "hidden": 8, "rpn_layers": 1, "box_layers": 1, "samples": 16}
    three, five = (
        create_model("vitdet:vit_tiny_patch16_224", options={**options, "num_classes": classes}) for classes in (3, 5)
    )
    save_file(three.state_dict(), tmp_path / "three.safetensors")
    load_host(five, tmp_path / "three.safetensors")
    assert five.num_classes == 3
    assert all(torch.equal(value, three.state_dict()[key]) for key, value in five.state_dict().items())


def test_integers_are_taken_where_the_model_has_integers_only(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(2)
    save_file(norm.state_dict(), tmp_path / "norm.safetensors")
    load_checkpoint(norm, tmp_path / "norm.safetensors")
    bad = {**norm.state_dict(), "num_batches_tracked": torch.tensor(0.5)}
    save_file(bad, tmp_path / "norm.safetensors")
    assert "this model needs integers (int64)" in refusal(load_checkpoint, norm, tmp_path / "norm.safetensors")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/proc/self/mem", "/proc/self/mem is not a safetensors file"),
        ("a" * 400, "File name too long"),
        ("/dev/zero", "no checkpoint at /dev/zero"),
        ("none.pth", "no checkpoint at none.pth"),
    ],
)
def test_what_is_no_file_of_weights(path: str, said: str) -> None:
    if path.startswith("/") and not Path(path).exists():
        pytest.skip("this system has no such file")
    assert said in refusal(lambda: load_checkpoint(tiny(), weights_file(Path(path))))


# ---- what torch.save wrote -------------------------------------------------------------------------------------------

CONTENTS = {
    "weights": lambda weights: weights,
    "published": lambda weights: {
        "model": weights,
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1),
        "optimizer": {"state": {0: {"step": torch.zeros(())}}, "param_groups": [{"lr": 0.1}]},
    },
    "parallel": lambda weights: {"state_dict": {f"module.{key}": value for key, value in weights.items()}},
    "half": lambda weights: {key: value.half() for key, value in weights.items()},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", CONTENTS)
def test_pickled_weights_are_those_that_were_saved(kind: str, zipped: bool, tmp_path: Path) -> None:
    weights = copies(tiny())
    file = tmp_path / "weights.pth"
    torch.save(CONTENTS[kind](weights), file, _use_new_zipfile_serialization=zipped)
    count, values = convert_weights(file, tmp_path / "new" / "weights.safetensors")
    (plain := tmp_path / "plain").touch()
    assert (tmp_path / "new" / "weights.safetensors").stat().st_mode == plain.stat().st_mode
    assert (count, values) == (len(weights), sum(value.numel() for value in weights.values()))
    for path in (file, tmp_path / "new" / "weights.safetensors"):
        for load, model in ((load_checkpoint, tiny()), (load_host, tiny(5))):
            load(model, path)
            expected = {key: value.half().float() if kind == "half" else value for key, value in weights.items()}
            assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    if zipped:  # whatever it is called
        load_checkpoint(tiny(), file.rename(tmp_path / "weights.dat"))


def test_a_prefix_of_some_names_is_part_of_them(tmp_path: Path) -> None:
    """DataParallel puts it in front of all."""
    model = nn.ModuleDict({"module": nn.Linear(3, 2), "other": nn.Linear(2, 1)})
    weights = copies(model)
    torch.save({key: value + 1 for key, value in weights.items()}, tmp_path / "weights.pth")
    load_checkpoint(model, tmp_path / "weights.pth")
    assert all(torch.equal(value, weights[key] + 1) for key, value in model.state_dict().items())


def test_tensors_that_share_memory_or_lie_across_are_converted(tmp_path: Path) -> None:
    """As tied weights do, and transposed ones: safetensors has neither."""
    table = torch.arange(12.0).view(3, 4)
    torch.save({"in": table, "out": table, "across": table.T, "part": table[1:]}, tmp_path / "tied.pth")
    assert convert_weights(tmp_path / "tied.pth", tmp_path / "tied.safetensors") == (4, 44)
    found = load_file(tmp_path / "tied.safetensors")
    assert all(torch.equal(found[name], table) for name in ("in", "out"))
    assert torch.equal(found["across"], table.T)
    assert torch.equal(found["part"], table[1:])


def test_a_pickled_encoder_is_found(tmp_path: Path) -> None:
    weights = {f"encoder.{key}": value for key, value in copies(tiny(0)).items()}
    torch.save({"model": weights}, tmp_path / "mae.pth")
    model = tiny()
    assert holds_encoder(tmp_path / "mae.pth", model)
    load_encoder(model, tmp_path / "mae.pth")
    assert torch.equal(model.cls_token, weights["encoder.cls_token"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", ["alone", "beside", "within", "name", "tensor"])
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle 0", "pickle 5"])
@pytest.mark.parametrize("suffix", [".pth", ".bin"])
def test_nothing_in_a_pickle_is_executed(place: str, form: str, suffix: str, tmp_path: Path) -> None:
    model, evil, file = tiny(), Evil(tmp_path / "executed"), tmp_path / f"evil{suffix}"
    before = copies(model)
    content = {
        "alone": evil,
        "beside": {"model": before, "more": evil},
        "within": {"model": {**before, "more": [evil]}},
        "name": {"model": before, "args": argparse.Namespace(more=evil)},
        "tensor": {**before, "head.weight": evil},
    }[place]
    if form in ("zip", "legacy"):
        torch.save(content, file, _use_new_zipfile_serialization=form == "zip")
    else:
        file.write_bytes(pickle.dumps(content, int(form[-1])))
    for call in (load_checkpoint, load_host):
        text = refusal(call, model, file)
        assert "which is not executed" in text
        assert "weights_only" not in text  # torch's advice is to execute it
    refusal(convert_weights, file, tmp_path / "out.safetensors")
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "out.safetensors").exists()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    torch.load(file, weights_only=False) if form in ("zip", "legacy") else pickle.loads(file.read_bytes())
    assert (tmp_path / "executed").exists()  # the test would have seen it


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bad.pth is not a file that torch.save wrote: it is empty, or no regular file$"),
        (b"hello", "cannot read .*bad.pth: .* which is not executed$"),  # torch raises KeyError(101)
    ],
)
def test_files_that_are_no_pickles(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.pth").write_bytes(content)
    with pytest.raises(VitrimError, match=message):
        convert_weights(tmp_path / "bad.pth", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_pickles_that_are_no_weights(tmp_path: Path) -> None:
    weights, file = copies(tiny()), tmp_path / "bad.pth"
    cases: list[tuple[Any, str]] = [
        ({"epoch": 3}, "has no weights"),
        ([weights["head.bias"]], "has no weights"),
        ({"model": weights, "model_ema": weights}, "several weights: model, model_ema; .*vitrim convert"),
        ({**weights, "head.bias": torch.zeros(1).expand(3)}, "head.bias is not stored as a plain tensor"),
        ({**weights, "head.bias": torch.zeros(3).to_sparse()}, "head.bias is not stored as a plain tensor"),
        ({**weights, "head.bias": torch.full((3,), float("nan"))}, "head.bias has values that are not finite"),
        (tiny(), "which is not executed .timm"),
    ]
    for content, said in cases:
        torch.save(content, file)
        with pytest.raises(VitrimError, match=said):
            load_checkpoint(tiny(), file)
    whole = tmp_path / "whole.pth"
    torch.save(weights, whole)
    for junk in (
        b"",
        b"junk",
        b"\x80\x05junk",
        b"\x80\x02" + b"]" * 10_000 + b"a" * 9_999 + b".",
        whole.read_bytes()[:5000],
    ):
        file.write_bytes(junk)
        refusal(load_checkpoint, tiny(), file)


def test_convert_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = copies(tiny()), copies(tiny())
    file, out = tmp_path / "both.pth", tmp_path / "out.safetensors"
    torch.save({"model": one, "ema": {"weights": other}, "model_ema": other}, file)
    assert exit_code(monkeypatch, "convert", file, out) == 2
    assert "several weights: model, model_ema; name one with --key" in capsys.readouterr().err
    assert exit_code(monkeypatch, "convert", file, out, "--key", "ema.weight") == 2
    assert "has no 'weight'; valid: weights" in capsys.readouterr().err
    assert not out.exists()
    for key, expected in (("model", one), ("ema.weights", other), ("model_ema", other)):
        assert exit_code(monkeypatch, "convert", file, out, "--key", key, "--json", tmp_path / "record.json") == 0
        found = load_file(out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert json.loads((tmp_path / "record.json").read_text())["tensors"] == len(other)
    before = file.read_bytes()
    assert exit_code(monkeypatch, "convert", file, out, "--key", "model", "--json", file) == 2
    assert "both.pth is a file of this command itself: give the record another name" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert exit_code(monkeypatch, "convert", out, tmp_path / "again.safetensors") == 2
    assert "is a safetensors file already" in capsys.readouterr().err
    assert exit_code(monkeypatch, "convert", file, tmp_path / "out.bin", "--key", "model") == 2
    assert "must end in .safetensors" in capsys.readouterr().err


def test_weights_of_a_run_with_other_classes_name_the_run(tmp_path: Path) -> None:
    save_file(nn.Linear(4, 3).state_dict(), tmp_path / "model.safetensors")
    assert "run:" not in refusal(load_checkpoint, nn.Linear(4, 5), tmp_path / "model.safetensors")
    (tmp_path / "recipe.yaml").touch()
    said = refusal(load_checkpoint, nn.Linear(4, 5), tmp_path / "model.safetensors")
    assert said.endswith(f"; run:{tmp_path} is the model of that run")


def test_the_classifier_stays_where_an_encoder_has_one_of_its_own(tmp_path: Path) -> None:
    model = timm.create_model("test_vit", num_classes=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_file({f"encoder.{name}": value + 1.0 for name, value in before.items()}, tmp_path / "model.safetensors")
    load_encoder(model, tmp_path / "model.safetensors")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name] + (not name.startswith("head.")), rtol=0, atol=0)
