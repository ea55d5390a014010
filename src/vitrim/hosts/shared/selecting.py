"""Selection of image tokens behind a tower: the input of a selector for every image, and the places it leaves.

A reduced tower returns remaining tokens and their places; an unreduced one a feature for every place. Attention was
recorded for the tokens of a block, possibly more than remain: it is read at the remaining places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrim.core.selection import Choice, FrameGrid, Seen, Selector
from vitrim.core.tokens import ImagePlaces, Note, decision_dtype
from vitrim.errors import VitrimError
from vitrim.hosts.shared.compact import cells_of


@dataclass(frozen=True)
class Attended:
    """The attention of one block for one image, at its P places, prefix excluded; 0 at places without a token.

    Attributes:
        scores: (P,) attention from the class token, or from all.
        keys: (P, d), mean over heads.
        query: (C,) of the class token; None if not needed.
        wide_keys: (1 + P, C), the class token's first; None if not needed.
    """

    scores: Tensor
    keys: Tensor
    query: Tensor | None = None
    wide_keys: Tensor | None = None

    def at(self, places: Tensor) -> dict[str, Tensor]:
        """The entries of `Seen` for the remaining tokens at ``places`` (n,)."""
        here = places.to(self.scores.device)
        found = {"scores": self.scores[here], "keys": self.keys[here]}
        if self.query is not None and self.wide_keys is not None:
            found |= {"query": self.query, "wide_keys": torch.cat([self.wide_keys[:1], self.wide_keys[1:][here]])}
        return found


def attended(
    notes: Iterable[Note],
    class_token: bool,
    wide: bool,
    cell: int,
    raster: bool,
) -> dict[int, Attended]:
    """The attention of every image, from the ``notes`` of one block that `Trace.asking` kept.

    ``class_token``: read the class token's row, otherwise the mean over all queries. ``wide``: include queries and keys
    with heads concatenated. For ``cell`` and ``raster`` see `survivors`; values are averaged over cells.
    """
    found: dict[int, Attended] = {}
    for _, attention, state, images in notes:
        prefix = state.num_prefix
        scores = attention.class_mean() if class_token else attention.column_mean()
        keys = attention.k.mean(dim=1, dtype=decision_dtype(attention.k.dtype))
        sides = attention.k.transpose(1, 2).flatten(2) if wide else None
        query = attention.q[:, :, 0].flatten(1) if wide else None
        for row in range(len(scores)):
            places = state.position[row, prefix:] - prefix
            valid = torch.ones_like(places, dtype=torch.bool) if state.mask is None else state.mask[row, prefix:]
            total = state.initial_patches
            if cell > 1:
                places, total = cells_of(places, total, cell, raster), total // (cell * cell)
            places = places[valid]
            # Tokens per place, at least one, to divide by: places without a token stay 0.
            counts = places.new_zeros(total).index_add(0, places, torch.ones_like(places)).clamp_min(1)
            own = partial(_means, places=places, valid=valid, counts=counts, prefix=prefix)
            own_sides = None if sides is None else torch.cat([sides[row, :1], own(sides[row])])
            found[row if images is None else images[row]] = Attended(
                own(scores[row]), own(keys[row]), None if query is None else query[row], own_sides
            )
    return found


def _means(values: Tensor, *, places: Tensor, valid: Tensor, counts: Tensor, prefix: int) -> Tensor:
    """Means (P, ...) over the tokens at each place of ``values`` (N, ...), which include a prefix."""
    own = values[prefix:][valid]
    sums = own.new_zeros(len(counts), *own.shape[1:]).index_add(0, places, own)
    return sums / counts.to(own.dtype).view(-1, *[1] * (own.dim() - 1))


class ChosenTokens(NamedTuple):
    """The chosen tokens of one image.

    Attributes:
        features: (m, D).
        flags: (Q,) bool, which of the image's places in the prompt they take.
        rows: (m,) which of the candidate features had those places.
        places: which of these are the image's own tokens.
    """

    features: Tensor
    flags: Tensor
    rows: Tensor
    places: ImagePlaces


@dataclass(frozen=True)
class Candidates:
    """The tokens of one image that a selector chooses among.

    Attributes:
        features: (f + n + e, D); the ``front`` first, and the e behind a ``grid``, have no place among patches and
            always stay.
        flags: (Q,) bool, on the CPU: which of the image's places in the prompt they have.
        front: f.
        grid: of all n, if none was removed; None: e is 0.
        more: further entries of `Seen`, for this image.
    """

    features: Tensor
    flags: Tensor
    front: int = 0
    grid: FrameGrid | None = None
    more: Mapping[str, Any] | None = None

    @property
    def patches(self) -> slice:
        """The n features that a selector chooses among."""
        return slice(self.front, len(self.features) if self.grid is None else self.front + prod(self.grid))

    def chosen(self, choice: Choice) -> ChosenTokens:
        """The features that stay. Those without a place get the first free ones, since only their number matters."""
        patches, every = self.patches, torch.arange(len(self.features), device=choice.kept.device)
        tokens = choice.of(self.features[patches]).to(self.features.dtype)
        features = torch.cat([self.features[: patches.start], tokens, self.features[patches.stop :]])
        rows = torch.cat([every[: patches.start], choice.kept + patches.start, every[patches.stop :]])
        extra = choice.number - len(choice.kept)
        if extra:
            free = torch.ones(len(self.features), dtype=torch.bool, device=rows.device)
            free[rows] = False
            rows = torch.cat([rows, free.nonzero().squeeze(1)[:extra]])
        # Row i of the features has the i-th place in the prompt that is flagged.
        places = self.flags.nonzero().squeeze(1)[rows.to(self.flags.device)]
        own = places[: len(places) - extra]
        flags, kept, merged = (torch.zeros_like(self.flags) for _ in range(3))
        flags[places] = True
        kept[own] = True
        if choice.merged is not None:
            merged[own[self.front :][: len(choice.kept)]] = choice.merged.to(merged.device)
        return ChosenTokens(features, flags, rows, ImagePlaces(kept, merged, extra))


def choose(selector: Selector, images: Sequence[Candidates]) -> list[Choice]:
    """The choice for every image; images of equal size are processed together."""
    groups: dict[Any, list[int]] = {}
    for place, image in enumerate(images):
        # Only images of one shape fit into one tensor; a selector decides for each by itself.
        groups.setdefault((image.features.shape, image.front, image.grid), []).append(place)
    found: dict[int, Choice] = {}
    for places in groups.values():
        own = [images[place] for place in places]
        more: dict[str, Any] = {}
        for name in own[0].more or {}:
            values = [(image.more or {})[name] for image in own]
            more[name] = values if name == "text" else torch.stack(values)
        features = torch.stack([image.features[image.patches] for image in own])
        with nullcontext() if selector.merges else torch.no_grad():
            chosen = selector.select(Seen(features, own[0].grid, **more))
        found |= dict(zip(places, chosen, strict=True))
    return [found[place] for place in range(len(images))]


def runs(ids: Tensor, placeholder: int) -> list[int]:
    """The lengths of the runs of placeholders in a prompt (B, L), row by row."""
    # Zeros at both ends: a run that touches the edge of a row begins and ends, too, and never joins the next row's.
    here = torch.nn.functional.pad((ids == placeholder).to(torch.int8), (1, 1)).flatten()
    edges = here.diff()
    starts, ends = (edges == 1).nonzero().squeeze(1), (edges == -1).nonzero().squeeze(1)
    return (ends - starts).tolist()


def by_image(pooled: Any, prompt_runs: Sequence[int], together: bool) -> list[Tensor]:
    """The features (n, D) of every image in a connector's output: a list of (n, D) or (tiles, n, D), (images, n, D) or
    (total, D).

    ``prompt_runs`` are the lengths of runs of placeholders, which split (total, D) into images; another sum is refused.
    ``together``: a list entry holds all images of a prompt, so it is split by runs, too.
    """
    if not isinstance(pooled, Tensor):
        entries = [entry.flatten(0, -2) for entry in pooled]
        if not together:
            return entries
        pooled = torch.cat(entries)
    if pooled.dim() == 3:
        return list(pooled)
    whole = pooled.flatten(0, -2)
    if sum(prompt_runs) != len(whole):
        raise VitrimError(
            f"expected {len(whole)} image tokens in the prompt, as many as the images have, got {sum(prompt_runs)}: "
            "prepare prompts as for the model without a selection"
        )
    return list(whole.split(list(prompt_runs)))


def grid_of(tokens: int, frames: int, rows: int, columns: int) -> FrameGrid | None:
    """The grid of ``tokens`` that are made of ``frames`` of ``rows`` x ``columns`` patches; None if it is unknown.

    Each token is made of a square of patches, and those at an edge that fill no square are left out.
    """
    # The side of the square is not in the inputs: the number of tokens tells.
    grids = ((frames, rows // side, columns // side) for side in range(1, min(rows, columns) + 1))
    return next((grid for grid in grids if prod(grid) == tokens), None)


def texts(ids: Tensor, mask: Tensor | None, placeholders: Sequence[int], embed: Any) -> list[Tensor]:
    """The input embeddings (M, D) of the text in every row of a prompt (B, L), without images and padding."""
    words = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, -ids.shape[1] :].bool()
    for placeholder in placeholders:
        words = words & (ids != placeholder)
    with torch.no_grad():
        return [embed(row[own]) for row, own in zip(ids, words, strict=True)]


def rows_of_images(ids: Tensor, placeholder: int, counts: Sequence[int]) -> list[int]:
    """The row of the prompt (B, L) that each image is in, from its number of placeholders."""
    rows = (ids == placeholder).nonzero()[:, 0].tolist()
    found, first = [], 0
    for count in counts:
        found.append(rows[min(first, len(rows) - 1)] if rows else 0)
        first += count
    return found
