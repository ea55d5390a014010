"""The study of a search: its measurements and their log on disk, from which a search can resume exactly.

A resumed search runs from the start and reads its measurements from the log, in order, until the log ends. So it
reaches the same candidates and continues as if uninterrupted. No line contains a time or anything else that differs
between runs.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from vitrim.checked import refusal
from vitrim.core.method import MethodConfig
from vitrim.errors import VitrimError, os_errors
from vitrim.files import check_file, whole_lines
from vitrim.measure.identity import first_difference
from vitrim.measure.records import Processes
from vitrim.tuning.proxy import ModelScorer, Part, Proxy, Scores

FORMAT = 1

Json = TypeVar("Json")

ROUNDS = (8, 2, 1)
"""Rounds of a race end after an eighth of the images, a half, and all."""


class Study:
    """The log of a search.

    Args:
        file: JSON lines; None to store nothing.
        settings: everything the search follows from; the first line, which must be equal to resume.
        resume: continue from the file.
        processes: this process and its peers. The first one reads and writes, and all know what it read.

    Raises:
        VitrimError: the file exists without ``resume``, cannot be read or written, or belongs to another search.
    """

    def __init__(
        self,
        file: Path | None,
        settings: Mapping[str, Any],
        *,
        resume: bool = False,
        processes: Processes | None = None,
    ) -> None:
        self.file = file
        self.processes = processes or Processes()
        refusal: VitrimError | None = None
        self._old: list[dict[str, Any]] = []
        self._head: list[dict[str, Any]] = []
        if self.processes.index == 0:
            try:
                self._old = self._opened(settings, resume=resume)
            except VitrimError as error:
                refusal = error
        first, refused = self.processes.gather((self._old, str(refusal) if refusal else None))[0]
        if refused is not None:
            raise refusal or VitrimError(refused)
        self._old = first
        self._next = min(len(self._old), 1)

    def _opened(self, settings: Mapping[str, Any], *, resume: bool) -> list[dict[str, Any]]:
        """The lines of the file; an empty file gets its first line."""
        head = json.loads(json.dumps({"study": FORMAT, **settings}))
        file = self.file
        if file is None:
            return []
        check_file(file)
        if file.exists() and not resume:
            raise VitrimError(f"{file} is there already: resume it, or name another place")
        old = _read(file) if file.exists() else []
        if old:
            other = first_difference(old[0], head)
            if other is not None:
                name, theirs, ours = other
                raise VitrimError(f"{file} is of another search: its {name} is {theirs}, and this one's {ours}")
        else:  # written with the first measurement: a search that is refused before leaves nothing
            self._head = [head]
        return old

    def scores(
        self, name: str, texts: Sequence[str], measure: Callable[[Sequence[int]], Sequence[Scores]]
    ) -> list[Scores]:
        """The scores of settings, from the log as far as it goes.

        Args:
            name: where they are scored.
            texts: the settings.
            measure: scores the settings at the given indices.

        Raises:
            VitrimError: the log has another entry here.
        """
        found: list[Scores] = []
        for text in texts:
            row = self._take({"scored": text, "on": name})
            if row is None:
                break
            values = {key: base64.b64decode(text) for key, text in row["scores"].items()}
            found.append({key: np.frombuffer(each, dtype="<f4") for key, each in values.items()})
        rest = range(len(found), len(texts))
        if rest:
            new = [{key: np.asarray(each, dtype="<f4") for key, each in one.items()} for one in measure(rest)]
            rows = []
            for place, one in zip(rest, new, strict=True):
                encoded = {key: base64.b64encode(each.tobytes()).decode() for key, each in one.items()}
                rows.append({"scored": texts[place], "on": name, "scores": encoded})
            self._append(rows)
            found += new
        return found

    def value(self, name: str, measure: Callable[[], Json], *, together: bool = False, kind: Any = Any) -> Json:
        """A JSON value that may differ between runs, measured once and stored.

        Args:
            name: key of the value.
            together: all processes call ``measure``, which returns the same for all; otherwise the first one does.
            kind: type of the value, for pydantic.

        Raises:
            VitrimError: the log has another entry here, or a value of another type.

        Example:
            >>> Study(None, {}).value("milliseconds", lambda: 12.5)
            12.5
        """
        row = self._take({"measured": name})
        if row is None:
            mine = measure() if together or self.processes.index == 0 else None
            found = mine if together else self.processes.gather(mine)[0]
            row = json.loads(json.dumps({"measured": name, "value": found}))
            _check(kind, row["value"])  # write only what can be read again
            self._append([row])
        else:
            try:
                _check(kind, row["value"])
            except ValueError as error:
                raise VitrimError(f"{self.file}, line {self._next}, is damaged: {error}") from None
        value: Json = row["value"]
        return value

    def ended(self, over: Callable[[], bool]) -> bool:
        """True if the search ends here: as recorded in the log or, after its end, if ``over()`` of the first process.

        Example:
            >>> Study(None, {}).ended(lambda: True)
            True
        """
        row = {"ended": "its time is over"}
        if self._next < len(self._old):
            return self._old[self._next] == row and self._take(row) is not None
        found = bool(self.processes.gather(self.processes.index == 0 and over())[0])
        if found:
            self._append([row])
        return found

    def note(self, **entries: Any) -> None:
        """Write a line for human readers, unless the log has it."""
        row = json.loads(json.dumps(entries))
        if self._take(row) is None:
            self._append([row])

    def _take(self, expected: Mapping[str, Any]) -> dict[str, Any] | None:
        """The next line of the log, which must have these entries; None at its end."""
        if self._next >= len(self._old):
            return None
        row = self._old[self._next]
        if any(row.get(key) != value for key, value in expected.items()):
            raise VitrimError(f"{self.file}, line {self._next + 1}, is not what this search does here: start a new one")
        self._next += 1
        return row

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.file is None or self.processes.index > 0:
            return
        rows, self._head = [*self._head, *rows], []
        with os_errors(f"cannot write {self.file}"):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as log:
                log.writelines(json.dumps(row) + "\n" for row in rows)
                log.flush()
                os.fsync(log.fileno())


def _read(file: Path) -> list[dict[str, Any]]:
    """The lines of a study; an incomplete last line, left by an interruption, is removed from the file."""
    rows, size = whole_lines(file, _record)
    if not rows and file.stat().st_size:
        raise VitrimError(f"{file}, line 1, is damaged: it is not a study")
    if rows and rows[0].get("study") != FORMAT:
        raise VitrimError(f"{file} is not a study of this version of vitrim")
    if size < file.stat().st_size:
        with os_errors(f"cannot write {file}"):
            os.truncate(file, size)
    return rows


def _record(line: bytes) -> dict[str, Any]:
    """The content of a line. Measurements are checked here; notes are compared when a search reaches them."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("expected an object")
    kind = next((kind for name, kind in _KINDS.items() if name in row), None)
    if kind is not None:
        _check(kind, row)
    return row


def _check(kind: Any, value: Any) -> None:
    """Raise a one-line `ValueError` for a value of another type."""
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise refusal("a value", error, kind) from None


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Scored(_Line):
    scored: str
    on: Annotated[str, Field(pattern=r"^[a-z]+ [0-9]{1,18}-[0-9]{1,18}$")]
    scores: Annotated[dict[Proxy, str], Field(min_length=1)]

    @model_validator(mode="after")
    def _of_all_images(self) -> _Scored:
        start, stop = map(int, self.on.partition(" ")[2].split("-"))
        for name, text in self.scores.items():
            if len(base64.b64decode(text, validate=True)) != 4 * (stop - start):
                raise ValueError(f"{name} is not one number for each of {stop - start} images")
        return self


class _Value(_Line):
    measured: str
    value: Any


class _Ended(_Line):
    ended: Literal["its time is over"]


_KINDS: dict[str, type[_Line]] = {"scored": _Scored, "measured": _Value, "ended": _Ended}
"""The lines that a search reads, by their distinguishing entry."""


# ---- scores ----------------------------------------------------------------------------------------------------------


class Evaluator:
    """Scores of settings on pieces of the images, from the study or by running the models, each once per search.

    ``proxy`` is the score to minimise.
    """

    def __init__(self, scorer: ModelScorer, study: Study, proxy: str = "feature") -> None:
        self.scorer, self.study, self.proxy = scorer, study, proxy
        self._known: dict[tuple[str, str], Scores] = {}

    def images(self, part: Part) -> int:
        return self.scorer.images(part)

    def rounds(self) -> list[int]:
        """The numbers of search images after which candidates are compared: about an eighth, a half, all."""
        count, size = self.scorer.images("search"), self.scorer.batch_size
        pieces = (-(-count // (share * size)) * size for share in ROUNDS)
        least = -(-2 // size) * size  # estimating noise needs at least two images
        return sorted({min(max(piece, least), count) for piece in pieces})

    def piece(self, configs: Sequence[MethodConfig], part: Part, start: int, stop: int) -> list[Scores]:
        """Scores of all proxies on images ``start`` to ``stop`` of a part.

        Raises:
            VitrimError: the model does not have the proxy.
        """
        where, texts = f"{part} {start}-{stop}", [config.describe() for config in configs]
        new = [place for place, text in enumerate(texts) if (where, text) not in self._known]

        def measure(places: Sequence[int]) -> Sequence[Scores]:
            return self.scorer([configs[new[place]] for place in places], part, start, stop)

        for place, scores in zip(new, self.study.scores(where, [texts[one] for one in new], measure), strict=True):
            if self.proxy not in scores:
                raise VitrimError(
                    f"{texts[place]}: this model has no {self.proxy} per image; it has: {', '.join(scores)}"
                )
            self._known[where, texts[place]] = scores
        return [self._known[where, text] for text in texts]

    def whole(self, configs: Sequence[MethodConfig], part: Part) -> list[Scores]:
        """Scores of all proxies on all images of a part."""
        return self.piece(configs, part, 0, self.images(part))

    def mean(self, scores: Scores) -> float:
        return float(scores[self.proxy].mean(dtype=np.float64))


def means(scores: Scores) -> dict[str, float]:
    """The mean of every proxy, by name.

    Example:
        >>> means({"kl": np.array([1.0, 3.0], dtype=np.float32)})
        {'kl': 2.0}
    """
    return {name: float(values.mean(dtype=np.float64)) for name, values in sorted(scores.items())}


def joined(before: Scores, new: Scores) -> Scores:
    """Concatenate the scores of two adjacent pieces."""
    return {name: np.concatenate([before[name], new[name]]) if before else new[name] for name in new}
