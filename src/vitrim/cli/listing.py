"""``vitrim list``: the methods, host families and timm models there are."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common
from vitrim.errors import VitrimError, unknown

if TYPE_CHECKING:
    from types import ModuleType

TIMM_MODELS = "timm.models"

Kind = Annotated[str, typer.Argument(help="methods, hosts or models")]
Text = Annotated[str | None, typer.Argument(metavar="TEXT", help="only names that contain this, e.g. deit")]


def list_(kind: Kind, text: Text = None, json: common.Json = None) -> None:
    """List methods, host families, or timm models that can be reduced."""
    if kind not in TABLES:
        raise unknown("list", kind, TABLES)
    title, columns, collect = TABLES[kind]
    every = collect()
    rows = [row for row in every if text is None or text in row["name"]]
    if not rows:
        raise VitrimError(_no_match(kind, text or "", [row["name"] for row in every]))
    cells = [[_cell(row[key]) for key in columns] for row in rows]
    out = common.console(json)
    common.print_table(out, title, list(columns.values()), cells)
    for row in rows:
        if row.get("paper"):  # a column of titles would leave no room for the others
            out.print(f"{row['name']}: {row['paper']}", markup=False, highlight=False)
    common.write_json(json, {"command": "list", "kind": kind, "environment": common.environment(), "rows": rows})


def methods() -> list[dict[str, Any]]:
    """Every method, as its config class describes it."""
    from vitrim import registry

    return [
        {
            "name": name,
            "kind": config.kind,
            "training_free": config.training_free,
            "adaptive": config.adaptive,
            "batch_dependent": config.batch_dependent,
            "needs_class_token": config.needs_class_token,
            "needs_attention_map": config.needs_attention_map,
            "paper": config.paper,
        }
        for name, config in registry.methods().items()
    ]


def hosts() -> list[dict[str, Any]]:
    """Every model class that has a host family; its subclasses belong to the same."""
    from vitrim import registry

    return [{"name": host.name, "model_class": key} for key, host in registry.backbones().items()]


def models() -> list[dict[str, Any]]:
    """The names of timm models of a supported class, told by the module they are written in: none is built."""
    import importlib

    import timm

    rows = []
    for short in timm.list_modules():
        module = importlib.import_module(f"{TIMM_MODELS}.{short}")
        if _has_host_class(module):
            rows += [{"name": name, "module": short} for name in timm.list_models(module=short)]
    return sorted(rows, key=lambda row: row["name"])


def _has_host_class(module: ModuleType) -> bool:
    """Whether a module of timm defines or imports a model class that has a host family."""
    from vitrim import registry

    hosts = registry.backbones()
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return any(f"{base.__module__}.{base.__qualname__}" in hosts for cls in classes for base in cls.__mro__)


Collect = Callable[[], list[dict[str, Any]]]

TABLES: dict[str, tuple[str, dict[str, str], Collect]] = {
    "methods": (
        "Methods (write them as name:key=value,key=value)",
        {
            "name": "name",
            "kind": "kind",
            "training_free": "training free",
            "adaptive": "adaptive",
            "batch_dependent": "batch dependent",
            "needs_class_token": "needs class token",
            "needs_attention_map": "needs attention map",
        },
        methods,
    ),
    "hosts": ("Host families", {"name": "family", "model_class": "model class (and its subclasses)"}, hosts),
    "models": (
        "timm models, by the module they are in; a few variants with other blocks (parallel, post-norm, differential "
        "attention) are refused when they are reduced",
        {"name": "name", "module": "timm module"},
        models,
    ),
}


def _cell(value: str | bool) -> str:
    from rich.markup import escape

    return ("yes" if value else "-") if isinstance(value, bool) else escape(value)


def _no_match(kind: str, text: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
    hint = f" did you mean '{near[0]}'?" if near else ""
    return f"no name in the list of {kind} contains '{text}';{hint} `vitrim list {kind}` prints all {len(names)}"
