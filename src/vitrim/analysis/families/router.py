"""The scores by which methods keep patches, over the image and block by block."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrim.analysis.families.attention import EXAMPLES, images_of
from vitrim.analysis.loss import concordance
from vitrim.analysis.subject import Subject
from vitrim.analysis.tables import Outcome, Table, named, summary
from vitrim.analysis.watch import Decision, Watch
from vitrim.measure.contestants import Contestant, Output
from vitrim.measure.records import Batch

__all__ = ["router"]

IMAGES = 32
COLUMNS = (
    *("method", "block", "images", "scored", "kept", "score", "score_std", "score_kept", "score_removed"),
    *named("persistence"),
)
SHOWN = (*COLUMNS[:-4], "persistence")


def router(subject: Subject) -> Outcome:
    """Scores of the patches in every block that ranks them: Cropr's and DynamicViT's routers, the class attention of
    Top-K and EViT, what is left of A-ViT's halting probability, and those of any other method that ranks.

    ``persistence`` is the probability that a patch of the higher score in one block has the higher score in the next
    one that ranks, too, among those ranked in both: 0.5 by chance.

    Arrays: ``images`` (E, H, W, 3), and by method ``NAME/blocks`` (S,), ``NAME/scores`` (E, S, P), nan where a patch is
    gone, and ``NAME/depth`` (E, P), the block before or in which each patch was removed, L where it never was: of A-ViT
    the depth at which it halts.
    """
    models = subject.contestants(subject.methods)
    watches = {place: _Scores(models[place], subject.num_layers) for place in range(1, len(models))}
    subject.follow(models, {place: watch.see for place, watch in watches.items()}, subject.batches(IMAGES))
    found = [watch for watch in watches.values() if watch.parts]
    outcome = Outcome(images=subject.count(IMAGES))
    outcome.notes += [
        f"{watch.name} is left out of router: it does not rank patches" for watch in watches.values() if not watch.parts
    ]
    if not found:
        outcome.notes.append("router skipped: it needs a method that ranks patches, such as topk or cropr")
        return outcome
    rows = [row for watch in found for row in watch.table()]
    outcome.tables.append(Table("router", "Scores by which patches are kept", COLUMNS, rows, SHOWN))
    outcome.arrays["images"] = images_of(subject)
    for watch in found:
        outcome.arrays |= watch.arrays()
    return outcome


class _Scores:
    """The scores of one model: by block, over the patches of the grid."""

    def __init__(self, contestant: Contestant, num_layers: int) -> None:
        assert contestant.reduction is not None
        self.name, self.watch = contestant.name, Watch(contestant.reduction, scores=True)
        self.parts: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
        self.stays: dict[int, list[NDArray[np.bool_]]] = defaultdict(list)
        self.num_layers = num_layers

    def see(self, batch: Batch, output: Output, dense: Output) -> None:
        for decision in self.watch.take():
            if decision.scores is not None:
                scores, stays = on_grid(decision)
                self.parts[decision.depth].append(scores)
                self.stays[decision.depth].append(stays)

    def table(self) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = []
        blocks = sorted(self.parts)
        scores = [np.concatenate(self.parts[block]) for block in blocks]
        for place, block in enumerate(blocks):
            own, stays = scores[place], np.concatenate(self.stays[block])
            ranked = np.isfinite(own)
            gone = ranked & ~stays
            numbers = (float(own[ranked].mean()), float(own[ranked].std()))
            means = [float(own[mask].mean()) if mask.any() else None for mask in (ranked & stays, gone)]
            images = len(own)
            counts = (float(ranked.sum() / images), float((ranked & stays).sum() / images))
            persistence: tuple[float | None, ...] = (None,) * 4
            if place + 1 < len(blocks):
                each = np.array([concordance(*pair) for pair in zip(own, scores[place + 1], strict=True)])
                each = each[np.isfinite(each)]
                persistence = summary(each[:, None])[0] if len(each) else persistence
            rows.append((self.name, block, images, *counts, *numbers, *means, *persistence))
        return rows

    def arrays(self) -> dict[str, NDArray[Any]]:
        blocks = sorted(self.parts)
        scores = np.stack([np.concatenate(self.parts[block])[:EXAMPLES] for block in blocks], 1)
        stays = np.stack([np.concatenate(self.stays[block])[:EXAMPLES] for block in blocks], 1)
        depth = np.full(stays.shape[::2], float(self.num_layers))
        for place in reversed(range(len(blocks))):
            depth[~stays[:, place]] = blocks[place]
        return {
            f"{self.name}/blocks": np.array(blocks),
            f"{self.name}/scores": scores.astype(np.float32),
            f"{self.name}/depth": depth.astype(np.float32),
        }


def on_grid(decision: Decision) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(B, P) of the input patches: their scores, nan for those that stand for no token, and which of them stay."""
    state, p = decision.state, decision.state.num_prefix
    assert decision.scores is not None
    images, patches = len(decision.x), state.initial_patches
    place = (state.position[:, p:] - p).expand(images, -1).cpu().numpy()
    real = np.ones_like(place, dtype=bool) if state.mask is None else state.mask[:, p:].expand(images, -1).cpu().numpy()
    scores, stays = np.full((images, patches), np.nan), np.zeros((images, patches), dtype=bool)
    image, token = np.nonzero(real)
    scores[image, place[image, token]] = decision.scores.double().cpu().numpy()[image, token]
    survives = np.zeros_like(real)
    if decision.assignment is None:
        survives[:] = True
    else:
        anchor, valid = decision.assignment.anchor, decision.assignment.valid
        own = torch.ones_like(anchor, dtype=torch.bool) if valid is None else valid.clone()
        if decision.assignment.into is not None and not decision.assignment.normalise:
            own.scatter_(1, decision.assignment.into, False)  # a sum of many is none of them
        rows, columns = np.nonzero(own.cpu().numpy())
        old = anchor.cpu().numpy()[rows, columns]
        survives[rows[old >= p], old[old >= p] - p] = True
    image, token = np.nonzero(real & survives)
    stays[image, place[image, token]] = True
    return scores, stays
