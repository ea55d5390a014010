"""Recipes: everything about a training run but the data, as one validated, frozen record, read from YAML.

    recipe = load_recipe("evit_deit_small", ["epochs=5", "optimizer.lr=1e-4", "method=evit:keep_rate=0.5"])

The recipes of the papers are the files in ``recipes/``, one per published table, and the rows of its ``study.csv``
(`vitrim.training.study`). A recipe may say ``base: NAME`` and give only what differs. `Resolved.origin` tells for each
value where it is from.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from vitrim.errors import VitrimError, unknown
from vitrim.tasks.options import Loss, Mix, invalid
from vitrim.training import study
from vitrim.training.schema import Augment, Ramp, Recipe
from vitrim.training.values import flat, line, merge, nested, parsed, short

__all__ = ["Augment", "Loss", "Mix", "Ramp", "Recipe", "Resolved", "load_recipe", "recipe_text", "recipes", "resolve"]

FOLDER = Path(__file__).with_name("recipes")
DEFAULT = "default"
COMMAND_LINE = "command line"
MAX_NAME = 200
"""Longest name in characters: file systems refuse longer ones."""


@dataclass(frozen=True)
class Resolved:
    """A recipe, its name, and the source of each of its values.

    Attributes:
        name: of the file.
        recipe: the values.
        origin: by dotted name, e.g. ``optimizer.lr``: "default", the name of a recipe, or "command line".
    """

    name: str
    recipe: Recipe
    origin: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Every value by its dotted name, with its source.

        Example:
            >>> next(iter(resolve({"model": "test_vit", "epochs": 1}).rows()))
            ('paper', '', 'default')
        """
        for name, value in flat(self.recipe.model_dump(mode="json")):
            yield name, value, self.origin.get(name, DEFAULT)


def recipes() -> dict[str, Path]:
    """The recipes that come with the package by name, and the file that each is in.

    Example:
        >>> found = recipes()
        >>> found["cifar10_vit"].name, found["study/coco"].name, found["study/coco/topk@25"].name
        ('cifar10_vit.yaml', 'coco.yaml', 'study.csv')
    """
    return dict(_recipes())


@cache
def _recipes() -> Mapping[str, Path]:
    """`recipes`, read once: every recipe looks there for its base."""
    files = {_name(path): path for path in FOLDER.rglob("*.yaml")}
    return dict(sorted((files | dict.fromkeys(study.names(), study.TABLE)).items()))


def load_recipe(name: str | Path, changes: Sequence[str] = ()) -> Resolved:
    """Read a recipe by its name or file, and change some of its values.

    Args:
        name: one of `recipes`, e.g. ``evit_deit_small`` or ``study/imagenet/topk@25``, or the path of a YAML file.
        changes: ``key=value`` with dotted keys; values are read as YAML. Of a key that is given twice the last counts.

    Returns:
        The validated recipe with the origin of each value.

    Raises:
        VitrimError: no such recipe, YAML that cannot be read, an unknown key, or a value out of its range; one line.

    Example:
        >>> load_recipe("cifar10_vit", ["epochs=2", "optimizer.lr=1e-4"]).recipe.optimizer.lr
        0.0001
    """
    own_name, path = _find(name)
    layers = [*_chain(own_name, path, ()), (COMMAND_LINE, nested(changes))]
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, given in layers:
        merge(values, given)
        origin |= dict.fromkeys(dict(flat(given)), source)
    return resolve(values, name=own_name, origin=origin)


def resolve(values: Mapping[str, Any], *, name: str = "recipe", origin: Mapping[str, str] | None = None) -> Resolved:
    """Validate the values of a recipe.

    Raises:
        VitrimError: a key or a value that is not valid; one line that names it.
    """
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise invalid(name, error, Recipe) from None
    return Resolved(name, recipe, dict(origin or {}))


def recipe_text(recipe: Recipe) -> str:
    """All values of a recipe as YAML, which `load_recipe` reads back."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def _find(name: str | Path) -> tuple[str, Path]:
    """Find a recipe's name (for a file, without folder and suffix) and the file that it is in."""
    if Path(name).suffix in (".yaml", ".yml"):
        try:
            there = Path(name).is_file()
        except OSError as error:  # a name that is too long
            raise VitrimError(f"no recipe file {short(str(name))}: {error.strerror}") from None
        if not there:
            raise VitrimError(f"no recipe file {short(str(name))}")
        return Path(name).stem, Path(name)
    return str(name), _shipped(str(name))


def _shipped(name: str) -> Path:
    """The file of a recipe of the package."""
    known = _recipes()
    if name in known:
        return known[name]
    better = study.hint(name)
    if better is not None:
        raise VitrimError(better)
    hint = str(unknown("recipe", short(name), known)).partition(" valid:")[0]
    raise VitrimError(f"{hint} valid: a YAML file, or a name that `vitrim train --list` prints")


def _chain(name: str, path: Path, seen: tuple[Path, ...]) -> list[tuple[str, dict[str, Any]]]:
    """A recipe's own values after those of its base, with the name of the recipe they are from."""
    if path in seen:
        raise VitrimError(f"{path.name} is its own base: {' -> '.join(p.stem for p in (*seen, path))}")
    given = study.study(name) if path == study.TABLE else _given(path)
    base = given.pop("base", None)
    below = [] if base is None else _chain(*_base(path, base), (*seen, path))
    return [*below, (name, given)]


def _given(path: Path) -> dict[str, Any]:
    """The keys and values of a file."""
    try:
        given = copy.deepcopy(parsed(path.read_text(encoding="utf-8")))  # sections are merged in place
    except (yaml.YAMLError, ValueError, OSError) as error:  # also a date that does not exist
        raise VitrimError(f"cannot read {path}: {line(str(error))}") from None
    if not isinstance(given, dict):
        raise VitrimError(f"{path} is not a recipe: expected keys and values")
    return given


def _base(path: Path, base: Any) -> tuple[str, Path]:
    """The base of a recipe by name, and its file: one next to the recipe's own, or one of the package's."""
    known = _recipes()
    if not isinstance(base, str) or not base or (base != Path(base).name and base not in known):
        wanted = "the name of a recipe: a file beside this one, without .yaml, or one of the package"
        raise VitrimError(f"{path}: base is {wanted}, not {short(base)}")
    if len(base) > MAX_NAME:
        raise VitrimError(f"{path}: base is a name of at most {MAX_NAME} characters, not {short(base)}")
    near = path.parent / f"{base}.yaml"
    if near == path and base in known:  # a user's file may be called like the recipe that it changes
        return base, known[base]
    return (_name(near), near) if near.is_file() else (base, _shipped(base))


def _name(path: Path) -> str:
    """The name of the recipe in a YAML file."""
    return path.relative_to(FOLDER).with_suffix("").as_posix() if path.is_relative_to(FOLDER) else path.stem
