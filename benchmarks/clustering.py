"""Ways to merge many tokens in one block: one bipartite matching, several, mutual neighbours, and average linkage.

    python benchmarks/clustering.py --model vit_tiny_patch16_224 --checkpoint VIT_TINY.safetensors --data PHOTOS
    python benchmarks/clustering.py --model ... --data PHOTOS --keep-rate 0.5 --json clustering.json
    python benchmarks/clustering.py --speed    # no model, no data

One bipartite matching can merge half of the tokens, and only pairs of one even and one odd place. What clusters all
tokens loses less where many go at once, but one merge waits for the other. Between the two: `rounds=K`, K bipartite
matchings in one block, each on what the last one left, with the mean keys of the groups; `mutual`: all pairs that are
each other's nearest merge at once, the most similar first, until enough tokens are gone. `average` is average linkage
on cosines by SciPy, image by image: what a parallel way could reach at best. All have ToMe's keys, place in the block,
weighted means, proportional attention and counts, so that only the groups differ.

`--speed` times the exact clustering of ATC, from distances to clusters, by its loop in Numba and by its operators,
against SciPy and scikit-learn image by image: 8 images of 196 patches, keys at random around 40 centres, float32.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from pydantic import Field
from scipy.cluster.hierarchy import linkage
from torch import Tensor

import vitrim
from cifar10_report import markdown
from photographs import Setup, rows_of
from script import from_shell, write_json
from vitrim.core import compiled
from vitrim.core.assignment import Hard, merge
from vitrim.core.attention import Attention
from vitrim.core.matching import unit_mean_keys
from vitrim.core.method import StagedConfig
from vitrim.core.tokens import TokenState
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.measure.latency import Budget, paired_speedup, summarise, time_interleaved
from vitrim.methods.atc import LINKAGES, Linkage, agglomerate
from vitrim.methods.tome import ToMe
from vitrim.weights import load_checkpoint

KEEP_RATES = (0.8, 0.7, 0.6, 0.5)


class Grouping(StagedConfig):
    """Groups of tokens with similar keys become their mean, between attention and MLP."""

    name = "grouping"
    paper = "an experiment"
    kind = "merge"

    how: Literal["rounds", "mutual", "average"] = Field("rounds", description="how groups are found")
    rounds: int = Field(2, ge=1, description="matchings of 'rounds'")
    proportional: bool = Field(True, description="add log(size) to the attention logits")


@vitrim.register(Grouping)
class GroupingReducer(vitrim.Reducer[Grouping]):
    site = "between"

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        keys, size = unit_mean_keys(attention, state.num_prefix), state.size[:, state.num_prefix :]
        remove = self.num_removed(state)
        own = {"rounds": self._rounds, "mutual": mutual, "average": average}[self.config.how]
        groups = torch.stack([own(*each, remove) for each in zip(keys, size, strict=True)])
        # the first patch of a group stands for it
        count = groups.shape[1] - remove
        place = torch.arange(groups.shape[1], device=groups.device).expand_as(groups)
        first = place.new_full((len(groups), count), groups.shape[1]).scatter_reduce(1, groups, place, "amin")
        keep, order = first.sort(dim=1)
        named = torch.empty_like(order).scatter(1, order, place[:, :count])
        stands = torch.zeros_like(groups).scatter(1, keep, 1)
        moved = stands.sort(dim=1, stable=True).indices[:, :remove]
        return merge(state, keep, moved, named.gather(1, groups).gather(1, moved))

    def _rounds(self, keys: Tensor, size: Tensor, remove: int) -> Tensor:
        return rounds(keys, size, remove, self.config.rounds)


def joined(keys: Tensor, size: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (m, d) of length 1 and sizes (m,) of groups: means of ``keys`` (n, d) by ``size``, over ``into`` (n,)."""
    count = int(into.max()) + 1
    total = size.new_zeros(count).index_add(0, into, size)
    mean = keys.new_zeros(count, keys.shape[1]).index_add(0, into, keys * size[:, None]) / total[:, None]
    return torch.nn.functional.normalize(mean, dim=1), total


def rounds(keys: Tensor, size: Tensor, remove: int, count: int) -> Tensor:
    """(P,) the group of every patch, after ``count`` bipartite matchings that remove ``remove`` together."""
    groups = torch.arange(len(keys))
    for left in range(count, 0, -1):
        here = min(-(-remove // left), len(keys) // 2)
        remove -= here
        # in the first round even places look for odd ones, then those that stayed for those that received
        sources, receivers = torch.arange(0, len(keys), 2), torch.arange(1, len(keys), 2)
        best, partner = (keys[sources] @ keys[receivers].T).max(dim=1)
        order = best.argsort(descending=True, stable=True)
        stay = sources[order[here:].sort().values]
        into = torch.empty(len(keys), dtype=torch.int64)
        into[torch.cat([stay, receivers])] = torch.arange(len(keys) - here)
        moved = sources[order[:here]]
        into[moved] = into[receivers[partner[order[:here]]]]
        keys, size = joined(keys, size, into)
        groups = into[groups]
    return groups


def mutual(keys: Tensor, size: Tensor, remove: int) -> Tensor:
    """(P,) the group of every patch, after pairs of mutual nearest neighbours merged until ``remove`` are gone."""
    groups = torch.arange(len(keys))
    while remove > 0:
        alike = (keys @ keys.T).fill_diagonal_(-torch.inf)
        best, partner = alike.max(dim=1)
        place = torch.arange(len(keys))
        first = place[(partner[partner] == place) & (place < partner)]
        if len(first) == 0:  # ties: the first of the most similar pair
            first = best.argmax()[None]
        first = first[best[first].argsort(descending=True, stable=True)][:remove]
        into = place.clone()
        into[partner[first]] = first
        into = torch.unique(into, return_inverse=True)[1]
        keys, size = joined(keys, size, into)
        groups, remove = into[groups], remove - len(first)
    return groups


def average(keys: Tensor, size: Tensor, remove: int) -> Tensor:
    """(P,) the group of every patch by average linkage on cosine distances; sizes play no part."""
    distance = (1.0 - (keys @ keys.T).numpy()).astype(np.float64)
    tree = linkage(distance[np.triu_indices(len(keys), 1)].clip(0.0), "average")
    groups = np.arange(len(keys))
    for step, (a, b) in enumerate(tree[:remove, :2].astype(int)):  # fcluster may stop short of a count where it ties
        groups[(groups == a) | (groups == b)] = len(keys) + step
    return torch.from_numpy(np.unique(groups, return_inverse=True)[1])


def speeds(batch: int, patches: int, keep_rate: float, budget: Budget) -> list[dict[str, Any]]:
    """A row for each linkage: milliseconds of a batch in all forms, and how many times as fast ours are."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(batch, 40, 64, generator=generator)
    index = torch.randint(40, (batch, patches, 1), generator=generator).expand(-1, -1, 64)
    keys = centres.gather(1, index) + 0.5 * torch.randn(batch, patches, 64, generator=generator)
    keys = torch.nn.functional.normalize(keys, dim=-1)
    distance = (1.0 - keys @ keys.mT).clamp_min(0.0)
    count = int(keep_rate * patches)
    rows = []
    for own in LINKAGES:
        runs = {
            "loop": partial(ours, distance, own, patches - count, compiled.INSTALLED),
            "operators": partial(ours, distance, own, patches - count, False),
            "SciPy": partial(by_scipy, distance, own, count),
            "scikit-learn": partial(by_scikit_learn, distance, own, count),
        }
        times = time_interleaved(runs, budget=budget)
        row: dict[str, Any] = {"linkage": own, "batch": batch, "patches": patches, "clusters": count}
        row |= {f"{name} ms": round(summarise(each).p50_ms, 2) for name, each in times.items()}
        for form in ("loop", "operators"):
            for library in ("SciPy", "scikit-learn"):
                row[f"{form} over {library}"] = round(paired_speedup(times[library], times[form]).median, 2)
        rows.append(row)
    return rows


def ours(distance: Tensor, linkage: Linkage, merges: int, loops: bool) -> Tensor:
    """Our clusters (B, P) with or without the compiled loop."""
    with patch.object(compiled, "INSTALLED", loops):
        return agglomerate(distance.clone(), linkage, merges)


def by_scipy(distance: Tensor, own: Linkage, count: int) -> Tensor:
    """(B, P) clusters, image by image."""
    from scipy.cluster.hierarchy import fcluster
    from scipy.spatial.distance import squareform

    trees = [linkage(squareform(each, checks=False), own) for each in distance.numpy()]
    return torch.from_numpy(np.stack([fcluster(tree, count, "maxclust") for tree in trees]))


def by_scikit_learn(distance: Tensor, own: Linkage, count: int) -> Tensor:
    """(B, P) clusters, image by image, as the released code of ATC finds them."""
    from sklearn.cluster import AgglomerativeClustering

    found = [
        AgglomerativeClustering(n_clusters=count, metric="precomputed", linkage=own).fit(each).labels_
        for each in distance.numpy()
    ]
    return torch.from_numpy(np.stack(found))


def main() -> None:
    """Print a table in Markdown: what each way loses at the same counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--keep-rate", type=float, action="append", help="at three stages; may repeat")
    parser.add_argument("-m", "--method", action="append", help="in place of all these; may repeat")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--speed", action="store_true", help="time the clustering of ATC instead")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    machine.set_threads(arguments.threads)
    if arguments.speed:
        timed = [row for rate in arguments.keep_rate or (0.7, 0.5) for row in speeds(8, 196, rate, Budget())]
        write_json(arguments.json, {"environment": machine.environment(), "rows": timed})
        print("\n".join(str(row) for row in timed))
        return
    if arguments.checkpoint is None or arguments.data is None:
        parser.error("give --checkpoint and --data, or --speed")
    model = create_model(arguments.model, pretrained=False)
    load_checkpoint(model, arguments.checkpoint)
    setup = Setup(model.eval(), arguments.model, arguments.data, arguments.data, arguments.limit, 20, 0, None)
    configs = [vitrim.parse_method(method) for method in arguments.method or ()]
    for rate in () if arguments.method else arguments.keep_rate or KEEP_RATES:
        configs.append(ToMe(keep_rate=rate, rule="floor_initial_power"))
        for own in ({"rounds": 2}, {"rounds": 3}, {"rounds": 4}, {"how": "mutual"}, {"how": "average"}):
            configs.append(Grouping(keep_rate=rate, **own))
    rows = rows_of(setup, configs)
    write_json(arguments.json, {"environment": machine.environment(), "model": arguments.model, "rows": rows})
    print(markdown(rows))


if __name__ == "__main__":
    from_shell(main)
