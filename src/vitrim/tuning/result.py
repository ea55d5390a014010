"""Inputs and results of a search: targets, trials, the setting for one target, and a table of several."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from vitrim.core.method import MethodConfig
from vitrim.core.saving import entries
from vitrim.errors import VitrimError, check_known
from vitrim.files import write_text
from vitrim.report import Table
from vitrim.tuning.cost import Cost
from vitrim.tuning.halving import Difference, Evaluator, means
from vitrim.tuning.space import Point

TargetKind = Literal["macs", "speedup", "agree"]

TOLERANCE = 0.005
"""Tolerance of a share of the MACs, because token counts are integers."""

RacedState = Literal["searched", "dropped", "out of reach"]

HEADS = {"feature": "feature", "kl": "kl", "cosine": "cosine", "agree": "disagree"}
"""Column heads of proxies, in order; ``agree`` is shown as damage."""


# ---- targets and trials ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The bound that a setting must meet.

    Attributes:
        kind: ``macs``: at most this share of the dense model's; ``speedup``: at least this speed-up on this device;
            ``agree``: at least this share of the dense model's decisions, at the least cost.

    Raises:
        VitrimError: an unknown kind, or a value out of its range.

    Example:
        >>> Target.parse("macs=0.5")
        Target(kind='macs', value=0.5)
    """

    kind: TargetKind
    value: float

    def __post_init__(self) -> None:
        check_known("target", self.kind, get_args(TargetKind))
        if self.kind == "speedup" and not 1.0 < self.value < float("inf"):
            raise VitrimError(f"target speedup={self.value:g}: a speed-up is above 1, e.g. speedup=1.5")
        if self.kind != "speedup" and not 0.0 < self.value < 1.0:
            raise VitrimError(
                f"target {self.kind}={self.value:g}: a share is above 0 and below 1, e.g. {self.kind}=0.5"
            )

    @classmethod
    def parse(cls, text: Target | str) -> Target:
        """Parse ``macs=0.5``, ``speedup=1.5`` or ``agree=0.98``; a target is returned unchanged.

        Raises:
            VitrimError: other text, or an invalid target.
        """
        if isinstance(text, Target):
            return text
        kind, _, value = str(text).partition("=")
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
        """The largest share of the dense model's cost that meets ``macs`` or ``speedup``."""
        return 1.0 / self.value if self.kind == "speedup" else self.value + TOLERANCE


@dataclass(frozen=True)
class Trial:
    """One scored setting.

    Attributes:
        number: order in the search.
        method: the method that is searched, as given.
        share: cost as a share of the dense model's.
        source: origin: constant, start or tpe.
        images: number of search images it was scored on.
        scores: means over these images, by proxy; less is better.
        measured: measured cost of finalists if ``share`` is a prediction; else None.
    """

    number: int
    method: str
    config: MethodConfig
    point: Point
    share: float
    source: str
    images: int = 0
    scores: Mapping[str, float] = field(default_factory=dict)
    measured: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The trial in plain values."""
        facts = {"method": self.config.describe(), "share": self.share, "source": self.source, "images": self.images}
        return {**facts, "scores": dict(self.scores)}


@dataclass(frozen=True)
class Raced:
    """The outcome of one method in a race.

    Attributes:
        state: searched, dropped in the race, or unable to reach the target.
        config: its best setting; None if the target is out of reach.
        images: number of search images this setting saw.
        score: mean of the proxy over these.
        behind: its difference to the best setting of all on these; None for that one.
        note: reason why the target is out of reach.
    """

    method: str
    state: RacedState
    config: MethodConfig | None = None
    share: float | None = None
    images: int = 0
    score: float | None = None
    behind: Difference | None = None
    note: str = ""


# ---- one target ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The setting that a search found for a target, compared with the constant setting.

    Attributes:
        constant: the trial with one value for all blocks.
        searched: the best trial on the selection images, which may be the constant one.
        check: searched minus constant on the check images, by proxy; empty if they are the same.
        better: True if the searched trial is significantly better on the check images.
        levels: means on the check images by proxy, of "constant" and "searched"; empty if they are the same.
        about: settings of the search, stored in the file.
        race: a row per method, best first, if there were several.
    """

    constant: Trial
    searched: Trial
    check: Mapping[str, Difference]
    better: bool
    trials: tuple[Trial, ...]
    levels: Mapping[str, Mapping[str, float]]
    proxy: str
    target: Target
    cost: Cost = field(compare=False)
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)
    race: tuple[Raced, ...] = ()

    @property
    def best(self) -> Trial:
        """The trial to use: the constant one unless the searched one is significantly better."""
        return self.searched if self.better else self.constant

    @property
    def config(self) -> MethodConfig:
        return self.best.config

    @property
    def pair(self) -> list[tuple[Literal["constant", "searched"], Trial]]:
        """The constant and the searched trial with their names."""
        return [("constant", self.constant), ("searched", self.searched)]

    @property
    def verdict(self) -> str:
        """A sentence on which setting is returned, and why."""
        constant = "constant" if not self.race else f"constant {self.constant.config.name}"
        if self.searched is self.constant:
            return f"{constant}: no other setting was better on the selection images"
        found = self.check[self.proxy]
        numbers = f"{self.proxy} {found.mean:+.4g} +- {found.error:.2g} on {found.images} check images"
        if self.better:
            return f"searched: better than {constant} beyond noise ({numbers})"
        if found.better:
            return f"{constant}: the searched setting gains in {self.proxy} only ({numbers}), its kl is worse"
        return f"{constant}: the searched setting is not better beyond noise ({numbers})"

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the constant and the searched setting, with cost and scores."""
        found = []
        for name, trial in self.pair:
            row = {"method": trial.config.describe(), "share": trial.share, "scores": dict(trial.scores)}
            row |= {} if trial.measured is None else {"measured": trial.measured}
            row |= {"check": dict(self.levels[name])} if name in self.levels else {}
            found.append(row)
        return found

    def record(self) -> dict[str, Any]:
        """The content of ``best.json``: a saved reduction, and the facts of the search."""
        constant, searched = self.rows()
        race = []
        for one in self.race:
            row = {name: value for name, value in asdict(one).items() if name != "config" and value not in (None, "")}
            race.append(row if one.config is None else {**row, "setting": one.config.describe()})
        return entries(
            self.config,
            {
                **self.about,
                "reached": self.best.share if self.best.measured is None else self.best.measured,
                "cost": {"of": self.cost.unit, "error": self.cost.error},
                "returned": "searched" if self.better else "constant",
                "verdict": self.verdict,
                "constant": constant,
                "searched": searched,
                "check": {name: asdict(one) for name, one in self.check.items()},
                "trials": len(self.trials),
                **({"race": race} if race else {}),
            },
        )

    def save(self, file: str | Path) -> None:
        """Write the setting as JSON, for ``@FILE`` in `vitrim.reduce_` and every command's ``--method``."""
        write_text(Path(file), json.dumps(self.record(), indent=2) + "\n")

    def tables(self) -> list[Table]:
        """Tables of the race, if there was one, and of the constant and the searched setting."""
        unit, tables = saving_head(self.cost.unit), list[Table]()
        if self.race:
            rows: list[tuple[Any, ...]] = []
            for one in self.race:
                setting = one.note if one.config is None else one.config.describe()
                share = "" if one.share is None else saving(one.share)
                score = "" if one.score is None else f"{one.score:.4f}"
                behind = "" if one.behind is None else f"{one.behind.mean:+.4f} +- {one.behind.error:.4f}"
                rows.append((one.method, one.state, setting, share, str(one.images or ""), score, behind))
            columns = ("method", "state", "best setting", unit, "raced on", HEADS[self.proxy], "behind the best")
            tables.append(Table("race", "", columns, rows, text_columns=3))
        scores = [self.levels.get(name, trial.scores) for name, trial in self.pair]
        names = [name for name in HEADS if name in scores[0]]
        rows = [
            (name, trial.config.describe(), saving(trial.share), *(f"{values[one]:.4f}" for one in names))
            for (name, trial), values in zip(self.pair, scores, strict=True)
        ]
        heads = ("setting", "method", unit, *(HEADS[name] for name in names))
        return [*tables, Table("settings", "", heads, rows, text_columns=2)]

    def notes(self) -> list[str]:
        notes = []
        if self.race:
            notes.append(
                f"{self.proxy}: mean over the search images that the setting saw; behind: paired difference to the "
                "best setting on these"
            )
        notes.append(
            f"means over the {'check' if self.levels else 'search'} images, less is better; "
            f"{saving_head(self.cost.unit).removesuffix(' %')}: share of the dense model's"
            + (f" on {self.about['engine']}" if "engine" in self.about else "")
            + (f" in {self.about['precision']}" if "precision" in self.about else "")
            + (f", predicted with a mean error of {self.cost.error:.1%}" if self.cost.error else "")
        )
        best = self.best.measured
        if best is not None:
            speeds = [f"{name} {1 / trial.measured:.2f}" for name, trial in self.pair if trial.measured is not None]
            missed = best > self.target.limit * (1.0 + self.cost.error)
            notes.append(
                f"measured speed over dense: {', '.join(speeds)}; asked for {self.target.value:g}"
                + (", which the returned setting misses by more than the error of predictions" if missed else "")
            )
        return [*notes, f"returned: {self.verdict}"]


# ---- several targets -------------------------------------------------------------------------------------------------


def front_rows(results: Sequence[Result], evaluator: Evaluator) -> list[dict[str, Any]]:
    """The constant and the searched setting of every target, compared on the check images of their common search.

    Each with ``target, setting, config, share``, its mean ``scores`` by proxy, ``returned`` (it is the result for its
    target) and ``on_front`` (no other row has as little cost and damage).
    """
    rows: list[dict[str, Any]] = []
    for result in results:
        for name, trial in result.pair[: 1 if result.searched is result.constant else 2]:
            scores = means(evaluator.whole([trial.config], "check")[0])
            facts = {"target": str(result.target), "setting": name, "config": trial.config.describe()}
            rows.append({**facts, "share": trial.share, "scores": scores, "returned": trial is result.best})
    kept = non_dominated([(row["share"], row["scores"][evaluator.proxy]) for row in rows])
    return [{**row, "on_front": on} for row, on in zip(rows, kept, strict=True)]


def front_table(rows: Sequence[Mapping[str, Any]], unit: str) -> Table:
    """A table of `front_rows`; ``unit`` is that of the cost."""
    names = [name for name in HEADS if name in rows[0]["scores"]]
    cells: list[tuple[Any, ...]] = [
        (
            *(row["target"], row["setting"], row["config"], "*" if row["on_front"] else ""),
            *("yes" if row["returned"] else "", saving(row["share"])),
            *(f"{row['scores'][name]:.4f}" for name in names),
        )
        for row in rows
    ]
    columns = ("target", "setting", "method", "front", "returned", saving_head(unit), *(HEADS[name] for name in names))
    return Table("front", "", columns, cells, text_columns=5)


def saving_head(unit: str) -> str:
    """The heading of a column of `saving`.

    Example:
        >>> saving_head("macs"), saving_head("latency")
        ('MACs saved %', 'latency saved %')
    """
    return f"{'MACs' if unit == 'macs' else unit} saved %"


def saving(share: float) -> str:
    """The saved part of the dense model's cost in %, from the remaining ``share``.

    Example:
        >>> saving(0.586)
        '41.4'
    """
    return f"{100 * (1.0 - share):.1f}"


def non_dominated(points: Sequence[tuple[float, float]]) -> list[bool]:
    """True for each pair that no other dominates: is at most as large in both numbers and smaller in one.

    Example:
        >>> non_dominated([(0.5, 0.2), (0.6, 0.1), (0.6, 0.3)])
        [True, True, False]
    """
    return [
        not any(
            other[0] <= one[0] and other[1] <= one[1] and (other[0] < one[0] or other[1] < one[1]) for other in points
        )
        for one in points
    ]
