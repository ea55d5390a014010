"""Nothing is imported that is not used, and nothing that is not installed is needed."""

from __future__ import annotations

import subprocess
import sys

UNUSED = ("transformers", "torchvision.models.vision_transformer", "timm.models.eva", "datasets", "matplotlib")

WITHOUT_TRANSFORMERS = "import sys; sys.modules['transformers'] = None"
"""Imports of it fail and its spec is not found, as where it is not installed."""


def run(code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_and_using_vitrim_adds_no_library_to_torch_and_timm() -> None:
    """Nor does every public name, which are resolved on first use, nor reducing a timm model."""
    code = f"""
import sys, torch, timm
before = set(sys.modules)
import vitrim
for name in vitrim.__all__:
    getattr(vitrim, name)
vitrim.ToMe
new = set(sys.modules) - before
print([name for name in {UNUSED} if name in new])
print(sorted({{name.partition(".")[0] for name in new}} & {{"timm", "torchvision", "transformers"}}))
model = timm.create_model("test_vit", num_classes=3)
vitrim.reduce_(model, "tome:r=4")
vitrim.restore_(model)
new = set(sys.modules) - before
print([name for name in ("transformers", "torchvision.models.vision_transformer") if name in new])
"""
    assert run(code).splitlines() == ["[]", "[]", "[]"]


def test_everything_else_works_without_transformers() -> None:
    code = f"""{WITHOUT_TRANSFORMERS}
import timm, torch, vitrim
from vitrim.cli import main

model = timm.create_model("test_vit", num_classes=3).eval()
vitrim.reduce_(model, "tome:r=4")
assert model(torch.zeros(1, 3, 160, 160)).shape == (1, 3)
for arguments in (["list", "hosts"], ["list", "methods"], ["profile", "test_vit"]):
    sys.argv = ["vitrim", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, (arguments, stop.code)
sys.argv = ["vitrim", "profile", "hf:some/name"]
try:
    main()
except SystemExit as stop:
    print("exit code", stop.code)
"""
    out = run(code)
    assert "timm VisionTransformer" in out
    assert "not installed, so their families are not listed: transformers" in out
    assert "tome" in out
    assert out.strip().splitlines()[-1] == "exit code 2"
