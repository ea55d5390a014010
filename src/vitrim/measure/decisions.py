"""The record of where every input token went, per image and block: analyses and figures are made from it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrim.core.reduce import Reduction
from vitrim.core.registry import host_of
from vitrim.errors import VitrimError
from vitrim.measure.arrays import narrowed, read_arrays, widened, write_arrays
from vitrim.measure.contestants import Contestant, Output
from vitrim.measure.probes import Gauge, Lists
from vitrim.measure.records import Batch

__all__ = ["Decisions", "Record", "file_name", "save_decisions", "whereabouts"]

FORMAT = 1


@dataclass(frozen=True)
class Decisions:
    """The way of the tokens of images under one method, in the order of their ids.

    Attributes:
        header: ``method``, ``num_prefix`` (protected tokens at the front), ``soft`` (tokens are mixtures, so ``source``
            is the one with the largest weight or none), and whatever a caller adds; can be written to JSON.
        ids: (I,) int64, the places of the images in their dataset.
        source: (I, L, N0) int32: the token that holds input token i after block l, counted from 0 with the prefix, and
            -1 where none does.
        num_tokens: (I, L) int32, tokens of each image after each block, prefix included, padding not.

    Example:
        >>> decisions = Decisions({"method": "none"}, np.arange(1), np.zeros((1, 2, 3), np.int32), np.ones((1, 2)))
        >>> decisions.source.shape
        (1, 2, 3)
    """

    header: Mapping[str, Any]
    ids: NDArray[Any]
    source: NDArray[Any]
    num_tokens: NDArray[Any]

    def save(self, file: str | Path) -> None:
        """Write to ``file``, a compressed .npz without pickles, in the narrowest integers that hold the numbers.

        Raises:
            VitrimError: it cannot be written.
        """
        source = narrowed(self.source)
        header = {**self.header, "format": FORMAT, "pruned": int(np.iinfo(source.dtype).max)}
        arrays = {"ids": self.ids, "source": source, "num_tokens": self.num_tokens.astype(np.int32)}
        write_arrays(file, header, arrays)

    @classmethod
    def load(cls, file: str | Path) -> Decisions:
        """Read what `save` wrote.

        Raises:
            VitrimError: there is no such file, or it is no record of this format.
        """
        header, arrays = read_arrays(file, "record of decisions", FORMAT)
        try:
            return cls(header, arrays["ids"], widened(arrays["source"], header["pruned"]), arrays["num_tokens"])
        except KeyError as error:
            raise VitrimError(f"{file} is no record of decisions: it has no {error}") from error


class Record:
    """The record of where every input token went: `Decisions`. Adds nothing to rows."""

    def start(self, contestant: Contestant) -> Gauge:
        """The decisions of one model; of the dense one there are none."""
        return _Record(contestant)


class _Record(Gauge):
    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.lists = Lists("ids", "source", "num_tokens")
        super().__init__({"record": self.lists})

    def see(self, batch: Batch, output: Output, dense: Output) -> None:
        reduction = self.contestant.reduction
        if reduction is None:
            return
        self.lists.update(ids=batch.ids, **whereabouts(reduction, len(batch)))

    def result(self) -> Mapping[str, Any]:
        return {}

    def decisions(self) -> Decisions | None:
        """The record, None of the dense model."""
        reduction = self.contestant.reduction
        if reduction is None or self.lists.is_empty:
            return None
        found = self.lists.each()
        order = found["ids"].argsort()
        facts = host_of(reduction.model).facts(reduction.model)
        header = {
            "method": self.contestant.name,
            "num_prefix": facts.num_prefix,
            "soft": reduction.config.kind == "soft",
        }
        return Decisions(header, *(found[name][order].numpy() for name in ("ids", "source", "num_tokens")))


def whereabouts(reduction: Reduction, images: int) -> dict[str, Tensor]:
    """Of the last forward: the token that holds each input token after every block, and the number of tokens.

    Args:
        reduction: made with ``record=True``.
        images: B.

    Returns:
        ``source`` (B, L, N0) int32, -1 for none, and ``num_tokens`` (B, L) int32, on the CPU.
    """
    states = reduction.states[1:]
    source = torch.stack([state.source.expand(images, -1) for state in states], 1)
    counts = [_per_image(state.mask, state.num_tokens, images) for state in states]
    return {
        "source": source.to("cpu", torch.int32),
        "num_tokens": torch.stack(counts, 1).to("cpu", torch.int32),
    }


def _per_image(mask: Tensor | None, count: int, images: int) -> Tensor:
    return torch.full((images,), count) if mask is None else mask.sum(1).cpu()


def save_decisions(gauges: Iterable[Gauge], folder: Path) -> list[Path]:
    """Write the `Decisions` of every method into ``folder``, as ``METHOD.npz``, and return the files."""
    files = []
    for gauge in gauges:
        found = gauge.decisions() if isinstance(gauge, _Record) else None
        if found is not None:
            files.append(folder / f"{file_name(found.header['method'])}.npz")
            found.save(files[-1])
    return files


def file_name(method: str) -> str:
    """A method's text as the name of a file: letters, digits, dots and minus signs stay; a long one ends in a sum.

    Example:
        >>> file_name("evit:keep_rate=0.7,fuse_token=true")
        'evit_keep_rate_0.7_fuse_token_true'
    """
    safe = "".join(sign if sign.isalnum() or sign in ".-" else "_" for sign in method)
    return safe if len(safe) <= 120 else f"{safe[:100]}-{zlib.crc32(method.encode()):08x}"  # file systems end at 255
