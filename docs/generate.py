"""Write what pages take from the code: options of methods, the list of methods, and the reference.

    python docs/generate.py

The options in docs/methods, the list in its README, and the numbers of methods and families in README and the guide are
in git, so that they can be read there, and tests compare them with the code. The pages of docs/reference and docs/api,
docs/changelog.md and docs/design/measures.md are not.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from typer.testing import CliRunner

import vitrim
from vitrim.checked import Checked
from vitrim.cli import COMMANDS, app, listing
from vitrim.core.host import Host
from vitrim.core.method import MethodConfig, StagedConfig
from vitrim.core.options import Options
from vitrim.core.plan import Purpose
from vitrim.core.registry import hosts, methods, selectors, vision_languages
from vitrim.core.selection import Selector
from vitrim.core.tables import missing_libraries, number_of_families
from vitrim.errors import VitrimError
from vitrim.training.objectives import learned
from vitrim.training.recipe import Recipe

DOCS = Path(__file__).parent
PACKAGE = Path(vitrim.__file__).parent
BEGIN, END = "<!-- from the code, by docs/generate.py -->", "<!-- end -->"
SHARED_PAGE = {"l1": "fixed_radial", "l2": "fixed_radial", "linf": "fixed_radial"}
"""Methods whose page has another name."""
KINDS = {
    "none": "Removes nothing",
    "prune": "Prunes",
    "merge": "Merges",
    "mixed": "Prunes and merges",
    "soft": "Mixes all tokens into every new one",
}
SOURCES = {
    "A": r"(?!.*(none|independent|TokenReduction|as re-implemented|in the PiToMe))",
    "S": ".*TokenReduction",
    "P": ".*in the PiToMe repository",
    "R": ".*independent|none - one reading",
}
"""Patterns of `source` in tests/golden/index.json, for each letter of the list of methods."""
VECTORS = {
    **dict.fromkeys(("l1", "l2", "linf"), ("heuristic",)),
    "dpc_knn": ("dpcknn",),
    "gtp": ("gtp_vit",),
    "bat": ("bat units",),
    "zero_tprune": ("zero_tprune units",),
    "dynamicvit": ("dynamicvit", "dyvit"),
}
"""Names of methods in that index, where they differ."""
ROOMS = (
    *("core", "methods", "hosts", "models", "data", "tasks", "measure", "plots", "training", "engines"),
    *("analysis", "tuning", "app"),
)
LOOSE = ("loading", "weights", "report", "errors")
"""Modules of no room."""


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    heads = list(heads)
    return "\n".join(f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |") for cells in (heads, *rows)).replace(
        "\n", f"\n|{'---|' * len(heads)}\n", 1
    )


# ---- pages of methods ------------------------------------------------------------------------------------------------


def pages() -> dict[str, list[str]]:
    """The methods of every page in docs/methods."""
    found: dict[str, list[str]] = {}
    for name in methods():
        found.setdefault(SHARED_PAGE.get(name, name), []).append(name)
    return found


def method_block(names: Sequence[str]) -> str:
    """The properties of the methods of a page, which differ in nothing but their pattern, and their options."""
    configs = [methods()[name] for name in names]
    classes = ", ".join(f"`vitrim.{config.__name__}`" for config in configs)
    text = wrapped(f"{classes}. {' '.join(_properties(configs[0]))}")
    return f"{text}\n\n{options_list(configs[0], MethodConfig)}".strip()


def _properties(config: type[MethodConfig]) -> Iterator[str]:
    needs = config().needs()
    needed = {
        "training": not config.traits.training_free,
        "a class token": needs.class_token,
        "the attention map": needs.attention_map,
    }
    yield f"{KINDS[config.kind]}."
    names = [what for what, is_so in needed.items() if is_so]
    yield f"Needs {' and '.join(names) or 'no training, class token or attention map'}."
    yield "How many tokens it leaves " + ("depends on the image." if config().is_adaptive() else "is fixed.")
    if config.tunable is not None:
        per_block = ", per block too" if config.tunable.per_layer else ""
        yield f"Searches move `{config.tunable.option}`{per_block}."
    if config.runtime:
        changing = ", ".join(f"`{field}`" for field in config.model_fields if field in config.runtime)
        yield f"`reduction.set` changes {changing}."
    loss = learned(config())
    if loss.options:
        where = loss.losses.__module__
        yield f"In a recipe, `objective` takes {', '.join(f'`{name}`' for name in loss.options)} (`{where}`)."


def options_list(config: type[Options], base: type[Options]) -> str:
    """The options that ``base`` has not, or has with another default; nothing if there are none."""
    schema = config.model_json_schema()["properties"]
    lines, staged = [], []
    for field, info in config.model_fields.items():
        if field in base.model_fields and info.default == base.model_fields[field].default:
            continue
        text = f"`{field}` = {_default(info.default)}"
        shared = StagedConfig.model_fields.get(field)
        if shared and info.description == shared.description:
            staged.append(text)
        elif field == "score":
            lines.append(f"* {text}: see [scores](README.md#scores)")
        else:
            values = _values(schema[field], info.default)
            lines.append(wrapped(f"* {text}{values and f' ({values})'}: {info.description}", "  "))
    if staged:
        lines.insert(0, f"* {', '.join(staged)}: see [stages](README.md#stages)")
    return "\n".join(lines)


def wrapped(text: str, indent: str = "") -> str:
    """The text in lines as wide as those of the pages."""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _default(value: Any) -> str:
    return "none" if value is None else f"`{_text(value)}`"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(_text, value))}]" if isinstance(value, tuple) else f"{value}"


def _values(schema: dict[str, Any], default: Any = None) -> str:
    """The values a JSON schema allows, in words; of a choice those beside the default.

    Example:
        >>> _values({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]})
        'integer >= 0'
    """
    if "anyOf" in schema:
        words = list(dict.fromkeys(_values(part, default) for part in schema["anyOf"] if part.get("type") != "null"))
        words = [word for word in words if "integer" not in word or word.replace("integer", "number") not in words]
        several = f"list: {' or '.join(words[:-1])}"
        return " or ".join("list of such" if word == several else word for word in words)
    if "enum" in schema:
        others = ", ".join(f"`{value}`" for value in schema["enum"] if value != default)
        return others if default is None else f"or {others}"
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema["type"] == "array":
        return f"list: {_values(schema.get('items') or schema['prefixItems'][0])}"
    if schema["type"] == "boolean":
        return ""
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " ".join([schema["type"], ", ".join(limits)]).strip()


def page_with_block(page: str, names: Sequence[str]) -> str:
    """The text of a page with the block of its methods as the code has them now."""
    return filled(page, method_block(names))


def filled(page: str, text: str) -> str:
    """The page with ``text`` between `BEGIN` and `END`."""
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{text}\n{END}", page, flags=re.DOTALL)


# ---- the list of methods ---------------------------------------------------------------------------------------------


def checked_against(name: str) -> str:
    """The letters of the reference vectors of a method: F, formulas by hand, if there are none."""
    index = json.loads((DOCS.parent / "tests" / "golden" / "index.json").read_text(encoding="utf-8"))["files"]
    called = VECTORS.get(name, (name,))
    sources = [
        row["source"]
        for row in index
        if row["method"].removesuffix(" (not official)") in called and not row["file"].startswith("analysis")
    ]
    return ", ".join(key for key, pattern in SOURCES.items() if any(re.match(pattern, one) for one in sources)) or "F"


def methods_list() -> str:
    """The list of all methods with their properties."""
    rows = []
    for name, config in methods().items():
        replaced = "score" in config.model_fields and config(score="column_mean").needs()
        needs = config().needs()
        class_token = (
            "or `score=column_mean`" if replaced and needs.class_token else "yes" if needs.class_token else "no"
        )
        full_map = "yes" if needs.attention_map else "with `column_mean`" if replaced else "no"
        counts = "by image" if config().is_adaptive() else "fixed"
        training = "no" if config.traits.training_free else "yes"
        kind = KINDS[config.kind].lower() if config.kind != "soft" else "mixes (soft)"
        page = f"[{name}]({SHARED_PAGE.get(name, name)}.md)"
        rows.append((page, kind, counts, training, class_token, full_map, checked_against(name)))
    heads = (
        "method",
        "what it does",
        "tokens left",
        "needs training",
        "needs a class token",
        "attention map",
        "checked",
    )
    return table(heads, rows)


# ---- numbers in the text ---------------------------------------------------------------------------------------------


def counted_pages() -> list[Path]:
    """README and the pages of the guide, whose numbers `with_counts` writes."""
    return [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


def with_counts(text: str) -> str:
    """The text with the numbers of the code before ``methods for``, ``model families``, ``methods need no training``.

    Example:
        >>> with_counts("for 1 model families") == f"for {number_of_families()} model families"
        True
    """
    reducing = [config for config in methods().values() if config.kind != "none"]
    counts = {
        "methods for": len(reducing),
        "methods need no training": sum(config.traits.training_free for config in reducing),
        "model families": number_of_families(),
    }
    for words, count in counts.items():
        text = re.sub(rf"\d+(?=\s{re.escape(words)})", str(count), text)
    return text


# ---- the reference ---------------------------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    yield "# Commands\n\nWhat `vitrim COMMAND -h` prints. [The command line](../cli.md) explains the common forms.\n"
    for name in COMMANDS:
        text = CliRunner().invoke(app, [name, "-h"], terminal_width=100).output
        yield f"## vitrim {name}\n\n```text\n{text.rstrip()}\n```\n"


def _hosts() -> Iterator[str]:
    """The host families, a table for each purpose.

    Raises:
        VitrimError: a library is missing: its families would be.
    """
    missing = missing_libraries()
    if missing:
        raise VitrimError(f"the table of hosts needs all libraries, and {', '.join(missing)} cannot be imported")
    yield (
        f"# Model families\n\nThe {number_of_families()} model families, as `vitrim list hosts` prints those of the "
        "installed libraries; [your model](../hosts.md) explains the rules.\n"
    )
    for purpose in get_args(Purpose):
        families = [host for host in _classes(hosts()) if host.purpose == purpose]
        rows = [(host.name, _classes(hosts())[host], ", ".join(host.heads), _meaning(host)) for host in families]
        yield f"## {purpose.capitalize()}\n\n" + table(("family", "model classes", "heads", "what it is"), rows) + "\n"
    rows = [
        (
            family.name,
            names,
            "-" if family.refused else "in cells" if family.in_cells else "one by one",
            _meaning(family),
        )
        for family, names in _classes(vision_languages()).items()
    ]
    yield "## Whole vision-language models, for `compact=True`\n"
    yield table(("family", "model classes", "tokens are removed", "connector"), rows) + "\n"


def _classes(known: Any) -> dict[type[Any], str]:
    """The names of the model classes of every family, families by name."""
    classes: dict[type[Any], list[str]] = {}
    for key, family in known.items():
        classes.setdefault(family, []).append(f"`{key.rpartition('.')[2]}`")
    return {family: ", ".join(names) for family, names in sorted(classes.items(), key=lambda each: each[0].name)}


def _meaning(family: type[Host] | type[Any]) -> str:
    """The docstring of a family in one line, its links seen from docs/reference."""
    text = " ".join((inspect.getdoc(family) or "").split())
    return re.sub(r"\]\((\w+(?:/\w+)?\.md)", r"](../\1", text)


def _selectors() -> Iterator[str]:
    yield "# Selectors\n\nWhat chooses image tokens for [a language model](../selection.md). All have these options:\n"
    yield options_list(Selector, Options) + "\n"
    for name, selector in selectors().items():
        text = " ".join((inspect.getdoc(selector) or "").partition("Example:")[0].replace("``", "`").split())
        yield f"## {name}\n\n{text}\n\n*{selector.paper or 'a baseline'}*; published with {selector.published_with}.\n"
        yield options_list(selector, Selector) + "\n"


def _recipes() -> Iterator[str]:
    yield "# Recipes\n\nThe shipped recipes of [training](../training.md), and every key that a recipe may have.\n"
    rows = [
        [row[key] for key in ("name", "model", "method", "epochs", "batch_size")]
        for row in listing.by_group(listing.recipes())
    ]
    yield table(("recipe", "model", "method", "epochs", "batch"), [(f"`{row[0]}`", *row[1:]) for row in rows]) + "\n"
    yield "## Keys\n"
    rows = []
    for prefix, section in ((None, Recipe), *_sections(Recipe)):
        for key, info in section.model_fields.items():
            if prefix is not None or not _section(info.annotation):
                default = "-" if info.is_required() or info.default in (None, "", ()) else _default(info.default)
                default = "-" if "PydanticUndefined" in default else default
                rows.append((f"`{key if prefix is None else f'{prefix}.{key}'}`", default, info.description or ""))
    yield table(("key", "default", "meaning"), rows) + "\n"


def _sections(recipe: type[Checked]) -> Iterator[tuple[str, type[Checked]]]:
    """The sections of a recipe by their keys."""
    for key, info in recipe.model_fields.items():
        if section := _section(info.annotation):
            yield key, section


def _section(annotation: Any) -> type[Checked] | None:
    """The class of a section in the type of a field: itself, or an entry of a tuple, or beside None."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, Checked):
            return each
    return None


def _presets() -> Iterator[str]:
    yield (
        "# Published settings\n\nWhat `vitrim list presets` prints: settings with the numbers that their papers print. "
        "Weights, images and machines differ: compare within a source.\n"
    )
    keys = ("model", "gflops", "top1", "source")
    yield (
        table(("method", *keys), [(f"`{row['name']}`", *(row[key] for key in keys)) for row in listing.presets()])
        + "\n"
    )


REFERENCE: dict[str, Callable[[], Iterator[str]]] = {
    "commands.md": _commands,
    "hosts.md": _hosts,
    "selectors.md": _selectors,
    "recipes.md": _recipes,
    "presets.md": _presets,
}
"""The pages of the reference by file name, and what writes their lines."""


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
        "# Measures of the design\n\nCounted on the code when this page was made, by `python docs/count.py`; "
        "with `--walks`\nit also follows what Python enters while it does one thing.\n\n"
        + count.table(count.rows(PACKAGE))
    )


def write_untracked() -> None:
    """Write docs/reference, docs/api, docs/changelog.md and docs/design/measures.md."""
    # repositories that are no packages: their families are in the table of hosts, too
    sys.path.append(str(DOCS.parent / "tests" / "recreated"))
    (DOCS / "design" / "measures.md").write_text(measures_page(), encoding="utf-8")
    reference = {name: "\n".join(lines()) for name, lines in REFERENCE.items()}
    for folder, made in (("api", api_pages()), ("reference", reference)):
        (DOCS / folder).mkdir(exist_ok=True)
        for name, text in made.items():
            (DOCS / folder / name).write_text(text, encoding="utf-8")
    log = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    (DOCS / "changelog.md").write_text(log, encoding="utf-8")


def write_tracked() -> None:
    """Bring the options and the list in docs/methods, and the numbers in the text, up to the code."""
    for path in counted_pages():
        path.write_text(with_counts(path.read_text(encoding="utf-8")), encoding="utf-8")
    for page, names in pages().items():
        path = DOCS / "methods" / f"{page}.md"
        path.write_text(page_with_block(path.read_text(encoding="utf-8"), names), encoding="utf-8")
    path = DOCS / "methods" / "README.md"
    path.write_text(filled(path.read_text(encoding="utf-8"), methods_list()), encoding="utf-8")


if __name__ == "__main__":
    write_tracked()
    write_untracked()
