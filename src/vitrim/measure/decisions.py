"""The record of where every input token went, per image and block: analyses and figures are made from it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from vitrim.core.registry import host_of
from vitrim.errors import VitrimError, first_line
from vitrim.files import check_file
from vitrim.measure.contestants import Contestant, Output
from vitrim.measure.probes import Gauge
from vitrim.measure.records import Batch

__all__ = ["Decisions", "Record", "save_decisions"]

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
        file = Path(file)
        check_file(file)
        tokens = self.source.shape[-1]
        narrow = np.uint8 if tokens < np.iinfo(np.uint8).max else np.uint16 if tokens < 2**16 - 1 else np.int32
        # an unsigned type has no -1: its largest value stands for it
        source = np.where(self.source < 0, np.iinfo(narrow).max, self.source).astype(narrow)
        header = json.dumps({**self.header, "format": FORMAT, "pruned": int(np.iinfo(narrow).max)})
        arrays = {"ids": self.ids, "source": source, "num_tokens": self.num_tokens.astype(np.int32)}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_name(file.name + ".new")
            with beside.open("wb") as out:
                np.savez_compressed(out, header=np.array(header), **arrays)  # type: ignore[arg-type]
            beside.replace(file)
        except OSError as error:
            raise VitrimError(f"cannot write {file}: {error.strerror}") from error

    @classmethod
    def load(cls, file: str | Path) -> Decisions:
        """Read what `save` wrote.

        Raises:
            VitrimError: there is no such file, or it is no record of this format.
        """
        try:
            with np.load(file, allow_pickle=False) as arrays:
                header = json.loads(str(arrays["header"]))
                if header["format"] != FORMAT:
                    raise VitrimError(f"{file} has format {header['format']}, this vitrim reads {FORMAT}")
                source = arrays["source"].astype(np.int32)
                source[arrays["source"] == header["pruned"]] = -1
                return cls(header, arrays["ids"], source, arrays["num_tokens"])
        except OSError as error:
            raise VitrimError(f"cannot read {file}: {error.strerror or first_line(error)}") from error
        except (KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
            raise VitrimError(f"{file} is no record of decisions: {first_line(error)}") from error


class Record:
    """The record of where every input token went: `Decisions`. Adds nothing to rows."""

    def start(self, contestant: Contestant) -> Gauge:
        """The decisions of one model; of the dense one there are none."""
        return _Record(contestant)


class _Record(Gauge):
    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.lists = _Lists()
        super().__init__({"record": self.lists})

    def see(self, batch: Batch, output: Output, dense: Output) -> None:
        reduction = self.contestant.reduction
        if reduction is None:
            return
        states = reduction.states[1:]
        source = torch.stack([state.source.expand(len(batch), -1) for state in states], 1)
        counts = [_per_image(state.mask, state.num_tokens, len(batch)) for state in states]
        self.lists.update(batch.ids, source, torch.stack(counts, 1))

    def result(self) -> Mapping[str, Any]:
        return {}

    def decisions(self) -> Decisions | None:
        """The record, None of the dense model."""
        reduction = self.contestant.reduction
        if reduction is None or not self.lists.ids:
            return None
        ids = dim_zero_cat(self.lists.ids)
        order = ids.argsort()
        facts = host_of(reduction.model).facts(reduction.model)
        header = {
            "method": self.contestant.name,
            "num_prefix": facts.num_prefix,
            "soft": reduction.config.kind == "soft",
        }
        source, tokens = dim_zero_cat(self.lists.source), dim_zero_cat(self.lists.num_tokens)
        return Decisions(header, *(one[order].numpy() for one in (ids, source, tokens)))


class _Lists(Metric):
    """The recorded tensors of all batches, on the CPU."""

    full_state_update = False
    ids: list[Tensor]
    source: list[Tensor]
    num_tokens: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("ids", "source", "num_tokens"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, ids: Tensor, source: Tensor, num_tokens: Tensor) -> None:
        self.ids.append(ids.cpu())
        self.source.append(source.to("cpu", torch.int32))
        self.num_tokens.append(num_tokens.to("cpu", torch.int32))

    def compute(self) -> None:
        return None


def _per_image(mask: Tensor | None, count: int, images: int) -> Tensor:
    return torch.full((images,), count) if mask is None else mask.sum(1)


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
    """A method's text as the name of a file: letters, digits, dots and minus signs stay.

    Example:
        >>> file_name("evit:keep_rate=0.7,fuse_token=true")
        'evit_keep_rate_0.7_fuse_token_true'
    """
    return "".join(sign if sign.isalnum() or sign in ".-" else "_" for sign in method)
