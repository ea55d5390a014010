"""Retrieval of pages by queries, with fewer vectors per page, compared with the dense model in one pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import reduce_
from vitrim.core.registry import ask, parse_method, parse_selector
from vitrim.core.selection import Selector
from vitrim.data.dataset import spread
from vitrim.data.pages import PageDataset
from vitrim.engines.copies import apart, shared_copy, take_learned
from vitrim.engines.machine import environment, seeded_draws
from vitrim.errors import VitrimError, one_line_errors
from vitrim.loading import Loaded
from vitrim.measure.evaluation_report import change_cell
from vitrim.measure.inputs import RETRIEVAL, PageData, open_data, untrained_methods
from vitrim.measure.late_interaction import RANKED, max_similarity, ndcg, pooled
from vitrim.measure.probes import mean_loss
from vitrim.measure.records import Row
from vitrim.report import DENSE, Report, Table


@dataclass
class Index:
    """The pages as one model stores them, and their scores.

    Attributes:
        vectors: number of vectors of every page.
        bytes: size of the vectors of all pages, in the dtype of the model.
        scores: (Q, B) of every batch of pages.
    """

    vectors: list[int] = field(default_factory=list)
    bytes: int = 0
    scores: list[Tensor] = field(default_factory=list)

    def add(self, queries: Sequence[Tensor], pages: Sequence[Tensor]) -> None:
        self.vectors += map(len, pages)
        self.bytes += sum(page.nbytes for page in pages)
        self.scores.append(max_similarity(queries, pages).cpu())


def evaluate_pages(
    loaded: Loaded,
    methods: Sequence[MethodConfig],
    images: PageData,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    seed: int = 0,
    on_progress: Callable[[int, int | None], None] | None = None,
) -> Report:
    """Score rankings of pages by nDCG@5 of MaxSim scores, see `vitrim.evaluate`.

    Queries are the dense model's: they have no image tokens. Rows: the dense model; its vectors pooled by every factor;
    every method with every selector, the methods alone without selectors, and the selectors alone without methods.
    """
    dataset = _opened(images)
    with ExitStack() as kept:
        own = kept.enter_context(apart(loaded.model))
        dense, methods = _placed(own.model, device, dtype), own.with_own(methods)
        selectors = [*map(parse_selector, images.select)] or ([] if own.select is None else [own.select])
        folder = own.learned or loaded.learned
        reduced, untrained = _reduced(dense, methods, selectors, folder), untrained_methods(methods, folder)
    models, indices = {DENSE: dense, **reduced}, {name: Index() for name in (DENSE, *reduced)}
    behind = {factor: Index() for factor in dict.fromkeys(images.pool_factors)}
    size, texts = images.batch_size, dataset.texts
    with one_line_errors(f"batch {size}", kept=""):
        queries = [one for start in range(0, len(texts), size) for one in _vectors(dense, texts[start : start + size])]
        rows = [dataset.pages[start : start + size] for start in range(0, len(dataset.pages), size)]
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=rows, num_workers=images.workers, collate_fn=list, generator=torch.Generator()
        )
        for number, batch in enumerate(loader):
            for name, model in models.items():
                with seeded_draws(device, seed + number):
                    found = _vectors(model, batch)
                indices[name].add(queries, found)
                for factor, index in behind.items() if name == DENSE else ():
                    index.add(queries, [pooled(page, factor) for page in found])
            if on_progress is not None:
                on_progress(min((number + 1) * size, len(dataset.pages)), len(dataset.pages))
    every = {DENSE: indices.pop(DENSE)}
    every |= {f"vectors pooled by {factor}": index for factor, index in behind.items()} | indices
    facts = {
        "weights": loaded.weights,
        "model_options": loaded.options,
        "untrained": untrained,
        "task": RETRIEVAL,
        "data": {
            "source": images.name(dataset),
            "split": dataset.split,
            "images": len(dataset.pages),
            "queries": len(texts),
            "batch_size": size,
        },
        "environment": environment(
            device=str(device), dtype=str(next(dense.parameters()).dtype).removeprefix("torch."), seed=seed
        ),
        "complete": True,
    }
    return _report(loaded.name, every, torch.from_numpy(dataset.relevant), facts)


def _opened(images: PageData) -> PageDataset:
    """The pages, at most as many rows as asked for."""
    if images.protocol:
        raise VitrimError("protocol is of segmentation: leave it out")
    if images.by_name:
        dataset: Any = open_data(images.source, task=RETRIEVAL, **images.columns, options=images.options)
    elif any(images.columns.values()) or images.options:
        raise VitrimError("split, columns and data_options say how to read a source, and a dataset is given")
    else:
        dataset = images.source
    if not isinstance(dataset, PageDataset):
        raise VitrimError(
            f"expected a source of pages with queries or a PageDataset of vitrim.data, got {type(dataset).__name__}"
        )
    few = images.limit is not None and images.limit < len(dataset)
    return dataset.part(spread(len(dataset), images.limit).tolist()) if few else dataset


def _placed(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """A copy of ``model`` in eval mode, which shares its weights if they are in place already."""
    like = next(model.parameters())
    if like.device == device and dtype in (None, like.dtype):
        return shared_copy(model).eval()
    return copy.deepcopy(model).to(device=device, dtype=dtype).eval()


def _reduced(
    dense: nn.Module, methods: Sequence[MethodConfig], selectors: Sequence[Selector], learned: Path | None
) -> dict[str, nn.Module]:
    """Reduced copies of ``dense`` by name, which share its weights."""
    found: dict[str, nn.Module] = {}
    behind: Sequence[Selector | None] = selectors or [None]
    for method in methods or ([parse_method("none")] if selectors else []):
        for selector in behind:
            words = [] if method.kind == "none" and selector is not None else [method.describe()]
            words += [] if selector is None else [selector.describe()]
            model = shared_copy(dense)
            take_learned(reduce_(model, method, compact=True, select=selector), learned)
            found[" + ".join(words)] = model
    return found


def _vectors(model: nn.Module, items: Sequence[Any]) -> list[Tensor]:
    """The vectors of pages or queries; `VitrimError` if they are not finite."""
    found = ask(model).token_vectors(model, items)
    if not all(bool(torch.isfinite(own).all()) for own in found):
        raise VitrimError("the model's vectors are not finite numbers: check its weights and dtype")
    return found


def _report(name: str, indices: Mapping[str, Index], relevant: Tensor, facts: dict[str, Any]) -> Report:
    """The report of all ``indices``, the dense model's first."""
    data, rows, cells = facts["data"], [], []
    gains = {method: ndcg(torch.cat(index.scores, dim=1), relevant) for method, index in indices.items()}
    dense = gains[DENSE]
    for method, index in indices.items():
        lost = mean_loss(dense - gains[method])
        row = Row(
            method,
            {
                "images": data["images"],
                "queries": data["queries"],
                "ndcg5": gains[method].mean().item(),
                **({} if method == DENSE else lost),
                "vectors": sum(index.vectors) / len(index.vectors),
                "bytes": index.bytes / len(index.vectors),
            },
            model=name,
        )
        rows.append(row)
        error = None if method == DENSE else lost["loss_error"]
        cells.append(
            (
                method,
                f"{100 * row['ndcg5']:.2f}",
                change_cell(row["ndcg5"] - rows[0]["ndcg5"], error, data["queries"]),
                f"{row['vectors']:.1f}".removesuffix(".0"),
                f"{row['bytes']:.0f}",
            )
        )
    columns = ("method", f"nDCG@{RANKED}", "change", "vectors", "bytes")
    title = f"{name} on {data['source']}: {data['queries']} queries among {data['images']} pages"
    notes = [
        f"nDCG@{RANKED} of MaxSim scores in %; change in points ± its standard error on the same queries; vectors and "
        "their bytes per page, mean"
    ]
    if facts["weights"] == "random":
        notes.append("the model has random weights, so its rankings are meaningless")
    if facts["untrained"]:
        notes.append(f"{', '.join(facts['untrained'])}: with random parameters")
    return Report("eval", facts, rows, [Table("eval", title, columns, cells)], notes)
