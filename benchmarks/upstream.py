"""Other people's tests on reduced models: the libraries' own test files, every model of theirs reduced by nothing.

    python benchmarks/upstream.py --timm SOURCES                  # timm's tests/test_models.py
    python benchmarks/upstream.py --timm SOURCES -k "vit_tiny"    # pytest's choice of tests
    python benchmarks/upstream.py --transformers SOURCES          # its models' tests, all that vitrim knows
    python benchmarks/upstream.py --transformers CHECKOUT --family vit --family clip

SOURCES is the unpacked source of the library, of the version that is installed. Wheels have no tests; timm's source
distribution has them. That of transformers has the tests that its models share, without the models' own files: there
they run on the tiny models of `upstream_families.py` (and need the package ``parameterized``). A checkout has the
files, ``tests/models/NAME/test_modeling_NAME.py``, which then run.

Each file runs twice, in processes of their own: as it is, and with every model that a test makes reduced by METHOD
(default tome:r=0) as soon as it is made; a vision-language model with ``compact=True``. Models that vitrim refuses stay
as they are and are counted. A test that passes as it is and does not on reduced models needs a reason from `REASONS`;
without one the exit code is 1.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

METHOD, REPORT = "VITRIM_UPSTREAM_METHOD", "VITRIM_UPSTREAM_REPORT"
"""Environment variables of the run that is compared: the method, empty for none; the file that it writes."""

FAMILIES = Path(__file__).parent / "upstream_families.py"
"""The test file of sources that have none for each model."""

TINY = "test_vit or test_eva or vit_tiny_patch16_224 or deit_tiny or eva02_tiny or beit_base_patch16_224"
"""The models of timm that run by default: one run of all takes hours."""

REASONS: list[tuple[str, str, str]] = [
    (
        r"torchscript",
        r"Unknown type annotation",
        "torch.jit.script cannot compile a reduced block; torch.jit.trace works (docs/hosts.md)",
    ),
    (r"", r"torch.fx cannot trace", "torch.fx cannot look into a reduced block, unless it is a leaf (docs/hosts.md)"),
    (r"", r"changed after it was reduced", "a reduced model keeps the form that it had (docs/hosts.md)"),
    (r"", r"has hooks or a forward of its own", "a reduced block does not call the attention module (docs/hosts.md)"),
    (r"", r"a reduced model takes no attention_mask", "no masks among patches (docs/hosts.md)"),
    (r"", r"hands out no attention maps", "these towers hand out no attention maps (docs/hosts.md)"),
    (
        r"test_inputs_embeds$",
        r"a compact model needs input_ids",
        "compact=True finds the image tokens of a prompt by their ids, which embeddings do not have (docs/hosts.md)",
    ),
]
"""Patterns of a test's name and of its message, and why a reduced model fails there."""


# ---- the plugin, in the process of pytest ----------------------------------------------------------------------------


class Reducing:
    """Reduces models as they are made, and keeps the outcome of every test."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.depth = 0
        self.reduced = 0
        self.refused: Counter[str] = Counter()
        self.outcomes: dict[str, tuple[str, str]] = {}

    def reduce(self, model: Any) -> Any:
        """Reduce ``model`` in place; a refusal leaves it as it is."""
        import vitrim
        from vitrim.core.registry import reads_prompts
        from vitrim.errors import VitrimError

        try:
            vitrim.reduce_(model, self.method, compact=reads_prompts(type(model)))
            self.reduced += 1
        except VitrimError as error:
            self.refused[f"{type(model).__name__}: {str(error).partition(';')[0]}"] += 1
        return model

    def wrap_timm(self) -> None:
        """Reduce what `timm.create_model` makes."""
        import timm

        made = timm.create_model

        @functools.wraps(made)
        def create_model(*args: Any, **kwargs: Any) -> Any:
            return self.reduce(made(*args, **kwargs))

        timm.create_model = timm.models.create_model = create_model

    def wrap_transformers(self) -> None:
        """Reduce every model of a class that vitrim knows at the end of the outermost constructor."""
        import importlib

        from vitrim.core.registry import hosts, vision_languages

        for key in (*hosts(), *vision_languages()):
            module, _, name = key.rpartition(".")
            if module.startswith("transformers."):
                kind = getattr(importlib.import_module(module), name)
                kind.__init__ = self._constructor(kind.__init__)

    def _constructor(self, own: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own)
        def construct(model: Any, *args: Any, **kwargs: Any) -> None:
            self.depth += 1
            try:
                own(model, *args, **kwargs)
            finally:
                self.depth -= 1
            if self.depth == 0:
                self.reduce(model)

        return construct

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep how a test ended: the last phase that did not pass, else its call."""
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid] = (report.outcome, "" if report.passed else _last_line(report.longreprtext))

    def pytest_sessionfinish(self) -> None:
        """Write what was seen."""
        found = {"outcomes": self.outcomes, "reduced": self.reduced, "refused": self.refused}
        Path(os.environ[REPORT]).write_text(json.dumps(found), encoding="utf-8")


def pytest_configure(config: Any) -> None:
    """Start the plugin: pytest calls this where the file is given to it with ``-p upstream``."""
    plugin = Reducing(os.environ[METHOD])
    config.pluginmanager.register(plugin)
    if plugin.method:
        plugin.wrap_timm()
        plugin.wrap_transformers()


def _last_line(text: str) -> str:
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return lines[0] if lines else text.strip().rpartition("\n")[2]


# ---- the comparison --------------------------------------------------------------------------------------------------


def outcomes(sources: Path, file: Path, method: str, choice: list[str]) -> dict[str, Any]:
    """Run one test file in a process of its own, and return what the plugin wrote."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        paths = os.pathsep.join([str(Path(__file__).parent), str(sources), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, METHOD: method, REPORT: str(report), "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "upstream", "-q", "--no-header", "-o", "addopts=", str(file)]
        done = subprocess.run(
            [*command, *choice], cwd=sources, env=environment, capture_output=True, text=True, check=False
        )
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
        if not found.get("outcomes"):
            sys.exit(f"{file}: no test ran\n{(done.stdout + done.stderr)[-2000:]}")
        return found


def reason_for(test: str, message: str) -> str | None:
    """The first of `REASONS` that fits a test and its message."""
    return next((why for name, said, why in REASONS if re.search(name, test) and re.search(said, message)), None)


def compare(sources: Path, file: Path, method: str, choice: list[str]) -> int:
    """Print the rows of a file, and below them new failures; return how many of these have no reason."""
    own = outcomes(sources, file, "", choice)["outcomes"]
    found = outcomes(sources, file, method, choice)
    passed = [test for test, (outcome, _) in own.items() if outcome == "passed"]
    ends = {test: found["outcomes"].get(test, ("missing", "did not run")) for test in passed}
    failed = {test: end for test, end in ends.items() if end[0] != "passed"}
    reasons = {test: reason_for(test, message) for test, (_, message) in failed.items()}
    for name in dict.fromkeys(_row_of(file, test) for test in own):
        own_row, passed_row, failed_row, unlisted_row = (
            sum(_row_of(file, test) == name for test in tests)
            for tests in (own, passed, failed, [test for test, why in reasons.items() if why is None])
        )
        print(f"| {name} | {own_row} | {passed_row} | {passed_row - failed_row} | {failed_row} | {unlisted_row} |")
    for why, number in Counter(why for why in reasons.values() if why is not None).items():
        print(f"    {number}: {why}")
    unlisted = [test for test, why in reasons.items() if why is None]
    for test in unlisted:
        print(f"    NO REASON: {test}: {failed[test][1]}")
    print(f"    {found['reduced']} models were reduced, {sum(found['refused'].values())} refused", flush=True)
    for refusal, number in Counter(found["refused"]).most_common(5):
        print(f"    left as it is, {number} times: {refusal}")
    return len(unlisted)


def _row_of(file: Path, test: str) -> str:
    """The row that a test counts in: its model class in `FAMILIES`, its file elsewhere."""
    return test.split("::")[1].removesuffix("Test") if file.name == FAMILIES.name else file.name


def files_of(
    timm: Path | None, transformers: Path | None, families: list[str], choice: str | None
) -> list[tuple[Path, Path, list[str]]]:
    """The test files to run: each with the sources that it belongs to and pytest's choice of its tests."""
    files: list[tuple[Path, Path, list[str]]] = []
    if timm is not None:
        files.append((timm, timm / "tests" / "test_models.py", ["-k", choice or TINY]))
    if transformers is None:
        return files
    chosen = ["-k", choice] if choice else []
    if not (transformers / "tests" / "models").is_dir():
        return [*files, (transformers, FAMILIES, chosen)]
    from vitrim.core.registry import hosts, vision_languages

    known = {key.split(".")[2] for key in (*hosts(), *vision_languages()) if key.startswith("transformers.models.")}
    for family in families or sorted(known):
        files.append((transformers, transformers / "tests" / "models" / family / f"test_modeling_{family}.py", chosen))
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timm", type=Path, metavar="SOURCES")
    parser.add_argument("--transformers", type=Path, metavar="SOURCES")
    parser.add_argument(
        "--family", action="append", help="of a checkout of transformers, e.g. vit; default: all that vitrim knows"
    )
    parser.add_argument("--method", default="tome:r=0")
    parser.add_argument("-k", dest="choice", help="tests, as pytest chooses them")
    options = parser.parse_args()
    files = files_of(options.timm, options.transformers, options.family or [], options.choice)
    missing = [str(file) for _, file, _ in files if not file.is_file()]
    if missing or not files:
        parser.error(f"no such test file: {', '.join(missing)}" if files else "give --timm or --transformers")
    print("| tests of | tests | pass as they are | and reduced | not reduced | no reason |")
    print("|---|---|---|---|---|---|")
    sys.exit(
        1
        if sum([compare(sources.resolve(), file.resolve(), options.method, choice) for sources, file, choice in files])
        else 0
    )


if __name__ == "__main__":
    main()
