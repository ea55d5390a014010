"""That every array of every reference vector is accounted for, and that the loader notices what is not."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import golden_files as golden
from golden_files import CLAIMS, EXCEPTIONS, GOLDEN, Part, Reference

TESTS = Path(__file__).parent
PLAIN = Part("merging/vit_plain")


@pytest.fixture(scope="module", autouse=True)
def _claims() -> None:
    """Import the test modules that name reference files, so that `CLAIMS` is whole whatever tests were asked for."""
    for path in TESTS.rglob("test_*.py"):
        loaded = getattr(sys.modules.get(path.stem), "__file__", None)
        if loaded != str(path) and re.search(r"^@golden\w*\.cases", path.read_text(), re.MULTILINE):
            spec = importlib.util.spec_from_file_location(f"claims_of_{path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)


@pytest.mark.parametrize("file", golden.index())
def test_some_test_answers_for_every_array(file: str) -> None:
    ref = golden.load(file)
    unclaimed = [
        key
        for key in ref
        if key not in golden.ABOUT and not golden.matches(key, CLAIMS[file]) and golden.exception(file, key) is None
    ]
    assert not unclaimed, f"no test reads {unclaimed} of {file}"


def test_the_index_lists_the_files_that_are_there() -> None:
    files = {row["file"] for row in json.loads((GOLDEN / "index.json").read_text())["files"]}
    assert files == {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.npz")}
    assert set(CLAIMS) <= set(golden.index())


@pytest.mark.parametrize("rule", EXCEPTIONS)
def test_exceptions_are_of_arrays_that_exist(rule: tuple[str, str]) -> None:
    files, keys = rule
    found = [key for file in golden.index() if golden.matches(file, [files]) for key in golden.load(file)]
    assert any(golden.matches(key, [keys]) for key in found)


# ---- the loader ------------------------------------------------------------------------------------------------------


def test_an_array_that_is_only_read_is_left_out() -> None:
    ref = Reference(PLAIN)
    assert {"logits", "logits_f32", "cls_per_block", "tokens_per_block"} == set(ref.left_out())
    _ = ref["logits"], ref.get("cls_per_block")
    ref.check("tokens_per_block", [65] * 6, torch.Tensor.tolist)
    ref.check("logits", golden.tensor(ref, "logits"))
    assert set(ref.left_out()) == {"logits_f32", "cls_per_block"}


def test_inputs_have_to_be_read() -> None:
    ref = Reference(Part("training/losses_metrics_a", ("ce/logits", "ce/labels")))
    assert ref.left_out() == ["ce/logits", "ce/labels"]
    assert ref.get("ce/logits") is not None
    assert ref.left_out() == ["ce/labels"]
    assert ref.get("ce/labels") is not None
    assert ref.left_out() == []


@pytest.mark.parametrize(
    ("file", "key", "change"),
    [
        ("merging/vit_plain", "logits", 2e-9),
        ("merging/vit_plain", "logits_f32", 1e-4),
        ("merging/vit_plain", "cls_per_block", 1e-4),
        ("merging/vit_plain", "tokens_per_block", 1),
        ("training/lr_schedule_a", "imagenet_w20_e30_spe10", 1e-11),
        ("training/losses_metrics_a", "map/value", 1e-2),
        ("atm/atm_default", "logits", 2e-9),
    ],
)
def test_another_value_is_noticed_at_the_tolerance_of_the_index(file: str, key: str, change: float) -> None:
    ref = golden.load(file)
    stored = golden.tensor(ref, key)
    ref.check(key, stored)
    changed = stored.clone()
    changed.view(-1)[-1] += change
    with pytest.raises(AssertionError, match=re.escape(f"{key} of {file}")):
        ref.check(key, changed)
    with pytest.raises(AssertionError, match=re.escape(f"{key} of {file}")):
        ref.check(key, stored[..., None])


def test_what_was_computed_in_float64_is_not_compared_with_less() -> None:
    ref = golden.load(PLAIN.file)
    with pytest.raises(AssertionError, match="float32 cannot be compared"):
        ref.check("logits", golden.tensor(ref, "logits").float())


def test_a_whole_number_is_not_rounded_to_the_stored_one() -> None:
    ref = golden.load(PLAIN.file)
    with pytest.raises(AssertionError, match="tokens_per_block"):
        ref.check("tokens_per_block", torch.full((6,), 65.4))


def test_a_test_that_leaves_out_an_array_fails() -> None:
    """The hook of suite.py around the call of a test."""
    ref = Reference(PLAIN)
    item = cast(pytest.Function, SimpleNamespace(funcargs={"ref": ref}))
    call = golden.using_up(item)
    next(call)
    with pytest.raises(AssertionError, match=r"of merging/vit_plain the test neither compares nor reads \["):
        call.send(True)
    ref.compared.update(ref)
    call = golden.using_up(item)
    next(call)
    with pytest.raises(StopIteration):
        call.send(True)


def test_the_hook_is_there(request: pytest.FixtureRequest) -> None:
    hooks = request.config.pluginmanager.hook.pytest_pyfunc_call.get_hookimpls()
    assert golden.using_up in [hook.function for hook in hooks]
