"""Write what pages take from the code: the options of methods, the table of hosts, the pages of the Python API.

    python docs/generate.py

A page of docs/methods also gets the rows of docs/results that are about its method, so that a number stands in one
place. The blocks in docs/methods and the table of docs/hosts.md are in git, so that they can be read there, and tests
compare them with the code. The pages of docs/api, docs/changelog.md and
docs/design/measures.md are not.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import vitrim
from vitrim.core.host import Host
from vitrim.core.method import MethodConfig
from vitrim.core.plan import Purpose
from vitrim.core.registry import hosts, methods, vision_languages
from vitrim.core.tables import missing_libraries
from vitrim.errors import VitrimError

DOCS = Path(__file__).parent
PACKAGE = Path(vitrim.__file__).parent
BEGIN, END = "<!-- from the code, by docs/generate.py -->", "<!-- end -->"
MEASURED = "<!-- from docs/results, by docs/generate.py -->"
RESULTS = ("cifar10", "photographs", "dense", "speed", "training")
"""Pages of docs/results with rows about methods, in the order in which a method's page has them."""
SHARED_PAGE = {"l1": "fixed_radial", "l2": "fixed_radial", "linf": "fixed_radial"}
"""Methods whose page has another name."""
KINDS = {
    "none": "removes nothing",
    "prune": "prunes",
    "merge": "merges",
    "mixed": "prunes and merges",
    "soft": "mixes all tokens into every new one",
}
ROOMS = (
    *("core", "methods", "hosts", "models", "data", "tasks", "measure", "plots", "training", "engines"),
    *("analysis", "tuning", "app"),
)
LOOSE = ("loading", "weights", "report", "errors")
"""Modules of no room."""


# ---- pages of methods ------------------------------------------------------------------------------------------------


def pages() -> dict[str, list[str]]:
    """The methods of every page in docs/methods."""
    found: dict[str, list[str]] = {}
    for name in methods():
        found.setdefault(SHARED_PAGE.get(name, name), []).append(name)
    return found


def method_block(name: str) -> str:
    """The properties of a method and the values that its options take, as Markdown."""
    config = methods()[name]
    rows = [f"| {key} | {value} |" for key, value in _properties(config)]
    own = {
        field: info
        for field, info in config.model_fields.items()
        if field not in MethodConfig.model_fields or info.default != MethodConfig.model_fields[field].default
    }
    schema = config.model_json_schema()["properties"]
    options = [
        f"| `{field}` | {_default(info.default)} | {_values(schema[field])} | "
        f"{'yes' if field in config.runtime else '-'} |"
        for field, info in own.items()
    ]
    lines = [f"`vitrim.{config.__name__}`", "", "| property | |", "|---|---|", *rows]
    if options:
        lines += ["", "| option | default | values | may change at run time |", "|---|---|---|---|", *options]
    return "\n".join(lines)


def _properties(config: type[MethodConfig]) -> Iterable[tuple[str, str]]:
    yield "what it does", KINDS[config.kind]
    yield "needs training", "no" if config.traits.training_free else "yes"
    yield "tokens left", "differ from image to image" if config().is_adaptive() else "the same for all images"
    depends = config.traits.batch_dependent
    yield "an image's result", "depends on its batch" if depends else "does not depend on its batch"
    yield "needs a class token", "with its defaults" if config().needs().class_token else "no"
    yield "needs the attention map", "with its defaults" if config().needs().attention_map else "no"
    yield "a search or a slider moves", "nothing" if config.tunable is None else f"`{config.tunable.option}`"
    listed = None if config.tunable is None else config.tunable.per_layer
    yield "a value for each block that acts", "no option" if listed is None else f"`{listed}`"


def _default(value: Any) -> str:
    return "-" if value is None else f"`{_text(value)}`"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(_text, value))}]" if isinstance(value, tuple) else f"{value}"


def _values(schema: dict[str, Any]) -> str:
    """The values a JSON schema allows, in words.

    Example:
        >>> _values({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]})
        'integer >= 0'
    """
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(_values(part) for part in schema["anyOf"] if part.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema["type"] == "array":
        items = schema.get("items") or schema["prefixItems"][0]
        return f"list: {_values(items)}"
    if schema["type"] == "boolean":
        return "`true`, `false`"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " ".join([schema["type"], ", ".join(limits)]).strip()


def page_with_block(page: str, names: Iterable[str]) -> str:
    """The text of a page with the blocks of its methods as the code has them now, at its end if it had none."""
    blocks = {method_block(name).partition("\n")[2]: "" for name in names}
    heads = ", ".join(f"`vitrim.{methods()[name].__name__}`" for name in names)
    alike = len(blocks) == 1  # relatives that differ in nothing but the name
    text = heads + "\n" + next(iter(blocks)) if alike else "\n\n".join(method_block(name) for name in names)
    if BEGIN not in page:
        page = f"{page.rstrip()}\n\n## In the code\n\n{BEGIN}\n{END}\n"
    return _filled(_filled(page, BEGIN, text), MEASURED, measured_block(names))


def _filled(page: str, begin: str, text: str) -> str:
    """The page with ``text`` between ``begin`` and the next end."""
    return re.sub(f"{re.escape(begin)}.*?{re.escape(END)}", lambda _: f"{begin}\n{text}\n{END}", page, flags=re.DOTALL)


# ---- what was measured of a method -----------------------------------------------------------------------------------

CUT = ("CIFAR-10", "every-training-free-method-without-retraining", "not trained, dense {top-1 %} %")
HALF = "{batch 1} / {batch 8} / {batch 32} times as fast at batch 1 / 8 / 32"
FEWER = "{fewer MACs %} % fewer"
TABLES = {
    "Accuracy on handwritten digits, without retraining": (
        ("digits", "accuracy-on-handwritten-digits-without-retraining", "not trained, dense {top-1 %} %"),
        *(FEWER, "top-1 {top-1 %}"),
    ),
    **{f"About {cut} % fewer MACs": (CUT, FEWER, "top-1 {top-1 %}") for cut in (20, 35, 50, 65)},
    "Fine-tuning": (
        ("CIFAR-10", "fine-tuning", "after two epochs of training, dense {after it} %"),
        *(FEWER, "top-1 {after it}"),
    ),
    **{
        f"{model}, about {cut} % fewer MACs": (
            (
                *("held-out photographs", "held-out-photographs-every-method-at-equal-macs"),
                model + ", not trained here, dense {top-1 %} %",
            ),
            *("{MACs saved %} % saved", "top-1 {change} ± {standard error}"),
        )
        for model in ("ViT-Ti", "DeiT-T")
        for cut in (20, 35, 50, 65)
    },
    "Segmentation of streets: CamVid": (
        ("CamVid", "segmentation-of-streets-camvid", "not trained, dense {mIoU}"),
        *("{MACs of dense} of dense", "{mIoU} mIoU"),
    ),
    "Training with pruning: Cropr": (
        ("CamVid", "training-with-pruning-cropr", "trained with it, dense {mIoU}"),
        *("{MACs of dense} of dense", "{mIoU} mIoU"),
    ),
    "Detection of blood cells: BCCD": (
        ("BCCD", "detection-of-blood-cells-bccd", "not trained unless noted, dense {box AP}"),
        *("{MACs of the trunk} of the dense trunk", "{box AP} box AP"),
    ),
    "Speed of every method at half the MACs": (
        ("speed", "speed-of-every-method-at-half-the-macs", "DeiT-S, float32, two threads (AMD)"),
        *("{MACs %} % of dense", HALF),
    ),
    "Training steps": (
        ("training steps", "training-steps", "DeiT-S, batch 32, float32, two threads (AMD)"),
        *("dense has {promised} times as many", "{speed-up} times as fast"),
    ),
}
"""The tables of docs/results by their headings: name, anchor and setting, the MACs of a row, its result."""


def measured_block(names: Iterable[str]) -> str:
    """The results of methods in docs/results, as one table."""
    names = list(names)
    called = [rf"`{name}(?!\w)" for name in names] + [rf"{methods()[name].__name__} \(`" for name in names]
    lines, before = [], ""
    for cell, setting, macs, result in _rows_about(re.compile("|".join(called))):
        lines.append(f"| {'' if cell == before else cell} | {setting} | {macs} | {result} |")
        before = cell
    return "\n".join(
        ["| measured | setting | MACs | result |", "|---|---|---|---|", *lines] if lines else ["Nothing yet."]
    )


def _rows_about(method: re.Pattern[str]) -> Iterable[tuple[str, str, str, str]]:
    """The rows of docs/results whose first cell names a method, without those of other weights (``*``)."""
    for page in RESULTS:
        yield from _rows_of(page, method)


def _rows_of(page: str, method: re.Pattern[str]) -> Iterable[tuple[str, str, str, str]]:
    section, heads, dense = "", list[str](), dict[str, str]()
    for line in (DOCS / "results" / f"{page}.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        if not line.startswith("|"):
            heads, dense = [], {}
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        heads = heads or cells
        row = dict(zip(heads, cells, strict=True))
        if cells[0].strip("`").startswith("dense"):
            dense = row
        elif section in TABLES and method.match(cells[0]) and not cells[0].endswith("*"):
            (name, anchor, setting), macs, result = TABLES[section]
            what = f"[{name}](../results/{page}.md#{anchor}), {setting.format_map(dense)}"
            short = {key: re.sub(r" \[.*", "", cell) for key, cell in row.items()}  # without quartiles
            yield what, cells[0], macs.format_map(row), result.format_map(short)


# ---- the table of hosts ---------------------------------------------------------------------------------------------


def hosts_block() -> str:
    """The host families, a table for each purpose, as Markdown.

    Raises:
        VitrimError: a library is missing: its families would be.
    """
    missing = missing_libraries()
    if missing:
        raise VitrimError(f"the table of hosts needs all libraries, and {', '.join(missing)} cannot be imported")
    classes: dict[type[Host], list[str]] = {}
    for key, host in hosts().items():
        classes.setdefault(host, []).append(key.rpartition(".")[2])
    lines = []
    for purpose in get_args(Purpose):
        lines += ["", f"**{purpose.capitalize()}**", "", "| family | model classes | what it is |", "|---|---|---|"]
        for host, names in sorted(classes.items(), key=lambda entry: entry[0].name):
            if host.purpose == purpose:
                shown = ", ".join(f"`{name}`" for name in names)
                lines.append(f"| {host.name} | {shown} | {' '.join((inspect.getdoc(host) or '').split())} |")
    return "\n".join([BEGIN, *lines[1:], *_vision_languages(), END])


def _vision_languages() -> list[str]:
    """The table of vision-language models whose language model can get fewer tokens, and of those refused."""
    classes: dict[type[Any], list[str]] = {}
    for key, family in vision_languages().items():
        classes.setdefault(family, []).append(key.rpartition(".")[2])
    lines = ["", "**Whole vision-language models, for `compact=True`**", ""]
    lines += ["| family | model classes | tokens are removed | connector |", "|---|---|---|---|"]
    for family, names in sorted(classes.items(), key=lambda entry: entry[0].name):
        shown = ", ".join(f"`{name}`" for name in names)
        goes = "-" if family.refused else "in cells" if family.in_cells else "one by one"
        lines.append(f"| {family.name} | {shown} | {goes} | {' '.join((inspect.getdoc(family) or '').split())} |")
    return lines


def hosts_page(page: str) -> str:
    """The text of docs/hosts.md with the table as the code has it now."""
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: hosts_block(), page, flags=re.DOTALL)


# ---- pages that are not in git ---------------------------------------------------------------------------------------


def modules(room: str) -> list[str]:
    """The modules of a room that have a docstring, by their dotted names."""
    found = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        if path.read_text(encoding="utf-8").lstrip().startswith('"""') and not path.name.startswith("__main"):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            found.append(".".join(part for part in parts if part != "__init__"))
    return found


def api_pages() -> dict[str, str]:
    """File name and text of every page of the Python API."""
    index = [
        "# Python API\n\nThe public names of `vitrim`. Config classes of methods, `vitrim.ToMe` and its like, are on"
        " [a page of their own](methods.md). Other modules:\n",
        ", ".join(f"[{room}]({room}.md)" for room in (*ROOMS, "more")) + ".\n",
    ]
    for name in vitrim.__all__:
        index.append(f"::: {getattr(vitrim, name).__module__}.{name}\n")
    found = {"index.md": "\n".join(index)}
    for room in ROOMS:
        found[f"{room}.md"] = "\n".join([f"# vitrim.{room}\n", *(f"::: {name}\n" for name in modules(room))])
    found["more.md"] = "\n".join(["# Other modules\n", *(f"::: vitrim.{name}\n" for name in LOOSE)])
    return found


def measures_page() -> str:
    """The page of what is counted on the code."""
    import count  # beside this file

    return (
        "# Measures of the design\n\nCounted on the code when this page was made, by `python docs/count.py`. A walk is "
        "the files whose functions\nPython enters while it does one thing.\n\n" + count.table(count.rows(PACKAGE))
    )


def write_untracked() -> None:
    """Write docs/api, docs/changelog.md and docs/design/measures.md."""
    (DOCS / "design" / "measures.md").write_text(measures_page(), encoding="utf-8")
    (DOCS / "api").mkdir(exist_ok=True)
    for name, text in api_pages().items():
        (DOCS / "api" / name).write_text(text, encoding="utf-8")
    log = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    (DOCS / "changelog.md").write_text(log, encoding="utf-8")


def write_methods() -> None:
    """Bring the blocks of docs/methods up to the code."""
    for page, names in pages().items():
        path = DOCS / "methods" / f"{page}.md"
        path.write_text(page_with_block(path.read_text(encoding="utf-8"), names), encoding="utf-8")


def write_hosts() -> None:
    """Bring the table of docs/hosts.md up to the code."""
    path = DOCS / "hosts.md"
    path.write_text(hosts_page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    # repositories that are no packages: their families are in the table, too
    sys.path.append(str(DOCS.parent / "tests" / "recreated"))
    write_methods()
    write_hosts()
    write_untracked()
