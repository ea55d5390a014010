"""The model, methods and images of an analysis, for families that run the model, and the decisions of its reducers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Subset

from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import ReducedBlock, Reducer
from vitrim.core.method import MethodConfig
from vitrim.core.plan import HostFacts
from vitrim.core.reduce import Reduction
from vitrim.core.registry import host_of
from vitrim.core.tokens import TokenState
from vitrim.data import spread
from vitrim.measure.contestants import Contestant, ModelOutput, contestants
from vitrim.measure.probes import Gauge, Probe
from vitrim.measure.records import Batch, read
from vitrim.measure.run import Measurement
from vitrim.tasks import Task

EXAMPLES = 8
"""Images whose pictures a family keeps."""


@dataclass(frozen=True)
class Decision:
    """One decision of one reducer.

    Attributes:
        depth: block, from 0.
        x: (B, N, C), the input tokens.
        scores: (B, P), the ranking of the patches, highest kept; None if the reducer does not rank them.
        assignment: the result; None if all tokens stay.
    """

    depth: int
    x: Tensor
    state: TokenState
    scores: Tensor | None
    assignment: Hard | None

    def on_grid(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """(B, P) over the input patches: their scores, nan for patches without a token, and a mask of kept patches."""
        state, p = self.state, self.state.num_prefix
        assert self.scores is not None
        images, patches = len(self.x), state.initial_patches
        place = (state.position[:, p:] - p).expand(images, -1).cpu().numpy()
        real = np.ones_like(place, dtype=bool)
        if state.mask is not None:
            real = state.mask[:, p:].expand(images, -1).cpu().numpy()
        scores, stays = np.full((images, patches), np.nan), np.zeros((images, patches), dtype=bool)
        image, token = np.nonzero(real)
        scores[image, place[image, token]] = self.scores.double().cpu().numpy()[image, token]
        survives = np.full_like(real, self.assignment is None)
        if self.assignment is not None:
            anchor, valid = self.assignment.anchor, self.assignment.valid
            own = torch.ones_like(anchor, dtype=torch.bool) if valid is None else valid.clone()
            if self.assignment.into is not None and not self.assignment.normalise:
                own.scatter_(1, self.assignment.into, False)  # a sum of tokens is none of them
            rows, columns = np.nonzero(own.cpu().numpy())
            old = anchor.cpu().numpy()[rows, columns]
            survives[rows[old >= p], old[old >= p] - p] = True
        image, token = np.nonzero(real & survives)
        stays[image, place[image, token]] = True
        return scores, stays


class Watch:
    """Records the decisions in a reduced model's forwards, by hooks that are never removed: pass a private copy.

    Args:
        scores: record the reducers' rankings too, which computes them a second time.

    Example:
        >>> import timm, vitrim
        >>> reduction = vitrim.reduce_(timm.create_model("test_vit").eval(), "topk:keep_rate=0.5")
        >>> watch = Watch(reduction, scores=True)
        >>> _ = reduction.model(torch.zeros(1, 3, 160, 160))
        >>> [(decision.depth, tuple(decision.scores.shape)) for decision in watch.take()]
        [(1, (1, 100)), (3, (1, 50)), (4, (1, 25))]
    """

    def __init__(self, reduction: Reduction, *, scores: bool = False) -> None:
        self.found: list[Decision] = []
        self.scores = scores
        for block in reduced_blocks(reduction):
            block.reducer.register_forward_hook(partial(self._note, block.depth))

    def take(self) -> list[Decision]:
        """The decisions since the last call."""
        found, self.found = self.found, []
        return found

    def _note(
        self,
        depth: int,
        reducer: Reducer[Any],
        args: tuple[Tensor, Attention, TokenState],
        assignment: object,
    ) -> None:
        x, attention, state = args
        with torch.no_grad(), torch.random.fork_rng([x.device] if x.device.type == "cuda" else []):
            scores = reducer.ranking(x, attention, state) if self.scores else None
        hard = assignment if isinstance(assignment, Hard) else None
        if assignment is None or hard is not None:
            self.found.append(Decision(depth, x, state, scores, hard))


def reduced_blocks(reduction: Reduction) -> list[ReducedBlock]:
    """The blocks of a reduced model, in order."""
    model = reduction.model
    return [block for block in host_of(model).blocks(model) if isinstance(block, ReducedBlock)]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, the methods to analyse, and the images to show them.

    Attributes:
        model: dense model, in eval mode on its device and in its dtype; never changed.
        dataset: map-style; items are pairs of image and target.
        batch_size: B.
        limit: images of the analysis, None for all. A family may use fewer.
        seed: seed of methods that draw, of shuffles and of t-SNE.
        workers: processes that decode images, 0 for this one.
        learned: folder of a saved reduction, whose parameters the methods of that name load.
        sizes: image sides in pixels to time; empty for the model's own.
        blocks: blocks, from 0, to draw; empty for the families' choice.
        beside: several models are analysed side by side.

    Example:
        >>> import timm, torch
        >>> from torch.utils.data import TensorDataset
        >>> from vitrim.core.registry import parse_method
        >>> from vitrim.tasks import make_task
        >>> images = TensorDataset(torch.rand(6, 3, 160, 160), torch.arange(6) % 3)
        >>> model = timm.create_model("test_vit", num_classes=3).eval()
        >>> subject = Subject(model, [parse_method("tome:r=8")], make_task("classification", 3), images, batch_size=4)
        >>> [len(batch) for batch in subject.batches()], subject.places(3).tolist()
        ([4, 2], [0, 2, 5])
    """

    model: nn.Module
    methods: Sequence[MethodConfig]
    task: Task
    dataset: Any
    batch_size: int = 32
    limit: int | None = None
    seed: int = 0
    workers: int = 0
    learned: Path | None = None
    sizes: Sequence[int] = ()
    blocks: Sequence[int] = ()
    beside: bool = False

    @property
    def facts(self) -> HostFacts:
        return host_of(self.model).facts(self.model)

    @property
    def num_layers(self) -> int:
        """L, blocks of the model."""
        return len(host_of(self.model).blocks(self.model))

    def places(self, most: int | None = None) -> NDArray[np.int64]:
        """Indices in the dataset of at most ``most`` images, spread evenly."""
        found = spread(len(self.dataset), self.limit)
        some: NDArray[np.int64] = found[spread(len(found), most)]
        return some

    def batches(
        self, most: int | None = None, *, batch_size: int | None = None, order: NDArray[np.int64] | None = None
    ) -> Iterator[Batch]:
        """Read at most ``most`` images (all for None), B at a time.

        Args:
            most: largest number of images.
            batch_size: B, by default the subject's.
            order: (I,), a permutation of these images.
        """
        places = self.places(most)
        chosen = Subset(self.dataset, (places if order is None else places[order]).tolist())
        return read(chosen, batch_size or self.batch_size, workers=self.workers, collate=self.task.collate)

    def examples(self, most: int) -> NDArray[np.float32]:
        """(E, H, W, C): the first of at most ``most`` images, each scaled to [0, 1]."""
        found = torch.cat([batch.images for batch in self.batches(most)])[:EXAMPLES].movedim(1, -1)
        low, high = found.amin((1, 2, 3), keepdim=True), found.amax((1, 2, 3), keepdim=True)
        scaled: NDArray[np.float32] = ((found - low) / (high - low).clamp_min(1e-12)).float().numpy()
        return scaled

    def measurement(self, methods: Sequence[MethodConfig], probes: Sequence[Probe]) -> Measurement:
        """A new measurement of the dense model and its reductions by ``methods``."""
        models = contestants(self.model, methods, self.task, learned=self.learned)
        return Measurement(models, probes, self.task, seed=self.seed)


class Observer(Gauge):
    """A gauge that records what a reduced model does, for one family; it adds no columns to rows.

    Args:
        contestant: a private copy, on which hooks may stay.
    """

    reduction: Reduction

    def __init__(self, contestant: Contestant) -> None:
        super().__init__({})
        self.name = contestant.name
        if contestant.reduction is not None:
            self.reduction = contestant.reduction

    @classmethod
    def over(cls, subject: Subject, methods: Sequence[MethodConfig], batches: Iterator[Batch]) -> list[Self]:
        """Run the dense model and its reductions by ``methods`` on ``batches``; one observer per reduction."""
        measurement = subject.measurement(methods, [cls])
        measurement.follow(batches)
        return [gauge for gauges in measurement.gauges for gauge in gauges if isinstance(gauge, cls)]

    @classmethod
    def start(cls, contestant: Contestant) -> Observer:
        """The observer of one model; that of the dense model, which has no reduction, records nothing."""
        return Observer(contestant) if contestant.reduction is None else cls(contestant)

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        """Called after every forward; by default does nothing, for observers that use hooks only."""
