"""`search`: from a model, a method, images and a target to a setting, and the file that holds it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor, nn

from vitrim.core.config import MethodConfig
from vitrim.core.fit import described
from vitrim.core.method_files import FORMAT
from vitrim.core.registry import host_of
from vitrim.errors import VitrimError, unknown
from vitrim.files import check_file, write_text
from vitrim.measure.evaluation import num_classes
from vitrim.measure.latency import Budget
from vitrim.measure.partial import weights_fingerprint
from vitrim.tasks import make_task
from vitrim.tasks.base import Task
from vitrim.tune.cost import Cost, Fit, LatencyCost, MacsCost, quiet
from vitrim.tune.evolution import Evolution, Outcome, Trial
from vitrim.tune.proxy import PARTS, BatchImages, Images, ModelScorer, Proxy, check_proxy
from vitrim.tune.space import Space
from vitrim.tune.study import Study

Kind = Literal["macs", "speedup", "agree"]

TOLERANCE = 0.005
"""By how much a share of the MACs may be missed, as counts are whole tokens; that of `match_macs`."""

HALVINGS = 5
"""Searches at other costs until the cheapest one that agrees enough is known well enough."""

COUNTED_BATCHES = 2
"""Batches that the MACs of a method which adapts to the images are counted on."""


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


@dataclass(frozen=True)
class Result:
    """The result of a search.

    Attributes:
        target: what was asked for.
        proxy: what was minimised.
        outcome: constant and searched trial, their difference on the check images, and all trials.
        cost: what the shares are of.
        about: what the search follows from; it goes into the file.
    """

    target: Target
    proxy: Proxy
    outcome: Outcome
    cost: Cost
    about: Mapping[str, Any] = field(repr=False)

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
        if outcome.searched is outcome.constant:
            return "constant: no other setting was better on the selection images"
        found = outcome.check[self.proxy]
        numbers = f"{self.proxy} {found.mean:+.4g} +- {found.error:.2g} on {found.images} check images"
        if outcome.better:
            return f"searched: better than constant beyond noise ({numbers})"
        if found.better:
            return f"constant: the searched setting gains in {self.proxy} only ({numbers}), its kl is worse"
        return f"constant: the searched setting is not better beyond noise ({numbers})"

    def record(self) -> dict[str, Any]:
        """The content of ``best.json``: a saved reduction, and what is known of the search."""
        config = self.config
        return {
            "format": FORMAT,
            "method": config.name,
            "version": config.version,
            "options": json.loads(config.model_dump_json(include=config.model_fields_set)),
            "weights": None,
            "tuned": {
                **self.about,
                "reached": self.best.share,
                "cost": {"of": self.cost.unit, "error": self.cost.error},
                "returned": "searched" if self.outcome.better else "constant",
                "verdict": self.verdict,
                "constant": _summary(self.outcome.constant),
                "searched": _summary(self.outcome.searched),
                "check": {name: asdict(one) for name, one in self.outcome.check.items()},
                "trials": len(self.outcome.trials),
            },
        }

    def save(self, file: str | Path) -> None:
        """Write the setting as JSON that ``@FILE`` names: `vitrim.reduce_`, and every command's ``--method``.

        Raises:
            VitrimError: the file cannot be written.
        """
        write_text(Path(file), json.dumps(self.record(), indent=2) + "\n")


def _summary(trial: Trial) -> dict[str, Any]:
    return {"method": trial.config.describe(), "share": trial.share, "scores": dict(trial.scores)}


def search(
    model: nn.Module,
    method: MethodConfig | str,
    images: Images | Sequence[Tensor | tuple[Tensor, Any]],
    *,
    target: Target | str,
    task: Task | None = None,
    proxy: str = "feature",
    evaluations: int = 60,
    seed: int = 0,
    study: Path | None = None,
    resume: bool = False,
    about: Mapping[str, Any] | None = None,
    budget: Budget | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> Result:
    """Search the setting of a method that damages a model least at a target.

    Candidates are searched on a third of the images and one is selected on the next third. It is returned if it beats
    the constant setting, one value for all blocks, on the last third by 2 standard errors of the paired differences;
    otherwise the constant setting is.

    Args:
        model: the dense model, on the device to search on; left as it was.
        method: config or text; options other than the amount stay as they are.
        images: in three parts, or batches in memory (`vitrim.tune.proxy.BatchImages`).
        target: ``Target`` or text such as ``"macs=0.5"``.
        task: of the model; default classification.
        proxy: the damage that is minimised: feature, kl, cosine or agree.
        evaluations: most settings to try.
        seed: of the settings that are drawn, and of methods that draw at random.
        study: file that keeps what was measured.
        resume: go on from that file; the result is that of a search that was never stopped.
        about: more entries for study and result, e.g. what the images are.
        budget: time to spend on every timed setting, for ``speedup``.
        on_trial: called with every finished trial.

    Raises:
        VitrimError: the method has nothing to move, the target is out of reach, or the study is of another search.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit", num_classes=3).eval()
        >>> batches = torch.randn(6, 4, 3, 160, 160, generator=torch.Generator().manual_seed(0))
        >>> result = search(model, "tome", list(batches), target="macs=0.7", evaluations=8)
        >>> result.best.share <= 0.705, result.best in (result.outcome.constant, result.outcome.searched)
        (True, True)
    """
    target = Target.parse(target) if isinstance(target, str) else target
    kind = check_proxy(proxy)
    if evaluations < 1:
        raise VitrimError(f"a search needs at least 1 evaluation, got {evaluations}")
    space = Space.of(model, method)
    if not hasattr(images, "batches"):
        images = BatchImages(images)
    assert not isinstance(images, Sequence)
    task = task or make_task("classification", num_classes(model))
    host = host_of(model)
    known = {
        "vitrim": version("vitrim"),
        "made_for": {**described(host, model), "parameters": weights_fingerprint(model)},
        "base": space.base.describe(),
        "target": str(target),
        "proxy": kind,
        "seed": seed,
        "evaluations": evaluations,
        "images": {part: images.count(part) for part in PARTS},
        "batch_size": images.batch_size,
        **(about or {}),
    }
    if study is not None:
        check_file(study)
    with quiet():
        log = Study(study, known, resume=resume)
        cost = _cost(model, space, images, target, log, budget, seed)
        scorer = ModelScorer(model, task, images, seed=seed)
        evolution = Evolution(space, cost, scorer, log, proxy=kind, seed=seed, on_trial=on_trial)
        outcome = reach(evolution, target, evaluations)
        log.note(returned="searched" if outcome.better else "constant", method=outcome.best.config.describe())
    return Result(target, kind, outcome, cost, known)


def _cost(
    model: nn.Module, space: Space, images: Images, target: Target, log: Study, budget: Budget | None, seed: int
) -> Cost:
    """The cost that the target is about; latency is measured once in a study."""
    like = next(model.parameters())
    few = [
        one.images
        for one in images.batches("search", 0, min(COUNTED_BATCHES * images.batch_size, images.count("search")))
    ]
    few = [one.to(like.device, like.dtype) for one in few]
    if target.kind != "speedup":
        return MacsCost(model, space, few, seed=seed)

    def measure() -> dict[str, Any]:
        cost = LatencyCost.of(model, space, few[0], budget=budget, seed=seed)
        fit = cost.fit
        return {"fit": fit.coefficients.tolist(), "error": fit.error, "worst": fit.worst, "dense_ms": cost.dense_ms}

    found = log.value("latency", measure)
    return LatencyCost(space, Fit(np.array(found["fit"]), found["error"], found["worst"]), found["dense_ms"])


def reach(evolution: Evolution, target: Target, evaluations: int) -> Outcome:
    """Run a search for a target; for ``agree`` one at every cost of a bisection, with its share of the evaluations.

    Raises:
        VitrimError: the target is out of reach.
    """
    if target.kind == "macs":
        return evolution.run(target.value + TOLERANCE, evaluations)
    if target.kind == "speedup":
        return evolution.run(1.0 / target.value, evaluations)
    low, high, best = 0.0, 1.0, None
    trials: list[Trial] = []
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if evolution.reaches(middle):
            pair = evolution.explore(middle, max(evaluations // HALVINGS, 1))
            trials += evolution.trials
            if evolution.agreement(pair[1]) >= target.value:
                best, high = pair, middle
                continue
        low = middle
    if best is None:
        raise VitrimError(
            f"{evolution.space.base.name} does not agree with the dense model in {target.value:.1%} of the selection "
            f"images at {low:.0%} of its MACs: ask for less"
        )
    outcome = evolution.check(*best, trials)
    if outcome.better or evolution.agreement(outcome.constant) >= target.value:
        return outcome
    return replace(outcome, constant=_cheapest_constant(evolution, target.value, high))


def _cheapest_constant(evolution: Evolution, agreement: float, low: float) -> Trial:
    """The constant setting that agrees enough, at a cost between ``low`` and that of the dense model."""
    high = 1.0
    best, _ = evolution.explore(high, 1)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        trial, _ = evolution.explore(middle, 1)
        if evolution.agreement(trial) >= agreement:
            best, high = trial, middle
        else:
            low = middle
    return best
