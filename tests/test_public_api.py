from __future__ import annotations

import doctest
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

import vitrim
from vitrim.core.registry import methods

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(vitrim.__path__, "vitrim.")
    if not module.name.startswith("vitrim.cli")  # its docstrings are help texts
)


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


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.failed == 0
    if name in {config.__module__ for config in methods().values()}:
        assert result.attempted > 0


def test_the_package_is_imported_without_torch() -> None:
    loaded = run("import sys, vitrim; vitrim.__version__; print([m for m in ('torch', 'timm') if m in sys.modules])")
    assert loaded.strip() == "[]"


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
