from __future__ import annotations

import doctest
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import vitrim
from vitrim.core.registry import methods

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(vitrim.__path__, "vitrim.")
    if not module.name.startswith("vitrim.cli")  # its docstrings are help texts
    # what is loaded inside vLLM or lmms-eval alone
    if not module.name.startswith("vitrim.serving.") or module.name.endswith((".vllm", ".lmms_eval", ".setting"))
)

SHOWN = {
    "vitrim.data.dataset",
    *(f"vitrim.engines.{name}" for name in ("engine", "macs", "memory", "runnable")),
    *(f"vitrim.measure.{name}" for name in ("latency", "profile", "bench", "compare", "speed_report")),
}
"""Modules whose docstrings have examples, besides those of the methods."""


def run(code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", vitrim.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(vitrim, name)
    assert value.__name__ == name
    assert value.__module__.startswith("vitrim.")
    assert value.__doc__  # its own: a class does not inherit this attribute
    assert name in dir(vitrim)


def test_star_import_gives_exactly_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from vitrim import *", names)
    assert sorted(set(names) - {"__builtins__"}) == sorted(vitrim.__all__)
    assert len(set(vitrim.__all__)) == len(vitrim.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'vitrim' has no attribute 'ToMee'"):
        vitrim.ToMee  # noqa: B018
    assert not hasattr(vitrim, "_private")


@pytest.mark.parametrize("name", sorted(methods()))
def test_every_method_is_public_and_shows_an_example(name: str) -> None:
    config = methods()[name]
    assert getattr(vitrim, config.__name__) is config
    assert config.__doc__
    assert "Example:\n" in config.__doc__
    assert ">>>" in config.__doc__


SLOW = (
    "analysis.analyze",
    "app.service",
    "engines.exported",
    "engines.engine",
    "measure.export",
    "measure.in_files",
    "tuning.tune",
)


def with_examples() -> Iterator[Any]:
    """The modules that have any, those that write ONNX in the process of the tests of that (`tests/engines`).

    Examples of `SLOW` take seconds: those functions have a file of tests each.
    """
    for name in MODULES:
        found = find_spec(name)
        assert found is not None
        assert found.origin is not None
        if ">>>" in Path(found.origin).read_text(encoding="utf-8"):
            marks = [pytest.mark.xdist_group("onnx")] if name == "vitrim.engines.exported" else []
            marks += [pytest.mark.slow] if name.removeprefix("vitrim.") in SLOW else []
            yield pytest.param(name, marks=marks)


EXAMPLES = list(with_examples())


def test_every_module_is_imported_and_those_that_users_call_have_examples() -> None:
    for name in MODULES:
        import_module(name)
    shown = {str(example.values[0]) for example in EXAMPLES}
    assert shown >= {config.__module__ for config in methods().values()} | SHOWN


# looking for examples takes a tenth of a second in a module that has none
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings_run(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.failed == 0
    assert result.attempted > 0


def test_the_package_is_imported_without_torch() -> None:
    loaded = run("import sys, vitrim; vitrim.__version__; print([m for m in ('torch', 'timm') if m in sys.modules])")
    assert loaded.strip() == "[]"


@pytest.mark.slow  # imports torch once more
def test_the_list_of_methods_needs_no_library_of_models_and_no_compiler() -> None:
    code = """
import sys
sys.argv = ["vitrim", "list", "methods"]
from vitrim.cli import main
main()
print([name for name in ("timm", "transformers", "torchvision", "torch._dynamo") if name in sys.modules])
"""
    out = run(code)
    assert "tome" in out
    assert out.strip().splitlines()[-1] == "[]"


def test_help_answers_without_torch() -> None:
    code = """
import sys
sys.argv = ["vitrim", "--help"]
from vitrim.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print([name for name in ("torch", "timm", "pydantic") if name in sys.modules])
"""
    out = run(code)
    assert "profile" in out
    assert out.strip().splitlines()[-1] == "[]"


# ---- arguments of the functions --------------------------------------------------------------------------------------


CALLS: dict[str, Callable[..., Any]] = {
    "profile": lambda model, methods, data, **more: vitrim.profile(model, methods, **more),
    "bench": lambda model, methods, data, **more: vitrim.bench(model, methods, **more),
    "evaluate": vitrim.evaluate,
    "compare": vitrim.compare,
    "analyze": lambda *given, **more: vitrim.analyze(*given, out="never", **more),
    "tune": lambda *given, **more: vitrim.tune(*given, target="macs=0.5", out=None, **more),
}
WRONG: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (tuple(CALLS), {"model": 5}, "expected a model or its name|models?=5: must be a torch.nn.Module, or a text"),
    (tuple(CALLS), {"methods": 5}, "methods=5: must be a "),
    (tuple(CALLS), {"methods": vitrim.ToMe}, "methods=.*: must be a "),
    (tuple(CALLS), {"methods": [None]}, "methods=null: must be a "),
    (tuple(CALLS), {"methods": ["tome:r=1", "tome:r=1"]}, "given twice"),
    (("bench", "compare", "tune"), {"methods": []}, "name at least one method"),
    (("bench", "compare"), {"model": vitrim.PlacedModel("test_vit", device="nonsense")}, "unknown device 'nonsense'"),
    (("bench",), {"batch_size": 1.5}, "batch_size=1.5: must be a whole number"),
    (tuple(CALLS), {"seed": "a"}, "seed=a: must be a whole number"),
    (("evaluate", "analyze"), {"model": vitrim.ScoredModel("test_vit", dtype=5)}, "unknown dtype '5'"),
    (("bench", "compare"), {"precision": 5}, "precision=5: must be a text"),
    (("evaluate",), {"data": 5}, "expected a source, a dataset or pairs"),
    (("evaluate",), {"data": [torch.zeros(2, 3, 8, 8)]}, "expected pairs of images"),
]


@pytest.mark.parametrize(
    ("name", "given", "message"), [(name, given, message) for names, given, message in WRONG for name in names]
)
def test_wrong_arguments_are_one_line(name: str, given: dict[str, Any], message: str) -> None:
    model = tiny.HOSTS["vit"]()
    arguments = {"model": model, "methods": "tome:r=1", "data": "no/such/folder", **given}
    positional = [arguments.pop(key) for key in ("model", "methods", "data")]
    with pytest.raises(vitrim.VitrimError, match=message):
        CALLS[name](*positional, **arguments)
