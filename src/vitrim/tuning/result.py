"""The aim of a search and its outcome: `Target`, `Result` and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from vitrim.core.method import MethodConfig
from vitrim.core.saving import entries
from vitrim.errors import VitrimError, unknown
from vitrim.files import write_text
from vitrim.tuning.cost import Cost
from vitrim.tuning.finder import Outcome, Trial
from vitrim.tuning.proxy import Proxy
from vitrim.tuning.race import Raced

Kind = Literal["macs", "speedup", "agree"]

TOLERANCE = 0.005
"""By how much a share of the MACs may be missed, as counts are whole tokens; that of `match_macs`."""


@dataclass(frozen=True)
class Target:
    """The bound that a setting must meet.

    Attributes:
        kind: ``macs``, at most that share of the dense model's; ``speedup``, at least so many times as fast on this
            device; ``agree``, at least that share of the dense model's decisions, as cheaply as possible.
        value: the number.

    Raises:
        VitrimError: an unknown kind, or a value out of its range.

    Example:
        >>> Target.parse("macs=0.5")
        Target(kind='macs', value=0.5)
    """

    kind: Kind
    value: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise unknown("target", str(self.kind), get_args(Kind))
        if self.kind == "speedup" and not 1.0 < self.value < float("inf"):
            raise VitrimError(f"target speedup={self.value:g}: a speed-up is above 1, e.g. speedup=1.5")
        if self.kind != "speedup" and not 0.0 < self.value < 1.0:
            raise VitrimError(
                f"target {self.kind}={self.value:g}: a share is above 0 and below 1, e.g. {self.kind}=0.5"
            )

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target written as ``macs=0.5``, ``speedup=1.5`` or ``agree=0.98``.

        Raises:
            VitrimError: text of another form, or as above.
        """
        kind, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise VitrimError(
                f"cannot read the target '{text}': write e.g. macs=0.5, speedup=1.5, agree=0.98"
            ) from None
        return cls(kind.strip(), number)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.kind}={self.value:g}"

    @property
    def limit(self) -> float:
        """The largest share of the dense model's cost that meets it, for ``macs`` and ``speedup``."""
        return 1.0 / self.value if self.kind == "speedup" else self.value + TOLERANCE


@dataclass(frozen=True)
class Result:
    """The result of a search.

    Attributes:
        target: what was asked for.
        proxy: what was minimised.
        outcome: constant and searched trial, their difference on the check images, and all trials.
        cost: what the shares are of.
        about: what the search follows from; it goes into the file.
        race: a row for every method, best first, where there were several.
    """

    target: Target
    proxy: Proxy
    outcome: Outcome
    cost: Cost
    about: Mapping[str, Any] = field(repr=False)
    race: tuple[Raced, ...] = ()

    @property
    def best(self) -> Trial:
        """The trial to use: the constant one unless the searched one beats it beyond noise."""
        return self.outcome.best

    @property
    def config(self) -> MethodConfig:
        """The setting to use."""
        return self.best.config

    @property
    def verdict(self) -> str:
        """One sentence: which setting is returned, and why."""
        outcome = self.outcome
        constant = "constant" if not self.race else f"constant {outcome.constant.config.name}"
        if outcome.searched is outcome.constant:
            return f"{constant}: no other setting was better on the selection images"
        found = outcome.check[self.proxy]
        numbers = f"{self.proxy} {found.mean:+.4g} +- {found.error:.2g} on {found.images} check images"
        if outcome.better:
            return f"searched: better than {constant} beyond noise ({numbers})"
        if found.better:
            return f"{constant}: the searched setting gains in {self.proxy} only ({numbers}), its kl is worse"
        return f"{constant}: the searched setting is not better beyond noise ({numbers})"

    def record(self) -> dict[str, Any]:
        """The content of ``best.json``: a saved reduction, and what is known of the search."""
        outcome = self.outcome
        return entries(
            self.config,
            {
                **self.about,
                "reached": self.best.share if self.best.measured is None else self.best.measured,
                "cost": {"of": self.cost.unit, "error": self.cost.error},
                "returned": "searched" if outcome.better else "constant",
                "verdict": self.verdict,
                "constant": _summary(outcome.constant, outcome.levels.get("constant")),
                "searched": _summary(outcome.searched, outcome.levels.get("searched")),
                "check": {name: asdict(one) for name, one in outcome.check.items()},
                "trials": len(outcome.trials),
                **({"race": [_row(row) for row in self.race]} if self.race else {}),
            },
        )

    def save(self, file: str | Path) -> None:
        """Write the setting as JSON that ``@FILE`` names: `vitrim.reduce_`, and every command's ``--method``.

        Raises:
            VitrimError: the file cannot be written.
        """
        write_text(Path(file), json.dumps(self.record(), indent=2) + "\n")


def _summary(trial: Trial, checked: Mapping[str, float] | None) -> dict[str, Any]:
    found = {"method": trial.config.describe(), "share": trial.share, "scores": dict(trial.scores)}
    if trial.measured is not None:
        found["measured"] = trial.measured
    return found if checked is None else {**found, "check": dict(checked)}


def _row(row: Raced) -> dict[str, Any]:
    found = {name: value for name, value in asdict(row).items() if name != "config" and value not in (None, "")}
    return found if row.config is None else {**found, "setting": row.config.describe()}
