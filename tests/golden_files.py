"""The reference vectors in ``tests/golden``: one rule for all of them.

Every array of a file is an input, or is compared with what vitrim computes at the tolerance of ``index.json``, or
stands in `EXCEPTIONS` with the reason. A test says with `cases` which files (or which arrays of them) it answers for
and gets each as ``ref``, a `Reference`, which notes what was read and compared; ``suite.py`` lets the test fail if
it leaves an array out, and ``test_golden_files.py`` fails on an array that no test answers for.
"""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from collections.abc import Callable, Container, Generator, Iterable
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"

_spec = importlib.util.spec_from_file_location("golden_weights", GOLDEN / "weights.py")
assert _spec is not None
assert _spec.loader is not None
weights = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(weights)
_numbers = lru_cache(maxsize=512)(
    weights.normal
)  # the layers of most files have the same names, and so the same weights
weights.normal = lambda name, shape: _numbers(name, tuple(shape))

ABOUT = ("config", "params")
"""What describes a file: no arrays."""

INPUTS = ("teacher_params", "fixed/*", "*gradnorm_names")
"""Inputs of every file, besides those that its row of the index calls given. They must be read."""

EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "analysis/metrics_a",
        "feat/ab/cka_prime_dist",
    ): "never used by the reference; not 0 for equal features",
    ("merging/ops_tome", "kth2_n18/*"): "of ToMe's appendix: it ignores similarity, and no method here does it",
    ("vlm/dart_0*", "*"): "within the language model, which selectors do not reach",
    ("merging/ops_tomesd", "*"): "for networks that un-merge after every layer, which no method here is for",
}
"""(file, array) -> why it cannot be compared. Both may have wildcards."""


class Part(NamedTuple):
    """The arrays of a file that a test answers for; names may have wildcards."""

    file: str
    arrays: tuple[str, ...] = ("*",)


CLAIMS: defaultdict[str, set[str]] = defaultdict(set)
"""File -> patterns of the arrays that some test answers for; filled when the test modules are imported."""


def cases(
    files: Iterable[str | Part | tuple[Any, ...]],
    names: str = "",
    arrays: Iterable[str] = ("*",),
    slow: Container[str] = (),
) -> pytest.MarkDecorator:
    """Parametrise a test over reference files: its argument ``ref`` is the `Reference` of each.

    Args:
        files: names of files such as ``merging/tome_r8_prop``, or `Part`; or tuples of that and further arguments.
        names: of these further arguments, with commas.
        arrays: what the test answers for where ``files`` does not say.
        slow: files that are read in `make test-full` alone.
    """
    rows = []
    for entry in files:
        file, *more = entry if isinstance(entry, tuple) and not isinstance(entry, Part) else (entry,)
        part = file if isinstance(file, Part) else Part(file, tuple(arrays))
        CLAIMS[part.file].update(part.arrays)
        marks = [pytest.mark.slow] if part.file in slow else []
        rows.append(pytest.param(part, *more, id=part.file, marks=marks))
    further = [name.strip() for name in names.split(",") if name]
    return pytest.mark.parametrize(("ref", *further), rows, indirect=["ref"])


@cache
def index() -> dict[str, dict[str, Any]]:
    """The rows of the index by the name of the file."""
    rows = json.loads((GOLDEN / "index.json").read_text())["files"]
    return {row["file"].removesuffix(".npz"): row for row in rows}


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Whether ``key`` is one of ``patterns``."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


class Reference(dict[str, Any]):
    """The arrays of a reference file by their keys. Notes which were read, and which were compared by `check`.

    Args:
        part: the file, and which of its arrays are to be accounted for.
    """

    def __init__(self, part: Part) -> None:
        super().__init__(weights.load(GOLDEN / f"{part.file}.npz"))
        self.part = part
        self.row = index()[part.file]
        self.seen: set[str] = set()
        self.compared: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self.keys() else default

    def check(
        self, key: str, found: Any, view: Callable[[Any], Any] | None = None, *, tolerance: float | None = None
    ) -> None:
        """Compare what vitrim ``found`` with an array, at the tolerance of the index.

        Integers, flags, texts and lists must be equal.

        Args:
            key: of the array.
            found: a tensor, or anything that compares with what is stored.
            view: what to compare with, made of the stored array, e.g. a set where the order has no meaning.
            tolerance: absolute, where the index has several for parts of one array.
        """
        self.compared.add(key)
        stored = self[key]
        expected = torch.from_numpy(np.asarray(stored)) if isinstance(stored, np.ndarray | np.generic) else stored
        if view is not None:
            expected = view(expected)
        if not isinstance(expected, Tensor):
            assert found == expected, f"{key} of {self.part.file}: found {found}, stored {expected}"
            return
        found = torch.as_tensor(found)
        assert found.shape == expected.shape, f"{key} of {self.part.file}: {found.shape} for {expected.shape}"
        where = f"{key} of {self.part.file}"
        if not expected.is_floating_point():
            assert torch.equal(found.double(), expected.double()), f"{where}: found {found}, stored {expected}"
            return
        absolute, relative = self.tolerance(key, expected.dtype) if tolerance is None else (tolerance, 0.0)
        wide = expected.dtype == torch.float64 and not relative
        assert found.dtype == torch.float64 or not wide, f"{where}: {found.dtype} cannot be compared"
        sizes = expected.double().abs()
        sizes = sizes[sizes.isfinite()]
        atol = absolute + relative * (sizes.max().item() if sizes.numel() else 0.0)
        torch.testing.assert_close(
            found.detach().double(), expected.double(), atol=atol, rtol=0, msg=lambda text: f"{where}: {text}"
        )

    def tolerance(self, key: str, dtype: torch.dtype) -> tuple[float, float]:
        """Absolute tolerance of an array of floats of ``dtype``, and that relative to its largest entry."""
        kinds = self.row["tolerance"]
        if not isinstance(kinds, dict):  # a plain number is that of everything
            kinds = {"float64": float(kinds)}
        if "float64" not in kinds:  # whatever the type, it was computed in float32
            return 0.0, kinds.get("stored_float32") or kinds["float32"]
        if single(key):
            return kinds["float32"], 0.0
        return (kinds["float64"], 0.0) if dtype == torch.float64 else (0.0, kinds.get("stored_float32", 2e-6))

    def left_out(self) -> list[str]:
        """The arrays of the part that are neither compared, nor read inputs, nor exceptions."""
        given = (*INPUTS, *self.row.get("given", []))
        return [
            key
            for key in self
            if key not in self.compared
            and key not in ABOUT
            and matches(key, self.part.arrays)
            and not (matches(key, given) and key in self.seen)
            and exception(self.part.file, key) is None
        ]


def using_up(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Around the call of a test: it fails if it leaves out an array of its ``ref``."""
    result = yield
    ref = pyfuncitem.funcargs.get("ref")
    if isinstance(ref, Reference):
        assert not ref.left_out(), f"of {ref.part.file} the test neither compares nor reads {ref.left_out()}"
    return result


def single(key: str) -> bool:
    """Whether an array is the result of a run in float32."""
    return key.endswith("_f32") or "_f32_" in key


def exception(file: str, key: str) -> str | None:
    """Why an array is not compared, None if it is."""
    for (files, keys), reason in EXCEPTIONS.items():
        if fnmatchcase(file, files) and fnmatchcase(key, keys):
            return reason
    return None


def load(name: str) -> Reference:
    """The reference file ``name``, e.g. ``merging/tome_r8_prop``, by a test that does not answer for its arrays."""
    return Reference(Part(name))


def tensor(ref: dict[str, Any], key: str) -> Tensor:
    """One stored array."""
    return torch.from_numpy(ref[key])
