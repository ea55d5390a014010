"""Records of a dense model and its methods from one pass over the data: a probe, and the function around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrim.analysis.record import FEATURES, MOST_FEATURES, Record, unfinished
from vitrim.core.method import MethodConfig
from vitrim.core.registry import able_host, find_host, has_trunk
from vitrim.core.schedule import quarter_blocks
from vitrim.core.tokens import TokenState
from vitrim.data import DataError, spread
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec
from vitrim.measure.contestants import Contestant, ModelOutput, contestants
from vitrim.measure.decisions import LARGEST, whereabouts
from vitrim.measure.probes import Gauge, Lists, are_logits, divergence
from vitrim.measure.records import Batch
from vitrim.measure.run import Findings, Measurement
from vitrim.measure.task_data import num_classes
from vitrim.tasks import make_task

MANY_CLASSES = 1000
TOP = 16
HALVED = (*FEATURES, "logits", "top_logits")
"""Arrays stored as float16."""
ARRAYS = (
    *("ids", "targets", "batch", "source", "kept", "num_tokens", "features", "head", "cosine", "head_cosine"),
    *("kl", "first", "logits", "top_logits", "top_classes"),
)


@dataclass(kw_only=True, eq=False)
class Collect:
    """The probe behind `collect`. It adds no columns to rows; `records_of` reads its gauges.

    Attributes:
        blocks: blocks, from 0, whose class tokens are kept; by default at a quarter, half and three quarters of the
            depth, and the last. `VitrimError` for a block that the model does not have.
        patterns: keep where every patch went.
        num_images: images of the entire pass, if known; a record that would be too large is refused after one batch.
    """

    blocks: Sequence[int] | None = None
    patterns: bool = True
    num_images: int | None = None
    taps: dict[Contestant, _Tap] = field(default_factory=dict, init=False)
    dense: _Tap | None = field(default=None, init=False)

    def start(self, contestant: Contestant) -> Gauge:
        """Start the record of one model. The dense model comes first; the others are compared with it."""
        if contestant not in self.taps:  # `Measurement.findings` restarts gauges; hooks stay
            self.taps[contestant] = _Tap(contestant)
        if contestant.reduction is None:
            self.dense = self.taps[contestant]
        return _Collected(self, contestant)


class _Tap:
    """The class token after every block of the last forward, if the model has one."""

    def __init__(self, contestant: Contestant) -> None:
        model = contestant.model
        trunk = find_host(model) if has_trunk(model) else None
        host = able_host(model) if contestant.reduction is None else trunk
        self.facts = None if host is None else host.facts(model)  # None: the model cannot be reduced
        blocks = [] if host is None else host.blocks(model)
        self.num_layers = len(blocks)
        self.tokens: dict[int, Tensor] = {}
        if self.facts is not None and self.facts.has_class_token:
            for depth, block in enumerate(blocks):
                block.register_forward_hook(partial(self._note, depth))

    def _note(self, depth: int, module: nn.Module, args: object, output: Tensor) -> None:
        self.tokens[depth] = output[:, 0].detach()

    def class_tokens(self, images: int) -> Tensor | None:
        """(B, L, C) float32, None without a class token; `VitrimError` if the blocks run on parts of the batch."""
        if not self.tokens:
            return None
        if any(len(token) != images for token in self.tokens.values()):
            raise VitrimError("an analysis needs images of one size: this model ran its blocks on parts of the batch")
        return torch.stack([self.tokens[depth] for depth in range(self.num_layers)], 1).float()


class _Collected(Gauge):
    def __init__(self, probe: Collect, contestant: Contestant) -> None:
        self.probe, self.contestant = probe, contestant
        self.tap = probe.taps[contestant]
        last = self.tap.num_layers - 1
        self.feature_blocks: list[int] = []
        if self.tap.facts is not None and self.tap.facts.has_class_token:
            wanted = [*quarter_blocks(last + 1), last] if probe.blocks is None else probe.blocks
            wrong = next((block for block in wanted if not 0 <= block <= last), None)
            if wrong is not None:
                raise VitrimError(f"block {wrong} is none of the model's, 0 to {last}")
            self.feature_blocks = sorted(set(wanted))
        self.lists = Lists(*ARRAYS)
        super().__init__({"collected": self.lists})

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        found = {"ids": batch.ids, "batch": torch.full_like(batch.ids, batch.index)}
        if isinstance(batch.targets, Tensor) and batch.targets.ndim <= 2:
            found["targets"] = batch.targets
        found |= self._patterns(len(batch), output) | self._features(len(batch), output, dense)
        if are_logits(output):
            logits = output.prediction
            found["kl"] = divergence(logits, dense.prediction).float()
            # from the exact logits: float16 rounding can make several equal
            found["first"] = logits.argmax(1).to(torch.int32)
            if logits.shape[1] <= MANY_CLASSES:
                found["logits"] = logits.float()
            else:
                # A thousand classes fit into a record, ten thousand do not.
                largest, classes = logits.float().topk(TOP, dim=1)
                found |= {"top_logits": largest, "top_classes": classes.to(torch.int32)}
        self._check_size(len(batch), found)
        self.lists.update(**found)

    def _check_size(self, images: int, found: Mapping[str, Tensor]) -> None:
        """Refuse a record that would be too large, judging by one batch, not after hours of work."""
        bytes_of = {
            name: tensor.numel() * (2 if name in HALVED else tensor.element_size()) / images
            for name, tensor in found.items()
        }
        # Features are kept of some images only: their bytes do not grow with the data.
        per_image = sum(count for name, count in bytes_of.items() if name not in FEATURES)
        every = self.probe.num_images or sum(len(ids) for ids in self.lists.batches("ids")) + images
        features = (sum(bytes_of.values()) - per_image) * min(every, MOST_FEATURES)
        total = per_image * every + features
        if total > LARGEST:
            most = max(1, int((LARGEST - features) / per_image))
            raise VitrimError(
                f"the record of {self.contestant.name} would take {total / 2**30:.1f} GiB for {every} images, "
                f"more than {LARGEST / 2**30:.0f}: set a limit of at most {most} images"
            )

    def _patterns(self, images: int, output: ModelOutput) -> dict[str, Tensor]:
        reduction = self.contestant.reduction
        facts = self.tap.facts
        if facts is None:
            return {}
        if reduction is None:
            return {"num_tokens": (torch.tensor(output.tokens_per_block) // images).expand(images, -1)}
        found = whereabouts(reduction, images)
        if not self.probe.patterns:
            return {"num_tokens": found["num_tokens"]}
        patches, (rows, columns) = found["source"].shape[2] - facts.num_prefix, facts.grid_size
        if patches != rows * columns:
            raise DataError(
                f"an analysis needs images of the model's own size: got {patches} patches for its {rows} x {columns}"
            )
        if found["source"].shape[2] < 2**15:  # torch has no wider unsigned type that it can compute in
            found["source"] = found["source"].to(torch.int16)
        if reduction.config.kind != "soft":
            whole = reduction.config.kind == "prune"
            kept = [anchors(state, images, whole=whole) for state in reduction.states[1:]]
            # Eight patches a byte: masks of every block would be most of the record.
            found["kept"] = torch.from_numpy(np.packbits(torch.stack(kept, 1).cpu().numpy(), axis=-1))
        return found

    def _features(self, images: int, output: ModelOutput, dense: ModelOutput) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        assert self.probe.dense is not None
        own, other = self.tap.class_tokens(images), self.probe.dense.class_tokens(images)
        if own is not None and other is not None:
            found["cosine"] = torch.cosine_similarity(own.double(), other.double(), dim=-1).float()
            if self.feature_blocks:
                found["features"] = own[:, self.feature_blocks]
        feature, plain = output.feature, dense.feature
        if feature is not None and plain is not None and feature.ndim == 2:
            found["head_cosine"] = torch.cosine_similarity(feature.double(), plain.double(), dim=-1).float()
            found["head"] = feature.float()
        return found

    def record(self, header: Mapping[str, Any]) -> Record:
        """The record of all images, sorted by id."""
        found = {name: tensor.numpy() for name, tensor in self.lists.each().items()}
        order = found["ids"].argsort(kind="stable")
        found = {name: array[order] for name, array in found.items()}
        problem = unfinished(found)
        if problem is not None:
            raise VitrimError(f"the model under {self.contestant.name} cannot be analysed: {problem}")
        blocks = _keep_changing(found) if "source" in found else []
        # Few images' features suffice for distances, and hardly compress.
        few = spread(len(order), MOST_FEATURES)
        found |= {name: found[name][few] for name in FEATURES if name in found}
        for name in HALVED:
            if name in found and np.abs(found[name]).max(initial=0) < np.finfo(np.float16).max:
                found[name] = found[name].astype(np.float16)
        own = {
            "blocks": blocks,
            "feature_blocks": self.feature_blocks if "features" in found else [],
            "feature_images": len(few) if set(FEATURES) & set(found) else 0,
        }
        return Record({**header, **self._facts(), **own}, found)

    def _facts(self) -> dict[str, Any]:
        """The header entries that follow from the method and the model."""
        config = None if self.contestant.reduction is None else self.contestant.reduction.config
        facts, num_layers, limits = self.tap.facts, self.tap.num_layers, dict[str, list[float]]()
        # limits after every block, if the method has any:
        if config is not None and facts is not None and config.is_adaptive():
            amounts = config.amounts(num_layers)
            if any(amount is not None for amount in amounts):  # upper bound on the tokens left, prefix included
                counts = config.counts_of(amounts, facts.grid_size[0] * facts.grid_size[1])
                limits["bounds"] = [facts.num_prefix + count for count in counts]
            if callable(thresholds := getattr(config, "thresholds", None)):  # similarity above which it merges
                limits["thresholds"] = thresholds(num_layers)
        return {
            "method": self.contestant.name,
            "kind": "none" if config is None else config.kind,
            "soft": config is not None and config.kind == "soft",
            "adaptive": config is not None and config.is_adaptive(),
            "batch_dependent": config is not None and config.traits.batch_dependent,
            "num_prefix": 0 if facts is None else facts.num_prefix,
            "num_layers": num_layers,
            "grid": [0, 0] if facts is None else list(facts.grid_size),
            **limits,
        }


def _keep_changing(found: dict[str, NDArray[Any]]) -> list[int]:
    """The blocks that changed the tokens of some image: labels or anchor patches; the arrays keep only these."""
    source, kept = found["source"], found.get("kept")
    # Before the first block every token holds itself.
    changed = [not (np.arange(source.shape[2]) == source[:, 0]).all()]
    for block in range(1, source.shape[1]):
        same = all(np.array_equal(a[:, block], a[:, block - 1]) for a in (source, kept) if a is not None)
        changed.append(not same)
    blocks = np.flatnonzero(changed).tolist()
    found["source"] = source[:, blocks].astype(np.int32)
    if kept is not None:
        found["kept"] = kept[:, blocks]
    return blocks


def anchors(state: TokenState, images: int, *, whole: bool) -> Tensor:
    """The anchor patches of the real patch tokens, (B, P) bool.

    ``whole``: leave out tokens that hold several patches, such as EViT's fused token.
    """
    prefix, patches = state.num_prefix, state.initial_patches
    position = state.position.expand(images, -1)
    real = torch.ones_like(position, dtype=torch.bool) if state.mask is None else state.mask.expand(images, -1)
    if whole:
        source = state.source.expand(images, -1)
        members = torch.zeros_like(position).scatter_add(1, source.clamp_min(0), (source >= 0).long())
        # A token that holds several patches stands for none of them.
        real = real & (members == 1)
    found = torch.zeros(images, patches + prefix, dtype=torch.bool, device=position.device)
    # skip padding, whose position may be that of a kept patch
    image, token = real[:, prefix:].nonzero(as_tuple=True)
    found[image, position[:, prefix:][image, token]] = True
    return found[:, prefix:]


def records_of(findings: Findings, header: Mapping[str, Any] | None = None) -> dict[str, Record]:
    """The records by method, ``dense`` first, of a measurement with one `Collect` among its probes.

    ``header``: JSON-serialisable entries for every record's, such as ``model`` and ``data``.
    """
    found = [gauge for gauges in findings.gauges for gauge in gauges if isinstance(gauge, _Collected)]
    return {gauge.contestant.name: gauge.record(header or {}) for gauge in found}


def collect(
    model: nn.Module,
    methods: Sequence[MethodConfig | str],
    batches: Iterable[Batch | tuple[Tensor, Any]],
    probe: Collect | None = None,
    *,
    header: Mapping[str, Any] | None = None,
) -> dict[str, Record]:
    """Record a dense classifier and every method on the same batches, in one pass over the data.

    ``model`` is a supported host that is not reduced, left unchanged; ``batches`` are pairs of images (B, C, H, W), all
    of one size, and labels, read once. Records by the text of their method, ``dense`` first.

    Raises:
        VitrimError: a method that does not fit, invalid targets or outputs, no images, or a record of more than 2 GiB.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit", num_classes=3)
        >>> found = collect(model, ["tome:r=8"], [(torch.zeros(2, 3, 160, 160), torch.tensor([0, 2]))])
        >>> list(found), found["tome:r=8"].labels().shape
        (['dense', 'tome:r=8'], (2, 6, 100))
    """
    task = make_task("classification", num_classes(ModelSpec(model).load()))
    measurement = Measurement(contestants(model, methods, task), [probe or Collect()], task)
    measurement.follow(batches)
    found = records_of(measurement.findings(), header)
    if not found:
        raise DataError("there are no images to analyse")
    return found
