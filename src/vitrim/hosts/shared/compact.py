"""Fewer image tokens for a language model: the tokens that remain of a tower's, and the shortened prompt.

A connector turns the tower's tokens into features, one per token or per cell of neighbouring patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from vitrim.core.tokens import TokenState
from vitrim.errors import VitrimError


@dataclass(frozen=True)
class Survivors:
    """The remaining tokens of one image, in raster order of their anchors.

    Attributes:
        places: (n,) int64, ascending indices of the anchors among all P patches, prefix excluded.
        order: (n,) int64, indices among the tower's tokens, prefix excluded.
        held: tokens that the tower has, padding included.
        initial: P.
        num_prefix: prefix tokens, which all remain.
        dropped: leading tokens (prefix or patches) that the connector drops; None: the whole prefix or nothing.
    """

    places: Tensor
    order: Tensor
    held: int
    initial: int
    num_prefix: int
    dropped: int | None = None

    def take(self, features: Tensor, full: bool) -> tuple[Tensor, Tensor]:
        """The remaining features (m, D) of (n, D), and (Q,) bool, their places in the image's part of a prompt.

        ``features`` are one per token of the tower, or if ``full`` per place of the image, where tokens are repeated at
        every place they were merged from; with or without the prefix.
        """
        if self.dropped is None:
            # A connector that drops nothing hands out the prefix, too: the number of features tells if it did.
            whole = features.shape[0] - self.num_prefix == (self.initial if full else self.held)
            first = -self.num_prefix if whole else 0
        else:
            # Negative: so many of the prefix stay in front; positive: so many patches are dropped as well.
            first = self.dropped - self.num_prefix
        # tokens in front of the first patch stay; if leading patches are dropped, the others move up
        prefix, places = max(-first, 0), self.places - max(first, 0)
        rows = places if full else self.order
        front = torch.arange(prefix, device=rows.device)
        kept = torch.zeros(prefix + (features.shape[0] - prefix if full else self.initial), dtype=torch.bool)
        kept[torch.cat([front, places + prefix]).cpu()] = True
        return features.index_select(0, torch.cat([front, rows + prefix]).to(features.device)), kept


def survivors(state: TokenState, cell: int = 1, raster: bool = True, dropped: int | None = None) -> list[Survivors]:
    """The remaining tokens of every image of a batch, by patches or by cells of ``cell`` x ``cell`` patches.

    ``state`` is of the tokens behind the block that the connector reads; the tokens of a cell are consecutive.
    ``raster``: the patches came in raster order of a square image; otherwise cell by cell. If the connector drops a
    token's anchor (``dropped``, see `Survivors`), the token takes the place of its next patch.
    """
    prefix, area = state.num_prefix, cell * cell
    found = []
    for image, position in enumerate(state.position):
        places = position[prefix:] - prefix
        valid = torch.ones_like(places, dtype=torch.bool) if state.mask is None else state.mask[image, prefix:]
        if cell > 1:
            places, valid = cells_of(places[::area], state.initial_patches, cell, raster), valid[::area]
        left_out = 0 if dropped is None else max(dropped - prefix, 0)
        if left_out:
            # source (P,) is the token that holds each patch
            source, places = state.source[image, prefix:] - prefix, places.clone()
            for token in (places < left_out).nonzero().squeeze(1).tolist():
                # The token's other patches, of which the first in raster order becomes its anchor.
                others = (source[left_out:] == token).nonzero().squeeze(1)
                if len(others):
                    places[token] = others[0] + left_out
            valid = valid & (places >= left_out)
        own = valid.nonzero().squeeze(1)
        # Tokens may stand in any order behind a merge: the prompt wants them from the top left on.
        places, order = places[own].sort()
        found.append(Survivors(places, own[order], len(valid), state.initial_patches // area, prefix, dropped))
    return found


def holders(state: TokenState, image: int, own: Survivors, cell: int, raster: bool, places: int) -> Tensor:
    """(``places``,) int64: for every place of an image in a prompt, the place whose token holds it, or -1.

    For ``state``, ``cell`` and ``raster``, see `survivors`; ``own`` are those of ``image``. Some places may be for the
    prefix.
    """
    token = state.source[image, own.num_prefix :] - own.num_prefix  # (P,)
    # A cell is one place of the prompt: its tokens are consecutive, and so are their numbers.
    token = torch.where(token >= 0, token // (cell * cell), -1)
    anchor = torch.full((own.held + 1,), -1, device=token.device)  # the last entry means none
    anchor[own.order] = own.places
    held = anchor[token]
    if cell > 1:
        cells = cells_of(torch.arange(len(held), device=held.device), len(held), cell, raster)
        held = torch.full((own.initial,), -1, device=held.device).scatter(0, cells, held)
    first = 0 if own.dropped is None else max(own.dropped - own.num_prefix, 0)
    held = torch.where(held >= first, held - first, -1)[first:].cpu()
    # Places in front of the patches are the prefix's, each its own holder.
    front = places - len(held)
    return torch.cat([torch.arange(front), torch.where(held >= 0, held + front, -1)])


def cells_of(places: Tensor, patches: int, cell: int, raster: bool) -> Tensor:
    """The cells, in raster order, that contain the patches at ``places`` of a square image of ``patches``."""
    if not raster:
        return places // (cell * cell)
    side = isqrt(patches)
    rows, columns = places // side // cell, places % side // cell
    return rows * (side // cell) + columns


def prompt_rows(images: Tensor, text: int, places: int, word: int, placeholder: int) -> Tensor:
    """(B, ``text`` + n ``places``) int64: prompts of ``text`` words in equal parts around the ``images`` (B, n, C, H,
    W).
    """
    number = images.shape[1]
    row: list[int] = []
    for part in range(number + 1):
        # The first parts take the remainder, one word each.
        row += [word] * (text // (number + 1) + (part < text % (number + 1)))
        row += [placeholder] * (places if part < number else 0)
    return torch.tensor(row, device=images.device).expand(len(images), -1).contiguous()


FILL: Mapping[str, int] = {"labels": -100}
"""Padding values of a prompt's inputs, by name; otherwise 0."""


@dataclass(frozen=True)
class ShorterRows:
    """Rows (B, L) of a prompt without the removed tokens, padded to equal length M.

    Attributes:
        kept, stays: (B, L) bool, not removed; not removed and not padding.
        first, real: in the shortened rows, (B, 1) the place of the first token; (B, M) bool, False for padding.
    """

    kept: Tensor
    stays: Tensor
    first: Tensor
    real: Tensor

    @classmethod
    def of(cls, kept: Tensor, mask: Tensor | None) -> ShorterRows:
        """Rows padded on the side that the ``mask`` (B, L) pads already, by default the left."""
        stays = kept if mask is None else kept & mask.bool()
        counts = stays.sum(dim=1, keepdim=True)
        spread = torch.arange(int(counts.max()), device=kept.device)
        # Padded at the end is what ends in padding; all others, also whole rows, are padded in front, as for
        # `generate`.
        right = mask is not None and not bool(mask[:, -1].all())
        first = torch.zeros_like(counts) if right else len(spread) - counts
        return cls(kept, stays, first, (spread >= first) & (spread < first + counts))

    def shortened(self, value: Tensor, fill: int) -> Tensor:
        """A ``value`` (..., B, L) of every token as (..., B, M), with ``fill`` for padding."""
        rows = value.new_full((*value.shape[:-2], *self.real.shape), fill)
        # Both masks count the same tokens, row by row in order.
        rows[..., self.real] = value.expand(*value.shape[:-2], *self.kept.shape)[..., self.stays]
        return rows


def trimmed(
    given: Mapping[str, Any], names: Sequence[str], kept: Tensor, filler: int, close: bool = True
) -> dict[str, Any]:
    """The inputs of a language model without the removed tokens, rows padded to equal length (`ShorterRows`).

    Padded rows get an ``attention_mask``. So do rows whose positions get gaps: without a mask the library takes a gap
    for the start of another prompt packed in the row. Packed prompts stay separate, or are refused, as is
    ``logits_to_keep`` of a removed token.

    Args:
        given: the inputs; those called ``names`` have one entry per token on their last axis, among them ``input_ids``
            (B, L).
        kept: (B, L) bool.
        filler: pads ``input_ids``; not a placeholder.
        close: close gaps in positions (B, L); otherwise keep them. Of four rows (4, B, L), gaps are closed in the
            first, which numbers the tokens, and kept in the others.
    """
    out = dict(given)
    if bool(kept.all()):
        return out
    # Only the part of a mask that is of the input gets shorter.
    past, mask = _past(given.get("attention_mask"), kept.shape[1])
    rows, packed = ShorterRows.of(kept, mask), packed_prompts(given)
    for name in names:
        value = given.get(name)
        if not isinstance(value, Tensor) or name == "attention_mask":
            continue
        if name == "position_ids":
            value = _closed(value, kept, packed, close)
        out[name] = rows.shortened(value, filler if name == "input_ids" else FILL.get(name, 0))
    if mask is not None or not bool(rows.real.all()):
        own = rows.real.to(torch.long if mask is None else mask.dtype)
        out["attention_mask"] = own if past is None else torch.cat([past, own], dim=1)
    if packed is not None:
        _keep_apart(out, packed, rows)
    if isinstance(given.get("logits_to_keep"), Tensor):
        out["logits_to_keep"] = _asked(given["logits_to_keep"], rows)
    return out


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache among a language model's inputs or outputs; transformers 5.24 calls it ``cache``."""
    found = given.get("past_key_values")
    return given.get("cache") if found is None else found


def packed_prompts(given: Mapping[str, Any]) -> Tensor | None:
    """(B, L) int64, the index of each token's prompt in its row; None if the library does not read rows as packed.

    Hugging Face's rule: without mask and cache, a new prompt begins wherever positions (B, L), or the first of four
    rows, do not increase by one.
    """
    positions = given.get("position_ids")
    positioned = given.get("attention_mask") is not None or cache_of(given) is not None
    if positioned or not isinstance(positions, Tensor) or (positions.dim() == 3 and positions.shape[0] != 4):
        return None
    own = (positions[0] if positions.dim() == 3 else positions).expand(given["input_ids"].shape)
    return (own.diff(dim=1, prepend=own[:, :1] - 1) != 1).long().cumsum(dim=1)


def _closed(positions: Tensor, kept: Tensor, packed: Tensor | None, close: bool) -> Tensor:
    """Positions without the gaps of removed tokens, prompt by prompt; see `trimmed`."""
    numbered = positions.dim() == 3 and positions.shape[0] == 4
    if not numbered and (not close or positions.dim() != 2):
        return positions
    # Every position goes back by the number of tokens that went before it.
    gone = (~kept).long().cumsum(dim=1)
    if packed is not None:  # removals in earlier prompts do not count
        begins = packed.diff(dim=1, prepend=packed[:, :1] - 1) > 0
        # The running maximum carries what had gone before a prompt began through all of its tokens.
        gone = gone - torch.where(begins, gone - (~kept).long(), 0).cummax(dim=1).values
    return torch.cat([positions[:1] - gone, positions[1:].expand(-1, *gone.shape)]) if numbered else positions - gone


def _keep_apart(out: dict[str, Any], packed: Tensor, rows: ShorterRows) -> None:
    """Let the library find the same prompts in the shortened rows of ``out`` as in ``packed``; see `trimmed`."""
    found = packed_prompts(out)
    if bool(packed.any()):
        if found is None or not torch.equal(found, rows.shortened(packed, 0)):
            raise VitrimError(
                "prompts packed in one row cannot be told apart when their images lose tokens (positions=original, or "
                "rows that lose different numbers): give one prompt a row, with an attention_mask"
            )
    elif found is not None and bool(found.any()):
        out["attention_mask"] = rows.real.long()


def _asked(asked: Tensor, shorter: ShorterRows) -> Tensor:
    """The ``logits_to_keep`` of the shortened prompt: (n,) indices for every row, (B, n) per row, or (B, L) bool."""
    kept, stays = shorter.kept, shorter.stays
    length, rows = kept.shape[1], asked.to(kept.device)
    if asked.dtype == torch.bool and asked.dim() == 1:
        rows = rows.nonzero().squeeze(1)
    # Indices may be one list for all rows, or one per row.
    fits = rows.shape == kept.shape if rows.dtype == torch.bool else rows.dim() == 1 or len(rows) == len(kept)
    if not fits or (rows.dtype != torch.bool and not bool(((rows >= -length) & (rows < length)).all())):
        raise VitrimError(f"expected logits_to_keep among the {length} tokens of input_ids, got {tuple(asked.shape)}")
    if rows.dtype == torch.bool:
        lost, found = bool((rows & ~kept).any()), shorter.shortened(rows, False)
    else:
        every = (rows % length).expand(len(kept), -1)
        lost = not bool(kept.gather(1, every).all())
        # The place of a token in its shortened row: how many stay up to it, behind the padding in front.
        places = stays.long().cumsum(dim=1) - 1 + shorter.first
        found = places.gather(1, every).clamp_min(0)
    if lost:
        raise VitrimError("logits_to_keep asks for image tokens that went: ask for tokens of the text")
    if rows.dim() == 2:
        return found
    real = stays.gather(1, every)  # padding has no logits
    same = found.where(real, 0).amax(dim=0)
    if not bool((found.where(real, same) == same).all()):
        raise VitrimError(
            "logits_to_keep (n,) names tokens that stand at different places in rows that lost different numbers of "
            "image tokens: give (B, n), one row for each prompt"
        )
    return same


def check_prompt(given: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse a prompt whose inputs called ``names`` do not describe the same tokens; a mask alone may be longer, for a
    cache.
    """
    ids = given["input_ids"]
    if ids.dim() != 2:
        raise VitrimError(f"expected input_ids (B, L) beside pixel_values, got {tuple(ids.shape)}")
    length = ids.shape[1]
    _past(given.get("attention_mask"), length)
    for name in names:
        value = given.get(name)
        if not isinstance(value, Tensor):
            continue
        own = value.shape[-1] if value.dim() else 0
        if own < length or (own > length and name != "attention_mask"):
            raise VitrimError(f"expected {name} for the {length} tokens of input_ids, got {own}")


def _past(mask: Any, length: int) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask into the part for tokens in the cache, and that for the ``length`` input tokens."""
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise VitrimError(
            "a compact model takes an attention_mask of one number per token (B, L): which tokens of the prompt are "
            "left is known only when the images were seen"
        )
    past = mask.shape[1] - length
    return (mask[:, :past] if past else None), mask[:, past:]


def kept_in_prompt(ids: Tensor, placeholder: int, flags: Sequence[Tensor]) -> Tensor:
    """(B, L) bool: the tokens of a prompt ``ids`` (B, L) that stay, all except some placeholders of images.

    ``flags`` say for every image in order, (Q,) bool, which of its placeholders do; `VitrimError` for another number.
    """
    here = ids == placeholder
    wanted = torch.cat([flag.to(ids.device) for flag in flags])
    if int(here.sum()) != len(wanted):
        raise VitrimError(
            f"expected {len(wanted)} image tokens in the prompt, as many as the images have before reduction, got "
            f"{int(here.sum())}: prepare prompts as for the unreduced model"
        )
    kept = torch.ones_like(here)
    kept[here] = wanted
    return kept
