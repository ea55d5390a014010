"""The record of one model under one method: compact arrays over the images, in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.errors import VitrimError, first_line
from vitrim.measure.decisions import narrowed, read_arrays, widened, write_arrays

FORMAT = 1
MOST_FEATURES = 5000
"""Most images whose features a record keeps: features barely compress, and distances need no more images."""

FEATURES = ("features", "head")
"""Arrays limited to `MOST_FEATURES` images."""

KINDS: dict[str, Any] = {
    **dict.fromkeys(("method", "kind", "model", "data", "title", "report", "metric"), str),
    **dict.fromkeys(("num_layers", "num_prefix", "feature_images", "batch_size", "pruned"), int),
    **dict.fromkeys(("grid", "blocks", "feature_blocks", "bounds", "thresholds"), list),
    "split": (str, NoneType),
    **dict.fromkeys(("score", "change", "error", "agree", "cosine"), (int, float)),
    **dict.fromkeys(("soft", "adaptive", "batch_dependent"), bool),
}
"""Types of header entries; all are optional here."""
ARRAYS = {
    **dict.fromkeys(("ids", "batch", "first"), ("iu", 1)),
    **dict.fromkeys(("num_tokens", "top_classes"), ("iu", 2)),
    "source": ("iu", 3),
    "kept": ("u", 3),
    **dict.fromkeys(("head_cosine", "kl"), ("f", 1)),
    **dict.fromkeys(("head", "cosine", "logits", "top_logits"), ("f", 2)),
    "features": ("f", 3),
}
"""Dtype kinds and number of dimensions of the arrays."""
MOST_LAYERS = 10_000

LAST = ("split", "report")
"""Header entries that a title names only if nothing else distinguishes two records."""
SAME = ("grid", "num_layers", "data", "split")
"""Header entries that records of the same images share."""


@dataclass(frozen=True)
class Record:
    """One model under one method on an ordered set of I images, with labels only after the blocks that changed them.

    Attributes:
        header: JSON-serialisable. ``model``, ``method``, ``kind`` of the method, ``soft``, ``num_prefix``,
            ``num_layers`` L, ``grid``, ``blocks`` (those that changed tokens), ``feature_blocks``, and entries of the
            caller, such as ``data`` and ``weights``. For a model that cannot be reduced, L is 0 and ``grid`` [0, 0].
        arrays: by name, those that apply:

            * ``ids`` (I,): indices of the images in their dataset, ascending; ``batch`` (I,): number of each image's
              batch; ``targets`` (I,) or (I, K).
            * ``source`` (I, S, N0) int32: the token that holds input token i after each of the S ``blocks``, prefix
              counted, -1 for none. For soft tokens, the token with the largest weight.
            * ``kept`` (I, S, ceil(P / 8)) uint8: bits of the anchor patches (see `Record.kept`).
            * ``num_tokens`` (I, L): tokens after each block, with prefix, without padding.
            * ``features`` (J, F, C) float16: class token after the F ``feature_blocks``; ``head`` (J, C): input of the
              classifier. J = ``feature_images`` is I up to `MOST_FEATURES`, then that many images, evenly spread.
            * ``cosine`` (I, L) float32: class token against the dense model's after each block; ``head_cosine`` (I,).
            * ``kl`` (I,) float32: KL(dense || model) of the predictions, in nats.
            * ``first`` (I,) int32: class with the largest logit.
            * ``logits`` (I, K) float16, or, beyond 1,000 classes, the 16 largest as ``top_logits`` and ``top_classes``.

    Example:
        >>> record = Record({"method": "none", "blocks": [], "num_layers": 2}, {"ids": np.arange(3)})
        >>> len(record), record.method
        (3, 'none')
    """

    header: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.arrays["ids"])

    @property
    def method(self) -> str:
        """The method, as on the command line; ``dense`` for the unreduced model."""
        return str(self.header["method"])

    @property
    def name(self) -> str:
        """The title that `titled` set, else the method."""
        return str(self.header.get("title", self.method))

    @property
    def blocks(self) -> list[int]:
        """The S blocks that changed tokens, from 0."""
        return list(self.header["blocks"])

    @property
    def num_patches(self) -> int:
        """P, patches at the input of the first block."""
        rows, columns = self.header["grid"]
        return int(rows * columns)

    def labels(self) -> NDArray[np.int32]:
        """(I, S, P), the patch token that holds each patch after each of the ``blocks``; -1 for none."""
        prefix = self.header["num_prefix"]
        found: NDArray[np.int32] = np.maximum(self._array("source", "patterns")[..., prefix:] - prefix, -1)
        return found

    def kept(self) -> NDArray[np.bool_]:
        """(I, S, P), the anchor patches of the tokens after each of the ``blocks``.

        For a method that prunes, the patches left unchanged; EViT's fused token and the padding of ATS have no anchor.
        For a method that merges, the patch that each token grew from, such as the centre of a cluster. `VitrimError`
        for soft tokens.
        """
        bits = self._array("kept", "kept patches")
        return np.unpackbits(bits, axis=-1, count=self.num_patches).astype(bool)

    def tokens(self) -> NDArray[np.int64]:
        """(I, L), tokens after each block, with prefix, without padding."""
        return self._array("num_tokens", "numbers of tokens").astype(np.int64)

    def feature(self, block: int | None) -> NDArray[np.float32]:
        """(J, C), the class token after a block, or the classifier's input for None; J images, see `Record`."""
        if block is None:
            return self._array("head", "features").astype(np.float32)
        places = list(self.header.get("feature_blocks", ()))
        if block not in places:
            raise VitrimError(f"the record of {self.name} has no features after block {block}; it has {places}")
        return self._array("features", "features")[:, places.index(block)].astype(np.float32)

    def shows_the_same_as(self, other: Record) -> bool:
        """True if both have the same method, model, data and numbers."""
        keys = all(self.header.get(key) == other.header.get(key) for key in ("method", "model", "data", "split"))
        return (
            keys
            and self.arrays.keys() == other.arrays.keys()
            and all(
                np.array_equal(array, other.arrays[name], equal_nan=array.dtype.kind == "f")
                for name, array in self.arrays.items()
            )
        )

    def correct(self) -> NDArray[np.bool_] | None:
        """(I,), True if the label has the largest logit; None without one label per image."""
        targets = self.arrays.get("targets")
        first = self.first()
        return None if targets is None or targets.ndim != 1 or first is None else first == targets

    def first(self) -> NDArray[np.int64] | None:
        """(I,), the class with the largest logit; None without logits."""
        return self.arrays["first"].astype(np.int64) if "first" in self.arrays else None

    def save(self, path: str | Path) -> None:
        """Write a compressed .npz without pickles, integers in the narrowest type that holds them."""
        arrays = dict(self.arrays)
        for name, array in arrays.items():
            if array.dtype.kind in "iu" and array.size:
                # The narrowest integers: most counts fit into a byte, and a record has millions.
                ends = (np.min_scalar_type(array.min()), np.min_scalar_type(array.max()))
                arrays[name] = array.astype(np.result_type(*ends))
        header = {**self.header, "format": FORMAT}
        if "source" in self.arrays:
            arrays["source"] = narrowed(self.arrays["source"])
            header["pruned"] = int(np.iinfo(arrays["source"].dtype).max)
        write_arrays(path, header, arrays)

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read what `save` wrote."""
        header, arrays = read_arrays(path, "record of an analysis", FORMAT)
        missing = {"method", "kind", "blocks", "num_layers", "grid", "num_prefix"} - set(header)
        if missing or "ids" not in arrays:
            raise VitrimError(f"{path} is no record of an analysis: it has no {', '.join(sorted(missing) or ['ids'])}")
        try:
            # The file may be a stranger's: everything that later code indexes by is checked here.
            problem = _damage(header, arrays)
            if problem is None and "source" in arrays:
                source = arrays["source"] = widened(arrays["source"], header.pop("pruned"))
                if source.size and not -1 <= source.min() <= source.max() < source.shape[-1]:
                    problem = "source names tokens that there are not"
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            problem = f"its header is damaged ({first_line(error)})"
        if problem is not None:
            raise VitrimError(f"{path} is no record of an analysis: {problem}")
        return cls({name: value for name, value in header.items() if name != "format"}, arrays)

    def _array(self, name: str, what: str) -> NDArray[Any]:
        if name not in self.arrays:
            raise VitrimError(f"the record of {self.name} has no {what}")
        return self.arrays[name]


def _damage(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str | None:
    """A message about the first header entry of the wrong type, or array of the wrong shape or values; None if all are
    valid."""
    layers, places = header["num_layers"], range(int(header["num_layers"]))
    checks = {
        "num_layers": lambda value: 0 <= value <= MOST_LAYERS,
        "grid": lambda value: len(value) == 2 and all(type(side) is int and side >= 0 for side in value),
        "num_prefix": lambda value: value >= 0,
        "blocks": lambda value: all(type(block) is int and block in places for block in value),
        "feature_blocks": lambda value: all(type(block) is int and block in places for block in value),
        "bounds": lambda value: len(value) == layers,
        "thresholds": lambda value: len(value) == layers,
    }
    for name, kind in KINDS.items():
        if name in header and (
            not isinstance(header[name], kind)
            or (isinstance(header[name], bool) and kind is int)
            or not checks.get(name, lambda _: True)(header[name])
        ):
            return f"its header is damaged ({name}: {header[name]})"
    images, stages, (rows, columns) = len(arrays["ids"]), len(header["blocks"]), header["grid"]
    features = header.get("feature_images", images)
    expected: dict[str, tuple[int, ...]] = {
        "source": (images, stages, header["num_prefix"] + rows * columns),
        "kept": (images, stages, -(-rows * columns // 8)),
        "num_tokens": (images, layers),
        "cosine": (images, layers),
        "features": (features, len(header.get("feature_blocks", ()))),
        "head": (features,),
    }
    for name, array in arrays.items():
        shape = expected.get(name, (images,))
        kinds, dimensions = ARRAYS.get(name, ("biuf", array.ndim))
        if (array.dtype.kind not in kinds) or (name == "kept" and array.dtype != np.uint8) or array.ndim != dimensions:
            return f"{name} is of {array.dtype} and {array.ndim} dimensions"
        # Only the first axes are known; the others depend on the model.
        if array.shape[: len(shape)] != shape:
            return f"{name} has shape {array.shape}, expected {', '.join(map(str, shape))} ..."
    return unfinished(arrays)


def unfinished(arrays: Mapping[str, NDArray[Any]]) -> str | None:
    """A message about the first array with values that are not finite; None if there is none."""
    with np.errstate(over="ignore"):  # computations use float32
        wrong = (
            name
            for name, array in arrays.items()
            if array.dtype.kind == "f" and not np.isfinite(array.astype(np.float32, copy=False)).all()
        )
        name = next(wrong, None)
    return None if name is None else f"{name} has values that are not finite numbers"


def distinct(records: Sequence[Record]) -> list[Record]:
    """The records in order, without copies, such as the same dense model in several analyses."""
    found: list[Record] = []
    for record in records:
        if not any(record.shows_the_same_as(other) for other in found):
            found.append(record)
    return found


def titled(records: Sequence[Record]) -> list[Record]:
    """The records with a ``title`` each: the method, and those of model, data, split and report that differ.

    `VitrimError` for two records of one method, model and data.

    Example:
        >>> made = [Record({"method": "tome:r=8", "model": model}, {}) for model in ("deit_tiny", "deit_small")]
        >>> [record.name for record in titled(made)]
        ['tome:r=8 on deit_tiny', 'tome:r=8 on deit_small']
    """
    titles = [record.method for record in records]
    for key, word in (("model", "on"), ("data", "with"), ("split", ""), ("report", "in")):
        values = [str(record.header.get(key)) for record in records]
        if len(set(values)) > 1 and not (key in LAST and len(set(titles)) == len(titles)):
            stems = [Path(value).stem or value for value in values]  # stems of paths, if they are unique
            short = stems if len(set(stems)) == len(set(values)) else values
            titles = [f"{title} {word} {value}".replace("  ", " ") for title, value in zip(titles, short, strict=True)]
    twice = next((title for title in titles if titles.count(title) > 1), None)
    if twice is not None:
        raise VitrimError(f"there are two records of {twice}: give one of them")
    every = zip(records, titles, strict=True)
    return [replace(record, header={**record.header, "title": title}) for record, title in every]


def check_comparable(records: Sequence[Record]) -> None:
    """Refuse to compare records of different images or grids, or batch-dependent records of different batches."""
    first, *others = records
    for other in others:
        if not np.array_equal(first.arrays["ids"], other.arrays["ids"]):
            raise VitrimError(
                f"the record of {other.name} was made on {len(other)} other images than that of {first.name}, "
                f"{len(first)}"
            )
        for key in SAME:
            one, two = first.header.get(key), other.header.get(key)
            if one != two:
                raise VitrimError(
                    f"the record of {other.name} has {key} {two} and that of {first.name} has {one}: only records of "
                    "the same can be compared"
                )
    dependent = [record for record in records if record.header.get("batch_dependent")]
    for other in dependent[1:]:
        if not np.array_equal(other.arrays["batch"], dependent[0].arrays["batch"]):
            raise VitrimError(
                f"{other.name} and {dependent[0].name} decide by the whole batch, and were run in other batches: "
                "make the records again in the same ones"
            )
