"""Splits by their spellings, and paths with helpful errors."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from vitrim.errors import DataError, os_errors

HUB_PREFIX = "hfds/"  # timm's spelling

_SPLIT_SPELLINGS = {"train": ("train",), "validation": ("validation", "valid", "val"), "test": ("test",)}


def spellings(split: str) -> tuple[str, ...]:
    """The accepted spellings of a split; only itself if it is not a known one."""
    return next((words for words in _SPLIT_SPELLINGS.values() if split.lower() in words), (split.lower(),))


def _has_word(name: str, words: tuple[str, ...]) -> bool:
    # whole words only: "test" must not select "latest-train"
    return any(re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", name.lower()) for word in words)


def choose_files(files: list[Path], split: str | None, source: str) -> tuple[list[Path], str | None]:
    """The files of one split, and its name (None if no file names one).

    Without a split, a single file is read whole, whatever words are in its name.
    """
    # A name may have several words: files of the split that was asked for count, whatever else they say.
    chosen = [] if split is None else [file for file in files if _has_word(file.stem, spellings(split))]
    if chosen:
        return chosen, split
    present = splits_in_names(files)
    if split is None and (not present or len(files) == 1):
        return files, present[0] if len(present) == 1 else None
    if not present:
        names = listed(file.name for file in files)
        raise DataError(f"no split {split!r} in {source}: its file names ({names}) name none; leave split out")
    others = [file.stem for file in files if not splits_in_names([file])]
    return files, pick_split(split, present + others, source)


def splits_in_names(files: list[Path]) -> list[str]:
    """The splits named by words in file names."""
    return [name for name, words in _SPLIT_SPELLINGS.items() if any(_has_word(file.stem, words) for file in files)]


def train_files(files: list[Path]) -> list[Path]:
    """The files that define the classes: those of the train split, or all without one."""
    return [file for file in files if _has_word(file.stem, spellings("train"))] or files


def pick_split(asked: str | None, present: list[str], source: str, expected: str = "splits") -> str:
    """The split ``asked`` for, in any spelling, or the only one ``present``; ``expected`` says where they would be."""
    if not present:
        raise DataError(f"{source} has no {expected}")
    if asked is None and len(present) == 1:
        return present[0]
    valid = ", ".join(present[:10]) + (", ..." if len(present) > 10 else "")
    if asked is None:
        raise DataError(f"several splits in {source}: {valid}; name one as the split")
    for spelling in (asked, *spellings(asked)):
        if spelling in present:
            return spelling
    raise DataError(f"unknown split {asked!r} in {source}; valid: {valid}")


def check_given(source: str | Path, **names: str | None) -> None:
    """Refuse empty names, such as unset shell variables, which would mean this folder; None is a default."""
    for argument, name in {"source": str(source), **names}.items():
        if name is not None and not name.strip():
            what = argument.replace("_", " ")
            raise DataError(f"the {what} of {source or 'the images'} has an empty name: name one, or leave it out")


def existing(source: str | Path) -> Path:
    """The path, with a leading ``~`` expanded; refused if missing, with a similar one that exists."""
    path = Path(os.path.expanduser(source))
    with os_errors(f"cannot read {path}", DataError):  # no permission, or the name is too long
        if path.exists():
            return path
        missing = path
        while not missing.parent.exists():
            missing = missing.parent
    if missing.is_symlink():
        why = f"{missing} is a link to {os.readlink(missing)}, which is not there"
    else:
        names = [entry.name for entry in visible(missing.parent)] if missing.parent.is_dir() else []
        close = difflib.get_close_matches(missing.name, names, n=1)
        hint = f"did you mean {missing.parent / close[0]}?" if close else f"valid: a path, or {HUB_PREFIX}owner/name"
        why = f"there is no {missing.name!r} in {missing.parent}; {hint}"
    raise DataError(f"{path} does not exist: {why}")


SYSTEM = frozenset({"__MACOSX", "@eaDir", "Thumbs.db", "ehthumbs.db", "desktop.ini"})
"""Files and folders without a leading dot that systems put beside others: of archives, thumbnails and settings."""


def is_hidden(name: str) -> bool:
    """True for a file or folder that its user does not see, such as copies that a notebook or a viewer keeps."""
    return name.startswith(".") or name in SYSTEM


def visible(folder: Path) -> list[Path]:
    """The files and folders directly in ``folder`` that are not hidden, sorted."""
    return sorted(entry for entry in folder.iterdir() if not is_hidden(entry.name))


def listed(names: Iterable[str]) -> str:
    """The first five names, for a message."""
    every = list(names)
    return ", ".join(every[:5]) + (", ..." if len(every) > 5 else "")


def check_files(files: Iterable[Path], source: str, what: str = "images") -> None:
    """Refuse an index that names missing files. Lists each folder once, instead of checking each file."""
    present: dict[Path, frozenset[str]] = {}
    missing: list[Path] = []
    count = 0
    for file in files:
        count += 1
        folder = file.parent
        if folder not in present:
            present[folder] = frozenset(os.listdir(folder)) if folder.is_dir() else frozenset()
        # One listing per folder: a million calls of `exists` on a network drive take minutes.
        if file.name not in present[folder]:
            missing.append(file)
    if missing:
        raise DataError(f"{len(missing)} of the {count} {what} of {source} are missing, the first is {missing[0]}")


def check_regular(file: Path, what: str) -> None:
    """Refuse a path that exists and is no file: reading a pipe or a device may never end."""
    if file.exists() and not file.is_file():
        raise DataError(f"cannot read {what}: it is no file but a folder, a pipe or a device")


def read_rows(file: Path, source: str, form: str, expected: str, first: int = 1) -> list[tuple[str, ...]]:
    """The groups of the pattern ``form`` in every line from ``first`` on; refuses a line of another form.

    An empty line between others is refused, too: files of lines count by their numbers.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "classes.txt").write_text("1 Gull\\n2 Black Tern\\n")
        ...     read_rows(Path(folder) / "classes.txt", "birds", r"(\\S+) (.+)", "a number and a name")
        [('1', 'Gull'), ('2', 'Black Tern')]
    """
    rows = []
    for number, line in enumerate(read_text(file, source).rstrip().splitlines()[first - 1 :], start=first):
        found = re.fullmatch(form, line.strip())
        if found is None:
            raise DataError(f"line {number} of {file} is {line!r}; expected {expected}")
        rows.append(found.groups())
    return rows


def read_pairs(file: Path, source: str, form: str, expected: str, first: int = 1) -> dict[str, str]:
    """The two groups of each line of `read_rows`, the second by the first, which stands in one line only."""
    pairs: dict[str, str] = {}
    for key, value in read_rows(file, source, form, expected, first):
        if key in pairs:
            raise DataError(f"{file} has {key} twice")
        pairs[key] = value
    return pairs


def read_text(file: Path, source: str) -> str:
    if not file.is_file():
        raise DataError(f"{source} has no {file.name}: expected it at {file}")
    try:
        with os_errors(f"cannot read {file}", DataError):
            return file.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {file}: not text in UTF-8 ({error.reason} at byte {error.start})") from error
