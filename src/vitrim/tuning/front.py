"""The results of searches at several targets next to each other, and those of them that no other dominates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitrim.core.method import MethodConfig
from vitrim.files import write_text
from vitrim.tuning.measured import Measured, means
from vitrim.tuning.result import Result


@dataclass(frozen=True)
class FrontPoint:
    """A setting and what it costs.

    Attributes:
        target: as it was given.
        setting: "constant" or "searched".
        config: the setting.
        share: its cost as a share of the dense model's.
        scores: means over the check images by proxy, less is better.
        returned: whether it is the result for its target.
        on_front: whether no other point is as cheap and does as little damage.
    """

    target: str
    setting: Literal["constant", "searched"]
    config: MethodConfig
    share: float
    scores: dict[str, float]
    returned: bool
    on_front: bool = True


@dataclass(frozen=True)
class Front:
    """Results at several targets.

    Attributes:
        results: in the order of the targets.
        points: the constant and the searched setting of each.
    """

    results: tuple[Result, ...]
    points: tuple[FrontPoint, ...]

    @classmethod
    def of(cls, results: Sequence[Result], measured: Measured) -> Front:
        """Compare results of one search on its check images."""
        found: list[FrontPoint] = []
        for result in results:
            outcome = result.outcome
            pair: list[tuple[Literal["constant", "searched"], Any]] = [("constant", outcome.constant)]
            pair += [("searched", outcome.searched)] if outcome.searched is not outcome.constant else []
            for name, trial in pair:
                scores = means(measured.whole([trial.config], "check")[0])
                returned = trial is result.best
                found.append(FrontPoint(str(result.target), name, trial.config, trial.share, scores, returned))
        kept = non_dominated([(one.share, one.scores[measured.proxy]) for one in found])
        points = [replace(one, on_front=on) for one, on in zip(found, kept, strict=True)]
        return cls(tuple(results), tuple(points))

    def record(self) -> dict[str, Any]:
        """The content of ``front.json``: what the searches follow from, and a row for every point."""
        about = {key: value for key, value in self.results[0].about.items() if key != "target"}
        rows = [{**asdict(one), "config": one.config.describe()} for one in self.points]
        return {"tuned": about, "rows": rows}

    def save(self, folder: Path) -> list[Path]:
        """Write ``front.json`` and the result for every target, e.g. ``macs-0.5.json``; the files of the results.

        Raises:
            VitrimError: they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for result in self.results:
            files.append(folder / f"{result.target.kind}-{result.target.value:g}.json")
            result.save(files[-1])
        write_text(folder / "front.json", json.dumps(self.record(), indent=2) + "\n")
        return files


def non_dominated(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Tell for each pair of numbers, less of both being better, that no other is at most as large in both and smaller
    in one.

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
