"""``vitrim list``: what it names can be used, and unknown words get one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from vitrim import cli
from vitrim.cli import listing
from vitrim.registry import backbone_of, backbones
from vitrim.registry import methods as registered

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``vitrim list`` with the given arguments: exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vitrim", "list", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_every_method_with_its_class_attributes() -> None:
    rows = {row["name"]: row for row in listing.methods()}
    assert set(rows) == set(registered())
    for name, config in registered().items():
        assert rows[name]["kind"] == config.kind
        assert rows[name]["adaptive"] is config.adaptive
        assert rows[name]["needs_class_token"] is config.needs_class_token
    assert rows["atm"]["adaptive"]
    assert not rows["tome"]["adaptive"]
    assert "Token Merging" in rows["tome"]["paper"]


def test_table_of_methods(run: Run) -> None:
    code, out, _ = run("methods")
    assert code == 0
    assert all(f"│ {name} " in out for name in registered())
    assert "tome: Token Merging: Your ViT But Faster (ICLR 2023)" in out


def test_hosts(run: Run) -> None:
    code, out, _ = run("hosts")
    assert code == 0
    assert [row["model_class"] for row in listing.hosts()] == list(backbones())
    assert "timm VisionTransformer" in out


def test_models_are_those_of_the_modules_with_a_host_class() -> None:
    names = [row["name"] for row in listing.models()]
    assert names == sorted(set(names))
    assert {"deit_small_patch16_224", "deit_tiny_distilled_patch16_224", "vit_base_patch16_224"} <= set(names)
    assert {"vit_base_resnet50d_224", "test_vit"} <= set(names)  # hybrids are built by another module
    assert not {"resnet50", "swin_tiny_patch4_window7_224", "samvit_base_patch16", "cait_s24_224"} & set(names)


def test_a_listed_model_of_every_module_is_a_host() -> None:
    first = {row["module"]: row["name"] for row in listing.models()}
    for name in first.values():
        with torch.device("meta"):
            assert backbone_of(timm.create_model(name)).name


def test_filter(run: Run) -> None:
    code, out, _ = run("models", "deit_small")
    assert code == 0
    assert "deit_small_patch16_224" in out
    assert "vit_base" not in out
    assert "refused" in out  # names are told by module: not every one can be reduced


@pytest.mark.parametrize("kind", ["methods", "hosts", "models"])
def test_record(run: Run, tmp_path: Path, kind: str) -> None:
    code, _, err = run(kind, "--json", str(tmp_path / "list.json"))
    assert code == 0, err
    found: dict[str, Any] = json.loads((tmp_path / "list.json").read_text())
    assert (found["command"], found["kind"]) == ("list", kind)
    assert found["environment"]["vitrim"]
    assert found["rows"] == listing.TABLES[kind][2]()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method"], "unknown list 'method'; did you mean 'methods'? valid: hosts, methods, models"),
        (["xyz"], "unknown list 'xyz'; valid: hosts, methods, models"),
        (["models", "deit_smal_patch16"], "did you mean 'deit_small_patch16_224'? `vitrim list models` prints all"),
        (["methods", "zzz"], "no name in the list of methods contains 'zzz'; `vitrim list methods` prints all"),
        ([], "Missing argument"),
    ],
)
def test_errors_are_one_line(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
