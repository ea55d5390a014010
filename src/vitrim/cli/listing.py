"""``vitrim list``: the available methods, host families, timm models and recipes."""

from __future__ import annotations

import csv
import re
import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import typer

from vitrim.cli.output import Output
from vitrim.errors import VitrimError, check_known, nearest
from vitrim.progress import progress
from vitrim.report import Table

if TYPE_CHECKING:
    from vitrim.core.host import Host
    from vitrim.core.plan import Head

ListedRows = Sequence[dict[str, Any]]

YES, SUBSTITUTE, REFUSED = "work", "work with score=column_mean", "refused"
HEADS: dict[Head, str] = {
    "class token": "the head reads the class token (and other tokens in front of the patches) only",
    "patches": "the head reads the patches too (mean, attention pool), or the model hands out its tokens",
    "no class token": "as patches, and there is no class token",
    "grid": "a dense head (segmentation, detection) reads every patch at its place",
}

RECOMMENDED = {
    **dict.fromkeys(("tome", "atm", "topk"), "untrained"),
    **dict.fromkeys(("evit", "mctf", "cropr"), "trained"),
}
"""Methods to start with (docs/choosing.md)."""


def list_(
    *,
    kind: Annotated[
        str | None, typer.Argument(metavar="[methods|selectors|models|hosts|recipes|presets]", help="what to list")
    ] = None,
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="only those whose name or model contains this, e.g. deit")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="hosts: also every module of timm, and why models of it are refused")
    ] = False,
    output: Output,
) -> None:
    """List methods, selectors, models, their families, or recipes."""
    if kind is None:
        meanings = {name: one.meaning for name, one in LISTS.items()}
        output.print(*(f"vitrim list {name:<9}  {meaning}" for name, meaning in meanings.items()))
        output.write("list", lists=meanings)
        return
    check_known("list", kind, LISTS)
    if every and kind != "hosts":
        raise VitrimError(f"--all is for `vitrim list hosts`, not for {kind}")
    listed = LISTS[kind]
    with progress(f"collecting the list of {kind}"):
        known = listed.collect()
        of_timm = modules() if every else []
    wanted = (text or "").lower()  # in the name of an entry, or of its model
    rows, refused = (
        # Lists without a model (hosts, methods) are searched by name alone.
        [row for row in group if any(wanted in row[key].lower() for key in ("name", "model") if key in row)]
        for group in (known, of_timm)
    )
    if not rows and not refused:
        near = nearest(text or "", [row["name"] for row in (*known, *of_timm)])
        hint = "" if near is None else f" did you mean '{near}'?"
        see = f"`vitrim list {kind}` prints all {len(known)}"
        raise VitrimError(f"no name in the list of {kind} contains '{text or ''}';{hint} {see}")
    out = output.console()
    for group, each in groupby(rows, key=lambda row: row.get("purpose", "")):
        members = list(each)
        headed = f"{listed.title}\n{group}" if group and members[0] is rows[0] else group or listed.title
        out.print(_table(headed, listed.columns, by_group(members) if kind == "recipes" else members))
    if refused:
        out.print(_table("Modules of timm's models", MODULES, refused))
    for line in listed.footnotes(rows):
        output.print(textwrap.fill(line, out.width, subsequent_indent="    ", break_long_words=False))
    from vitrim.engines.machine import environment

    record = {"rows": rows, **({"modules": refused} if every else {})}
    output.write("list", kind=kind, environment=environment(), **record)


def methods() -> list[dict[str, Any]]:
    from vitrim.core import registry

    return [
        {
            "name": name,
            "kind": config.kind,
            "training_free": config.traits.training_free,
            "adaptive": config().is_adaptive(),
            "batch_dependent": config.traits.batch_dependent,
            "needs_class_token": config().needs().class_token,
            "needs_attention_map": config().needs().attention_map,
            "paper": config.paper,
            "does": does(config),
            "recommended": RECOMMENDED.get(name, ""),
        }
        for name, config in registry.methods().items()
    ]


def does(config: type) -> str:
    """The first sentence of a config's docstring: what the method does."""
    first = " ".join((config.__doc__ or "").strip().split("\n\n")[0].split()).replace("`", "")
    return first.rstrip(".")


PLACES = {"image": "on the image", "before": "in front of the connector", "behind": "behind the connector"}


def selectors() -> list[dict[str, Any]]:
    from vitrim.core import registry

    return [
        {
            "name": name,
            "acts": PLACES[selector.place],
            "needs_attention": selector().needs().attention != "none",
            "needs_class_token": selector().needs().class_token,
            "reads_text": selector().needs().text,
            "merges": selector.merges,
            "own_number": selector.default_keep is None,
            "published_with": selector.published_with,
            "paper": selector.paper,
        }
        for name, selector in registry.selectors().items()
    ]


def titles(rows: ListedRows) -> list[str]:
    """Footnotes: each method in a sentence, and its paper; too wide for columns."""
    first = "start with: the methods to try first, untrained or with training under the method (docs/choosing.md)"
    return [first] + [f"{row['name']}: {row['does']}" + (f" ({row['paper']})" if row["paper"] else "") for row in rows]


def papers(rows: ListedRows) -> list[str]:
    return [f"{row['name']}: {row['paper']}" for row in rows if row["paper"]]


def hosts() -> list[dict[str, Any]]:
    """Host families of the installed libraries by purpose, with their heads and the `fit` of each method."""
    from vitrim.core import plan, registry

    purposes = get_args(plan.Purpose)
    classes: dict[type[Host], list[str]] = {}
    for key, host in registry.hosts().items():
        classes.setdefault(host, []).append(key)
    return [
        {
            "name": host.name,
            "purpose": host.purpose,
            "classes": ", ".join(name.rpartition(".")[2] for name in names),
            "model_classes": names,
            "heads": list(host.heads),
            "in_cells": host.in_cells,
            "methods": {method: {head: fit(method, head) for head in host.heads} for method in registry.methods()},
        }
        for host, names in sorted(classes.items(), key=lambda entry: (purposes.index(entry[0].purpose), entry[0].name))
    ]


def fit(method: str, head: Head) -> str:
    """The support of a default method for a head: ``work``, with an option, or the reason for refusal."""
    from vitrim.core.checks import misfit
    from vitrim.core.registry import make_method

    config = make_method(method)
    if misfit(config, head) is None:
        return YES
    if "score" in type(config).model_fields:
        config = make_method(method, score="column_mean")
        if misfit(config, head) is None:
            return SUBSTITUTE
    return f"{REFUSED}, since it {str(misfit(config, head)).partition(';')[0]}"


def heads(rows: ListedRows) -> list[str]:
    """Footnotes: for each kind of head, the methods that work, need an option, or are refused."""
    from vitrim.core.registry import vision_languages
    from vitrim.core.tables import missing_libraries, not_yet, number_of_families

    lines = []
    for head, meaning in HEADS.items():
        methods = next((row["methods"] for row in rows if head in row["heads"]), None)
        if methods is None:
            continue
        lines.append(f"{head}: {meaning}")
        # Methods with the same answer share a line: those that work first, refusals last.
        fits = {method: found[head] for method, found in methods.items()}
        for how in sorted(set(fits.values()), key=lambda one: (one != YES, one.startswith(REFUSED), one)):
            names = [method for method, found in fits.items() if found == how]
            which = f"all {len(names)} methods" if len(names) == len(fits) else ", ".join(names)
            lines.append(f"  {how}: {which}")
    cells = [row["name"] for row in rows if row["in_cells"]]
    if cells:
        lines.append(f"squares of patches are reduced as wholes (docs/hosts.md, cells): {', '.join(cells)}")
    if any(row["purpose"] == "vision-language models" for row in rows):
        # families with and without support for fewer image tokens
        families = sorted(set(vision_languages().values()), key=lambda family: family.name)
        groups = {
            "image tokens one by one": [one for one in families if not one.in_cells and not one.refused],
            "squares of patches as wholes": [one for one in families if one.in_cells and not one.refused],
            "refused": [one for one in families if one.refused],
        }
        lines.append("compact=True, whole models with fewer image tokens for the language model:")
        lines += [f"  {what}: {'; '.join(one.name for one in group)}" for what, group in groups.items() if group]
    missing = missing_libraries()
    if missing:
        all_of_them = f"{number_of_families()} families in all"
        lines.append(f"{all_of_them}; not installed, so their families are not listed: {', '.join(missing)}")
    newer: dict[str, list[str]] = {}
    for key, version in not_yet().items():
        newer.setdefault(version, []).append(key.rpartition(".")[2].removeprefix("modeling_").replace("_", " ").lower())
    lines += [f"not listed, needs {version}: {', '.join(sorted(names))}" for version, names in newer.items()]
    return lines


MODULES = {"name": "module", "models": "models", "answer": "supported by, or why not and what to use instead"}


def modules() -> list[dict[str, Any]]:
    """All modules of timm's models with their number of models, and their host families or the reason for refusal."""
    import timm

    from vitrim.core.registry import refused_module
    from vitrim.loading import model_modules

    found = []
    for place, families in model_modules().items():
        package, _, short = place.rpartition(".")
        if package == "timm.models":
            reason = "" if families else refused_module(place)
            answer = ", ".join(families) if families else f"refused: {reason}"
            count = str(len(timm.list_models(module=short)))
            found.append(
                {"name": short, "models": count, "families": list(families), "reason": reason, "answer": answer}
            )
    return found


def models() -> list[dict[str, Any]]:
    from vitrim.loading import supported_models
    from vitrim.models.references import references

    rows = [{"name": f"vitrim:{name}", "module": "trained, comes with vitrim"} for name in references()]
    rows += [{"name": name, "module": module} for name, module in supported_models().items()]
    return sorted(rows, key=lambda row: row["name"])


def presets() -> list[dict[str, Any]]:
    """Settings from papers for specific models, with the numbers printed there."""
    from vitrim import methods

    text = (Path(methods.__file__).parent / "presets.csv").read_text(encoding="utf-8")
    return [{"name": row.pop("method"), **row} for row in csv.DictReader(text.splitlines())]


def recipes() -> list[dict[str, Any]]:
    from vitrim.training.recipe import load_recipe
    from vitrim.training.recipe import recipes as files

    return [
        {
            "name": name,
            "model": recipe.model,
            "method": recipe.method,
            "epochs": f"{recipe.epochs:g}{' updates' if recipe.unit == 'updates' else ''}",
            "batch_size": str(recipe.batch_size),
            "paper": recipe.paper,
        }
        for name in files()
        for recipe in [load_recipe(name).recipe]
    ]


def by_group(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Recipes of a study that differ only in their keep rate as one row, with "..." for differing values."""
    from vitrim.training.study import grouped

    by_name = {row["name"]: row for row in rows}
    return [
        {key: name if key == "name" else _shared([by_name[each][key] for each in group]) for key in rows[0]}
        for name, group in grouped(by_name).items()
    ]


def _shared(texts: Sequence[str]) -> str:
    """The common form of several texts, by their parts between commas: ats:keep_rate=...,points=8.

    Example:
        >>> _shared(["ats:keep_rate=0.25,points=8", "ats:keep_rate=0.5,points=8"])
        'ats:keep_rate=...,points=8'
    """
    parts = zip_longest(*(text.split(",") for text in texts), fillvalue=" ...")
    # An option keeps its name and loses the value that differs.
    return ",".join(part[0] if len(set(part)) == 1 else re.sub("(= ?).*", r"\1...", part[0]) for part in parts)


# ---- the lists -------------------------------------------------------------------------------------------------------


class Listing(NamedTuple):
    """One list: what it is, its table by keys of a row and headings, and the lines below it, of the rows shown."""

    meaning: str
    title: str
    columns: dict[str, str]
    collect: Callable[[], ListedRows]
    footnotes: Callable[[ListedRows], list[str]] = lambda rows: []


LISTS = {
    "methods": Listing(
        "the methods: what each does, what it needs, which to start with",
        "Methods (write them as name:key=value,key=value)",
        {
            "name": "name",
            "recommended": "start with",
            "kind": "kind",
            "training_free": "training free",
            "adaptive": "adaptive",
            "batch_dependent": "batch dependent",
            "needs_class_token": "needs class token",
            "needs_attention_map": "needs attention map",
        },
        methods,
        titles,
    ),
    "selectors": Listing(
        "the selectors of image tokens for vision-language models",
        "Selectors of image tokens (write them as name:key=value,key=value)",
        {
            "name": "name",
            "acts": "acts",
            "needs_attention": "needs attention of the tower",
            "needs_class_token": "needs class token",
            "reads_text": "reads text",
            "merges": "merges",
            "own_number": "finds its number",
        },
        selectors,
        papers,
    ),
    "models": Listing(
        "the models of timm and vitrim that can be reduced, by name",
        "Models of timm, by the module they are in, and those that come with vitrim; a few variants (differential or "
        "gated attention) are refused when they are reduced",
        {"name": "name", "module": "timm module"},
        models,
    ),
    "hosts": Listing(
        "families of models of all libraries, and the methods that work on each",
        "Host families; heads: what the heads of their models read, which decides the methods that work (below)",
        {"name": "family", "heads": "heads", "classes": "model classes (and their subclasses)"},
        hosts,
        heads,
    ),
    "recipes": Listing(
        "the recipes of `vitrim train`",
        "Recipes (vitrim train NAME --show prints all values; NAME@{25,50}: NAME@25 and NAME@50, by keep rate)",
        {
            "name": "name",
            "model": "model",
            "method": "method",
            "epochs": "epochs",
            "batch_size": "batch",
            "paper": "paper",
        },
        recipes,
    ),
    "presets": Listing(
        "settings of methods that papers give for single models, as text to paste behind -m",
        "Settings that papers give for a model (paste one behind -m), with what they print beside it",
        {"name": "method", "model": "model", "gflops": "GMACs", "top1": "top-1 %", "source": "source"},
        presets,
        lambda rows: ["the papers' GFLOPs are multiply-accumulates"],
    ),
}


def _table(title: str, columns: dict[str, str], rows: ListedRows) -> Table:
    def text(value: str | bool | list[str]) -> str:
        if isinstance(value, bool):
            return "yes" if value else "-"
        return (value or "-") if isinstance(value, str) else ", ".join(value)

    cells = [tuple(text(row[key]) for key in columns) for row in rows]
    return Table("", title, tuple(columns.values()), cells, text_columns=len(columns))
