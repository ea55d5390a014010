"""Methods from files, as `@FILE` wherever a method is written."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models import VisionTransformer

import vitrim
from vitrim.core.checks import described
from vitrim.core.registry import host_of
from vitrim.errors import ReductionWarning, VitrimError


def vit(depth: int = 3, **changes: Any) -> VisionTransformer:
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "num_classes": 5, **changes}
    return VisionTransformer(depth=depth, **options).eval()


def tuned(model: VisionTransformer, **changes: Any) -> dict[str, Any]:
    made_for = described(host_of(model), model)
    options = {"r": [3, 2, 0]}
    return {
        "format": 1, "method": "tome", "version": 1, "options": options, "tuned": {"made_for": made_for}, **changes,
    }  # fmt: skip


def write(file: Path, entries: Any) -> str:
    file.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return f"@{file}"


def test_a_result_is_a_method_and_reduces_as_if_written_out(tmp_path: Path) -> None:
    text = write(tmp_path / "best.json", tuned(vit()))
    assert vitrim.parse_method(text).describe() == "tome:r=[3,2,0]"
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    outputs = []
    for method in (text, f"@{tmp_path}", "tome:r=[3,2,0]"):
        model = vit()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            vitrim.reduce_(model, method)
        outputs.append(model(images))
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[2])


def test_a_saved_reduction_and_a_text_file_are_methods(tmp_path: Path) -> None:
    model = vit()
    vitrim.reduce_(model, "tome:r=2").save(tmp_path / "saved")
    assert vitrim.parse_method(f"@{tmp_path / 'saved'}") == vitrim.ToMe(r=2)
    text = write(tmp_path / "fast", "# for the web service\n\n  topk:keep_rate=0.5   # by hand\n")
    assert vitrim.parse_method(text) == vitrim.TopK(keep_rate=0.5)


@pytest.mark.parametrize("changes", [{"embed_dim": 64}, {"img_size": 64}])
def test_another_model_is_warned_about(tmp_path: Path, changes: dict[str, int]) -> None:
    text = write(tmp_path / "best.json", tuned(vit()))
    message = r"was found for another model \((patches 16, not 64|channels 32, not 64)\)"
    with pytest.warns(ReductionWarning, match=message):
        vitrim.reduce_(vit(**changes), text)


def test_a_model_of_another_depth_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    text = write(tmp_path / "best.json", tuned(vit()))
    model = vit(depth=4)
    with pytest.raises(VitrimError, match=r"blocks 3, not 4.*do not fit"):
        vitrim.reduce_(model, text)
    vitrim.reduce_(model, "tome:r=2")


def test_a_saved_reduction_knows_the_model_that_its_setting_was_found_for(tmp_path: Path) -> None:
    reduction = vitrim.reduce_(vit(), write(tmp_path / "best.json", tuned(vit())))
    reduction.save(tmp_path / "saved")
    assert vitrim.Reduction.load(vit(), tmp_path / "saved").config == reduction.config
    for load in (vitrim.Reduction.load, lambda model, folder: vitrim.reduce_(model, f"@{folder}")):
        with pytest.raises(VitrimError, match=r"blocks 3, not 4.*do not fit"):
            load(vit(depth=4), tmp_path / "saved")


def test_the_note_of_the_model_is_kept_by_a_copy_of_the_config(tmp_path: Path) -> None:
    config = vitrim.parse_method(write(tmp_path / "best.json", tuned(vit())))
    assert config.model_copy().made_for == config.made_for
    assert config.made_for is not None
    assert vitrim.ToMe().made_for is None


PROBLEMS: dict[str, tuple[Any, str]] = {
    "damaged": ('{"format": 1, "met', "is not valid JSON"),
    "version": ({"format": 1, "method": "tome", "version": 7, "options": {}}, "is of version 7 of tome"),
    "no model": ({"format": 1, "method": "tome", "options": {}, "tuned": {}}, "tuned.made_for is missing"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_wrong_json_file_is_refused_in_one_line(tmp_path: Path, problem: str) -> None:
    entries, message = PROBLEMS[problem]
    with pytest.raises(VitrimError, match=message) as error:
        vitrim.parse_method(write(tmp_path / "best.json", entries))
    assert "best.json" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("tome:r=1\ntome:r=2\n", "has 2 lines"), ("# nothing\n", "has 0 lines"), ("@other", "names another file")],
)
def test_a_text_file_has_one_method(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        vitrim.parse_method(write(tmp_path / "method.txt", text))


def test_what_is_no_file_of_a_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VitrimError, match=r"no file .*gone.json: @ is followed by the file"):
        vitrim.parse_method(f"@{tmp_path / 'gone.json'}")
    with pytest.raises(VitrimError, match=r"it has neither reduction.json nor best.json"):
        vitrim.parse_method(f"@{tmp_path}")
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(VitrimError, match="it is not text"):
        vitrim.parse_method(f"@{tmp_path / 'image'}")
    (tmp_path / "large").write_bytes(b" " * (2 << 20))
    with pytest.raises(VitrimError, match="it has 2097152 bytes"):
        vitrim.parse_method(f"@{tmp_path / 'large'}")
