"""A method is one short file that imports vitrim alone."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import vitrim
from cli_runs import exit_code
from vitrim.core import method, registry

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_method.py"


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METHODS", dict(registry.methods()))
    monkeypatch.setattr(registry, "_REDUCERS", dict(registry._REDUCERS))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The example in a folder of its own."""
    return Path(shutil.copy(EXAMPLE, tmp_path / "mine.py"))


def test_the_longest_patches_stay(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: those whose tokens, as they enter block 1, have the largest norms."""
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    importlib.import_module("mine")
    model, entering = tiny.HOSTS["vit"](), list[torch.Tensor]()
    reduction = vitrim.reduce_(model, "longest:keep_rate=0.25,blocks=[1]", record=True)
    model.blocks[1].register_forward_pre_hook(lambda module, args: entering.append(args[0]))
    model(tiny.images())
    longest = entering[0][:, 1:].pow(2).sum(-1).topk(9, dim=1).indices + 1  # behind the class token
    assert reduction.states[2].position[:, 1:].sort(dim=1).values.equal(longest.sort(dim=1).values)
    assert [state.num_patches for state in reduction.states] == [36, 36, 9, 9, 9]


def test_the_command_line_takes_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.chdir(file.parent)
    importlib.import_module("mine")
    assert exit_code(monkeypatch, "profile", "test_vit", "-m", "longest:keep_rate=0.5", "--json", "found.json") == 0
    assert "longest:keep_rate=0.5" in (file.parent / "found.json").read_text()
    json.loads((file.parent / "found.json").read_text())


def test_a_method_of_ones_own_may_have_a_frozen_form() -> None:
    class Frozen(method.Adaptive):
        name = "test_frozen"
        r: int | None = None

        def frozen(self, initial: int, counts: Any) -> Frozen:
            return Frozen(r=1)

    assert Frozen().is_adaptive()
    assert not Frozen().frozen(4, [3]).is_adaptive()
